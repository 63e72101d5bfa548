"""Decorators around graph builders, and the in-process layer: live graphs by arguments."""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, overload

from plancache import opening
from plancache.cache import PlanCache
from plancache.cudnn import frontend, target
from plancache.cudnn.device import current_ordinal
from plancache.errors import BuilderError

_default_lock = threading.Lock()
_default: PlanCache | None = None
_Function = TypeVar("_Function", bound=Callable[..., Any])


def default_cache() -> PlanCache:
    """The process's cache, opened at first use from the environment variables."""
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
    ) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.name = f"{function.__module__}.{getattr(function, '__qualname__', type(function).__qualname__)}"
        self.cases = tuple(map(_case, cases))
        self.heuristics = heuristics
        self.policy = policy
        self._cache = cache
        self._memory = memory
        self._local = threading.local()

    @property
    def cache(self) -> PlanCache:
        """The cache that this builder uses: the one it was given, or the process's."""
        return self._cache or default_cache()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        graphs, slot = self._graphs(), self._slot(args, kwargs)
        if slot is not None and slot in graphs:
            graphs.move_to_end(slot)
            return graphs[slot]
        result = self.function(*args, **kwargs)
        self.cache.build(the_graph(result, self.name), self.heuristics, self.policy, builder=self.name)
        if slot is not None:
            graphs[slot] = result
            while len(graphs) > self._memory:
                graphs.popitem(last=False)
        return result

    def _graphs(self) -> OrderedDict[Any, Any]:
        # Per thread: cuDNN forbids running one handle's plans from two threads at once.
        graphs: OrderedDict[Any, Any] | None = getattr(self._local, "graphs", None)
        if graphs is None:
            graphs = self._local.graphs = OrderedDict()
        return graphs

    def _slot(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The in-memory key of a call, or None if its arguments cannot be compared by value.

        The target takes part, or else the current device, and the handle itself: a graph runs on what it was made
        with.
        """
        chosen = target.current()
        try:
            slot = (chosen or current_ordinal(), _exactly(args), _exactly(tuple(sorted(kwargs.items()))))
            hash(slot)
        except TypeError:
            return None
        return slot


def _exactly(value: Any) -> Any:
    """`value` so that only the same compares equal: 1, 1.0 and True make different graphs, as do 0.0 and -0.0."""
    if isinstance(value, tuple):
        return (type(value), *map(_exactly, value))
    if isinstance(value, float):
        return (type(value), value.hex())
    return (type(value), value)


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
) -> Any:
    """Make a graph builder return graphs that are ready to execute, from the cache where they are in it.

    The builder declares a graph and returns it, alone or in a tuple, list or dict with whatever else it likes (the
    tensors, usually). It does not build it. The decorated function returns the same thing.

    Args:
        cases: argument tuples, without the first parameter (the handle), to be built ahead of time.
        cache: where plans are kept; None is the process's cache (`PLANCACHE_DIR`).
        heuristics: as for `PlanCache.build`.
        policy: as for `PlanCache.build`.
        memory: how many live graphs each thread keeps; the least recently used one goes first.

    Raises, when the builder is called:
        BuilderError: it returned no graph, more than one, or one that was planned already.
        And whatever the builder or cuDNN raises, unchanged.

    Not promised: anything about a builder that gives different graphs for equal arguments.
    """

    def decorate(builder: Callable[..., Any]) -> CachedBuilder:
        return CachedBuilder(builder, cases, cache, heuristics, policy, memory)

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
