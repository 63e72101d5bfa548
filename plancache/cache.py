"""`PlanCache`: key, lookup, load, or build and store.

In order of importance: never the wrong plan; a fault of the cache never stops the job; a hit runs nothing that
only a build needs; every answer says why.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plancache import checking, lookups, misses, stored
from plancache.cudnn import device as devices
from plancache.cudnn import environment, frontend, plans, target
from plancache.cudnn.graph import NotKeyableError
from plancache.cudnn.graph import labels as labels_of
from plancache.cudnn.plans import Choice, Declared, Request, Route, UnkeptPlanError, UnknownEnvironmentError
from plancache.dynamic import Dynamic, topology_key
from plancache.errors import BuilderError, CaptureError, PlanCacheError, StoreError
from plancache.finding import Finding
from plancache.kernels import KernelCache, KernelKey
from plancache.keys import PlanKey, digest
from plancache.lookups import Found
from plancache.misses import Miss
from plancache.outcome import Outcome, Reason, Source
from plancache.store.interface import Store
from plancache.store.layers import Layers

if TYPE_CHECKING:
    from plancache.explain import Explanation

Plan = tuple[int, Mapping[Any, int]]
_log = logging.getLogger("plancache")
_open_caches: weakref.WeakSet[PlanCache] = weakref.WeakSet()
_outcomes: weakref.WeakKeyDictionary[Any, Outcome] = weakref.WeakKeyDictionary()


class PlanCache(Finding):
    """Plans on disk, for any number of processes and threads.

    Made by `plancache.open`; a context manager. A fault of the cache itself (locked, full, damaged, not writable)
    is one warning in the log `plancache`, and graphs are built as if there were no cache.
    """

    def __init__(
        self,
        layers: Layers,
        mode: str,
        serve_ahead_of_time: bool = False,
        misses: Path | None = None,
        tuned: bool = True,
    ) -> None:
        super().__init__(layers, mode, serve_ahead_of_time, tuned)
        self._misses_file = misses
        self._misses: deque[Miss] = deque(maxlen=64)
        self._listed: set[tuple[str, str]] = set()
        self._counts: Counter[tuple[Source, Reason]] = Counter()
        self._reasons: set[Reason] = set()
        self._proven: set[str] = set()
        self._dynamic = Dynamic(self._kernel_stores, layers.locks, self._signing_key, self._writes, self._warn)
        _open_caches.add(self)

    def build(
        self,
        graph: Any,
        heuristics: Any = None,
        policy: Any = None,
        plan: Plan | None = None,
        builder: str = "",
    ) -> Outcome:
        """Make a declared graph ready to execute: from the cache, or by building it and storing its plan.

        Args:
            graph: a `cudnn.pygraph` that was neither validated nor planned. It is changed in place and answers
                afterwards as a built one.
            heuristics: a list of `cudnn.heur_mode`; None is the frontend's default, A then FALLBACK.
            policy: a `cudnn.build_plan_policy`; None is HEURISTICS_CHOICE.
            plan: engine id and knobs (`{cudnn.knob_type: int}`) of the plan to build, in place of heuristics.
            builder: the name of the function that declared the graph, for listings.

        Raises:
            BuilderError: `graph` is no graph, or plans were made for it already; or both `heuristics` and `plan`.
            CaptureError: the stream of the graph's handle is being captured, which forbids loading and building.
            DeviceError: the graph's `sm_version` is not its device's.
            MissError: in mode `require-hit`, if the plan is not in the cache.
            MismatchError: in mode `check`, if building gives another plan than the stored one.
            Exception: whatever cuDNN raises for a graph that cannot be built, unchanged; nothing is stored then.

        Not promised: that the plan is the one that a build would choose today. It is the one that was chosen
        when it was stored, by the same heuristics of the same libraries for the same graph and device.
        """
        return self._ready(graph, Choice(heuristics, policy, plan), builder)

    def _ready(
        self, graph: Any, choice: Choice, builder: str = "", run: Callable[[Any], None] | None = None
    ) -> Outcome:
        """See `build`. `run` builds the graph, in place of the frontend's stages one by one."""
        started = time.perf_counter()
        wanted = self._request(graph, choice, started, builder)
        if devices.is_capturing(frontend.handle_of(graph)):
            raise CaptureError(
                "a graph cannot be made ready while its stream is being captured",
                todo="Build or load it before the capture.",
            )
        if isinstance(wanted, Outcome):
            return self._noted(graph, self._bypass(graph, choice, wanted, started, run))
        if run is not None:
            wanted = replace(wanted, run=run)
        if self.mode == "check" and checking.is_first_hit(self, wanted):
            return self._noted(graph, checking.check(self, wanted, started))
        # What the caller's own kernel cache is for goes through it, and is not loaded past it.
        own = frontend.argument(graph, "kernel_cache") is not None
        found = Found(Reason.ABSENT, wanted.route) if own else self._serve(wanted)
        if found.reason is Reason.FOUND:
            return self._noted(graph, lookups.outcome(lookups.source(found), found, wanted.key, started))
        if own or frontend.is_dynamic(graph):
            return self._noted(graph, self._build_dynamic(wanted, found, started))
        self._missed(wanted, found)
        if self.mode == "require-hit":
            raise lookups.miss_error(found.reason, found.detail, wanted.key)
        return self._noted(graph, self._build(wanted, found, started))

    def fill(
        self, graph: Any, heuristics: Any = None, policy: Any = None, plan: Plan | None = None, builder: str = ""
    ) -> dict[str, Outcome]:
        """Store everything that may serve a graph later: its plan, and its kernel document with a recipe (`replay`).

        Arguments and errors are those of `build`, which makes the graph ready here too. A plan that is stored already
        is not built again. Gives an outcome by route; a graph for which cuDNN has no dynamic-shape engine has no
        `replay`, since only those engines take kernels from a kernel cache.
        """
        from plancache import filling

        return filling.fill(self, graph, Choice(heuristics, policy, plan), builder)

    def lookup(self, graph: Any, heuristics: Any = None, policy: Any = None, plan: Plan | None = None) -> Outcome:
        """The same as `build`, but on a miss the graph is left as it was and nothing is built.

        Arguments and errors are those of `build`, but that a miss is none: the source is then `miss`.
        """
        started = time.perf_counter()
        wanted = self._request(graph, Choice(heuristics, policy, plan), started)
        if isinstance(wanted, Outcome):
            return wanted
        found = self._serve(wanted)
        source = lookups.source(found) if found.reason is Reason.FOUND else Source.MISS
        return self._noted(graph, lookups.outcome(source, found, wanted.key, started))

    def contains(self, graph: Any, heuristics: Any = None, policy: Any = None, plan: Plan | None = None) -> bool:
        """Whether `build` would find the plan. Neither loads nor changes the graph.

        Arguments and errors are those of `lookup`. Not promised: that cuDNN then takes it, or that it is still there a
        moment later.
        """
        wanted = self._request(graph, Choice(heuristics, policy, plan), time.perf_counter())
        return not isinstance(wanted, Outcome) and self._find(wanted).reason is Reason.FOUND

    def key(self, graph: Any, heuristics: Any = None, policy: Any = None, plan: Plan | None = None) -> PlanKey:
        """The key that a declared graph is looked up under. Arguments are those of `build`.

        Raises:
            BuilderError: the graph has no key: it is none, was validated before, holds a value without an exact
                encoding, or its device or libraries could not be identified.
        """
        wanted = self._request(graph, Choice(heuristics, policy, plan), time.perf_counter())
        if isinstance(wanted, Outcome):
            raise BuilderError(f"this graph has no key: {wanted.reason}", found=wanted.detail or None)
        return wanted.key

    def explain(self, graph: Any, heuristics: Any = None, policy: Any = None, plan: Plan | None = None) -> Explanation:
        """Why `build` would miss: the nearest stored entry and exactly the fields that differ. Builds nothing.

        Arguments are those of `build`.

        Raises:
            BuilderError: `graph` is no graph, or plans were made for it already.
            StoreError: the cache cannot be read.
        """
        from plancache.explain import Explanation

        wanted = self._request(graph, Choice(heuristics, policy, plan), time.perf_counter())
        if isinstance(wanted, Outcome):
            return Explanation(None, wanted.reason, wanted.detail)
        found = self._find(wanted)
        if found.reason is not Reason.ABSENT:
            return Explanation(str(wanted.key), found.reason, found.detail)
        return self.explain_key(wanted.key, wanted.route.value, labels_of(graph))

    def kernel_stats(self) -> list[dict[str, Any]]:
        """The kernel caches of this process: entries loaded and known, cuDNN's revision and the one that was written,
        how often each was serialized and written."""
        return self._dynamic.states()

    @property
    def misses(self) -> list[Miss]:
        """The last misses of this process, newest last; `explain_key` says why each missed."""
        return list(self._misses)

    def stats(self) -> dict[tuple[Source, Reason], int]:
        """How often each source and reason came up in this process, lookups and builds together.

        `totals` has what all processes have counted.
        """
        with self._lock:
            return dict(self._counts)

    def flush(self) -> None:
        """Write what is held back: kernels that were compiled, and when plans were used. Best effort."""
        self._dynamic.flush()
        for opened in self._layers.opened():
            opened.flush()

    def close(self) -> None:
        """Flush, and release the calling thread's hold on the files. The cache may be used again."""
        self._dynamic.flush()
        for opened in self._layers.opened():
            with suppress(StoreError):
                opened.close()

    def __enter__(self) -> PlanCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"PlanCache({str(self.directory)!r}, mode={self.mode!r})"

    # ------------------------------------------------------------ steps

    def _request(self, graph: Any, choice: Choice, started: float, builder: str = "") -> Request | Outcome:
        """The request of a graph, or the outcome that says why it has none."""
        declared = self._declared(graph, choice, started)
        if isinstance(declared, Outcome):
            return declared
        try:
            return declared.request(graph, choice, builder)
        except NotKeyableError as error:
            return lookups.bypassed(Reason.NOT_KEYABLE, str(error), started)

    def _declared(self, graph: Any, choice: Choice, started: float) -> Declared | Outcome:
        """What of a graph's key is known while it is declared, or the outcome that says why it has none."""
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
                return lookups.bypassed(Reason.OFF, "", started)
            if frontend.is_validated(graph):
                return lookups.bypassed(Reason.VALIDATED, "", started)
            kernels = frontend.argument(graph, "kernel_cache")
            if kernels is not None and self._dynamic.of_native(kernels) is None:
                return lookups.bypassed(Reason.KERNEL_CACHE, "", started)
            if choice.policy is not None and choice.policy.name == "ALL":
                return lookups.bypassed(Reason.EVERY_PLAN, "", started)
            return plans.declare(graph)
        except NotKeyableError as error:
            return lookups.bypassed(Reason.NOT_KEYABLE, str(error), started)
        except UnknownEnvironmentError as error:
            return lookups.bypassed(Reason.UNKNOWN_ENVIRONMENT, str(error), started)

    def _bypassed(self, graph: Any, outcome: Outcome) -> None:
        """Note that a graph is not cached; it is built by whoever asked."""
        if self.mode == "require-hit":
            raise lookups.miss_error(outcome.reason, outcome.detail, None)
        self._first(outcome.reason, outcome.detail)
        self._noted(graph, outcome)

    def _bypass(
        self, graph: Any, choice: Choice, outcome: Outcome, started: float, run: Callable[[Any], None] | None
    ) -> Outcome:
        if self.mode == "require-hit":
            raise lookups.miss_error(outcome.reason, outcome.detail, None)
        self._first(outcome.reason, outcome.detail)
        if run is None:
            plans.run_build(graph, choice)
        else:
            run(graph)
        return replace(outcome, seconds=time.perf_counter() - started)

    def kernel_cache(self, what: Any, handle: Any = None) -> KernelCache:
        """A kernel cache that is kept on disk, loaded with what is there, for graphs with dynamic shapes.

        Args:
            what: a name of your own, or a declared graph whose topology it is for.
            handle: the handle of the device that it is for; None is the graph's own, else the current `target()`,
                else the current device.

        What it holds serves every shape of its topology (the graph without its sizes), on this device and with these
        libraries. Its `native` goes to `pygraph(kernel_cache=..., is_dynamic_shape_enabled=True)`. New kernels are
        written after each build through this cache, at `flush()`, and at the end of a `with` block.

        Raises:
            BuilderError: `what` is a graph that has no key.
            DeviceError: there is no such device.
        """
        if isinstance(what, str):
            device = devices.device(handle) if handle is not None else target.current() or devices.device(None)
            key = KernelKey(digest({"name": what}), device, digest(environment.document()), what)
        else:
            try:
                key = topology_key(plans.declare(what).request(what, Choice()))
            except (NotKeyableError, UnknownEnvironmentError) as error:
                raise BuilderError("this graph has no key", found=str(error)) from error
        return self._dynamic.open(key)

    def _kernel_stores(self) -> list[Store]:
        """The layers that can be opened. Where the writable one is not among them, nothing is written."""
        opened: list[Store] = []
        for layer in range(len(self._layers) if self.mode != "off" else 0):
            try:
                opened.append(self._layers[layer])
            except StoreError as error:
                self._warn(error)
        return opened

    def _build_dynamic(self, wanted: Request, found: Found, started: float) -> Outcome:
        """Build with the kernel cache that the graph has, or with its topology's; compile what is not in it."""
        own = frontend.argument(wanted.graph, "kernel_cache")
        kernels = None if own is None else self._dynamic.of_native(own)
        if kernels is None:
            kernels = self._dynamic.shared(topology_key(wanted))
        elif kernels.key.of_topology and kernels.key.hash != topology_key(wanted).hash:
            raise BuilderError(
                "the graph's kernel cache is another topology's",
                found=kernels.key.label,
                expected=topology_key(wanted).label,
                todo="Open one with cache.kernel_cache(graph), or one with a name of your own.",
            )
        if self.mode == "require-hit" and not kernels.loaded:
            raise lookups.miss_error(found.reason, "no kernels for this topology", wanted.key)
        from_disk, before = kernels.loaded, plans.declared_tensors(wanted.graph)
        built = self._dynamic.build(wanted, kernels, attach=own is None)
        if built.compiled or not kernels.serves:
            self._missed(wanted, found)
            if self.mode == "require-hit":
                raise lookups.miss_error(found.reason, "a kernel had to be compiled", wanted.key)
            outcome = lookups.outcome(Source.BUILT, found, wanted.key, started)
        else:
            source = Source.DISK if from_disk or kernels.loaded else Source.MEMORY
            outcome = lookups.outcome(source, found._replace(reason=Reason.KERNELS, detail=""), wanted.key, started)
        # A graph that holds a kernel cache of the caller's goes through that one always; any other's own plan spares
        # the next process the heuristics, whose library takes half a second to load (measured).
        stored = own is None and self._writes() and self._keep(wanted, found, before, built.seconds)
        if stored or built.written:
            self._maintain()
        return replace(outcome, route="kernels", stored=stored or built.written > 0)

    def _keep(self, wanted: Request, found: Found, before: Mapping[int, Any], seconds: float) -> bool:
        try:
            built = plans.taken(wanted.graph, before, seconds)
        except UnkeptPlanError:
            return False
        return self._put(wanted, built, found.record if found.layer == 0 else None)

    def _build(self, wanted: Request, found: Found, started: float) -> Outcome:
        """Build and store; where the cache may be written, one process at a time for each key."""
        if not self._writes():
            return self._build_now(wanted, found, started)
        with ExitStack() as stack:
            try:
                turn = self._layers.locks().turn(wanted.key.hash, lambda: self._find(wanted).reason is Reason.FOUND)
                stack.enter_context(turn)
            except StoreError as error:
                self._warn(error)
            else:
                # Somebody may have stored it since: while this process waited, or before it took the lock.
                again = self._serve(wanted)
                if again.reason is Reason.FOUND:
                    return lookups.outcome(lookups.source(again), again, wanted.key, started)
                found = again
            outcome = self._build_now(wanted, found, started)
        if outcome.stored:
            self._maintain()
        return outcome

    def _build_now(self, wanted: Request, found: Found, started: float) -> Outcome:
        # Both lines, since a build holds the GIL: nobody could say after a second that this one takes long.
        _log.info("building %s (%s)", wanted.key, found.reason)
        try:
            built = plans.build(wanted)
        except UnkeptPlanError as unkept:
            bypassed = lookups.bypassed(lookups.UNKEPT[unkept.kind], str(unkept), started)
            self._first(bypassed.reason, bypassed.detail)
            return replace(bypassed, key=wanted.key)
        _log.info("built %s: %s in %.1f s", wanted.key, built.plans.chosen.name, built.seconds)
        # A record that cuDNN refused is replaced only now: the same process has shown that the fault is not its own.
        replaces = found.record if found.layer == 0 and found.route is wanted.route else None
        written = self._writes() and self._put(wanted, built, replaces)
        if found.route is Route.TUNED:
            self._set_aside(found, wanted)
        outcome = lookups.outcome(Source.BUILT, found, wanted.key, started)
        return replace(outcome, stored=written, route=wanted.route.value)

    def _put(self, wanted: Request, built: plans.BuiltPlan, replaces: bytes | None) -> bool:
        started = time.monotonic()
        try:
            row, record = stored.encode(wanted, built, self._signing_key)
            return self._layers.top.put(row, record, replaces)
        except StoreError as error:
            self._store_fault(error, started)
        except Exception as error:  # the graph is ready; a plan that cannot be written down is no reason to stop
            self._warn(PlanCacheError("a plan could not be stored", found=f"{type(error).__name__}: {error}"))
        return False

    def _maintain(self) -> None:
        try:
            self._layers.top.maintain(thorough=False)
        except StoreError as error:
            self._warn(error)

    def _missed(self, wanted: Request, found: Found) -> None:
        """Keep what is needed to explain the miss later, and say so the first time a reason comes up."""
        miss = Miss(wanted.key, wanted.route.value, found.reason, labels_of(wanted.graph), wanted.builder)
        self._misses.append(miss)
        if self._misses_file is not None and (name := (miss.key.hash, miss.route)) not in self._listed:
            self._listed.add(name)
            try:
                misses.append(self._misses_file, replace(miss, properties=lookups.properties(wanted)))
            except StoreError as error:
                self._warn(error, "misses are not listed")
        self._first(found.reason, f"key {wanted.key}")

    def _first(self, reason: Reason, detail: str) -> None:
        with self._lock:
            if reason in self._reasons:
                return
            self._reasons.add(reason)
        _log.info("first plan that is not served because: %s (%s)", reason, detail)

    def _noted(self, graph: Any, outcome: Outcome) -> Outcome:
        _outcomes[graph] = outcome
        self._count(outcome)
        return outcome

    def _count(self, outcome: Outcome) -> None:
        key = outcome.key
        parts = ("", "") if key is None else (key.device, key.environment)
        with self._lock:
            self._counts[outcome.source, outcome.reason] += 1
            if self.mode in ("read-write", "check"):
                name = (*parts, outcome.source.value, outcome.reason.name)
                self._layers.counting.add(name, outcome.build_seconds, outcome.seconds)


def _after_fork_in_child() -> None:
    """Locks that another thread of the parent may have held stay held here, where there is no such thread."""
    for cache in list(_open_caches):
        cache._lock = threading.Lock()
        cache._layers.counting.clear()  # its parent's, as what the stores remember of use
        for opened in cache._layers.opened():
            opened.forget()
        cache._dynamic.renew_locks()


os.register_at_fork(after_in_child=_after_fork_in_child)


@atexit.register
def _flush_all() -> None:
    for cache in list(_open_caches):
        cache.flush()


def last_outcome(graph: Any) -> Outcome | None:
    """What the last `build` or `lookup` of this graph came to; None if there was none.

    Args:
        graph: a `cudnn.pygraph`, also one that was made ready by `cached`, `enable`, `jit` or `graph_cache`.
    """
    return _outcomes.get(graph)
