"""Building for a device that is not here: `target()` and the graph constructor that heeds it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from plancache.cudnn import libraries
from plancache.cudnn.device import Device, device

# The constructor's arguments that may be given by position (a contract test compares them with the frontend's).
_POSITIONAL = (
    *("name", "io_data_type", "intermediate_data_type", "compute_data_type", "handle", "sm_count", "sm_version"),
    *("kernel_cache", "device_property", "is_dynamic_shape_enabled", "is_override_shape_enabled"),
    "cuda_graph_retention",
)
_target: ContextVar[Device | None] = ContextVar("plancache.target", default=None)


@contextmanager
def target(what: Any) -> Iterator[Device]:
    """Inside, graphs made with `plancache.pygraph` are built for this device, with no GPU needed.

    Args:
        what: anything that `plancache.device` takes: a name (`"h200"`), a JSON file, JSON, a `Device`.

    Raises:
        DeviceError: no such device, or its document is at fault.

    Not promised: anything about graphs made with `cudnn.pygraph` itself, unless `plancache.enable()` is on. The target
    is the calling context's (`contextvars`): threads started inside do not inherit it.
    """
    chosen = device(what)
    token = _target.set(chosen)
    try:
        yield chosen
    finally:
        _target.reset(token)


def current() -> Device | None:
    """The device of the innermost `target()`, or None."""
    return _target.get()


def pygraph(*args: Any, **kwargs: Any) -> Any:
    """`cudnn.pygraph`, with the same arguments, aware of `target()`. A function: for isinstance use `cudnn.pygraph`.

    Args:
        args: as `cudnn.pygraph` takes them.
        kwargs: as `cudnn.pygraph` takes them.

    Inside a target, device properties and `sm_version` are filled in where they are not given, and a handle is
    dropped, so that one builder serves a host with a GPU and one without. (Without `sm_version` the frontend asks the
    CUDA runtime for a device, and fails where there is none.) Returns a `cudnn.pygraph`.
    """
    args, kwargs = filled_in(args, kwargs)
    return libraries.cudnn().pygraph(*args, **kwargs)


def filled_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The constructor's arguments as the current target wants them."""
    chosen = _target.get()
    if chosen is None or len(args) > len(_POSITIONAL):  # its own TypeError
        return args, kwargs
    # What was given by position, the handle among it, gets its name.
    given = dict(zip(_POSITIONAL, args, strict=False)) | kwargs
    given.pop("handle", None)
    # What the caller says of the device stays: a contradiction is found when the graph is keyed.
    if given.get("device_property") is None:
        given["device_property"] = chosen.native
    if given.get("sm_version") is None:
        given["sm_version"] = chosen.sm_version
    return (), given
