"""The store against what a user would pick instead: put and get, two processes at once, at a cap.

`python -m benchmarks.store`; the packages of the dependency group `bench` are the peers.
"""

from __future__ import annotations

import itertools
import random
import statistics
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from benchmarks.harness import (
    Check,
    Column,
    Rank,
    Result,
    Table,
    Timing,
    at_once,
    in_turns,
    main,
    measure_in_turns,
    ratio,
    two_at_all,
)
from benchmarks.peers import BOUNDED, PEERS, RAW, REOPENED, installed

SIZES = (4 << 10, 64 << 10, 200 << 10)
SIZE, CAP = 64 << 10, 16 << 20
# put, get against raw SQLite with a SHA-256. Of a small put much is the columns that listings and eviction
# need, and looking at the files before.
BOUNDS = {4 << 10: (5.0, 1.7), 64 << 10: (2.5, 1.5), 200 << 10: (2.5, 1.5)}
# At least: what two readers get, and a reader beside a writer, of what they get from raw SQLite in the same round.
BOUND_TWO_READERS, BOUND_WITH_WRITER = 0.7, 0.6
BOUND_CAP = 3.0
BOUND_REOPEN = 8.0  # of raw SQLite's, which looks at neither owner, modes nor schema


def against_peers(size: int, quick: bool, result: Result) -> None:
    """Put and get of every peer in turns."""
    puts: dict[str, Callable[[], object]] = {}
    gets: dict[str, Callable[[], object]] = {}
    rounds, times = (10, 20) if quick else (20, 40)
    with ExitStack() as stack:
        for name, make in installed(quick).items():
            home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="plancache-bench-")))
            put, get = make(home, size)
            numbers, order = itertools.count(), random.Random(1)
            puts[name] = lambda put=put, numbers=numbers: put(next(numbers))
            gets[name] = lambda get=get, order=order: get(order.randrange(rounds * times))
        putting = measure_in_turns(puts, rounds, times)
        getting = measure_in_turns(gets, rounds, 3 * times)
    rows = []
    for name, put in putting.items():
        get = getting[name]
        numbers = [*_micros(put), put.against(putting[RAW]), *_micros(get), get.against(getting[RAW])]
        rows.append((name, numbers))
    columns = [
        Column("put, µs"),
        Column("p99"),
        Column("× raw", 2),
        Column("get, µs"),
        Column("p99"),
        Column("× raw", 2),
    ]
    result.tables.append(Table(f"{size >> 10} KB", columns, rows))
    ours = putting["plancache"].against(putting[RAW]), getting["plancache"].against(getting[RAW])
    for what, measured, bound in zip(("put", "get"), ours, BOUNDS[size], strict=True):
        result.checks.append(Check(f"{size >> 10} KB: {what} against raw SQLite", measured, bound))
    # Raw SQLite is the floor that the store stands on, and no peer: nothing bounds it, lists it or migrates it.
    for what, timing in (("put", putting), ("get", getting)):
        peers = {name: one.rounds for name, one in timing.items() if name != RAW}
        result.ranks.append(Rank.of(f"{what} of {size >> 10} KB", peers))


def _micros(timing: Timing) -> list[float]:
    return [1e6 * timing.median, 1e6 * timing.p99]


_PROCESS = """
import pathlib, random, sys, time
from benchmarks.peers import PEERS
name, home, what, seconds = sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3], float(sys.argv[4])
put, get = PEERS[name](home, 64 << 10)
order, number = random.Random(what), 1_000_000
get(0)
print("ready", flush=True)
sys.stdin.readline()
end, done = time.perf_counter() + seconds, 0
while time.perf_counter() < end:
    for _ in range(20):
        if what == "write":
            put(number + done)
        else:
            get(order.randrange(500))
        done += 1
print(done)
"""


def gets_and_puts(name: str, home: Path, what: tuple[str, ...], seconds: float) -> list[float]:
    """How much each of several processes does in a second, all at once."""
    told = at_once([["-c", _PROCESS, name, str(home), one, str(seconds)] for one in what])
    return [int(done) / seconds for done in told]


