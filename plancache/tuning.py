"""Tuning: every candidate plan of a graph is built, run and timed on the device, and the fastest right one is kept.

What is known of each candidate is written after each one, in the record of the best so far. So a tuning that was
interrupted keeps what it has, and the next one goes on with those that were not measured yet.

Not promised, in a process of one's own: that a candidate comes back. `plancache tune` gives each one a time limit, in
a child that it ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from plancache import stored
from plancache.cudnn import candidates, frontend, libraries, plans
from plancache.cudnn.plans import BuiltPlan, Choice, Request, Route, UnkeptPlanError
from plancache.cudnn.running import Operands, Runner, Timing
from plancache.errors import BuilderError, BusyError, DeviceError, RecordError, RunError, StoreError
from plancache.outcome import Outcome
from plancache.store import records
from plancache.store.interface import Row
from plancache.tuning_table import (
    BUSY,
    FAILED,
    HUNG,
    NO_ROOM,
    OK,
    TOO_LARGE,
    WAITING,
    WRONG,
    Candidate,
    Limits,
    Tuning,
)

if TYPE_CHECKING:
    from plancache.cache import PlanCache

_TURNS = 3
# How many of the fastest are timed again, in turns with the first choice, and how much slower than the fastest these
# may be: between one candidate's turn and another's, the clocks of a device that others use too move by some percent.
_RIVALS, _CLOSE = 3, 1.1


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
    settled = table.complete and not any(one.status == NO_ROOM for one in table.candidates)
    return settled and table.workspace_limit == limits.workspace


def known(cache: PlanCache, wanted: Request) -> _State | None:
    """What is stored of an earlier tuning in the writable cache; None if that is nothing.

    Of a damaged record, or one of a newer driver or frontend, which lookups pass over, nothing is taken but its place.

    Raises:
        StoreError: it is signed with another key, or of a later version: good for others, and not ours to replace.
    """
    record = cache.store.get(wanted.key.hash, Route.TUNED, use=False)
    if record is None:
        return None
    try:
        row, fields = stored.decode(record, wanted.key, Route.TUNED, cache._signing_key)
        table = stored.tuning(fields)
        newer = row.driver > wanted.device.driver or row.frontend > libraries.frontend_version()
        if table is not None and not newer:
            return _State(Tuning.of(table), record, plans.stored_plan(fields["plan"], fields["blob"]))
    except RecordError as error:
        if error.foreign:
            raise StoreError(
                "a tuned plan is there that cannot be checked here",
                path=cache.directory,
                found=str(error),
                todo="Use its key or its version of plancache, or remove it.",
            ) from error
    except (KeyError, TypeError, ValueError):
        pass
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
        anew = self._to_measure_again()
        try:
            for place, candidate in enumerate(table.candidates):
                # The first one is run in any case: without it nothing is judged and nothing kept.
                late = table.first is not None and time.monotonic() - self._started > self._limits.seconds
                if late:
                    break
                if candidate.status == WAITING or place in anew:
                    self._said(place, table)
                    self._try(place, candidate)
                    table.seconds = spent + time.monotonic() - self._started
                    if not table.complete:  # whoever waits takes a complete table: it comes after the last comparison
                        self._keep()
            self._compare_the_fastest()
        finally:
            table.seconds = spent + time.monotonic() - self._started
            kept = self._keep()
        if not kept:
            raise StoreError(
                "what was tuned could not be kept",
                path=self._cache.directory,
                found="no room for it under the bound, or under what its journal may take",
                todo="Raise PLANCACHE_MAX_BYTES, or prune the cache.",
            )
        return table

    def _to_measure_again(self) -> set[int]:
        """Of an earlier tuning that is gone on with: what the others are judged by, and the fastest, by one clock."""
        table = self._state.table
        measured = [place for place, one in enumerate(table.candidates) if one.status == OK]
        fastest = sorted(measured, key=lambda place: table.candidates[place].median or 0.0)[:_RIVALS]
        return {*fastest, *(one for one in (table.first, table.chosen) if one is not None)}

    def _compare_the_fastest(self) -> None:
        """Time the first choice and the fastest in turns: the clocks were others when each was run."""
        table, first = self._state.table, self._judged
        ready = {one.place for one in self._fastest}
        if first is None or self._operands is None or table.chosen not in ready or ready == {first.place}:
            return
        limit = _CLOSE * self._median(self._fastest[0])
        running = [first, *(one for one in self._fastest if one is not first and self._median(one) <= limit)]
        timings: dict[int, list[Timing]] = {one.place: [] for one in running}
        for one in [*running] * _TURNS:
            if one not in running:
                continue
            self._said(one.place, table)  # so that it is this one that did not come back
            try:
                timings[one.place].append(self._runner.time(one.graph, self._operands, self._outputs))
            except RunError as error:
                running.remove(one)
                table.candidates[one.place].status, table.candidates[one.place].detail = FAILED, str(error)
                self._disown(one.place)
                if error.fault:
                    raise
        for one in running:
            taken = timings[one.place]
            table.candidates[one.place].median = round(min(timing.median for timing in taken), 3)
            table.candidates[one.place].best = round(min(timing.best for timing in taken), 3)
        # The first choice where there is nothing to gain. Where a rival failed, the next ones were not looked at.
        rest = self._fastest if len(running) < len(timings) else []
        self._choose([*running, *(one for one in rest if one not in running)])

    def _choose(self, among: Sequence[_Ready]) -> None:
        """The fastest is the one that is kept."""
        best = min(among, key=self._median, default=None)
        self._state.table.chosen = None if best is None else best.place
        self._state.best = None if best is None else best.plan

    def _disown(self, place: int) -> None:
        """A plan that is of no use after all is neither served any longer nor judges others."""
        table, state = self._state.table, self._state
        self._fastest = [one for one in self._fastest if one.place != place]
        if place == table.first:
            self._judge = self._judged = table.first = None
        if place != table.chosen:
            return
        self._choose([one for one in (self._judged, *self._fastest) if one is not None])
        if state.best is None and state.record is not None:
            self._cache.store.discard(self._wanted.key.hash, Route.TUNED, state.record)
            state.record = None

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
                listed[place] = replace(old, status=WAITING) if old.status == NO_ROOM else old
        if earlier.best is None or earlier.table.chosen is None:
            return _State(table, earlier.record)
        if not same:
            return self._beginning_with(earlier, table)
        table.seconds = earlier.table.seconds
        table.first = _place(listed, earlier.table, earlier.table.first)
        table.chosen = _place(listed, earlier.table, earlier.table.chosen)
        unfit = [listed[place].name in self._lost for place in (table.first, table.chosen) if place is not None]
        if table.first is None or table.chosen is None or any(unfit):  # the heuristics list others now, or it was lost
            return _State(Tuning([replace(one, status=WAITING) for one in listed]), earlier.record)
        return _State(table, earlier.record, earlier.best)

    def _beginning_with(self, earlier: _State, table: Tuning) -> _State:
        """All is measured anew, and until something is faster, the plan that there was stays."""
        assert earlier.table.chosen is not None
        old = earlier.table.candidates[earlier.table.chosen]
        place, limit = _place(table.candidates, earlier.table, earlier.table.chosen), self._limits.workspace
        if place is None or old.name in self._lost or (limit is not None and (old.workspace or 0) > limit):
            return _State(table, earlier.record)
        table.candidates[place] = replace(old, status=WAITING)
        table.chosen = place
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
                self._disown(place)
                return
            self._measure(place, candidate, built, seconds)
        except BuilderError:
            raise
        except RunError as error:
            candidate.status, candidate.detail = NO_ROOM if error.memory else FAILED, str(error)
            self._disown(place)
            if error.fault or self._operands is None:  # then no other candidate can be run either
                raise
        except (UnkeptPlanError, Exception) as error:  # whatever cuDNN says of a plan that it cannot build
            candidate.status, candidate.detail = FAILED, one_line(error)
            self._disown(place)
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
                self._wrong(place, candidate, str(found))
                return
        timing = runner.time(built, made, self._outputs)
        found = runner.compare(made, self._expected, self._outputs)
        if not found.right:  # it adds to what is there, or needs a workspace that nobody has used
            self._wrong(place, candidate, f"after many runs {found}")
            return
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

    def _wrong(self, place: int, candidate: Candidate, detail: str) -> None:
        """Whatever a wrong plan has written elsewhere, the next one is to be judged by the same inputs and outputs."""
        candidate.status, candidate.detail = WRONG, detail
        self._disown(place)
        assert self._operands is not None
        made = self._operands
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

    def _keep(self) -> bool:
        """Write the table, in the record of the best plan so far; whether nothing is left to write."""
        state, store = self._state, self._cache.store
        if state.best is None:
            return True
        wanted = replace(self._wanted, route=Route.TUNED)
        row, record = stored.encode(wanted, state.best, self._cache._signing_key, state.table.document())
        if not store.put(row, record, state.record):
            # Somebody else has put another one there (an import, or a tuning that could not lock): this one is newer.
            state.record = store.get(row.key, Route.TUNED, use=False)
            if not store.put(row, record, state.record):
                return False
        state.record = record
        return True


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
