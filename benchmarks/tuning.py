"""What tuning gains on the GPU that is here, layer by layer of the examples: `python -m benchmarks.tuning [EXAMPLE …]`.

Each layer is built into an empty cache, and `plancache tune` then runs every plan that cuDNN offers for it. Printed is
a Markdown table: kernel time of the heuristics' first choice and of the fastest one.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from datetime import date

import cudnn

import plancache
from benchmarks.harness import machine
from plancache.builders import the_graph
from plancache.cli.demo import EXAMPLES, _cases, _label

SECONDS = 30


def filled(directory: str, example: str) -> dict[str, str]:
    """Build the example's layers; their keys with what each is called."""
    handle = cudnn.create_handle()
    names: dict[str, str] = {}
    with plancache.open(directory, mode="read-write") as cache:
        for builder, case in _cases(example):
            graph = the_graph(builder.function(handle, *case), builder.name)
            outcome = cache.build(graph, builder.heuristics, builder.policy, builder=builder.name)
            if outcome.key is not None:
                names.setdefault(outcome.key.hash, _label(builder, case))
    return names


def tuned(directory: str) -> dict[str, dict[str, object]]:
    """The tables of all graphs in the cache, by key."""
    command = [sys.executable, "-m", "plancache", "--dir", directory, "tune", "--json", "--seconds", str(SECONDS)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    return {one["key"]: one for one in map(json.loads, done.stdout.splitlines())}


def row(example: str, name: str, table: dict[str, object]) -> str:
    """One line of the table."""
    if table["outcome"] != "tuned":
        return f"| {example} | {name} | {table['outcome']}: {table['detail']} | | | | | |"
    listed = table["candidates"]
    assert isinstance(listed, list)
    first, chosen = listed[int(str(table["first"]))], listed[int(str(table["chosen"]))]
    run = sum(one["status"] != "not run" for one in listed)
    unfit = sum(one["status"] in ("wrong", "hung", "failed") for one in listed)
    counts = f"{run}/{len(listed)}" + (f", {unfit} unfit" if unfit else "")
    times = f"{first['median']:.1f} | {chosen['name']} | {chosen['median']:.1f} | {table['gain']:.2f} | {counts}"
    return f"| {example} | {name} | {first['name']} | {times} |"


def main() -> None:
    """Print everything."""
    device = plancache.device(0)
    print(f"{device.name}, driver {device.driver}, {machine()}, {date.today().isoformat()}\n", flush=True)
    print("| example | layer | first choice | µs | tuned | µs | ratio | plans run |\n|---|---|---|---|---|---|---|---|")
    for example in sys.argv[1:] or EXAMPLES:
        with tempfile.TemporaryDirectory(prefix="plancache-bench-") as directory:
            names = filled(directory, example)
            tables = tuned(directory)
            for key, name in names.items():
                if key in tables:
                    print(row(example, name, tables[key]), flush=True)


if __name__ == "__main__":
    main()
