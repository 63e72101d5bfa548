"""The bound on disk: what goes first, and how much.

`max_bytes` bounds the whole directory: database, journals, locks. The database never grows beyond what is left of it
after the journal's share, since deleted rows leave free pages behind that the next ones take.
"""

from __future__ import annotations

import heapq
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from plancache.store.connections import BUSY, Connection
from plancache.store.interface import Listed

DEFAULT_MAX_BYTES, LOWEST = 2 << 30, 2 << 20
_SMALL_FILES = 256 << 10  # locks, shared memory, the migration lock
_LOWEST = 1 << 20
# How much of the bound stays after an eviction: a batch at a time, so that a put at the cap costs what a put costs.
_KEPT = 0.9
# An environment that nobody has used for so long, while another one was, is dead: its plans go first.
DEAD_AFTER = 7 * 86400.0
# A use that lies further ahead than this was stamped before the clock jumped back (or is of no clock at all).
AHEAD = 60.0
# Seconds that a checkpoint waits for others.
_PATIENCE = 0.1
# Names of a database that was set aside, and of files that are linked to their places once they are made.
_ASIDE, _SCRATCH = "damaged-", (".plancache.sqlite3.", ".migrate.lock.", ".locks.", ".locks-tuning.", ".locks-filling.")
_STALE = 3600.0  # seconds after which they are a killed process's


