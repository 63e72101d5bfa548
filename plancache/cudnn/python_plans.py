"""Entries of the frontend's plan lists, those of its Python engines without importing the engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from typing import Any

from plancache.cudnn.libraries import cudnn
from plancache.cudnn.plan_list import Plan


def entry(plan: Plan, backend_index: int | None) -> Any:
    """The frontend's entry for a stored plan, at this place of the backend's list."""
    kind, is_python_engine = _kinds()
    if is_python_engine(plan.engine):
        return python_config(kind, plan.engine, plan.knobs)
    return kind(plan.engine, _knobs(tuple(plan.knobs.items())).copy(), backend_index)


@cache
def _kinds() -> tuple[Any, Callable[[int], bool]]:
    from cudnn.engines.base import PlanConfig
    from cudnn.engines.engine_ids import is_python_engine

    return PlanConfig, is_python_engine


@lru_cache(maxsize=1024)
def _knobs(numbered: tuple[tuple[int, int], ...]) -> dict[Any, int]:
    # Plans differ in few of them, and to find and hash one member of the frontend's enumeration takes a microsecond.
    knob = cudnn().knob_type
    return {knob(number): value for number, value in numbered}


def python_config(base: Any, engine: int, numbered: Mapping[int, int]) -> Any:
    """An entry whose native knobs are made when asked for: making them imports the engine.

    Args:
        base: the frontend's PlanConfig.
        engine: the engine's id.
        numbered: public knobs by number.
    """

    class StoredPythonPlan(base):  # type: ignore[misc]
        @property
        def knobs(self) -> Any:
            from cudnn.engines import manifest

            knob = cudnn().knob_type
            public = {knob(number): value for number, value in numbered.items()}
            return manifest.engine_for_id(engine).knobs_from_public(public)

    config: Any = object.__new__(StoredPythonPlan)
    config.__dict__.update(engine_id=engine, cpp_index=None, mode=None)
    return config
