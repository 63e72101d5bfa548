"""Building for a device that is not here: `target()` and the graph constructor that heeds it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from plancache.cudnn import frontend
from plancache.cudnn.device import Device, device

_target: ContextVar[Device | None] = ContextVar("plancache.target", default=None)


@contextmanager
def target(what: Any) -> Iterator[Device]:
    """Inside, graphs made with `plancache.pygraph` are built for this device, with no GPU needed.

    Args:
        what: anything that `plancache.device` takes: a name (`"h200"`), a JSON file, JSON, a `Device`.

    Raises:
        DeviceError: no such device, or its document is at fault.

    Not promised: anything about graphs made with `cudnn.pygraph` itself. The target is the calling context's
    (`contextvars`): threads started inside do not inherit it.
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
    """`cudnn.pygraph`, with the same arguments, aware of `target()`.

    Inside a target, device properties and `sm_version` are filled in and a handle is dropped, so that one builder
    serves a host with a GPU and one without. Returns a `cudnn.pygraph`.
    """
    chosen = _target.get()
    make = frontend.cudnn().pygraph
    if chosen is None:
        return make(*args, **kwargs)
    # The constructor's first arguments may be given by position: name, three data types, then the handle.
    handle_at, version_at, device_at = 4, 6, 8
    given = list(args)
    for place in (handle_at, version_at, device_at):
        if len(given) > place:
            given[place] = None
    for name in ("handle", "sm_version", "device_property"):
        kwargs.pop(name, None)
    if len(given) > version_at:
        given[version_at] = chosen.sm_version
    else:
        kwargs["sm_version"] = chosen.sm_version
    if len(given) > device_at:
        given[device_at] = chosen.native
    else:
        kwargs["device_property"] = chosen.native
    return make(*given, **kwargs)
