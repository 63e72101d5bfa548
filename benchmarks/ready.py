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

from benchmarks.harness import Check, Column, Rank, Result, Table, child, in_turns, main, ratio

EXAMPLES = ("resnet50", "llama_block", "vit")
BEFORE = ("import", "device", "plancache", "examples")
PARTS = (*BEFORE, "declare", "key", "lookup", "check", "cuDNN", "rest")
# How a job gets its plans, and what the line is called.
NO_CACHE, EMPTY = "no cache", "plancache, empty"
WARM, LAYER, BLOBS, BARE = "plancache, warm", "plancache, bundle", "directory of blobs", "bytes in memory"
# All of a warm process against one with the bytes in memory; and against one that has no cache.
# The first two import neither plancache's cache nor the examples, which is most of what they are ahead.
BOUND_BARE, BOUND_BLOBS, BOUND_NO_CACHE = 1.5, 1.5, 0.1
# The same without imports and device properties, where the graphs are declared too.
BOUND_PLANS = 2.5

_JOB = """
import json, sys, time
how, example, home = sys.argv[1:4]
marks = [time.perf_counter()]
import importlib, pathlib
import cudnn
marks.append(time.perf_counter())
import plancache
device, target = plancache.device("h200"), plancache.target
device.native
marks.append(time.perf_counter())
blobs = pathlib.Path(home, "blobs", example)
if how in ("directory of blobs", "bytes in memory"):
    marks += marks[-1:] * 2
    cases = list(enumerate(sorted(blobs.iterdir())))
else:
    from plancache import opening
    from plancache.builders import the_graph
    marks.append(time.perf_counter())
    module = importlib.import_module(f"examples.{example}")
    marks.append(time.perf_counter())
    cases = [(one, case) for one in vars(module).values() if hasattr(one, "cases") for case in one.cases]

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

held = [path.read_bytes() for _, path in cases] if how == "bytes in memory" else None
ready, built = [], 0
with target(device):
    cache = None
    if how.startswith("plancache"):
        from plancache import stored
        from plancache.cudnn import frontend, plans
        from plancache.store import plans as rows
        from plancache.cache import PlanCache
        PlanCache._request = timed("key", PlanCache._request)
        rows.SqliteStore.get = timed("lookup", rows.SqliteStore.get)
        stored.decode = timed("check", stored.decode)
        frontend.load = timed("cuDNN", frontend.load)
        plans.run_build = timed("cuDNN", plans.run_build)
    load, build = timed("cuDNN", bare), timed("cuDNN", lambda graph: graph.build())
    declare = timed("declare", lambda builder, case: the_graph(builder.function(None, *case), builder.name))
    begun = time.perf_counter()
    if how == "plancache, bundle":
        cache = opening.open(pathlib.Path(home, "none"), layers=[pathlib.Path(home, f"{example}.bundle")])
    elif how.startswith("plancache"):
        cache = opening.open(pathlib.Path(home, example))
    for one, case in cases:
        if how == "bytes in memory":
            graph = load(held[one])
        elif how == "directory of blobs":
            graph = load(case.read_bytes())
        else:
            graph = declare(one, case)
            if cache is None:
                build(graph)
            else:
                built += cache.build(graph).source == "built"
        ready.append(graph)
    done, at = time.perf_counter(), time.monotonic()
for number, part in enumerate(("import", "device", "plancache", "examples")):
    parts[part] = marks[number + 1] - marks[number]
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
    for order in in_turns(ways, runs):
        for way in order:
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
    return table, *_judged(example, taken)


def _judged(example: str, taken: dict[str, list[dict[str, Any]]]) -> tuple[list[Check], list[Rank]]:
    """All of a process, and its plans alone, against the other ways."""
    every = {way: [one["all"] for one in jobs] for way, jobs in taken.items()}
    plans = {way: [_plans(one) for one in jobs] for way, jobs in taken.items()}
    built = every[NO_CACHE] * len(every[WARM])
    checks = [
        Check(f"{example}: {what}", ratio(ours, theirs), bound)
        for what, ours, theirs, bound in (
            ("all of a warm process against bytes in memory", every[WARM], every[BARE], BOUND_BARE),
            ("against a directory of blobs", every[WARM], every[BLOBS], BOUND_BLOBS),
            ("from a bundle, against the directory", every[LAYER], every[BLOBS], BOUND_BLOBS),
            ("against no cache", every[WARM], built, BOUND_NO_CACHE),
            ("its plans alone against bytes in memory", plans[WARM], plans[BARE], BOUND_PLANS),
            ("its plans alone against a directory of blobs", plans[WARM], plans[BLOBS], BOUND_PLANS),
        )
    ]
    ranks = [
        Rank.of(
            what, {"plancache": seconds[WARM], "a directory of blobs": seconds[BLOBS], "no cache": seconds[NO_CACHE]}
        )
        for what, seconds in ((f"ready with {example}", every), (f"the plans of {example} alone", plans))
    ]
    return checks, ranks


def _plans(one: dict[str, Any]) -> float:
    """Seconds from the first declaration until the last graph is ready."""
    return sum(one["parts"][part] for part in PARTS[len(BEFORE) :])


def run(quick: bool) -> Result:
    """Every example; for the gate the one whose loads are the shortest, beside which a slow hit shows."""
    result = Result()
    for example in ("llama_block",) if quick else EXAMPLES:
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
