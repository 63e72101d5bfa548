"""What keying a graph costs: `python -m benchmarks.keys`. Bounds: 150 µs for 10 nodes, 80 µs for SDPA (medians)."""

from __future__ import annotations

import sys

import plancache
from benchmarks.harness import machine, measure
from plancache.cudnn import graph as documents
from plancache.keys import FORMAT, digest
from tests import graphs


def ten_nodes() -> object:
    """Five convolutions with ReLU, one after another."""
    graph = graphs.new()
    x = graph.tensor(dim=[8, 64, 28, 28], stride=[64 * 28 * 28, 1, 64 * 28, 64])
    for _ in range(5):
        w = graph.tensor(dim=[64, 64, 3, 3], stride=[64 * 9, 1, 64 * 3, 64])
        x = graph.relu(graph.conv_fprop(x, w, padding=[1, 1], stride=[1, 1], dilation=[1, 1]))
    x.set_output(True)
    return graph


def main() -> None:
    """Print the table."""
    device = plancache.device("h200")
    print(machine())
    print(f"{'graph':<12}{'document µs':>14}{'and hash µs':>14}{'p99 µs':>10}{'whole key µs':>14}{'p99 µs':>10}")
    with plancache.target(device), plancache.open(mode="read-write") as cache:
        for name, graph in (
            ("matmul", graphs.matmul()[0]),
            ("SDPA", graphs.sdpa()[0]),
            ("10 nodes", ten_nodes()),
        ):
            document = measure(lambda graph=graph: documents.document(graph, device), 2000)
            hashed = measure(lambda graph=graph: digest([FORMAT, documents.document(graph, device)]), 2000)
            whole = measure(lambda graph=graph: cache.key(graph), 2000)
            numbers = (document.median, hashed.median, hashed.p99, whole.median, whole.p99)
            print(
                f"{name:<12}"
                + "".join(f"{1e6 * v:>{w}.0f}" for v, w in zip(numbers, (14, 14, 10, 14, 10), strict=True))
            )
    engines = [name for name in ("cudnn.sdpa", "cutlass") if name in sys.modules]
    print(f"Python engines imported on the way: {', '.join(engines) or 'none'}")


if __name__ == "__main__":
    main()
