"""Stored plans on the device: each loaded by its own route in a child process, and compared with a native build.

The parent decides which, ends what hangs, and removes what is wrong. The child builds each graph natively once, runs
both on the same inputs and measures both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from plancache import stored
from plancache.cudnn import candidates, environment, frontend, plans, requests
from plancache.cudnn import device as devices
from plancache.cudnn.plans import Request, Route
from plancache.cudnn.running import Operands, Runner, Timing
from plancache.errors import BuilderError, DeviceError, LibraryError, PlanCacheError, RecordError, RunError
from plancache.kernels import is_kernel
from plancache.keys import digest
from plancache.store import records
from plancache.store.interface import Listed, Row
from plancache.tuning import mark, one_line, tune_request
from plancache.tuning_table import FAILED, HUNG, TUNED, Limits, Tuning
from plancache.worker import Event, LostError, Worker

if TYPE_CHECKING:
    from plancache.cache import PlanCache

RIGHT, WRONG, CRASHED, REFUSED, SKIPPED = "right", "wrong", "crashed", "refused", "skipped"
UNPROVEN = "unproven"
# What must not be served: it goes.
_UNFIT = (WRONG, HUNG, CRASHED)
_SIGN = 1.0  # seconds between two signs of life
_REPEATS = 20
_ORDER: dict[str, int] = {route: place for place, route in enumerate(Route)}


@dataclass(frozen=True)
class Verdict:
    """What came of one plan.

    Attributes:
        row: which.
        verdict: `right`, `wrong`, `hung`, `crashed` (its process died), `refused` (by cuDNN, or as another plan's
            record), `unproven` (it ran, but it and the natively built one gave nothing but zeros and NaN, in all
            outputs: comparing those proves nothing) or `skipped` (nothing can be said: it could not be run, or not be
            built natively). What is unproven stays.
        detail: more about it.
        exact: whether every byte was that of the natively built plan; None where nothing was compared.
        micros: what one execute takes on the device.
        native: the same of the natively built plan.
        removed: whether it was removed.
    """

    row: Row
    verdict: str
    detail: str = ""
    exact: bool | None = None
    micros: float | None = None
    native: float | None = None
    removed: bool = False


def here(rows: Iterable[Listed]) -> list[Listed]:
    """The plans for the current device and these libraries; those of one key side by side, natively built ones first.

    Raises:
        DeviceError: there is no CUDA device here.
    """
    try:
        device = devices.live(None).fingerprint
    except (DeviceError, LibraryError) as error:
        raise DeviceError(
            "plans are run on the GPU that they are for; there is none here", found=error.found
        ) from error
    libraries = digest(environment.document())
    chosen = [
        listed
        for listed in rows
        if not is_kernel(listed.row) and (listed.row.device, listed.row.environment) == (device, libraries)
    ]
    return sorted(chosen, key=lambda listed: (listed.row.key, _ORDER.get(listed.row.route, len(_ORDER))))


def verify(
    cache: PlanCache,
    rows: Iterable[Listed],
    timeout: float,
    keep: bool,
    memory: int | None,
    progress: Callable[[], None],
) -> Iterator[Verdict]:
    """See `PlanCache.verify_on_device`."""
    chosen = here(rows)
    with Worker(cache, timeout) as worker:
        for listed in chosen:
            record = cache.store.get(listed.row.key, listed.row.route, use=False)
            if record is None:
                progress()
                continue
            verdict = _asked(worker, listed.row, memory)
            if verdict.verdict == WRONG:
                verdict = _asked_again(worker, verdict, memory)
            if verdict.verdict in _UNFIT and not keep:
                # Exactly this one: a job may have put a good one there meanwhile.
                removed = cache.store.discard(listed.row.key, listed.row.route, record)
                verdict = replace(verdict, removed=removed)
            progress()
            yield verdict


def _asked(worker: Worker, row: Row, memory: int | None, layer: int = 0) -> Verdict:
    """One plan's verdict; what happens while the graph is built natively says nothing about the stored plan."""
    stage = "native"
    try:
        for event in worker.ask({"job": "check", "key": row.key, "route": row.route, "layer": layer, "memory": memory}):
            if event["event"] == "stage":
                stage = event["stage"]
            elif event["event"] == "error":
                crashed = event.get("fault") and stage == "entry"
                return Verdict(row, CRASHED if crashed else SKIPPED, event["text"])
            elif event["event"] == "done":
                numbers = (event["exact"], event["micros"], event["native"])
                return Verdict(row, event["verdict"], event["detail"], *numbers)
    except LostError as lost:
        if stage == "native":
            return Verdict(row, SKIPPED, f"while its graph was built natively: {lost}")
        if lost.ended:  # by the system or a person: that says nothing about the plan
            return Verdict(row, SKIPPED, str(lost))
        return Verdict(row, HUNG if lost.hung else CRASHED, str(lost))
    raise AssertionError("a job without an end")


