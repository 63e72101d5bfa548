"""Building from documents alone, with no user code and no disk: what the workers of `warm` and `rewarm` do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from plancache.cudnn import device as devices
from plancache.cudnn import libraries, plans, rebuild
from plancache.cudnn.device import Device
from plancache.cudnn.plans import Choice, Request
from plancache.errors import LibraryError
from plancache.keys import Document, PlanKey


def request(
    graph: Document,
    build: Document,
    *,
    device: Device,
    handle: Any = None,
    labels: Mapping[int, str] | None = None,
    builder: str = "",
) -> Request:
    """The request that these documents are of, with a graph that was declared anew.

    Args:
        graph: a key's graph document.
        build: its build document: heuristics, policy, filters, or engine and knobs.
        device: what it is built for.
        handle: build with this handle, of that device.
        labels: names of tensors by uid.
        builder: the function that declared the graph once, for listings.

    Raises:
        DocumentError: a document is malformed, or names something that this frontend does not have.
        LibraryError: this frontend reads something else out of the graph than the one that wrote the document.
        NotKeyableError, UnknownEnvironmentError: as `plans.declare`.
    """
    made = rebuild.graph(graph, device=None if handle is not None else device, handle=handle, labels=labels)
    chosen, run = choice(made, build)
    declared = plans.declare(made)
    key = PlanKey.of(graph, device.document, declared.libraries.document, build)
    if PlanKey.of(declared.document, declared.device.document, declared.libraries.document, build) != key:
        raise LibraryError(
            "a stored graph does not come back as it was",
            found="another document of the graph that was made of it",
            expected=f"the one of key {key}",
            todo="Its graph was declared with another frontend: build it with its own code (plancache warm).",
        )
    return Request(made, key, declared.route, device, chosen, builder, run)


def choice(made: Any, build: Document) -> tuple[Choice, Callable[[Any], None] | None]:
    """How a build document says that the plan of `made` is chosen; its filters are set on the graph.

    With it what builds the graph where the stages have to be gone through one by one, else None.
    """
    module = libraries.cudnn()
    try:
        policy = None
        if build["policy"] != "HEURISTICS_CHOICE":
            policy = module.build_plan_policy.__members__[build["policy"]]
        if build["engine"] is None:
            chosen = Choice([module.heur_mode.__members__[name] for name in build["heuristics"]], policy)
        else:
            knobs = {module.knob_type.__members__[name]: value for name, value in build["knobs"]}
            chosen = Choice(None, policy, (build["engine"], knobs))
        if build["deselected_engines"]:
            made.deselect_engines(list(build["deselected_engines"]))
        for kind, name, keep in build["notes"]:
            _filter_notes(made, kind, name, keep)
        limit = build["workspace_limit"]
        if limit is not None and not build["late_workspace_limit"]:
            made.deselect_workspace_greater_than(limit)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise rebuild.unreadable("build", error) from error
    if limit is None or not build["late_workspace_limit"]:
        return chosen, None
    return chosen, lambda declared: plans.run_limited(declared, chosen, limit)


def _filter_notes(made: Any, kind: str, name: str, keep: bool) -> None:
    module = libraries.cudnn()
    notes = module.behavior_note if kind == "behavior" else module.numerical_note
    short = "behavior" if kind == "behavior" else "numeric"
    getattr(made, f"{'select' if keep else 'deselect'}_{short}_notes")([notes.__members__[name]])


def handle_of(ordinal: int | None) -> Any:
    """A handle of this device (None: the current one), kept for the calling thread.

    Raises:
        DeviceError: there is no such device.
    """
    if ordinal is not None:
        devices.make_current(ordinal)
    return _handle(devices.live(ordinal), ordinal, threading.get_ident())


@cache
def _handle(_device: Device, _ordinal: int | None, _thread: int) -> Any:
    return libraries.cudnn().create_handle()
