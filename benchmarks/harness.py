"""What every benchmark shares: timing in turns, tables, bounds, and a result that says what was measured on what.

A benchmark module has `NAME`, and `run(quick)` which gives its tables and checks. Ratios are made pair by pair: of one
round, in which all that is compared took turns, so that whatever else the machine does hits both sides; what is
reported is the median of the rounds' ratios. `quick` is for the gate: fewer rounds, the same comparisons.
"""

from __future__ import annotations

import json
import math
import os
import platform
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
_PACKAGES = ("nvidia-cudnn-frontend", "diskcache", "cuda-core", "jax", "msgpack", "zstandard")


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: the median, what 99 of 100 calls stay under, and the median of each round."""

    median: float
    p99: float
    rounds: tuple[float, ...]

    @classmethod
    def of(cls, rounds: Sequence[Sequence[float]]) -> Timing:
        """The timing of calls, round by round."""
        every = sorted(seconds for one in rounds for seconds in one)
        worst = every[math.ceil(0.99 * len(every)) - 1]
        return cls(statistics.median(every), worst, tuple(statistics.median(one) for one in rounds))

    def against(self, other: Timing) -> float:
        """How many times as long as the other it takes, pair by pair."""
        return ratio(self.rounds, other.rounds)


def ratio(ours: Iterable[float], theirs: Iterable[float]) -> float:
    """The median of the ratios of pairs."""
    return statistics.median(one / other for one, other in zip(ours, theirs, strict=True))


def measure_in_turns(
    calls: Mapping[str, Callable[[], object]], rounds: int, times: int, warm_up: int = 1
) -> dict[str, Timing]:
    """Time several calls against each other, round by round; what a call gives is freed when its clock has stopped."""
    for call in calls.values():
        for _ in range(warm_up):
            call()
    taken: dict[str, list[list[float]]] = {name: [] for name in calls}
    for order in in_turns(list(calls), rounds):
        for name in order:
            taken[name].append([clocked(calls[name]) for _ in range(times)])
    return {name: Timing.of(each) for name, each in taken.items()}


def clocked(call: Callable[[], object]) -> float:
    """Seconds that a call takes, without those of freeing what it gives."""
    started = time.perf_counter()
    given = call()
    seconds = time.perf_counter() - started
    del given
    return seconds


def in_turns(names: Sequence[str], rounds: int) -> Iterable[Sequence[str]]:
    """The names in the order of each round: every one is first in its turn."""
    for number in range(rounds):
        start = number % len(names)
        yield [*names[start:], *names[:start]]


@dataclass(frozen=True)
class Column:
    """A column of numbers, and with how many digits they are written."""

    title: str
    digits: int = 0


@dataclass(frozen=True)
class Table:
    """Rows of a label and numbers; None is a gap."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[tuple[str, Sequence[float | None]]]


@dataclass(frozen=True)
class Check:
    """A ratio, and the bound that it must keep: at most, or with `least` at least. Without a bound it is only told."""

    what: str
    ratio: float
    bound: float
    least: bool = False

    @property
    def kept(self) -> bool:
        """Whether the bound is kept."""
        return self.ratio >= self.bound if self.least else self.ratio <= self.bound


@dataclass(frozen=True)
class Rank:
    """Among what a user would pick instead: who is first at something, and how many times that plancache takes."""

    what: str
    first: str
    times: float

    @classmethod
    def of(cls, what: str, rounds: Mapping[str, Sequence[float]], ours: str = "plancache") -> Rank:
        """The rank of `ours` among seconds by name and round; what was measured once goes with every round."""
        pairs = {
            name: ratio(rounds[ours], theirs if len(theirs) > 1 else [*theirs] * len(rounds[ours]))
            for name, theirs in rounds.items()
        }
        first = max(pairs, key=lambda name: (pairs[name], name == ours))
        return cls(what, first, pairs[first])


@dataclass
class Result:
    """What a benchmark has measured."""

    tables: list[Table] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    ranks: list[Rank] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def child(source: str, *arguments: object, **options: Any) -> Any:
    """What a fresh process of Python prints, as JSON."""
    command = [sys.executable, "-c", source, *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment(), **options)
    return json.loads(done.stdout)


def at_once(commands: Sequence[Sequence[str]]) -> list[str]:
    """Start Python with each of these arguments, let all go on at once when every one is ready; gives their last lines.

    Ready is who has printed a line; it waits for one on its standard input.
    """
    pipe = subprocess.PIPE
    running = [
        subprocess.Popen([sys.executable, *one], stdin=pipe, stdout=pipe, text=True, env=environment())
        for one in commands
    ]
    for process in running:
        assert process.stdout is not None
        process.stdout.readline()
    for process in running:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    return [process.communicate()[0].splitlines()[-1] for process in running]


