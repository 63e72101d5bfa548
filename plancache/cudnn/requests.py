"""A request from what is stored: the graph of a record, declared again, and how its plan was chosen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plancache.cudnn import frontend, libraries, plans, rebuild
from plancache.cudnn.device import Device
from plancache.cudnn.plans import Choice, Request
from plancache.cudnn.rebuild import DocumentError
from plancache.keys import Document


def request(
    documents: Mapping[str, Document], *, handle: Any = None, device: Device | None = None, builder: str = ""
) -> Request:
    """The request that documents of a key describe, with a graph of its own.

    Args:
        documents: `graph` and `build`, as `PlanKey.documents` or a record has them.
        handle: what the graph is made with; its key is that of these libraries and this device.
        device: the device that it is for in place of a handle's.
        builder: the name of the function that declared the graph.

    Raises:
        DocumentError: this frontend cannot make the graph, or not choose its plan so.
    """
    declared = rebuild.graph(documents["graph"], device=device, handle=handle)
    try:
        choice = _choice(documents["build"])
        _filter(declared, documents["build"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DocumentError(
            "how the plan was chosen cannot be repeated with this frontend",
            found=f"{type(error).__name__}: {error}",
            expected="a document that this frontend, or an older one, could have written",
        ) from error
    return plans.declare(declared).request(declared, choice, builder)


def twin(wanted: Request, *, handle: Any = None, device: Device | None = None) -> Any:
    """A declared graph like the request's, with its filters, that may be built in its place."""
    made = rebuild.graph(wanted.key.documents["graph"], device=device, handle=handle)
    frontend.copy_filters(wanted.graph, made)
    return made


def _choice(build: Document) -> Choice:
    module = libraries.cudnn()
    policy = None if build["policy"] == "HEURISTICS_CHOICE" else getattr(module.build_plan_policy, build["policy"])
    if build["engine"] is not None:
        knobs = {module.knob_type.__members__[name]: value for name, value in build["knobs"]}
        return Choice(policy=policy, plan=(build["engine"], knobs))
    return Choice([module.heur_mode.__members__[name] for name in build["heuristics"]], policy)


def _filter(declared: Any, build: Document) -> None:
    if build["late_workspace_limit"]:
        raise ValueError("a workspace limit that was set after validate()")
    if build["deselected_engines"]:
        declared.deselect_engines(list(build["deselected_engines"]))
    if build["workspace_limit"] is not None:
        declared.deselect_workspace_greater_than(build["workspace_limit"])
    module = libraries.cudnn()
    for kind, name, keep in build["notes"]:
        kinds = {"behavior": module.behavior_note, "numerical": module.numerical_note}
        verb, noun = "select" if keep else "deselect", "numeric" if kind == "numerical" else kind
        getattr(declared, f"{verb}_{noun}_notes")([kinds[kind].__members__[name]])
