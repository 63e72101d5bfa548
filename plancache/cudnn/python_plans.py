"""Entries of plan lists for the frontend's Python engines, made without importing the engines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plancache.cudnn.libraries import cudnn


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
