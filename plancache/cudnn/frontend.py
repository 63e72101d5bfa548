"""The one module that touches private attributes of `cudnn.pygraph`; the contract tests pin each of them.

Two jobs. First, reading a graph as it was declared, before `validate()`: validating imports the Python engines
(190 to 360 ms for a process's first SDPA graph) and writes inferred shapes and types into the declaration.
Second, making the caller's own graph executable from a plan that was loaded into another, empty container.

A loaded container is a fragile thing: `get_engine_count`, `get_knobs_for_engine` and `create_execution_plan`
kill the process, `key()` gives another answer, and its plan list is not the one of the graph. So the graph
gets a `LoadedPlan` where the frontend keeps its lowered graph: what a loaded plan can answer goes to the
container, names and knobs come from the stored plan, and anything else first plans the graph really.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from plancache.cudnn.libraries import cudnn
from plancache.cudnn.plan_list import Filters as Filters
from plancache.cudnn.plan_list import Plan as Plan
from plancache.cudnn.plan_list import PlanList as PlanList
from plancache.cudnn.plan_list import SharedUidError as SharedUidError
from plancache.cudnn.plan_list import with_handle
from plancache.cudnn.python_plans import entry

# ---------------------------------------------------------------- reading a declared graph


def is_graph(value: Any) -> bool:
    """Whether `value` is a frontend graph."""
    return isinstance(value, cudnn().pygraph)


def is_planned(graph: Any) -> bool:
    """Whether plans were already made for the graph."""
    return bool(graph._planning_done or graph._is_built)


def is_validated(graph: Any) -> bool:
    """Whether `validate()` or a lowering already ran: then the declaration is no longer what the caller wrote."""
    return bool(graph._is_validated or graph._lowered_graph is not None or graph._frozen)


def tensors(graph: Any) -> dict[int, Any]:
    """Every tensor by uid, ascending: those that the graph made, and those that were handed to it from outside.

    The graph registers only the former, but lowers both. (`graph.tensors` leaves out names that are not unique.)

    Raises:
        SharedUidError: two tensors have the same uid.
    """
    found: dict[int, Any] = dict(graph._tensor_by_uid)
    pending = [
        tensor
        for node in graph._nodes
        for ports in (node.inputs, node.outputs)
        for tensor in ports.values()
        if tensor is not None
    ]
    while pending:
        tensor = pending.pop()
        known = found.setdefault(tensor.uid, tensor)
        if known is not tensor:
            raise SharedUidError(f"tensors {known.name!r} and {tensor.name!r} both have uid {tensor.uid}")
        if tensor.ragged_offset is not None and found.get(tensor.ragged_offset.uid) is not tensor.ragged_offset:
            pending.append(tensor.ragged_offset)
    # A ragged offset may also hang off a tensor that is part of no node; it is then not lowered.
    return {uid: found[uid] for uid in sorted(found)}


def nodes(graph: Any) -> Sequence[Any]:
    """The operations in order, without a copy."""
    return graph._nodes  # type: ignore[no-any-return]


def arguments(graph: Any) -> dict[str, Any]:
    """What the constructor was given and the lowering will use, without the handle."""
    context = graph._context
    return {
        "io_data_type": context.io_data_type,
        "intermediate_data_type": context.intermediate_data_type,
        "compute_data_type": context.compute_data_type,
        "is_cuda_graph_replay_expected": graph.is_cuda_graph_replay_expected,
        **graph._cpp_graph_kwargs,
    }


def argument(graph: Any, name: str) -> Any:
    """One of them that the graph itself has no use for, as `device_property`; None if it was not given."""
    return graph._cpp_graph_kwargs.get(name)


def is_dynamic(graph: Any) -> bool:
    """Whether the graph was made with `is_dynamic_shape_enabled`."""
    return bool(argument(graph, "is_dynamic_shape_enabled"))


def handle_of(graph: Any) -> Any:
    """The handle that the graph was made with, or None."""
    return graph._handle


def library_type(data_type: Any) -> Any:
    """cuDNN's own data type for a framework's, as the frontend converts it."""
    return cudnn().datatypes._library_type(data_type)


def filters(graph: Any) -> Filters:
    """The filters set so far."""
    return Filters(tuple(graph._barred_names), graph._workspace_limit, tuple(graph._note_filters))


def assemble(graph: Any, by_uid: Mapping[int, Any], made: Sequence[Any]) -> None:
    """Put tensors and nodes into an empty graph, as if its methods had declared them."""
    for uid in sorted(by_uid):
        graph._register_tensor(by_uid[uid])
    graph._nodes.extend(made)
    graph._reserved_uids.update(by_uid)  # so that a tensor that is added later gets a uid of its own


_CONTAINERS = frozenset((dict, list, set))
# Methods that a served graph has of its own.
_SHADOWED = ("execute_plan_at_index", "_refuse_guarded_backend")


class Snapshot:
    """A graph's state, to go back to: what the frontend keeps of it, and its tensors' shapes and types."""

    def __init__(self, graph: Any, by_uid: Mapping[int, Any] | None = None) -> None:
        now = vars(graph)
        self._attributes = {name: now[name].copy() if type(now[name]) in _CONTAINERS else now[name] for name in now}
        self._tensors = [
            (tensor, tensor.dim, tensor.stride, tensor.data_type) for tensor in (by_uid or tensors(graph)).values()
        ]

    def restore(self, graph: Any) -> None:
        """Bring the graph back to this state. Attributes that the caller has put on it since stay where they are."""
        for name in (*self._attributes, *_SHADOWED):
            vars(graph).pop(name, None)
        vars(graph).update({name: _copied(value) for name, value in self._attributes.items()})
        for tensor, dim, stride, data_type in self._tensors:
            tensor.dim, tensor.stride, tensor.data_type = dim, stride, data_type

    def added(self, graph: Any) -> list[Any]:
        """The tensors that the graph was given since. A planned graph takes some still, though nothing can use them."""
        return [tensor for uid, tensor in graph._tensor_by_uid.items() if uid not in self._attributes["_tensor_by_uid"]]


def register(graph: Any, added: Sequence[Any]) -> None:
    """Give a graph tensors again that it had."""
    for tensor in added:
        if tensor.uid not in graph._tensor_by_uid:
            graph._register_tensor(tensor)
            graph._reserved_uids.add(tensor.uid)


def _copied(value: Any) -> Any:
    return value.copy() if type(value) in _CONTAINERS else value


def attach_kernel_cache(graph: Any, native: Any) -> None:
    """Give a declared graph a kernel cache, as the constructor's argument would have."""
    graph._cpp_graph_kwargs["kernel_cache"] = native


