"""What happens in a worker of `warm` and `rewarm`: plans are built from documents, and travel back as records.

A worker opens no cache and needs no user code: a graph, and how its plan is chosen, come as documents. One that
builds for a described device touches no GPU. Every fault of one plan is an answer, never an exception: what `work`
raises is a fault of the worker.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from plancache import dynamic, lookups, stored
from plancache.cudnn import device as devices
from plancache.cudnn import environment, libraries, plans, replaying, warm
from plancache.cudnn.device import Device
from plancache.cudnn.plans import Request, Route, UnkeptPlanError
from plancache.errors import LibraryError, PlanCacheError
from plancache.kernels import KernelCache
from plancache.keys import Document, digest
from plancache.store.memory import MemoryStore


@dataclass(frozen=True)
class Wanted:
    """One graph, and by which routes its plan is wanted."""

    graph: Document
    build: Document
    labels: dict[int, str]
    builder: str
    routes: tuple[str, ...]

    @property
    def is_dynamic(self) -> bool:
        """Whether the graph has dynamic shapes."""
        return bool(self.graph["arguments"].get("is_dynamic_shape_enabled"))


@dataclass(frozen=True)
class Task:
    """What a worker does at one go.

    Attributes:
        device: the JSON of a described device; the ordinal of one that is there; None for the current one.
        environment: the hash of the libraries that the plans are for.
        wanted: one graph; or graphs with dynamic shapes of one topology, which share their kernels.
        kernels: the records of that topology's kernels that are there already.
    """

    device: str | int | None
    environment: str
    wanted: tuple[Wanted, ...]
    kernels: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class Made:
    """What became of one plan: `outcome` is `built`, `failed` or `unsupported` (the graph does not have the route)."""

    number: int
    route: str
    outcome: str
    seconds: float = 0.0
    error: str = ""
    record: bytes | None = None


@dataclass(frozen=True)
class Done:
    """What became of a task."""

    made: list[Made] = field(default_factory=list)
    kernels: list[bytes] = field(default_factory=list)


# An executor may have several threads in one process (Dask has, unless told otherwise). Building holds Python's lock,
# so they gain nothing, and the frontend's first imports do not stand two at once (1 of 40 plans failed, measured).
_one = threading.Lock()


def work(task: Task) -> Done:
    """Do a task. Runs in a worker process."""
    with _one:
        return _work(task)


def _work(task: Task) -> Done:
    try:
        device, handle = _device(task.device)
        _same_libraries(task.environment)
    except (PlanCacheError, RuntimeError, OSError) as error:
        return Done(
            [
                Made(number, route, "failed", error=_text(error))
                for number, wanted in enumerate(task.wanted)
                for route in wanted.routes
            ]
        )
    if not task.wanted[0].is_dynamic:
        return Done([made for number, one in enumerate(task.wanted) for made in _build(number, one, device, handle)])
    return _build_dynamic(task, device, handle)


def _device(what: str | int | None) -> tuple[Device, Any]:
    if isinstance(what, str):
        return _described(what), None
    handle = warm.handle_of(what)
    return devices.live(what), handle


_last: list[tuple[str, Device]] = []


def _described(text: str) -> Device:
    """The same object for the same text: cuDNN's descriptor is made once."""
    if not _last or _last[0][0] != text:
        _last[:] = [(text, devices.device(text))]
    return _last[0][1]


def _same_libraries(expected: str) -> None:
    ours = environment.document()
    if digest(ours) != expected:
        raise LibraryError(
            "this worker has other libraries than the process that fills the cache",
            found=f"cuDNN {ours['cudnn']} for CUDA {ours['cuda']}, engines {' '.join(ours['engines'])}",
            expected="the same cuDNN package and the same environment variables in every worker",
        )


