"""Device properties: from a live device, from JSON, to JSON; and the fingerprint that plans are filed under.

cuDNN describes a GPU by a flat JSON document. Which fields decide whether it takes a plan was measured by
editing documents: another SM version, SM count, shared-memory limit, or number of registers or threads per SM
is refused; another PCI id, ordinal, clock, memory size, L2 size or newer driver is accepted. The fingerprint is
made of the former and the name, so that two boards of one model share their plans.
"""

from __future__ import annotations

import json
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any

from plancache.cudnn import libraries, no_driver
from plancache.errors import DeviceError, LibraryError
from plancache.keys import Document, Part
from plancache.settings import PACKAGE

_TRIPLES = ("maxGridSize", "maxBlockSize")
_TEXTS = ("deviceName",)
_NUMBERS = (
    "regsPerBlock",
    "multiProcessorCount",
    "smCountOrigin",
    "warpSize",
    "maxSharedMemoryPerBlock",
    "maxSharedMemoryPerBlockOptin",
    "oversizedSharedMemoryPerBlock",
    "reservedSharedMemoryPerBlock",
    "maxRegistersPerSM",
    "maxCtasPerSM",
    "maxThreadsPerBlock",
    "maxThreadsPerSM",
    "pciDeviceId",
    "isTccDriver",
    "supportCoopLaunch",
    "totalGlobalMem",
    "smClockRateKHz",
    "memClockRateKHz",
    "memoryBusWidth",
    "l2CacheSize",
    "cudaDeviceId",
    "deviceVer",
    "driverVer",
)
FIELDS = (*_TRIPLES, *_NUMBERS, *_TEXTS)
# What an older cuDNN's document lacks (9.19 against 9.27). 0 is what an H200 reports for the first two; the bus
# width was varied (0, 5120, 6016) and left the plan lists of matmul and SDPA as they were.
FILLED = {"smCountOrigin": 0, "oversizedSharedMemoryPerBlock": 0, "memoryBusWidth": 0}
_NEWEST_KNOWN_CUDNN = 92899  # the newest cuDNN whose documents were seen; later ones may have more fields
# Fingerprint field -> driver attribute; the name and the SM version are asked for separately.
_ATTRIBUTES = {
    "multiProcessorCount": "MULTIPROCESSOR_COUNT",
    "warpSize": "WARP_SIZE",
    "regsPerBlock": "MAX_REGISTERS_PER_BLOCK",
    "maxRegistersPerSM": "MAX_REGISTERS_PER_MULTIPROCESSOR",
    "maxCtasPerSM": "MAX_BLOCKS_PER_MULTIPROCESSOR",
    "maxThreadsPerBlock": "MAX_THREADS_PER_BLOCK",
    "maxThreadsPerSM": "MAX_THREADS_PER_MULTIPROCESSOR",
    "maxSharedMemoryPerBlock": "MAX_SHARED_MEMORY_PER_BLOCK",
    "maxSharedMemoryPerBlockOptin": "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN",
    "reservedSharedMemoryPerBlock": "RESERVED_SHARED_MEMORY_PER_BLOCK",
}
_POSITIVE = {*_ATTRIBUTES, "deviceVer", "driverVer"} - {"reservedSharedMemoryPerBlock"}
FINGERPRINT = ("deviceName", "deviceVer", *_ATTRIBUTES)


# Those whose descriptor was made here, by its identity: cuDNN takes 0.2 ms to write the first one out again.
_described: weakref.WeakValueDictionary[int, Device] = weakref.WeakValueDictionary()


