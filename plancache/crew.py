"""Worker processes that can be lost one by one, and running tasks on any executor with few of them under way."""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import os
import resource
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from functools import partial
from multiprocessing import connection
from pathlib import Path
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")
_TRIES = 2
# An item that stands for none: there will be more, and none to begin with now.
WAIT = object()
# Files that a worker's pool keeps open here (8 pipes' ends and a process, measured), and those of all else.
_FILES, _USUAL = 10, 512
_WAIT = 0.1  # seconds until they are asked for again


class Crew(Executor):
    """Worker processes for building: each a pool of one, so that it is known whose work a lost one was doing.

    They are started by `spawn`, since cuDNN does not survive a fork, and only as many as there is work for. Ctrl-C is
    left to the parent; when the parent is gone, they end.
    """

    def __init__(self, jobs: int) -> None:
        self._pools: list[ProcessPoolExecutor | None] = [None] * jobs
        self._load: list[float] = [0] * jobs
        self._lock = threading.Lock()
        _allow_open_files(jobs * _FILES)

    def submit(self, fn: Callable[..., _T], /, *args: Any, **kwargs: Any) -> Future[_T]:
        """Give work to the worker that has the least to do."""
        while True:
            with self._lock:
                number = min(range(len(self._load)), key=self._load.__getitem__)
                self._load[number] += 1
            try:
                future = self._begun(number, fn, *args, **kwargs)
            except OSError:  # no more processes or open files: so many are enough
                self._pools[number], self._load[number] = None, math.inf
                if min(self._load) == math.inf:
                    raise
            else:
                future.add_done_callback(partial(self._freed, number))
                return future

    def _begun(self, number: int, fn: Callable[..., _T], /, *args: Any, **kwargs: Any) -> Future[_T]:
        try:
            return self._pool(number).submit(fn, *args, **kwargs)
        except BrokenProcessPool:  # it died at its last task; who gave it that has been told
            self._pools[number] = None
            return self._pool(number).submit(fn, *args, **kwargs)

    def _pool(self, number: int) -> ProcessPoolExecutor:
        pool = self._pools[number]
        if pool is None:
            context = multiprocessing.get_context("spawn")
            pool = ProcessPoolExecutor(1, mp_context=context, initializer=_start)
            self._pools[number] = pool
        return pool

    def _freed(self, number: int, _: Future[Any]) -> None:
        with self._lock:
            self._load[number] -= 1

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the workers, each when it is done with what it is doing; without `wait`, now."""
        for pool in self._pools:
            if pool is not None:
                # What a worker would still come to is lost without one who waits, and the interpreter waits for it at
                # its end: interrupted once more there, for ever. (Python 3.14 has kill_workers for this.)
                workers = [] if wait else list((getattr(pool, "_processes", None) or {}).values())
                pool.shutdown(wait=False, cancel_futures=cancel_futures)
                for worker in workers:
                    worker.kill()
        for pool in self._pools:
            if pool is not None and wait:
                pool.shutdown(wait=True)


def _allow_open_files(more: int) -> None:
    """Many systems let a process open 1,024 files, which is too few for 128 workers, and let it ask for more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _USUAL + more
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _start() -> None:
    """In a new worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        # A pool's workers outlive a killed parent: they hold both ends of the pipe that they wait at.
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    connection.wait([sentinel])
    os._exit(1)


def usable_cpus() -> int:
    """How many processors this process may use: by its affinity mask, and by its container's quota."""
    count = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        count = min(count, math.ceil(int(quota) / int(period)))  # "max" is no number
    return max(1, count)


class Job(Generic[_T]):
    """A task, what its answer belongs to, and what it is taken apart into when its worker was lost."""

    def __init__(self, task: Any, about: _T, parts: Sequence[Job[_T]] = ()) -> None:
        self.task = task
        self.about = about
        self.parts = parts


class Lost(Exception):
    """A task's worker was lost, twice; the text says how."""


def completed(
    items: Iterable[Any], call: Callable[[Any], Any], executor: Executor, window: int
) -> Generator[tuple[Any, Any], None, None]:
    """Run the jobs among `items`, no more than `window` at a time; gives (job, answer) as they are answered.

    Items that are no jobs come out again with None, but for `WAIT`. A job whose worker is lost is run once more, in its
    parts if it has some; then, or where the executor takes no more work, its answer is a `Lost`. Items are taken only
    as there is room for them.
    """
    running = _Running(call, executor)
    try:
        yield from _completed(items, running, window)
    finally:  # interrupted: what nobody has begun with is taken back
        running.cancel()


def _completed(items: Iterable[Any], running: _Running, window: int) -> Iterator[tuple[Any, Any]]:
    source, more = iter(items), True
    while more or len(running) or running.again:
        if len(running) >= window or not (more or running.again):
            yield from running.take(None)
        elif running.again:
            yield from running.start(*running.again.popleft())
        else:
            item = next(source, source)
            more = item is not source
            if isinstance(item, Job):
                yield from running.start(item, 1)
            elif item is WAIT:
                if not len(running):
                    time.sleep(_WAIT)
                yield from running.take(_WAIT)
                continue
            elif more:
                yield item, None
            yield from running.take(0)


class _Running:
    """The jobs under way, and those that are to be run again."""

    def __init__(self, call: Callable[[Any], Any], executor: Executor) -> None:
        self._call = call
        self._executor = executor
        self._pending: dict[Future[Any], tuple[Job[Any], int]] = {}
        self.again: deque[tuple[Job[Any], int]] = deque()

    def __len__(self) -> int:
        return len(self._pending)

    def cancel(self) -> None:
        """Take back what has not begun."""
        for future in self._pending:
            future.cancel()

    def start(self, job: Job[Any], attempt: int) -> Iterator[tuple[Job[Any], Lost]]:
        """Begin with a job."""
        try:
            self._pending[self._executor.submit(self._call, job.task)] = (job, attempt)
        except Exception as error:  # broken, or shut down by somebody
            yield job, Lost(f"the executor takes no more work: {type(error).__name__}: {str(error).strip()[:500]}")

    def take(self, timeout: float | None) -> Iterator[tuple[Job[Any], Any]]:
        """What has been answered; without a timeout, at least one."""
        if not self._pending:
            return
        done, _ = wait(self._pending, timeout, return_when=FIRST_COMPLETED)
        for future in done:
            job, attempt = self._pending.pop(future)
            try:
                answer = future.result()
            except (Exception, asyncio.CancelledError) as error:
                if attempt < _TRIES:
                    self.again.extend((part, attempt + 1) for part in job.parts or (job,))
                else:
                    yield job, _lost(error)
            else:
                yield job, answer


def _lost(error: BaseException) -> Lost:
    if isinstance(error, BrokenProcessPool):
        return Lost(
            "the worker process that built it died, twice (out of memory? a crash of cuDNN? In a script, warm() must "
            "be called under `if __name__ == '__main__':`)"
        )
    return Lost(f"its worker was lost: {type(error).__name__}: {str(error).strip()[:500]}")
