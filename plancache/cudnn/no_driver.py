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
import errno
import hashlib
import os
import stat
import threading
import time
from collections.abc import Iterator
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
_COMPILER_SECONDS = 120  # it takes half a second
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
            expected=f"a shared library for {os.uname().machine}",
            todo=f"Delete {path.parent}; it is made again.",
        ) from error


def source() -> str:
    """The C source of the library."""
    names = Path(__file__).with_name("driver_entry_points.txt").read_text().split()
    return _SOURCE + "".join(f"ENTRY({name})\n" for name in names if name not in _WRITTEN_OUT)


def _library() -> Path:
    text = source()
    name = hashlib.sha256(f"{text}{os.uname().machine}".encode()).hexdigest()[:16]
    for home in _homes():
        directory = home / "no-driver" / name
        try:
            if _private(directory):
                if not (directory / SONAME).exists():
                    _compile(text, directory / SONAME)
                return directory / SONAME
        except OSError:
            continue  # not writable, or full: the other place
    raise LibraryError(
        "the stand-in for the NVIDIA driver cannot be kept anywhere",
        found=f"neither {' nor '.join(map(str, _homes()))} can be written by this user alone",
        expected="one of them",
        todo="Set XDG_CACHE_HOME or TMPDIR to a directory of your own with some free space.",
    )


def _homes() -> Iterator[Path]:
    yield user_cache_directory()
    import tempfile  # 3 ms, where the first one will not do

    yield Path(tempfile.gettempdir(), f"plancache-{os.getuid()}")


def _private(directory: Path) -> bool:
    """Make a directory that only its owner, me or root, can write; whether it is one."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for place in (directory, directory.parent, directory.parent.parent):
        status = place.stat()
        if status.st_uid not in (0, os.getuid()) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return False
    return True


def _compile(text: str, path: Path) -> None:
    # Only here: they take as long to import as a plan to load.
    import shutil
    import subprocess
    import tempfile

    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if not compiler:
        raise LibraryError(
            "this host has no NVIDIA driver, and no C compiler to make a stand-in for it",
            found="neither libcuda.so.1 nor cc, gcc or clang",
            expected="one of them",
            todo="Install a C compiler (Debian: apt-get install gcc libc6-dev), or the NVIDIA driver.",
        )
    for left_over in path.parent.glob("tmp*"):  # of a process that was killed here an hour ago or more
        if left_over.stat().st_mtime < time.time() - 3600:
            shutil.rmtree(left_over, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=path.parent, ignore_cleanup_errors=True) as scratch:
        code, built = Path(scratch, "driver.c"), Path(scratch, SONAME)
        code.write_text(text)
        command = [*compiler.split(), "-shared", "-fPIC", "-O1", "-w", f"-Wl,-soname,{SONAME}"]
        try:
            done = subprocess.run(
                [*command, "-o", str(built), str(code), "-ldl"],
                capture_output=True,
                text=True,
                check=False,
                timeout=_COMPILER_SECONDS,
            )
            complaint = done.stderr.strip() if done.returncode else ""
        except (FileNotFoundError, PermissionError, subprocess.TimeoutExpired) as error:
            complaint = str(error)
        if "No space left" in complaint:
            raise OSError(errno.ENOSPC, complaint)
        if complaint or not built.exists():
            raise LibraryError(
                "the C compiler could not make the stand-in for the NVIDIA driver",
                found=complaint[-500:] or "no output",
                expected=f"a shared library from {compiler}",
                todo="Install the C library's headers (Debian: apt-get install libc6-dev), or set CC.",
            )
        built.rename(path)
