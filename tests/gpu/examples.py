"""An example, started as a job would start it: every builder called once, then each layer against float32 and the
plan that is built on the spot."""

import json
import time

import cudnn
import torch

import plancache
from plancache.builders import the_graph
from plancache.cli.demo import DYNAMIC, _cases, _label
from tests.gpu.cases import kernel_us

TYPES = {
    cudnn.data_type.HALF: torch.half,
    cudnn.data_type.BFLOAT16: torch.bfloat16,
    cudnn.data_type.FLOAT: torch.float,
}


def _convolved(stride, x, w, scale, bias):
    return torch.nn.functional.conv2d(x, w, stride=stride, padding=w.shape[2] // 2) * scale + bias


def _attention(q, k, v, causal):
    k, v = (one.repeat_interleave(q.shape[1] // one.shape[1], dim=1) for one in (k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)


def _rms_normed(x, scale, epsilon):
    return x * (x.pow(2).mean(1, keepdim=True) + epsilon).rsqrt() * scale


def _layer_normed(x, scale, bias, epsilon):
    mean, variance = x.mean(1, keepdim=True), x.var(1, keepdim=True, correction=0)
    return (x - mean) * (variance + epsilon).rsqrt() * scale + bias


def _embedded(x, w, bias):
    return torch.nn.functional.conv2d(x, w, stride=w.shape[2:]) + bias


REFERENCES = {
    "conv_scale_bias_relu": lambda case, *given: _convolved(case[-1], *given).relu(),
    "conv_scale_bias": lambda case, *given: _convolved(case[-1], *given),
    "conv_scale_bias_add_relu": lambda case, *given: (_convolved(case[-1], *given[:-1]) + given[-1]).relu(),
    "rms_norm": lambda _, *given: _rms_normed(*given),
    "qkv_projection": lambda _, x, w: x @ w,
    "causal_attention": lambda _, *given: _attention(*given, causal=True),
    "projection_residual": lambda _, x, w, residual: x @ w + residual,
    "gated_mlp": lambda _, x, gate, up: torch.nn.functional.silu(x @ gate) * (x @ up),
    "patch_embedding": lambda _, *given: _embedded(*given),
    "layer_norm": lambda _, *given: _layer_normed(*given),
    "linear": lambda _, x, w, bias: x @ w + bias,
    "attention": lambda _, *given: _attention(*given, causal=False),
    "linear_gelu": lambda _, x, w, bias: torch.nn.functional.gelu(x @ w + bias),
    "linear_residual": lambda _, x, w, bias, residual: x @ w + bias + residual,
    "up_projection": lambda _, x, w, bias: torch.nn.functional.silu(x @ w + bias),
}


def start(example):
    """A line of JSON for each layer: where its plan came from, how far off it is, kernel times of both."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    handle, served = cudnn.create_handle(), []
    started = time.perf_counter()
    for builder, case in _cases_of(example):
        graph, tensors = builder(handle, *case)
        served.append((builder, case, graph, tensors, plancache.last_outcome(graph)))
    print(json.dumps({"example": example, "seconds": round(time.perf_counter() - started, 3)}))
    for builder, case, graph, tensors, outcome in served:
        print(json.dumps({**_proof(handle, builder, case, graph, tensors), **_told(outcome)}), flush=True)


def _cases_of(example):
    return _cases(example)[:: 40 if example == DYNAMIC else 1]


def _told(outcome):
    return {
        "source": outcome.source,
        "route": outcome.route,
        "ms": round(1e3 * outcome.seconds, 1),
    }


def _proof(handle, builder, case, graph, tensors):
    given = [_random(tensor, place) for place, tensor in enumerate(tensors[:-1])]
    name = builder.function.__name__
    right = REFERENCES[name](case, *(value.cuda().float() for value in given))
    found, micros = _run(handle, graph, tensors, given)
    twin, twin_tensors = builder.function(handle, *case)
    the_graph(twin, builder.name).build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    expected, native = _run(handle, twin, twin_tensors, given)
    limit = max(1.0, right.abs().max().item())
    return {
        "layer": _label(builder, case),
        "plan": graph.get_plan_name_at_index(0),
        "native plan": twin.get_plan_name_at_index(0),
        "off": (found.float() - right).abs().max().item() / limit,
        "native off": (expected.float() - right).abs().max().item() / limit,
        "us": micros,
        "native us": native,
    }


def _run(handle, graph, tensors, given):
    output = _empty(tensors[-1])
    pack = dict(zip(tensors, [*given, output], strict=True))
    workspace = torch.empty(max(1, graph.get_workspace_size()), device="cuda", dtype=torch.uint8)
    execute = lambda: graph.execute(pack, workspace, handle=handle)  # noqa: E731
    execute()
    torch.cuda.synchronize()
    return output, round(kernel_us(execute, handle), 1)


def _empty(tensor):
    dim, stride = tensor.get_dim(), tensor.get_stride()
    flat = torch.full((_span(dim, stride),), float("nan"), device="cuda", dtype=TYPES[tensor.get_data_type()])
    return flat.as_strided(dim, stride)


def _random(tensor, place):
    if tensor.get_is_pass_by_value():
        return torch.full(tensor.get_dim(), 1e-5)
    dim, stride = tensor.get_dim(), tensor.get_stride()
    torch.manual_seed(place)
    flat = torch.randn(_span(dim, stride), device="cuda")
    return flat.to(TYPES[tensor.get_data_type()]).as_strided(dim, stride)


def _span(dim, stride):
    return 1 + sum((d - 1) * s for d, s in zip(dim, stride, strict=True))
