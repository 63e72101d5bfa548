"""Finding what is wrong in a store, and putting it right while keeping what is good."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from plancache.errors import RecordError, StoreError
from plancache.store import records
from plancache.store.directory import Access
from plancache.store.interface import Row, Store
from plancache.store.plans import SqliteStore

# A file without content of this length takes no room, and a damaged header may say anything.
_LARGEST = 64 << 30


@dataclass
class Report:
    """What was found.

    Attributes:
        good: records that are whole and filed where they belong.
        bad: the others: key, route and what is wrong. Without a key: the database itself.
        aside: database files that were set aside as damaged.
        removed: bad records that were removed, or the database that was set aside.
        recovered: good records that were taken over from where they did not belong, or from files set aside.
    """

    good: int = 0
    bad: list[tuple[str, str, str]] = field(default_factory=list)
    aside: list[Path] = field(default_factory=list)
    removed: int = 0
    recovered: int = 0

    @property
    def clean(self) -> bool:
        """Whether nothing was found, or all of it was put right."""
        return len(self.bad) == self.removed and not self.aside


def verify(
    store: Store, path: Path, key: bytes | None, *, repair: bool, progress: Callable[[], None] = lambda: None
) -> Report:
    """Check every record; with `repair`, remove the bad ones and take over what is good in files set aside.

    Raises:
        StoreError: the store cannot be read, or not written for the repair.
    """
    report = Report()
    damaged = isinstance(store, SqliteStore) and _damaged(store, report)
    _check_records(store, key, report, repair and not damaged, progress)
    if repair and damaged and isinstance(store, SqliteStore):
        if store.read_only:
            raise StoreError("the cache may not be written", path=path, found="a read-only cache")
        store.database.set_aside()
        report.removed = len(report.bad)
    report.aside = sorted(_aside(path))
    if repair:
        for file in report.aside:
            report.recovered += _take_over(file, store, key)
        report.aside = sorted(_aside(path))
        store.maintain()
    return report


def _damaged(store: SqliteStore, report: Report) -> bool:
    """Look at the whole database: records on a page that cannot be read do not come up one by one."""
    database = store.database
    try:
        with database.use() as connection:
            (found,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
    except StoreError as error:
        if not error.damaged:
            raise
        found = str(error)
    if found != "ok":
        report.bad.append(("", "", f"the database is damaged: {' '.join(found.split())}"))
    return bool(found != "ok")


def _check_records(store: Store, key: bytes | None, report: Report, repair: bool, progress: Callable[[], None]) -> None:
    misfiled = []
    for filed_key, route, listed, record in _readable(store):
        row, fault, foreign = _examined(filed_key, route, listed, record, key)
        if fault is None:
            report.good += 1
        else:
            report.bad.append((filed_key, route, fault))
            # Only if it is still this one: a job may have put a good one there meanwhile.
            # What cannot be checked here is good for whoever has its key.
            if repair and not foreign and store.discard(filed_key, route, record or None):
                report.removed += 1
                misfiled += [(row, record)] if row is not None else []
        progress()
    # Whole records that were filed wrongly go where they belong, if there is none (or a worse one) yet.
    for row, record in misfiled:
        report.recovered += store.put(row, record)


def _readable(store: Store) -> Iterator[tuple[str, str, Row | None, bytes]]:
    try:
        yield from store.salvage()
    except StoreError as error:
        if not error.damaged:  # what is damaged is reported with the database's pages
            raise


def _examined(
    filed_key: str, route: str, listed: Row | None, record: bytes, key: bytes | None
) -> tuple[Row | None, str | None, bool]:
    """The row of a record, if it is whole; what is wrong, if something is; whether it only cannot be checked here."""
    try:
        row, _ = records.decode(record, key)
    except RecordError as error:
        return None, str(error), error.foreign
    if (row.key, row.route) != (filed_key, route) or (listed is not None and listed != row):
        return row, "the record is not the one that its row lists", False
    return row, None, False


def _aside(path: Path) -> Iterator[Path]:
    if path.is_dir():
        yield from (file for file in path.glob("damaged-*.sqlite3") if file.is_file())


def _take_over(file: Path, store: Store, key: bytes | None) -> int:
    """Put what is good in a damaged database into the store, and remove the file if all of that is there now.

    Raises:
        StoreError: the store cannot be written, or the file cannot be read for another reason than its damage. The
            file stays.
    """
    taken, kept = 0, False
    _lengthen(file)
    damaged = SqliteStore(file, Access(read_only=False, mode=0o600))
    try:
        for *_, record in _readable(damaged):
            with suppress(RecordError):
                row, _ = records.decode(record, key)
                stored = store.put(row, record)
                taken += stored
                # Refused for lack of room, and not for one that is as good.
                kept = kept or (not stored and store.get(row.key, row.route, use=False) is None)
    finally:
        with suppress(StoreError):
            damaged.close()
    for companion in () if kept else ("", "-wal", "-shm", "-journal"):
        Path(f"{file}{companion}").unlink(missing_ok=True)
    return taken


def _lengthen(file: Path) -> None:
    """Give a database that was cut short its length back: SQLite reads nothing of one that is shorter than it says."""
    with suppress(OSError):
        with file.open("rb") as content:
            header = content.read(32)
        page, pages = int.from_bytes(header[16:18], "big"), int.from_bytes(header[28:32], "big")
        length = min(pages * page, _LARGEST)
        if file.stat().st_size < length:
            os.truncate(file, length)