def _asked_again(worker: Worker, first: Verdict, memory: int | None) -> Verdict:
    """What is wrong is removed only if it is so in a fresh process too.

    In some processes natively built plans of cuDNN have computed something else (docs/verified.md).
    """
    worker.end()
    again = _asked(worker, first.row, memory)
    if again.verdict == WRONG:
        return again
    detail = f"{again.detail}; another process said: {first.detail}".removeprefix("; ")
    return replace(again, detail=detail)


class Times:
    """Kernel times of stored plans: what `PlanCache.upgrade(measure=...)` may ask for. A context manager.

    Args:
        cache: whose plans are run; nothing in it is changed.
        timeout: seconds that one plan may take.
        memory: bytes on the device that one graph may take; None is most of what is free.
    """

    def __init__(self, cache: PlanCache, timeout: float = 60.0, memory: int | None = None) -> None:
        self._cache, self._memory, self._worker = cache, memory, Worker(cache, timeout)

    def __enter__(self) -> Times:
        return self

    def __exit__(self, *_: object) -> None:
        self._worker.end()

    def of(self, key: str) -> dict[str, float]:
        """Microseconds by route, of a key's plans in the cache and the layers under it that run and are right.

        Raises:
            DeviceError: there is no CUDA device here.
            StoreError: the cache cannot be read.
        """
        found: dict[str, float] = {}
        for layer, listed in self._cache._rows_by_layer(key=key):
            for one in here([listed]):
                verdict = _asked(self._worker, one.row, self._memory, layer)
                if verdict.verdict == RIGHT and verdict.micros is not None:
                    found[one.row.route] = verdict.micros
        return found


@dataclass
class _Native:
    """A natively built graph with what it computed."""

    key: str
    graph: Any
    operands: Operands
    expected: dict[int, int]
    outputs: dict[int, int]
    timing: Timing
    repeatable: bool
    empty: bool = False


