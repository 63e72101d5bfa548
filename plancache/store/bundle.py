"""Bundles: many records in one portable file, which can be a read-only layer or be merged into a cache.

A bundle is an SQLite database of the same schema without a journal, written under another name and renamed when it is
whole.
"""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from plancache.errors import RecordError, StoreError
from plancache.store import records
from plancache.store.database import FILE
from plancache.store.directory import Access
from plancache.store.eviction import Bounds
from plancache.store.interface import Listed, Store
from plancache.store.plans import SqliteStore

Progress = Callable[[], None]
_UNBOUNDED = Bounds(1 << 60)
_STALE = 3600.0  # seconds without a change, after which it is a killed process's
_BATCH = 64  # records between two looks at the bound, which also keep the journal short


@dataclass
class Counts:
    """What became of the records of an export or an import."""

    done: int = 0
    present: int = 0
    damaged: int = 0
    refused: int = 0  # for lack of room


def export(store: Store, rows: Iterable[Listed], file: Path, key: bytes | None, progress: Progress) -> Counts:
    """Write the records of `rows` into one file; damaged ones are left out and counted.

    Raises:
        StoreError: the store cannot be read, or the file cannot be written.
    """
    counts = Counts()
    try:
        file = file.resolve()  # what a link leads to is replaced, and not the link
        _refuse(file)
        _remove_left_over(file)
        # A directory of its own, so that whatever becomes of this process there is no half bundle, and the locks and
        # journals of whatever else lies beside `file` (a cache, another export) are not touched.
        with tempfile.TemporaryDirectory(prefix=f".{file.name}.plancache-", dir=file.parent) as scratch:
            written = Path(scratch, file.name)
            bundle = SqliteStore(written, Access(read_only=False, mode=0o644), _UNBOUNDED)
            try:
                _fill(bundle, store, rows, key, progress, counts)
                # A journal mode that leaves no companions: a bundle is one file, and may lie on a read-only mount.
                with bundle.database.use() as connection:
                    connection.execute("PRAGMA journal_mode = DELETE")
            finally:
                bundle.close()
            written.chmod(0o644)
            written.replace(file)
    except (sqlite3.Error, OSError) as error:
        raise StoreError("the bundle cannot be written", path=file, found=f"{type(error).__name__}: {error}") from error
    return counts


def _refuse(file: Path) -> None:
    """Not over what is no bundle's place: it is replaced, which would end a device, or a cache that is in use."""
    if file.name == FILE:
        raise StoreError("a cache's database is not overwritten by a bundle", path=file, found=str(file))
    if file.exists() and not file.is_file():
        raise StoreError("a bundle is a file of its own", path=file, found=f"{file}, which is no regular file")


def _remove_left_over(file: Path) -> None:
    """What an export to the same place left, that was killed."""
    for left in file.parent.iterdir():
        if (
            left.name.startswith(f".{file.name}.plancache-")
            and left.is_dir()
            and left.stat().st_mtime < time.time() - _STALE
        ):
            shutil.rmtree(left, ignore_errors=True)


def _fill(
    bundle: Store, store: Store, rows: Iterable[Listed], key: bytes | None, progress: Progress, counts: Counts
) -> None:
    for number, listed in enumerate(rows, start=1):
        record = store.get(listed.row.key, listed.row.route, use=False)
        if record is not None:
            try:
                row, _ = records.decode(record, key)
            except RecordError:
                counts.damaged += 1
            else:
                bundle.put(row, record)
                counts.done += 1
        if number % _BATCH == 0:
            bundle.maintain()
        progress()


def merge(bundle: Store, store: Store, key: bytes | None, progress: Progress) -> Counts:
    """Put a bundle's records into a store; those that are there already, or better, stay.

    A damaged or wrongly signed record is skipped and counted; the rest goes in.

    Raises:
        StoreError: the bundle cannot be read at all, or the store cannot be written.
    """
    counts, number = Counts(), 0
    for number, (_, _, _, record) in enumerate(bundle.salvage(), start=1):
        try:
            row, _ = records.decode(record, key)
        except RecordError:
            counts.damaged += 1
        else:
            if store.put(row, record):
                counts.done += 1
            elif store.get(row.key, row.route, use=False) is not None:
                counts.present += 1
            else:
                counts.refused += 1
        if number % _BATCH == 0:
            store.maintain()
        progress()
    counts.damaged += max(0, _size(bundle) - number)
    store.flush()
    store.maintain()
    return counts


def _size(bundle: Store) -> int:
    """How many records the index of a bundle knows, also of those on pages that cannot be read; else none."""
    try:
        if isinstance(bundle, SqliteStore):
            with bundle.database.use() as connection:
                return int(connection.execute("SELECT count(*) FROM plans").fetchone()[0])
    except (StoreError, sqlite3.Error):
        pass
    return 0
