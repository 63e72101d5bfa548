"""SQLite: connections, pragmas, migrations.

One connection a thread and process: a connection must not cross a fork, and a thread must not wait for another
one's transaction. Opening a database that is up to date reads one number; sqlite-utils and filelock are imported
only where there is something to migrate.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from plancache.errors import StoreError
from plancache.settings import shipped
from plancache.store import directory

if TYPE_CHECKING:
    from sqlite_utils import Database as Inspected

FILE = "plancache.sqlite3"
# Seconds that a write waits for another process's write. A put takes 0.2 ms.
_BUSY = 10.0
# Pages; the default of 1,000 stalls a put by 40 ms every 60 puts (measured).
_AUTOCHECKPOINT = 4000


class Database:
    """The database file of one cache directory."""

    def __init__(self, path: Path, read_only: bool = False) -> None:
        self.path = path
        self.file = path / FILE
        self.read_only = read_only
        self._local = threading.local()

    def connection(self) -> sqlite3.Connection:
        """This thread's connection, opened and migrated if need be.

        Raises:
            StoreError: the file cannot be opened, is no database, or was written by a newer plancache.
        """
        mine: tuple[int, sqlite3.Connection] | None = getattr(self._local, "connection", None)
        if mine is not None and mine[0] == os.getpid():
            return mine[1]
        with faults(self.file):
            opened = self._open()
        if mine is not None:
            # Inherited over a fork: closing it here would be a use of it. It is kept and never touched.
            self._local.inherited = mine
        self._local.connection = (os.getpid(), opened)
        return opened

    def close(self) -> None:
        """Close this thread's connection."""
        mine: tuple[int, sqlite3.Connection] | None = getattr(self._local, "connection", None)
        if mine is not None and mine[0] == os.getpid():
            del self._local.connection
            with faults(self.file):
                mine[1].close()

    def _open(self) -> sqlite3.Connection:
        if self.read_only:
            if not self.file.exists():
                raise StoreError("there is no cache here", path=self.path, found="no database", expected=FILE)
            connection = sqlite3.connect(
                f"{self.file.absolute().as_uri()}?mode=ro", uri=True, timeout=_BUSY, isolation_level=None
            )
        else:
            directory.make(self.path)
            connection = sqlite3.connect(self.file, timeout=_BUSY, isolation_level=None)
        try:
            self._prepare(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _prepare(self, connection: sqlite3.Connection) -> None:
        version = _version(connection)
        files = migrations()
        if version > len(files):
            raise StoreError(
                "the cache was written by a newer plancache",
                path=self.file,
                found=f"schema {version}",
                expected=f"schema {len(files)} or older",
                todo="Upgrade plancache, or give this one another directory.",
            )
        if version < len(files):
            if self.read_only:
                raise StoreError(
                    "the cache was written by an older plancache and may not be written",
                    path=self.file,
                    found=f"schema {version}",
                )
            _migrate(connection, self.path, files)
        if not self.read_only:
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute(f"PRAGMA wal_autocheckpoint = {_AUTOCHECKPOINT}")


@contextmanager
def faults(path: Path) -> Iterator[None]:
    """Turn what SQLite and the file system raise into a `StoreError`."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise StoreError(
            "the cache's database cannot be used", path=path, found=f"{type(error).__name__}: {error}"
        ) from error


def migrations() -> list[Path]:
    """The numbered SQL files, in order."""
    return sorted(shipped("migrations").glob("[0-9]*.sql"))


def _version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def _migrate(connection: sqlite3.Connection, path: Path, files: list[Path]) -> None:
    """Apply what is missing. Under a lock: processes that race in sqlite-utils' ledger fail (2 of 80, measured)."""
    import filelock
    import sqlite_utils

    with filelock.FileLock(path / "migrate.lock", timeout=60):
        if _version(connection) >= len(files):
            return  # another process was first
        # Both must be said before the first table is made.
        connection.execute("PRAGMA page_size = 16384")
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        connection.execute("PRAGMA journal_mode = WAL")
        ledger = sqlite_utils.Migrations("plancache")
        for number, file in enumerate(files, start=1):
            ledger(name=file.stem)(_migration(file, number))
        ledger.apply(sqlite_utils.Database(connection))


def _migration(file: Path, number: int) -> Callable[[Inspected], None]:
    def apply(database: Inspected) -> None:
        # Statement by statement: executescript commits as it goes, and leaves half a migration behind.
        for statement in _statements(file.read_text()):
            database.execute(statement)
        database.execute(f"PRAGMA user_version = {number}")

    return apply


def _statements(script: str) -> Iterator[str]:
    pending = ""
    for line in script.splitlines(keepends=True):
        pending += line
        if sqlite3.complete_statement(pending):
            yield pending
            pending = ""
