"""Filling a cache by workers: looking up, having built, storing; and the report of it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

from plancache import crew, stored, workers
from plancache.cache import PlanCache
from plancache.crew import Crew, Job, Lost
from plancache.cudnn import environment
from plancache.cudnn.plans import Choice, Request, Route
from plancache.errors import PlanCacheError, RecordError, StoreError
from plancache.kernels import KernelKey
from plancache.keys import PlanKey, digest, topology
from plancache.outcome import Reason
from plancache.places import Place
from plancache.store import records
from plancache.workers import Done, Made, Task, Wanted

BUILT, FOUND, FAILED, UNSUPPORTED = "built", "found", "failed", "unsupported"
# Graphs of one topology that a worker takes at one go, tasks that a foreign executor holds at most, lookups between
# two writes of what was used, and workers that build on one GPU, each with a CUDA context of half a gigabyte.
_AT_ONCE, _WINDOW, _LOOKUPS, _ON_GPU = 256, 256, 1000, 8


@dataclass(frozen=True, slots=True)
class Line:
    """What became of one plan.

    Attributes:
        builder: the name of the function that declared the graph.
        args: the case.
        device: the device's name.
        route: `native`, `deviceless` or `replay`.
        outcome: `built`, `found` (it was there), `failed`, or `unsupported` (the graph does not have this route).
        seconds: what building took.
        error: why it failed or is not supported, in the words of the frontend.
        key: the key that it is stored under; empty where the graph has none.
        gain: what the `measure` of `PlanCache.upgrade` gave; kernel microseconds by route, if there was none.
    """

    builder: str
    args: tuple[Any, ...]
    device: str
    route: str
    outcome: str
    seconds: float = 0.0
    error: str = ""
    key: str = ""
    gain: Any = None


@dataclass
class Report:
    """What filling came to; true if everything that should be there is."""

    lines: list[Line] = field(default_factory=list)
    seconds: float = 0.0

    def __bool__(self) -> bool:
        return not self.failures

    @property
    def failures(self) -> list[Line]:
        """What should have been built and was not."""
        return [line for line in self.lines if line.outcome == FAILED]

    @property
    def counts(self) -> Counter[str]:
        """How often each outcome came up."""
        return Counter(line.outcome for line in self.lines)


# Told of each line when it is known, with how many graphs are done and how many there are in all (None: not known).
Progress = Callable[[int, int | None, Line], None]


class Filler:
    """One run of filling: looks plans up, has them built, and stores what comes back."""

    def __init__(self, cache: PlanCache, progress: Progress | None, total: int | None) -> None:
        """Raises StoreError where the cache cannot be written."""
        if cache.mode not in ("read-write", "check") or cache.store.read_only:
            raise StoreError(
                "the cache cannot be filled, since it may not be written",
                path=cache.directory,
                found=f"mode {cache.mode}" if cache.mode != "read-write" else "a directory that is only read",
                expected="a directory that this process may write, in mode read-write",
            )
        self.cache = cache
        self.libraries = digest(environment.document())
        self._report = Report()
        self._progress = progress
        self._total = total
        self._done = 0
        self._looked = 0
        self.measure: Callable[[Line], Any] | None = None

    def run(
        self, items: Iterable[Any], executor: Executor | None, jobs: int | None, places: Sequence[Place] = ()
    ) -> Report:
        """Have the items done: lines as they are, `Planned` by workers."""
        started = time.monotonic()
        own = executor is None
        count = max(1, jobs or self._workers(places))
        runner = executor or Crew(count)
        finished = False
        try:
            window = count if own else _WINDOW
            with closing(crew.completed(map(self._job, items), workers.work, runner, window)) as answers:
                for item, answer in answers:
                    self._take(item, answer)
            finished = True
            self._find_evicted()
        finally:
            if own:
                runner.shutdown(wait=finished, cancel_futures=True)
            self.cache.flush()
            self._report.seconds = time.monotonic() - started
        return self._report

    def _workers(self, places: Sequence[Place]) -> int:
        here = any(not isinstance(place.what, str) for place in places)
        return min(crew.usable_cpus(), _ON_GPU) if here else crew.usable_cpus()

    def missing(self, key: PlanKey, place: Place) -> tuple[list[str], list[tuple[str, str, str]]]:
        """The routes by which a plan is to be built, and (route, outcome, reason) of those that are settled."""
        self._looked += 1
        if self._looked % _LOOKUPS == 0:
            self.cache.flush()
        request = Request(None, key, Route(place.main), place.device, Choice())
        lacking, settled, no_replay = [], [], ""
        for route in (place.main, "replay"):
            if route not in place.routes and route == "replay":
                continue
            if route == "replay" and no_replay:
                settled.append((route, UNSUPPORTED, no_replay))
                continue
            found = self.cache._find_in(0, request, Route(route))
            if found.reason is Reason.FOUND:
                assert found.fields is not None
                no_replay = no_replay or found.fields.get(stored.NO_REPLAY, "")
                if route in place.routes:
                    settled.append((route, FOUND, ""))
            elif found.reason is Reason.FOREIGN and route in place.routes:
                # Signed, and there is no key here; or a later version's. Replaced, it would be lost to those it serves.
                settled.append((route, FAILED, f"what is stored is left to others: {found.detail}"))
            elif route in place.routes:
                lacking.append(route)
        return lacking, settled

    def _job(self, item: Any) -> Any:
        if not isinstance(item, Planned):
            return item
        first = item.plans[0]
        kernels = self._kernels(first) if first.wanted.is_dynamic else ()

        def job(plans: list[About], parts: Sequence[Job[Planned]] = ()) -> Job[Planned]:
            wanted = tuple(plan.wanted for plan in plans)
            return Job(Task(item.place.what, self.libraries, wanted, kernels), Planned(item.place, plans), parts)

        return job(item.plans, [job([plan]) for plan in item.plans] if len(item.plans) > 1 else ())

    def _kernels(self, plan: About) -> tuple[bytes, ...]:
        """The kernels of its topology that are on disk, as records that any worker can read."""
        subject = digest({"topology": topology(plan.wanted.graph)})
        key = KernelKey(subject, plan.place.device, self.libraries, "", of_topology=True)
        found = []
        for listed in self.cache.store.rows(key=key.hash):
            record = self.cache.store.get(key.hash, listed.row.route)
            try:
                row, fields = records.decode(record or b"", self.cache._signing_key)
            except PlanCacheError:
                continue
            found.append(records.encode(row, fields))
        return tuple(found)

    def _take(self, item: Any, answer: Any) -> None:
        if isinstance(item, Line):
            self._tell(item)
            return
        if isinstance(item, Counted):
            self._done += item.number
            return
        planned: Planned = item.about
        if isinstance(answer, Lost):
            for plan in planned.plans:
                for route in plan.wanted.routes:
                    self._tell(plan.line(route, FAILED, error=str(answer)))
            self._done += len(planned.plans)
            return
        assert isinstance(answer, Done)
        faults = [fault for record in answer.kernels if (fault := self._store(record, None))]
        by_plan = workers.by_plan(answer.made, len(planned.plans))
        for plan, made in zip(planned.plans, by_plan, strict=True):
            self._done += 1
            for one in made:
                self._tell(self._kept(plan, one, faults))
            self._note(plan, made)
        self.cache._maintain()

    def _kept(self, plan: About, made: Made, faults: list[str]) -> Line:
        error = made.error
        if made.record is not None:
            error = self._store(made.record, plan, made.route) or next(iter(faults), "")
        outcome = FAILED if made.record is not None and error else made.outcome
        line = plan.line(made.route, outcome, made.seconds, error)
        if self.measure is not None and outcome == BUILT:
            line = replace(line, gain=self.measure(line))
        return line

    def _store(self, record: bytes, plan: About | None, route: str = "") -> str:
        """Store what a worker made; says what was wrong."""
        cache = self.cache
        try:
            row, fields = records.decode(record)
            if plan is not None and (row.key, row.route) != (plan.key.hash, route):
                return f"the worker made another plan ({row.key[:16]}, {row.route}) than {plan.key}"
            # A worker has no signing key: the secret stays here.
            mine = record if cache._signing_key is None else records.encode(row, fields, cache._signing_key)
            there = cache.store.get(row.key, row.route, use=False)
            unfit = there if there is not None and plan is not None and self._unfit(there, plan, route) else None
            if cache.store.put(row, mine, unfit) or cache.store.get(row.key, row.route, use=False) is not None:
                return ""
            return "it does not fit into the cache's bound (PLANCACHE_MAX_BYTES)"
        except PlanCacheError as error:
            return f"it could not be stored: {error}"

    def _unfit(self, record: bytes, plan: About, route: str) -> bool:
        try:
            stored.decode(record, plan.key, route, self.cache._signing_key)
        except RecordError as error:
            return not error.foreign
        return False

    def _note(self, plan: About, made: Sequence[Made]) -> None:
        """In the record of a plan that was there before: that its graph has no `replay`."""
        reason = next((one.error for one in made if one.route == "replay" and one.outcome == UNSUPPORTED), "")
        if not reason or plan.place.main in plan.wanted.routes:
            return
        cache, name = self.cache, (plan.key.hash, plan.place.main)
        try:
            record = cache.store.get(*name, use=False)
            if record is not None:
                row, fields = stored.decode(record, plan.key, name[1], cache._signing_key)
                noted = records.encode(row, {**fields, stored.NO_REPLAY: reason}, cache._signing_key)
                cache.store.put(row, noted, record)
        except PlanCacheError:
            pass  # it is tried again the next time

    def _find_evicted(self) -> None:
        """Where the directory is too small for all of it, what was stored last has taken the place of the first."""
        lines = self._report.lines
        if not self._report.counts[BUILT]:
            return
        for number, line in enumerate(lines):
            if line.outcome in (BUILT, FOUND) and (line.key, line.route) not in self.cache.store.keys(line.key):
                lines[number] = replace(line, outcome=FAILED, error=_EVICTED)

    def _tell(self, line: Line) -> None:
        self._report.lines.append(line)
        if self._progress is not None:
            self._progress(self._done, self._total, line)


@dataclass(frozen=True)
class About:
    """What a plan that is to be built belongs to."""

    place: Place
    key: PlanKey
    wanted: Wanted
    args: tuple[Any, ...] = ()

    def line(self, route: str, outcome: str, seconds: float = 0.0, error: str = "") -> Line:
        """The line of one of its routes."""
        return Line(
            self.wanted.builder, self.args, self.place.device.name, route, outcome, seconds, error, self.key.hash
        )

    def settled(self, routes: Iterable[tuple[str, str, str]], counted: bool) -> Iterator[Any]:
        """Lines of the routes that nothing is built for; `counted` if that is all."""
        if counted:
            yield Counted()
        for route, outcome, reason in routes:
            yield self.line(route, outcome, error=reason)


@dataclass(frozen=True)
class Planned:
    """Plans that go to a worker together: one, or several of one topology with dynamic shapes."""

    place: Place
    plans: list[About]


@dataclass(frozen=True)
class Counted:
    """So many graphs are done, of which nothing had to be built."""

    number: int = 1


_EVICTED = "it had to make room for others: the cache's bound is too small for all of them (PLANCACHE_MAX_BYTES)"
DYNAMIC = "dynamic shapes: its kernels are kept by topology"


def without_replay(
    lacking: list[str], settled: list[tuple[str, str, str]], place: Place
) -> tuple[list[str], list[tuple[str, str, str]]]:
    """What `Filler.missing` gave, for a graph with dynamic shapes, which is served by its kernels instead."""
    rest = [one for one in settled if one[0] != "replay"]
    if place.routes == ("replay",):
        rest.append(("replay", UNSUPPORTED, DYNAMIC))
    return [route for route in lacking if route != "replay"], rest


def grouped(items: Iterable[Any]) -> Iterator[Any]:
    """The same items, where neighbouring plans of one dynamic topology go together."""
    together: list[About] = []
    shared = None
    for item in items:
        mine = None
        if isinstance(item, About) and item.wanted.is_dynamic:
            mine = (item.place.what, digest(topology(item.wanted.graph)))
        if together and (mine != shared or len(together) == _AT_ONCE) and isinstance(item, About):
            yield Planned(together[0].place, together)
            together = []
        if mine is not None:
            shared = mine
            together.append(item)
        else:
            yield Planned(item.place, [item]) if isinstance(item, About) else item
    if together:
        yield Planned(together[0].place, together)