class Device:
    """The properties of one kind of GPU. Made by `plancache.device`; never changes.

    Attributes:
        document: the part that decides which plans fit (see the module's docstring).
        driver: CUDA driver version, as 13000 for 13.0.
    """

    def __init__(self, document: Document, driver: int, text: Callable[[], str]) -> None:
        self.document = document
        self.driver = driver
        self._text = text
        self._lock = threading.Lock()
        self._native: Any = None

    @classmethod
    def from_properties(cls, properties: Mapping[str, Any]) -> Device:
        """A device from a full set of properties that was checked before; `device` takes those that were not.

        Args:
            properties: cuDNN's names and values, as in the JSON.
        """
        text = json.dumps(dict(properties), separators=(",", ":"))
        document = {name: properties[name] for name in FINGERPRINT}
        return cls(document, int(properties["driverVer"]), lambda: text)

    def with_driver(self, driver: int) -> Device:
        """The same device under another CUDA driver.

        Args:
            driver: its version, as 13000 for 13.0.
        """
        return Device.from_properties({**json.loads(self.to_json()), "driverVer": driver})

    @property
    def name(self) -> str:
        """The board's name, as `NVIDIA H200`."""
        return str(self.document["deviceName"])

    @property
    def sm_version(self) -> int:
        """Compute capability as cuDNN writes it: 900 for 9.0."""
        return int(self.document["deviceVer"])

    @property
    def sm_count(self) -> int:
        """Number of streaming multiprocessors."""
        return int(self.document["multiProcessorCount"])

    @cached_property
    def part(self) -> Part:
        """The device's part of a key."""
        return Part(self.document)

    @property
    def fingerprint(self) -> str:
        """SHA-256, in hex, of the properties that decide which plans fit."""
        return self.part.hash

    def to_json(self) -> str:
        """The full document, as cuDNN writes it. Of a live device the first call takes 18 to 190 ms."""
        return self._text()

    @property
    def native(self) -> Any:
        """cuDNN's descriptor. Made once and shared: many threads may load plans with it at the same time.

        Raises:
            LibraryError: this host has no driver, and none could be stood in for.
            DeviceError: cuDNN refused the document.
        """
        if self._native is None:
            # cuDNN remembers for the life of the process that a first attempt failed for want of a driver library.
            no_driver.ensure_driver()
            with self._lock:
                if self._native is None:
                    self._native = _descriptor(self.to_json())
                    _described[id(self._native)] = self
        return self._native

    def __repr__(self) -> str:
        return f"Device({self.name!r}, sm_version={self.sm_version}, driver={self.driver})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and (self.document, self.driver) == (other.document, other.driver)

    def __hash__(self) -> int:
        return hash((self.fingerprint, self.driver))


def device(what: Any = None) -> Device:
    """Device properties from whatever names a device.

    Args:
        what: a name (`"h200"`), the path of a JSON file, the JSON itself, a CUDA ordinal, a cuDNN handle, cuDNN's
            own device-properties object, or a `Device`. None is the current device.

    Raises:
        DeviceError: there is no such device, or the document has a missing, mistyped or unknown field.

    Not promised: that cuDNN supports the device; that shows when a plan is built.
    """
    if isinstance(what, Device):
        return what
    if what is None or (isinstance(what, int) and not isinstance(what, bool)):
        return live(what)
    if isinstance(what, Path):
        return _from_text(_read(what), f"file {what}")
    if isinstance(what, str):
        return _from_string(what)
    if hasattr(what, "serialize"):
        return of_native(what)
    if hasattr(what, "device"):
        return live(what.device.ordinal)
    raise DeviceError(
        "this names no device", found=type(what).__name__, expected="a name, file, JSON, ordinal or handle"
    )


def names() -> list[str]:
    """The devices that plancache knows by name."""
    return sorted(path.stem for path in (PACKAGE / "devices").glob("*.json"))


def of_native(descriptor: Any) -> Device:
    """The `Device` of cuDNN's own descriptor, for graphs that were made with one. Microseconds after the first."""
    made = _described.get(id(descriptor))
    if made is not None and made._native is descriptor:  # descriptors never change
        return made
    text = descriptor.serialize()
    return _known(text if isinstance(text, str) else bytes(text).decode())


def lowest_driver() -> int:
    """The lowest driver that the CUDA major of the installed cuDNN runs on, as 12000: newer ones take its plans."""
    return 1000 * libraries.cuda_major()


