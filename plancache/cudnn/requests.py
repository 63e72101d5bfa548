"""A request from what is stored: the graph of a record, declared again, and how its plan was chosen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plancache.cudnn import frontend, plans, rebuild, warm
from plancache.cudnn.device import Device
from plancache.cudnn.plans import Request
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
    choice, run = warm.choice(declared, documents["build"])
    if run is not None:
        raise DocumentError(
            "how the plan was chosen cannot be repeated on a declared graph",
            found="a workspace limit that was set after validate()",
            expected="one that was set before",
        )
    return plans.declare(declared).request(declared, choice, builder)


def twin(wanted: Request, *, handle: Any = None, device: Device | None = None) -> Any:
    """A declared graph like the request's, with its filters, that may be built in its place."""
    made = rebuild.graph(wanted.key.documents["graph"], device=device, handle=handle)
    frontend.copy_filters(wanted.graph, made)
    return made
