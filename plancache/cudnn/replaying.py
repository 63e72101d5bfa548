"""The route `replay`: a plan built with a kernel cache, and first replayed in a process that may die of it.

cuDNN does not check a kernel document: 9.19 kills the process (SIGSEGV) in which a layer norm or an RMS norm that was
built with a kernel cache is replayed, on a GPU and without one. And it may compile all the same, which takes as long as
to build natively and gives a slower plan: cuDNN before 9.27 always does (9.15 to 9.26 measured), 9.27 and 9.28 do with
norms (their document holds one kernel more after the replay). So what is to be stored for this route is replayed in a
child process before, one graph of a kind: the same operations and engine, with the same libraries and device.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from typing import Any

import msgpack

from plancache import child
from plancache.cudnn import device as devices
from plancache.cudnn import frontend, kernel_cache, libraries, requests
from plancache.cudnn.kernel_cache import Tracked
from plancache.cudnn.plans import (
    BuiltPlan,
    Request,
    Route,
    UnkeptPlanError,
    declared_tensors,
    described,
    replay,
    run_build,
    taken,
)
from plancache.cudnn.running import Runner
from plancache.errors import RunError
from plancache.keys import digest

# The first cuDNN that takes the kernels of a graph without dynamic shapes from a document.
FIRST_REPLAY = 92700
_SECONDS = 120.0
_GOOD = b"replayed"
_lock = threading.Lock()
_verdicts: dict[str, str] = {}


def build_replay(wanted: Request) -> BuiltPlan:
    """A plan for the route `replay`: built with a kernel cache, whose document and the plan's recipe are kept.

    The request's graph is left alone; a twin, made from its document, is built.

    Raises:
        UnkeptPlanError: the plan cannot be kept, or not be replayed.
        RunError: nothing could be found out about that.
        And whatever the frontend raises: cudnnGraphNotSupportedError for a graph that has no dynamic-shape engine.
    """
    if libraries.backend_version() < FIRST_REPLAY:
        raise UnkeptPlanError("unloadable", "cuDNN before 9.27 compiles again in each replay")
    native = wanted.route is Route.NATIVE
    place = {"handle": frontend.handle_of(wanted.graph)} if native else {"device": wanted.device}
    twin = requests.twin(wanted, **place)
    tracked = Tracked(None, 0)
    frontend.attach_kernel_cache(twin, tracked.native)
    before = declared_tensors(twin)
    started = time.perf_counter()
    run_build(twin, wanted.choice)
    seconds = time.perf_counter() - started
    document = tracked.document()
    parts = None if document is None else kernel_cache.split(document)
    if document is None or parts is None or not parts.kernels:
        raise UnkeptPlanError("unreadable", "the kernel cache is empty after the build, or of an unknown schema")
    built = replace(taken(twin, before, seconds), blob=document.encode())
    _prove(wanted, built)
    return built


def _prove(wanted: Request, plan: BuiltPlan) -> None:
    operations = [node["type"] for node in wanted.key.documents["graph"]["nodes"]]
    engine = plan.plans.chosen.engine
    kind = digest([wanted.key.device, wanted.key.environment, wanted.route, engine, operations])
    with _lock:
        if kind not in _verdicts:
            _verdicts[kind] = _tried(wanted, plan)
    if _verdicts[kind]:
        raise UnkeptPlanError("unloadable", _verdicts[kind])


def _tried(wanted: Request, plan: BuiltPlan) -> str:
    """What went wrong; nothing, if it went well."""
    native = wanted.route is Route.NATIVE
    message = {
        "documents": {name: wanted.key.documents[name] for name in ("graph", "build")},
        "device": None if native else wanted.device.to_json(),
        "ordinal": frontend.handle_of(wanted.graph).device.ordinal if native else None,
        "plan": described(plan),
        "document": plan.blob,
    }
    try:
        done = subprocess.run(
            child.command("plancache.cudnn.replaying"),
            input=msgpack.packb(message),
            capture_output=True,
            timeout=_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        # Nothing is known, and nothing is remembered.
        raise RunError("a replay could not be tried", found=str(error)) from error
    if done.stdout == _GOOD:
        return ""
    if done.returncode < 0:
        return f"it kills the process (signal {-done.returncode})"
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else f"exit code {done.returncode}"


def main() -> None:
    """The child's side."""
    message: dict[str, Any] = msgpack.unpackb(sys.stdin.buffer.read(), strict_map_key=False)
    place: dict[str, Any]
    if message["device"] is None:
        place = {"handle": Runner(message["ordinal"]).handle}
    else:
        place = {"device": devices.device(message["device"])}
    tracked = replay(requests.request(message["documents"], **place), message["plan"], message["document"])
    if _kernels(tracked.document()) > _kernels(message["document"].decode()):
        print("its kernels are compiled again each time", file=sys.stderr, flush=True)
        os._exit(1)
    sys.stdout.buffer.write(_GOOD)
    sys.stdout.flush()
    os._exit(0)  # not through the interpreter's end: plans that are torn down there have crashed


def _kernels(document: str | None) -> int:
    parts = None if document is None else kernel_cache.split(document)
    return 0 if parts is None else len(parts.kernels)


if __name__ == "__main__":
    main()
