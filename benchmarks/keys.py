"""What keying a graph costs, against cuDNN's load of a plan of 55 KB: `python -m benchmarks.keys`."""

from __future__ import annotations

import sys
from typing import Any

import cudnn

import plancache
from benchmarks.harness import Check, Column, Result, Table, main, measure_in_turns
from plancache.cudnn import graph as documents
from plancache.keys import FORMAT, digest
from tests import graphs

# Of cuDNN's load of the matrix product's plan.
BOUNDS = {"matmul": 0.15, "SDPA": 0.15, "10 nodes": 0.4}


def ten_nodes() -> object:
    """Five convolutions with ReLU, one after another."""
    graph = graphs.new()
    x = graph.tensor(dim=[8, 64, 28, 28], stride=[64 * 28 * 28, 1, 64 * 28, 64])
    for _ in range(5):
        w = graph.tensor(dim=[64, 64, 3, 3], stride=[64 * 9, 1, 64 * 3, 64])
        x = graph.relu(graph.conv_fprop(x, w, padding=[1, 1], stride=[1, 1], dilation=[1, 1]))
    x.set_output(True)
    return graph


def run(quick: bool) -> Result:
    """Of each graph its document, the document with its hash, and the whole key."""
    device = plancache.device("h200")
    rows, checks = [], []
    with plancache.target(device), plancache.open(mode="off") as builder, plancache.open(mode="read-only") as cache:
        built = graphs.matmul()[0]
        builder.build(built)
        blob = built.serialize(as_bytes=True)

        def load() -> Any:
            container = cudnn.pygraph(device_property=device.native)
            container.deserialize(blob)
            return container

        for name, graph in (("matmul", graphs.matmul()[0]), ("SDPA", graphs.sdpa()[0]), ("10 nodes", ten_nodes())):
            calls = {
                "document": lambda graph=graph: documents.document(graph, device),
                "hash": lambda graph=graph: digest([FORMAT, documents.document(graph, device)]),
                "key": lambda graph=graph: cache.key(graph).hash,
                "load": load,
            }
            timing = measure_in_turns(calls, rounds=10, times=20 if quick else 100)
            document, hashed, key = timing["document"], timing["hash"], timing["key"]
            numbers = [document.median, hashed.median, hashed.p99, key.median, key.p99]
            against = key.against(timing["load"])
            rows.append((name, [*(1e6 * seconds for seconds in numbers), against]))
            checks.append(Check(f"{name}: key against cuDNN's load of a matrix product", against, BOUNDS[name]))
    columns = [Column(title) for title in ("document, µs", "and hash, µs", "p99", "whole key, µs", "p99")]
    engines = [name for name in ("cudnn.sdpa", "cutlass") if name in sys.modules]
    note = f"Python engines that were imported on the way: {', '.join(engines) or 'none'}."
    return Result([Table("graph", [*columns, Column("× load", 2)], rows)], checks, notes=[note])


if __name__ == "__main__":
    main("keys", run)
