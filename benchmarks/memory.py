"""A hit in memory, against what a user would write: `python -m benchmarks.memory`.

Bound of the project: `cached` takes at most 3 µs, and with the same key function at most 3 × `cudnn.graph_cache`.
"""

from __future__ import annotations

import functools
import tempfile
import timeit
from typing import Any

import cudnn

import plancache
from benchmarks.harness import machine

NUMBER, ROUNDS = 20_000, 15


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


def main() -> None:
    """Print the table: the best of rounds that take turns, since what is measured is Python alone."""
    print(machine())
    with tempfile.TemporaryDirectory(prefix="plancache-bench-") as home, plancache.open(home) as cache:
        calls = {
            "plancache.cached": plancache.cached(cache=cache)(declare),
            "plancache.cached(key=...)": plancache.cached(cache=cache, key=key)(declare),
            "plancache.graph_cache": plancache.graph_cache(key)(declare),
            "cudnn.graph_cache": cudnn.graph_cache(key)(declare),
            "functools.lru_cache": functools.lru_cache(declare),
        }
        best = dict.fromkeys(calls, float("inf"))
        for call in calls.values():
            call(None, 32, 64)
        for _ in range(ROUNDS):
            for name, call in calls.items():
                seconds = timeit.timeit(lambda call=call: call(None, 32, 64), number=NUMBER) / NUMBER
                best[name] = min(best[name], seconds)
        for name, seconds in best.items():
            print(f"{name:<28}{1e6 * seconds:>7.2f} µs{seconds / best['cudnn.graph_cache']:>7.2f} ×")


if __name__ == "__main__":
    main()
