"""The first plan of a fresh process from disk, against cuDNN's load of the same bytes: `python -m benchmarks.start`.

Bounds of the project: `PlanCache.build` at most 1.25 × a bare `deserialize` and 1 ms; `import plancache` at most 30 ms,
without importing cudnn; a script that uses only cuDNN ready 10 × faster in its second run with one line more.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.harness import machine

RUNS = 9
_DECLARE = """
import sys, time, json, pathlib
import cudnn, plancache
device = plancache.device("h200")
def declare():
    graph = cudnn.pygraph(io_data_type=cudnn.data_type.HALF, intermediate_data_type=cudnn.data_type.FLOAT,
                          compute_data_type=cudnn.data_type.FLOAT, device_property=device.native, sm_version=900)
    q, k, v = (graph.tensor(dim=[1, 8, 512, 128], stride=[8 * 512 * 128, 512 * 128, 128, 1]) for _ in range(3))
    o, _ = graph.sdpa(q=q, k=k, v=v, attn_scale=0.1, is_inference=True, use_causal_mask=True)
    o.set_output(True)
    return graph
def staged(graph):
    started = time.perf_counter()
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A])
    graph.check_support()
    graph.build_plans()
    return time.perf_counter() - started
"""
_BARE = """
blob = pathlib.Path(sys.argv[1], "blob").read_bytes()
declare()
started = time.perf_counter()
container = cudnn.pygraph(device_property=device.native)
container.deserialize(blob)
print(json.dumps(time.perf_counter() - started))
"""
_CACHE = """
cache = plancache.open(pathlib.Path(sys.argv[1], "cache"))
outcome = cache.build(declare())
print(json.dumps(outcome.seconds))
if outcome.source == "built":
    graph = declare()
    cache.build(graph)
    pathlib.Path(sys.argv[1], "blob").write_bytes(graph.serialize(as_bytes=True))
"""
_ENABLED = """
plancache.enable(plancache.open(pathlib.Path(sys.argv[1], "enabled")))
print(json.dumps(staged(declare())))
"""
_PLAIN = "print(json.dumps(staged(declare())))\n"
_IMPORT = """
import json, sys, time
started = time.perf_counter()
import plancache
print(json.dumps(time.perf_counter() - started))
assert "cudnn" not in sys.modules
"""


def seconds(source: str, home: str) -> float:
    """What a fresh process prints."""
    done = subprocess.run([sys.executable, "-c", source, home], capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout))


def main() -> None:
    """Print everything."""
    print(machine())
    with tempfile.TemporaryDirectory(prefix="plancache-bench-") as home:
        built = seconds(_DECLARE + _CACHE, home)
        print(f"an SDPA plan of {Path(home, 'blob').stat().st_size / 1024:.0f} KB, built in {1e3 * built:.0f} ms")
        taken: dict[str, list[float]] = {"bare": [], "cache": [], "import": [], "plain": [], "enabled": []}
        sources = {"bare": _DECLARE + _BARE, "cache": _DECLARE + _CACHE, "import": _IMPORT}
        sources |= {"plain": _DECLARE + _PLAIN, "enabled": _DECLARE + _ENABLED}
        seconds(sources["enabled"], home)
        for run in range(RUNS):
            for name, source in sources.items():
                if name != "plain" or run < 3:
                    taken[name].append(1e3 * seconds(source, home))
        median = {name: statistics.median(values) for name, values in taken.items()}
        bound = 1.25 * median["bare"] + 1
        print(f"bare deserialize            {median['bare']:>8.2f} ms")
        print(f"PlanCache.build, disk hit   {median['cache']:>8.2f} ms (bound {bound:.2f})")
        print(f"import plancache            {median['import']:>8.2f} ms (bound 30)")
        print(f"cuDNN's stages              {median['plain']:>8.1f} ms")
        ratio = median["plain"] / median["enabled"]
        print(f"the same under enable()     {median['enabled']:>8.1f} ms, {ratio:.0f} x faster (bound 10)")


if __name__ == "__main__":
    main()
