"""Tuning: every candidate plan of a graph is built, run and timed on the device, and the fastest right one is kept.

What is known of each candidate is written after each one, in the record of the best so far. So a tuning that was
interrupted keeps what it has, and the next one goes on with those that were not measured yet.

Not promised, in a process of one's own: that a candidate comes back. `plancache tune` gives each one a time limit, in
a child that it ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from plancache import stored
from plancache.cudnn import candidates, frontend, plans
from plancache.cudnn.frontend import Plan
from plancache.cudnn.plans import BuiltPlan, Choice, Request, Route, UnkeptPlanError
from plancache.cudnn.running import Operands, Runner, Timing
from plancache.errors import BuilderError, BusyError, DeviceError, RecordError, RunError, StoreError
from plancache.outcome import Outcome
from plancache.store import records
from plancache.store.interface import Row

if TYPE_CHECKING:
    from plancache.cache import PlanCache

OK, WRONG, FAILED, HUNG, TOO_LARGE, WAITING = "ok", "wrong", "failed", "hung", "too large", "not run"
TUNED, BUSY = "tuned", "busy"
_TURNS = 3
# How many of the fastest are timed again, in turns with the first choice, and how much slower than the fastest these
# may be: between one candidate's turn and another's, the clocks of a device that others use too move by some percent.
_RIVALS, _CLOSE = 3, 1.1


@dataclass
class Candidate:
    """One plan, and what came of it.

    Attributes:
        engine: engine id.
        knobs: (knob number, value).
        name: as cuDNN names it.
        status: `ok`, `wrong` (another result than the heuristics' first choice), `failed`, `hung`, `too large` (its
            workspace) or `not run`.
        median: microseconds of one execute, the median of the replays.
        best: the best of them.
        workspace: bytes.
        detail: more about the status.
    """

    engine: int
    knobs: list[tuple[int, int]]
    name: str
    status: str = WAITING
    median: float | None = None
    best: float | None = None
    workspace: int | None = None
    detail: str = ""

    @property
    def plan(self) -> Plan:
        """As the frontend lists it."""
        return Plan(self.name, self.engine, dict(self.knobs), None)


@dataclass
class Tuning:
    """What is known of a graph's candidates.

    Attributes:
        candidates: all of them, in the order of the heuristics.
        first: the heuristics' first choice that runs, by which the others are judged; None if there is none yet.
        chosen: the fastest, which is the one that is stored.
        workspace_limit: bytes that a candidate's workspace may take.
        seconds: what measuring took in all.
        outcome: `tuned`, or `busy`: another process is tuning the graph, and had not finished when this one had waited
            as long as it may. Nothing failed: the table is what that one had stored so far, and may be empty.
        detail: which process that is.
    """

    candidates: list[Candidate]
    first: int | None = None
    chosen: int | None = None
    workspace_limit: int | None = None
    seconds: float = 0.0
    outcome: str = TUNED
    detail: str = ""

    @property
    def complete(self) -> bool:
        """Whether every candidate was looked at."""
        return self.first is not None and not any(one.status == WAITING for one in self.candidates)

    @property
    def gain(self) -> float | None:
        """By what factor the chosen plan is faster than the heuristics' first choice."""
        if self.first is None or self.chosen is None:
            return None
        first, chosen = (self.candidates[one].median for one in (self.first, self.chosen))
        return first / chosen if first and chosen else None

    def document(self) -> dict[str, Any]:
        """As it is stored: without what only one call of `tune` came to."""
        return {name: value for name, value in asdict(self).items() if name not in ("outcome", "detail")}

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Tuning:
        """What `document` wrote."""
        known = [
            Candidate(**{**one, "knobs": [(int(knob), int(value)) for knob, value in one["knobs"]]})
            for one in document["candidates"]
        ]
        return cls(**{**document, "candidates": known})


@dataclass(frozen=True)
class Limits:
    """How much may be spent.

    Attributes:
        seconds: time for building and running candidates, in this call; and how much longer than `PLANCACHE_WAIT`
            another process that tunes the same graph is waited for.
        workspace: bytes that a candidate's workspace may take.
        memory: bytes on the device in all; None is most of what is free.
    """

    seconds: float = 60.0
    workspace: int | None = None
    memory: int | None = None


@dataclass
class _State:
    """The stored side of a tuning: its table, the record that holds it, and the best plan."""

    table: Tuning
    record: bytes | None = None
    best: BuiltPlan | None = None
    known: dict[Any, Candidate] = field(default_factory=dict)


