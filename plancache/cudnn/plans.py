"""Build a graph, keep its plan, load it again: the routes, and what goes with a plan besides cuDNN's blob."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from plancache.cudnn import device as devices
from plancache.cudnn import environment, frontend, graph, libraries
from plancache.cudnn.device import Device
from plancache.cudnn.kernel_cache import Tracked
from plancache.cudnn.unhooked import unhooked
from plancache.errors import BuilderError, DeviceError, LibraryError
from plancache.keys import Part, PlanKey


class Route(StrEnum):
    """How a plan is built and loaded. cuDNN gives wrong results or hangs where the two are mixed."""

    NATIVE = "native"
    TUNED = "tuned"  # as native; the plan is the fastest that was measured, not the one that heuristics put first
    REPLAY = "replay"
    DEVICELESS = "deviceless"


@dataclass(frozen=True)
class Choice:
    """How a plan is chosen: by these heuristic modes and this policy, or (engine, knobs) outright."""

    heuristics: Sequence[Any] | None = None
    policy: Any = None
    plan: tuple[int, Mapping[Any, int]] | None = None

    def __post_init__(self) -> None:
        if self.heuristics is not None:
            modes = libraries.cudnn().heur_mode
            object.__setattr__(self, "heuristics", _listed(self.heuristics))  # an iterator would be used up by the key
            wrong = [mode for mode in self.heuristics or () if not isinstance(mode, modes)]
            if wrong:
                raise BuilderError("heuristics are modes", found=repr(wrong[0]), expected="a list of cudnn.heur_mode")
        if self.policy is not None and not isinstance(self.policy, libraries.cudnn().build_plan_policy):
            raise BuilderError("unknown policy", found=repr(self.policy), expected="a cudnn.build_plan_policy")
        if self.plan is not None and self.heuristics is not None:
            raise BuilderError(
                "an explicit plan leaves nothing to heuristics", found="both", expected="heuristics or plan, not both"
            )


def _listed(heuristics: Any) -> list[Any]:
    try:
        return list(heuristics)
    except TypeError:
        raise BuilderError(
            "heuristics are a list", found=repr(heuristics), expected="a list of cudnn.heur_mode"
        ) from None


@dataclass(frozen=True)
class Request:
    """A declared graph, how its plan is to be chosen, and the key of the plan that this gives.

    `builder` names the function that declared it, for listings; no part of the key. `run` builds the graph, in place
    of `run_build`, from the state that it is in; `before` is its `declared_tensors` where it is validated already.
    """

    graph: Any
    key: PlanKey
    route: Route
    device: Device
    choice: Choice
    builder: str = ""
    run: Callable[[Any], None] | None = None
    before: Mapping[int, Any] | None = None


@dataclass(frozen=True)
class BuiltPlan:
    """A built graph's plan, as it is stored; its blob is cuDNN's, or for the route `replay` a kernel document."""

    plans: frontend.PlanList
    inferred: list[list[Any]]
    blob: bytes
    seconds: float
    validates_by_itself: bool = False


class UnkeptPlanError(Exception):
    """The graph is built and ready, but its plan cannot be kept; `kind` says why."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(detail)
        self.kind = kind


class UnknownEnvironmentError(Exception):
    """The device or the libraries could not be identified: neither store nor match."""


class Declared(NamedTuple):
    """A graph as it was declared: what of its key does not depend on how its plan is chosen."""

    document: Mapping[str, Any]
    route: Route
    device: Device
    libraries: Part

    def request(self, declared: Any, choice: Choice, builder: str = "", late_workspace_limit: bool = False) -> Request:
        """The request of the graph with the filters that it has now.

        Args:
            declared: the graph, in whatever state it is by now.
            late_workspace_limit: whether a limit was set after `validate()`; one that is set before does not reach the
                backend (frontend 1.32), so that other plans come of it.

        Raises:
            NotKeyableError: a value has no exact encoding.
        """
        spec = graph.build_spec(declared, choice.heuristics, choice.policy, choice.plan, late_workspace_limit)
        try:
            key = PlanKey.of_parts(self.document, self.device.part, self.libraries, spec.part())
        except (TypeError, ValueError, OverflowError) as error:  # a scalar that msgpack does not write exactly
            raise graph.NotKeyableError(str(error)) from error
        return Request(declared, key, self.route, self.device, choice, builder)


