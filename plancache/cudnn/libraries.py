"""The cuDNN frontend and the cuDNN behind it: that they are there, and which versions."""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from plancache.errors import LibraryError

MINIMUM_FRONTEND = (1, 32)
MINIMUM_BACKEND = 91100


@cache
def cudnn() -> ModuleType:
    """The frontend, with a cuDNN behind it.

    Raises:
        LibraryError: the frontend or cuDNN is missing or too old.
    """
    try:
        import cudnn as module
    except (ImportError, OSError) as error:
        raise LibraryError(
            "the cuDNN frontend cannot be imported",
            found=str(error),
            expected="nvidia-cudnn-frontend 1.32 or later",
            todo="pip install 'plancache[cu12]'",
        ) from error
    version = str(getattr(module, "__version__", "unknown"))
    if not hasattr(module, "pygraph") or not hasattr(module, "backend_version"):
        raise LibraryError(
            "the module cudnn is not NVIDIA's cuDNN frontend",
            found=f"{getattr(module, '__file__', 'a module')} {version}",
            expected="nvidia-cudnn-frontend 1.32 or later",
            todo="Uninstall the other package, and pip install 'plancache[cu12]'",
        )
    if _version(version)[:2] < MINIMUM_FRONTEND:
        raise LibraryError(
            "the cuDNN frontend is too old",
            found=f"nvidia-cudnn-frontend {version}",
            expected="1.32 or later",
            todo="pip install --upgrade 'nvidia-cudnn-frontend>=1.32,<2'",
        )
    _checked_backend(module)
    return module  # type: ignore[no-any-return]


def _checked_backend(module: Any) -> None:
    install = "Install one: pip install 'plancache[cu12]', or put its directory on LD_LIBRARY_PATH."
    try:
        backend = int(module.backend_version())
    except RuntimeError as error:
        raise LibraryError(
            "cuDNN cannot be loaded",
            found=str(error),
            expected="libcudnn.so.9, version 9.11 or later",
            todo=install,
        ) from error
    if not MINIMUM_BACKEND <= backend < 100000:
        raise LibraryError(
            "this cuDNN is not supported",
            found=f"cuDNN {module.backend_version_string()}",
            expected="9.11 or later, major 9",
            todo=install,
        )


def _version(text: str) -> tuple[int, ...]:
    parts = []
    for part in text.split(".")[:3]:
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        parts.append(int(digits) if digits else 0)
    return tuple(parts + [0] * (3 - len(parts)))


@cache
def backend_version() -> int:
    """cuDNN's version as one number, 92800 for 9.28.0."""
    return int(cudnn().backend_version())


@cache
def frontend_version() -> int:
    """The frontend's version as one number, 13200 for 1.32.0."""
    major, minor, patch = _version(cudnn().__version__)
    return 10000 * major + 100 * minor + patch


@cache
def library() -> ctypes.CDLL:
    """The libcudnn that the frontend loaded, for the C API's own version queries."""
    cudnn()
    return ctypes.CDLL("libcudnn.so.9", mode=os.RTLD_NOLOAD)


@cache
def cuda_major() -> int:
    """The CUDA that cuDNN was made for: 12 or 13.

    Raises:
        LibraryError: cuDNN does not tell it.
    """
    version = int(library().cudnnGetCudartVersion())
    if version <= 0:
        raise LibraryError("cuDNN does not tell its CUDA version", found=str(version), expected="12000 or more")
    return version // 1000


@cache
@cache
def ensure_nvrtc() -> None:
    """Load the NVRTC that pip installs, unless this process finds one by itself, and the builtins beside it.

    cuDNN looks for NVRTC when it plans or compiles, and NVRTC for its builtins. cuDNN 9.19 for CUDA 13 without a GPU
    finds the first in its wheel at best, never the second, and every plan fails with COMPILATION_FAILED (seen;
    LD_LIBRARY_PATH or this mend it).
    """
    name = f"libnvrtc.so.{cuda_major()}"
    parts = (Path(entry, "nvidia", part, "lib") for entry in sys.path for part in ("cu13", "cuda_nvrtc"))
    loaded = _load(name)
    directory = _directory_of(name) if loaded else next((path for path in parts if (path / name).exists()), None)
    if directory is not None:
        for builtins in directory.glob("libnvrtc-builtins.so.*"):
            _load(str(builtins))
        if not loaded:
            _load(str(directory / name))


def _load(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _directory_of(name: str) -> Path | None:
    """Where a loaded library lies: the maps' last column is the file."""
    with suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            if line.endswith(f"/{name}"):
                return Path(line[line.index("/") :]).parent
    return None
