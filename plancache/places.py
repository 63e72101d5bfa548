"""Devices to fill a cache for: those that are here, and those that are only described."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from plancache.cudnn import device as devices
from plancache.cudnn.device import Device
from plancache.errors import DeviceError, SettingsError
from plancache.keys import PlanKey

ROUTES = ("native", "deviceless", "replay")


@dataclass(frozen=True)
class Place:
    """A device to build for. `what` is what a worker makes it of: JSON, or the ordinal of one that is here."""

    device: Device
    what: str | int | None
    routes: tuple[str, ...]

    @property
    def main(self) -> str:
        """The route of plans proper."""
        return "deviceless" if isinstance(self.what, str) else "native"

    def key(self, graph: str, build: str, libraries: str) -> PlanKey:
        """The key of a graph and a way to build, from their hashes and that of the environment."""
        return PlanKey(graph, self.device.fingerprint, libraries, build)


def placed(what: Any, driver: str | int | None, routes: Iterable[str] | None) -> list[Place]:
    """Devices as `warm` takes them.

    Raises:
        DeviceError: there is no such device.
        SettingsError: no such driver or route.
    """
    version = driver_version(driver)
    found: dict[Any, Place] = {}
    if isinstance(what, str | int | Device):
        what = [what]  # one device
    for one in (None,) if what is None else what:
        place = live(one, routes) if one is None or isinstance(one, int) else described(one, version, routes)
        found[place.what] = place
    if not found:
        raise DeviceError(
            "there is nothing to build for",
            found="an empty list of devices",
            expected="devices, or None for the GPU that is here",
        )
    return list(found.values())


def described(what: Any, driver: int, routes: Iterable[str] | None) -> Place:
    """A device that is only described, under this driver."""
    device = devices.device(what).with_driver(driver)
    return Place(device, device.to_json(), _routes(routes, ("deviceless", "replay"), ("deviceless", "replay")))


def live(ordinal: int | None, routes: Iterable[str] | None) -> Place:
    """A device that is here."""
    try:
        device = devices.live(ordinal)
    except DeviceError as error:
        raise DeviceError(
            "there is no GPU here to build for",
            found=str(error.found or error.what),
            todo="Name the devices: plancache warm --device h200, or plancache.warm(builders, ['h200']).",
        ) from error
    return Place(device, ordinal, _routes(routes, ("native",), ("native", "replay")))


def _routes(given: Iterable[str] | None, default: tuple[str, ...], possible: tuple[str, ...]) -> tuple[str, ...]:
    if given is None:
        return default
    wanted = [given] if isinstance(given, str) else list(given)
    for route in wanted:
        if route not in ROUTES:
            raise SettingsError("unknown route", name="routes", found=repr(route), expected=" or ".join(ROUTES))
    chosen = tuple(route for route in possible if route in wanted)
    if not chosen:
        raise SettingsError(
            "none of these routes can be built for this device",
            name="routes",
            found=", ".join(wanted) or "none",
            expected=" or ".join(possible),
        )
    return chosen


def driver_version(text: str | int | None) -> int:
    """A CUDA driver version as a number: 12080 of `12.8`; the lowest of this cuDNN's CUDA major without one.

    Raises:
        SettingsError: it is none, or too old for this cuDNN.
    """
    lowest = devices.lowest_driver()
    if text is None:
        return lowest
    major, _, minor = str(text).partition(".")
    if isinstance(text, int):
        version = text
    elif major.isdecimal() and ((len(minor) == 1 and minor.isdecimal()) or not minor):  # 12.80 is no 12.8
        version = 1000 * int(major) + 10 * int(minor or 0)
    else:
        version = 0
    if not lowest <= version < lowest + 10_000:  # nothing would ever serve plans of a driver that nobody has
        raise SettingsError(
            "not a CUDA driver that this cuDNN runs on",
            name="driver",
            found=repr(text),
            expected=f"{lowest // 1000}.0 or later, as 12.8",
        )
    return version
