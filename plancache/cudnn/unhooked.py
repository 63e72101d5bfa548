"""Whether plancache itself is at work in this thread: then `enable()`'s hooks let every call of the frontend pass."""

from __future__ import annotations

import threading

_local = threading.local()


class unhooked:
    """A context in which the frontend's methods do what they do without plancache."""

    def __enter__(self) -> None:
        _local.depth = getattr(_local, "depth", 0) + 1

    def __exit__(self, *_: object) -> None:
        _local.depth -= 1


def at_work() -> bool:
    """Whether this thread is within such a context."""
    return getattr(_local, "depth", 0) > 0
