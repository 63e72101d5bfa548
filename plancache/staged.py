"""One graph on its way through the frontend's stages: what is put off until its key is known, and done where needed.

The key is known only when heuristics and filters are, at `build_plans()`; but `validate()`, long before, is what costs
most on a hit. So where some plan of the graph is stored, validation and planning are put off. At `build_plans()` the
plan is loaded, or all that was put off is done, in the order in which the caller asked for it.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from plancache import checking, lookups
from plancache.cudnn import device as devices
from plancache.cudnn import frontend, plans
from plancache.cudnn.deferred import StandIn
from plancache.cudnn.graph import NotKeyableError
from plancache.cudnn.plans import Choice, Declared, Request
from plancache.cudnn.unhooked import unhooked
from plancache.dynamic import anew, topology_key
from plancache.errors import PlanCacheError
from plancache.kernels import KernelCache
from plancache.outcome import Outcome, Reason, Source

if TYPE_CHECKING:
    from plancache.cache import PlanCache

_sessions: weakref.WeakKeyDictionary[Any, Session] = weakref.WeakKeyDictionary()


def of(graph: Any) -> Session | None:
    """The session of a graph that is on its way, or None."""
    session = _sessions.get(graph)
    if session is not None and frontend.was_changed(graph):
        # What was keyed is not this graph any longer; it begins anew, as a declared one.
        del _sessions[graph]
        if session.deferred:
            frontend.let_go(graph)
        return None
    return session


def start(cache: PlanCache, graph: Any) -> Session | None:
    """Begin with a declared graph: validate it, or put that off. None, and nothing done, if it cannot be cached."""
    started = time.perf_counter()
    if devices.is_capturing(frontend.handle_of(graph)):
        return None
    try:
        declared = cache._declared(graph, Choice(), started)
        if isinstance(declared, Outcome):
            cache._bypassed(graph, declared)
            return None
        wanted = declared.request(graph, Choice())
    except (PlanCacheError, NotKeyableError):
        return None
    session = Session(cache, graph, declared)
    own = frontend.argument(graph, "kernel_cache")
    if own is not None:
        session.own, session.kernels = True, cache._dynamic.of_native(own)
    elif frontend.is_dynamic(graph):
        session.kernels = cache._dynamic.shared(topology_key(wanted))
    stored = None if session.own or cache.mode == "check" else cache._any_plan(wanted)
    if stored is not None:
        session.put_off(graph, stored)
    else:
        session.validate(graph)
    _sessions[graph] = session
    return session


def waiting() -> bool:
    """Whether some graph's stages are put off."""
    return any(session.deferred for session in list(_sessions.values()))


