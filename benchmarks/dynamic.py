"""200 lengths of one layer with dynamic shapes, each in a fresh process: `python -m benchmarks.dynamic`.

Without plancache in three ways: a plan for each length, as a static graph (10 lengths, and what all would take); one
kernel cache for the process, as cuDNN's manual has it; and with plancache on an empty cache, and on the warm one.
"""

from __future__ import annotations

import statistics
import tempfile

from benchmarks.harness import Check, Column, Rank, Result, Table, child, main

LENGTHS = 200
_STATIC = 10
BOUND_WARM = 0.4
BOUND_EMPTY = 3.0  # each length's plan is serialized, packed and stored besides

_JOB = """
import json, sys, time
import cudnn, plancache
from examples import decode_lengths as example

how, directory, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
device = plancache.device("h200")
kernels = cudnn.create_kernel_cache() if how == "kernel cache" else None
seconds, compiled = [], 0
with plancache.target(device):
    cache = plancache.open(directory)
    for length in list(example.LENGTHS)[:count]:
        started = time.perf_counter()
        graph, _ = example.up_projection.function(None, length)
        if how == "plancache":
            compiled += cache.build(graph).source == "built"
        else:
            arguments = graph._cpp_graph_kwargs
            arguments["is_dynamic_shape_enabled"] = kernels is not None
            if kernels is not None:
                arguments["kernel_cache"] = kernels
            graph.build()
            compiled += kernels is None
        seconds.append(time.perf_counter() - started)
    if kernels is not None:
        compiled = kernels.size()
    cache.close()
print(json.dumps({"seconds": seconds, "compiled": compiled}))
"""


def job(how: str, directory: str, count: int) -> tuple[list[float], int]:
    """Seconds to make each length's graph ready in a fresh process, and how often something was compiled."""
    done = child(_JOB, how, directory, count)
    return done["seconds"], done["compiled"]


def run(quick: bool) -> Result:
    """Each way once, as a process of its own; the static graphs are a few, and what all would take."""
    count = LENGTHS // 4 if quick else LENGTHS
    rows = []
    with tempfile.TemporaryDirectory(prefix="plancache-bench-") as directory:
        static, _ = job("static", directory, _STATIC)
        ways = {"static graphs, a plan each": (static + [statistics.median(static[1:])] * (count - _STATIC), count)}
        ways["dynamic shapes, a kernel cache"] = job("kernel cache", directory, count)
        ways["plancache, empty"] = job("plancache", directory, count)
        ways["plancache, warm"] = job("plancache", directory, count)
    for name, (seconds, compiled) in ways.items():
        others = sorted(seconds[1:])
        worst = 1e3 * others[int(0.99 * len(others))]
        rows.append((name, [sum(seconds), 1e3 * seconds[0], 1e3 * statistics.median(others), worst, compiled]))
    columns = [Column("all, s", 1), Column("first, ms"), Column("others, ms", 1), Column("p99", 1), Column("compiled")]
    total = {name: sum(seconds) for name, (seconds, _) in ways.items()}
    warm, cold, bare = (
        total[name] for name in ("plancache, warm", "plancache, empty", "dynamic shapes, a kernel cache")
    )
    checks = [
        Check("warm against cuDNN's own kernel cache", warm / bare, BOUND_WARM),
        Check("empty against cuDNN's own kernel cache", cold / bare, BOUND_EMPTY),
    ]
    persistent = {"plancache": [warm], **{name: [total[name]] for name in total if not name.startswith("plancache")}}
    rank = Rank.of(f"{count} lengths of a layer", persistent)
    return Result([Table(f"{count} lengths", columns, rows)], checks, [rank])


if __name__ == "__main__":
    main("dynamic", run)
