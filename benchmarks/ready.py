"""Time to ready: a fresh process with the plans of each example, against what a user would write instead.

`python -m benchmarks.ready`. The parts of the time come from timers around the functions that do them.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import Check, Column, Rank, Result, Table, child, main, ratio

EXAMPLES = ("resnet50", "llama_block", "vit")
PARTS = ("import", "device", "declare", "key", "lookup", "check", "cuDNN", "rest")
# How a job gets its plans, and what the line is called.
NO_CACHE, EMPTY = "no cache", "plancache, empty"
WARM, LAYER, BLOBS, BARE = "plancache, warm", "plancache, bundle", "directory of blobs", "bytes in memory"
# All of a warm process against one with the bytes in memory; and against one that has no cache.
BOUND_BARE, BOUND_BLOBS, BOUND_NO_CACHE = 1.25, 1.25, 0.2
# The same without imports and device properties, where the graphs are declared too.
BOUND_PLANS = 3.0

_JOB = """
import json, sys, time
how, example, home = sys.argv[1:4]
marks = [time.perf_counter()]
import importlib, pathlib
import cudnn, plancache
from plancache.builders import the_graph
if how.startswith("plancache"):
    import plancache.cache
module = importlib.import_module(f"examples.{example}")
builders = [one for one in vars(module).values() if hasattr(one, "cases")]
marks.append(time.perf_counter())
device = plancache.device("h200")
device.native
marks.append(time.perf_counter())

parts = dict.fromkeys(("declare", "key", "lookup", "check", "cuDNN"), 0.0)
def timed(name, function):
    def call(*args, **kwargs):
        started = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            parts[name] += time.perf_counter() - started
    return call

def bare(blob):
    container = cudnn.pygraph(device_property=device.native)
    container.deserialize(blob)
    return container

cases = [(builder, case) for builder in builders for case in builder.cases]
blobs = pathlib.Path(home, "blobs", example)
held = [path.read_bytes() for path in sorted(blobs.glob("*"))] if how == "bytes in memory" else None
ready, built = [], 0
with plancache.target(device):
    cache = None
    if how.startswith("plancache"):
        from plancache import stored
        from plancache.cudnn import frontend, plans
        from plancache.store import plans as rows
        plancache.cache.PlanCache._request = timed("key", plancache.cache.PlanCache._request)
        rows.SqliteStore.get = timed("lookup", rows.SqliteStore.get)
        stored.decode = timed("check", stored.decode)
        frontend.load = timed("cuDNN", frontend.load)
        plans.run_build = timed("cuDNN", plans.run_build)
        if how == "plancache, bundle":
            cache = plancache.open(pathlib.Path(home, "none"), layers=[pathlib.Path(home, f"{example}.bundle")])
        else:
            cache = plancache.open(pathlib.Path(home, example))
    load, build = timed("cuDNN", bare), timed("cuDNN", lambda graph: graph.build())
    declare = timed("declare", lambda builder, case: the_graph(builder.function(None, *case), builder.name))
    begun = time.perf_counter()
    for number, (builder, case) in enumerate(cases):
        if how == "bytes in memory":
            graph = load(held[number])
        elif how == "directory of blobs":
            graph = load((blobs / f"{number:03}").read_bytes())
        else:
            graph = declare(builder, case)
            if cache is None:
                build(graph)
            else:
                built += cache.build(graph).source == "built"
        ready.append(graph)
    done, at = time.perf_counter(), time.monotonic()
parts |= {"import": marks[1] - marks[0], "device": marks[2] - marks[1]}
parts["rest"] = done - begun - sum(parts[name] for name in ("declare", "key", "lookup", "check", "cuDNN"))
if how == "plancache, empty":
    blobs.mkdir(parents=True)
    for number, graph in enumerate(ready):
        (blobs / f"{number:03}").write_bytes(graph.serialize(as_bytes=True))
    cache.export_bundle(pathlib.Path(home, f"{example}.bundle"))
assert built == (len(cases) if how == "plancache, empty" else 0), built
print(json.dumps({"parts": parts, "plans": len(cases), "at": at}))
"""


def job(how: str, example: str, home: Path) -> dict[str, Any]:
    """A fresh process: its parts, and all of it from the start of the process until its last graph is ready."""
    started = time.monotonic()
    done: dict[str, Any] = child(_JOB, how, example, home)
    return {**done, "all": done["at"] - started}


def one_example(example: str, runs: int, home: Path) -> tuple[Table, list[Check], list[Rank]]:
    """Each way in turns; building, which takes long and is what it is, once."""
    taken = {NO_CACHE: [job(NO_CACHE, example, home)], EMPTY: [job(EMPTY, example, home)]}
    ways = (WARM, LAYER, BLOBS, BARE)
    for way in (LAYER, WARM):  # makes the writable cache over the bundle, and brings files into memory
        job(way, example, home)
    for _ in range(runs):
        for way in ways:
            taken.setdefault(way, []).append(job(way, example, home))
    rows: list[tuple[str, list[float | None]]] = []
    for way, jobs in taken.items():
        parts = [1e3 * statistics.median(one["parts"][part] for one in jobs) for part in PARTS]
        every = [1e3 * one["all"] for one in jobs]
        plans = 1e3 * statistics.median(_plans(one) for one in jobs)
        rows.append((way, [*parts, plans, statistics.median(every), max(every)]))
    columns = [
        *(Column(f"{part}, ms", 1) for part in PARTS),
        Column("plans, ms", 1),
        Column("all, ms"),
        Column("worst"),
    ]
    table = Table(f"{example}, {taken[WARM][0]['plans']} plans", columns, rows)
    bare = ratio(map(_plans, taken[WARM]), map(_plans, taken[BARE]))
    all_of = {way: [one["all"] for one in jobs] for way, jobs in taken.items()}
    warm = all_of[WARM]
    built = [all_of[NO_CACHE][0]] * runs
    checks = [
        Check(f"{example}: all of a warm process against bytes in memory", ratio(warm, all_of[BARE]), BOUND_BARE),
        Check(f"{example}: against a directory of blobs", ratio(warm, all_of[BLOBS]), BOUND_BLOBS),
        Check(f"{example}: from a bundle, against the directory", ratio(all_of[LAYER], all_of[BLOBS]), BOUND_BLOBS),
        Check(f"{example}: against no cache", ratio(warm, built), BOUND_NO_CACHE),
        Check(f"{example}: its plans alone against bytes in memory", bare, BOUND_PLANS),
    ]
    persistent = {"plancache": warm, "a directory of blobs": all_of[BLOBS], "no cache": all_of[NO_CACHE]}
    rank = Rank.of(f"ready with {example}", persistent)
    return table, checks, [rank]


def _plans(one: dict[str, Any]) -> float:
    """Seconds from the first declaration until the last graph is ready."""
    return sum(one["parts"][part] for part in PARTS[2:])


def run(quick: bool) -> Result:
    """Every example; the smallest one alone for the gate."""
    result = Result()
    for example in ("vit",) if quick else EXAMPLES:
        home = Path(tempfile.mkdtemp(prefix="plancache-bench-"))
        try:
            table, checks, ranks = one_example(example, 5 if quick else 7, home)
        finally:
            shutil.rmtree(home)
        result.tables.append(table)
        result.checks += checks
        result.ranks += ranks
    return result


if __name__ == "__main__":
    main("ready", run)
