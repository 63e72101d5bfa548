"""Faults of the store while it is being filled: tried once more, counted, and after a few in a row the end of it.

While a job runs a fault of the cache is a warning. A fill has no other purpose than to store.
"""

from __future__ import annotations

import errno
import math
import shutil
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from plancache.errors import StoreError

_T = TypeVar("_T")
READING, STORING = "read", "stored"
_IN_A_ROW = 3
_MOMENT = 0.2  # seconds until it is tried once more: somebody's lock, a network file system that was away
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_FULL = 13  # SQLITE_FULL
_MIB = 1 << 20


class Faults:
    """Faults in a row, those of reading and of storing each by themselves: a full disk can be read."""

    def __init__(self) -> None:
        self._counts = {READING: 0, STORING: 0}
        self._first: tuple[str, StoreError] | None = None
        self._lost = self._made = self._bytes = 0

    def __bool__(self) -> bool:
        """Whether there were too many in a row."""
        return self._first is not None

    @property
    def blind(self) -> bool:
        """Whether it is of no use to look anything up."""
        return self._counts[READING] >= _IN_A_ROW

    def attempt(self, what: str, call: Callable[[], _T]) -> _T:
        """Call; after a fault once more.

        Raises:
            StoreError: a fault that is still there.
        """
        try:
            try:
                found = call()
            except StoreError:
                if self:
                    raise
                time.sleep(_MOMENT)
                found = call()
        except StoreError as error:
            self._lost += 1
            self._counts[what] += 1
            if self._counts[what] >= _IN_A_ROW and self._first is None:
                self._first = what, error
            raise
        self._counts[what] = 0
        return found

    def made(self, size: int) -> None:
        """A record came back, of so many bytes: by these it is said how much room the rest takes."""
        self._made += 1
        self._bytes += size

    def text(self, directory: Path, left: int) -> str:
        """What was found and what to do, where `left` plans were not tried."""
        assert self._first is not None
        what, error = self._first
        parts = [f"{_IN_A_ROW} times in a row a plan could not be {what}: {error}".rstrip(".")]
        todo, free = "Mend that", _free(directory)
        # SQLite has other words for it, too, where it could not even begin.
        if is_space(error) or free < _MIB:
            # Twice, since what is written passes through a journal.
            need = 1 + 2 * (left + self._lost) * self._bytes // max(1, self._made) // _MIB
            todo = f"Free about {need} MiB there"
            if free < math.inf:
                parts.append(f"{free / _MIB:.1f} MiB are free on the disk of {directory}")
        elif error.damaged:
            todo = "Run `plancache verify --repair`, which keeps what is good"
        if left:
            parts.append(f"{left} plans were not tried")
        again = "then run the same again: it goes on where it was, and keeps what is stored"
        return f"{'; '.join(parts)}. {todo}, {again}."


def _free(directory: Path) -> float:
    try:
        return shutil.disk_usage(directory).free
    except OSError:
        return math.inf


def is_space(error: StoreError) -> bool:
    """Whether it is a disk that is full, or a quota."""
    cause = error.__cause__
    if isinstance(cause, sqlite3.Error):
        return getattr(cause, "sqlite_errorcode", 0) & 0xFF == _FULL
    return isinstance(cause, OSError) and cause.errno in _NO_SPACE