def make_current(ordinal: int) -> None:
    """Make this the calling thread's current device.

    Raises:
        DeviceError: there is no such device.
    """
    _cuda_driver()
    import cuda.bindings.runtime as runtime

    _asked((*runtime.cudaSetDevice(ordinal), None), f"cudaSetDevice({ordinal})")


def live(ordinal: int | None) -> Device:
    """The device with this CUDA ordinal (None: the current one), identified by driver attributes alone."""
    driver = _cuda_driver()
    index = _current(driver) if ordinal is None else ordinal
    return _live(index)


def current_ordinal() -> int | None:
    """The ordinal of the current device; None where there is none. Microseconds after the first call."""
    if _no_driver_here:
        return None
    try:
        return _current(_cuda_driver())
    except (DeviceError, LibraryError):
        return None


def is_capturing(handle: Any) -> bool:
    """Whether the stream of a handle is being captured into a CUDA graph. About a microsecond."""
    if handle is None or _no_driver_here:
        return False
    driver = _cuda_driver()
    status, state = driver.cuStreamIsCapturing(driver.CUstream(int(libraries.cudnn().get_stream(handle) or 0)))
    return int(status) == 0 and int(state) == int(driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE)


def driver() -> Any:
    """cuda-python's driver module, initialized.

    Raises:
        DeviceError: there is no CUDA device here.
        LibraryError: cuda-python is not installed.
    """
    return _cuda_driver()


def clear_error() -> None:
    """Forget the CUDA error that a failed load has left behind.

    Loading with a handle captures a stream. Where a plan cannot be captured, the runtime keeps the error, and
    whoever asks for the last one next, as torch does, takes it for his own (instance norm backward on cuDNN 9.19).
    """
    import ctypes

    for name in ("libcudart.so.13", "libcudart.so.12"):
        try:
            runtime = ctypes.CDLL(name, mode=os.RTLD_NOLOAD)
        except OSError:
            continue
        runtime.cudaGetLastError()


def _from_string(text: str) -> Device:
    text = text.removeprefix("\ufeff")
    if text.lstrip().startswith(("{", "[")):
        return _from_text(text, "JSON")
    if text.lower() in names():
        return _from_text((PACKAGE / "devices" / f"{text.lower()}.json").read_text(), text)
    if text.endswith(".json") or "/" in text or _is_file(text):
        return _from_text(_read(Path(text)), f"file {text}")
    raise DeviceError(
        "unknown device",
        found=repr(text),
        expected=f"one of {', '.join(names())}, a file, or JSON",
        todo="On a host that has the device: plancache device export FILE",
    )


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):
        return False


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise DeviceError("the device file cannot be read", found=str(error), expected="a JSON file") from error


def _from_text(text: str, where: str) -> Device:
    try:
        properties = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise DeviceError(f"{where} is not JSON", found=str(error), expected="device properties as JSON") from error
    if not isinstance(properties, dict):
        raise DeviceError(f"{where} holds no object", found=type(properties).__name__, expected="a JSON object")
    return Device.from_properties(_checked(properties, where))


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the field {name} is there twice")
        found[name] = value
    return found


def _checked(properties: dict[str, Any], where: str) -> dict[str, Any]:
    """The document with older cuDNNs' gaps filled, or an error that names the first field at fault."""
    full = {**FILLED, **properties}
    for name in sorted(set(full) - set(FIELDS)):
        import difflib

        near = difflib.get_close_matches(name, FIELDS, 1)
        if near or libraries.backend_version() <= _NEWEST_KNOWN_CUDNN:
            hint = f"Did you mean {near[0]}?" if near else "Remove it."
            raise DeviceError(
                f"{where} has an unknown field",
                field=name,
                found=repr(name),
                expected="a field that cuDNN writes",
                todo=hint,
            )
    for name in FIELDS:
        if name not in full:
            raise DeviceError(
                f"{where} lacks a field",
                field=name,
                expected=name,
                todo="Export it again from the device: plancache device export FILE",
            )
        expected = _mistyped(name, full[name])
        if expected:
            raise DeviceError(
                f"{where} has a wrong value for {name}", field=name, found=repr(full[name]), expected=expected
            )
    return {name: full[name] for name in [*FIELDS, *sorted(set(full) - set(FIELDS))]}


