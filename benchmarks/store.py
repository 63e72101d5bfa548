"""The store against what a user would pick instead: put and get, two processes at once, at a cap.

`python -m benchmarks.store`; the packages of the dependency group `bench` are the peers.
"""

from __future__ import annotations

import itertools
import random
import sqlite3
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
    main,
    measure_in_turns,
    ratio,
    two_at_all,
)
from benchmarks.peers import BOUNDED, FILES, PEERS, RAW, installed, key_of
from plancache.store.directory import Access
from plancache.store.plans import SqliteStore

SIZES = (4 << 10, 64 << 10, 200 << 10)
SIZE, CAP = 64 << 10, 16 << 20
# put, get against raw SQLite with a SHA-256. A small put is mostly the columns that listings and eviction need.
BOUNDS = {4 << 10: (5.0, 1.7), 64 << 10: (2.5, 1.5), 200 << 10: (2.5, 1.5)}
# At least, and each of what two processes get on the machine at all: two readers against one; and what a reader keeps
# of its own speed beside a writer.
BOUND_TWO_READERS, BOUND_WITH_WRITER = 0.8, 0.6
BOUND_CAP = 3.0
BOUND_REOPEN = 12.0  # of raw SQLite's, which looks at neither owner, modes nor schema


def against_peers(size: int, quick: bool, result: Result) -> None:
    """Put and get of every peer in turns."""
    puts: dict[str, Callable[[], object]] = {}
    gets: dict[str, Callable[[], object]] = {}
    rounds, times = (10, 20) if quick else (20, 40)
    with ExitStack() as stack:
        for name, make in installed().items():
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
    """One reader, two readers, and a reader beside a writer."""
    rows = []
    rounds = 2 if quick else 3
    for name in ("plancache",) if quick else installed():
        with tempfile.TemporaryDirectory(prefix="plancache-bench-") as home:
            put, _ = PEERS[name](Path(home), SIZE)
            for number in range(500):
                put(number)
            ways = (("a",), ("a", "b"), ("a", "write"))
            taken = [([gets_and_puts(name, Path(home), way, 0.7) for way in ways], two_at_all()) for _ in range(rounds)]
        one = statistics.median(alone for ((alone,), _, _), _ in taken)
        two = [sum(both) / alone for ((alone,), both, _), _ in taken]
        beside = [mixed[0] / alone for ((alone,), _, mixed), _ in taken]
        writes = statistics.median(mixed[1] for (_, _, mixed), _ in taken)
        at_all = [counted for _, counted in taken]
        rows.append((name, [one, *map(statistics.median, (two, beside)), writes, statistics.median(at_all)]))
        if name == "plancache":
            readers, kept = ratio(two, at_all), ratio(beside, (counted / 2 for counted in at_all))
            result.checks += [
                Check("two readers, of what two processes get at all", readers, BOUND_TWO_READERS, least=True),
                Check("a reader beside a writer, likewise", kept, BOUND_WITH_WRITER, least=True),
            ]
    columns = [Column("gets a second"), Column("two readers, ×", 2), Column("beside a writer, ×", 2)]
    columns += [Column("its puts a second"), Column("two that only count, ×", 2)]
    result.tables.append(Table("64 KB, processes at once", columns, rows))


def at_the_cap(quick: bool, result: Result) -> None:
    """Puts into a store at its cap against one far below it, in turns."""
    rows, seconds = [], dict[str, tuple[float, ...]]()
    for name in ("plancache",) if quick else [name for name in installed() if name in BOUNDED]:
        with ExitStack() as stack:
            calls: dict[str, Callable[[], object]] = {}
            for what, cap in (("below", None), ("at", CAP)):
                home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="plancache-bench-")))
                put, _ = PEERS[name](home, SIZE, cap)
                numbers = itertools.count()
                calls[what] = lambda put=put, numbers=numbers: put(next(numbers))
            timing = measure_in_turns(calls, rounds=10, times=20, warm_up=CAP // SIZE + 20)
        at, below = timing["at"], timing["below"]
        rows.append((name, [*_micros(below), *_micros(at), at.against(below)]))
        seconds[name] = at.rounds
        if name == "plancache":
            result.checks.append(Check("a put at the cap against one below it", at.against(below), BOUND_CAP))
    columns = [Column("put, µs"), Column("p99"), Column("at the cap, µs"), Column("p99"), Column("×", 2)]
    result.tables.append(Table("64 KB, a cap of 16 MB", columns, rows))
    if not quick:
        result.ranks.append(Rank.of("put of 64 KB at the cap", seconds))


def reopening(quick: bool, result: Result) -> None:
    """Opening a store that is there, and one get, against the least that SQLite and files can do."""
    with ExitStack() as stack:
        calls: dict[str, Callable[[], object]] = {}
        for name in ("plancache", RAW, FILES):
            home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="plancache-bench-")))
            put, _ = PEERS[name](home, SIZE)
            for number in range(200):
                put(number)
            calls[name] = lambda make=_reopened[name], home=home: make(home)
        timing = measure_in_turns(calls, rounds=10, times=10 if quick else 30)
    rows = [(name, [1e3 * one.median, 1e3 * one.p99, one.against(timing[RAW])]) for name, one in timing.items()]
    columns = [Column("ms", 2), Column("p99", 2), Column("× raw", 2)]
    result.tables.append(Table("64 KB, opened again and one get", columns, rows))
    against = timing["plancache"].against(timing[RAW])
    result.checks.append(Check("opening again against raw SQLite", against, BOUND_REOPEN))


def _plancache_again(home: Path) -> None:
    store = SqliteStore.at(home, Access(read_only=False))
    assert store.get(key_of(7), "native", use=False) is not None
    store.close()


def _raw_again(home: Path) -> None:
    connection = sqlite3.connect(home / "raw.sqlite3", isolation_level=None)
    connection.execute("SELECT value FROM blobs WHERE key = ?", (key_of(7),)).fetchone()
    connection.close()


_reopened: dict[str, Callable[[Path], object]] = {
    "plancache": _plancache_again,
    RAW: _raw_again,
    FILES: lambda home: (home / key_of(7)).read_bytes(),
}


def run(quick: bool) -> Result:
    """All tables."""
    result = Result()
    for size in (64 << 10,) if quick else SIZES:
        against_peers(size, quick, result)
    at_the_cap(quick, result)
    processes(quick, result)
    reopening(quick, result)
    return result


if __name__ == "__main__":
    main("store", run)
