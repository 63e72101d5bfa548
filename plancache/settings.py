"""Environment variables, defaults and the places of shipped files: all of them, and only here."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from plancache.errors import SettingsError

MODES = ("read-write", "read-only", "require-hit", "check", "off")
PACKAGE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Settings:
    """What the environment says. `read()` makes one; arguments of `plancache.open` go before it.

    The README and the documentation take their tables from here.

    Attributes:
        directory: `PLANCACHE_DIR`: the cache's directory; without it, `plancache/plans` in the user's cache directory.
        mode: `PLANCACHE_MODE`: `read-write`, `read-only` (nothing is written), `require-hit` (a miss is an error),
            `check` (the first hit of each key is built too and compared) or `off`.
        serve_ahead_of_time: `PLANCACHE_AOT`: `serve`: processes with a GPU take deviceless plans where there are no
            others.
        tuned: `PLANCACHE_TUNED`: `0`: tuned plans are not taken.
        misses: `PLANCACHE_MISSES`: file to which misses are appended, for `plancache explain` and `rewarm`.
        layers: `PLANCACHE_LAYERS`: read-only directories and bundles under it, separated by `:`, nearest first.
        max_bytes: `PLANCACHE_MAX_BYTES`: bound of the directory's size on disk, as `500M`, at least `2M`; without it
            2 GiB.
        key_file: `PLANCACHE_KEY_FILE`: file with a key of 16 bytes or more: records are signed with it, and only such
            records are taken.
        trusted: `PLANCACHE_TRUST`: directories of other users, separated by `:`, that are taken although they are not
            signed.
        wait: `PLANCACHE_WAIT`: seconds to wait for another process that builds the same plan; without it 120.
    """

    directory: Path | None
    mode: str
    serve_ahead_of_time: bool
    tuned: bool
    misses: Path | None
    layers: tuple[Path, ...]
    max_bytes: int | None
    key_file: Path | None
    trusted: tuple[str, ...]
    wait: float | None

    @classmethod
    def read(cls) -> Settings:
        """The settings of this process, from its `PLANCACHE_` variables.

        Raises:
            SettingsError: a variable holds a value that is not allowed.
        """
        return cls(
            directory=_path("PLANCACHE_DIR"),
            mode=check_mode(os.environ.get("PLANCACHE_MODE") or "read-write", "PLANCACHE_MODE"),
            serve_ahead_of_time=_ahead_of_time(),
            tuned=_switch("PLANCACHE_TUNED"),
            misses=_path("PLANCACHE_MISSES"),
            layers=tuple(Path(one).expanduser() for one in _listed("PLANCACHE_LAYERS")),
            max_bytes=size(os.environ["PLANCACHE_MAX_BYTES"], "PLANCACHE_MAX_BYTES")
            if os.environ.get("PLANCACHE_MAX_BYTES")
            else None,
            key_file=_path("PLANCACHE_KEY_FILE"),
            trusted=_listed("PLANCACHE_TRUST"),
            wait=_seconds("PLANCACHE_WAIT"),
        )


def check_mode(value: str, name: str) -> str:
    """`value` if it is a mode, else a `SettingsError` that lists them."""
    if value not in MODES:
        raise SettingsError("unknown mode", name=name, found=repr(value), expected=" or ".join(MODES))
    return value


def _path(name: str) -> Path | None:
    value = os.environ.get(name)
    try:
        return Path(value).expanduser() if value else None
    except RuntimeError as error:
        raise SettingsError(
            "this path needs a home directory", name=name, found=repr(value), todo=str(error)
        ) from error


def _listed(name: str) -> tuple[str, ...]:
    return tuple(part for part in os.environ.get(name, "").split(os.pathsep) if part)


def _seconds(name: str) -> float | None:
    value = os.environ.get(name)
    if not value:
        return None
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise SettingsError("not a number of seconds", name=name, found=repr(value), expected="0 or more")
    return seconds


def size(text: str, name: str) -> int:
    """Bytes from a number that may end in K, M, G or T (of 1,024).

    Raises:
        SettingsError: it is no such number.
    """
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
    digits, unit = (text[:-1], units[text[-1].upper()]) if text[-1:].upper() in units else (text, 1)
    if not digits.isdecimal() or int(digits) == 0:
        raise SettingsError("not a size", name=name, found=repr(text), expected="bytes, as 500000000 or 500M")
    return int(digits) * unit


def signing_key(file: Path) -> bytes:
    """The key in a file, with which records are signed.

    Raises:
        SettingsError: it cannot be read, or is shorter than 16 bytes. (Going on unsigned would be no answer.)
    """
    try:
        key = file.read_bytes().strip()
    except OSError as error:
        raise SettingsError("the key file cannot be read", name="PLANCACHE_KEY_FILE", found=str(error)) from error
    if len(key) < 16:
        raise SettingsError(
            "the key is too short",
            name="PLANCACHE_KEY_FILE",
            found=f"{len(key)} bytes",
            expected="at least 16",
            todo="head -c 32 /dev/urandom | base64 > FILE",
        )
    return key


def _ahead_of_time() -> bool:
    value = os.environ.get("PLANCACHE_AOT", "")
    if value not in ("", "serve"):
        raise SettingsError("unknown value", name="PLANCACHE_AOT", found=repr(value), expected="'serve' or unset")
    return value == "serve"


def _switch(name: str) -> bool:
    value = os.environ.get(name) or "1"
    if value not in ("0", "1"):
        raise SettingsError("unknown value", name=name, found=repr(value), expected="1, 0 or unset")
    return value == "1"


def user_cache_directory() -> Path:
    """Where this user's caches live (XDG); not made by this call."""
    # Imported here: 30 ms that a process with PLANCACHE_DIR set does not need.
    import platformdirs

    try:
        directory = platformdirs.user_cache_dir("plancache")
    except RuntimeError:  # HOME is not set, and the user has no entry that says where home is
        directory = ""
    if not Path(directory).is_absolute():  # or it is set to nonsense
        import tempfile

        directory = f"{tempfile.gettempdir()}/plancache-{os.getuid()}"
    return Path(directory)


def shipped(name: str) -> Path:
    """The directory `name` (`migrations`, `examples`): inside the package in a wheel, beside it in a checkout."""
    inside = PACKAGE / name
    return inside if inside.is_dir() else PACKAGE.parent / name
