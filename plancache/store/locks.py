"""Single flight: of all processes that miss one key, one builds.

A fixed set of lock files, chosen by the key's hash and never unlinked: unlinking one would split its waiters over
two inodes. The kernel owns the locks, so that a killed holder's is free at once; filelock lets go of what a forked
child inherits. filelock takes 60 ms to import, so it is imported on a miss only.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from plancache.errors import BusyError, StoreError
from plancache.store.directory import Access

if TYPE_CHECKING:
    from filelock import BaseFileLock

FILES = 1024
# Seconds between two looks of a waiter; each look is one read of the store and one try of the lock.
_POLL = 0.02
# Seconds that a new lock file's mode may be on its way.
_MODES = 0.2


class SingleFlight:
    """One set of locks of a cache directory: `locks` for building, `locks-tuning`, or `locks-filling`.

    They are sets of their own, since whoever wants a plan must not wait for somebody who tunes it, nor for one who
    fills the cache and has many plans under way.
    """

    def __init__(
        self, directory: Path, access: Access, wait: float, tuning: bool = False, filling: bool = False
    ) -> None:
        self.directory = directory / ("locks-tuning" if tuning else "locks-filling" if filling else "locks")
        self.access = access
        self.wait = wait
        self._late = (
            "another process is tuning this graph"
            if tuning
            else "another process has been building the same plan for too long; building it here too"
        )

    @contextmanager
    def turn(self, key: str, stored: Callable[[], bool], wait: float | None = None) -> Iterator[bool]:
        """Wait for one's turn to build `key`; gives whether it is one's turn, or somebody else has built it.

        Args:
            key: the key's hash, in hex.
            stored: asked while waiting; once it says yes there is nothing left to wait for.
            wait: seconds; None is what the cache was opened with.

        Raises:
            BusyError: the wait was over; the error says who held the lock.
            StoreError: this file system cannot lock.
        """
        path = self.directory / f"{slot(key):03x}.lock"
        lock = self._lock(path)
        mine = self._acquire(lock, path, stored, self.wait if wait is None else wait)
        try:
            yield mine
        finally:
            if mine:
                _release(lock, path)

    def claim(self, number: int) -> Callable[[], None] | None:
        """Take the lock of a slot if nobody holds it, without waiting; gives what releases it, else None.

        Raises:
            StoreError: this file system cannot lock.
        """
        import filelock

        path = self.directory / f"{number:03x}.lock"
        lock, begun = self._lock(path), time.monotonic()
        while True:
            try:
                lock.acquire(blocking=False)
            except filelock.Timeout:
                return None
            except PermissionError as error:  # see `_acquire`
                if time.monotonic() > begun + _MODES:
                    raise _cannot_lock(path, error) from error
                time.sleep(_POLL)
            except (OSError, NotImplementedError) as error:
                raise _cannot_lock(path, error) from error
            else:
                return lambda: _release(lock, path)

    def _lock(self, path: Path) -> BaseFileLock:
        import filelock

        try:
            self.access.make(self.directory)
            return filelock.FileLock(
                path,
                mode=self.access.file_mode,
                thread_local=False,
                fallback_to_soft=False,
                preserve_lock_file=True,
                on_acquired=_sign,
            )
        except OSError as error:
            raise _cannot_lock(path, error) from error

    def _acquire(self, lock: BaseFileLock, path: Path, stored: Callable[[], bool], wait: float) -> bool:
        import filelock

        begun = time.monotonic()
        deadline = begun + wait
        while True:
            try:
                lock.acquire(blocking=False)
                return True
            except filelock.Timeout:
                pass
            except PermissionError as error:
                # Another user has just made the lock file, and gives it its mode a moment later (160 of 9,000 turns).
                if time.monotonic() > begun + _MODES:
                    raise _cannot_lock(path, error) from error
            except (OSError, NotImplementedError) as error:
                raise _cannot_lock(path, error) from error
            if stored():
                return False
            if time.monotonic() >= deadline:
                raise BusyError(
                    self._late,
                    path=path,
                    found=f"held for {wait:.0f} s by {holder(path)}",
                    expected="the plan, or the lock",
                )
            time.sleep(_POLL)


def slot(key: str) -> int:
    """Which of the lock files is a key's."""
    return int(key[:8], 16) % FILES


def holder(path: Path) -> str:
    """Who holds a lock file, as its holder signed it."""
    try:
        return path.read_text().strip() or "an unknown process"
    except (OSError, UnicodeDecodeError):
        return "an unknown process"


def _sign(descriptor: int) -> None:
    text = f"process {os.getpid()} on {os.uname().nodename} since {time.strftime('%Y-%m-%d %H:%M:%S')}\n".encode()
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text, 0)
    except OSError:
        pass  # a full disk: the lock holds all the same, and says nothing of its holder


def _release(lock: BaseFileLock, path: Path) -> None:
    _unsign(lock, path)
    lock.release()


def _unsign(lock: BaseFileLock, path: Path) -> None:
    """Take the signature off: it is true no longer, and 1,024 of them would be 4 MB on disk, a block each."""
    if lock.is_locked:  # not in a child that was forked meanwhile: it is its parent's
        with suppress(OSError):
            os.truncate(path, 0)


def _cannot_lock(path: Path, error: Exception) -> StoreError:
    return StoreError(
        "this file system cannot lock, so several processes may build the same plan",
        path=path,
        found=f"{type(error).__name__}: {error}",
    )
