"""One decoder layer of Llama 3 8B (bfloat16), as graphs that an inference engine would run.

In the layer's order: RMS norm; the query, key and value projections as one matmul; causal attention in which four
query heads share a key and value head; the output projection plus the residual; RMS norm; the gated MLP, that is
SiLU of the gate projection times the up projection, both matmuls in one graph; the down projection plus the residual.

Norms and matmuls depend on the number of tokens only: a decoding step of 16 sequences, and a prompt of 2,048.
Attention is built for prompts of eight lengths, up to the model's context of 8,192. Rotary embedding, between
projection and attention, is left out: cuDNN's own engines have none for it on this device.
"""

from __future__ import annotations

from typing import Any

import cudnn

import plancache

HIDDEN = 4096
HEADS = 32
KV_HEADS = 8
HEAD_DIM = 128
INTERMEDIATE = 14336
TOKENS = (16, 2048)
SEQUENCE_LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)


def _graph(handle: Any) -> Any:
    return plancache.pygraph(
        handle=handle,
        io_data_type=cudnn.data_type.BFLOAT16,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
    )


def _activation(graph: Any, name: str, tokens: int, features: int) -> Any:
    return graph.tensor(dim=[1, tokens, features], stride=[tokens * features, features, 1], name=name)


def _weight(graph: Any, name: str, inputs: int, outputs: int) -> Any:
    """A linear layer's weight as checkpoints keep it: one row for each output feature."""
    return graph.tensor(dim=[1, inputs, outputs], stride=[inputs * outputs, 1, inputs], name=name)


def _heads(graph: Any, name: str, heads: int, length: int) -> Any:
    """Batch, heads, length, head dimension; in memory a token's heads lie side by side."""
    dim, stride = _heads_layout(heads, length)
    return graph.tensor(dim=dim, stride=stride, name=name)


def _heads_layout(heads: int, length: int) -> tuple[list[int], list[int]]:
    return [1, heads, length, HEAD_DIM], [length * heads * HEAD_DIM, HEAD_DIM, heads * HEAD_DIM, 1]


@plancache.cached(cases=[(tokens,) for tokens in TOKENS])
def rms_norm(handle: Any, tokens: int) -> Any:
    """The norm before attention, and the one before the MLP."""
    graph = _graph(handle)
    x = graph.tensor(dim=[tokens, HIDDEN, 1, 1], stride=[HIDDEN, 1, HIDDEN, HIDDEN], name="x")
    scale = graph.tensor(dim=[1, HIDDEN, 1, 1], stride=[HIDDEN, 1, HIDDEN, HIDDEN], name="scale")
    epsilon = graph.tensor(dim=[1] * 4, data_type=cudnn.data_type.FLOAT, is_pass_by_value=True, name="epsilon")
    phase = cudnn.norm_forward_phase.INFERENCE
    y, _ = graph.rmsnorm(norm_forward_phase=phase, input=x, scale=scale, epsilon=epsilon)
    y.set_output(True)
    return graph, (x, scale, epsilon, y)


@plancache.cached(cases=[(tokens,) for tokens in TOKENS])
def qkv_projection(handle: Any, tokens: int) -> Any:
    """Queries, keys and values of all heads in one matmul."""
    graph = _graph(handle)
    x = _activation(graph, "x", tokens, HIDDEN)
    w = _weight(graph, "w", HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
    y = graph.matmul(x, w)
    y.set_output(True)
    return graph, (x, w, y)


@plancache.cached(cases=[(length,) for length in SEQUENCE_LENGTHS])
def causal_attention(handle: Any, length: int) -> Any:
    """Grouped-query attention over one prompt."""
    graph = _graph(handle)
    q = _heads(graph, "q", HEADS, length)
    k = _heads(graph, "k", KV_HEADS, length)
    v = _heads(graph, "v", KV_HEADS, length)
    o, _ = graph.sdpa(q=q, k=k, v=v, attn_scale=HEAD_DIM**-0.5, use_causal_mask=True, generate_stats=False)
    dim, stride = _heads_layout(HEADS, length)
    o.set_output(True).set_dim(dim).set_stride(stride)
    return graph, (q, k, v, o)


@plancache.cached(cases=[(tokens, inputs) for inputs in (HEADS * HEAD_DIM, INTERMEDIATE) for tokens in TOKENS])
def projection_residual(handle: Any, tokens: int, inputs: int) -> Any:
    """Back to the hidden size, plus the residual: the output projection and the down projection."""
    graph = _graph(handle)
    x = _activation(graph, "x", tokens, inputs)
    w = _weight(graph, "w", inputs, HIDDEN)
    residual = _activation(graph, "residual", tokens, HIDDEN)
    y = graph.add(graph.matmul(x, w), residual)
    y.set_output(True)
    return graph, (x, w, residual, y)


@plancache.cached(cases=[(tokens,) for tokens in TOKENS])
def gated_mlp(handle: Any, tokens: int) -> Any:
    """SiLU(gate) * up."""
    graph = _graph(handle)
    x = _activation(graph, "x", tokens, HIDDEN)
    gate = _weight(graph, "gate", HIDDEN, INTERMEDIATE)
    up = _weight(graph, "up", HIDDEN, INTERMEDIATE)
    y = graph.mul(graph.swish(graph.matmul(x, gate)), graph.matmul(x, up))
    y.set_output(True)
    return graph, (x, gate, up, y)