def declare(declared: Any) -> Declared:
    """What a declared graph is.

    Raises:
        NotKeyableError: the graph holds a value that has no exact encoding.
        UnknownEnvironmentError: the device or the libraries could not be identified.
        DeviceError: the graph contradicts its own device.
    """
    route, device = _device_of(declared)
    try:
        libraries = environment.part()
    except (LibraryError, OSError) as error:
        raise UnknownEnvironmentError(str(error)) from error
    return Declared(graph.document(declared, device), route, device, libraries)


def _device_of(declared: Any) -> tuple[Route, Device]:
    handle = frontend.handle_of(declared)
    described = frontend.argument(declared, "device_property")
    try:
        # With both, the frontend lowers with the handle and loading behaves like loading with it (measured).
        if handle is not None:
            return Route.NATIVE, devices.live(handle.device.ordinal)
        if described is not None:
            return Route.DEVICELESS, devices.of_native(described)
        return Route.NATIVE, devices.live(None)
    except (DeviceError, LibraryError) as error:
        raise UnknownEnvironmentError(str(error)) from error


def run_build(declared: Any, choice: Choice) -> None:
    """Build as the caller would have; whatever the frontend raises is the caller's."""
    libraries.ensure_nvrtc()
    with unhooked():
        if choice.policy is None and choice.plan is None:
            declared.build(choice.heuristics)
            return
        run_planning(declared, choice)
        run_compilation(declared, choice)


def run_planning(declared: Any, choice: Choice) -> None:
    """Every stage of a build but the one that compiles."""
    with unhooked():
        declared.validate()
        declared.build_operation_graph()
        if choice.plan is None:
            declared.create_execution_plans(choice.heuristics)
        else:
            declared.create_execution_plan(choice.plan[0], dict(choice.plan[1]))
        declared.check_support()


def run_limited(declared: Any, choice: Choice, limit: int) -> None:
    """Build with a workspace limit that is set after `validate()`: an earlier one does not reach the backend."""
    with unhooked():
        declared.validate()
        declared.build_operation_graph()
        declared.deselect_workspace_greater_than(limit)
        if choice.plan is None:
            declared.create_execution_plans(choice.heuristics)
        else:
            declared.create_execution_plan(choice.plan[0], dict(choice.plan[1]))
        declared.check_support()
    run_compilation(declared, choice)


def run_compilation(declared: Any, choice: Choice) -> None:
    """The stage of a build that compiles."""
    libraries.ensure_nvrtc()
    with unhooked():
        declared.build_plans(*(() if choice.policy is None else (choice.policy,)))


def build(wanted: Request) -> BuiltPlan:
    """Build the request's graph, and give its plan.

    Raises:
        UnkeptPlanError: the graph was built, and its plan is of a kind that is not kept or cannot be read.
        And whatever the frontend raises while building: that is the caller's.
    """
    before = declared_tensors(wanted.graph) if wanted.before is None else wanted.before
    libraries.ensure_nvrtc()  # also for a caller's own stages
    started = time.perf_counter()
    _run(wanted)(wanted.graph)
    return taken(wanted.graph, before, time.perf_counter() - started)


def _run(wanted: Request) -> Callable[[Any], None]:
    choice = wanted.choice
    return wanted.run if wanted.run is not None else lambda declared: run_build(declared, choice)


def declared_tensors(declared: Any) -> dict[int, Any]:
    """Shapes and types as they are before a build, by uid: what it then infers is told apart by them."""
    return {uid: _attributes(tensor) for uid, tensor in frontend.tensors(declared).items()}


def taken(built: Any, before: Mapping[int, Any], seconds: float) -> BuiltPlan:
    """The plan of a built graph, which was loaded once to see that it can be.

    Args:
        before: its `declared_tensors`, from before the build.
        seconds: how long the build took.

    Raises:
        UnkeptPlanError: the plan is of a kind that is not kept or cannot be read.
    """
    kind = frontend.chosen_kind(built)
    if kind != "backend":
        raise UnkeptPlanError(kind)
    try:
        after = declared_tensors(built)
        # Not of tensors that came after the declaration: they are no part of it, and other graphs of the key lack them.
        inferred = [[uid, *now] for uid, now in after.items() if uid in before and now != before[uid]]
        by_itself = frontend.validates_by_itself(built)
        blob = built.serialize(as_bytes=True)
        plan = BuiltPlan(frontend.plan_list(built), inferred, blob, seconds, by_itself)
    except Exception as error:  # the graph is ready; what went wrong is only the keeping
        raise UnkeptPlanError("unreadable", f"{type(error).__name__}: {error}") from error
    try:
        # A few of a thousand milliseconds: some plans cannot be loaded at all (a warm-up that cannot be captured), and
        # every process after this one would fail at it before it builds.
        frontend.load(built, blob, frontend.argument(built, "device_property"), bare=True)
    except Exception as error:
        devices.clear_error()
        raise UnkeptPlanError("unloadable", f"{type(error).__name__}: {error}") from error
    return plan