class Session:
    """See the module. It holds no reference to its graph, which is given to each method."""

    def __init__(self, cache: PlanCache, graph: Any, declared: Declared) -> None:
        self.cache = cache
        self.deferred = False
        self.planned = False
        self._chosen = self._mixed = False
        self.own = False
        self.kernels: KernelCache | None = None
        self._declared = declared
        self._snapshot = frontend.Snapshot(graph)
        self._before = plans.declared_tensors(graph)
        self._calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self._heuristics: Any = None
        self._plan: tuple[int, Mapping[Any, int]] | None = None
        self._late_limit = False

    def put_off(self, graph: Any, stored: Mapping[str, Any]) -> None:
        """Make the graph pass for a validated one, with what is stored of one of its plans."""
        # Where a Python engine may take the graph, validate() leaves it open to changes.
        frozen = not stored.get("validates_by_itself")
        frontend.put_off(graph, StandIn(graph, self.really), stored["inferred"], frozen)
        self.deferred = True

    def validate(self, graph: Any) -> None:
        """Validate the graph really; one with dynamic shapes gets the kernel cache of its topology."""
        if self.kernels is not None and not self.own:
            frontend.attach_kernel_cache(graph, self.kernels.native)
        with unhooked():
            graph.validate()

    def build_operation_graph(self, graph: Any) -> None:
        """Build the operation graph really. A kernel cache that cuDNN does not take shows here: it is made anew."""
        with unhooked():
            try:
                graph.build_operation_graph()
            except Exception:
                if self.kernels is None or self.own or not self.kernels.loaded:
                    raise

                def again() -> None:
                    self._snapshot.restore(graph)
                    self.validate(graph)
                    graph.build_operation_graph()

                anew(self.kernels, again)

    def say_later(self, name: str, *args: Any, **kwargs: Any) -> None:
        """Note a call that is to be made again where the graph is validated after all."""
        self._calls.append((name, args, kwargs))

    def plan_later(self, graph: Any, name: str, *args: Any) -> None:
        """The same for the call that plans."""
        self.planned = True
        frontend.pass_for_planned(graph)
        self.say_later(name, *args)

    def note_limit(self) -> None:
        """A workspace limit that is set from now on reaches the backend."""
        self._late_limit = True

    def really(self, graph: Any) -> None:
        """Do everything that was put off, in the order in which it was asked for."""
        if self.deferred:
            self.deferred = self.planned = False
            self._replay(graph)
            self._calls.clear()

    def _replay(self, graph: Any) -> None:
        added = self._snapshot.added(graph)
        self._snapshot.restore(graph)
        self.validate(graph)
        with unhooked():
            for name, args, kwargs in self._calls:
                if name == "build_operation_graph":
                    self.build_operation_graph(graph)
                else:
                    getattr(graph, name)(*args, **kwargs)
        frontend.register(graph, added)

    def choose(self, graph: Any, heuristics: Any = None, plan: Any = None) -> bool:
        """Note how the plan is chosen; whether one is stored that was chosen so, with the filters of now."""
        if self._chosen:
            self._mixed = True
            return False
        self._chosen, self._heuristics, self._plan = True, heuristics, plan
        return self.deferred and self.plan_list(graph) is not None

    def plan_list(self, graph: Any) -> frontend.PlanList | None:
        """The plans of the graph as it is chosen so far, if what was chosen so is stored."""
        wanted = self._wanted(graph, None)
        found = None if wanted is None else self.cache._find(wanted)
        return None if found is None or found.fields is None else plans.plan_list(found.fields["plan"])

    def serve(self, graph: Any, policy: Any = None) -> bool:
        """Load the plan into the graph whose planning was put off; if there is none, plan it really."""
        started = time.perf_counter()
        calls, added = list(self._calls), self._snapshot.added(graph)
        wanted = self._wanted(graph, policy)
        if wanted is not None:
            frontend.take_back(graph, self._snapshot)

            def again(planned: Any) -> None:
                self._calls = calls
                self._replay(planned)
                with unhooked():
                    planned.check_support()
                    planned.build_plans()

            found = self.cache._serve(replace(wanted, run=again))
            if found.reason is Reason.FOUND:
                self.deferred = self.planned = False
                frontend.register(graph, added)
                self.finish(graph, lookups.outcome(lookups.source(found), found, wanted.key, started))
                return True
        self.really(graph)
        frontend.register(graph, added)
        return False

    def build(self, graph: Any, run: Callable[[Any], None], policy: Any) -> None:
        """Build a graph that was planned really, one process at a time, and keep its plan."""
        started = time.perf_counter()
        wanted = None if frontend.is_pinned(graph) or self.own else self._wanted(graph, policy)
        if wanted is None:
            self._run(graph, run)
            reason = Reason.KERNEL_CACHE if self.own else Reason.EVERY_PLAN
            self.finish(graph, lookups.bypassed(reason, "", started))
            return
        compiled: list[bool] = []
        wanted = replace(wanted, run=lambda planned: compiled.append(self._run(planned, run)), before=self._before)
        if self.cache.mode == "check" and checking.is_first_hit(self.cache, wanted):
            self.finish(graph, checking.check(self.cache, wanted, started))
            return
        found = self.cache._find(wanted)
        self.cache._missed(wanted, found)
        if self.cache.mode == "require-hit":
            raise lookups.miss_error(found.reason, found.detail, wanted.key)
        outcome = self.cache._build(wanted, found, started)
        if self.kernels is not None and compiled == [False] and self.kernels.serves:
            source = Source.DISK if self.kernels.loaded else Source.MEMORY
            outcome = replace(outcome, source=source, reason=Reason.KERNELS, route="kernels")
        self.finish(graph, outcome)

    def _run(self, graph: Any, run: Callable[[Any], None]) -> bool:
        """Build; whether a kernel was compiled into the kernel cache, which is then written."""
        with unhooked():
            if self.kernels is None:
                run(graph)
                return True
            with self.kernels.lock:
                started = time.perf_counter()
                run(graph)
                seconds = time.perf_counter() - started
                compiled = self.kernels.moved(seconds)
                self.kernels.flush(seconds)
                return compiled

    def finish(self, graph: Any, outcome: Outcome) -> None:
        """The graph is ready."""
        _sessions.pop(graph, None)
        self.cache._noted(graph, outcome)

    def _wanted(self, graph: Any, policy: Any) -> Request | None:
        """The request as it is known now; None where there is no plan that stands for all that was asked for."""
        if self._mixed or getattr(policy, "name", "") == "ALL":
            return None
        try:
            choice = Choice(self._heuristics, policy, self._plan)
            return self._declared.request(graph, choice, late_workspace_limit=self._late_limit)
        except (PlanCacheError, NotKeyableError, AttributeError, TypeError, ValueError):
            return None  # wrong arguments are the frontend's to refuse
