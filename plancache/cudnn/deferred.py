"""What stands where the frontend keeps the lowered graph of a graph whose validation was put off.

The frontend forwards filters to the lowered graph, and asks it whatever the graph cannot answer by itself. Filters are
kept by the graph too, and are said again where the graph is validated after all; anything else validates it first.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from plancache.cudnn import frontend


class StandIn:
    """See the module.

    Args:
        graph: the graph, which is held weakly.
        really: does what was put off; the graph then has a lowered graph of its own.
    """

    def __init__(self, graph: Any, really: Callable[[Any], None]) -> None:
        self._graph = weakref.ref(graph)
        self._really = really

    def deselect_engines(self, names: Any) -> None:
        """Said again later."""

    def deselect_workspace_greater_than(self, limit: Any) -> None:
        """Said again later."""

    def get_execution_plan_count(self) -> int:
        """What a graph without plans answers."""
        return 0

    def __getattr__(self, name: str) -> Any:
        # Only what a lowered graph has: somebody may merely look whether there is such an attribute.
        if name.startswith("_") or not frontend.lowered_has(name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

        def ask(*args: Any, **kwargs: Any) -> Any:
            graph = self._graph()
            self._really(graph)
            return getattr(graph, name)(*args, **kwargs)

        return ask

    def __repr__(self) -> str:
        return "<a graph that plancache has not validated yet>"