def copy_filters(source: Any, graph: Any) -> None:
    """Give a declared graph the filters of another."""
    for name in _FILTERS:
        setattr(graph, name, _copied(getattr(source, name)))


# ---------------------------------------------------------------- reading a built graph


def chosen_kind(graph: Any) -> str:
    """`backend`, `python` (one of the frontend's Python engines) or `delegated` (no engine and knobs to tell)."""
    if graph.selected_engine is not None:
        return "python"
    return "delegated" if graph._plans[graph._plan_index].cpp_index is None else "backend"


def first_plan(graph: Any) -> tuple[int, dict[str, int]] | None:
    """Engine and knobs, by name, of the plan that building tries first; None if it is not the backend's to tell."""
    config = graph._plans[graph._plan_index]
    if config.engine_id < 0 or config.cpp_index is None:
        return None
    return int(config.engine_id), {knob.name: int(value) for knob, value in (config.knobs or {}).items()}


def plan_list(graph: Any) -> PlanList:
    """The plan list of a built graph."""
    found = []
    for index, config in enumerate(graph._plans):
        # A delegating entry (heur_mode.OPENSOURCE) has no engine and knobs; it keeps its place in the list.
        engine, knobs = graph.get_engine_and_knobs_at_index(index) if config.engine_id >= 0 else (config.engine_id, {})
        numbered = {int(knob): int(value) for knob, value in knobs.items()}
        found.append(Plan(graph.get_plan_name_at_index(index), int(engine), numbered, config.cpp_index))
    return PlanList(tuple(found), int(graph._plan_index))


