"""SQLite: connections, pragmas, migrations, and a database that is beyond use.

One connection a thread and process: a connection must not cross a fork (`connections`), and a thread must not wait for
another one's transaction. Opening a database that is up to date reads one number; sqlite-utils and filelock are
imported only where there is something to migrate. Nothing here opens the file beside its connection: closing such a
descriptor would drop the process's POSIX locks on the database (https://sqlite.org/howtocorrupt.html, 2.2).
"""

from __future__ import annotations

import os
import sqlite3
import stat
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from plancache.errors import StoreError
from plancache.settings import shipped
from plancache.store.connections import BUSY, Connection, connect, gate
from plancache.store.directory import Access

if TYPE_CHECKING:
    from filelock import BaseFileLock
    from sqlite_utils import Database as Inspected

FILE = "plancache.sqlite3"
# Seconds that another process's migration is waited for.
_MIGRATION = 10.0
_DAMAGE = (11, 26)  # SQLITE_CORRUPT, SQLITE_NOTADB
_READ_ONLY = 8  # SQLITE_READONLY
_NO_SPACE = (10, 13)  # SQLITE_IOERR, SQLITE_FULL
_AGAIN = 10
_COMPANIONS = ("", "-wal", "-shm", "-journal")


class _Held:
    """A connection of one thread of one process; closed when its thread ends."""

    def __init__(
        self, connection: Connection, inode: object, identity: object = None, copy: _Copy | None = None
    ) -> None:
        self.connection = connection
        self.inode = inode
        self.identity = identity  # of an immutable one: which state of the files it shows
        self.process = os.getpid()
        self.copy = copy

    def close(self) -> None:
        self.connection.close()
        self.copy = None

    def __del__(self) -> None:
        if self.process == os.getpid():
            with suppress(sqlite3.Error):
                self.close()


class _Copy:
    """A private copy of a database and its journal; removed with its last user."""

    def __init__(self, file: Path, identity: object) -> None:
        import shutil
        import tempfile

        self.identity = identity
        self.path = Path(tempfile.mkdtemp(prefix="plancache-"))
        self._finalizer = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)
        for companion in _COMPANIONS:
            if companion != "-shm":
                with suppress(FileNotFoundError):
                    shutil.copyfile(f"{file}{companion}", self.path / f"{file.name}{companion}")


