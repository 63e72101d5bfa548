"""Plan rows in SQLite."""

from __future__ import annotations

import hashlib
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from typing import Any

from plancache.errors import StoreError
from plancache.store import eviction, tallies
from plancache.store.connections import BUSY, Connection
from plancache.store.database import FILE, Database
from plancache.store.directory import Access
from plancache.store.eviction import Bounds, Pages
from plancache.store.interface import Listed, Row, Store
from plancache.store.tallies import Counting, Tally

_NAMES = tuple(field.name for field in fields(Row))
_COLUMNS = ", ".join(_NAMES)
_values = attrgetter(*_NAMES)  # dataclasses.astuple copies deeply, which takes as long as a put
_GET = "SELECT record FROM plans WHERE id = ? AND key = ? AND route = ?"
_ROWS = f"SELECT {_COLUMNS}, used, hits, length(record) FROM plans"
_FAMILY = "id BETWEEN ? AND ?"
_NEWEST_FIRST = " ORDER BY created DESC, key, route"
# A stamp that is older than what another process has stamped changes nothing; one from the future is put right.
_STAMP = "UPDATE plans SET used = iif(used > ?, ?, max(used, ?)), hits = hits + ? WHERE id = ?"
# Seconds that a writer waits for its turn, and between two tries. SQLite itself tries ten times a second: where
# several processes write all the time, one of eight found the database locked each time for two seconds (measured).
_TURN, _POLL = 2.0, 0.002
_BUSY, _FULL = 5, 13  # SQLITE_BUSY, SQLITE_FULL
_PAGE = 8192  # of the database, as it is made
# One statement, so that of two writers each sees the other's row whole. The condition is Row.gives_way_to.
_PUT = f"""
INSERT INTO plans (id, {_COLUMNS}, used, hits, record) VALUES (?, {", ".join("?" * len(_NAMES))}, ?, 0, ?)
ON CONFLICT (id) DO UPDATE SET
    {", ".join(f"{name} = excluded.{name}" for name in _NAMES)}, used = excluded.used, record = excluded.record
WHERE plans.record IS ?
   OR plans.key != excluded.key OR plans.route != excluded.route -- another one's by chance: this is a cache
   OR (excluded.driver <= plans.driver AND excluded.frontend <= plans.frontend
       AND (excluded.driver < plans.driver OR excluded.frontend < plans.frontend))
"""
_SPLIT = 64 << 10  # what a change may write beside the record: pages of indexes that split
# After so many puts everything is looked after, and not only the journal: each put keeps the bound by itself.
_THOROUGH = 16


