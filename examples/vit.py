"""ViT-B/16 at 224x224 (batch 8, half): the layers of the network that are cuDNN graphs.

The image is cut into 14x14 patches, embedded by a convolution whose stride is its kernel; with the class token these
are 197 tokens of 768 features. An encoder block is layer norm, the query, key and value projections as one matmul,
attention without a mask, the output projection plus the residual, layer norm, and an MLP with GELU plus the residual.
The position embedding, which is added once the class token is there, is no part of this module.
"""

from __future__ import annotations

from typing import Any

import cudnn

import plancache

BATCH = 8
IMAGE_CHANNELS, IMAGE_SIZE = 3, 224
PATCH = 16
GRID = IMAGE_SIZE // PATCH
LENGTH = GRID * GRID + 1  # the patches and the class token
TOKENS = BATCH * LENGTH
HIDDEN = 768
HEADS = 12
HEAD_DIM = HIDDEN // HEADS
MLP = 3072
CLASSES = 1000


def _graph(handle: Any) -> Any:
    return plancache.pygraph(
        handle=handle,
        io_data_type=cudnn.data_type.HALF,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
    )


def _channels_last(graph: Any, name: str, n: int, c: int, h: int, w: int) -> Any:
    return graph.tensor(dim=[n, c, h, w], stride=[h * w * c, 1, w * c, c], name=name)


def _activation(graph: Any, name: str, tokens: int, features: int) -> Any:
    return graph.tensor(dim=[1, tokens, features], stride=[tokens * features, features, 1], name=name)


def _linear(graph: Any, tokens: int, inputs: int, outputs: int) -> tuple[tuple[Any, ...], Any]:
    """The input tensors (activations, weight, bias), and the output of a linear layer.

    The weight is as checkpoints keep it: one row for each output feature.
    """
    x = _activation(graph, "x", tokens, inputs)
    w = graph.tensor(dim=[1, inputs, outputs], stride=[inputs * outputs, 1, inputs], name="w")
    bias = _activation(graph, "bias", 1, outputs)
    return (x, w, bias), graph.bias(graph.matmul(x, w), bias)


@plancache.cached(cases=[()])
def patch_embedding(handle: Any) -> Any:
    """Patches to features."""
    graph = _graph(handle)
    x = _channels_last(graph, "x", BATCH, IMAGE_CHANNELS, IMAGE_SIZE, IMAGE_SIZE)
    w = _channels_last(graph, "w", HIDDEN, IMAGE_CHANNELS, PATCH, PATCH)
    bias = _channels_last(graph, "bias", 1, HIDDEN, 1, 1)
    y = graph.bias(graph.conv_fprop(x, w, padding=[0, 0], stride=[PATCH, PATCH], dilation=[1, 1]), bias)
    y.set_output(True)
    return graph, (x, w, bias, y)


@plancache.cached(cases=[(TOKENS,), (BATCH,)])
def layer_norm(handle: Any, tokens: int) -> Any:
    """The norms of a block, over all tokens; the last one, over the class tokens."""
    graph = _graph(handle)
    x = _channels_last(graph, "x", tokens, HIDDEN, 1, 1)
    scale = _channels_last(graph, "scale", 1, HIDDEN, 1, 1)
    bias = _channels_last(graph, "bias", 1, HIDDEN, 1, 1)
    epsilon = graph.tensor(dim=[1] * 4, data_type=cudnn.data_type.FLOAT, is_pass_by_value=True, name="epsilon")
    phase = cudnn.norm_forward_phase.INFERENCE
    y, _, _ = graph.layernorm(norm_forward_phase=phase, input=x, scale=scale, bias=bias, epsilon=epsilon)
    y.set_output(True)
    return graph, (x, scale, bias, epsilon, y)


@plancache.cached(cases=[(TOKENS, HIDDEN, 3 * HIDDEN), (BATCH, HIDDEN, CLASSES)])
def linear(handle: Any, tokens: int, inputs: int, outputs: int) -> Any:
    """The query, key and value projections; the classifier, over the class tokens."""
    graph = _graph(handle)
    tensors, y = _linear(graph, tokens, inputs, outputs)
    y.set_output(True)
    return graph, (*tensors, y)


@plancache.cached(cases=[()])
def attention(handle: Any) -> Any:
    """Queries, keys and values are views of the projection's output, where a token's three parts lie side by side."""
    graph = _graph(handle)
    token = 3 * HIDDEN
    dim = [BATCH, HEADS, LENGTH, HEAD_DIM]
    q, k, v = (graph.tensor(dim=dim, stride=[LENGTH * token, HEAD_DIM, token, 1], name=name) for name in "qkv")
    o, _ = graph.sdpa(q=q, k=k, v=v, attn_scale=HEAD_DIM**-0.5, generate_stats=False)
    o.set_output(True).set_dim(dim).set_stride([LENGTH * HIDDEN, HEAD_DIM, HIDDEN, 1])
    return graph, (q, k, v, o)


@plancache.cached(cases=[(TOKENS, HIDDEN, MLP)])
def linear_gelu(handle: Any, tokens: int, inputs: int, outputs: int) -> Any:
    """The MLP's first layer."""
    graph = _graph(handle)
    tensors, y = _linear(graph, tokens, inputs, outputs)
    y = graph.gelu(y)
    y.set_output(True)
    return graph, (*tensors, y)


@plancache.cached(cases=[(TOKENS, HIDDEN, HIDDEN), (TOKENS, MLP, HIDDEN)])
def linear_residual(handle: Any, tokens: int, inputs: int, outputs: int) -> Any:
    """The output projection of attention and the MLP's second layer, plus the residual."""
    graph = _graph(handle)
    tensors, y = _linear(graph, tokens, inputs, outputs)
    residual = _activation(graph, "residual", tokens, outputs)
    y = graph.add(y, residual)
    y.set_output(True)
    return graph, (*tensors, residual, y)