def _attributes(tensor: Any) -> tuple[list[int], list[int], str | None]:
    data_type = tensor.get_data_type()
    return list(tensor.dim), list(tensor.stride), None if data_type is None else data_type.name


def replay(wanted: Request, plan: Mapping[str, Any], document: bytes) -> Tracked:
    """Rebuild a stored plan from its kernel document and recipe, in the request's graph; its kernel cache.

    Nothing is compiled where the engine takes its kernels from the document. Raises whatever cuDNN raises; the graph
    is then as it was.
    """
    declared = wanted.graph
    chosen = plan_list(plan).chosen
    knob = libraries.cudnn().knob_type
    recipe = (chosen.engine, {knob(number): value for number, value in chosen.knobs.items()})
    snapshot = frontend.Snapshot(declared)
    try:
        tracked = Tracked(document.decode(), 1)
        frontend.attach_kernel_cache(declared, tracked.native)
        run_build(declared, Choice(plan=recipe))
    except BaseException:
        snapshot.restore(declared)
        raise
    return tracked


def load(wanted: Request, route: Route, plan: Mapping[str, Any], blob: bytes) -> None:
    """Make the request's graph executable from a stored plan: `described(plan)` and its blob.

    `route` is the stored plan's. Raises whatever cuDNN raises when it does not take the blob; the graph is then
    as it was.
    """
    if route is Route.REPLAY:
        replay(wanted, plan, blob)
        return
    described = wanted.device.native if route is Route.DEVICELESS else None
    container = frontend.load(wanted.graph, blob, described)
    frontend.serve(
        wanted.graph,
        container,
        plan_list(plan),
        plan["inferred"],
        _run(wanted),
        # The caller's graph has a handle of its own, which a deviceless container lacks.
        frontend.backend_handle(wanted.graph) if described is not None and wanted.route is Route.NATIVE else None,
    )


def operation_graph(blob: bytes) -> Any:
    """The operation graph that a plan says it is for: the part of cuDNN's own JSON inside its blob.

    None where the blob has no such part.
    """
    # The blob is UBJSON; cuDNN's JSON is one string in it, and starts like this (9.11 to 9.28).
    start = blob.find(b'{"cudnnVersion"')
    if start < 0:
        return None
    try:
        document, _ = json.JSONDecoder().raw_decode(blob[start:].decode("latin-1"))
    except ValueError:
        return None
    return document.get("operationGraph")


def described(plan: BuiltPlan) -> dict[str, Any]:
    """What is stored beside the blob, as plain data."""
    listed = [
        [one.name, one.engine, [[knob, value] for knob, value in one.knobs.items()], one.backend_index]
        for one in plan.plans.plans
    ]
    return {
        "plans": listed,
        "selected": plan.plans.selected,
        "inferred": plan.inferred,
        "seconds": plan.seconds,
        "validates_by_itself": plan.validates_by_itself,
    }


def plan_list(plan: Mapping[str, Any]) -> frontend.PlanList:
    """The list of plans that `described` wrote down."""
    listed = tuple(frontend.Plan(name, engine, dict(knobs), index) for name, engine, knobs, index in plan["plans"])
    return frontend.PlanList(listed, plan["selected"])


def stored_plan(plan: Mapping[str, Any], blob: bytes) -> BuiltPlan:
    """The plan that `described` wrote down, with its blob."""
    inferred = [list(tensor) for tensor in plan["inferred"]]
    return BuiltPlan(plan_list(plan), inferred, blob, plan["seconds"], bool(plan.get("validates_by_itself")))


# Parts of messages with which a load fails for the sake of the process or the GPU, not of the plan: such a plan
# is good for others, and must not be set aside.
_NOT_THE_PLAN = ("cuda", "alloc", "memory", "sublibrary", "internal_error", "nvrtc", "not_initialized")


def is_refusal(error: Exception) -> bool:
    """Whether a failed load says that the plan itself is unfit."""
    text = str(error).lower()
    return not any(part in text for part in _NOT_THE_PLAN)