class Database:
    """One database file: a cache directory's, or a bundle."""

    def __init__(self, file: Path, access: Access, bundle: bool = False) -> None:
        self.file = file
        self.access = access
        self.bundle = bundle
        self._local = threading.local()
        self._copying = threading.Lock()
        self._copy: _Copy | None = None

    def use(self) -> _Use:
        """A context with this thread's connection, which no fork interrupts; it raises `StoreError` alone.

        Nothing is yielded to a caller within, and nothing waited for but SQLite.
        """
        return _Use(self)

    def connection(self) -> Connection:
        """This thread's connection, opened and migrated if need be.

        Raises:
            StoreError: the file cannot be opened, is no database, or was written by a newer plancache.
        """
        held: _Held | None = getattr(self._local, "held", None)
        if held is not None and held.process == os.getpid():
            if not self._changed(held):
                return held.connection
            self.close()
        with faults(self.file):
            self._local.held = self._open()
        return self._local.held.connection  # type: ignore[no-any-return]

    @property
    def absent(self) -> bool:
        """Whether nobody has made the database yet. Whoever reads makes none: it takes half a second."""
        return getattr(self._local, "held", None) is None and not self.access.read_only and not self.file.exists()

    def check_identity(self) -> None:
        """Before writing: let go of the connection if the file was deleted or replaced meanwhile.

        So of a copy, which is read where the disk was full when it was opened: there may be room by now.
        """
        held: _Held | None = getattr(self._local, "held", None)
        if held is not None and (held.copy is not None or _inode(self.file) != held.inode):
            self.close()

    def close(self) -> None:
        """Close this thread's connection."""
        held: _Held | None = getattr(self._local, "held", None)
        if held is not None and held.process == os.getpid():
            del self._local.held
            with faults(self.file):
                held.close()

    def set_aside(self) -> None:
        """Move a database that is beyond use out of the way, so that the next connection makes a new one.

        What is good in it stays there, for `verify --repair`. Other processes go on with the moved file until they
        find it damaged too.
        """
        # Of the last opening, also of one that failed: it is this file that was found damaged, and no newer one.
        mine = getattr(self._local, "inode", None)
        with faults(self.file):
            with suppress(StoreError):
                self.close()
            with self._lock():
                if mine is not None and _inode(self.file) != mine:
                    return  # another process was first
                aside = f"damaged-{time.time_ns()}-{self.file.name}"
                for companion in _COMPANIONS:
                    with suppress(FileNotFoundError):
                        Path(f"{self.file}{companion}").rename(self.file.parent / f"{aside}{companion}")

    # ------------------------------------------------------------ opening

    def _open(self) -> _Held:
        if self.access.read_only or self.bundle:
            if not self.file.exists():
                raise StoreError("there is no cache here", path=self.file, found="no database", expected=str(self.file))
            return self._open_read_only()
        try:
            held = self._open_to_write()
        except sqlite3.OperationalError as error:
            # On a full disk SQLite cannot make the memory that processes share; what is there can be read without.
            if getattr(error, "sqlite_errorcode", 0) & 0xFF not in _NO_SPACE:
                raise
            if self._left_over():
                return self._open_copy(_inode(self.file))
            return self._checked(_connect(self.file, "mode=ro&immutable=1"), _inode(self.file), self._identity())
        if self.access.mode & stat.S_IWGRP:
            # SQLite makes its journals by this process's umask and puts their modes right a moment later. Another user
            # who opened them in between cannot write (1 of 300 processes that raced, measured), and opens them again.
            for _ in range(_AGAIN):
                if _can_write(held.connection):
                    break
                held.close()
                held = self._open_to_write()
        return held

    def _open_to_write(self) -> _Held:
        self._local.inode = _inode(self.file)
        if self._local.inode is None:
            self.access.make_file(self.file)
            self._local.inode = _inode(self.file)
        connection = _connect(self.file)
        return self._checked(connection, self._local.inode or _inode(self.file))

    def _open_read_only(self) -> _Held:
        """Without a write: `mode=ro` where SQLite can have its shared memory, else `immutable`, else a private copy.

        `immutable` is right only if nobody writes: where there is no journal, and reopened when the file changes.
        (Beside a writer it gave "malformed" and a bad row, and it ignores a journal that was left behind; measured.)
        """
        inode, identity = _inode(self.file), self._identity()
        left_over = self._left_over()
        # In another owner's directory root could write, and does not: not even what SQLite shares between processes.
        writable = not self.access.foreign and os.access(self.file.parent, os.W_OK)
        if not self.bundle and (writable or left_over):
            try:
                return self._checked(_connect(self.file, "mode=ro" if writable else "mode=ro&readonly_shm=1"), inode)
            except sqlite3.OperationalError as error:
                full = getattr(error, "sqlite_errorcode", 0) & 0xFF in _NO_SPACE
                if not left_over and not full:
                    raise
            if left_over:
                return self._open_copy(inode)
        return self._checked(_connect(self.file, "mode=ro&immutable=1"), inode, identity)

    def _left_over(self) -> bool:
        journals = [Path(f"{self.file}{end}") for end in ("-wal", "-journal")]
        return any(journal.exists() and journal.stat().st_size for journal in journals)

    def _changed(self, held: _Held) -> bool:
        return held.identity is not None and held.identity != self._identity()

    def _identity(self) -> object:
        """Which state the files are in. A journal that comes up is a writer: `immutable` is right no longer."""
        return _stamp(self.file), None if self.bundle else _stamp(Path(f"{self.file}-wal"))

    def _open_copy(self, inode: object) -> _Held:
        identity = self._identity()
        with self._copying:  # one for all threads, and for one state of the files
            if self._copy is None or self._copy.identity != (os.getpid(), identity):
                self._copy = _Copy(self.file, (os.getpid(), identity))
            copy = self._copy
        return self._checked(_connect(copy.path / self.file.name), inode, copy=copy)

    def _checked(
        self, connection: Connection, inode: object, identity: object = None, copy: _Copy | None = None
    ) -> _Held:
        held = _Held(connection, inode, identity, copy)
        try:
            if self.bundle:
                # Of a file that was cut short SQLite reads nothing, unless it is told not to mind; each record has its
                # own checksum. It is opened without a right to write.
                connection.execute("PRAGMA writable_schema = ON")
            self._prepare(connection, copy is not None)
            if copy is not None:
                # What is written there would be lost with it, and called stored (measured on a disk of 100 KiB).
                connection.execute("PRAGMA query_only = ON")
        except BaseException:
            connection.close()
            raise
        return held

    def _prepare(self, connection: sqlite3.Connection, private: bool) -> None:
        files = migrations()
        version = _version(connection)
        if version > len(files) and _applied(connection) == {file.stem for file in files}:
            version = len(files)  # of two truths the ledger is the one
            if not self.access.read_only:
                connection.execute(f"PRAGMA user_version = {version}")
        if version > len(files):
            raise StoreError(
                "the cache was written by a newer plancache",
                path=self.file,
                found=f"schema {version}",
                expected=f"schema {len(files)} or older",
                todo="Upgrade plancache, or give this one another directory.",
            )
        if version < len(files):
            if self.access.read_only and not private:
                raise StoreError(
                    "the cache was written by an older plancache, and may not be written",
                    path=self.file,
                    found=f"schema {version}",
                    expected=f"schema {len(files)}",
                )
            self._migrate(connection, files)
        if not self.access.read_only:
            connection.execute("PRAGMA synchronous = NORMAL")
            # Checkpoints are run by maintain(), never inside a put: that stalls it by 40 ms, and under a build lock.
            connection.execute("PRAGMA wal_autocheckpoint = 0")

    def _migrate(self, connection: sqlite3.Connection, files: list[Path]) -> None:
        """Apply what is missing. Under a lock: processes that race in sqlite-utils' ledger fail (2 of 80, measured)."""
        try:
            import filelock
        except ImportError as error:
            raise self._not_whole(error) from error
        try:
            with self._lock():
                if _version(connection) >= len(files):
                    return  # another process was first
                try:
                    # Now: 0.3 s of processor time, which all but one of many that start at once do without.
                    import sqlite_utils
                except ImportError as error:
                    raise self._not_whole(error) from error
                # Both must be said before the first table is made.
                connection.execute("PRAGMA page_size = 8192")
                connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
                connection.execute("PRAGMA journal_mode = WAL")
                self.access.follow(self.file)
                ledger = sqlite_utils.Migrations("plancache")
                for number, file in enumerate(files, start=1):
                    ledger(name=file.stem)(_migration(file, number))
                ledger.apply(sqlite_utils.Database(connection))
                # A number that was damaged is put right.
                connection.execute(f"PRAGMA user_version = {len(files)}")
        except filelock.Timeout as error:
            raise StoreError(
                "another process has been making or migrating the cache for too long", path=self.file, found=str(error)
            ) from error

    def _not_whole(self, error: ImportError) -> StoreError:
        return StoreError("plancache is not installed whole", path=self.file, found=str(error))

    def _lock(self) -> BaseFileLock:
        import filelock

        path = self.file.parent / "migrate.lock"
        self.access.make_file(path)
        return filelock.FileLock(path, timeout=_MIGRATION, mode=self.access.file_mode)


