"""A hit in memory, against what a user would write: `python -m benchmarks.memory`.

`graph_cache` is a drop-in for cuDNN's. `cached` besides binds the arguments, and keeps graphs apart by thread, device
and target, which neither of its peers does.
"""

from __future__ import annotations

import functools
import statistics
import tempfile
import timeit
from typing import Any

import cudnn

import plancache
from benchmarks.harness import Check, Column, Rank, Result, Table, in_turns, main, ratio

NUMBER, ROUNDS = 20_000, 15
BOUNDS = {"plancache.cached": 10.0, "plancache.cached(key=...)": 3.5, "plancache.graph_cache": 1.5}


def declare(_handle: Any, m: int, n: int) -> Any:
    """A matrix product for the first device that plancache ships."""
    device = plancache.device("h200")
    graph = cudnn.pygraph(
        io_data_type=cudnn.data_type.HALF,
        compute_data_type=cudnn.data_type.FLOAT,
        device_property=device.native,
        sm_version=device.sm_version,
    )
    a = graph.tensor(dim=[1, m, 64], stride=[m * 64, 64, 1])
    b = graph.tensor(dim=[1, 64, n], stride=[64 * n, n, 1])
    c = graph.matmul(a, b)
    c.set_output(True)
    return graph, (a, b, c)


def key(_handle: Any, m: int, n: int) -> tuple[int, int]:
    """What the calls differ in."""
    return m, n


def run(quick: bool) -> Result:
    """Rounds that take turns; of each call a round's mean, since one takes less than the clock does."""
    rounds = 7 if quick else ROUNDS
    with tempfile.TemporaryDirectory(prefix="plancache-bench-") as home, plancache.open(home) as cache:
        calls = {
            "plancache.cached": plancache.cached(cache=cache)(declare),
            "plancache.cached(key=...)": plancache.cached(cache=cache, key=key)(declare),
            "plancache.graph_cache": plancache.graph_cache(key)(declare),
            "cudnn.graph_cache": cudnn.graph_cache(key)(declare),
            "functools.lru_cache": functools.lru_cache(declare),
        }
        for call in calls.values():
            call(None, 32, 64)
        taken: dict[str, list[float]] = {name: [] for name in calls}
        for order in in_turns(list(calls), rounds):
            for name in order:
                taken[name].append(timeit.timeit(lambda call=calls[name]: call(None, 32, 64), number=NUMBER) / NUMBER)
    peer = taken["cudnn.graph_cache"]
    rows = [
        (f"`{name}`", [1e6 * statistics.median(each), 1e6 * max(each), ratio(each, peer)])
        for name, each in taken.items()
    ]
    checks = [Check(f"`{name}` against `cudnn.graph_cache`", ratio(taken[name], peer), BOUNDS[name]) for name in BOUNDS]
    columns = [Column("µs", 2), Column("worst round", 2), Column("× `cudnn.graph_cache`", 1)]
    peers = {f"`{name}`": taken[name] for name in ("cudnn.graph_cache", "functools.lru_cache")}
    ranks = [
        Rank.of(f"a hit in memory, `{name}`", {**peers, "plancache": taken[name]})
        for name in ("plancache.cached", "plancache.graph_cache")
    ]
    return Result([Table("a hit in memory", columns, rows)], checks, ranks)


if __name__ == "__main__":
    main("memory", run)
