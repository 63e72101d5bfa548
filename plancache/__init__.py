"""plancache keeps cuDNN execution plans on disk, so that a plan is built once per fleet and not once per process.

    import cudnn, plancache

    @plancache.cached
    def builder(handle, ...):
        graph = plancache.pygraph(handle=handle, ...)
        ...
        return graph, tensors

Importing plancache imports neither cuDNN nor anything else that takes time; names are loaded when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plancache.builders import cached as cached
    from plancache.builders import default_cache as default_cache
    from plancache.cache import PlanCache as PlanCache
    from plancache.cache import last_outcome as last_outcome
    from plancache.cudnn.device import Device as Device
    from plancache.cudnn.device import device as device
    from plancache.cudnn.target import pygraph as pygraph
    from plancache.cudnn.target import target as target
    from plancache.dropin import graph_cache as graph_cache
    from plancache.dropin import jit as jit
    from plancache.errors import PlanCacheError as PlanCacheError
    from plancache.keys import PlanKey as PlanKey
    from plancache.opening import open as open
    from plancache.outcome import Outcome as Outcome
    from plancache.outcome import Reason as Reason
    from plancache.outcome import Source as Source
    from plancache.rewarming import rewarm as rewarm
    from plancache.transparent import disable as disable
    from plancache.transparent import enable as enable
    from plancache.transparent import enabled as enabled
    from plancache.warming import warm as warm

__version__ = "0.1.0"

_WHERE = {
    "cached": "plancache.builders",
    "default_cache": "plancache.builders",
    "PlanCache": "plancache.cache",
    "last_outcome": "plancache.cache",
    "open": "plancache.opening",
    "Device": "plancache.cudnn.device",
    "device": "plancache.cudnn.device",
    "pygraph": "plancache.cudnn.target",
    "target": "plancache.cudnn.target",
    "graph_cache": "plancache.dropin",
    "jit": "plancache.dropin",
    "PlanCacheError": "plancache.errors",
    "PlanKey": "plancache.keys",
    "Outcome": "plancache.outcome",
    "Reason": "plancache.outcome",
    "Source": "plancache.outcome",
    "disable": "plancache.transparent",
    "enable": "plancache.transparent",
    "enabled": "plancache.transparent",
    "rewarm": "plancache.rewarming",
    "warm": "plancache.warming",
}
# `open` stays out: a star import would hide Python's own.
__all__ = sorted(set(_WHERE) - {"open"})


def __getattr__(name: str) -> Any:
    module = _WHERE.get(name)
    if module is None:
        raise AttributeError(f"module 'plancache' has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHERE])
