"""Building graphs with dynamic shapes: from the kernel cache of their topology, compiling each kernel once."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from math import gcd
from typing import Any

from plancache.cudnn import frontend, plans
from plancache.cudnn.kernel_cache import Kernel
from plancache.cudnn.plans import Choice, Request
from plancache.errors import StoreError
from plancache.kernels import KernelCache, KernelKey
from plancache.keys import digest, topology
from plancache.store.interface import Store
from plancache.store.locks import SingleFlight

_log = logging.getLogger("plancache")


@dataclass(frozen=True)
class Built:
    """What a build with a kernel cache came to.

    Attributes:
        compiled: kernels that were compiled.
        written: kernels that were written to disk.
        seconds: what building took.
    """

    compiled: bool
    written: int
    seconds: float


def build(
    graph: Any, choice: Choice, kernels: KernelCache, turn: Callable[[], AbstractContextManager[Any]], attach: bool
) -> Built:
    """Build a declared graph with a kernel cache.

    Args:
        graph: a graph with dynamic shapes.
        choice: how its plan is chosen.
        kernels: the kernel cache; of the graph's topology, or the one that the graph was made with.
        turn: one process at a time for the topology, entered before a build that would compile.
        attach: whether the graph is to be given the kernel cache (else it has it).

    Raises whatever the frontend raises, and StoreError where new kernels cannot be written: the graph is built then.
    """
    with kernels.lock:
        snapshot = frontend.Snapshot(graph)
        started = time.perf_counter()
        _plan(graph, choice, kernels, snapshot, attach)
        if attach and not _has(kernels, graph):
            with turn():
                if kernels.refresh():
                    _again(graph, choice, kernels, snapshot)
                return _finish(graph, choice, kernels, started)
        return _finish(graph, choice, kernels, started)


def _plan(graph: Any, choice: Choice, kernels: KernelCache, snapshot: frontend.Snapshot, attach: bool) -> None:
    """Everything but the compilation. A document that cuDNN does not take shows here, at its first use."""
    if attach:
        frontend.attach_kernel_cache(graph, kernels.native)
    try:
        plans.run_planning(graph, choice)
    except Exception:
        if not kernels.kernels:
            raise
        kernels.reset()
        _again(graph, choice, kernels, snapshot)
        _log.warning("cuDNN did not take the stored kernel cache of %s; it is made anew", kernels.key.label)
        kernels.discard_loaded()


def _again(graph: Any, choice: Choice, kernels: KernelCache, snapshot: frontend.Snapshot) -> None:
    snapshot.restore(graph)
    frontend.attach_kernel_cache(graph, kernels.native)
    plans.run_planning(graph, choice)


def _finish(graph: Any, choice: Choice, kernels: KernelCache, started: float) -> Built:
    plans.run_compilation(graph, choice)
    seconds = time.perf_counter() - started
    compiled = kernels.moved(seconds)
    return Built(compiled, kernels.flush(seconds) if compiled else 0, seconds)


def _has(kernels: KernelCache, graph: Any) -> bool:
    """Whether a kernel for the plan that heuristics put first is there; only a guess, which costs a lock if wrong."""
    chosen = frontend.first_plan(graph)
    if chosen is None:
        return False
    shapes = [(tensor.dim, tensor.stride) for tensor in frontend.tensors(graph).values() if not tensor.is_virtual]
    signature = sorted(_alignment(dim, stride) for dim, stride in shapes)
    return any(_matches(kernel, chosen, signature) for kernel in kernels.kernels)


def _matches(kernel: Kernel, chosen: tuple[int, dict[str, int]], signature: list[Any]) -> bool:
    engine, knobs = chosen
    return (kernel.engine, dict(kernel.knobs)) == (engine, knobs) and sorted(
        _alignment(dim, stride) for dim, stride in kernel.operands
    ) == signature


def _alignment(dim: Any, stride: Any) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """What of a shape decides which kernel fits: how far its strides can be divided, and which sizes are 1."""
    return tuple(gcd(int(step), 16) for step in stride), tuple(size == 1 for size in dim)


class Dynamic:
    """The kernel caches of one process: each topology's, and those that callers asked for."""

    def __init__(
        self, store: Callable[[], Store | None], locks: Callable[[], SingleFlight], signing_key: bytes | None
    ) -> None:
        self._store = store
        self._locks = locks
        self._signing_key = signing_key
        self._shared: dict[str, KernelCache] = {}
        self._held: weakref.WeakSet[KernelCache] = weakref.WeakSet()
        self._lock = threading.Lock()

    def open(self, key: KernelKey, read_only: bool) -> KernelCache:
        """A kernel cache of the caller's own, loaded from disk."""
        opened = KernelCache(self._store(), key, self._signing_key, read_only)
        self._held.add(opened)
        return opened

    def of_native(self, native: Any) -> KernelCache | None:
        """The kernel cache that holds cuDNN's object, if it was opened here."""
        return next((kernels for kernels in list(self._held) if kernels.native is native), None)

    def shared(self, key: KernelKey, read_only: bool) -> KernelCache:
        """The process's kernel cache of a topology, loaded when it is first asked for."""
        with self._lock:
            if key.hash not in self._shared:
                self._shared[key.hash] = KernelCache(self._store(), key, self._signing_key, read_only)
            return self._shared[key.hash]

    def build(self, wanted: Request, kernels: KernelCache, attach: bool) -> Built:
        """Build the request's graph with a kernel cache; see `build`."""
        return build(wanted.graph, wanted.choice, kernels, lambda: self._turn(kernels), attach)

    @contextmanager
    def _turn(self, kernels: KernelCache) -> Iterator[None]:
        with ExitStack() as stack:
            try:
                stack.enter_context(self._locks().turn(kernels.key.hash, lambda: False))
            except StoreError as error:
                _log.info("compiling without taking turns: %s", error)
            yield

    def states(self) -> list[dict[str, Any]]:
        """The bookkeeping of each kernel cache of this process."""
        return [kernels.state for kernels in [*self._shared.values(), *self._held]]

    def renew_locks(self) -> None:
        """In a forked child, where nobody holds them any longer."""
        self._lock = threading.Lock()
        for kernels in [*self._shared.values(), *self._held]:
            kernels.lock = threading.RLock()

    def flush(self) -> None:
        """Write what was compiled and not written yet. Best effort."""
        for kernels in [*self._shared.values(), *self._held]:
            with suppress(StoreError):
                kernels.flush()


def topology_key(wanted: Request) -> KernelKey:
    """The key of the kernel cache of a graph's topology. Two topologies never share one."""
    documents = wanted.key.documents
    subject = {"topology": topology(documents["graph"])}
    return KernelKey(digest(subject), wanted.device, wanted.key.environment, wanted.builder or "a topology")
