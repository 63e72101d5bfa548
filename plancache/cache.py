"""`PlanCache`: key, lookup, load, or build and store.

In order of importance: never the wrong plan; a fault of the cache never stops the job; a hit runs nothing that
only a build needs; every answer says why.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from plancache.cudnn import frontend, plans
from plancache.cudnn.graph import NotKeyableError
from plancache.cudnn.plans import Request, Route, UnknownEnvironmentError
from plancache.errors import BuilderError, MissError, PlanCacheError, RecordError, StoreError
from plancache.keys import PlanKey, pack
from plancache.outcome import Outcome, Reason, Source
from plancache.settings import Settings, check_mode
from plancache.store import records
from plancache.store.directory import default_directory
from plancache.store.interface import Row, Store
from plancache.store.plans import SqliteStore

_log = logging.getLogger("plancache")
_outcomes: weakref.WeakKeyDictionary[Any, Outcome] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class _Found:
    """What a lookup came to: a record that may be loaded, or why there is none."""

    reason: Reason
    route: Route
    record: bytes | None = None  # also of an unfit record, so that exactly this one can be replaced
    fields: dict[str, Any] | None = None
    detail: str = ""


class PlanCache:
    """Plans on disk, for any number of processes and threads.

    Made by `plancache.open`; a context manager. A fault of the cache itself (locked, full, damaged, not writable)
    is one warning in the log `plancache`, and graphs are built as if there were no cache.
    """

    def __init__(self, store: Store, directory: Path, mode: str, serve_ahead_of_time: bool = False) -> None:
        self._store = store
        self.directory = directory
        self.mode = mode
        self._serve_ahead_of_time = serve_ahead_of_time or mode == "require-hit"
        self._warned: set[str] = set()
        self._lock = threading.Lock()

    def build(self, graph: Any, heuristics: Any = None, policy: Any = None) -> Outcome:
        """Make a declared graph ready to execute: from the cache, or by building it and storing its plan.

        Args:
            graph: a `cudnn.pygraph` that was neither validated nor planned. It is changed in place and answers
                afterwards as a built one.
            heuristics: a list of `cudnn.heur_mode`; None is the frontend's default, A then FALLBACK.
            policy: a `cudnn.build_plan_policy`; None is HEURISTICS_CHOICE.

        Raises:
            BuilderError: `graph` is no graph, or plans were made for it already.
            DeviceError: the graph's `sm_version` is not its device's.
            MissError: in mode `require-hit`, if the plan is not in the cache.
            And whatever cuDNN raises for a graph that cannot be built, unchanged; nothing is stored then.

        Not promised: that the plan is the one that a build would choose today. It is the one that was chosen
        when it was stored, by the same heuristics of the same libraries for the same graph and device.
        """
        started = time.perf_counter()
        wanted = self._request(graph, heuristics, policy, started)
        if isinstance(wanted, Outcome):
            return self._noted(graph, self._bypass(graph, heuristics, policy, wanted, started))
        found = self._serve(wanted)
        if found.reason is Reason.FOUND:
            return self._noted(graph, _outcome(Source.DISK, found, wanted.key, started))
        if self.mode == "require-hit":
            raise _miss_error(found.reason, found.detail, wanted.key)
        return self._noted(graph, self._build(wanted, found, started))

    def lookup(self, graph: Any, heuristics: Any = None, policy: Any = None) -> Outcome:
        """The same as `build`, but on a miss the graph is left as it was and nothing is built."""
        started = time.perf_counter()
        wanted = self._request(graph, heuristics, policy, started)
        if isinstance(wanted, Outcome):
            return wanted
        found = self._serve(wanted)
        source = Source.DISK if found.reason is Reason.FOUND else Source.MISS
        return self._noted(graph, _outcome(source, found, wanted.key, started))

    def contains(self, graph: Any, heuristics: Any = None, policy: Any = None) -> bool:
        """Whether `build` would find the plan. Neither loads nor changes the graph.

        Not promised: that cuDNN then takes it, or that it is still there a moment later.
        """
        wanted = self._request(graph, heuristics, policy, time.perf_counter())
        return not isinstance(wanted, Outcome) and self._find(wanted).reason is Reason.FOUND

    def key(self, graph: Any, heuristics: Any = None, policy: Any = None) -> PlanKey:
        """The key that a declared graph is looked up under.

        Raises:
            BuilderError: the graph has no key: it is none, was validated before, holds a value without an exact
                encoding, or its device or libraries could not be identified.
        """
        wanted = self._request(graph, heuristics, policy, time.perf_counter())
        if isinstance(wanted, Outcome):
            raise BuilderError(f"this graph has no key: {wanted.reason}", found=wanted.detail or None)
        return wanted.key

    def rows(self) -> Iterator[Row]:
        """What is stored, oldest first.

        Raises:
            StoreError: the cache cannot be read.
        """
        return self._store.rows()

    def flush(self) -> None:
        """Write what is held back. Plans are written at once, so there is nothing yet."""

    def close(self) -> None:
        """Release the calling thread's hold on the files. The cache may be used again."""
        self._store.close()

    def __enter__(self) -> PlanCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"PlanCache({str(self.directory)!r}, mode={self.mode!r})"

    # ------------------------------------------------------------ steps

    def _request(self, graph: Any, heuristics: Any, policy: Any, started: float) -> Request | Outcome:
        """The request of a graph, or the outcome that says why it has none."""
        if not frontend.is_graph(graph):
            raise BuilderError("this is no graph", found=type(graph).__name__, expected="a cudnn.pygraph")
        if frontend.is_planned(graph):
            raise BuilderError(
                "plans were already made for this graph",
                found="a planned graph",
                expected="one that was declared only",
                todo="Leave build() out of the builder; plancache calls it where it is needed.",
            )
        try:
            if self.mode == "off":
                return _bypassed(Reason.OFF, "", started)
            if frontend.is_validated(graph):
                return _bypassed(Reason.VALIDATED, "", started)
            return plans.request(graph, heuristics, policy)
        except NotKeyableError as error:
            return _bypassed(Reason.NOT_KEYABLE, str(error), started)
        except UnknownEnvironmentError as error:
            return _bypassed(Reason.UNKNOWN_ENVIRONMENT, str(error), started)

    def _bypass(self, graph: Any, heuristics: Any, policy: Any, outcome: Outcome, started: float) -> Outcome:
        if self.mode == "require-hit":
            raise _miss_error(outcome.reason, outcome.detail, None)
        plans.run_build(graph, heuristics, policy)
        return replace(outcome, seconds=time.perf_counter() - started)

    def _routes(self, wanted: Request) -> tuple[Route, ...]:
        # A deviceless plan runs right with a handle's device, but its kernels can be ten times slower.
        ahead = self._serve_ahead_of_time and wanted.route is Route.NATIVE
        return (wanted.route, Route.DEVICELESS) if ahead else (wanted.route,)

    def _find(self, wanted: Request) -> _Found:
        """The best usable record; of several unusable ones the first one's reason."""
        first = None
        for route in self._routes(wanted):
            found = self._find_route(wanted, route)
            if found.reason is Reason.FOUND:
                return found
            first = first or found
        assert first is not None
        return first

    def _find_route(self, wanted: Request, route: Route) -> _Found:
        try:
            record = self._store.get(wanted.key.hash, route)
        except StoreError as error:
            self._warn(error)
            return _Found(Reason.STORE_FAULT, route, detail=str(error))
        if record is None:
            return _Found(Reason.ABSENT, route)
        try:
            fields = records.decode(record)
            _check(fields, wanted.key, route)
        except RecordError as error:
            self._warn(error)
            return _Found(Reason.DAMAGED, route, record, detail=str(error))
        if fields["driver"] > wanted.device.driver:
            return _Found(Reason.NEWER_DRIVER, route, detail=f"{fields['driver']} > {wanted.device.driver}")
        if fields["frontend"] > frontend.frontend_version():
            return _Found(Reason.NEWER_FRONTEND, route, detail=f"{fields['frontend']}")
        return _Found(Reason.FOUND, route, record, fields)

    def _serve(self, wanted: Request) -> _Found:
        """Find and load; the graph is changed only if the reason is FOUND."""
        found = self._find(wanted)
        if found.fields is None:
            return found
        try:
            plans.load(wanted, found.route, found.fields["plan"], found.fields["blob"])
        except PlanCacheError:
            raise
        except Exception as error:
            if plans.is_refusal(error):
                return replace(found, reason=Reason.REFUSED, fields=None, detail=str(error))
            return replace(found, reason=Reason.FAULT, record=None, fields=None, detail=str(error))
        return found

    def _build(self, wanted: Request, found: _Found, started: float) -> Outcome:
        built = plans.build(wanted)
        if isinstance(built, str):
            reason = Reason.PYTHON_ENGINE if built == "python" else Reason.DELEGATED
            return replace(_bypassed(reason, "", started), key=wanted.key)
        # A record that cuDNN refused is replaced only now: the same process has shown that the fault is not its own.
        stored = self.mode == "read-write" and self._put(wanted, built, found.record)
        outcome = _outcome(Source.BUILT, found, wanted.key, started)
        return replace(outcome, stored=stored, route=wanted.route.value)

    def _put(self, wanted: Request, built: plans.BuiltPlan, replaces: bytes | None) -> bool:
        key, chosen = wanted.key, built.plans.chosen
        row = Row(
            key=key.hash,
            route=wanted.route,
            graph=key.graph,
            device=key.device,
            environment=key.environment,
            build=key.build,
            driver=wanted.device.driver,
            frontend=frontend.frontend_version(),
            name=chosen.name,
            engine=chosen.engine,
            created=time.time(),
            seconds=built.seconds,
            size=len(built.blob),
        )
        try:
            record = records.encode(
                {
                    "key": [key.graph, key.device, key.environment, key.build],
                    "route": row.route,
                    "driver": row.driver,
                    "frontend": row.frontend,
                    "created": row.created,
                    "plan": plans.described(built),
                    "documents": pack({**key.documents, "properties": wanted.device.to_json()}),
                    "blob": built.blob,
                }
            )
            return self._store.put(row, record, replaces)
        except StoreError as error:
            self._warn(error)
            return False

    def _warn(self, error: PlanCacheError) -> None:
        """One line a kind and cache: to the log, since a warning turned into an error would stop the job."""
        with self._lock:
            if error.what in self._warned:
                return
            self._warned.add(error.what)
        _log.warning("%s (graphs are built as if there were no cache; said once)", error)

    def _noted(self, graph: Any, outcome: Outcome) -> Outcome:
        _outcomes[graph] = outcome
        return outcome