Said = Callable[[int, Tuning], None]


def tune(
    cache: PlanCache, graph: Any, choice: Choice, limits: Limits, builder: str, said: Said, again: bool = False
) -> Tuning:
    """See `PlanCache.tune`. `said` is called before each candidate with its place."""
    wanted = cache._request(graph, choice, time.perf_counter(), builder)
    if isinstance(wanted, Outcome):
        raise BuilderError(f"this graph has no key: {wanted.reason}", found=wanted.detail or None)
    _check_tunable(wanted)
    if wanted.route is not Route.NATIVE:
        raise DeviceError(
            "plans are tuned on the device that they are for",
            found="a graph for a device that is not here",
            expected="a graph with a handle, on a host with a GPU",
        )
    if not cache._writes():
        raise StoreError("what is tuned cannot be kept", path=cache.directory, found="a cache that is not written")
    return tune_request(cache, wanted, limits, said, again)


def tune_request(
    cache: PlanCache,
    wanted: Request,
    limits: Limits,
    said: Said,
    again: bool = False,
    lost: Mapping[str, tuple[str, str]] | None = None,
    waiting: Callable[[], None] = lambda: None,
) -> Tuning:
    """Tune the request's graph, one process at a time; whoever waited takes what the other one has found.

    The lock is the other one's sign of life: the kernel releases it when its process ends, however that ends. Where the
    file system cannot lock, both tune.

    Args:
        lost: candidates that are not tried, by name: they ended a process before this one. Their status and its detail.
        waiting: called again and again while another process tunes it.

    Raises:
        BuilderError: the graph has nothing to tune.
        And what `PlanCache.tune` says of devices and the cache.
    """
    _check_tunable(wanted)

    # What is there already is not asked for again; what another process measures from now on is.
    old = cache.store.get(wanted.key.hash, Route.TUNED, use=False) if again else None

    def there() -> Tuning | None:
        state = known(cache, wanted)
        if state is None or (again and state.record == old):
            return None
        return state.table if _enough(state.table, limits) else None

    finished = there()
    if finished is not None:
        return finished

    def done_meanwhile() -> bool:
        waiting()
        return there() is not None

    locks = cache._layers.locks(tuning=True)
    with ExitStack() as stack:
        try:
            stack.enter_context(locks.turn(wanted.key.hash, done_meanwhile, locks.wait + limits.seconds))
        except BusyError as busy:
            state = known(cache, wanted)
            table = Tuning([]) if state is None else state.table
            return replace(table, outcome=BUSY, detail=str(busy))
        except StoreError as error:
            cache._warn(error, "graphs are tuned all the same")
        finished = there()
        if finished is not None:
            return finished
        ordinal = getattr(getattr(frontend.handle_of(wanted.graph), "device", None), "ordinal", None)
        with Runner(ordinal, limits.memory) as runner:
            table = _Tuner(cache, wanted, limits, runner, said, lost or {}).run(known(cache, wanted), again)
    cache._maintain()
    return table


def _check_tunable(wanted: Request) -> None:
    if wanted.choice.plan is not None or frontend.is_dynamic(wanted.graph):
        raise BuilderError(
            "this graph has nothing to tune",
            found="an explicit plan" if wanted.choice.plan is not None else "dynamic shapes",
            expected="a graph of fixed shapes, whose plan heuristics choose",
        )


def _enough(table: Tuning, limits: Limits) -> bool:
    return table.complete and table.workspace_limit == limits.workspace


def known(cache: PlanCache, wanted: Request) -> _State | None:
    """What is stored of an earlier tuning in the writable cache; None if that is nothing, or no good."""
    record = cache.store.get(wanted.key.hash, Route.TUNED, use=False)
    if record is None:
        return None
    with suppress(RecordError, KeyError, TypeError, ValueError):
        _, fields = stored.decode(record, wanted.key, Route.TUNED, cache._signing_key)
        table = stored.tuning(fields)
        if table is not None:
            return _State(Tuning.of(table), record, plans.stored_plan(fields["plan"], fields["blob"]))
    return _State(Tuning([]), record)


@dataclass
class _Ready:
    """A candidate that was built by this process and is right."""

    place: int
    graph: Any
    plan: BuiltPlan