def _mistyped(name: str, value: Any) -> str | None:
    # cuDNN reads 32 bits of every number but the memory size, and refuses larger ones without saying which.
    limit = 2**63 if name == "totalGlobalMem" else 2**31

    def number(item: Any) -> bool:
        return isinstance(item, int) and not isinstance(item, bool) and 0 <= item < limit

    if name in _TEXTS:
        return None if isinstance(value, str) and value.isprintable() and value else "a text"
    if name in _POSITIVE and value == 0:
        return "more than 0"
    if name in _TRIPLES:
        fits = isinstance(value, list) and len(value) == 3 and all(number(item) for item in value)
        return None if fits else "three whole numbers"
    return None if number(value) else "a whole number"


@lru_cache(maxsize=64)
def _known(text: str) -> Device:
    # From cuDNN itself, so not checked: a newer cuDNN's document may have more fields than FIELDS.
    properties = json.loads(text)
    return Device.from_properties({**FILLED, **properties})


def _descriptor(text: str) -> Any:
    try:
        return libraries.cudnn().create_device_properties(text)
    except RuntimeError as error:
        raise DeviceError(
            f"cuDNN {libraries.backend_version()} refused the device properties",
            found=str(error),
            todo="Export them again with this cuDNN: plancache device export FILE",
        ) from error


@cache
def _initialized_driver() -> Any:
    try:
        import cuda.bindings.driver as driver
    except ImportError as error:
        raise LibraryError(
            "cuda-python is not installed",
            expected="cuda-python of cuDNN's CUDA major",
            todo="pip install 'plancache[cu12]'",
        ) from error
    try:
        status = int(driver.cuInit(0)[0])
    except Exception as error:  # cuda-python raises its own kinds when there is no driver library at all
        raise DeviceError("there is no CUDA device here", found=str(error), todo=_NO_DEVICE) from error
    if status:
        raise DeviceError("there is no CUDA device here", found=f"cuInit: {status}", todo=_NO_DEVICE)
    return driver


def _cuda_driver() -> Any:
    if _no_driver_here:
        raise _no_driver_here[0]
    try:
        return _initialized_driver()
    except (DeviceError, LibraryError) as error:
        # Remembered: a look for a driver that is not there takes milliseconds, and cuInit answers once for all.
        _no_driver_here.append(error)
        raise


_no_driver_here: list[DeviceError | LibraryError] = []
_NO_DEVICE = "Name the device to build for: with plancache.target('h200'): ..."


def _asked(result: tuple[Any, ...], what: str) -> Any:
    if int(result[0]):
        raise DeviceError(f"the driver did not answer {what}", found=str(result[0]))
    return result[1]


def _current(driver: Any) -> int:
    status, current = driver.cuCtxGetDevice()
    if int(status) == 0:
        return int(current)
    import cuda.bindings.runtime as runtime

    return int(_asked(runtime.cudaGetDevice(), "cudaGetDevice"))


@lru_cache(maxsize=64)
def _live(ordinal: int) -> Device:
    driver = _cuda_driver()
    handle = _asked(driver.cuDeviceGet(ordinal), f"cuDeviceGet({ordinal})")

    def attribute(name: str) -> int:
        number = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(_asked(driver.cuDeviceGetAttribute(number, handle), name))

    label = _asked(driver.cuDeviceGetName(256, handle), "cuDeviceGetName").split(b"\0")[0].decode()
    version = 100 * attribute("COMPUTE_CAPABILITY_MAJOR") + 10 * attribute("COMPUTE_CAPABILITY_MINOR")
    document = {"deviceName": label, "deviceVer": version}
    document |= {field: attribute(name) for field, name in _ATTRIBUTES.items()}
    installed = int(_asked(driver.cuDriverGetVersion(), "cuDriverGetVersion"))

    @lru_cache(maxsize=1)
    def text() -> str:
        descriptor = libraries.cudnn().create_device_properties(ordinal)
        return str(of_native(descriptor).to_json())

    return Device(document, installed, text)
