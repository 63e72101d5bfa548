"""`enable()`: every `cudnn.pygraph` of the process is served from the cache, with no change to the code that builds it.

The methods of the class are hooked, since `from cudnn import pygraph` is common. A hook does one of three things: it
answers for a graph whose stages were put off (`staged`), it passes the call on, or it has the plan stored that the call
has built. While plancache itself calls the frontend, and for graphs that cannot be cached, all calls pass.

Not promised: that shapes which `validate()` would infer provisionally are seen before `build_operation_graph()`; on a
hit they are the final ones at once.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from plancache import staged
from plancache.cache import PlanCache
from plancache.cudnn import frontend, target
from plancache.cudnn.libraries import cudnn
from plancache.cudnn.plans import Choice
from plancache.cudnn.unhooked import at_work, unhooked
from plancache.errors import BuilderError, CaptureError, DeviceError

# What a graph cannot answer before it was planned: what was put off is then done.
_QUESTIONS = (
    *("backend_plan_entries", "build_plan_at_index", "deserialize", "get_behavior_notes"),
    *("get_behavior_notes_for_plan_at_index", "get_cuda_graph_retention", "get_workspace_size_plan_at_index", "key"),
    *("populate_cuda_graph", "select_plan", "serialize", "update_cuda_graph"),
)
_FILTERS = (
    *("deselect_engines", "deselect_workspace_greater_than", "deselect_behavior_notes", "select_behavior_notes"),
    *("deselect_numeric_notes", "select_numeric_notes"),
)
_ORIGINAL = "_plancache_original"
_lock = threading.RLock()
# Kept where the module is reloaded: its old functions, which are on the class, look here too.
_stack: list[PlanCache] = globals().get("_stack", [])
_scopes: list[PlanCache] = globals().get("_scopes", [])
_scoped: ContextVar[PlanCache | None] = globals().get("_scoped", ContextVar("plancache.serving", default=None))
_installed: dict[str, Any] = globals().get("_installed", {})


def enable(cache: PlanCache | None = None) -> PlanCache:
    """Serve every `cudnn.pygraph` of this process from a cache, from now on; gives that cache.

    Args:
        cache: which one; None is the process's (`PLANCACHE_DIR`). Called again, the new one takes the old one's place.

    Raises:
        SettingsError: `cache` is None, and a `PLANCACHE_` variable has a value that is not allowed.

    Graphs that were begun before stay as they are. Served ones raise what they raised before, in the same places; the
    stage that would build raises `MissError` in mode `require-hit` too, and `MismatchError` in mode `check`.
    """
    from plancache.builders import default_cache

    chosen = cache if cache is not None else default_cache()
    with _lock:
        _stack[:1] = [chosen]
        _install()
    return chosen


def disable() -> None:
    """Serve no graph that is begun from now on. Those that were served stay ready, and those on their way go on."""
    with _lock:
        _stack.clear()
        _uninstall()


@contextmanager
def enabled(cache: PlanCache | None = None) -> Iterator[PlanCache]:
    """Like `enable()`, for the time of a `with` block; of several the innermost counts, in all threads.

    Args:
        cache: which one; None is the process's (`PLANCACHE_DIR`).
    """
    from plancache.builders import default_cache

    chosen = cache if cache is not None else default_cache()
    with _lock:
        _stack.append(chosen)
        _install()
    try:
        yield chosen
    finally:
        with _lock:
            last = len(_stack) - 1 - _stack[::-1].index(chosen) if chosen in _stack else None
            if last is not None:
                del _stack[last]
            _uninstall()


@contextmanager
def serving(cache: PlanCache) -> Iterator[None]:
    """Serve what this thread builds within, whatever other threads do."""
    with _lock:
        _scopes.append(cache)
        _install()
    token = _scoped.set(cache)
    try:
        yield
    finally:
        _scoped.reset(token)
        with _lock:
            _scopes.remove(cache)
            _uninstall()


def active() -> PlanCache | None:
    """The cache that graphs of this thread are served from, if any."""
    if at_work():
        return None
    scoped = _scoped.get()
    return scoped if scoped is not None else (_stack[-1] if _stack else None)


# ---------------------------------------------------------------- the hooks


def _validate(original: Any, graph: Any) -> None:
    session = staged.of(graph)
    if session is None:
        if _begin(graph) is None:
            _plainly(original, graph)
    elif not session.deferred:
        _plainly(original, graph)


def _begin(graph: Any) -> staged.Session | None:
    """The session of a graph, begun if it is only declared yet. None: all its calls pass."""
    session, cache = staged.of(graph), active()
    if session is not None or cache is None or frontend.is_validated(graph) or frontend.is_planned(graph):
        return session
    return staged.start(cache, graph)


def _build_operation_graph(original: Any, graph: Any) -> None:
    session = _begin(graph)
    if session is None:
        _plainly(original, graph)
    elif session.deferred:
        session.say_later("build_operation_graph")
    else:
        session.build_operation_graph(graph)


def _create_execution_plans(original: Any, graph: Any, heuristics: Any = None) -> None:
    session = _begin(graph)
    if session is not None:
        heuristics = _taken(heuristics)
        if session.choose(graph, heuristics):
            session.plan_later(graph, "create_execution_plans", heuristics)
            return
        session.really(graph)
    _plainly(original, graph, heuristics)


def _create_execution_plan(original: Any, graph: Any, engine_id: Any, knobs: Any = None) -> Any:
    session = _begin(graph)
    if session is not None:
        knobs = dict(knobs) if isinstance(knobs, dict) else knobs
        if session.choose(graph, plan=(engine_id, knobs or {})):
            session.plan_later(graph, "create_execution_plan", engine_id, knobs)
            return graph
        session.really(graph)
    return _plainly(original, graph, engine_id, knobs)


def _check_support(original: Any, graph: Any) -> None:
    session = staged.of(graph)
    if session is not None and session.deferred:
        if session.planned and session.plan_list(graph) is not None:
            return
        session.really(graph)
    _plainly(original, graph)


def _build_plans(original: Any, graph: Any, *args: Any, **kwargs: Any) -> None:
    if not frontend.is_planned(graph):
        graph.create_execution_plans()  # as the frontend does
    session, policy = staged.of(graph), args[0] if args else kwargs.get("policy")
    if session is None:
        _plainly(original, graph, *args, **kwargs)
    elif session.deferred and session.serve(graph, policy):
        _plainly(original, graph, *args, **kwargs)  # the loaded plan is built: the index and the filters are looked at
    else:
        session.build(graph, lambda planned: original(planned, *args, **kwargs), policy)


def _build(original: Any, graph: Any, heuristics: Any = None, ctx: Any = None) -> None:
    cache = active()
    if cache is None or staged.of(graph) or frontend.is_validated(graph) or frontend.is_planned(graph):
        original(graph, heuristics, ctx)  # stage by stage, through the hooks
        return
    try:
        choice = Choice(heuristics)
    except BuilderError:  # the frontend's to refuse
        _plainly(original, graph, heuristics, ctx)
        return

    def run(declared: Any) -> None:
        _plainly(original, declared, heuristics, ctx)

    try:
        cache._ready(graph, choice, run=run)
    except (CaptureError, DeviceError):  # whatever comes of it is the frontend's
        run(graph)


def _filter(name: str) -> Callable[..., Any]:
    def hook(original: Any, graph: Any, *args: Any, **kwargs: Any) -> Any:
        session = staged.of(graph)
        if session is None:
            return _plainly(original, graph, *args, **kwargs)
        args, kwargs = tuple(map(_taken, args)), {key: _taken(value) for key, value in kwargs.items()}
        if session.deferred and not all(map(_is_plain, (*args, *kwargs.values()))):
            session.really(graph)  # an argument that the backend may refuse, at this call
        if name == "deselect_workspace_greater_than":
            session.note_limit()
        answer = _plainly(original, graph, *args, **kwargs)
        if session.deferred:
            session.say_later(name, *args, **kwargs)
        return answer

    return hook


def _taken(argument: Any) -> Any:
    """A list of its own: the caller may go on using his, and an iterator is used up by the first who reads it."""
    return list(argument) if isinstance(argument, (list, Iterator)) else argument


def _is_plain(argument: Any) -> bool:
    if isinstance(argument, list):
        return all(isinstance(one, str) or hasattr(type(one), "__members__") for one in argument)
    return type(argument) is int and argument >= 0


def _question(original: Any, graph: Any, *args: Any, **kwargs: Any) -> Any:
    _answerable(graph)
    return _plainly(original, graph, *args, **kwargs)


def _listed(answer: Callable[[frontend.PlanList, int], Any]) -> Callable[..., Any]:
    """Questions about the list of plans, which is stored with the plan: nothing needs to be planned for them."""

    def hook(original: Any, graph: Any, index: Any = None, *args: Any) -> Any:
        session = staged.of(graph)
        if session is not None and session.planned and type(index) is int and not args:
            listed = session.plan_list(graph)
            if listed is not None and 0 <= index < len(listed.plans) and listed.plans[index].backend_index is not None:
                return answer(listed, index)
        _answerable(graph)
        return _plainly(original, graph, *(() if index is None else (index, *args)))

    return hook


def _count(original: Any, graph: Any) -> Any:
    session = staged.of(graph)
    if session is not None and session.planned:
        listed = session.plan_list(graph)
        if listed is not None:
            return len(listed.plans)
    _answerable(graph)
    return _plainly(original, graph)


def _pair(listed: frontend.PlanList, index: int) -> Any:
    plan, knob = listed.plans[index], cudnn().knob_type
    return plan.engine, {knob(number): value for number, value in plan.knobs.items()}


def _answerable(graph: Any) -> None:
    session = staged.of(graph)
    if session is not None:
        session.really(graph)


def _execute_plan_at_index(original: Any, graph: Any, *args: Any, **kwargs: Any) -> Any:
    _answerable(graph)
    return original(graph, *args, **kwargs)  # it may build the graph, through the hooks


def _plainly(original: Any, *args: Any, **kwargs: Any) -> Any:
    with unhooked():
        return original(*args, **kwargs)


_HOOKS: dict[str, Callable[..., Any]] = {
    "validate": _validate,
    "build_operation_graph": _build_operation_graph,
    "create_execution_plans": _create_execution_plans,
    "create_execution_plan": _create_execution_plan,
    "check_support": _check_support,
    "build_plans": _build_plans,
    "build": _build,
    "execute_plan_at_index": _execute_plan_at_index,
    **{name: _filter(name) for name in _FILTERS},
    **dict.fromkeys(_QUESTIONS, _question),
    "get_execution_plan_count": _count,
    "get_plan_name_at_index": _listed(lambda listed, index: listed.plans[index].name),
    "get_engine_and_knobs_at_index": _listed(_pair),
}


# ---------------------------------------------------------------- on and off


def _install() -> None:
    if _installed:
        return
    graph_class = cudnn().pygraph
    for name, hook in _HOOKS.items():
        _put_on(graph_class, name, functools.partial(_hooked, hook))
    _put_on(graph_class, "__init__", _targeted)
    _put_on(graph_class, "plans", _asked)


def _put_on(graph_class: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    _installed[name] = original = _plain(graph_class, name)
    setattr(graph_class, name, wrap(original))


def _uninstall() -> None:
    """Take the hooks off, unless somebody is still served, or a graph is still on its way."""
    if _stack or _scopes or staged.waiting():
        return
    for name, original in _installed.items():
        setattr(cudnn().pygraph, name, original)
    _installed.clear()


def _plain(graph_class: Any, name: str) -> Any:
    """The frontend's own method, also where another copy of this module (reloaded) has hooked it."""
    found = vars(graph_class)[name]
    getter = found.fget if isinstance(found, property) else found
    return getattr(getter, _ORIGINAL, found)


def _hooked(hook: Callable[..., Any], original: Any) -> Any:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if at_work():
            return original(self, *args, **kwargs)
        return hook(original, self, *args, **kwargs)

    setattr(method, _ORIGINAL, original)
    return method


def _targeted(original: Any) -> Any:
    """The constructor, aware of `target()`."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> None:
        args, kwargs = target.filled_in(args, kwargs)
        original(self, *args, **kwargs)

    setattr(method, _ORIGINAL, original)
    return method


def _asked(original: Any) -> Any:
    def plans(self: Any) -> Any:
        if not at_work():
            _answerable(self)
        return original.fget(self)

    setattr(plans, _ORIGINAL, original)
    return property(plans, doc=original.__doc__)


def _after_fork_in_child() -> None:
    """A lock that another thread of the parent held stays held here, where there is no such thread."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork_in_child)
