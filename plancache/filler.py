"""Filling a cache by workers: looking up, having built, storing; and the report of it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from plancache import crew, stored, workers
from plancache.cache import PlanCache
from plancache.crew import Crew, Job, Lost
from plancache.cudnn import environment
from plancache.cudnn.plans import Choice, Request, Route
from plancache.errors import PlanCacheError, RecordError, SettingsError, StoreError
from plancache.faults import READING, STORING, Faults
from plancache.kernels import KernelKey
from plancache.keys import PlanKey, digest, topology
from plancache.lookups import Found
from plancache.outcome import Reason
from plancache.places import Place
from plancache.sharing import Claims, Turns
from plancache.store import records
from plancache.store.interface import Row
from plancache.workers import Done, Made, Task, Wanted

BUILT, FOUND, FAILED, UNSUPPORTED, NOT_TRIED = "built", "found", "failed", "unsupported", "not tried"
# Graphs of one topology that a worker takes at one go, tasks that a foreign executor holds at most, lookups between
# two writes of what was used, and workers that build on one GPU, each with a CUDA context of half a gigabyte.
_AT_ONCE, _WINDOW, _LOOKUPS, _ON_GPU = 256, 256, 1000, 8
# Seconds that another fill may take for what it has claimed. The kernel frees a dead one's claims at once.
_PATIENCE = 600.0


@dataclass(frozen=True, slots=True)
class Line:
    """What became of one plan.

    Attributes:
        builder: the name of the function that declared the graph.
        args: the case.
        device: the device's name.
        route: `native`, `deviceless` or `replay`.
        outcome: `built`, `found` (it was there, or another fill has stored it meanwhile), `failed`, `unsupported` (the
            graph does not have this route), or `not tried` (filling had stopped).
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
    """What filling came to; true if everything that should be there is.

    Attributes:
        lines: what became of each plan.
        seconds: how long it took.
        stopped: why filling stopped before its end (a disk that is full) and what to do; empty if it did not.
    """

    lines: list[Line] = field(default_factory=list)
    seconds: float = 0.0
    stopped: str = ""

    def __bool__(self) -> bool:
        return not self.failures and not self.stopped

    @property
    def failures(self) -> list[Line]:
        """What was tried and should be there, and is not."""
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
        self._faults = Faults()
        self._claims = Claims(cache._layers)
        self._under_way: dict[int, tuple[About, str]] = {}
        self.measure: Callable[[Line], Any] | None = None

    def run(
        self, items: Iterable[Any], executor: Executor | None, jobs: int | None, places: Sequence[Place] = ()
    ) -> Report:
        """Have the items done: lines as they are, `Planned` by workers."""
        started = time.monotonic()
        if jobs is not None and jobs < 1:
            raise SettingsError("no number of worker processes", name="jobs", found=repr(jobs), expected="1 or more")
        own = executor is None
        count = jobs or self._workers(places)
        runner = Crew(count) if executor is None else executor
        turns = Turns(self._claims, self._named, self._look_again, _PATIENCE)
        ordered, finished = turns.of(items), False
        try:
            window = count if own else _WINDOW
            with closing(crew.completed(map(self._job, ordered), workers.work, runner, window)) as answers:
                for item, answer in answers:
                    self._take(item, answer)
                    if self._faults:
                        break
            if self._faults:
                self._stop(ordered)
            finished = not self._faults
            self._find_evicted()
        finally:
            if own:
                runner.shutdown(wait=finished, cancel_futures=True)
            self._claims.drop_all()
            self.cache.flush()
            self._report.seconds = time.monotonic() - started
        return self._report

    def _stop(self, ordered: Iterator[Any]) -> None:
        """Say what is left: what is being built, and what would come."""
        for plan, _ in self._under_way.values():
            self._not_tried(plan)
        with suppress(StoreError):  # where they come from may be the same directory, which cannot be read
            for item in ordered:
                if isinstance(item, Planned):
                    for plan in item.plans:
                        self._not_tried(plan)
                else:
                    self._take(item, None)
        self._report.stopped = self._faults.text(self.cache.directory, self._report.counts[NOT_TRIED])

    def _not_tried(self, plan: About) -> None:
        self._done += 1
        for route in plan.wanted.routes:
            self._tell(plan.line(route, NOT_TRIED))

    def _workers(self, places: Sequence[Place]) -> int:
        here = any(not isinstance(place.what, str) for place in places)
        return min(crew.usable_cpus(), _ON_GPU) if here else crew.usable_cpus()

    def missing(self, key: PlanKey, place: Place) -> tuple[list[str], list[tuple[str, str, str]]]:
        """The routes by which a plan is to be built, and (route, outcome, reason) of those that are settled."""
        if self._faults.blind:
            return [], [(route, NOT_TRIED, "") for route in place.routes]
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
            try:
                found = self._looked_up(request, Route(route))
            except StoreError as error:
                # Not as if it were not there: what cannot be read could not be stored either.
                known = {one for one, _, _ in settled}
                text = f"the cache could not be read: {error}"
                return [], settled + [(one, FAILED, text) for one in place.routes if one not in known]
            if found.reason is Reason.FOUND:
                assert found.fields is not None
                no_replay = no_replay or found.fields.get(stored.NO_REPLAY, "")
                if route in place.routes:
                    settled.append((route, FOUND, ""))
            elif found.reason is Reason.FOREIGN and route in place.routes:
                # Signed, and there is no key here; or a later version's. Replaced, it would be lost to those it serves.
                settled.append((route, FAILED, f"what is stored is left to others: {found.detail}"))
            elif route in place.routes and self._faults:
                settled.append((route, NOT_TRIED, ""))
            elif route in place.routes:
                lacking.append(route)
        return lacking, settled

    def _looked_up(self, request: Request, route: Route) -> Found:
        # Past what a job does after a fault, which is to build as if nothing were there.
        return self._faults.attempt(READING, lambda: self.cache._looked_up(0, request, route))

    def _named(self, item: Any) -> str:
        """What is claimed before an item is built; empty where there is nothing to build.

        Of plans that go together the first stands for all: another fill of the same cases groups them so, too.
        """
        if not isinstance(item, Planned) or self._faults:
            return ""
        return digest([item.plans[0].key.hash, item.place.main])

    def _look_again(self, planned: Planned) -> Iterator[Any]:
        """Of plans that were just claimed, those that nobody has stored since they were looked up."""
        name, left = self._named(planned), []  # before there is a fault
        for plan in planned.plans:
            lacking, settled = self.missing(plan.key, plan.place)
            routes = plan.wanted.routes
            rest = tuple(route for route in routes if route in lacking)
            yield from plan.settled([one for one in settled if one[0] in routes], counted=not rest)
            if rest:
                left.append(replace(plan, wanted=replace(plan.wanted, routes=rest)))
        if left:
            yield Planned(planned.place, left, name)
        else:
            self._claims.drop(name)

    def _job(self, item: Any) -> Any:
        if not isinstance(item, Planned):
            return item
        self._under_way |= {id(plan): (plan, item.claim) for plan in item.plans}
        first = item.plans[0]
        kernels = self._kernels(first) if first.wanted.is_dynamic else ()

        def job(plans: list[About], parts: Sequence[Job[Planned]] = ()) -> Job[Planned]:
            wanted = tuple(plan.wanted for plan in plans)
            task = Task(item.place.what, self.libraries, wanted, kernels)
            return Job(task, Planned(item.place, plans, item.claim), parts)

        return job(item.plans, [job([plan]) for plan in item.plans] if len(item.plans) > 1 else ())

    def _kernels(self, plan: About) -> tuple[bytes, ...]:
        """The kernels of its topology that are on disk, as records that any worker can read."""
        subject = digest({"topology": topology(plan.wanted.graph)})
        key = KernelKey(subject, plan.place.device, self.libraries, "", of_topology=True)
        found = []
        with suppress(StoreError):  # what cannot be read is compiled anew
            for listed in self.cache.store.rows(key=key.hash):
                record = self.cache.store.get(key.hash, listed.row.route)
                with suppress(RecordError):
                    row, fields = records.decode(record or b"", self.cache._signing_key)
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
        for plan in planned.plans:
            del self._under_way[id(plan)]
        self._answered(planned, answer)
        # A group whose worker was lost is answered one by one.
        if all(claim != planned.claim for _, claim in self._under_way.values()):
            self._claims.drop(planned.claim)

    def _answered(self, planned: Planned, answer: Any) -> None:
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
        with suppress(StoreError):  # it comes up again when the next plan is stored
            self.cache.store.maintain(thorough=False)

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
        try:
            row, fields = records.decode(record)
            if plan is not None and (row.key, row.route) != (plan.key.hash, route):
                return f"the worker made another plan ({row.key[:16]}, {row.route}) than {plan.key}"
            # A worker has no signing key: the secret stays here.
            key = self.cache._signing_key
            mine = record if key is None else records.encode(row, fields, key)
            self._faults.made(len(mine))
            if self._faults.attempt(STORING, lambda: self._put(row, mine, plan, route)):
                return ""
            return "it does not fit into the cache's bound (PLANCACHE_MAX_BYTES)"
        except PlanCacheError as error:
            return f"it could not be stored: {error}"

    def _put(self, row: Row, record: bytes, plan: About | None, route: str) -> bool:
        """Whether it is stored, or another one that does not give way to it."""
        store = self.cache.store
        there = store.get(row.key, row.route, use=False)
        unfit = there if there is not None and plan is not None and self._unfit(there, plan, route) else None
        return store.put(row, record, unfit) or store.get(row.key, row.route, use=False) is not None

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
        with suppress(StoreError):  # what cannot be read now was stored all the same
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
    claim: str = ""


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
