"""Plan records as files, published by rename: for network file systems, where SQLite's WAL must not be used."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from plancache.errors import RecordError, StoreError
from plancache.store import records
from plancache.store.directory import Access
from plancache.store.eviction import AHEAD, DEAD_AFTER, Bounds
from plancache.store.interface import Listed, Row, Store
from plancache.store.tallies import SCRATCH, Counting, Tally, TallyFiles

DIRECTORY = "records"
_STALE = 3600.0  # seconds after which a scratch file is a killed process's
_KEPT = 0.9
_BLOCK = 4096
_AGAIN = 3
# Newer files that are read, at most, to see which environments are in use: reading all could take minutes.
_LOOKED_AT = 500
# The part of the bound after which the directory is counted again. Between two counts each of several writers adds up
# to so much that the others do not know of; an eighth of the bound is left for that.
_RECOUNT = 128


class FileStore(Store):
    """The store on network file systems. See `Store` for what is promised.

    Not promised, beyond that: of two hosts that store one key at the same moment, which one's record stays.
    """

    def __init__(self, path: Path, access: Access, bounds: Bounds | None = None, key: bytes | None = None) -> None:
        self.path = path
        self.access = access
        self.read_only = access.read_only
        self.bounds = bounds or Bounds()
        self._key = key
        self.counting = Counting()
        self._tally_files = TallyFiles(path, access, self.bounds.max_bytes)
        self._used: dict[tuple[str, str], list[float]] = {}
        self._size: int | None = None
        self._added = 0
        self._newest: Path | None = None
        self._environments: dict[Path, str] = {}
        if self.read_only and not (path / DIRECTORY).is_dir():
            raise StoreError("there is no cache here", path=path, found="no records", expected=str(path / DIRECTORY))

    def get(self, key: str, route: str, use: bool = True) -> bytes | None:
        record = self._read(key, route)
        if use and record is not None and not self.read_only:
            stamp = self._used.setdefault((key, route), [0.0, 0])
            stamp[0], stamp[1] = time.time(), stamp[1] + 1
        return record

    def put(self, row: Row, record: bytes, replaces: bytes | None = None) -> bool:
        self._may_write()
        if len(record) > self.bounds.database // 2:
            return False
        there = self._read(row.key, row.route)
        if there is not None and there != replaces and not self._gives_way(there, row):
            return False
        file = self._file(row.key, row.route)
        with _faults(file):
            for left in reversed(range(_AGAIN)):
                try:
                    self._publish(file, record)
                    break
                except FileNotFoundError:
                    # Of processes that make a directory at once the last one takes the others' places, and what was on
                    # its way into one of theirs finds it gone (1 of some 20,000 puts of eight writers, measured).
                    if not left:
                        raise
        self._newest = file
        blocks = _BLOCK * -(-len(record) // _BLOCK)
        self._added += blocks
        if self._size is not None:
            self._size += blocks
        return True

    def _publish(self, file: Path, record: bytes) -> None:
        for directory in (self.path / DIRECTORY, file.parent, self.path / SCRATCH):
            self.access.make(directory)
        scratch = self.path / SCRATCH / f"{os.getpid()}-{os.urandom(8).hex()}"
        try:
            descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, self.access.file_mode)
            with os.fdopen(descriptor, "wb") as out:
                out.write(record)
            self.access.follow(scratch)
            scratch.rename(file)
        except BaseException:
            with suppress(OSError):
                scratch.unlink()
            raise

    def discard(self, key: str, route: str, record: bytes | None = None) -> bool:
        self._may_write()
        if record is not None and self._read(key, route) != record:
            return False
        with _faults(self.path):
            try:
                self._file(key, route).unlink()
            except FileNotFoundError:
                return False
        return True

    def keys(self, end: str) -> list[tuple[str, str]]:
        found = []
        with _faults(self.path):
            for name in _listed(self.path / DIRECTORY / _place(end)):
                key, _, route = name.partition(".")
                if key.endswith(end) and route:
                    found.append((key, route))
        return found

    def rows(self, **equal: str) -> Iterator[Listed]:
        unknown = set(equal) - set(Row.__dataclass_fields__)
        if unknown:
            raise TypeError(f"rows have no column {', '.join(sorted(unknown))}")
        found, (_, hits) = [], self._tally_files.read()
        for file, status in self._files(equal.get("key", "")):
            try:
                row, _ = records.decode(file.read_bytes(), self._key)
            except (RecordError, OSError):
                continue
            if all(getattr(row, name) == value for name, value in equal.items()):
                use = row.key, row.route
                used = max(status.st_mtime, self._used.get(use, (0.0, 0))[0])
                found.append(Listed(row, used, hits.get(use, 0), status.st_size))
        yield from sorted(found, key=lambda listed: (-listed.row.created, listed.row.key, listed.row.route))

    def maintain(self, thorough: bool = True) -> None:
        if self.read_only:
            return
        with _faults(self.path):
            self._remove_stale()
            # What other processes have added is seen when it is counted again: after a part of the bound, not of time.
            if self._size is None or self._added >= self.bounds.max_bytes // _RECOUNT:
                self._size, self._added = self._count(), 0
            if self._size > self._limit:
                self._evict()

    def tallies(self) -> list[Tally]:
        return self._tally_files.read()[0]

    def forget(self) -> None:
        self._used.clear()
        self.counting.clear()

    def flush(self) -> None:
        used, self._used = self._used, {}
        hits = {}
        for use, (when, count) in list(used.items()):  # another thread may still be adding to it
            with suppress(OSError):
                os.utime(self._file(*use), (when, when))
                hits[use] = int(count)
        if (hits or self.counting) and not self.read_only:
            with suppress(OSError):
                self._tally_files.write(self.counting.take(), hits)

    def close(self) -> None:
        self.flush()

    def salvage(self) -> Iterator[tuple[str, str, Row | None, bytes]]:
        for file, _ in self._files():
            key, _, route = file.name.partition(".")
            with suppress(OSError):
                yield key, route, None, file.read_bytes()

    @property
    def _limit(self) -> int:
        return self.bounds.max_bytes // 8 * 7

    def _evict(self) -> None:
        self.flush()
        found = sorted(self._files(), key=lambda one: one[1].st_mtime)
        dead, ahead = self._dead(found), time.time() + AHEAD

        def last(one: tuple[Path, os.stat_result]) -> tuple[bool, bool]:
            # What was stamped before the clock jumped back would stay for ever, and what is new would go.
            return one[0] not in dead, one[1].st_mtime <= ahead

        oldest_first = sorted(found, key=last)  # stable: within each the oldest comes first
        size = self._count()
        for file, status in oldest_first:
            if size <= _KEPT * self._limit:
                break
            if file == self._newest:  # by its time it is the oldest, where the clock has jumped back
                continue
            with suppress(FileNotFoundError):
                file.unlink()
            size -= _taken(status)
        self._size = size

    def _dead(self, oldest_first: list[tuple[Path, os.stat_result]]) -> set[Path]:
        """Files of environments that nobody has used for long, while another one was. Only old files can be of one."""
        before = time.time() - DEAD_AFTER
        old = [file for file, status in oldest_first if status.st_mtime < before]
        if len(old) == len(oldest_first):
            return set()
        environments = {file: self._environment(file) for file in old}
        suspected = set(environments.values())
        for file, _ in reversed(oldest_first[len(old) :][-_LOOKED_AT:]):
            if not suspected:
                break
            suspected.discard(self._environment(file))
        return {file for file, environment in environments.items() if environment in suspected}

    def _environment(self, file: Path) -> str:
        if file not in self._environments:
            try:
                self._environments[file] = records.decode(file.read_bytes(), self._key)[0].environment
            except (RecordError, OSError):
                self._environments[file] = ""
        return self._environments[file]

    def _count(self) -> int:
        """What the records take on disk, and the directories that they lie in."""
        records_taken = sum(_taken(status) for _, status in self._files())
        with suppress(FileNotFoundError):
            return records_taken + sum(_taken(place.stat()) for place in (self.path / DIRECTORY).iterdir())
        return records_taken

    def _remove_stale(self) -> None:
        with suppress(FileNotFoundError):
            for file in (self.path / SCRATCH).iterdir():
                with suppress(FileNotFoundError):
                    if file.stat().st_mtime < time.time() - _STALE:
                        file.unlink()

    def _gives_way(self, record: bytes, row: Row) -> bool:
        try:
            return records.decode(record, self._key)[0].gives_way_to(row)
        except RecordError:
            return False  # the caller says what it replaces

    def _read(self, key: str, route: str) -> bytes | None:
        file = self._file(key, route)
        with _faults(file):
            try:
                return file.read_bytes()
            except FileNotFoundError:
                return None

    def _files(self, only: str = "") -> Iterator[tuple[Path, os.stat_result]]:
        """All record files, or those of one key."""
        for directory, _, names in os.walk(self.path / DIRECTORY / (_place(only) if only else "")):
            for name in (name for name in names if name.startswith(only)):
                file = Path(directory, name)
                key, _, route = name.partition(".")
                # Not what a network file system keeps of a file that was removed while open, nor what people put here.
                if key and file == self._file(key, route):
                    with suppress(FileNotFoundError):
                        yield file, file.stat()

    def _file(self, key: str, route: str) -> Path:
        return self.path / DIRECTORY / _place(key) / f"{key}.{route}"

    def _may_write(self) -> None:
        if self.read_only:
            raise StoreError("the cache may not be written", path=self.path, found="a read-only cache")


def _place(key: str) -> str:
    """The directory of a key: by the beginning of its second half, so that keys with one ending lie together."""
    return key[-32:][:2]


def _listed(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)  # noqa: PTH208 (names alone)
    except FileNotFoundError:
        return []


def _taken(status: os.stat_result) -> int:
    """Bytes on disk: whole blocks, where the file system tells."""
    return max(status.st_size, 512 * status.st_blocks)


@contextmanager
def _faults(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError("the cache's files cannot be used", path=path, found=str(error)) from error