def open(directory: Any = None, *, mode: str | None = None) -> PlanCache:  # the public name is plancache.open
    """Open the cache in a directory, or make one there.

    Args:
        directory: where; None is `PLANCACHE_DIR`, else the user's cache directory.
        mode: `read-write`, `read-only` (nothing is written), `require-hit` (a miss is an error) or `off`; None is
            `PLANCACHE_MODE`, else `read-write`.

    Raises:
        SettingsError: the mode, or a `PLANCACHE_` variable, has a value that is not allowed.

    A directory that cannot be used is a warning at the first lookup, not an error here.
    """
    settings = Settings.read()
    chosen = settings.mode if mode is None else check_mode(mode, "mode")
    path = Path(directory) if directory is not None else settings.directory or default_directory()
    store = SqliteStore(path, read_only=chosen in ("read-only", "require-hit"))
    return PlanCache(store, path, chosen, settings.serve_ahead_of_time)


def last_outcome(graph: Any) -> Outcome | None:
    """What the last `build` or `lookup` of this graph came to; None if there was none."""
    return _outcomes.get(graph)


def _bypassed(reason: Reason, detail: str, started: float) -> Outcome:
    return Outcome(Source.BYPASSED, reason, None, time.perf_counter() - started, detail)


def _outcome(source: Source, found: _Found, key: PlanKey, started: float) -> Outcome:
    route = found.route.value if found.reason is Reason.FOUND else None
    return Outcome(source, found.reason, key, time.perf_counter() - started, found.detail, route=route)


def _miss_error(reason: Reason, detail: str, key: PlanKey | None) -> MissError:
    return MissError(
        "a plan is not in the cache, and the mode is require-hit",
        key=key,
        reason=reason,
        found=f"{reason}{f' ({detail})' if detail else ''}, key {key}",
        todo="Fill the cache first, or unset PLANCACHE_MODE.",
    )


def _check(fields: dict[str, Any], key: PlanKey, route: Route) -> None:
    """That a record is the one asked for, whatever row it was found in."""
    expected = [key.graph, key.device, key.environment, key.build]
    if fields.get("key") != expected or fields.get("route") != route:
        raise RecordError("the record in this row is another plan's", found=fields.get("key"), expected=expected)