class faults:
    """Turn what SQLite and the file system raise into a `StoreError`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (sqlite3.Error, OSError)):
            raise StoreError(
                "the cache's database cannot be used",
                path=self._path,
                damaged=getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGE,
                found=f"{type(error).__name__}: {error}",
            ) from error


class _Use(faults):
    """See `Database.use`."""

    def __init__(self, database: Database) -> None:
        super().__init__(database.file)
        self._database = database

    def __enter__(self) -> Connection:  # type: ignore[override]
        self._gate = gate()
        self._gate.acquire()
        try:
            return self._database.connection()
        except BaseException:
            self._gate.release()
            raise

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._gate.release()
        super().__exit__(kind, error, trace)


def migrations() -> list[Path]:
    """The numbered SQL files, in order."""
    directory = shipped("migrations")
    names = os.listdir(directory)  # noqa: PTH208 (at every opening; glob would compile a pattern)
    return [directory / name for name in sorted(names) if name[:1].isdigit() and name.endswith(".sql")]


def _connect(file: Path, query: str = "") -> Connection:
    address = f"{file.absolute().as_uri()}?{query}" if query else str(file)
    # check_same_thread off: a thread's connection is closed by whoever drops the last reference to it.
    options = {"timeout": BUSY / 1000, "isolation_level": None, "check_same_thread": False}
    return connect(address, uri=bool(query), **options)


def _can_write(connection: Connection) -> bool:
    """Whether a connection has its files open to write; no matter who else is writing."""
    connection.wait(0)
    try:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("ROLLBACK")
    except sqlite3.OperationalError as error:
        return error.sqlite_errorcode & 0xFF != _READ_ONLY
    return True


def _version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def _applied(connection: sqlite3.Connection) -> set[str]:
    """The migrations that the ledger names."""
    with suppress(sqlite3.OperationalError):
        return {name for (name,) in connection.execute("SELECT name FROM _sqlite_migrations").fetchall()}
    return set()


def _inode(file: Path) -> object:
    try:
        status = os.stat(file)  # noqa: PTH116 (before every put)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _stamp(file: Path) -> object:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


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
