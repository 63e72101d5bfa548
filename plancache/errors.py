"""Every error that plancache raises on purpose. Each says what was found, what was expected and what to do."""

from __future__ import annotations

from typing import Any


class PlanCacheError(Exception):
    """Base of all errors of plancache.

    Args:
        what: what went wrong, in one clause.
        found: what was there, if anything.
        expected: what should have been there.
        todo: what the reader can do about it.

    The arguments stay readable as attributes of the same names.
    """

    def __init__(self, what: str, *, found: Any = None, expected: Any = None, todo: str | None = None) -> None:
        self.what = what
        self.found = found
        self.expected = expected
        self.todo = todo
        parts = [what]
        if found is not None:
            parts.append(f"found {found}")
        if expected is not None:
            parts.append(f"expected {expected}")
        text = "; ".join(parts).rstrip(".")
        super().__init__(f"{text}. {todo}" if todo else text)


class LibraryError(PlanCacheError):
    """A library that plancache stands on is missing, foreign or too old: cuDNN, its frontend, a driver, a compiler."""


class DeviceError(PlanCacheError):
    """Device properties that cannot be used; `field` names the one at fault, where there is one."""

    def __init__(self, what: str, *, field: str | None = None, **facts: Any) -> None:
        super().__init__(what, **facts)
        self.field = field


class BuilderError(PlanCacheError):
    """A graph builder returned something that cannot be made ready: no graph, two graphs, a graph already planned."""


class CaptureError(PlanCacheError):
    """A plan would have to be loaded or built while its stream is being captured, which CUDA does not allow."""


class SettingsError(PlanCacheError):
    """An environment variable or argument has a value that is not allowed; `name` says which one."""

    def __init__(self, what: str, *, name: str, **facts: Any) -> None:
        super().__init__(what, **facts)
        self.name = name


class RunError(PlanCacheError):
    """A plan could not be run on the device. With `fault`, the process's CUDA context is of no use any longer; with
    `memory`, it was for want of device memory.
    """

    def __init__(self, what: str, *, fault: bool = False, memory: bool = False, **facts: Any) -> None:
        super().__init__(what, **facts)
        self.fault = fault
        self.memory = memory


class StoreError(PlanCacheError):
    """The cache directory cannot be used; `path` says which one. While a job runs it is a warning, never raised.

    `damaged` says that the files themselves are at fault, not the way to them.
    """

    def __init__(self, what: str, *, path: Any = None, damaged: bool = False, **facts: Any) -> None:
        named = path is None or str(path) in " ".join(map(str, (what, *facts.values())))
        super().__init__(what if named else f"{what}: {path}", **facts)
        self.what = what
        self.path = path
        self.damaged = damaged


class BusyError(StoreError):
    """Another process is at the same work, and held its lock for longer than one waits (`PLANCACHE_WAIT`)."""


class RecordError(PlanCacheError):
    """A stored record that is not what it says. With `foreign`, it may be good for whoever has its key or version."""

    def __init__(self, what: str, *, foreign: bool = False, **facts: Any) -> None:
        super().__init__(what, **facts)
        self.foreign = foreign


class MissError(PlanCacheError):
    """`PLANCACHE_MODE=require-hit` and a plan was not in the cache; `key` and `reason` say which and why."""

    def __init__(self, what: str, *, key: Any = None, reason: Any = None, **facts: Any) -> None:
        super().__init__(what, **facts)
        self.key = key
        self.reason = reason


class MismatchError(PlanCacheError):
    """`PLANCACHE_MODE=check` found that a stored plan is not the one that building gives: a key that is too small.

    `key` is the key, `built` and `cached` are what each plan says of itself, with its graph document.
    """

    def __init__(self, what: str, *, key: Any, built: Any, cached: Any) -> None:
        differing = [name for name in built if built[name] != cached[name]]
        shown = {name: (built[name], cached[name]) for name in differing}
        super().__init__(
            what,
            found=f"for key {key} other {', '.join(differing)}: {shown}",
            expected="the same plan",
            todo="Please report this with the graph's documents; until then, leave this graph out of the cache.",
        )
        self.key = key
        self.built = built
        self.cached = cached
