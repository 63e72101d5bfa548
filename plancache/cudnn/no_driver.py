"""A `libcuda.so.1` that says "no device", for hosts that have no NVIDIA driver.

cuDNN's runtime-compiled engines link the driver library and look up more of it by name, although compiling a
plan for a described device needs none of it. Where no driver library can be loaded, a small one is compiled
once with the system's C compiler and loaded under the driver's soname, before cuDNN first needs it. It exports
every driver entry point; each answers CUDA_ERROR_NO_DEVICE. Rules that a reviewer can hold this module to:

- where a real driver library can be loaded, that one is loaded and nothing here is used;
- the library lies in a directory that only its owner can write, under a name that is the hash of its source,
  and is published by rename, so that processes that start at once do not see half of it;
- nothing is printed. (cuDNN prints a line for each entry point that it cannot find; hence "every".)
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import threading
from importlib import resources
from pathlib import Path

from plancache.errors import LibraryError
from plancache.settings import user_cache_directory

SONAME = "libcuda.so.1"
_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#define NO_DEVICE 100
static int no_device(void) { return NO_DEVICE; }
int cuInit(unsigned flags) { (void)flags; return NO_DEVICE; }
int cuDeviceGetCount(int *count) { *count = 0; return NO_DEVICE; }
/* Newer than any supported CUDA runtime asks for: the runtime's answer is then "no device", not "driver too old". */
int cuDriverGetVersion(int *version) { *version = 13990; return 0; }
int cuGetErrorName(int error, const char **text) { (void)error; *text = "CUDA_ERROR_NO_DEVICE"; return 0; }
int cuGetErrorString(int error, const char **text) {
  (void)error; *text = "no CUDA-capable device is detected"; return 0;
}
static void *find(const char *name) {
  static void *self;
  Dl_info info;
  if (!self && dladdr((void *)&cuInit, &info)) self = dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  void *entry = self ? dlsym(self, name) : NULL;
  return entry ? entry : (void *)&no_device;
}
int cuGetProcAddress(const char *name, void **entry, int version, unsigned long long flags) {
  (void)version; (void)flags; *entry = find(name); return 0;
}
int cuGetProcAddress_v2(const char *name, void **entry, int version, unsigned long long flags, int *status) {
  (void)version; (void)flags; *entry = find(name); if (status) *status = 0; return 0;
}
#define ENTRY(name) int name(void) { return NO_DEVICE; }
"""
_WRITTEN_OUT = {
    "cuInit",
    "cuDeviceGetCount",
    "cuDriverGetVersion",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuGetProcAddress",
    "cuGetProcAddress_v2",
}
_lock = threading.Lock()
_loaded: ctypes.CDLL | None = None


def ensure_driver() -> None:
    """Make a driver library available to this process: the real one, or else the one that says "no device".

    Raises:
        LibraryError: there is neither a driver nor a C compiler, or the compiler failed.
    """
    global _loaded
    if _loaded is not None:
        return
    with _lock:
        if _loaded is None:
            _loaded = _real_driver() or _load(_library())


def _real_driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(SONAME, mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return None


def _load(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise LibraryError(
            "the driver library for hosts without a driver cannot be loaded",
            found=f"{error}",
            expected=f"a shared library for {platform.machine()}",
            todo=f"Delete {path.parent}; it is made again.",
        ) from error


def source() -> str:
    """The C source of the library."""
    names = resources.files("plancache.cudnn").joinpath("driver_entry_points.txt").read_text().split()
    return _SOURCE + "".join(f"ENTRY({name})\n" for name in names if name not in _WRITTEN_OUT)


def _library() -> Path:
    text = source()
    name = hashlib.sha256(f"{text}{platform.machine()}".encode()).hexdigest()[:16]
    directory = _private_directory(user_cache_directory() / "no-driver" / name)
    path = directory / SONAME
    if not path.exists():
        _compile(text, path)
    return path


def _private_directory(wanted: Path) -> Path:
    """`wanted`, made if need be; a fresh temporary one where it cannot be made or somebody else could write it."""
    try:
        wanted.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = wanted.stat()
        writable = os.access(wanted, os.W_OK) or (wanted / SONAME).exists()
    except OSError:
        writable = False
    else:
        others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        writable = writable and status.st_uid in (0, os.getuid()) and not others
    return wanted if writable else Path(tempfile.mkdtemp(prefix="plancache-no-driver-"))


def _compile(text: str, path: Path) -> None:
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if not compiler:
        raise LibraryError(
            "this host has no NVIDIA driver, and no C compiler to make a stand-in for it",
            found="neither libcuda.so.1 nor cc, gcc or clang",
            expected="one of them",
            todo="Install a C compiler (Debian: apt-get install gcc libc6-dev), or the NVIDIA driver.",
        )
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        code, built = Path(scratch, "driver.c"), Path(scratch, SONAME)
        code.write_text(text)
        command = [*compiler.split(), "-shared", "-fPIC", "-O1", "-w", f"-Wl,-soname,{SONAME}"]
        try:
            done = subprocess.run(
                [*command, "-o", str(built), str(code), "-ldl"], capture_output=True, text=True, check=False
            )
            complaint = done.stderr.strip() if done.returncode else ""
        except OSError as error:
            complaint = str(error)
        if complaint or not built.exists():
            raise LibraryError(
                "the C compiler could not make the stand-in for the NVIDIA driver",
                found=complaint[-500:] or "no output",
                expected=f"a shared library from {compiler}",
                todo="Install the C library's headers (Debian: apt-get install libc6-dev), or set CC.",
            )
        built.rename(path)
