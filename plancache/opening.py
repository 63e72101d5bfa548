"""`plancache.open`: arguments before environment variables before defaults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from plancache.cache import PlanCache
from plancache.errors import SettingsError
from plancache.settings import Settings, check_mode, signing_key
from plancache.store.directory import default_directory
from plancache.store.eviction import LOWEST, Bounds
from plancache.store.layers import Layers, Options


def open(  # the public name is plancache.open
    directory: Any = None,
    *,
    mode: str | None = None,
    layers: Sequence[Any] | None = None,
    max_bytes: int | None = None,
    key_file: Any = None,
    store: str | None = None,
    wait: float | None = None,
    tuned: bool | None = None,
) -> PlanCache:
    """Open the cache in a directory, or make one there.

    Args:
        directory: where; None is `PLANCACHE_DIR`, else `plancache/plans` in the user's cache directory.
        mode: `read-write`, `read-only` (no plan is written), `require-hit` (a miss is an error), `check` (the first
            hit of each key is also built, and another plan is an error) or `off`; None is `PLANCACHE_MODE`, else
            `read-write`.
        layers: read-only cache directories and bundles under it, nearest first; None is `PLANCACHE_LAYERS`.
        max_bytes: bound of the directory's size on disk, 2 MiB or more; None is `PLANCACHE_MAX_BYTES`, else 2 GiB.
        key_file: file with a key: records are signed with it, and only such records are taken; None is
            `PLANCACHE_KEY_FILE`.
        store: `sqlite` or `files`; None chooses by what is there, else by the file system.
        wait: seconds to wait for another process that builds the same plan; None is `PLANCACHE_WAIT`, else 120.
        tuned: whether tuned plans are taken before others; None is `PLANCACHE_TUNED`, else they are.

    Raises:
        SettingsError: an argument, or a `PLANCACHE_` variable, has a value that is not allowed.

    A directory that cannot be used is a warning at the first lookup, not an error here.
    """
    settings = Settings.read()
    chosen = settings.mode if mode is None else check_mode(mode, "mode")
    path = Path(directory) if directory is not None else settings.directory or default_directory()
    secret = Path(key_file) if key_file is not None else settings.key_file
    bound = settings.max_bytes if max_bytes is None else max_bytes
    seconds = settings.wait if wait is None else wait
    given = Options() if seconds is None else Options(wait=seconds)
    options = replace(
        given,
        kind=store,
        bounds=Bounds() if bound is None else Bounds(_at_least(bound)),
        key=None if secret is None else signing_key(secret),
        trusted=settings.trusted,
    )
    under = settings.layers if layers is None else [Path(layer) for layer in layers]
    stack = Layers(path, options, read_only=chosen in ("read-only", "require-hit"), under=under)
    prefer = settings.tuned if tuned is None else tuned
    return PlanCache(stack, chosen, settings.serve_ahead_of_time, settings.misses, prefer)


def _at_least(max_bytes: int) -> int:
    if max_bytes < LOWEST:
        raise SettingsError(
            "a cache cannot be kept so small",
            name="max_bytes",
            found=f"{max_bytes} bytes",
            expected=f"at least {LOWEST} (the database of one plan, its journal and locks)",
        )
    return max_bytes