class _Tuner:
    """One tuning, under its lock."""

    def __init__(
        self,
        cache: PlanCache,
        wanted: Request,
        limits: Limits,
        runner: Runner,
        said: Said,
        lost: Mapping[str, tuple[str, str]],
    ) -> None:
        self._cache, self._wanted, self._limits, self._runner, self._said = cache, wanted, limits, runner, said
        self._lost = lost
        self._started = time.monotonic()
        self._operands: Operands | None = None
        self._judge: int | None = None
        self._judged: _Ready | None = None
        self._fastest: list[_Ready] = []
        self._expected: dict[int, int] = {}
        self._outputs: dict[int, int] = {}

    def run(self, earlier: _State | None, again: bool) -> Tuning:
        """Measure what was not measured yet, as long as there is time."""
        self._state = self._begun(earlier, again)
        table = self._state.table
        for one in table.candidates:
            if one.name in self._lost:
                one.status, one.detail = self._lost[one.name]
        spent = table.seconds
        try:
            for place, candidate in enumerate(table.candidates):
                # The first one is run in any case: without it nothing is judged and nothing kept.
                late = table.first is not None and time.monotonic() - self._started > self._limits.seconds
                if late:
                    break
                if candidate.status == WAITING or (place == table.first and self._judge is None):
                    self._said(place, table)
                    self._try(place, candidate)
                    table.seconds = spent + time.monotonic() - self._started
                    if not table.complete:  # whoever waits takes a complete table: it comes after the last comparison
                        self._keep()
            self._compare_the_fastest()
        finally:
            table.seconds = spent + time.monotonic() - self._started
            self._keep()
        return table

    def _compare_the_fastest(self) -> None:
        """Time the first choice and the fastest in turns: the clocks were others when each was run."""
        table, first = self._state.table, self._judged
        ready = {one.place for one in self._fastest}
        if first is None or self._operands is None or table.chosen not in ready or ready == {first.place}:
            return
        limit = _CLOSE * self._median(self._fastest[0])
        rivals = [one for one in self._fastest if one is not first and self._median(one) <= limit]
        timings: dict[int, list[Timing]] = {one.place: [] for one in (first, *rivals)}
        for _ in range(_TURNS):
            for one in (first, *rivals):
                self._said(one.place, table)  # so that it is this one that did not come back
                timings[one.place].append(self._runner.time(one.graph, self._operands, self._outputs))
        for place, taken in timings.items():
            table.candidates[place].median = round(min(one.median for one in taken), 3)
            table.candidates[place].best = round(min(one.best for one in taken), 3)
        chosen = min((first, *rivals), key=self._median)  # the first choice where there is nothing to gain
        table.chosen, self._state.best = chosen.place, chosen.plan

    def _median(self, one: _Ready) -> float:
        return self._state.table.candidates[one.place].median or 0.0

    def _begun(self, earlier: _State | None, again: bool) -> _State:
        listed = [
            Candidate(plan.engine, sorted(plan.knobs.items()), plan.name)
            for plan in candidates.candidates(self._wanted, **self._runner.place)
        ]
        table = Tuning(listed, workspace_limit=self._limits.workspace)
        if earlier is None:
            return _State(table)
        before = {candidates.identity(one.engine, one.knobs): one for one in earlier.table.candidates}
        same = not again and earlier.table.first is not None
        same = same and earlier.table.workspace_limit == self._limits.workspace
        for place, candidate in enumerate(listed):
            old = before.get(candidates.identity(candidate.engine, candidate.knobs))
            # What hung is not tried again, whatever else has changed since.
            if old is not None and (same or old.status == HUNG):
                listed[place] = old
        if not same or earlier.best is None or earlier.table.chosen is None:
            return _State(table, earlier.record)
        table.seconds = earlier.table.seconds
        table.first = _place(listed, earlier.table, earlier.table.first)
        table.chosen = _place(listed, earlier.table, earlier.table.chosen)
        unfit = [listed[place].name in self._lost for place in (table.first, table.chosen) if place is not None]
        if table.first is None or table.chosen is None or any(unfit):  # the heuristics list others now, or it was lost
            return _State(Tuning([replace(one, status=WAITING) for one in listed]), earlier.record)
        return _State(table, earlier.record, earlier.best)

    def _try(self, place: int, candidate: Candidate) -> None:
        """Build, run, compare and time one candidate.

        Raises:
            RunError: the device is at fault; nothing more can be run by this process.
        """
        try:
            built, seconds = candidates.build(self._wanted, candidate.plan, **self._runner.place)
            candidate.workspace = int(built.get_workspace_size())
            if self._limits.workspace is not None and candidate.workspace > self._limits.workspace:
                candidate.status = TOO_LARGE
                return
            self._measure(place, candidate, built, seconds)
        except BuilderError:
            raise
        except RunError as error:
            candidate.status, candidate.detail = FAILED, str(error)
            if error.fault or self._operands is None:  # then no other candidate can be run either
                raise
        except (UnkeptPlanError, Exception) as error:  # whatever cuDNN says of a plan that it cannot build
            candidate.status, candidate.detail = FAILED, one_line(error)
            self._runner.check()

    def _measure(self, place: int, candidate: Candidate, built: Any, seconds: float) -> None:
        runner, table = self._runner, self._state.table
        made = self._prepared(built)
        runner.run(built, made, self._outputs)
        if self._judge is None:
            if runner.empty(made, self._outputs):
                raise BuilderError(
                    "this graph has nothing to tune",
                    found="outputs of nothing but zeros and NaN for random inputs, by which nothing can be judged",
                )
            # This one is what the heuristics choose: the others are judged by it.
            self._expected, self._outputs = self._outputs, self._expected
            self._judge = table.first = place
        else:
            found = runner.compare(made, self._expected, self._outputs)
            candidate.detail = str(found)
            if not found.right:
                candidate.status = WRONG
                self._put_right(made)
                return
        timing = runner.time(built, made, self._outputs)
        candidate.median, candidate.best = round(timing.median, 3), round(timing.best, 3)
        fastest = None if table.chosen is None else table.candidates[table.chosen].median
        faster = fastest is None or self._state.best is None or candidate.median < fastest
        rival = faster or len(self._fastest) < _RIVALS or candidate.median < self._median(self._fastest[-1])
        if rival or self._judge == place:
            one = _Ready(place, built, candidates.taken(self._wanted, built, seconds))
            if self._judge == place:
                self._judged = one
            if faster:
                self._state.best, table.chosen = one.plan, place
            self._fastest = sorted([*self._fastest, one], key=self._median)[:_RIVALS]
        candidate.status = OK

    def _put_right(self, made: Operands) -> None:
        """Whatever a wrong plan has written elsewhere, the next one is to be judged by the same inputs and outputs."""
        self._runner.refill(made)
        if self._judged is not None:
            self._runner.run(self._judged.graph, made, self._expected)

    def _prepared(self, built: Any) -> Operands:
        """The inputs and two sets of outputs, which all candidates share."""
        if self._operands is None:
            made = self._runner.operands(built)
            self._expected, self._outputs = self._runner.outputs(made), self._runner.outputs(made)
            self._operands = made
        return self._operands

    def _keep(self) -> None:
        """Write the table, in the record of the best plan so far."""
        state = self._state
        if state.best is None:
            return
        wanted = replace(self._wanted, route=Route.TUNED)
        row, record = stored.encode(wanted, state.best, self._cache._signing_key, state.table.document())
        if self._cache.store.put(row, record, state.record):
            state.record = record


