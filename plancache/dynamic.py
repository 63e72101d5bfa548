"""Building graphs with dynamic shapes: from the kernel cache of their topology, compiling each kernel once."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from math import gcd
from typing import Any

from plancache.cudnn import frontend, plans
from plancache.cudnn.kernel_cache import Kernel
from plancache.cudnn.plans import Choice, Request
from plancache.errors import PlanCacheError, StoreError
from plancache.kernels import KernelCache, KernelKey
from plancache.keys import digest, topology
from plancache.store.interface import Store
from plancache.store.locks import SingleFlight

_log = logging.getLogger("plancache")
_HELD = 64


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

    Raises whatever the frontend raises.
    """
    with kernels.lock:
        snapshot = frontend.Snapshot(graph)
        started = time.perf_counter()
        _plan(graph, choice, kernels, snapshot)
        kernel = _matching(kernels, graph)
        if attach and kernel is None:
            with turn():
                if kernels.refresh():
                    _again(graph, choice, kernels, snapshot)
                return _finish(graph, choice, kernels, started)
        if kernel is not None:
            kernels.use(kernel)
        return _finish(graph, choice, kernels, started)


def _plan(graph: Any, choice: Choice, kernels: KernelCache, snapshot: frontend.Snapshot) -> None:
    """Everything but the compilation. A document that cuDNN does not take shows here, at its first use."""
    # Also to a graph with one of the caller's that was refused meanwhile.
    frontend.attach_kernel_cache(graph, kernels.native)
    try:
        plans.run_planning(graph, choice)
    except Exception:
        if not kernels.loaded:
            raise
        anew(kernels, lambda: _again(graph, choice, kernels, snapshot))


def anew(kernels: KernelCache, again: Callable[[], None]) -> None:
    """Try again with an empty kernel cache. If that fails too, it was not the kernel cache, which is put back."""
    back = kernels.reset()
    try:
        again()
    except Exception:
        back()
        raise
    _log.warning("cuDNN did not take the stored kernel cache of %s; it is made anew", kernels.key.label)
    kernels.discard_loaded()


def _again(graph: Any, choice: Choice, kernels: KernelCache, snapshot: frontend.Snapshot) -> None:
    snapshot.restore(graph)
    frontend.attach_kernel_cache(graph, kernels.native)
    plans.run_planning(graph, choice)


def _finish(graph: Any, choice: Choice, kernels: KernelCache, started: float) -> Built:
    compiling = time.perf_counter()
    plans.run_compilation(graph, choice)
    now = time.perf_counter()
    compiled = kernels.moved(now - compiling)
    return Built(compiled, kernels.flush(now - compiling) if compiled else 0, now - started)


def _matching(kernels: KernelCache, graph: Any) -> Kernel | None:
    """The kernel for the plan that heuristics put first, if it is there; only a guess, which costs a lock if wrong."""
    chosen = frontend.first_plan(graph)
    if chosen is None:
        return None
    shapes = [(tensor.dim, tensor.stride) for tensor in frontend.tensors(graph).values() if not tensor.is_virtual]
    signature = sorted(_alignment(dim, stride) for dim, stride in shapes)
    return next((kernel for kernel in kernels.kernels if _matches(kernel, chosen, signature)), None)


def _matches(kernel: Kernel, chosen: tuple[int, dict[str, int]], signature: list[Any]) -> bool:
    engine, knobs = chosen
    return (kernel.engine, dict(kernel.knobs)) == (engine, knobs) and sorted(
        _alignment(dim, stride) for dim, stride in kernel.operands
    ) == signature


def _alignment(dim: Any, stride: Any) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """What of a shape decides which kernel fits: how far its strides can be divided (by 8 halves, which are 16 bytes),
    and which sizes are 1."""
    return tuple(gcd(int(step), 8) for step in stride), tuple(size == 1 for size in dim)


class Dynamic:
    """The kernel caches of one process: each topology's, and those that callers asked for."""

    def __init__(
        self,
        stores: Callable[[], Sequence[Store]],
        locks: Callable[[], SingleFlight],
        signing_key: bytes | None,
        writes: Callable[[], bool],
        warn: Callable[[PlanCacheError], None],
    ) -> None:
        self._stores = stores
        self._locks = locks
        self._writes = writes
        self._warn = warn
        self._signing_key = signing_key
        self._shared: dict[str, KernelCache] = {}
        # The caller may hold no more than the `native`: the last ones are kept alive, so that it is still known whose.
        self._held: deque[KernelCache] = deque(maxlen=_HELD)
        self._lock = threading.Lock()

    def open(self, key: KernelKey) -> KernelCache:
        """A kernel cache of the caller's own, loaded from disk."""
        opened = KernelCache(self._stores(), key, self._signing_key, self._writes, self._warn)
        self._held.append(opened)
        return opened

    def of_native(self, native: Any) -> KernelCache | None:
        """The kernel cache that holds cuDNN's object, if it was opened here."""
        return next((kernels for kernels in list(self._held) if kernels.is_native(native)), None)

    def shared(self, key: KernelKey) -> KernelCache:
        """The process's kernel cache of a topology, loaded when it is first asked for."""
        with self._lock:
            if key.hash not in self._shared:
                self._shared[key.hash] = KernelCache(self._stores(), key, self._signing_key, self._writes, self._warn)
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
            kernels.flush()


def topology_key(wanted: Request) -> KernelKey:
    """The key of the kernel cache of a graph's topology. Two topologies never share one."""
    documents = wanted.key.documents
    subject = {"topology": topology(documents["graph"])}
    kind = " ".join(node["type"].lower() for node in documents["graph"]["nodes"])
    return KernelKey(digest(subject), wanted.device, wanted.key.environment, wanted.builder or kind, of_topology=True)