@dataclass(frozen=True)
class Bounds:
    """The bound of one directory, and how it is shared between database and journal. Bytes."""

    max_bytes: int = DEFAULT_MAX_BYTES

    @cached_property
    def journal(self) -> int:
        """What the write-ahead log may take."""
        return min(64 << 20, self._usable // 4)

    @cached_property
    def journal_due(self) -> int:
        """From here on it is checkpointed: the rest is for what other processes write until then."""
        return self.journal // 2

    @cached_property
    def journal_full(self) -> int:
        """From here on nothing is written: the rest is for the transaction that comes to it."""
        return self.journal // 4 * 3

    @cached_property
    def database(self) -> int:
        """What the database may grow to."""
        return self._usable - self.journal

    @cached_property
    def _usable(self) -> int:
        return max(_LOWEST, self.max_bytes - _SMALL_FILES)


class Pages(NamedTuple):
    """What a database takes: the size of a page, how many there are, how many of them are free."""

    size: int
    total: int
    free: int

    @classmethod
    def of(cls, connection: sqlite3.Connection) -> Pages:
        """As the connection's transaction sees it."""
        return cls(*(_pragma(connection, name) for name in ("page_size", "page_count", "freelist_count")))

    def beyond(self, bounds: Bounds) -> int:
        """By how many bytes those in use are beyond the bound; below zero where they are not."""
        return self.size * (self.total - self.free) - bounds.database

    def surplus(self, bounds: Bounds) -> int:
        """How many free ones are to be given back: those beyond the bound, and all of them after much was removed."""
        beyond = max(self.total - bounds.database // self.size, 0)
        return self.free if self.free > self.total // 4 else min(self.free, beyond)


def lower(connection: Connection, bounds: Bounds, transaction: Callable[[], AbstractContextManager[None]]) -> None:
    """Where a bound was lowered: make room bit by bit, so that nobody is locked out and the journal stays short."""
    batch = _batch(bounds)
    connection.wait(BUSY)
    while (before := Pages.of(connection).beyond(bounds)) > 2 * batch:
        with transaction():
            make_room(connection, bounds, batch - before)
        checkpoint(connection)
        if Pages.of(connection).beyond(bounds) >= before:
            return  # nothing could be removed


def _batch(bounds: Bounds) -> int:
    # Deleting writes pages to the journal, too: a small part of it in one transaction.
    return min(int((1 - _KEPT) * bounds.database), bounds.journal // 8)


def make_room(connection: sqlite3.Connection, bounds: Bounds, need: int, key: str = "", environment: str = "") -> bool:
    """Within a transaction: delete rows until `need` more bytes fit; whether they do.

    Args:
        key: the key that is being stored, which is never deleted.
        environment: the one that the writer runs in, which is never dead.
    """
    if need > bounds.database // 2:
        return False
    batch = _batch(bounds)
    # Looked at again after each batch: small rows share pages, which are free only when the last one has gone.
    while (excess := need + (pages := Pages.of(connection)).beyond(bounds)) > 0:
        page = pages.size
        doomed, freed = [], 0
        for _, row, size in _least_useful_first(connection, key, environment):
            doomed.append((row,))
            freed += page * -(-size // page)
            if freed >= max(excess, batch):
                break
        if not doomed:
            return False
        connection.executemany("DELETE FROM plans WHERE rowid = ?", doomed)
    return True


def _least_useful_first(connection: sqlite3.Connection, key: str, environment: str) -> Iterator[tuple[float, int, int]]:
    """Rows of dead environments; those that were used in the future, by the clock; the others. Oldest use first."""
    now = time.time()
    dead: list[str] = []
    live: list[str] = []
    for name in _environments(connection):
        (used,) = connection.execute("SELECT max(used) FROM plans WHERE environment = ?", (name,)).fetchone()
        (dead if name != environment and used < now - DEAD_AFTER else live).append(name)
    for names, after, until in ((dead, 0.0, now), (live, now + AHEAD, float("inf")), (live, 0.0, now + AHEAD)):
        # By the index, and only as far as it is asked for: the whole table is not sorted.
        yield from heapq.merge(
            *(
                connection.execute(
                    "SELECT used, rowid, length(record) + 512 FROM plans"
                    " WHERE environment = ? AND used >= ? AND used < ? AND key != ? ORDER BY used",
                    (name, after, until, key),
                )
                for name in names
            )
        )


def _environments(connection: sqlite3.Connection) -> Iterator[str]:
    # By the index: DISTINCT would read all of it.
    (name,) = connection.execute("SELECT min(environment) FROM plans").fetchone()
    while name is not None:
        yield name
        (name,) = connection.execute("SELECT min(environment) FROM plans WHERE environment > ?", (name,)).fetchone()


def shrink(connection: sqlite3.Connection, pages: int, bounds: Bounds) -> None:
    """Within a transaction: give up to so many free pages back. The file gets shorter at the next checkpoint."""
    for _ in range(min(pages, bounds.journal // 4 // _pragma(connection, "page_size"))):
        # One by one: the pragma has to be stepped page by page, and Python steps what gives no columns only once.
        connection.execute("PRAGMA incremental_vacuum(1)")


def checkpoint(connection: Connection) -> None:
    """Move the journal into the database and cut it off; if others use it, another time."""
    # It keeps writers out while it waits for readers, so it must not wait for long: a reader may stand still. SQLite
    # itself would try eight times in this time, and find a writer each time where several write at once.
    connection.wait(5)
    deadline = time.monotonic() + _PATIENCE
    while connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] and time.monotonic() < deadline:
        time.sleep(0.001)


def settle(connection: sqlite3.Connection) -> None:
    """Move the journal into the database as far as nobody is in the way; where all of it went, it starts again."""
    connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()


def tidy_directory(directory: Path, database: int, bounds: Bounds) -> None:
    """Remove what killed processes left, and damaged databases that were set aside, as the one in use grows.

    Those go oldest first, as soon as all of them together are beyond the bound.
    """
    # By the names alone at first: there hardly ever is one, and this runs after every put.
    names = sorted(name for name in os.listdir(directory) if name.startswith((*_SCRATCH, _ASIDE)))  # noqa: PTH208
    excess = database - bounds.database
    found = []
    for file in map(directory.joinpath, names):
        with suppress(FileNotFoundError):
            status = file.stat()
            if not file.name.startswith(_ASIDE):
                if status.st_mtime < time.time() - _STALE:
                    file.rmdir() if file.is_dir() else file.unlink()
                continue
            found.append((file, status.st_size))
            excess += status.st_size
    for file, size in found:
        if excess > 0:
            file.unlink(missing_ok=True)
            excess -= size


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    return int(connection.execute(f"PRAGMA {name}").fetchone()[0])


def surplus(rows: list[Listed], max_bytes: int | None, older_than: float | None) -> list[Listed]:
    """The rows that pruning to these bounds would remove: unused since `older_than`, then the least recently used.

    Args:
        max_bytes: what all records together may take.
        older_than: seconds since 1970; rows that were last used before go.
    """
    oldest_first = sorted(rows, key=lambda listed: listed.used)
    doomed = [listed for listed in oldest_first if older_than is not None and listed.used < older_than]
    kept = oldest_first[len(doomed) :]
    if max_bytes is not None:
        total = sum(listed.stored for listed in kept)
        for listed in kept:
            if total <= max_bytes:
                break
            doomed.append(listed)
            total -= listed.stored
    return doomed
