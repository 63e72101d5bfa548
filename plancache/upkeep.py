"""What is done with a cache apart from serving graphs: listing, checking, pruning, bundles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from plancache import stored
from plancache.cudnn import kernel_cache
from plancache.cudnn.kernel_cache import Kernel
from plancache.errors import RecordError, StoreError
from plancache.kernels import is_kernel
from plancache.store import eviction, records
from plancache.store.interface import Listed, Row, Store
from plancache.store.layers import Layers, open_store

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from plancache.cache import PlanCache
    from plancache.filler import Line, Progress, Report
    from plancache.ondevice import Verdict
    from plancache.store.bundle import Counts
    from plancache.store.verify import Report as VerifyReport
    from plancache.totals import Names, Totals
    from plancache.tuning_table import Tuning

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
        """What is stored, newest first: plans, and the parts of kernel caches (their routes begin with `kernels-`).

        Args:
            equal: columns of `Row` and the values that they must have, such as `device=FINGERPRINT`.

        Raises:
            StoreError: the cache cannot be read.
        """
        return self.store.rows(**equal)

    def rows_with_layers(self) -> list[Listed]:
        """What lookups come upon: the rows of this cache and of the layers under it, of equal ones the nearest.

        A cache or a layer that cannot be read is passed over, as by a lookup.

        Raises:
            StoreError: none of them can be read.
        """
        return [listed for _, listed in self._rows_by_layer()]

    def _rows_by_layer(self, **equal: str) -> list[tuple[int, Listed]]:
        """The same with the number of the layer; rows with these values alone."""
        found: dict[tuple[str, str], tuple[int, Listed]] = {}
        failures: list[StoreError] = []
        for number in range(len(self._layers)):
            try:
                for listed in self._layers[number].rows(**equal):
                    found.setdefault((listed.row.key, listed.row.route), (number, listed))
            except StoreError as error:
                failures.append(error)
        if len(failures) == len(self._layers):
            raise failures[0]
        return list(found.values())

    def totals(self) -> Totals:
        """What this cache holds, and what all processes have counted so far: hits, misses, seconds saved.

        Not promised: every lookup. Counts are best effort, and come with a process's next stored plan or its end;
        caches that are only read count nothing.

        Raises:
            StoreError: the cache cannot be read.
        """
        from plancache.totals import Totals

        self.store.flush()
        return Totals.of(self.store.tallies(), self.rows())

    def names(self, rows: Iterable[Listed]) -> Names:
        """What the devices and environments of these rows are called. Reads one record for each.

        Args:
            rows: as `rows` gives them.

        Raises:
            StoreError: the cache cannot be read.
        """
        from plancache.totals import Names

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

        Args:
            row: a plan's row, as `rows` gives it in `Listed.row`.

        Raises:
            RecordError: the record is damaged.
            StoreError: the cache cannot be read.
        """
        record = self.store.get(row.key, row.route, use=False)
        return None if record is None else stored.documents(records.decode(record, self._signing_key)[1])

    def tuning(self, row: Row) -> Tuning | None:
        """The table of a tuned plan: every candidate with what came of it; None for any other plan, or if it is gone.

        Args:
            row: a plan's row, as `rows` gives it in `Listed.row`.

        Raises:
            RecordError: the record is damaged.
            StoreError: the cache cannot be read.
        """
        from plancache.tuning_table import Tuning  # what a hit does not need

        record = self.store.get(row.key, row.route, use=False)
        table = None if record is None else stored.tuning(records.decode(record, self._signing_key)[1])
        return None if table is None else Tuning.of(table)

    def kernel(self, row: Row) -> Kernel | None:
        """A stored kernel, with its knobs and the operands that it was compiled for; None if it cannot be told.

        Args:
            row: a kernel's row, as `rows` gives it in `Listed.row`.

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

    def verify(self, repair: bool = False, progress: Callable[[], None] = lambda: None) -> VerifyReport:
        """Check every record's digest and what it is filed under; nothing is loaded into cuDNN.

        Args:
            repair: remove bad records, and keep what is good of a damaged database.
            progress: called after each record.

        Raises:
            StoreError: the cache cannot be read, or not written for the repair.
        """
        from plancache.store.verify import verify

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

    def upgrade(
        self,
        executor: Executor | None = None,
        *,
        jobs: int | None = None,
        progress: Progress | None = None,
        measure: Callable[[Line], Any] | None = None,
    ) -> Report:
        """Build natively what this device has only by the routes `replay` and `deviceless`, also in layers.

        Args:
            executor: as for `plancache.warm`.
            jobs: as for `plancache.warm`.
            progress: as for `plancache.warm`.
            measure: called with each line of a plan that was built and stored; what it gives is the line's `gain`.
                None is microseconds by route, of what this cache and its layers have: each is run in a child process.

        Raises:
            DeviceError: there is no GPU here.
            StoreError: the cache cannot be read or written.
        """
        from plancache import rewarming

        return rewarming.upgrade(self, executor, jobs=jobs, progress=progress, measure=measure)  # type: ignore[arg-type]

    def export_bundle(
        self, file: Any, rows: Iterable[Listed] | None = None, progress: Callable[[], None] = lambda: None
    ) -> Counts:
        """Write records into one portable file. It is whole or not there.

        Args:
            file: where; what is there is replaced.
            rows: what to write; None is all.
            progress: called after each record.

        Raises:
            StoreError: the cache cannot be read, or the file cannot be written.
        """
        from plancache.store import bundle

        chosen = list(self.rows()) if rows is None else rows
        return bundle.export(self.store, chosen, Path(file), self._signing_key, progress)

    def import_bundle(self, file: Any, progress: Callable[[], None] = lambda: None) -> Counts:
        """Merge a bundle; what is there already stays, damaged and wrongly signed records are skipped and counted.

        Args:
            file: a file that `export_bundle` wrote. It is only read.
            progress: called after each record.

        Raises:
            StoreError: the bundle cannot be read, or the cache cannot be written.
        """
        path = Path(file)
        if not path.is_file():
            raise StoreError("there is no such bundle", path=path, found=str(path), expected="a bundle file")
        from plancache.store import bundle

        source, _ = open_store(path, self._layers.options, read_only=True)
        try:
            return bundle.merge(source, self.store, self._signing_key, progress)
        finally:
            source.close()

    def verify_on_device(
        self,
        rows: Iterable[Listed] | None = None,
        *,
        timeout: float = 60.0,
        keep: bool = False,
        memory: int | None = None,
        progress: Callable[[], None] = lambda: None,
    ) -> list[Verdict]:
        """Run plans of this device, each loaded by its own route in a child process, and compare them with what is
        built natively of the same graph.

        Wrong ones, and those that hang or end their process, are removed from the writable cache. Where both gave
        nothing but zeros and NaN the verdict is `unproven`, and the plan stays.

        Args:
            rows: which; None is all. Those of other devices and libraries are passed over.
            timeout: seconds that one plan may take.
            keep: remove nothing.
            memory: bytes on the device that one graph may take; None is most of what is free.
            progress: called after each.

        Raises:
            DeviceError: there is no CUDA device here.
            StoreError: the cache cannot be read, or not be written.
        """
        from plancache import ondevice

        chosen = list(self.rows()) if rows is None else list(rows)
        return list(ondevice.verify(cast("PlanCache", self), chosen, timeout, keep, memory, progress))

    def tune(
        self,
        graph: Any,
        heuristics: Any = None,
        policy: Any = None,
        *,
        seconds: float = 60.0,
        workspace_limit: int | None = None,
        memory: int | None = None,
        builder: str = "",
        again: bool = False,
        progress: Callable[[int, Tuning], None] = lambda place, table: None,
    ) -> Tuning:
        """Run every plan that cuDNN offers for a graph on its device, and keep the fastest for later builds.

        The candidates are those of the heuristic modes A, B and FALLBACK. Each is built, run on random inputs, compared
        with the heuristics' first choice and timed. The graph itself is left as it was declared; `build` then finds the
        tuned plan before any other (unless the cache was opened with `tuned=False`). A second call goes on with what
        was not measured yet, or gives what is known.

        Where another process is tuning the graph this one waits for its table, `seconds` and `PLANCACHE_WAIT` long,
        as long as that process lives. After that the answer's `outcome` is `busy` in place of `tuned`: nothing failed,
        and the other process stores what it finds.

        Args:
            graph: a `cudnn.pygraph` with a handle, neither validated nor planned.
            heuristics: as for `build`: what is tuned is the plan of exactly this way of building.
            policy: as for `build`.
            seconds: how long candidates are tried.
            workspace_limit: bytes; candidates that need a larger workspace are passed over.
            memory: bytes on the device for inputs, outputs and workspace; None is most of what is free.
            builder: the name of the function that declared the graph, for listings.
            again: measure all of them anew (but those that hung).
            progress: called before each candidate with its place and what is known so far.

        Raises:
            BuilderError: the graph has no key, an explicit plan or dynamic shapes, or all its outputs are nothing but
                zeros and NaN, by which nothing can be judged. Nothing is stored.
            DeviceError: there is no GPU here, or the graph is for another device.
            RunError: the graph cannot be run on random inputs, or a candidate has left the device at fault: this
                process can run nothing more on it, and what was measured before is kept.
            StoreError: the cache cannot be written.

        Not promised: that every candidate comes back. A plan that hangs hangs this process; `plancache tune` runs them
        in a process of their own.
        """
        from plancache import tuning  # what a hit does not need
        from plancache.cudnn.plans import Choice
        from plancache.tuning_table import Limits

        limits = Limits(seconds, workspace_limit, memory)
        return tuning.tune(cast("PlanCache", self), graph, Choice(heuristics, policy), limits, builder, progress, again)
