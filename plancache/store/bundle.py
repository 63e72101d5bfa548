"""Bundles: many records in one portable file, which can be a read-only layer or be merged into a cache.

A bundle is an SQLite database of the same schema without a journal, written under another name and renamed when it is
whole.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from plancache.errors import RecordError, StoreError
from plancache.store import records
from plancache.store.directory import Access
from plancache.store.eviction import Bounds
from plancache.store.interface import Listed, Store
from plancache.store.plans import SqliteStore

Progress = Callable[[], None]
_UNBOUNDED = Bounds(1 << 60)


@dataclass
class Counts:
    """What became of the records of an export or an import."""

    done: int = 0
    present: int = 0
    damaged: int = 0


def export(store: Store, rows: Iterable[Listed], file: Path, key: bytes | None, progress: Progress) -> Counts:
    """Write the records of `rows` into one file; damaged ones are left out and counted.

    Raises:
        StoreError: the store cannot be read, or the file cannot be written.
    """
    scratch = file.with_name(f".{file.name}.{os.getpid()}")
    counts = Counts()
    bundle = SqliteStore(scratch, Access(read_only=False, mode=0o644), _UNBOUNDED)
    try:
        for listed in rows:
            record = store.get(listed.row.key, listed.row.route)
            if record is not None:
                try:
                    row, _ = records.decode(record, key)
                    bundle.put(row, record)
                    counts.done += 1
                except RecordError:
                    counts.damaged += 1
            progress()
        connection = bundle.database.connection()
        # A journal mode that leaves no companions: the bundle is one file, and may lie on a read-only mount.
        connection.execute("PRAGMA journal_mode = DELETE")
        bundle.close()
        scratch.chmod(0o644)
        scratch.replace(file)
    except (sqlite3.Error, OSError) as error:
        raise StoreError("the bundle cannot be written", path=file, found=f"{type(error).__name__}: {error}") from error
    finally:
        with suppress(StoreError):
            bundle.close()
        for leftover in (scratch, *(Path(f"{scratch}{end}") for end in ("-wal", "-shm", "-journal"))):
            leftover.unlink(missing_ok=True)
        (file.parent / "migrate.lock").unlink(missing_ok=True)
    return counts


def merge(bundle: Store, store: Store, key: bytes | None, progress: Progress) -> Counts:
    """Put a bundle's records into a store; those that are there already, or better, stay.

    A damaged or wrongly signed record is skipped and counted; the rest goes in.

    Raises:
        StoreError: the bundle cannot be read at all, or the store cannot be written.
    """
    counts = Counts()
    for _, _, _, record in bundle.salvage():
        try:
            row, _ = records.decode(record, key)
        except RecordError:
            counts.damaged += 1
        else:
            if store.put(row, record):
                counts.done += 1
            else:
                counts.present += 1
        progress()
    store.flush()
    store.maintain()
    return counts
