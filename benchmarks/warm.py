"""Filling ahead of time, with no GPU: `python -m benchmarks.warm`.

Bounds of the project: two workers build 1.8 × what one builds, on two cores; 10,000 graph documents of which everything
is there are looked up in less than 10 s; the parent's memory stays flat.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import cudnn

import plancache
from benchmarks.harness import machine
from plancache.crew import Crew, Job, completed
from plancache.filler import Report
from plancache.store import records

PLANS, DOCUMENTS, ROUNDS = 24, 10_000, 2


def declare(_handle: Any, m: int) -> Any:
    """A matrix product with ReLU, of a size of its own."""
    graph = plancache.pygraph(io_data_type=cudnn.data_type.HALF, compute_data_type=cudnn.data_type.FLOAT)
    a = graph.tensor(dim=[1, m, 64], stride=[m * 64, 64, 1])
    b = graph.tensor(dim=[1, 64, 128], stride=[64 * 128, 128, 1])
    graph.relu(graph.matmul(a, b)).set_output(True)
    return graph


def builder(first: int, count: int) -> Any:
    """A cached builder of so many graphs, each with another length."""
    return plancache.cached(cases=[(8 * (first + number),) for number in range(count)])(declare)


def fill(home: str, executor: Any, cases: Any) -> Report:
    """Fill a cache of its own by one route, so that every graph is one plan."""
    with tempfile.TemporaryDirectory(dir=home) as directory, plancache.open(directory, mode="read-write") as cache:
        report = plancache.warm([cases], ["h200"], executor, cache=cache, routes=["deviceless"])
        assert report.counts == {"built": len(cases.cases)}, report.counts
        return report


def workers(home: str) -> None:
    """Plans per second of one and two workers that have started already, in turns."""
    crews = {count: Crew(count) for count in (1, 2)}
    best, busy = dict.fromkeys(crews, 0.0), dict.fromkeys(crews, 0.0)
    first = 1
    for count, crew in crews.items():  # cuDNN is loaded, and has built once
        list(completed((Job(0.5, None) for _ in range(count)), time.sleep, crew, count))
        fill(home, _Window(crew, count), builder(first, 2 * count))
        first += 2 * count
    for _ in range(ROUNDS):
        for count, crew in crews.items():
            report = fill(home, _Window(crew, count), builder(first, PLANS))
            first += PLANS
            best[count] = max(best[count], PLANS / report.seconds)
            busy[count] = max(busy[count], sum(line.seconds for line in report.lines) / (count * report.seconds))
    for crew in crews.values():
        crew.shutdown()
    print(f"1 worker             {best[1]:>7.2f} plans/s, building {100 * busy[1]:.0f} % of the time")
    ratio = best[2] / best[1]
    print(f"2 workers            {best[2]:>7.2f} plans/s, building {100 * busy[2]:.0f} %, {ratio:.2f} x (bound 1.8)")


class _Window:
    """A crew that lives longer than one fill."""

    def __init__(self, crew: Crew, jobs: int) -> None:
        self._crew = crew
        self.jobs = jobs

    def submit(self, call: Callable[..., Any], /, *args: Any) -> Any:
        return self._crew.submit(call, *args)


def copied(cache: Any, count: int) -> None:
    """Store the one plan that is there under the keys of `count` other graphs: what is looked up is not loaded."""
    (listed,) = cache.rows()
    _, fields = records.decode(cache.store.get(listed.row.key, listed.row.route))
    lowest = listed.row.driver
    with plancache.target(plancache.device("h200").with_driver(lowest)):
        for number in range(count):
            key = cache.key(declare(None, 8 * (number + 1)))
            row = replace(listed.row, key=key.hash, graph=key.graph)
            cache.store.put(row, records.encode(row, fields))
            if number % 1000 == 0:
                cache.store.maintain()


def peak() -> float:
    """The most memory that this process has had, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def skipping(home: str) -> None:
    """Everything is there: seconds, and what the parent's memory grew by."""
    with plancache.open(Path(home, "skip"), mode="read-write") as cache:
        plancache.warm([builder(1, 1)], ["h200"], cache=cache, jobs=1, routes=["deviceless"])
        copied(cache, DOCUMENTS)
        plancache.warm([builder(1, 100)], ["h200"], cache=cache, routes=["deviceless"])
        before = peak()
        report = plancache.warm([builder(1, DOCUMENTS)], ["h200"], cache=cache, routes=["deviceless"])
        assert report.counts == {"found": DOCUMENTS}, report.counts
        print(f"10,000 plans found   {report.seconds:>7.2f} s (bound 10)")
        print(f"the parent grew by   {peak() - before:>7.1f} MiB of {peak():.0f}, its report of 10,000 lines included")
        rewarmed = plancache.rewarm(Path(home, "skip"), cache=cache, routes=["deviceless"])
        assert rewarmed.counts == {"found": DOCUMENTS}, rewarmed.counts
        print(f"the same by rewarm   {rewarmed.seconds:>7.2f} s")


def main() -> None:
    """Print everything."""
    print(machine())
    with tempfile.TemporaryDirectory(prefix="plancache-bench-") as home:
        if "skip" not in sys.argv[1:]:
            workers(home)
        skipping(home)


if __name__ == "__main__":
    main()
