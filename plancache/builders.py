"""Decorators around graph builders, and the in-process layer: live graphs by arguments."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, overload

from plancache import opening
from plancache.cache import PlanCache
from plancache.cudnn import frontend, target
from plancache.cudnn.device import current_ordinal, is_capturing
from plancache.errors import BuilderError, CaptureError

_default_lock = threading.Lock()
_default: PlanCache | None = None
_Function = TypeVar("_Function", bound=Callable[..., Any])
_Graphs = OrderedDict[Any, "_Ready"]


def default_cache() -> PlanCache:
    """The process's cache, opened at first use from the environment variables.

    Raises:
        SettingsError: a `PLANCACHE_` variable has a value that is not allowed.
    """
    global _default
    with _default_lock:
        if _default is None:
            _default = opening.open()
        return _default


class CachedBuilder:
    """A graph builder whose graphs are ready when it returns; made by `cached`.

    Attributes:
        name: the builder's module and name.
        cases: the argument tuples, without the handle, that filling ahead of time builds.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        cases: Iterable[Sequence[Any]],
        cache: PlanCache | None,
        heuristics: Any,
        policy: Any,
        memory: int,
        key: Callable[..., Any] | None,
    ) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.name = f"{function.__module__}.{getattr(function, '__qualname__', type(function).__qualname__)}"
        self.cases = tuple(map(_case, cases))
        self.heuristics = heuristics
        self.policy = policy
        self._cache = cache
        self._memory = memory
        self._key = key
        self._local = threading.local()

    @property
    def cache(self) -> PlanCache:
        """The cache that this builder uses: the one it was given, or the process's."""
        return self._cache or default_cache()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            kept = self._local.graphs
        except AttributeError:
            kept = self._new_thread()
        slot = self._slot(args, kwargs)
        if slot is not None and (ready := kept.get(slot)) is not None:
            kept.move_to_end(slot)
            if not ready.pinned and ready.handle is not None and is_capturing(ready.handle):
                ready.pinned = True
                _forever.append(ready)
            return ready.result
        handle = next((one for one in (*args, *kwargs.values()) if _is_handle(one)), None)
        if is_capturing(handle):
            raise CaptureError(
                f"{self.name} was called for a new graph while its stream is being captured",
                found="a plan that is not in memory yet",
                expected="one that was made ready before the capture",
                todo="Call the builder with these arguments once before capturing.",
            )
        result = self.function(*args, **kwargs)
        graph = the_graph(result, self.name)
        self.cache.build(graph, self.heuristics, self.policy, builder=self.name)
        if slot is not None:
            kept[slot] = _Ready(result, frontend.handle_of(graph))
            while len(kept) > self._memory:
                kept.popitem(last=False)
        return result

    def __reduce__(self) -> str:
        # By reference, as functions are pickled.
        return str(self.function.__qualname__)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        # As a function would: in a class it becomes a method, whose instance is its first argument.
        return self if instance is None else functools.partial(self, instance)

    def _new_thread(self) -> _Graphs:
        # Per thread: cuDNN forbids running one handle's plans from two threads at once.
        graphs: _Graphs = OrderedDict()
        self._local.graphs = graphs
        _every[id(graphs)] = graphs
        return graphs

    def _slot(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The in-memory key of a call, or None if its arguments cannot be compared by value.

        The target takes part, or else the current device, and the handle itself: a graph runs on what it was made
        with.
        """
        place = target.current() or current_ordinal()
        try:
            slot: tuple[Any, ...]
            if self._key is not None:
                slot = (place, self._key(*args, **kwargs))
            elif kwargs:
                slot = (place, _exactly(args), _exactly(tuple(sorted(kwargs.items()))))
            else:
                slot = (place, _exactly(args))
            hash(slot)
        except TypeError:
            return None
        return slot


class _Ready:
    """A live graph: what its builder returned, the handle that it was made with, and whether it is never freed."""

    __slots__ = ("handle", "pinned", "result")

    def __init__(self, result: Any, handle: Any) -> None:
        self.result = result
        self.handle = handle
        self.pinned = False


# Graphs that were asked for while a stream was captured: the captured CUDA graph launches their kernels, for as long as
# it lives, which nobody can tell.
_forever: list[_Ready] = []
_every: weakref.WeakValueDictionary[int, _Graphs] = weakref.WeakValueDictionary()


@atexit.register
def _let_go() -> None:
    """While CUDA is still there: plans that are torn down with the interpreter have crashed (cuDNN 9.10 and later)."""
    for graphs in list(_every.values()):
        graphs.clear()
    _forever.clear()


def _after_fork_in_child() -> None:
    global _default_lock
    _default_lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)


def _is_handle(value: Any) -> bool:
    return type(value).__name__ == "Handle" and type(value).__module__.startswith("cudnn")


def _exactly(value: Any) -> Any:
    """`value` so that only the same compares equal: 1, 1.0 and True make different graphs, as do 0.0 and -0.0.

    A tensor of a framework stands for its shape, strides, type and device.
    """
    kind = type(value)
    if kind is int or kind is str:
        return (kind, value)
    if isinstance(value, tuple):
        return (kind, *map(_exactly, value))
    if isinstance(value, float):
        return (kind, value.hex())
    if dataclasses.is_dataclass(kind):
        return (kind, *(_exactly(getattr(value, field.name)) for field in dataclasses.fields(value)))
    if hasattr(kind, "__dlpack__"):
        stride = value.stride() if callable(getattr(value, "stride", None)) else getattr(value, "strides", None)
        return (kind, tuple(value.shape), stride, str(value.dtype), str(getattr(value, "device", "")))
    return (kind, value)


@overload
def cached(function: Callable[..., Any], /) -> CachedBuilder: ...
@overload
def cached(
    *,
    cases: Iterable[Sequence[Any]] = (),
    cache: PlanCache | None = None,
    heuristics: Any = None,
    policy: Any = None,
    memory: int = 256,
    key: Callable[..., Any] | None = None,
) -> Callable[[Callable[..., Any]], CachedBuilder]: ...
def cached(
    function: Callable[..., Any] | None = None,
    /,
    *,
    cases: Iterable[Sequence[Any]] = (),
    cache: PlanCache | None = None,
    heuristics: Any = None,
    policy: Any = None,
    memory: int = 256,
    key: Callable[..., Any] | None = None,
) -> Any:
    """Make a graph builder return graphs that are ready to execute, from the cache where they are in it.

    The builder declares a graph and returns it, alone or in a tuple, list or dict with whatever else it likes (the
    tensors, usually). It does not build it. The decorated function returns the same thing.

    Args:
        cases: argument tuples, without the first parameter (the handle), to be built ahead of time.
        cache: where plans are kept; None is the process's cache (`PLANCACHE_DIR`).
        heuristics: as for `PlanCache.build`.
        policy: as for `PlanCache.build`.
        memory: how many live graphs each thread keeps; the least recently used one goes first. One that was asked
            for while the stream of its handle was being captured is never freed.
        key: gives, from the arguments, what a live graph is remembered by. Without it, the arguments themselves, of
            which a framework's tensor stands for its shape, strides, type and device; what cannot be hashed is not
            remembered.

    Raises:
        BuilderError: a case is no tuple; and, when the builder is called, it returned no graph, more than one, or one
            that was planned already.
        CaptureError: when it is called, and a plan would have to be loaded or built while the handle's stream is being
            captured. CUDA forbids both; what is in memory is served.
        MissError: when it is called in mode `require-hit`, and the plan is not in the cache.
        Exception: whatever the builder or cuDNN raises, unchanged.

    Not promised: anything about a builder that gives different graphs for equal arguments.
    """

    def decorate(builder: Callable[..., Any]) -> CachedBuilder:
        return CachedBuilder(builder, cases, cache, heuristics, policy, memory, key)

    return decorate if function is None else decorate(function)


def _case(case: Any) -> tuple[Any, ...]:
    if not isinstance(case, (tuple, list)):
        raise BuilderError(
            "a case is a tuple of arguments", found=repr(case), expected="a tuple without the handle, such as (8, 64)"
        )
    return tuple(case)


def the_graph(result: Any, name: str) -> Any:
    """The one graph in what a builder returned."""
    if isinstance(result, dict):
        parts = list(result.values())
    else:
        parts = list(result) if isinstance(result, (tuple, list)) else [result]
    graphs = {id(part): part for part in parts if frontend.is_graph(part)}
    if len(graphs) != 1:
        raise BuilderError(
            f"the builder {name} must return one graph",
            found=f"no graph but a {type(result).__name__}" if not graphs else f"{len(graphs)} graphs",
            expected="a cudnn.pygraph, alone or in a tuple, list or dict",
            todo="Return the graph that the builder declared, and not more than one.",
        )
    return next(iter(graphs.values()))
