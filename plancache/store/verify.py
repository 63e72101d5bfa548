"""Finding what is wrong in a store, and putting it right while keeping what is good."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from plancache.errors import RecordError, StoreError
from plancache.store import records
from plancache.store.directory import Access
from plancache.store.interface import Row, Store
from plancache.store.plans import SqliteStore


@dataclass
class Report:
    """What was found.

    Attributes:
        good: records that are whole and filed where they belong.
        bad: the others: key, route and what is wrong.
        aside: database files that were set aside as damaged.
        removed: bad records that were removed.
        recovered: good records that were taken over from files that were set aside.
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
    report = Report(aside=sorted(_aside(path)))
    for filed_key, route, listed, record in list(_readable(store, path, report, repair)):
        fault = _fault(filed_key, route, listed, record, key)
        if fault is None:
            report.good += 1
        else:
            report.bad.append((filed_key, route, fault))
            if repair and store.discard(filed_key, route):
                report.removed += 1
        progress()
    if repair:
        for file in report.aside:
            report.recovered += _take_over(file, store, key)
        report.aside = sorted(_aside(path))
        store.maintain()
    return report


def _readable(store: Store, path: Path, report: Report, repair: bool) -> Iterator[tuple[str, str, Row | None, bytes]]:
    try:
        yield from store.salvage()
    except StoreError as error:
        if not error.damaged:
            raise
        report.bad.append(("", "", str(error)))
        if repair and isinstance(store, SqliteStore):
            store.database.set_aside()
            report.aside = sorted(_aside(path))
            report.removed += 1


def _fault(filed_key: str, route: str, listed: Row | None, record: bytes, key: bytes | None) -> str | None:
    try:
        row, _ = records.decode(record, key)
    except RecordError as error:
        return str(error)
    if (row.key, row.route) != (filed_key, route) or (listed is not None and listed != row):
        return "the record is not the one that its row lists"
    return None


def _aside(path: Path) -> Iterator[Path]:
    if path.is_dir():
        yield from (file for file in path.glob("damaged-*.sqlite3") if file.is_file())


def _take_over(file: Path, store: Store, key: bytes | None) -> int:
    """Put what is good in a damaged database into the store, and remove the file."""
    taken = 0
    damaged = SqliteStore(file, Access(read_only=True))
    with suppress(StoreError):
        for _, _, _, record in damaged.salvage():
            with suppress(RecordError):
                row, _ = records.decode(record, key)
                taken += store.put(row, record)
    with suppress(StoreError):
        damaged.close()
    for companion in ("", "-wal", "-shm", "-journal"):
        Path(f"{file}{companion}").unlink(missing_ok=True)
    return taken
