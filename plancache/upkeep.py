"""What is done with a cache apart from serving graphs: listing, checking, pruning, bundles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from plancache import stored
from plancache.cudnn import kernel_cache
from plancache.cudnn.kernel_cache import Kernel
from plancache.errors import RecordError, StoreError
from plancache.kernels import is_kernel
from plancache.store import bundle, eviction, records
from plancache.store.bundle import Counts
from plancache.store.interface import Listed, Row, Store
from plancache.store.layers import Layers, open_store
from plancache.store.verify import Report, verify
from plancache.totals import Names, Totals

# Records of one device and environment that are looked at, where the first ones are damaged, for what it is called.
_TRIED = 20


class Upkeep:
    """The tools of `PlanCache`. They raise `StoreError`, unlike the path that a job goes."""

    def __init__(self, layers: Layers) -> None:
        self._layers = layers
        self._signing_key = layers.options.key
        self.directory = layers.path

    @property
    def store(self) -> Store:
        """The writable store, for tools: listings, bundles, verification.

        Raises:
            StoreError: it cannot be opened.
        """
        return self._layers.top

    def rows(self, **equal: str) -> Iterator[Listed]:
        """What is stored, newest first; `equal` names columns and their values.

        Raises:
            StoreError: the cache cannot be read.
        """
        return self.store.rows(**equal)

    def totals(self) -> Totals:
        """What this cache holds, and what all processes have counted so far: hits, misses, seconds saved.

        Not promised: every lookup. Counts are best effort, and come with a process's next stored plan or its end;
        caches that are only read count nothing.

        Raises:
            StoreError: the cache cannot be read.
        """
        self.store.flush()
        return Totals.of(self.store.tallies(), self.rows())

    def names(self, rows: Iterable[Listed]) -> Names:
        """What the devices and environments of these rows are called. Reads one record for each.

        Raises:
            StoreError: the cache cannot be read.
        """
        names, tried = Names(), Counter[tuple[str, str]]()
        for row in (listed.row for listed in rows if not is_kernel(listed.row)):
            where = row.device, row.environment
            if names.knows(row) or tried[where] == _TRIED:
                continue
            tried[where] += 1
            with suppress(RecordError):
                parts = self.documents(row)
                if parts is not None:
                    names.learn(row, parts)
        return names

    def documents(self, row: Row) -> dict[str, Any] | None:
        """The documents in a row's record: graph, device, environment, build, properties, labels. None if it is gone.

        Raises:
            RecordError: the record is damaged.
            StoreError: the cache cannot be read.
        """
        record = self.store.get(row.key, row.route, use=False)
        return None if record is None else stored.documents(records.decode(record, self._signing_key)[1])

    def kernel(self, row: Row) -> Kernel | None:
        """A stored kernel, with its knobs and the operands that it was compiled for; None if it cannot be told.

        Raises:
            StoreError: the cache cannot be read.
        """
        record = self.store.get(row.key, row.route, use=False)
        try:
            return (
                None if record is None else kernel_cache.kernel(records.decode(record, self._signing_key)[1]["kernel"])
            )
        except (RecordError, ValueError, KeyError, TypeError):  # damaged, or a document that is kept whole
            return None

    def verify(self, repair: bool = False, progress: Callable[[], None] = lambda: None) -> Report:
        """Check every record; with `repair`, remove bad ones and keep what is good of a damaged database.

        Raises:
            StoreError: the cache cannot be read, or not written for the repair.
        """
        return verify(self.store, self.directory, self._signing_key, repair=repair, progress=progress)

    def prune(
        self,
        max_bytes: int | None = None,
        older_than: float | None = None,
        dry_run: bool = False,
        among: Iterable[Listed] | None = None,
    ) -> list[Listed]:
        """Remove what was least recently used; gives what was removed, or would be.

        Args:
            max_bytes: what all records together may take.
            older_than: seconds since 1970; what was last used before goes.
            dry_run: remove nothing.
            among: only these rows count and go (None: all rows); without the two bounds all of them.

        Raises:
            StoreError: the cache cannot be read or written.
        """
        store = self.store
        store.flush()
        doomed = list(store.rows() if among is None else among)
        if among is None or max_bytes is not None or older_than is not None:
            doomed = eviction.surplus(doomed, max_bytes, older_than)
        if not dry_run:
            for listed in doomed:
                store.discard(listed.row.key, listed.row.route)
            store.maintain()
        return doomed

    def export_bundle(
        self, file: Any, rows: Iterable[Listed] | None = None, progress: Callable[[], None] = lambda: None
    ) -> Counts:
        """Write these rows' records (all, if None) into one portable file.

        Raises:
            StoreError: the cache cannot be read, or the file cannot be written.
        """
        chosen = list(self.rows()) if rows is None else rows
        return bundle.export(self.store, chosen, Path(file), self._signing_key, progress)

    def import_bundle(self, file: Any, progress: Callable[[], None] = lambda: None) -> Counts:
        """Merge a bundle; what is there already stays, damaged and wrongly signed records are skipped and counted.

        Raises:
            StoreError: the bundle cannot be read, or the cache cannot be written.
        """
        path = Path(file)
        if not path.is_file():
            raise StoreError("there is no such bundle", path=path, found=str(path), expected="a bundle file")
        source, _ = open_store(path, self._layers.options, read_only=True)
        try:
            return bundle.merge(source, self.store, self._signing_key, progress)
        finally:
            source.close()
