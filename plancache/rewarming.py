"""`rewarm` and `upgrade`: building again from stored documents, with no user code.

Whatever a cache, a bundle or a list of misses has ever seen is there with its documents: the graph, and how its plan
was chosen. From them it is built for the libraries that are installed now, for the same devices or for others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from typing import Any

from plancache import misses, ondevice, opening, stored
from plancache.builders import default_cache
from plancache.cache import PlanCache
from plancache.cudnn import device as device_properties
from plancache.errors import DeviceError, LibraryError, PlanCacheError, StoreError
from plancache.filler import (
    FAILED,
    UNSUPPORTED,
    About,
    Counted,
    Filler,
    Line,
    Progress,
    Report,
    grouped,
    without_replay,
)
from plancache.kernels import is_kernel
from plancache.keys import digest, topology
from plancache.misses import Miss
from plancache.places import Place, described, driver_version, live, placed
from plancache.store import records
from plancache.store.interface import Row, Store
from plancache.workers import Wanted

_log = logging.getLogger("plancache")
_SQLITE = b"SQLite format 3\0"
_OWN_KERNELS = "it was built with a kernel cache of the caller's own, which only that code can fill"
_NO_GRAPHS = "a kernel cache without a stored graph of its topology: it is filled when its code runs"


class Seen:
    """A graph that was asked for once: in a row, or in a list of misses.

    Attributes:
        graph: the graph's hash.
        build: the hash of how its plan was chosen.
        device: the fingerprint of the device that it was for.
        builder: the function that declared it, where it is known.
    """

    def __init__(self, graph: str, build: str, device: str, builder: str, read: Callable[[], dict[str, Any]]) -> None:
        self.graph = graph
        self.build = build
        self.device = device
        self.builder = builder
        self._read = read

    def documents(self) -> dict[str, Any]:
        """The documents, read each time: graph, build, labels, and the device's properties (may be empty).

        Raises:
            PlanCacheError: they cannot be read.
        """
        return self._read()


def rewarm(
    source: Any,
    devices: Iterable[Any] | None = None,
    executor: Executor | None = None,
    *,
    cache: PlanCache | None = None,
    jobs: int | None = None,
    driver: str | int | None = None,
    routes: Iterable[str] | None = None,
    progress: Progress | None = None,
) -> Report:
    """Build everything that `source` has seen again, from its documents, for the libraries that are installed now.

    Args:
        source: a cache's directory, a bundle, or a list of misses (`PLANCACHE_MISSES`). It is only read.
        devices: as for `warm`; None is each graph's own device: natively where that is the GPU that is here, else ahead
            of time.
        cache: where plans are stored, which may be the source; None is the process's cache. What is there for other
            libraries stays.

    The other arguments, and what is raised, are as for `warm`; and

    Raises:
        StoreError: the source cannot be read.
    """
    chosen = cache or default_cache()
    places = None if devices is None else placed(devices, driver, routes)
    with Source(Path(source), chosen) as opened:
        total = sum(1 for _ in _once(opened.seen(), with_device=places is None))
        if opened.passed_over:
            _log.warning(
                "%d lines of %s are cut short or damaged, and are passed over: what they name is not built",
                opened.passed_over,
                source,
            )
        filler = Filler(chosen, progress, total * (1 if places is None else len(places)))
        own = _Own(driver_version(driver), routes)
        seen = _once(opened.seen(), with_device=places is None)
        items = _items(filler, seen, lambda one: own.places(one) if places is None else places)
        return filler.run(_followed(grouped(items), opened.left_over()), executor, jobs, places or own.hint())


def upgrade(
    cache: PlanCache,
    executor: Executor | None = None,
    *,
    jobs: int | None = None,
    progress: Progress | None = None,
    measure: Callable[[Line], Any] | None = None,
) -> Report:
    """See `PlanCache.upgrade`."""
    place = live(None, ("native",))
    filler = Filler(cache, progress, None)
    seen = _once(_served_otherwise(cache, filler.libraries, place), with_device=False)
    with ondevice.Times(cache) as times:

        def gained(line: Line) -> dict[str, float] | None:
            try:
                return times.of(line.key)
            except PlanCacheError as error:
                _log.warning("what %s gains was not measured: %s", line.key[:16], error)
                return None

        filler.measure = gained if measure is None else measure
        return filler.run(grouped(_items(filler, seen, lambda _: [place])), executor, jobs, [place])


def _served_otherwise(cache: PlanCache, libraries: str, place: Place) -> Iterator[Seen]:
    """What this device was served, from any layer, by routes that are only a way to start."""
    good = ("native", "tuned") if cache._tuned else ("native",)
    native: set[str] = set()
    others: list[tuple[Store, Row]] = []
    for layer, listed in cache._rows_by_layer(device=place.device.fingerprint, environment=libraries):
        if listed.row.route in good:
            native.add(listed.row.key)
        elif listed.row.route in ("replay", "deviceless"):
            others.append((cache._layers[layer], listed.row))
    for store, row in others:
        if row.key not in native:
            yield _of_row(store, row, cache._signing_key)


class Source:
    """What is built again: a context manager.

    Attributes:
        passed_over: how many lines of a list of misses could not be read, the last time that it was.
    """

    passed_over = 0

    def __init__(self, path: Path, cache: PlanCache) -> None:
        self._path = path
        self._key = cache._signing_key
        self._cache: PlanCache | None = None
        self._topologies: dict[str, Seen] = {}
        if not path.exists():
            raise StoreError("there is nothing to build again", path=path, found=f"no {path}")
        if path.is_file() and not _is_bundle(path):
            if next(misses.read(path), None) is None and path.stat().st_size:
                raise StoreError(
                    "this holds nothing to build again",
                    path=path,
                    found=str(path),
                    expected="a cache's directory, a bundle, or a list of misses",
                )
            return
        self._cache = opening.open(path, mode="read-only", layers=())

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        if self._cache is not None:
            self._cache.close()

    def seen(self) -> Iterator[Seen]:
        """Everything that the source has seen."""
        if self._cache is None:
            self.passed_over = 0
            yield from (_of_miss(miss) for miss in misses.read(self._path, self._pass_over))
            return
        store = self._cache.store
        for listed in store.rows():
            if not is_kernel(listed.row):
                one = _of_row(store, listed.row, self._key)
                self._topologies.setdefault(listed.row.topology, one)
                yield one

    def _pass_over(self) -> None:
        self.passed_over += 1

    def left_over(self) -> Iterator[Line]:
        """Kernel caches that no graph of the source belongs to."""
        if self._cache is None:
            return
        headers = {
            one.row.graph: one.row for one in self._cache.store.rows() if is_kernel(one.row) and not one.row.size
        }
        if not headers:
            return
        for one in self._topologies.values():
            try:
                headers.pop(digest({"topology": topology(one.documents()["graph"])}), None)
            except PlanCacheError:
                continue
        for row in headers.values():
            yield Line(row.builder, (), row.device[:12], "kernels", UNSUPPORTED, error=_NO_GRAPHS, key=row.key)


def _is_bundle(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(_SQLITE)) == _SQLITE
    except OSError as error:
        raise StoreError("this cannot be read", path=path, found=str(error)) from error


def _of_row(store: Store, row: Row, key: bytes | None) -> Seen:
    def read() -> dict[str, Any]:
        record = store.get(row.key, row.route, use=False)
        if record is None:
            raise StoreError("a row is gone", found=row.key)
        return stored.documents(records.decode(record, key)[1])

    return Seen(row.graph, row.build, row.device, row.builder, read)


def _of_miss(miss: Miss) -> Seen:
    parts = {**miss.key.documents, "labels": miss.labels, "properties": miss.properties}
    return Seen(miss.key.graph, miss.key.build, miss.key.device, miss.builder, lambda: parts)


def _once(found: Iterable[Seen], with_device: bool) -> Iterator[Seen]:
    known: set[str] = set()
    for one in found:
        name = digest([one.graph, one.build, one.device if with_device else ""])
        if name not in known:
            known.add(name)
            yield one


def _followed(first: Iterable[Any], then: Iterable[Any]) -> Iterator[Any]:
    yield from first
    yield from then


class _Own:
    """The places of graphs that are built for their own devices again."""

    def __init__(self, driver: int, routes: Iterable[str] | None) -> None:
        self._driver = driver
        self._routes = None if routes is None else list(routes)
        self._known: dict[str, Place] = {}
        try:
            self._here: Place | None = live(None, None)
        except (DeviceError, LibraryError):
            self._here = None

    def hint(self) -> Sequence[Place]:
        """What may come, for the number of workers."""
        return [] if self._here is None else [self._here]

    def places(self, one: Seen) -> list[Place]:
        """Where this graph is built.

        Raises:
            DeviceError: its device is not known here.
        """
        if one.device not in self._known:
            self._known[one.device] = self._place(one)
        return [self._known[one.device]]

    def _place(self, one: Seen) -> Place:
        natively = self._routes is None or "native" in self._routes
        if natively and self._here is not None and self._here.device.fingerprint == one.device:
            return live(None, self._routes)
        parts = one.documents()
        properties = parts["properties"]
        if properties:
            return described(properties, self._driver, self._routes)
        for name in device_properties.names():
            if device_properties.device(name).fingerprint == one.device:
                return described(name, self._driver, self._routes)
        document = parts["device"]
        raise DeviceError(
            "the list of misses does not hold the full description of the device",
            found=f"{document.get('deviceName', '?')}, by its fingerprint",
            expected="a device that plancache knows by name",
            todo="Name the device: --device FILE, of `plancache device export FILE` on a host that has it.",
        )


def _items(filler: Filler, seen: Iterable[Seen], places: Callable[[Seen], Sequence[Place]]) -> Iterator[Any]:
    for one in seen:
        try:
            for place in places(one):
                yield from _item(filler, one, place)
        except PlanCacheError as error:
            yield Counted()
            yield Line(one.builder, (), one.device[:12], "", FAILED, error=str(error))


def _item(filler: Filler, one: Seen, place: Place) -> Iterator[Any]:
    key = place.key(one.graph, one.build, filler.libraries)
    lacking, settled = filler.missing(key, place)
    parts = one.documents() if lacking else {"graph": {}, "build": {}, "labels": {}}
    labels = {int(uid): name for uid, name in parts["labels"].items()}
    wanted = Wanted(parts["graph"], parts["build"], labels, one.builder, tuple(lacking))
    if lacking and wanted.graph["arguments"].get("kernel_cache"):
        yield from About(place, key, wanted).settled([(place.main, UNSUPPORTED, _OWN_KERNELS)], counted=True)
        return
    if lacking and wanted.is_dynamic:
        lacking, settled = without_replay(lacking, settled, place)
    about = About(place, key, replace(wanted, routes=tuple(lacking)))
    yield from about.settled(settled, counted=not lacking)
    if lacking:
        yield about