def _build(number: int, wanted: Wanted, device: Device, handle: Any) -> list[Made]:
    """A graph's plan, and then what the route `replay` needs."""
    main = "native" if handle is not None else "deviceless"
    made: list[Made] = []
    try:
        request = warm.request(
            wanted.graph, wanted.build, device=device, handle=handle, labels=wanted.labels, builder=wanted.builder
        )
    except Exception as error:
        return [Made(number, route, "failed", error=_text(error)) for route in wanted.routes]
    unsupported: Made | None = None
    if "replay" in wanted.routes:
        # First, while the graph is as it was declared. It decides what is noted in the plan's own record, too.
        replayed = _replay(number, request)
        made.append(replayed)
        unsupported = replayed if replayed.outcome == "unsupported" else None
    if main in wanted.routes:
        note = "" if unsupported is None else unsupported.error
        made.insert(0, _made(number, request, main, lambda: plans.build(request), note))
    if made[0].route == main and made[0].outcome == "failed" and unsupported is not None:
        made.remove(unsupported)  # one message says it
    return made


def _replay(number: int, request: Request) -> Made:
    if request.run is not None:
        return Made(number, "replay", "unsupported", error="its workspace limit was set after validate()")
    unsupported = (libraries.cudnn().cudnnGraphNotSupportedError, UnkeptPlanError)
    started = time.perf_counter()
    try:
        built = replaying.build_replay(request)
    except unsupported as error:
        return Made(number, "replay", "unsupported", time.perf_counter() - started, _text(error))
    except Exception as error:
        return Made(number, "replay", "failed", time.perf_counter() - started, _text(error))
    seconds = time.perf_counter() - started
    _, record = stored.encode(replace(request, route=Route.REPLAY), built, None)
    return Made(number, "replay", "built", seconds, record=record)


def _made(number: int, request: Request, route: str, build: Callable[[], plans.BuiltPlan], no_replay: str) -> Made:
    started = time.perf_counter()
    try:
        built = build()
        _, record = stored.encode(request, built, None, no_replay=no_replay)
    except UnkeptPlanError as unkept:
        error = f"{lookups.UNKEPT[unkept.kind]}{f': {unkept}' if str(unkept) else ''}"
        return Made(number, route, "failed", time.perf_counter() - started, error)
    except Exception as error:  # the frontend's own kinds, which have nothing in common
        return Made(number, route, "failed", time.perf_counter() - started, _text(error))
    return Made(number, route, "built", time.perf_counter() - started, record=record)


def _text(error: Exception) -> str:
    return str(error).strip() or type(error).__name__


def _build_dynamic(task: Task, device: Device, handle: Any) -> Done:
    """Graphs of one topology: the first compiles what is not there, the others share it."""
    main = "native" if handle is not None else "deviceless"
    store, made = MemoryStore(task.kernels), []
    before = {(key, route) for key, route, _, _ in store.salvage()}
    kernels: KernelCache | None = None
    for number, wanted in enumerate(task.wanted):
        try:
            request = warm.request(
                wanted.graph, wanted.build, device=device, handle=handle, labels=wanted.labels, builder=wanted.builder
            )
            if kernels is None:
                key = dynamic.topology_key(request)
                kernels = KernelCache([store], key, None, lambda: True, _ignore)
        except Exception as error:
            made.append(Made(number, main, "failed", error=_text(error)))
            continue
        made.append(_made(number, request, main, lambda: _with_kernels(request, kernels), "dynamic shapes"))  # noqa: B023
    if kernels is not None:
        kernels.flush()
    return Done(made, [record for key, route, _, record in store.salvage() if (key, route) not in before])


def _with_kernels(request: Request, kernels: KernelCache) -> plans.BuiltPlan:
    if request.run is not None:
        raise LibraryError(
            "a graph with dynamic shapes and a workspace limit after validate() is built by its own code only"
        )
    declared = plans.declared_tensors(request.graph)
    built = dynamic.build(request.graph, request.choice, kernels, nullcontext, attach=True)
    return plans.taken(request.graph, declared, built.seconds)


def _ignore(_error: PlanCacheError) -> None:
    """What is wrong with a kernel that was sent along: it is compiled anew."""


def by_plan(made: Sequence[Made], count: int) -> list[list[Made]]:
    """What became of each of a task's plans."""
    found: list[list[Made]] = [[] for _ in range(count)]
    for one in made:
        found[one.number].append(one)
    return found