def barred(graph: Any) -> set[int]:
    """Places in the plan list of a planned graph that its filters exclude."""
    return set(graph._barred_indices())


# ---------------------------------------------------------------- running a ready graph


def operands(graph: Any) -> list[int]:
    """The uids of the tensors that whoever executes a ready graph has to give an address for."""
    return list(graph._variant_pack_uids() or ())


def execute(graph: Any, addresses: Mapping[int, int], workspace: int, handle: Any) -> None:
    """Execute a ready graph by addresses. `graph.execute` looks at what it is given, and imports torch for it (3 s)."""
    place = graph._plans[graph._plan_index].cpp_index
    graph._lowered_graph._execute_plan_at_index(
        dict(addresses), workspace, place, int(handle.backend_handle), None, None, None
    )


# ---------------------------------------------------------------- serving a loaded plan


def backend_handle(graph: Any) -> int:
    """The raw handle that a graph made with a handle, or for the default device, runs on."""
    handle: int = graph._backend_handle_for_lowering({})
    return handle


def load(graph: Any, blob: bytes, device_property: Any, bare: bool = False) -> Any:
    """A container with the plan in `blob`, made as the frontend would make it for `graph`.

    Args:
        graph: the graph that the plan is for; gives name, handle, kernel cache and retention.
        blob: what `serialize` gave.
        device_property: cuDNN's device descriptor, or None to load with the graph's handle.
        bare: leave the graph's kernel cache alone.

    Raises whatever the frontend raises: RuntimeError or cudnnGraphNotSupportedError.
    """
    given = graph._cpp_graph_kwargs
    names = ("name", "cuda_graph_retention", *(() if bare else ("kernel_cache",)))
    kept = {name: given[name] for name in names if name in given}
    if device_property is not None:
        kept["device_property"] = device_property
    else:
        kept["handle"] = graph._handle
    container = cudnn().pygraph(**kept)
    container.deserialize(blob)
    return container._lowered_graph


# Answered by a loaded container as by a built graph. Bound once: execute must cost what it costs without us.
_PASSED_ON = (
    "_execute",
    "_execute_ordered",
    "_execute_ordered_pack",
    "_execute_with_raw_ptrs",
    "_get_variant_pack_uids_sorted",
    "_prepare_variant_pack_template",
    "get_behavior_notes",
    "get_cuda_graph_retention",
    "populate_cuda_graph",
    "serialize",
    "update_cuda_graph",
)
# Where those that launch kernels take the handle; 0 there means the handle that the container was made with.
_HANDLE_AT = {"_execute": 2, "_execute_ordered": 8, "_execute_ordered_pack": 2, "_execute_with_raw_ptrs": 3}
# The served plan's place in the backend's list: the container's only plan is its candidate, which the
# frontend addresses as -1.
_CANDIDATE = -1
_FILTERS = ("_barred_names", "_workspace_limit", "_note_filters")


