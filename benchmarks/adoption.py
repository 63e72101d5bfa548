"""A script that knows only cuDNN, and the same with one line more: `python -m benchmarks.adoption`."""

from __future__ import annotations

import statistics
import tempfile

from benchmarks.harness import Check, Column, Result, Table, child, main, ratio

BOUND = 10.0  # times as fast, at least, in the second run
BOUND_IMPORT = 0.3  # of `import cudnn`

_STAGES = """
import json, sys, time
started = time.perf_counter()
import cudnn
imported = time.perf_counter() - started
started = time.perf_counter()
import plancache
plancache_imported = time.perf_counter() - started
device = plancache.device("h200")
device.native
if sys.argv[1] == "enabled":
    plancache.enable(plancache.open(sys.argv[2]))
graph = cudnn.pygraph(io_data_type=cudnn.data_type.HALF, intermediate_data_type=cudnn.data_type.FLOAT,
                      compute_data_type=cudnn.data_type.FLOAT, device_property=device.native, sm_version=900)
q, k, v = (graph.tensor(dim=[1, 8, 512, 128], stride=[8 * 512 * 128, 512 * 128, 128, 1]) for _ in range(3))
o, _ = graph.sdpa(q=q, k=k, v=v, attn_scale=0.1, is_inference=True, use_causal_mask=True)
o.set_output(True)
started = time.perf_counter()
graph.validate()
graph.build_operation_graph()
graph.create_execution_plans([cudnn.heur_mode.A])
graph.check_support()
graph.build_plans()
print(json.dumps([time.perf_counter() - started, imported, plancache_imported]))
"""
_IMPORT = """
import json, sys, time
started = time.perf_counter()
import plancache
print(json.dumps(time.perf_counter() - started))
assert "cudnn" not in sys.modules
"""


def run(quick: bool) -> Result:
    """The stages with and without, in turns, and what the import costs."""
    with tempfile.TemporaryDirectory(prefix="plancache-bench-") as home:
        child(_STAGES, "enabled", home)
        rounds = [
            (child(_STAGES, "plain", home), child(_STAGES, "enabled", home), child(_IMPORT))
            for _ in range(3 if quick else 7)
        ]
    plain, enabled, alone = ([one[place] for one in rounds] for place in range(3))
    stages = [(one[0], other[0]) for one, other in zip(plain, enabled, strict=True)]
    rows = [
        ("the stages of a script that knows only cuDNN", [one for one, _ in stages]),
        ("the same with `plancache.enable()`, second run", [other for _, other in stages]),
        ("`import cudnn`", [one[1] for one in plain]),
        ("`import plancache`, which does not import it", alone),
    ]
    table = Table(
        "one line more",
        [Column("ms", 1), Column("worst", 1)],
        [(name, [1e3 * statistics.median(seconds), 1e3 * max(seconds)]) for name, seconds in rows],
    )
    faster = ratio((one for one, _ in stages), (other for _, other in stages))
    imports = ratio(alone, (one[1] for one in plain))
    checks = [
        Check("times as fast with `plancache.enable()`", faster, BOUND, least=True),
        Check("`import plancache` against `import cudnn`", imports, BOUND_IMPORT),
    ]
    return Result([table], checks)


if __name__ == "__main__":
    main("adoption", run)
