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
    """What the environment says. `read()` makes one; arguments of `plancache.open` go before it."""

    directory: Path | None
    mode: str
    serve_ahead_of_time: bool
    misses: Path | None

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
            misses=_path("PLANCACHE_MISSES"),
        )


def check_mode(value: str, name: str) -> str:
    """`value` if it is a mode, else a `SettingsError` that lists them."""
    if value not in MODES:
        raise SettingsError("unknown mode", name=name, found=repr(value), expected=" or ".join(MODES))
    return value


def _path(name: str) -> Path | None:
    value = os.environ.get(name)
    return Path(value).expanduser() if value else None


def _ahead_of_time() -> bool:
    value = os.environ.get("PLANCACHE_AOT", "")
    if value not in ("", "serve"):
        raise SettingsError("unknown value", name="PLANCACHE_AOT", found=repr(value), expected="'serve' or unset")
    return value == "serve"


def user_cache_directory() -> Path:
    """Where this user's caches live (XDG); not made by this call."""
    # Imported here: 30 ms that a process with PLANCACHE_DIR set does not need.
    import platformdirs

    return Path(platformdirs.user_cache_dir("plancache"))


def shipped(name: str) -> Path:
    """The directory `name` (`migrations`, `examples`): inside the package in a wheel, beside it in a checkout."""
    inside = PACKAGE / name
    return inside if inside.is_dir() else PACKAGE.parent / name
