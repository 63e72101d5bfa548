"""The layers that are proven on a GPU: how each is declared, and what float32 arithmetic says that it computes.

Declared without a GPU too: `python -m tests.gpu.layers DIRECTORY` fills bundles for an H200 on a machine that has none,
to be served on one (there `GPU_TEST_BUNDLES` names the directory).
"""

import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import cudnn

import plancache
from tests import graphs

FLOAT = cudnn.data_type.FLOAT


@dataclass(frozen=True)
class Layer:
    """`declare` gives graph, inputs and outputs; `reference` the outputs, from the inputs as float32 tensors."""

    name: str
    declare: Callable
    reference: Callable
    tolerance: float = 2e-2


def _large(handle=None):
    graph = graphs.new(handle)
    a, b = (graph.tensor(dim=[1, 2048, 2048], stride=[2048 * 2048, 2048, 1], name=name) for name in "ab")
    c = graph.matmul(a, b)
    c.set_output(True)
    return graph, [a, b], [c]


def _small(handle=None):
    graph, (a, b, c) = graphs.matmul(handle)
    return graph, [a, b], [c]


def _bias_relu(handle=None, **kwargs):
    graph = graphs.new(handle, **kwargs)
    a = graph.tensor(dim=[1, 512, 256], stride=[512 * 256, 256, 1], name="a")
    b = graph.tensor(dim=[1, 256, 1024], stride=[256 * 1024, 1024, 1], name="b")
    bias = graph.tensor(dim=[1, 1, 1024], stride=[1024, 1024, 1], name="bias")
    c = graph.relu(graph.add(graph.matmul(a, b), bias))
    c.set_output(True)
    return graph, [a, b, bias], [c]


def _conv(handle=None):
    graph, (x, w, y) = graphs.conv(handle)
    return graph, [x, w], [y]


def _sdpa(handle=None):
    graph, (q, k, v, o) = graphs.sdpa(handle)
    return graph, [q, k, v], [o]


def _sdpa_backward(handle=None):
    """Forward values that do not belong to the inputs will do: the gradient is a formula of them all."""
    graph = graphs.new(handle)
    dim, stride = [2, 4, 256, 64], [4 * 256 * 64, 256 * 64, 64, 1]
    q, k, v, o, d_o = (graph.tensor(dim=dim, stride=stride, name=name) for name in ("q", "k", "v", "o", "do"))
    stats = graph.tensor(dim=[2, 4, 256, 1], stride=[4 * 256, 256, 1, 1], data_type=FLOAT, name="stats")
    outputs = graph.sdpa_backward(
        q=q, k=k, v=v, o=o, dO=d_o, stats=stats, attn_scale=0.125, use_deterministic_algorithm=True
    )
    for output in outputs:
        output.set_output(True).set_dim(dim).set_stride(stride)
    return graph, [q, k, v, o, d_o, stats], list(outputs)


def _norm(handle, kind):
    graph = graphs.new(handle)
    x = graph.tensor(dim=[512, 1024, 1, 1], stride=[1024, 1, 1024, 1024], name="x")
    scale, bias = (graph.tensor(dim=[1, 1024, 1, 1], stride=[1024, 1, 1024, 1024], name=name) for name in "sb")
    epsilon = graph.tensor(dim=[1] * 4, stride=[1] * 4, data_type=FLOAT, is_pass_by_value=True, name="epsilon")
    given = {"norm_forward_phase": cudnn.norm_forward_phase.INFERENCE, "input": x, "scale": scale, "epsilon": epsilon}
    y = graph.rmsnorm(**given)[0] if kind == "rms" else graph.layernorm(**given, bias=bias)[0]
    y.set_output(True)
    return graph, [x, scale, *([] if kind == "rms" else [bias]), epsilon], [y]


def _layer_norm(handle=None):
    return _norm(handle, "layer")


def _rms_norm(handle=None):
    return _norm(handle, "rms")


def _relu_of_matmul(a, b):
    return [(a @ b).relu()]


def _convolved(x, w):
    import torch

    return [torch.nn.functional.conv2d(x, w, padding=1).relu()]


def _attention(q, k, v):
    import torch

    return [torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.1)]


def _attention_gradients(q, k, v, o, d_o, stats):
    """As cuDNN defines it: p from the stats, ds = p * (do v' - rowsum(do * o)) * scale."""
    p = (q @ k.transpose(-1, -2) * 0.125 - stats).exp()
    ds = p * (d_o @ v.transpose(-1, -2) - (d_o * o).sum(-1, keepdim=True)) * 0.125
    return [ds @ k, ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ d_o]


def _layer_normed(x, scale, bias, epsilon):
    mean = x.mean(1, keepdim=True)
    variance = (x - mean).pow(2).mean(1, keepdim=True)
    return [(x - mean) * (variance + epsilon).rsqrt() * scale + bias]


def _rms_normed(x, scale, epsilon):
    return [x * (x.pow(2).mean(1, keepdim=True) + epsilon).rsqrt() * scale]


LAYERS = {
    layer.name: layer
    for layer in (
        Layer("matmul", _small, _relu_of_matmul),
        Layer("large matmul", _large, lambda a, b: [a @ b]),
        Layer("matmul + bias + ReLU", _bias_relu, lambda a, b, bias: [(a @ b + bias).relu()]),
        Layer("conv + ReLU", _conv, _convolved),
        Layer("SDPA", _sdpa, _attention),
        Layer("SDPA backward", _sdpa_backward, _attention_gradients, 3e-2),
        Layer("layer norm", _layer_norm, _layer_normed),
        Layer("RMS norm", _rms_norm, _rms_normed),
    )
}


def bundle_name(route):
    """The file that `fill` writes for a route and this cuDNN."""
    return f"{cudnn.backend_version()}.{route}.bundle"


def fill(directory):
    """Fill a bundle for each route with what may serve the layers; says which routes each has."""
    with tempfile.TemporaryDirectory() as home, plancache.open(Path(home, "cache")) as cache:
        with plancache.target("h200"):
            for layer in LAYERS.values():
                made = cache.fill(layer.declare()[0])
                print(layer.name, {route: f"{1e3 * outcome.seconds:.0f} ms" for route, outcome in made.items()})
        for route in ("replay", "deviceless"):
            rows = [listed for listed in cache.rows() if listed.row.route == route]
            print(cache.export_bundle(directory / bundle_name(route), rows))


if __name__ == "__main__":
    fill(Path(sys.argv[1]))