class LoadedPlan:
    """Stands where the frontend keeps the lowered graph of a graph that was served from the cache."""

    def __init__(
        self,
        graph: Any,
        was: Snapshot,
        container: Any,
        plans: PlanList,
        again: Callable[[Any], None],
        handle: int | None,
    ) -> None:
        # Weak: a cycle would leave the plan to the garbage collector, which may run while a stream captures.
        self._graph = weakref.ref(graph)
        self._plans = plans
        self._plan_again = again
        self._declared = was
        self._container = container
        for name in _PASSED_ON:
            setattr(self, name, getattr(container, name))
        if handle is not None:
            for name, place in _HANDLE_AT.items():
                setattr(self, name, with_handle(getattr(container, name), place, handle))

    # What the frontend asks by index. -1 is the served plan; any other one is not here.

    def get_plan_name_at_index(self, index: int) -> str:
        if index == _CANDIDATE:
            return self._plans.chosen.name
        return next(plan.name for plan in self._plans.plans if plan.backend_index == index)

    def build_plan_at_index(self, index: int) -> None:
        if index != _CANDIDATE:
            self.replace().build_plan_at_index(index)

    def get_workspace_size_plan_at_index(self, index: int, *args: Any) -> Any:
        if index == _CANDIDATE:
            return self._container.get_workspace_size(*args)
        return self.replace().get_workspace_size_plan_at_index(index, *args)

    def get_behavior_notes_for_plan_at_index(self, index: int) -> Any:
        if index == _CANDIDATE:
            return self._container.get_behavior_notes()
        return self.replace().get_behavior_notes_for_plan_at_index(index)

    def get_workspace_size(self, handle: Any = None, uids: Any = None, shapes: Any = None, strides: Any = None) -> int:
        self._check_overrides(uids, shapes, strides)
        return self._container.get_workspace_size(handle, uids, shapes, strides)  # type: ignore[no-any-return]

    def _execute_plan_at_index(self, pack: Any, workspace: int, index: int, *args: Any) -> None:
        # Only with overrides; without them the frontend calls _execute_with_raw_ptrs.
        self._check_overrides(*args[1:4])
        if index != _CANDIDATE:
            return self.replace()._execute_plan_at_index(pack, workspace, index, *args)  # type: ignore[no-any-return]
        return self._execute(pack, workspace, *args)  # type: ignore[no-any-return]

    def _check_overrides(self, uids: Any = None, shapes: Any = None, strides: Any = None) -> None:
        """The three lists belong together; cuDNN reads past the end of the shorter ones."""
        lists = {"override_uids": uids, "override_shapes": shapes, "override_strides": strides}
        if all(value is None for value in lists.values()):
            return
        lengths = {name: len(value or ()) for name, value in lists.items()}
        if len(set(lengths.values())) != 1:
            told = ", ".join(f"{length} {name}" for name, length in lengths.items())
            uid = list(uids or ())[min(lengths.values()) : min(lengths.values()) + 1]
            raise ValueError(f"overrides must name the same tensors: got {told}; tensor uid {uid} lacks one")
        by_uid = tensors(self._graph())
        # Strides may have another rank: NVIDIA's own test passes those of a packed tensor, and cuDNN takes them.
        for uid, shape in zip(uids, shapes, strict=True):
            rank = len(by_uid[uid].dim) if uid in by_uid else None
            if rank is None or len(shape) != rank:
                expected = "a tensor of this graph" if rank is None else f"{rank} sizes"
                raise ValueError(f"override of tensor uid {uid}: got shape {shape}; expected {expected}")

    def check_support(self) -> None:
        """A plan that was built is supported."""

    def __getattr__(self, name: str) -> Any:
        # Reached for what is not above: public names of the lowered graph, and get_execution_plan_count, which
        # the frontend asks only before it adds plans.
        if name.startswith("__") or not hasattr(type(vars(self).get("_container")), name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

        def planned(*args: Any, **kwargs: Any) -> Any:
            return getattr(self.replace(), name)(*args, **kwargs)

        return planned

    def __repr__(self) -> str:
        # The built graph's repr is its JSON dump. A debugger must not start a build: say what this is.
        return f"<plan {self._plans.chosen.name!r} loaded by plancache>"

    def replace(self) -> Any:
        """Plan the graph really and give its lowered graph. If that fails the graph is served as before."""
        graph = self._graph()
        if graph is None:
            raise ReferenceError("the graph of this plan is gone")
        if graph._lowered_graph is not self:
            return graph._lowered_graph  # another call was first
        served = Snapshot(graph)
        # What the caller chose since it was served stays so, on the list that planning gives.
        chosen = {name: vars(graph)[name] for name in (*_FILTERS, "_plan_pinned", "_is_built")}
        index, added = graph._plan_index, self._declared.added(graph)
        self._declared.restore(graph)
        try:
            self._plan_again(graph)
        except BaseException:
            served.restore(graph)
            raise
        vars(graph).update(chosen)
        register(graph, added)
        if len(graph._plans) == len(self._plans.plans):
            graph._plan_index = index
        return graph._lowered_graph


def serve(
    graph: Any,
    container: Any,
    plans: PlanList,
    inferred: Sequence[Sequence[Any]],
    plan_again: Callable[[Any], None],
    handle: int | None = None,
) -> None:
    """Make `graph` answer and execute as if it had been built, with the plan that `container` holds.

    Args:
        graph: the caller's graph, declared and not validated.
        container: what `load` gave.
        plans: the plan list of the graph that the plan was built from.
        inferred: (uid, dim, stride, data type name or None) of every tensor that building changed.
        plan_again: builds the graph as it was built then; called if a question needs a really planned graph.
        handle: the raw handle to launch with where the caller gives none, for a container that has none.
    """
    by_uid = tensors(graph)
    loaded = LoadedPlan(graph, Snapshot(graph, by_uid), container, plans, plan_again, handle)
    _infer(by_uid, inferred)
    graph._plans = [
        entry(plan, _CANDIDATE if place == plans.selected else plan.backend_index)
        for place, plan in enumerate(plans.plans)
    ]
    graph._planning_done = graph._is_validated = graph._is_built = True
    graph._cpp_bog_done = graph._cpp_plans_created = True
    graph._plan_index = plans.selected
    graph._freeze()
    graph._lowered_graph = loaded
    # It would ask whether the backend may be asked for plans, and import the Python engines for the answer (370 ms).
    graph._refuse_guarded_backend = lambda: None
    # The frontend hands the index to C++ on its way to the kernel, where only the candidate is known.
    graph.execute_plan_at_index = _ExecutePlanAtIndex(loaded, plans.selected)


def _infer(by_uid: Mapping[int, Any], inferred: Sequence[Sequence[Any]], kind: type = tuple) -> None:
    """Write stored results of inference into a graph's tensors: (uid, dim, stride, data type)."""
    types = cudnn().data_type
    for uid, dim, stride, data_type in inferred:
        if (tensor := by_uid.get(uid)) is None:
            continue
        tensor.dim, tensor.stride = kind(dim), kind(stride)
        if data_type is not None:
            tensor.data_type = getattr(types, data_type)


def put_off(graph: Any, stand_in: Any, inferred: Sequence[Sequence[Any]], frozen: bool) -> None:
    """Make a declared graph pass for a validated one, with `stand_in` for the lowered graph that it lacks."""
    _infer(tensors(graph), inferred, tuple if frozen else list)
    if frozen:
        graph._freeze()
    graph._is_validated = True
    graph._lowered_graph = stand_in


def lowered_has(name: str) -> bool:
    """Whether a lowered graph has an attribute of this name."""
    return hasattr(cudnn()._pybind_module.backend_graph, name)


def was_changed(graph: Any) -> bool:
    """Whether a graph that was put off and not frozen was changed since."""
    return not graph._is_validated


def let_go(graph: Any) -> None:
    """Take the stand-in off a graph that was changed: it is a declared graph again."""
    graph._lowered_graph = None


def take_back(graph: Any, declared: Snapshot) -> None:
    """Undo `put_off`, but keep the filters that were set meanwhile."""
    kept = {name: _copied(getattr(graph, name)) for name in _FILTERS}
    declared.restore(graph)
    vars(graph).update(kept)


def pass_for_planned(graph: Any) -> None:
    """Make a graph that was put off pass for a planned one: `build()` and `execute()` ask by this whether to plan."""
    graph._freeze()
    graph._planning_done = True


def is_pinned(graph: Any) -> bool:
    """Whether the caller chose a plan of the list by its index."""
    return bool(graph._plan_pinned)


def validates_by_itself(graph: Any) -> bool:
    """Whether `validate()` leaves the graph unlowered and open to changes, since a Python engine may take it."""
    return graph._python_native_validator() is not None


class _ExecutePlanAtIndex:
    """`execute_plan_at_index` of a served graph: for another plan than the served one, plan really first."""

    def __init__(self, loaded: LoadedPlan, selected: int) -> None:
        self._loaded = loaded
        self._selected = selected

    def __call__(self, tensors: Any, workspace: Any = None, index: int = 0, *args: Any, **kwargs: Any) -> Any:
        graph = self._loaded._graph()
        if index != self._selected and isinstance(index, int) and 0 <= index < len(graph._plans):  # type: ignore[union-attr]
            self._loaded.replace()
        return cudnn().pygraph.execute_plan_at_index(graph, tensors, workspace, index, *args, **kwargs)