class Checker:
    """The child's side. It keeps the last graph that was built natively, since plans of one key follow one another."""

    def __init__(self, cache: PlanCache) -> None:
        self._cache = cache
        self._runner: Runner | None = None
        self._native: _Native | None = None
        devices.live(None)

    def check(self, key: str, route: str, layer: int, memory: int | None, say: Callable[[Event], None]) -> Event:
        """Run one plan and compare it.

        Raises:
            RunError: the device is at fault.
        """
        record = self._cache._layers[layer].get(key, route, use=False)
        if record is None:
            return _said(SKIPPED, "it is gone")
        runner = self._runner = self._runner or Runner(memory=memory)
        try:
            row, fields = records.decode(record, self._cache._signing_key)
            wanted = requests.request(stored.documents(fields), handle=runner.handle, builder=row.builder)
            if wanted.key.hash[-32:] == key[-32:]:
                stored.decode(record, wanted.key, route, self._cache._signing_key)
        except RecordError as error:
            return _said(REFUSED, str(error))
        if wanted.key.hash != key:
            return _said(SKIPPED, f"here its graph has another key, {wanted.key}")
        if row.driver > wanted.device.driver:
            return _said(SKIPPED, "it is for a newer driver")
        say({"event": "stage", "stage": "native"})
        try:
            native = self._built(runner, wanted)
        except RunError as error:
            if error.fault:
                raise
            return _said(SKIPPED, str(error))
        except PlanCacheError:
            raise
        except Exception as error:
            return _said(SKIPPED, f"it cannot be built natively: {one_line(error)}")
        say({"event": "stage", "stage": "entry"})
        return self._compared(runner, native, wanted, Route(route), fields)

    def _built(self, runner: Runner, wanted: Request) -> _Native:
        if self._native is not None and self._native.key == wanted.key.hash:
            return self._native
        self._release(runner)
        graph = requests.twin(wanted, handle=runner.handle)
        plans.run_build(graph, wanted.choice)
        made = runner.operands(graph)
        native = self._native = _Native(wanted.key.hash, graph, made, {}, {}, Timing(0, 0), True)
        try:
            native.expected = runner.outputs(made)
            native.outputs = runner.outputs(made)
            runner.run(graph, made, native.outputs)
            runner.run(graph, made, native.expected)
            # Where sums go into memory in any order, not even the same plan gives the same bits twice.
            native.repeatable = runner.compare(made, native.expected, native.outputs).exact
            native.timing = runner.time(graph, made, native.outputs)
            native.empty = runner.empty(made, native.expected)
        except BaseException:  # its memory is the next graph's
            with suppress(RunError):  # what went wrong before says more
                self._release(runner)
            raise
        return native

    def _compared(
        self, runner: Runner, native: _Native, wanted: Request, route: Route, fields: dict[str, Any]
    ) -> Event:
        try:
            plans.load(wanted, route, fields["plan"], fields["blob"])
        except Exception as error:
            devices.clear_error()
            runner.check()
            return _said(REFUSED, one_line(error), native=native.timing.median)
        try:
            runner.run(wanted.graph, native.operands, native.outputs)
        except RunError as error:
            if error.fault:
                raise
            return _said(REFUSED, str(error), native=native.timing.median)
        found = runner.compare(native.operands, native.expected, native.outputs)
        micros = runner.time(wanted.graph, native.operands, native.outputs).median if found.right else None
        if found.right:  # and after many runs, with a workspace that was used
            found = min(
                (found, runner.compare(native.operands, native.expected, native.outputs)),
                key=lambda one: (one.right, one.exact, -one.largest),
            )
        one, two = plans.plan_list(fields["plan"]).chosen, frontend.plan_list(native.graph).chosen
        same = candidates.identity(one.engine, one.knobs) == candidates.identity(two.engine, two.knobs)
        # Built the same way with the same engine and knobs it is the same program.
        strict = same and native.repeatable and route in (Route.NATIVE, Route.TUNED)
        if strict and found.right and not found.exact:
            strict = self._repeats(runner, native)
        right = found.exact if strict else found.right
        unproven = native.empty and (right or runner.empty(native.operands, native.outputs))
        if not right:  # it may have written elsewhere too, and the key's next plan is not to be judged by that
            self._release(runner)
        if unproven:
            detail = "nothing but zeros and NaN for random inputs, also of the natively built plan: that proves nothing"
            return _said(UNPROVEN, detail, found.exact, micros, native.timing.median)
        return _said(RIGHT if right else WRONG, str(found), found.exact, micros, native.timing.median)

    def _repeats(self, runner: Runner, native: _Native) -> bool:
        """Whether the natively built plan gives the same bits each time; sums in any order differ only now and then."""
        for _ in range(_REPEATS):
            runner.run(native.graph, native.operands, native.outputs)
            if not runner.compare(native.operands, native.expected, native.outputs).exact:
                native.repeatable = False
                break
        return native.repeatable

    def _release(self, runner: Runner) -> None:
        native, self._native = self._native, None
        if native is not None:
            runner.release(native.operands)
            for address in (*native.expected.values(), *native.outputs.values()):
                runner.free(address)

    def tune(self, job: Event, say: Callable[[Event], None]) -> Tuning:
        """Tune the graph of a record, saying each candidate before it is tried."""
        if self._runner is not None:
            self._release(self._runner)
        record = self._cache.store.get(job["key"], job["route"], use=False)
        if record is None:
            raise RunError("the plan is gone", found=job["key"])
        row, fields = records.decode(record, self._cache._signing_key)
        wanted = requests.request(stored.documents(fields), builder=row.builder)
        if wanted.key.hash != job["key"]:
            raise RunError("here the graph has another key", found=str(wanted.key), expected=job["key"][:16])

        def said(place: int, table: Tuning) -> None:
            say(
                {
                    "event": "candidate",
                    "place": place,
                    "of": len(table.candidates),
                    "name": table.candidates[place].name,
                }
            )

        told = 0.0

        def waiting() -> None:
            """A sign of life: whoever waits for another process does not hang."""
            nonlocal told
            if time.monotonic() > told + _SIGN:
                told = time.monotonic()
                say({"event": "waiting"})

        limits = Limits(job["seconds"], job["workspace"], job["memory"])
        lost = {name: (status, detail) for name, (status, detail) in job["lost"].items()}
        return tune_request(self._cache, wanted, limits, said, job["again"], lost, waiting)


