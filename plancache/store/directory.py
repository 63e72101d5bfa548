"""The cache directory: where it is by default, and how it is made."""

from __future__ import annotations

from pathlib import Path

from plancache.errors import StoreError
from plancache.settings import user_cache_directory


def default_directory() -> Path:
    """Where plans are kept if nobody says otherwise."""
    return user_cache_directory() / "plans"


def make(path: Path) -> None:
    """Make the directory, readable by its owner alone: a cached plan is native code. An existing one keeps its mode."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise StoreError(
            "the cache directory cannot be made", path=path, found=str(error), todo="Set PLANCACHE_DIR."
        ) from error