class SqliteStore(Store):
    """The store on local file systems, and in bundles. See `Store` for what is promised."""

    def __init__(self, file: Path, access: Access, bounds: Bounds | None = None, bundle: bool = False) -> None:
        self.database = Database(file, access, bundle)
        self.read_only = access.read_only or bundle
        self.bounds = bounds or Bounds()
        self.counting = Counting()
        self._used: dict[tuple[str, str], list[float]] = {}
        self._database_file, self._journal_file = str(file), f"{file}-wal"
        self._maintained = 0
        self._written = 0  # bytes since this process last settled the journal

    @classmethod
    def at(cls, directory: Path, access: Access, bounds: Bounds | None = None) -> SqliteStore:
        """The store of a cache directory."""
        return cls(directory / FILE, access, bounds)

    def get(self, key: str, route: str, use: bool = True) -> bytes | None:
        if self.database.absent:
            return None
        with self.database.use() as connection:
            connection.wait(BUSY)
            found = connection.execute(_GET, (_number(key, route), key, route)).fetchone()
        if found is None:
            return None
        if use and not self.read_only:
            stamp = self._used.setdefault((key, route), [0.0, 0])
            stamp[0], stamp[1] = time.time(), stamp[1] + 1
        # Whatever somebody has put there: what is no record is found out by its digest.
        return found[0] if isinstance(found[0], bytes) else str(found[0]).encode()

    def put(self, row: Row, record: bytes, replaces: bytes | None = None) -> bool:
        self._may_write()
        self.database.check_identity()
        try:
            return self._put(row, record, replaces)
        except StoreError as error:
            if not error.damaged:
                raise
        self.database.set_aside()
        return self._put(row, record, replaces)

    def _put(self, row: Row, record: bytes, replaces: bytes | None) -> bool:
        number = _number(row.key, row.route)
        values = (number, *_values(row), time.time(), record, replaces if replaces is not None else b"")
        need = len(record) + _SPLIT
        if _size(self._database_file) > self.bounds.database + self.bounds.journal:
            with self.database.use() as connection:
                eviction.lower(connection, self.bounds, lambda: _transaction(connection))
        with self.database.use() as connection, self._journaled(connection) as fits:
            if not fits:
                return False
            # Only near the bound: together the two files hold no less than what the database has in use.
            if _size(self._database_file) + self._journal() + need > self.bounds.database and not eviction.make_room(
                connection, self.bounds, need, row.key, row.environment
            ):
                return False
            self._write_stamps(connection)
            self._written += len(record)
            return connection.execute(_PUT, values).rowcount > 0

    def discard(self, key: str, route: str, record: bytes | None = None) -> bool:
        self._may_write()
        same, values = ("", ()) if record is None else (" AND record IS ?", (record,))
        # By id, as it is filed; else by what its row says, which somebody may have changed.
        where = {
            "id = ? AND key = ? AND route = ?": (_number(key, route), key, route),
            "key = ? AND route = ?": (key, route),
        }
        with self.database.use() as connection:
            try:
                with self._journaled(connection):
                    gone = self._delete(connection, where, same, values)
                self._written += _SPLIT
                # Now, while there is room: on a full disk the journal must not become what takes the last of it.
                self._tidy_journal(connection)
                return gone
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != _FULL:
                    raise
            # Removing records is how a full disk is helped: what the journal takes of it is given back first.
            eviction.checkpoint(connection)
            with _transaction(connection):
                return self._delete(connection, where, same, values)

    def _delete(self, connection: sqlite3.Connection, where: Mapping[str, Any], same: str, values: Any) -> bool:
        return any(
            connection.execute(f"DELETE FROM plans WHERE {condition}{same}", (*row, *values)).rowcount > 0
            for condition, row in where.items()
        )

    def keys(self, end: str) -> list[tuple[str, str]]:
        if self.database.absent:
            return []
        with self.database.use() as connection:
            connection.wait(BUSY)
            found = connection.execute(f"SELECT key, route FROM plans WHERE {_FAMILY}", _family(end)).fetchall()
        return [(key, route) for key, route in found if key.endswith(end)]

    def rows(self, **equal: str) -> Iterator[Listed]:
        unknown = set(equal) - set(_NAMES)
        if unknown:
            raise TypeError(f"rows have no column {', '.join(sorted(unknown))}")
        where, values = " AND ".join(f"{name} = ?" for name in equal), list[Any](equal.values())
        if "key" in equal:  # by the table's own order, instead of looking through all of it
            where, values = f"{where} AND {_FAMILY}", [*values, *_family(equal["key"])]
        if self.database.absent:
            return
        with self.database.use() as connection:
            statement = _ROWS + (f" WHERE {where}" if where else "") + _NEWEST_FIRST
            # All at once: a statement that somebody iterates over keeps every checkpoint off.
            connection.wait(BUSY)
            found = _fetched(connection, statement, values)
        for *values, used, hits, stored in found:
            yield Listed(Row(*values), used, hits, stored)

    def salvage(self) -> Iterator[tuple[str, str, Row | None, bytes]]:
        statement, found = f"SELECT {_COLUMNS}, record FROM plans WHERE rowid = ?", None
        with self.database.use() as connection:
            connection.wait(BUSY)
            numbers = self._numbers(connection)
        for number in numbers:
            # Row by row: a damaged page costs the rows on it, and not those behind it.
            with self.database.use() as connection, suppress(sqlite3.DatabaseError):
                found = next(iter(_fetched(connection, statement, (number,))), None)
            if found is not None:
                record = found[-1] if isinstance(found[-1], bytes) else b""
                yield str(found[0]), str(found[1]), Row(*found[:-1]), record
            found = None

    def _numbers(self, connection: sqlite3.Connection) -> Iterable[int]:
        try:
            return [number for (number,) in connection.execute("SELECT id FROM plans NOT INDEXED").fetchall()]
        except sqlite3.DatabaseError:
            # The index lies on other pages than the table, and knows the rows too. The condition makes SQLite read it.
            known = []
            with suppress(sqlite3.DatabaseError):
                for (number,) in connection.execute(
                    "SELECT id FROM plans INDEXED BY plans_by_use WHERE environment >= ''"
                ):
                    known.append(number)
            if not known:
                raise
            return sorted(known)

    def maintain(self, thorough: bool = True) -> None:
        if self.read_only or self.database.absent:
            return
        # The first time, too: a process may store one plan only, and be the one whose bound was lowered.
        turn, self._maintained = self._maintained, self._maintained + 1
        if not thorough and turn % _THOROUGH:
            with self.database.use() as connection:
                self._tidy_journal(connection)
            return
        with self.database.use() as connection:
            self._tidy_journal(connection)
            connection.wait(BUSY)
            eviction.lower(connection, self.bounds, lambda: _transaction(connection))
            pages = Pages.of(connection)
            if pages.beyond(self.bounds) > 0:  # it was lowered, and no put has made room yet
                with _transaction(connection):
                    eviction.make_room(connection, self.bounds, 0)
                self._tidy_journal(connection)
                pages = Pages.of(connection)
            while (surplus := pages.surplus(self.bounds)) and self._journal() <= self.bounds.journal_full:
                with _transaction(connection):
                    eviction.shrink(connection, surplus, self.bounds)
                eviction.checkpoint(connection)  # only that makes the file shorter
                before, pages = pages, Pages.of(connection)
                if pages.total >= before.total:
                    break
            if tallies.too_many(connection):
                with _transaction(connection):
                    tallies.shorten(connection)
            eviction.tidy_directory(self.database.file.parent, pages.size * pages.total, self.bounds)

    def tallies(self) -> list[Tally]:
        if self.database.absent:
            return []
        with self.database.use() as connection:
            connection.wait(BUSY)
            return tallies.read(connection)

    def forget(self) -> None:
        self._used.clear()
        self.counting.clear()

    def flush(self) -> None:
        # What layers have served is not counted before something is stored: no job makes a database for that.
        if (self._used or self.counting) and not self.read_only and not self.database.absent:
            with suppress(StoreError), self.database.use() as connection:
                while self._used or self.counting:
                    with self._journaled(connection) as fits:
                        if fits:
                            self._write_stamps(connection)
                        else:
                            self.forget()
                # Where nobody stores anything, nobody else would ever look after the journal.
                self._tidy_journal(connection)

    def close(self) -> None:
        self.flush()
        self.database.close()

    def _write_stamps(self, connection: sqlite3.Connection) -> None:
        """What was counted, and some of the stamps: each may write a page, and all of them more than the journal takes.

        A stamp on every get would take two readers from 1.9 times one reader's speed to 0.8 (measured).
        """
        now, stamps = time.time(), []
        with suppress(KeyError):  # there are no more of them
            for _ in range(max(1, self.bounds.journal // 8 // _PAGE)):
                row, (when, hits) = self._used.popitem()
                used = min(when, now)
                stamps.append((now, used, used, hits, _number(*row)))
        if stamps:
            connection.executemany(_STAMP, stamps)
        tallies.write(connection, self.counting)

    @contextmanager
    def _journaled(self, connection: Connection) -> Iterator[bool]:
        """A transaction; gives whether the journal takes it without growing beyond its bound.

        It nearly always does, since each put is followed by `maintain`, outside the build lock. Where many processes
        write at once, or one was killed in between, it is checkpointed here; it cannot be while a reader stands still.
        """
        with _transaction(connection):
            fits = self._journal() <= self.bounds.journal_full
            if fits:
                yield True
                return
        eviction.checkpoint(connection)
        with _transaction(connection):
            yield self._journal() <= self.bounds.journal_full

    def _tidy_journal(self, connection: Connection) -> None:
        if self._journal() > self.bounds.journal_due:
            eviction.checkpoint(connection)
        elif self._written > self.bounds.journal_due // 4:
            # Early enough it needs no cutting off, and is written over from its start: that takes less than making the
            # file longer (a put of 64 KB 190 µs against 240, measured). Every 8 MB, since it waits for the disk.
            eviction.settle(connection)
        else:
            return
        self._written = 0

    def _journal(self) -> int:
        return _size(self._journal_file)

    def _may_write(self) -> None:
        if self.read_only:
            raise StoreError("the cache may not be written", path=self.database.file, found="a read-only cache")


def _fetched(connection: sqlite3.Connection, statement: str, values: Any) -> list[Any]:
    """All rows. Text with a flipped bit may be no UTF-8 any more; the rows beside it are read all the same."""
    try:
        return connection.execute(statement, values).fetchall()
    except sqlite3.OperationalError as error:
        if "UTF-8" not in str(error):
            raise
    connection.text_factory = _readable
    try:
        return connection.execute(statement, values).fetchall()
    finally:
        connection.text_factory = str


def _readable(text: bytes) -> str:
    return text.decode(errors="replace")


def _size(file: str) -> int:
    try:
        return os.stat(file).st_size  # noqa: PTH116 (a fifth of the time, at every put)
    except OSError:
        return 0


def _number(key: str, route: str) -> int:
    """The id of a row: those of keys with one ending lie side by side."""
    return _family(key)[0] | int.from_bytes(hashlib.sha256(f"{key}.{route}".encode()).digest()[:4], "big")


def _family(key: str) -> tuple[int, int]:
    """The lowest and the highest id of keys with this ending, which any string may be."""
    start = int.from_bytes(hashlib.sha256(key[-32:].encode()).digest()[:4], "big") >> 1 << 32
    return start, start | 0xFFFFFFFF


class _transaction:
    """BEGIN IMMEDIATE … COMMIT: a writer waits for its turn at the start, not in the middle."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        self._roll_back()  # what Ctrl-C left open between two lines: it would keep everybody out
        self._connection.wait(0)
        deadline = time.monotonic() + _TURN
        while True:
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                return
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != _BUSY or time.monotonic() > deadline:
                    raise
            time.sleep(_POLL)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if kind is None:
                self._connection.execute("COMMIT")
        finally:
            self._roll_back()  # also where the commit failed, on a full disk

    def _roll_back(self) -> None:
        if self._connection.in_transaction:
            with suppress(sqlite3.Error):
                self._connection.execute("ROLLBACK")
