"""The libraries that a plan was made with: the part of the key that another installation does not share."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterable
from functools import cache, lru_cache
from pathlib import Path

from plancache.cudnn import libraries
from plancache.errors import LibraryError
from plancache.keys import Document, Part

# The frontend's Python engines are on offer where these are installed; another version compiles other kernels.
_ENGINE_PACKAGES = ("nvidia_cutlass_dsl", "apache_tvm_ffi")
_FIRST_LETTERS = frozenset("nNaA")  # of hundreds of names few are looked at closer: that takes longer than to list them
_OPT_IN = "CUDNN_FRONTEND_ENABLE_FROST_ENGINES"


def part() -> Part:
    """The environment part of a key.

    Raises:
        LibraryError: a version could not be read. What is not known must neither be stored nor matched.
    """
    return _part(
        libraries.backend_version(),
        libraries.cuda_major(),
        _sublibraries(),
        # Takes TF32 kernels out of every plan list, and makes cuDNN refuse loaded ones (measured with 0).
        os.environ.get("NVIDIA_TF32_OVERRIDE"),
        os.environ.get(_OPT_IN, "0").strip().lower() in ("1", "true", "yes", "on"),
        tuple(_engine_packages().items()),
    )


def document() -> Document:
    """Its document. Raises as `part` does."""
    return part().document


@lru_cache(maxsize=16)
def _part(
    cudnn: int,
    cuda: int,
    sublibraries: tuple[tuple[str, ...], bool],
    tf32_override: str | None,
    opt_in: bool,
    packages: tuple[tuple[str, str | None], ...],
) -> Part:
    engines, heuristics = sublibraries
    return Part(
        {
            "cudnn": cudnn,
            "cuda": cuda,
            "engines": list(engines),
            "heuristics": heuristics,
            "tf32_override": tf32_override,
            "python_engines": {"opt_in": opt_in, **dict(packages)},
        }
    )


class _DlInfo(ctypes.Structure):
    _fields_ = (
        ("file_name", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol_name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


@cache
def library_path() -> Path:
    """The file that libcudnn was loaded from."""
    info = _DlInfo()
    find = ctypes.pythonapi["dladdr"]  # a function of one's own, from what is open already
    find.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    symbol = ctypes.cast(libraries.library().cudnnGetVersion, ctypes.c_void_p)
    if not find(symbol, ctypes.byref(info)) or not info.file_name:
        raise LibraryError("the file of the loaded cuDNN cannot be told", expected="libcudnn.so.9 in this process")
    return Path(os.fsdecode(info.file_name))


@cache
def _sublibraries() -> tuple[tuple[str, ...], bool]:
    """Which engine libraries lie beside libcudnn: the full and the JIT packages carry the same version number.

    A plan of an engine whose library is not there is refused (`SUBLIBRARY_UNAVAILABLE`), and other heuristics
    choose other plans.
    """
    directory = library_path().parent
    found = os.listdir(directory)  # noqa: PTH208 (glob compiles a pattern, which takes as long as a small plan's load)
    engines = {name.split(".so")[0] for name in found if name.startswith("libcudnn_engines_") and ".so" in name}
    names = tuple(sorted(name.removeprefix("libcudnn_engines_") for name in engines))
    if not names:
        raise LibraryError(
            "cuDNN's engine libraries are not beside it",
            found=str(directory),
            expected="libcudnn_engines_*.so",
        )
    return names, any(name.startswith("libcudnn_heuristic.so") for name in found)


@cache
def _engine_packages() -> dict[str, str | None]:
    # A directory listing instead of importlib.metadata, whose import alone takes longer than loading a plan.
    versions: dict[str, str | None] = dict.fromkeys(_ENGINE_PACKAGES)
    standard = os.path.dirname(os.__file__)  # noqa: PTH120
    for entry in reversed(sys.path):
        if entry in (standard, standard + "/lib-dynload"):  # hundreds of names, and no packages
            continue
        try:
            names = _names(entry)
        except OSError:
            continue
        near = [name for name in names if name[:1] in _FIRST_LETTERS]
        for name in sorted(name for name in near if name.lower().startswith(_ENGINE_PACKAGES)):
            package, _, rest = name.partition("-")
            if name.endswith(".dist-info") and (package := package.lower()) in versions:
                versions[package] = rest.removesuffix(".dist-info")
    return versions


def _names(entry: str) -> Iterable[str]:
    """What is in a directory of `sys.path`: as the import system has listed it, unless it was changed since.

    By the same mark by which an import decides whether to list it again; listing all of them takes 0.2 ms.
    """
    finder = sys.path_importer_cache.get(entry)
    listed: Iterable[str] | None = getattr(finder, "_path_cache", None)
    if listed is not None and getattr(finder, "_path_mtime", None) == os.stat(entry or ".").st_mtime:  # noqa: PTH116
        return listed
    return os.listdir(entry or ".")  # noqa: PTH208
