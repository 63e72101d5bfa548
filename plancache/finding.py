"""Finding a plan: routes and layers in their order, faults of the store, and loading what was found."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from plancache import stored
from plancache.cudnn import device as devices
from plancache.cudnn import libraries, plans
from plancache.cudnn.plans import Request, Route
from plancache.errors import PlanCacheError, RecordError, StoreError
from plancache.lookups import Found
from plancache.outcome import Reason
from plancache.store.layers import Layers
from plancache.upkeep import Upkeep

if TYPE_CHECKING:
    from plancache.explain import Explanation
    from plancache.keys import PlanKey

_log = logging.getLogger("plancache")
# A store that took this long to fail (seconds) is not asked again for so long: a job must not wait at every graph.
_SLOW_FAULT, _REST = 1.0, 60.0


class Finding(Upkeep):
    """The part of `PlanCache` that reads."""

    def __init__(self, layers: Layers, mode: str, serve_ahead_of_time: bool, tuned: bool = True) -> None:
        super().__init__(layers)
        self.mode = mode
        self._tuned = tuned
        self._serve_ahead_of_time = serve_ahead_of_time or mode == "require-hit"
        self._warned: set[str] = set()
        self._rests_until = 0.0
        self._lock = threading.Lock()

    def explain_key(self, key: PlanKey, route: str, labels: Mapping[int, str], other_than: bool = False) -> Explanation:
        """The same for a key with its documents, as a list of misses keeps it.

        Args:
            key: the key that was asked for.
            route: the route that its graph takes first: `native`, or `deviceless` for a device that is not here.
            labels: names of the graph's tensors by uid, for people.
            other_than: pass over the key's own row: how far is the nearest other entry?

        Raises:
            StoreError: the cache cannot be read.
        """
        from plancache.explain import Explanation
        from plancache.nearest import nearest_in

        best = nearest_in(self._layers, key, route, labels, self._signing_key, other_than)
        row, differing = best if best is not None else (None, [])
        reason = Reason.FOUND if other_than or (row is not None and not differing) else Reason.ABSENT
        name = None if row is None or not differing else row.key[: len(str(key))]
        return Explanation(str(key), reason, "", name, tuple(differing))

    def _routes(self, wanted: Request) -> tuple[Route, ...]:
        """The routes that a graph takes, the best first."""
        if wanted.route is Route.DEVICELESS:
            return Route.DEVICELESS, Route.REPLAY
        # A deviceless plan runs right with a handle's device, but its kernels can be ten times slower.
        ahead = (Route.DEVICELESS,) if self._serve_ahead_of_time else ()
        # In mode check a plan is compared with the one that building gives, which is not the tuned one.
        tuned = (Route.TUNED,) if self._tuned and self.mode != "check" else ()
        return *tuned, Route.NATIVE, Route.REPLAY, *ahead

    def _candidates(self, wanted: Request) -> Iterator[Found]:
        """Every record of the key: the best route first, within it the nearest layer; also those that are of no use."""
        for route in self._routes(wanted):
            for layer in range(len(self._layers)):
                yield self._find_in(layer, wanted, route)

    def _find(self, wanted: Request) -> Found:
        """The best usable record; else what is wrong with the first that there is."""
        return self._best(wanted, lambda found: found)

    def _serve(self, wanted: Request) -> Found:
        """Find and load; the graph is changed only if the reason is FOUND."""
        return self._best(wanted, lambda found: _loaded(wanted, found))

    def _best(self, wanted: Request, accept: Callable[[Found], Found]) -> Found:
        """The first record that is found and accepted; else what is wrong with the first that there is."""
        first = None
        for found in self._candidates(wanted):
            answer = accept(found) if found.reason is Reason.FOUND else found
            if answer.reason is Reason.FOUND:
                self._set_aside(first, wanted)
                return answer
            first = _more_telling(first, answer)
        assert first is not None
        return first

    def _find_in(self, layer: int, wanted: Request, route: Route) -> Found:
        started = time.monotonic()
        if layer == 0 and started < self._rests_until:
            return Found(Reason.STORE_FAULT, route, detail="the cache rests after a fault")
        try:
            return self._looked_up(layer, wanted, route)
        except StoreError as error:
            self._store_fault(error, started, layer)
            return Found(Reason.STORE_FAULT, route, detail=str(error), layer=layer)

    def _looked_up(self, layer: int, wanted: Request, route: Route) -> Found:
        """What a layer holds. A store that cannot be read is a StoreError, whenever there was one before."""
        record = self._layers[layer].get(wanted.key.hash, route)
        if record is None:
            return Found(Reason.ABSENT, route, layer=layer)
        try:
            row, fields = stored.decode(record, wanted.key, route, self._signing_key)
        except RecordError as error:
            self._warn(error)
            if error.foreign:  # good for others: neither replaced nor removed
                return Found(Reason.FOREIGN, route, detail=str(error), layer=layer)
            return Found(Reason.DAMAGED, route, record, detail=str(error), layer=layer)
        if row.driver > wanted.device.driver:
            return Found(Reason.NEWER_DRIVER, route, detail=f"{row.driver} > {wanted.device.driver}", layer=layer)
        if row.frontend > libraries.frontend_version():
            return Found(Reason.NEWER_FRONTEND, route, detail=f"{row.frontend}", layer=layer)
        return Found(Reason.FOUND, route, record, fields, layer=layer)

    def _any_plan(self, wanted: Request) -> dict[str, Any] | None:
        """What is stored of a plan of the graph, however it was chosen; the one that is asked for comes first."""
        found = self._find(wanted)
        if found.fields is not None:
            return dict(found.fields["plan"])
        routes = self._routes(wanted)
        for layer in range(len(self._layers)):
            try:
                store = self._layers[layer]
                for key, route in store.keys(wanted.key.hash[-32:]):
                    record = store.get(key, route, use=False) if route in routes else None
                    if record is not None:
                        _, fields = stored.decode(record, wanted.key, route, self._signing_key, any_build=True)
                        return dict(fields["plan"])
            except (StoreError, RecordError) as error:
                self._warn(error)
        return None

    def _set_aside(self, unfit: Found | None, wanted: Request) -> None:
        """Remove an unfit record of the writable cache that another one stands in for: no build would replace it.

        A tuned plan that cuDNN refused is one of them, since the other one was loaded by the same process.
        """
        if unfit is None or unfit.layer > 0 or not self._writes():
            return
        if unfit.reason is not Reason.DAMAGED and (unfit.route, unfit.reason) != (Route.TUNED, Reason.REFUSED):
            return
        with suppress(StoreError):
            self._layers.top.discard(wanted.key.hash, unfit.route, unfit.record)

    def _writes(self) -> bool:
        """Whether plans are stored: the mode says so, and the directory lets us."""
        if self.mode not in ("read-write", "check") or time.monotonic() < self._rests_until:
            return False
        try:
            return not self._layers.top.read_only
        except StoreError as error:
            self._warn(error)
            return False

    def _store_fault(self, error: StoreError, started: float, layer: int = 0) -> None:
        """Warn; and where the fault took long (a lock that somebody holds), leave the cache alone for a while."""
        self._warn(error)
        if layer == 0 and time.monotonic() - started > _SLOW_FAULT:
            self._rests_until = time.monotonic() + _REST

    def _warn(self, error: PlanCacheError, effect: str = "graphs are built as if there were no cache") -> None:
        """One line a kind and cache: to the log, since a warning turned into an error would stop the job."""
        with self._lock:
            if error.what in self._warned:
                return
            self._warned.add(error.what)
        _log.warning("%s (%s; said once)", error, effect)


def _more_telling(first: Found | None, found: Found) -> Found:
    return found if first is None or (first.reason is Reason.ABSENT and found.reason is not Reason.ABSENT) else first


def _loaded(wanted: Request, found: Found) -> Found:
    assert found.fields is not None
    try:
        plans.load(wanted, found.route, found.fields["plan"], found.fields["blob"])
    except PlanCacheError:
        raise
    except Exception as error:
        devices.clear_error()
        if plans.is_refusal(error):
            return found._replace(reason=Reason.REFUSED, fields=None, detail=str(error))
        return found._replace(reason=Reason.FAULT, record=None, fields=None, detail=str(error))
    return found
