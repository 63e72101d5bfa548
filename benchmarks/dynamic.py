"""200 lengths of one layer with dynamic shapes, each in a fresh process: `python -m benchmarks.dynamic`.

Without plancache in three ways: a plan for each length, as a static graph (20 lengths, and what 200 would take); one
kernel cache for the process, as cuDNN's manual has it; and with plancache on an empty cache, and on the warm one.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile

from benchmarks.harness import machine

LENGTHS = 200
_STATIC = 20

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


def job(how: str, directory: str, count: int = LENGTHS) -> tuple[list[float], int]:
    """Seconds to make each length's graph ready in a fresh process, and how often something was compiled."""
    command = [sys.executable, "-c", _JOB, how, directory, str(count)]
    done = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return done["seconds"], done["compiled"]


def main() -> None:
    """Print the table."""
    print(machine())
    print(f"{LENGTHS} lengths{'':<25}{'all s':>9}{'first ms':>10}{'others ms':>11}{'compiled':>10}")
    with tempfile.TemporaryDirectory(prefix="plancache-bench-") as directory:
        seconds, compiled = job("static", directory, _STATIC)
        seconds, compiled = seconds + [statistics.median(seconds[1:])] * (LENGTHS - _STATIC), compiled * 10
        _row("static, a plan each (from 20)", seconds, compiled)
        _row("dynamic, a kernel cache", *job("kernel cache", directory))
        _row("plancache, cold", *job("plancache", directory))
        _row("plancache, warm", *job("plancache", directory))


def _row(name: str, seconds: list[float], compiled: int) -> None:
    first, others = 1e3 * seconds[0], 1e3 * statistics.median(seconds[1:])
    print(f"{name:<36}{sum(seconds):>9.2f}{first:>10.0f}{others:>11.1f}{compiled:>10}")


if __name__ == "__main__":
    main()
