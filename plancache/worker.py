"""A child process that runs plans on the device: what hangs or crashes there is ended, and costs nobody else anything.

It is given its cache and then one job after another as lines of JSON, and answers with events as lines of JSON. Its
start takes seconds, so it serves many jobs; it is started again after one that it did not survive.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from plancache.child import command
from plancache.errors import PlanCacheError, RunError

if TYPE_CHECKING:
    from plancache.cache import PlanCache

Event = dict[str, Any]
COMMAND = command("plancache.worker")
_START = 180.0  # seconds that a child may take until it is ready: imports from a cold disk, and the CUDA context
_PDEATHSIG = 1  # PR_SET_PDEATHSIG of prctl(2)
# By these a process is ended from outside (for want of memory too); a plan that crashes brings about others.
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class LostError(Exception):
    """A job did not come to its end: it hung, or its process died; `ended` says that somebody else ended that."""

    def __init__(self, hung: bool, detail: str, ended: bool = False) -> None:
        super().__init__(detail)
        self.hung = hung
        self.ended = ended


class Worker:
    """The parent's side; a context manager.

    Args:
        cache: whose plans are run.
        timeout: seconds between two events of a job.
    """

    def __init__(self, cache: PlanCache, timeout: float) -> None:
        self._timeout = timeout
        options = cache._layers.options
        self._setup = {
            "directory": str(cache.directory),
            "layers": [str(path) for path in cache._layers.under],
            "kind": options.kind,
            "key": None if options.key is None else options.key.hex(),
            "trusted": list(options.trusted),
            "wait": options.wait,
            "max_bytes": options.bounds.max_bytes,
            "read_only": cache.mode in ("read-only", "require-hit"),
        }
        self._child: subprocess.Popen[bytes] | None = None
        self._read = b""

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def ask(self, job: Event) -> Iterator[Event]:
        """The events of a job, up to `done` or `error`.

        Raises:
            LostError: it hung or died; the child was ended.
        """
        child = self._started()
        self._tell(child, job)
        while True:
            event = self._event(child, self._timeout)
            over = event["event"] in ("done", "error")
            if over and event.get("fault"):
                self.end()  # before whoever asked hears of it, since he may not come back
            yield event
            if over:
                return

    def end(self) -> None:
        """End the child, whatever it does."""
        child, self._child, self._read = self._child, None, b""
        if child is None:
            return
        child.kill()
        for stream in (child.stdin, child.stdout):
            if stream is not None:
                stream.close()
        # The driver takes its time to stop a kernel.
        with suppress(subprocess.TimeoutExpired):
            child.wait(timeout=30)

    def _started(self) -> subprocess.Popen[bytes]:
        if self._child is None or self._child.poll() is not None:
            self.end()
            self._child = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
            self._tell(self._child, self._setup)
            event = self._event(self._child, _START)
            if event["event"] == "error":
                self.end()
                raise RunError("the process that runs plans could not begin", found=event["text"])
        return self._child

    def _tell(self, child: subprocess.Popen[bytes], message: Any) -> None:
        assert child.stdin is not None
        try:
            child.stdin.write(json.dumps(message).encode() + b"\n")
        except OSError:
            raise self._lost(child) from None

    def _event(self, child: subprocess.Popen[bytes], timeout: float) -> Event:
        assert child.stdout is not None
        deadline = time.monotonic() + timeout
        while b"\n" not in self._read:
            ready, _, _ = select.select([child.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise self._lost(child, timeout)
            data = os.read(child.stdout.fileno(), 1 << 16)
            if not data:
                raise self._lost(child)
            self._read += data
        line, _, self._read = self._read.partition(b"\n")
        event: Event = json.loads(line)
        return event

    def _lost(self, child: subprocess.Popen[bytes], waited: float | None = None) -> LostError:
        """The child is ended: it said nothing for so many seconds, or (None) it died."""
        if waited is not None:
            self.end()
            return LostError(True, f"nothing came of it for {waited:.0f} s")
        try:
            code: int | None = child.wait(timeout=10)
        except subprocess.TimeoutExpired:
            code = None
        self.end()
        ended = code is not None and -code in _FROM_OUTSIDE
        how = "no exit code" if code is None else f"exit code {code}" if code >= 0 else _signal_name(-code)
        return LostError(False, f"its process ended with {how}", ended)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# ---------------------------------------------------------------- the child's side


def main() -> None:
    """Serve jobs from stdin. What libraries print goes to stderr."""
    _end_with_the_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears of Ctrl-C too, and ends this process
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    code = 1
    try:
        _serve(sys.stdin, lambda event: print(json.dumps(event), file=out, flush=True))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        # Not through the interpreter's end: plans that are torn down there have crashed before, and all is written.
        os._exit(code)


def _end_with_the_parent() -> None:
    """Let the kernel end this process with its parent: nobody else ends a plan that hangs the device.

    A thread that looks for the parent would not do: the frontend keeps Python's lock while cuDNN compiles or hangs. The
    parent is the thread that made this process.
    """
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _serve(jobs: IO[str], say: Callable[[Event], None]) -> None:
    setup = json.loads(jobs.readline())
    try:
        cache = _open(setup)
        from plancache.ondevice import Checker

        checker = Checker(cache)
    except Exception as error:
        say({"event": "error", "text": f"{type(error).__name__}: {error}"})
        return
    say({"event": "ready"})
    for line in jobs:
        job = json.loads(line)
        try:
            say({"event": "done", **_HANDLERS[job["job"]](checker, job, say)})
        except PlanCacheError as error:
            fault = bool(getattr(error, "fault", False))
            say({"event": "error", "text": str(error), "fault": fault, "kind": type(error).__name__})
        except Exception as error:
            say({"event": "error", "text": f"{type(error).__name__}: {error}"})


def _open(setup: Event) -> PlanCache:
    from plancache.cache import PlanCache
    from plancache.store.eviction import Bounds
    from plancache.store.layers import Layers, Options

    key = None if setup["key"] is None else bytes.fromhex(setup["key"])
    options = Options(setup["kind"], Bounds(setup["max_bytes"]), key, tuple(setup["trusted"]), setup["wait"])
    read_only = setup["read_only"]
    under = [Path(path) for path in setup["layers"]]
    layers = Layers(Path(setup["directory"]), options, read_only=read_only, under=under)
    return PlanCache(layers, "read-only" if read_only else "read-write")


def _check(checker: Any, job: Event, say: Callable[[Event], None]) -> Event:
    verdict: Event = checker.check(job["key"], job["route"], job["layer"], job["memory"], say)
    return verdict


def _tune(checker: Any, job: Event, say: Callable[[Event], None]) -> Event:
    table = checker.tune(job, say)
    return {"table": table.document(), "outcome": table.outcome, "detail": table.detail}


_HANDLERS: dict[str, Callable[[Any, Event, Callable[[Event], None]], Event]] = {"check": _check, "tune": _tune}


if __name__ == "__main__":
    main()