_COUNT = """
import sys, time
print("ready", flush=True)
sys.stdin.readline()
end, done = time.perf_counter() + float(sys.argv[1]), 0
while time.perf_counter() < end:
    done += sum(range(1000)) > 0
print(done)
"""


def two_at_all(rounds: int = 3, seconds: float = 0.2) -> float:
    """How many times as much two processes that only count do at once as one does alone, on this machine, now.

    It is less than 2 where cores are busy or are two threads of one. What two processes of ours do is judged by it.
    """
    one = ["-c", _COUNT, str(seconds)]
    taken = [[sum(map(int, at_once([one] * count))) for count in (1, 2)] for _ in range(rounds)]
    # More than 2 is a machine that has become faster meanwhile.
    return min(2.0, statistics.median(both / alone for alone, both in taken))


def environment() -> dict[str, str]:
    """This process's environment without settings of plancache's.

    Bytecode is kept, whatever is set here: what is installed comes with it, and is not compiled in each process.
    """
    left_out = ("PLANCACHE_", "PYTHONDONTWRITEBYTECODE")
    return {name: value for name, value in os.environ.items() if not name.startswith(left_out)}


def machine() -> str:
    """Processor, cores, the file system of temporary directories and versions, in one line."""
    import cudnn

    import plancache
    from plancache.store.directory import filesystem

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())
    versions = [f"Python {platform.python_version()}", f"plancache {plancache.__version__}"]
    versions += [f"cuDNN {cudnn.backend_version_string()}", f"SQLite {sqlite3.sqlite_version}"]
    for package in _PACKAGES:
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    files = filesystem(Path(tempfile.gettempdir()))
    return f"{len(os.sched_getaffinity(0))} cores of {cpu}; files on {files}; {', '.join(versions)}"


def saved(name: str, result: Result, seconds: float) -> dict[str, Any]:
    """A result as it is kept in a file."""
    about = {"command": f"python -m benchmarks.{name}", "machine": machine(), "date": date.today().isoformat()}
    return {**about, "seconds": round(seconds, 1), **asdict(result)}


def markdown(table: Mapping[str, Any]) -> str:
    """A kept table in Markdown, aligned so that it can be read as it is."""
    titles = [table["title"], *(column["title"] for column in table["columns"])]
    lines = [titles]
    for label, numbers in table["rows"]:
        written = [
            "" if number is None else f"{number:,.{column['digits']}f}"
            for number, column in zip(numbers, table["columns"], strict=True)
        ]
        lines.append([label, *written])
    widths = [max(len(line[place]) for line in lines) for place in range(len(titles))]

    def row(cells: Sequence[str]) -> str:
        first = cells[0].ljust(widths[0])
        return (
            "| " + " | ".join([first, *(cell.rjust(w) for cell, w in zip(cells[1:], widths[1:], strict=True))]) + " |"
        )

    rule = "|" + "-" * (widths[0] + 2) + "|" + "".join("-" * (width + 1) + ":|" for width in widths[1:])
    return "\n".join([row(titles), rule, *map(row, lines[1:])])


def checks_table(checks: Sequence[Mapping[str, Any]]) -> str:
    """The kept checks in Markdown."""
    rows = [
        f"| {one['what']} | {one['ratio']:.2f} | {'≥' if one['least'] else '≤'} {one['bound']:g} "
        f"| {'yes' if Check(**one).kept else '**no**'} |"
        for one in checks
    ]
    return "\n".join(["| ratio | measured | bound | kept |", "|---|---:|---:|---|", *rows])


def main(name: str, run: Callable[[bool], Result]) -> None:
    """Run a benchmark, print it, and keep its result: what `python -m benchmarks.NAME` does."""
    started = time.perf_counter()
    kept = saved(name, run("--quick" in sys.argv), time.perf_counter() - started)
    print(f"{kept['machine']}, {kept['date']}, {kept['seconds']} s\n")
    for table in kept["tables"]:
        print(markdown(table), end="\n\n")
    for note in kept["notes"]:
        print(f"- {note}")
    print(checks_table(kept["checks"]), flush=True)
    if "--quick" not in sys.argv:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{name}.json").write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
    elif not all(check.kept for check in (Check(**one) for one in kept["checks"])):
        sys.exit(1)
