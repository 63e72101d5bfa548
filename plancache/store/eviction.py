"""The bound on disk: what goes first, and how much.

`max_bytes` bounds the whole directory: database, journals, locks. The database never grows beyond what is left of it
after the journal's share, since deleted rows leave free pages behind that the next ones take.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass

from plancache.store.interface import Listed

DEFAULT_MAX_BYTES = 2 << 30
_SMALL_FILES = 256 << 10  # locks, shared memory, the migration lock
_LOWEST = 1 << 20
# How much of the bound stays after an eviction: a batch at a time, so that a put at the cap costs what a put costs.
_KEPT = 0.9
# An environment that nobody has used for so long, while another one was, is dead: its plans go first.
DEAD_AFTER = 7 * 86400.0


@dataclass(frozen=True)
class Bounds:
    """The bound of one directory, and how it is shared between database and journal. Bytes."""

    max_bytes: int = DEFAULT_MAX_BYTES

    @property
    def journal(self) -> int:
        """What the write-ahead log may grow to before it is checkpointed."""
        return min(64 << 20, self._usable // 4)

    @property
    def database(self) -> int:
        """What the database may grow to."""
        return self._usable - self.journal

    @property
    def _usable(self) -> int:
        return max(_LOWEST, self.max_bytes - _SMALL_FILES)


def make_room(connection: sqlite3.Connection, bounds: Bounds, need: int, key: str, environment: str) -> bool:
    """Within a transaction: delete rows until `need` more bytes fit; whether they do.

    Args:
        key: the key that is being stored, which is never deleted.
        environment: the one that the writer runs in, which is never dead.
    """
    page = _pragma(connection, "page_size")
    live = page * (_pragma(connection, "page_count") - _pragma(connection, "freelist_count"))
    if need > bounds.database // 2:
        return False
    if live + need <= bounds.database:
        return True
    excess = live + need - int(_KEPT * bounds.database)
    doomed = []
    for row, size in _least_useful_first(connection, key, environment):
        if excess <= 0:
            break
        doomed.append((row,))
        excess -= page * -(-size // page)
    connection.executemany("DELETE FROM plans WHERE rowid = ?", doomed)
    return True


def _least_useful_first(connection: sqlite3.Connection, key: str, environment: str) -> Iterator[tuple[int, int]]:
    last_use = connection.execute("SELECT environment, max(used) FROM plans GROUP BY environment").fetchall()
    now = time.time()
    dead = [name for name, used in last_use if name != environment and used < now - DEAD_AFTER]
    marks = ", ".join("?" * len(dead))
    order = f"environment IN ({marks}) DESC, used" if dead else "used"
    yield from connection.execute(
        f"SELECT rowid, length(record) + 512 FROM plans WHERE key != ? ORDER BY {order}", (key, *dead)
    )


def shrink(connection: sqlite3.Connection, bounds: Bounds) -> None:
    """Give free pages back to the file system where the database is larger than its bound."""
    page = _pragma(connection, "page_size")
    surplus = page * _pragma(connection, "page_count") - bounds.database
    if surplus > 0:
        connection.execute(f"PRAGMA incremental_vacuum({-(-surplus // page)})").fetchall()


def checkpoint(connection: sqlite3.Connection) -> None:
    """Move the journal into the database and cut it off; if others use it, another time."""
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


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
