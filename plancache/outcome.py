"""What a lookup or a build came to: values, not exceptions."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plancache.keys import PlanKey


class Source(StrEnum):
    """Where a plan came from. Equal to its value as a string: `outcome.source == "disk"`.

    Attributes:
        MEMORY: a kernel cache that this process holds had the kernel.
        DISK: the writable cache directory.
        LAYER: a read-only directory or bundle under it (`PLANCACHE_LAYERS`).
        BUILT: cuDNN built it now; the reason says why it was not found.
        BYPASSED: cuDNN built it now, and it is not cached; the reason says why.
        MISS: it was not found, and `lookup` builds nothing.
    """

    MEMORY = "memory"
    DISK = "disk"
    LAYER = "layer"
    BUILT = "built"
    BYPASSED = "bypassed"
    MISS = "miss"


class Reason(StrEnum):
    """Why. One enumeration for hits, misses and bypasses, so that they can be counted."""

    FOUND = "found"
    KERNELS = "the kernel cache of its topology had its kernel"
    ABSENT = "no entry"
    DAMAGED = "the stored record is damaged"
    FOREIGN = "the stored record cannot be checked here: it is signed, or of another version"
    REFUSED = "cuDNN refused the stored plan"
    FAULT = "loading failed for a reason that is not the plan's"
    NEWER_DRIVER = "the stored plan is for a newer driver"
    NEWER_FRONTEND = "the stored plan was written by a newer frontend"
    STORE_FAULT = "the cache could not be read"
    OFF = "plancache is switched off"
    VALIDATED = "the graph was validated before plancache saw it"
    NOT_KEYABLE = "the graph holds a value that has no exact encoding"
    UNKNOWN_ENVIRONMENT = "the device or the libraries could not be identified"
    PYTHON_ENGINE = "python engine"
    DELEGATED = "the backend chose among plans that it does not show"
    UNREADABLE = "the built plan could not be read back"
    UNLOADABLE = "cuDNN cannot load the plan that it has built"
    KERNEL_CACHE = "the graph has a kernel cache of its own, which a loaded plan would leave empty"
    EVERY_PLAN = "policy ALL asks for every plan, and one is kept"


@dataclass(frozen=True)
class Outcome:
    """The answer of `PlanCache.build` and `lookup`.

    Attributes:
        source: where the plan came from.
        reason: why; for a built plan, why it was not found.
        key: the key it was looked up under; None where the graph could not be keyed.
        seconds: wall time of the call.
        detail: more about the reason, for people (the value that could not be encoded, the library's message).
        stored: whether this call wrote the plan to the cache.
        route: `native`, `tuned`, `replay`, `deviceless`, or `kernels` for a graph with dynamic shapes that was built
            with the kernel cache of its topology; None where no plan was loaded or built by plancache.
        build_seconds: what building took when the plan that was loaded was built; 0 where none was loaded.
    """

    source: Source
    reason: Reason
    key: PlanKey | None
    seconds: float
    detail: str = ""
    stored: bool = False
    route: str | None = None
    build_seconds: float = 0.0

    @property
    def hit(self) -> bool:
        """Whether a stored plan was used."""
        return self.source in (Source.MEMORY, Source.DISK, Source.LAYER)