def _said(
    verdict: str, detail: str, exact: bool | None = None, micros: float | None = None, native: float | None = None
) -> Event:
    micros, native = (None if value is None else round(value, 3) for value in (micros, native))
    return {"verdict": verdict, "detail": detail, "exact": exact, "micros": micros, "native": native}


def tune_row(
    cache: PlanCache,
    worker: Worker,
    row: Row,
    limits: Limits,
    again: bool = False,
    said: Callable[[int, int, str], None] = lambda place, of, name: None,
) -> Tuning:
    """Tune the graph of a stored plan in a child process, which is ended where a candidate hangs.

    A candidate that did not come back, or left the device at fault, is not tried again, be it the heuristics' first
    choice: the next one that runs is then what the others are judged by.

    Args:
        said: called before each candidate: its place, how many there are, its name.

    Raises:
        BuilderError: the graph has nothing to tune: an explicit plan, dynamic shapes, or outputs that show nothing.
        RunError: the graph cannot be tuned; the text says why.
        StoreError: the cache cannot be read or written.
    """
    begun = since = time.monotonic()
    lost: dict[str, tuple[str, str]] = {}
    before = cache.store.get(row.key, Route.TUNED, use=False)
    while True:
        name = None
        seconds = max(0.0, limits.seconds - (time.monotonic() - begun))
        job = {"job": "tune", "key": row.key, "route": row.route, "seconds": seconds, "again": again, "lost": lost}
        try:
            for event in worker.ask({**job, "workspace": limits.workspace, "memory": limits.memory}):
                since = time.monotonic()
                if event["event"] == "candidate":
                    name = event["name"]
                    said(event["place"], event["of"], event["name"])
                elif event["event"] == "waiting":
                    begun = time.monotonic()  # the time is for one's own candidates
                elif event["event"] == "done":
                    told = event.get("outcome", TUNED), event.get("detail", "")
                    return replace(Tuning.of(event["table"]), outcome=told[0], detail=told[1])
                elif event.get("kind") == "BuilderError":
                    raise BuilderError(event["text"])
                elif not event.get("fault"):
                    raise RunError("a graph could not be tuned", found=event["text"])
                else:
                    status, detail = FAILED, event["text"]
        except LostError as error:
            if error.ended:  # by the system or a person: that says nothing about the candidate
                raise RunError("a graph could not be tuned", found=str(error)) from error
            status, detail = HUNG if error.hung else FAILED, str(error)
            begun += time.monotonic() - since  # the time is for those that run
        # Only what this call has measured is gone on with; a table from before it is not what was asked for.
        again = again and cache.store.get(row.key, Route.TUNED, use=False) == before
        kept = name is not None and mark(cache, row, name, status, detail)
        if name is None or name in lost or not (kept or time.monotonic() - begun < limits.seconds):
            found = f"candidate {name} did not come back: {detail}" if name else detail
            raise RunError("a graph could not be tuned", found=found)
        lost[name] = status, detail
        before = cache.store.get(row.key, Route.TUNED, use=False) if again else None
