"""1, 2, 4 and 8 processes that want one plan at once, with an empty cache and without: `python -m benchmarks.herd`."""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path

from benchmarks.harness import Check, Column, Rank, Result, Table, at_once, main, ratio

PROCESSES = (1, 2, 4, 8)
WITHOUT = (1, 8)
# All of eight processes are ready in so many times what one takes that builds without a cache.
BOUND_WALL = 2.5
BOUND_BUILDS = 1.0

# Everybody has imported and declared before anybody starts; what is timed is until the last one is ready.
_JOB = """
import json, sys, time
import plancache
from tests import graphs
device = plancache.device("h200")
device.native
with plancache.target(device):
    cache = plancache.open(sys.argv[1], mode=sys.argv[2])
    graph = graphs.conv()[0]
    print("declared", flush=True)
    sys.stdin.readline()
    started = time.monotonic()
    outcome = cache.build(graph)
    print(json.dumps([started, time.monotonic(), outcome.source in ("built", "bypassed")]))
"""


def herd(count: int, mode: str) -> tuple[float, int]:
    """Seconds until the last of `count` processes is ready, and how many have built."""
    with tempfile.TemporaryDirectory(prefix="plancache-bench-") as home:
        told = map(json.loads, at_once([["-c", _JOB, str(Path(home, "cache")), mode]] * count))
    started, ready, built = zip(*told, strict=True)
    return max(ready) - min(started), sum(built)


def run(quick: bool) -> Result:
    """Rounds in which every number of processes takes its turn, with the cache and without."""
    counts = WITHOUT if quick else PROCESSES
    turns = [(count, "read-write") for count in counts] + [(count, "off") for count in WITHOUT]
    taken: dict[tuple[int, str], list[tuple[float, int]]] = {turn: [] for turn in turns}
    for _ in range(3):
        for turn in turns:
            taken[turn].append(herd(*turn))
    alone = [seconds for seconds, _ in taken[1, "off"]]
    rows = []
    for count in counts:
        numbers: list[float | None] = []
        for mode in ("read-write", "off"):
            seconds = [one for one, _ in taken.get((count, mode), ())]
            builds = max((built for _, built in taken.get((count, mode), ())), default=None)
            numbers += [builds, statistics.median(seconds), ratio(seconds, alone)] if seconds else [None] * 3
        rows.append((f"{count}", numbers))
    columns = [Column("builds"), Column("all ready, s", 2), Column("× one build", 2)]
    columns += [Column("builds without"), Column("s", 2), Column("× one build", 2)]
    eight = [one for one, _ in taken[8, "read-write"]]
    most = max(built for count in counts for _, built in taken[count, "read-write"])
    checks = [
        Check("builds of one plan, whatever the number of processes", most, BOUND_BUILDS),
        Check("eight processes against one build without a cache", ratio(eight, alone), BOUND_WALL),
    ]
    without = [one for one, _ in taken[8, "off"]]
    rank = Rank.of("eight processes that want one plan", {"plancache": eight, "no cache": without})
    return Result([Table("processes", columns, rows)], checks, [rank])


if __name__ == "__main__":
    main("herd", run)
