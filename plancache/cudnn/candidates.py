"""Every plan that cuDNN's heuristics offer for a graph, and each of them built by itself."""

from __future__ import annotations

import time
from typing import Any

from plancache.cudnn import frontend, libraries, plans, requests
from plancache.cudnn.device import Device
from plancache.cudnn.frontend import Plan
from plancache.cudnn.plans import BuiltPlan, Choice, Request
from plancache.cudnn.unhooked import unhooked


def candidates(wanted: Request, *, handle: Any = None, device: Device | None = None) -> list[Plan]:
    """The plans of the request's own heuristics in their order, then those that only the other modes know.

    Each engine with its knobs comes once; those that the graph's filters exclude by name, and those of the frontend's
    Python engines, do not come up.

    Raises whatever the frontend raises for a graph that it has no plan for.
    """
    modes = libraries.cudnn().heur_mode
    own = list(wanted.choice.heuristics or (modes.A, modes.FALLBACK))
    found: dict[tuple[int, tuple[tuple[int, int], ...]], Plan] = {}
    for listed in (own, *([mode] for mode in (modes.A, modes.B, modes.FALLBACK) if mode not in own)):
        try:
            offered = _offered(requests.twin(wanted, handle=handle, device=device), listed)
        except libraries.cudnn().cudnnGraphNotSupportedError:
            if listed is own:
                raise
            continue  # a mode that has no plan for this graph
        for plan in offered:
            found.setdefault(identity(plan.engine, plan.knobs), plan)
    return list(found.values())


def identity(engine: int, knobs: Any) -> tuple[int, tuple[tuple[int, int], ...]]:
    """What makes two plans of a graph the same one."""
    return engine, tuple(sorted((int(knob), int(value)) for knob, value in dict(knobs).items()))


def _offered(declared: Any, modes: list[Any]) -> list[Plan]:
    with unhooked():
        declared.validate()
        declared.build_operation_graph()
        declared.create_execution_plans(modes)
    excluded = frontend.barred(declared)
    return [
        plan
        for index, plan in enumerate(frontend.plan_list(declared).plans)
        if index not in excluded and plan.backend_index is not None
    ]


def build(wanted: Request, plan: Plan, *, handle: Any = None, device: Device | None = None) -> tuple[Any, float]:
    """A graph like the request's, built with exactly this plan, and how long that took.

    Raises whatever the frontend raises if it cannot be.
    """
    declared = requests.twin(wanted, handle=handle, device=device)
    knob = libraries.cudnn().knob_type
    chosen = {knob(number): value for number, value in plan.knobs.items()}
    started = time.perf_counter()
    plans.run_build(declared, Choice(plan=(plan.engine, chosen)))
    return declared, time.perf_counter() - started


def taken(wanted: Request, built: Any, seconds: float) -> BuiltPlan:
    """The plan of a graph that `build` gave, as it is stored under the request's key.

    Raises:
        UnkeptPlanError: it cannot be kept.
    """
    return plans.taken(built, plans.declared_tensors(wanted.graph), seconds)
