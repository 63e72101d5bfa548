"""What of cuDNN works, found out in a process of its own: `python -m plancache.probe`.

One JSON object a line, printed as soon as it is known: a library that crashes the process takes only what would have
come after it. Nothing is written anywhere.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from typing import Any

from plancache.errors import PlanCacheError


def frontend() -> dict[str, Any]:
    """The frontend, with a cuDNN behind it."""
    from plancache.cudnn import libraries

    module = libraries.cudnn()
    return {"version": module.__version__, "file": module.__file__}


def cudnn() -> dict[str, Any]:
    """The cuDNN that the frontend has loaded."""
    from plancache.cudnn import environment, libraries

    text = libraries.cudnn().backend_version_string()
    return {"version": text, "file": str(environment.library_path()), **environment.document()}


def nvrtc() -> dict[str, Any]:
    """The compiler that cuDNN's runtime-compiled engines call."""
    from plancache.cudnn import environment

    home = environment.library_path().parent
    major = environment.document()["cuda"]
    name = f"libnvrtc.so.{major}"
    beside = [home.parent.parent / "cuda_nvrtc" / "lib" / name, home / name, home.parent / "lib" / name]
    places = [str(place) for place in beside if place.exists()]
    library = ctypes.CDLL(places[0] if places else name)
    numbers = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(*map(ctypes.byref, numbers))
    return {"version": f"{numbers[0].value}.{numbers[1].value}", "file": places[0] if places else name}


def driver() -> dict[str, Any]:
    """The NVIDIA driver, asked without any package."""
    library = ctypes.CDLL("libcuda.so.1")
    version, count = ctypes.c_int(), ctypes.c_int()
    status = library.cuInit(0)
    library.cuDriverGetVersion(ctypes.byref(version))
    if not status:
        status = library.cuDeviceGetCount(ctypes.byref(count))
    number = version.value
    return {"version": f"{number // 1000}.{number % 1000 // 10}", "status": status, "devices": count.value}


def bindings() -> dict[str, Any]:
    """cuda-python, by which a live device is identified."""
    from importlib.metadata import version

    return {"version": version("cuda-bindings")}


def devices() -> dict[str, Any]:
    """The GPUs that are here."""
    from plancache.cudnn import device

    names: list[str] = []
    while True:
        try:
            names.append(device.live(len(names)).name)
        except PlanCacheError:
            if not names:
                raise
            return {"names": names}


def main() -> None:
    """Print one line for each of these."""
    for step in (driver, frontend, cudnn, nvrtc, bindings, devices):
        print(json.dumps({"step": step.__name__, **_tried(step)}), flush=True)


def _tried(step: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return step()
    except PlanCacheError as error:
        return {"error": error.what, "found": str(error.found), "todo": error.todo}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    main()