def _place(listed: list[Candidate], table: Tuning, place: int | None) -> int | None:
    """Where a candidate of another table is in this one."""
    if place is None:
        return None
    wanted = candidates.identity(table.candidates[place].engine, table.candidates[place].knobs)
    known = [candidates.identity(one.engine, one.knobs) for one in listed]
    return known.index(wanted) if wanted in known else None


def one_line(error: BaseException) -> str:
    """An error with its type, on one line of a table."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def mark(cache: PlanCache, row: Row, name: str, status: str, detail: str) -> bool:
    """Note what became of a candidate whose process did not live to say it; whether there is a table to note it in.

    Raises:
        StoreError: the cache cannot be read or written.
    """
    record = cache.store.get(row.key, Route.TUNED, use=False)
    if record is None:
        return False
    try:
        found, fields = records.decode(record, cache._signing_key)
        table = stored.tuning(fields)
        marked = [] if table is None else [one for one in table["candidates"] if one["name"] == name]
    except (RecordError, KeyError, TypeError):  # damaged, or of a later version: the next tuning begins anew
        return False
    if table is None or not marked:
        return False
    if table["chosen"] is not None and table["candidates"][table["chosen"]] is marked[0]:
        cache.store.discard(row.key, Route.TUNED, record)  # the record's own plan: it must not be served any longer
        return False
    marked[0].update(status=status, detail=detail)
    changed = records.encode(found, stored.with_tuning(fields, table), cache._signing_key)
    return cache.store.put(found, changed, record)
