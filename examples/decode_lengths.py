"""The first matrix product of a decoder's MLP with bias and SiLU, at 200 lengths (hidden size 4096, bfloat16).

A prompt may have any length. With dynamic shapes one compiled kernel serves all of them, and plancache keeps that
kernel in the kernel cache of the graph's topology: whoever needs it first compiles it, and nobody after that.
"""

from __future__ import annotations

from typing import Any

import cudnn

import plancache

HIDDEN = 4096
INTERMEDIATE = 14336
LENGTHS = range(2, 202)  # a length of 1 is another topology: cuDNN treats sizes of 1 apart


@plancache.cached(cases=[(length,) for length in LENGTHS])
def up_projection(handle: Any, length: int) -> Any:
    """silu(x @ w + bias): [1, length, 4096] times [1, 4096, 14336]."""
    graph = plancache.pygraph(
        handle=handle,
        io_data_type=cudnn.data_type.BFLOAT16,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        is_dynamic_shape_enabled=True,
    )
    x = graph.tensor(dim=[1, length, HIDDEN], stride=[length * HIDDEN, HIDDEN, 1], name="x")
    w = graph.tensor(dim=[1, HIDDEN, INTERMEDIATE], stride=[HIDDEN * INTERMEDIATE, INTERMEDIATE, 1], name="w")
    bias = graph.tensor(dim=[1, 1, INTERMEDIATE], stride=[INTERMEDIATE, INTERMEDIATE, 1], name="bias")
    y = graph.swish(graph.add(graph.matmul(x, w), bias))
    y.set_output(True)
    return graph, (x, w, bias, y)
