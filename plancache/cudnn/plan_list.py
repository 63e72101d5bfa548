"""What `frontend` gives and takes that is no part of the frontend: plan lists, filters, an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Filters(NamedTuple):
    """What the caller excluded before planning."""

    deselected_engines: tuple[str, ...]
    workspace_limit: int | None
    notes: tuple[tuple[str, Any, bool], ...]


class Plan(NamedTuple):
    """One entry of a plan list: engine id, knobs by number, its name, its place in the backend's own list."""

    name: str
    engine: int
    knobs: dict[int, int]
    backend_index: int | None


class PlanList(NamedTuple):
    """The ranked plans of a built graph and which one was chosen."""

    plans: tuple[Plan, ...]
    selected: int

    @property
    def chosen(self) -> Plan:
        """The plan that runs."""
        return self.plans[self.selected]


class SharedUidError(ValueError):
    """Two tensors of one graph have the same uid: which one a node means cannot be told."""


def with_handle(function: Callable[..., Any], place: int, handle: int) -> Callable[..., Any]:
    """A function that gets this handle where it would get none."""

    def call(*args: Any) -> Any:
        return function(*args[:place], args[place] or handle, *args[place + 1 :])

    return call