def processes(quick: bool, result: Result) -> None:
    """One reader, two readers, and a reader beside a writer; in each round every peer, and what only counts."""
    names = ("plancache", RAW) if quick else tuple(installed(quick))
    ways = {"one": ("a",), "two": ("a", "b"), "beside": ("a", "write")}
    taken: dict[str, dict[str, list[list[float]]]] = {name: {way: [] for way in ways} for name in names}
    at_all = []
    with ExitStack() as stack:
        homes = {name: _filled(name, 500, stack) for name in names}
        for order in in_turns(names, 3):
            at_all.append(two_at_all())
            for name in order:
                for way, what in ways.items():
                    taken[name][way].append(gets_and_puts(name, homes[name], what, 0.7))
    alone = {name: [one for (one,) in each["one"]] for name, each in taken.items()}
    two = {name: [sum(both) for both in each["two"]] for name, each in taken.items()}
    beside = {name: [reader for reader, _ in each["beside"]] for name, each in taken.items()}
    rows = []
    for name, each in taken.items():
        writes = statistics.median(writer for _, writer in each["beside"])
        numbers = [statistics.median(alone[name]), ratio(two[name], alone[name])]
        rows.append((name, [*numbers, ratio(beside[name], alone[name]), writes]))
    columns = [Column("gets a second"), Column("two readers, ×", 2), Column("beside a writer, ×", 2)]
    result.tables.append(Table("64 KB, processes at once", [*columns, Column("its puts a second")], rows))
    result.notes.append(
        f"Two processes that only count do {statistics.median(at_all):.2f} × what one does, here and now."
    )
    result.checks += [
        Check(f"{what}, against the same with raw SQLite", ratio(gets["plancache"], gets[RAW]), bound, least=True)
        for what, gets, bound in (
            ("gets of two readers at once", two, BOUND_TWO_READERS),
            ("gets of a reader beside a writer", beside, BOUND_WITH_WRITER),
        )
    ]
    if not quick:
        seconds = {name: [1 / gets for gets in each] for name, each in two.items() if name != RAW}
        result.ranks.append(Rank.of("gets of 64 KB by two readers at once", seconds))


def _filled(name: str, count: int, stack: ExitStack) -> Path:
    """A directory of a peer's with so many values, which lives as long as the stack."""
    home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="plancache-bench-")))
    put, _ = PEERS[name](home, SIZE)
    for number in range(count):
        put(number)
    return home


def at_the_cap(quick: bool, result: Result) -> None:
    """Puts into stores at their cap and far below it, all in turns."""
    names = ("plancache",) if quick else [name for name in installed(quick) if name in BOUNDED]
    calls: dict[str, Callable[[], object]] = {}
    with ExitStack() as stack:
        for name in names:
            for what, cap in (("below", None), ("at", CAP)):
                home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="plancache-bench-")))
                put, _ = PEERS[name](home, SIZE, cap)
                numbers = itertools.count()
                calls[f"{name} {what}"] = lambda put=put, numbers=numbers: put(next(numbers))
        timing = measure_in_turns(calls, rounds=10, times=20, warm_up=CAP // SIZE + 20)
    rows = []
    for name in names:
        at, below = timing[f"{name} at"], timing[f"{name} below"]
        rows.append((name, [*_micros(below), *_micros(at), at.against(below)]))
    columns = [Column("put, µs"), Column("p99"), Column("at the cap, µs"), Column("p99"), Column("×", 2)]
    result.tables.append(Table("64 KB, a cap of 16 MB", columns, rows))
    against = timing["plancache at"].against(timing["plancache below"])
    result.checks.append(Check("a put at the cap against one below it", against, BOUND_CAP))
    if not quick:
        result.ranks.append(Rank.of("put of 64 KB at the cap", {name: timing[f"{name} at"].rounds for name in names}))


def reopening(quick: bool, result: Result) -> None:
    """Opening a store that is there, and one get."""
    with ExitStack() as stack:
        calls: dict[str, Callable[[], object]] = {}
        for name in ("plancache", RAW) if quick else installed(quick):
            home = _filled(name, 200, stack)
            calls[name] = lambda again=REOPENED[name], home=home: again(home)
        timing = measure_in_turns(calls, rounds=10, times=10 if quick else 30)
    rows = [(name, [1e3 * one.median, 1e3 * one.p99, one.against(timing[RAW])]) for name, one in timing.items()]
    columns = [Column("ms", 2), Column("p99", 2), Column("× raw", 2)]
    result.tables.append(Table("64 KB, opened again and one get", columns, rows))
    against = timing["plancache"].against(timing[RAW])
    result.checks.append(Check("opening again against raw SQLite", against, BOUND_REOPEN))
    if not quick:
        result.ranks.append(Rank.of("opening again", {name: one.rounds for name, one in timing.items() if name != RAW}))


def run(quick: bool) -> Result:
    """All tables."""
    result = Result()
    reopening(quick, result)  # first: whoever closes a database waits for what others have written before (seen: 2 ms)
    for size in (64 << 10,) if quick else SIZES:
        against_peers(size, quick, result)
    at_the_cap(quick, result)
    processes(quick, result)
    return result


if __name__ == "__main__":
    main("store", run)
