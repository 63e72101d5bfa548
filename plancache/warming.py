"""`plancache.warm`: build ahead of time what cached builders will ask for, for devices that need not be here.

The parent declares each graph, which takes a fraction of a millisecond, and looks it up by its key; what is not there
goes to a worker as documents, and comes back as a record that the parent stores. So one process writes, a worker needs
neither user code nor a cache, and whatever interrupts this, what has come back so far is kept.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any

from plancache.builders import CachedBuilder, default_cache, the_graph
from plancache.cache import PlanCache
from plancache.cudnn.graph import labels as labels_of
from plancache.cudnn.plans import Choice
from plancache.cudnn.target import target
from plancache.errors import BuilderError
from plancache.filler import FAILED, About, Counted, Filler, Line, Progress, Report, grouped, without_replay
from plancache.outcome import Outcome
from plancache.places import Place, placed
from plancache.workers import Wanted


def warm(
    builders: Iterable[CachedBuilder],
    devices: Iterable[Any] | None = None,
    executor: Executor | None = None,
    *,
    cache: PlanCache | None = None,
    jobs: int | None = None,
    driver: str | int | None = None,
    routes: Iterable[str] | None = None,
    progress: Progress | None = None,
) -> Report:
    """Build every case of every builder for every device, and store the plans; what is there already is passed over.

    Args:
        builders: functions that `plancache.cached` made, with their `cases`.
        devices: what `plancache.device` takes. A CUDA ordinal means the GPU that is here, for which plans are built
            natively; everything else is built for as described, and no GPU is touched. None is the current GPU.
        executor: any `concurrent.futures.Executor`; None makes worker processes of its own.
        cache: where plans are stored; None is the process's cache.
        jobs: number of worker processes; None is the number of processors that this process may use.
        driver: the driver of the fleet, as `"12.8"` or 12080. None is the lowest of the CUDA major of this cuDNN,
            since newer drivers take what was made for older ones.
        routes: of `native`, `deviceless` and `replay`; None is `native` for a GPU that is here, else both others.
        progress: called in this thread with (done, all, line) as each plan's fate is known.

    Raises:
        BuilderError: something else than a cached builder.
        DeviceError, SettingsError: a device, driver or route that is none.
        StoreError: the cache cannot be written.

    What fails is a line of the report and stops nothing else. When this is interrupted, whatever has come back is
    stored; the same call goes on from there. In a script it must be called under `if __name__ == "__main__":`, as
    everything that starts processes.
    """
    chosen = cache or default_cache()
    given = [builders] if isinstance(builders, CachedBuilder) else list(builders)
    for one in given:
        if not isinstance(one, CachedBuilder):
            raise BuilderError(
                "only builders that plancache.cached made can be filled ahead of time",
                found=repr(one),
                todo="Decorate it with @plancache.cached(cases=[...]).",
            )
    listed = [builder for builder in given if builder.cases]
    places = placed(devices, driver, routes)
    total = sum(len(builder.cases) for builder in listed) * len(places)
    filler = Filler(chosen, progress, total)
    return filler.run(_planned(filler, listed, places), executor, jobs, places)


def _planned(filler: Filler, builders: Sequence[CachedBuilder], places: Sequence[Place]) -> Iterator[Any]:
    def each() -> Iterator[Any]:
        for builder in builders:
            for place in places:
                for case in builder.cases:
                    yield from _case(filler, builder, case, place)

    return grouped(each())


def _case(filler: Filler, builder: CachedBuilder, case: tuple[Any, ...], place: Place) -> Iterator[Any]:
    try:
        graph, request = _declared(filler.cache, builder, case, place)
    except (Exception, SystemExit) as error:  # whatever user code raises
        yield Counted()
        text = str(error).strip() or type(error).__name__
        yield Line(builder.name, case, place.device.name, place.main, FAILED, error=text)
        return
    if isinstance(request, Outcome):
        yield Counted()
        text = f"not cached: {request.reason}{f' ({request.detail})' if request.detail else ''}"
        yield Line(builder.name, case, place.device.name, place.main, FAILED, error=text)
        return
    parts = request.key.documents
    key = replace(request.key, device=place.device.fingerprint)
    lacking, settled = filler.missing(key, place)
    wanted = Wanted(parts["graph"], parts["build"], {}, builder.name, ())
    if wanted.is_dynamic:
        lacking, settled = without_replay(lacking, settled, place)
    about = About(place, key, replace(wanted, routes=tuple(lacking)), case)
    yield from about.settled(settled, counted=not lacking)
    if lacking:
        yield replace(about, wanted=replace(about.wanted, labels=labels_of(graph)))


def _declared(cache: PlanCache, builder: CachedBuilder, case: tuple[Any, ...], place: Place) -> tuple[Any, Any]:
    def declare() -> tuple[Any, Any]:
        graph = the_graph(builder.function(None, *case), builder.name)
        choice = Choice(builder.heuristics, builder.policy)
        return graph, cache._request(graph, choice, time.perf_counter(), builder.name)

    if isinstance(place.what, str):
        with target(place.device):
            return declare()
    return declare()
