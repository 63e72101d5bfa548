"""What stands between this host and its cache: libraries, driver, compiler, directory, locks, layers, signing.

It only looks. Nothing in the cache is opened by SQLite, nothing is made, no lock is taken. What of cuDNN works is
tried in another process (`plancache.probe`), since a broken library may take its process with it.
"""

from __future__ import annotations

import json
import os
import pwd
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from plancache import child, settings
from plancache.errors import PlanCacheError, SettingsError
from plancache.settings import PACKAGE, Settings
from plancache.store import directory as directories
from plancache.store.database import FILE
from plancache.store.eviction import DEFAULT_MAX_BYTES
from plancache.store.files import DIRECTORY

OK, WARNING, ERROR = "ok", "warning", "error"
_SECONDS = 120  # for the probe, which takes one or two
_LITTLE_SPACE = 64 << 20
_JOURNALS = {1: "rollback journal", 2: "write-ahead log"}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: what.
        state: `ok`, `warning` (plancache goes on, with less) or `error` (plans are not built, or not cached).
        found: what is there.
        todo: what to do about it.
    """

    name: str
    state: str
    found: str
    todo: str = ""


def examine(directory: Path | None = None) -> list[Finding]:
    """Everything, of this host and of the cache in `directory` (None: the one that the environment says)."""
    found = [_python(), *_cudnn()]
    try:
        chosen = Settings.read()
    except SettingsError as error:
        found.append(Finding("settings", ERROR, f"{error.name}: {error}", "Until then every plancache.open raises it."))
        chosen = _without_settings()
    path = directory or chosen.directory or directories.default_directory()
    return [*found, *_cache(path, chosen), *_layers(chosen), _signing(chosen)]


def _without_settings() -> Settings:
    raw = os.environ.get("PLANCACHE_DIR")
    path = Path(raw) if raw else None
    return Settings(path, "read-write", False, True, None, (), None, None, (), None)


def _python() -> Finding:
    from plancache import __version__

    return Finding("plancache", OK, f"{__version__}, Python {sys.version.split()[0]}, {PACKAGE}")


# ------------------------------------------------------------ libraries


def _cudnn() -> Iterator[Finding]:
    steps, died = _probed()
    yield _frontend(steps.get("frontend"))
    yield _loaded(steps.get("cudnn"), died)
    yield _on_disk(steps.get("cudnn", {}))
    yield _nvrtc(steps.get("nvrtc"))
    driver = steps.get("driver") or {"error": died}
    yield _driver(driver)
    yield _compiler(needed="error" in driver)
    yield _devices(driver, steps.get("devices"), steps.get("bindings"), steps.get("cudnn", {}))


def _probed() -> tuple[dict[str, dict[str, Any]], str]:
    """What the probe has printed, by step; and how it ended, if not well."""
    command = child.command("plancache.probe")
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {}, f"a process that tries cuDNN came to no end: {error}"
    steps = {}
    for line in done.stdout.splitlines():
        with suppress(ValueError, TypeError, KeyError):
            one = json.loads(line)
            steps[str(one["step"])] = one
    if not done.returncode:
        return steps, ""
    said = done.stderr.strip().splitlines()
    return steps, f"a process that tried it ended with {done.returncode}{f': {said[-1]}' if said else ''}"


def _failed(name: str, step: dict[str, Any] | None, died: str = "", todo: str = "") -> Finding:
    """What a step of the probe has to say that did not work."""
    if step is None:
        return Finding(name, ERROR, died or "not reached, since what comes before it failed", todo)
    detail = step.get("found")
    text = f"{step['error']}: {detail}" if detail and detail != "None" else str(step["error"])
    return Finding(name, ERROR, text, step.get("todo") or todo)


def _frontend(step: dict[str, Any] | None) -> Finding:
    if step is None or "error" in step:
        return _failed("frontend", step, todo="pip install 'plancache[cu12]'")
    return Finding("frontend", OK, f"{step['version']}, {step['file']}")


def _loaded(step: dict[str, Any] | None, died: str) -> Finding:
    if step is None or "error" in step:
        return _failed("cuDNN", step, died, "pip install 'plancache[cu12]', or mend LD_LIBRARY_PATH.")
    flavour = "full" if "precompiled" in step["engines"] else "JIT"
    return Finding("cuDNN", OK, f"{step['version']} ({flavour}) for CUDA {step['cuda']}, {step['file']}")


def _on_disk(loaded: dict[str, Any]) -> Finding:
    """Every libcudnn that a loader may come upon; another process may load another one than this."""
    files = dict[str, Path]()
    for place in _library_places():
        for file in sorted(place.glob("libcudnn.so.*")) if place.is_dir() else ():
            files.setdefault(str(file.resolve()), file)
    if not files:
        return Finding(
            "libraries", ERROR if "file" not in loaded else OK, "no libcudnn.so in the usual places", "Install cuDNN."
        )
    shown = ", ".join(str(file) for file in files.values())
    if len(files) == 1:
        return Finding("libraries", OK, shown)
    chosen = loaded.get("file", "none of them")
    return Finding(
        "libraries",
        WARNING,
        f"{len(files)} cuDNNs: {shown}; loaded here: {chosen}",
        "Plans of different cuDNN versions are kept apart. Leave one, so that all jobs share their plans.",
    )


def _library_places() -> Iterator[Path]:
    for entry in filter(None, sys.path):
        with suppress(OSError):
            yield from sorted(Path(entry, "nvidia").glob("*/lib"))
    yield from map(Path, filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)))
    for usual in ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/local/lib"):
        yield Path(usual)
    yield from sorted(Path("/usr/local").glob("cuda*/lib64"))


def _nvrtc(step: dict[str, Any] | None) -> Finding:
    if step is None or "error" in step:
        todo = "pip install nvidia-cuda-nvrtc-cu12 (of cuDNN's CUDA major). Stored plans load without it."
        return replace(_failed("NVRTC", step, todo=todo), todo=todo)
    return Finding("NVRTC", OK, f"{step['version']}, {step['file']}")


def _driver(step: dict[str, Any]) -> Finding:
    if "error" in step:
        return Finding("driver", OK, "none: plans can be built here for devices that are named, as h200")
    if step["status"]:
        return Finding(
            "driver",
            WARNING,
            f"CUDA {step['version']}, but it gives no device (error {step['status']})",
            "Look at nvidia-smi; in a container, give it the GPU.",
        )
    return Finding("driver", OK, f"CUDA {step['version']}")


def _compiler(needed: bool) -> Finding:
    name = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if name:
        return Finding("C compiler", OK, name)
    made = any((settings.user_cache_directory() / "no-driver").glob("*/libcuda.so.1"))
    if not needed or made:
        return Finding("C compiler", OK, "none, and none is needed here")
    return Finding(
        "C compiler",
        ERROR,
        "none: without a driver one is needed once, to build for a device that is not here",
        "Debian: apt-get install gcc libc6-dev",
    )


def _devices(
    driver: dict[str, Any], step: dict[str, Any] | None, bindings: dict[str, Any] | None, cudnn: dict[str, Any]
) -> Finding:
    if "error" in driver or driver.get("status"):
        return Finding("devices", OK, "none")
    if step is None or "error" in step:
        return _failed("devices", step, todo="pip install cuda-python of cuDNN's CUDA major")
    major = str((bindings or {}).get("version", "")).partition(".")[0]
    if major and "cuda" in cudnn and major != str(cudnn["cuda"]):
        return Finding(
            "devices",
            WARNING,
            f"{', '.join(step['names'])}; cuda-python is for CUDA {major}, cuDNN for {cudnn['cuda']}",
            f"pip install 'cuda-python>={cudnn['cuda']},<{int(cudnn['cuda']) + 1}'",
        )
    return Finding("devices", OK, ", ".join(step["names"]))


# ------------------------------------------------------------ the cache


def _cache(path: Path, chosen: Settings) -> Iterator[Finding]:
    yield _place(path, chosen)
    kind = directories.filesystem(path)
    local = kind in directories.LOCAL
    yield Finding(
        "file system", OK, f"{kind}: {'SQLite' if local else 'record files, since its locks are not known to be sound'}"
    )
    yield _space(path, chosen)
    if not path.is_dir():
        return
    with suppress(OSError):
        yield _store(path, local)
        yield _locks(path)
        aside = sorted(path.glob("damaged-*.sqlite3"))
        if aside:
            what = f"{len(aside)} set aside as damaged: {', '.join(file.name for file in aside[:3])}"
            yield Finding("damage", WARNING, what, "plancache verify --repair takes over what is good in them.")


def _place(path: Path, chosen: Settings) -> Finding:
    safe = "It may be deleted at any time."
    if not path.exists():
        return Finding("directory", OK, f"{path}: not there yet; the first plan makes it")
    try:
        status = path.stat()
        what = f"{path}, owner {_user(status.st_uid)}, mode {stat.S_IMODE(status.st_mode):04o}"
        signed = chosen.key_file is not None
        access = directories.access(path, read_only=True, signed=signed, trusted=chosen.trusted)
        directories.check_file(path / FILE)
    except PlanCacheError as error:
        return Finding("directory", ERROR, str(error.found or error.what), error.todo or "Set PLANCACHE_DIR.")
    except OSError as error:
        return Finding("directory", ERROR, str(error), "Set PLANCACHE_DIR.")
    if access.foreign or not os.access(path, os.W_OK | os.X_OK):
        return Finding(
            "directory", WARNING, f"{what}; this user may only read it: nothing is stored", "Set PLANCACHE_DIR."
        )
    return Finding("directory", OK, f"{what}. {safe}")


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def _space(path: Path, chosen: Settings) -> Finding:
    there = path.absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    bound = chosen.max_bytes or DEFAULT_MAX_BYTES
    try:
        place = os.statvfs(there)
    except OSError as error:
        return Finding("space", WARNING, str(error))
    free, taken = place.f_bavail * place.f_frsize, _taken(path)
    what = f"{taken >> 20} of {bound >> 20} MB taken, {free >> 20} MB free on the disk"
    if free < _LITTLE_SPACE:
        return Finding("space", WARNING, what, "On a full disk plans are served and not stored. Make room.")
    return Finding("space", OK, what)


def _taken(path: Path) -> int:
    taken = 0
    for place, _, names in os.walk(path):
        for name in names:
            with suppress(OSError):
                taken += os.stat(os.path.join(place, name)).st_blocks * 512  # noqa: PTH116, PTH118 (a million of them)
    return taken


def _store(path: Path, local: bool) -> Finding:
    if (path / DIRECTORY).is_dir() and not (path / FILE).exists():
        count = sum(len(names) for _, _, names in os.walk(path / DIRECTORY))
        return Finding("store", OK, f"{count} record files")
    if not (path / FILE).exists():
        return Finding("store", OK, "empty")
    # Not by SQLite, which would make or remove the files beside it.
    with (path / FILE).open("rb") as file:
        header = file.read(100)
    if len(header) < 100 or not header.startswith(b"SQLite format 3\0"):
        todo = "plancache verify --repair, or delete it."
        return Finding("store", ERROR, f"{FILE} is no SQLite database", todo)
    version = int.from_bytes(header[60:64], "big")
    journal = path / f"{FILE}-wal"
    left = f", {journal.stat().st_size >> 10} KB in its journal" if journal.exists() else ""
    what = f"SQLite, schema {version}, {_JOURNALS.get(header[18], 'unknown journal')}{left}"
    if not local:
        todo = "Delete it, or move it to a local disk: on this file system hosts may damage it."
        return Finding("store", WARNING, f"{what}, on a file system whose locks are not known to be sound", todo)
    return Finding("store", OK, what)


def _locks(path: Path) -> Finding:
    """Build locks that somebody holds: signed by their holder, and known to this host's kernel."""
    held, left = [], 0
    here = _locked_inodes()
    for file in sorted((path / "locks").glob("*.lock")):
        status = file.stat()
        with suppress(OSError, UnicodeDecodeError):
            signature = file.read_text().strip()
            elsewhere = bool(signature) and f" on {socket.gethostname()} " not in signature
            if status.st_ino in here or elsewhere:
                held.append(signature or "an unknown process")
            else:
                left += bool(signature)
    rest = f"; {left} signed by processes that are gone, which is harmless" if left else ""
    if not held:
        return Finding("locks", OK, f"none is held{rest}")
    return Finding("locks", OK, f"{len(held)} held, each for a build that is going on: {'; '.join(held[:5])}{rest}")


def _locked_inodes() -> set[int]:
    inodes = set()
    with suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()
            if "->" not in fields and len(fields) > 5:
                with suppress(ValueError):
                    inodes.add(int(fields[5].rpartition(":")[2]))
    return inodes


def _layers(chosen: Settings) -> Iterator[Finding]:
    signed = chosen.key_file is not None
    for layer in chosen.layers:
        try:
            bundle = directories.bundle_access(layer, signed=signed, trusted=chosen.trusted)
            if bundle is None:
                directories.access(layer, read_only=True, signed=signed, trusted=chosen.trusted)
        except PlanCacheError as error:
            yield Finding(
                "layer", ERROR, f"{layer}: {error}", error.todo or "Mend it, or take it out of PLANCACHE_LAYERS."
            )
        else:
            yield Finding("layer", OK, f"{layer}: a {'bundle' if bundle else 'directory'}")
    if not chosen.layers:
        yield Finding("layers", OK, "none")


def _signing(chosen: Settings) -> Finding:
    if chosen.key_file is None:
        return Finding("signing", OK, "off: whoever may write the directory is trusted")
    try:
        settings.signing_key(chosen.key_file)
        mode = chosen.key_file.stat().st_mode
    except SettingsError as error:
        return Finding("signing", ERROR, str(error), error.todo or "Mend PLANCACHE_KEY_FILE.")
    if mode & (stat.S_IROTH | stat.S_IWOTH | stat.S_IWGRP):
        what = f"by {chosen.key_file}, which others may read or write"
        return Finding("signing", WARNING, what, f"chmod 600 {chosen.key_file}")
    return Finding("signing", OK, f"by {chosen.key_file}: only records with its signature are taken")
