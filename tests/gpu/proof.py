"""One layer, proven in a process of its own: what the cache serves against float32 and against the plan built here."""

import hashlib
import json
from dataclasses import replace

import cudnn
import torch

import plancache
from tests.gpu.cases import kernel_us
from tests.gpu.layers import LAYERS


def prove(name, directory=None, bundle=None, mode=None):
    """Serve (or build) the layer and build its native twin; prints one line of JSON about both."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    layer, handle = LAYERS[name], cudnn.create_handle()
    layers = [bundle] if bundle else []
    with plancache.open(directory, mode=mode, layers=layers) as cache:
        graph, inputs, outputs = layer.declare(handle)
        outcome = cache.build(graph)
    twin, twin_inputs, twin_outputs = layer.declare(handle)
    twin.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    given = [_random(tensor) for tensor in inputs]
    expected = layer.reference(*(value.float() for value in _on_device(given)))
    served = _run(graph, inputs, outputs, given, handle)
    native = _run(twin, twin_inputs, twin_outputs, given, handle)
    for output, twin_output, right in zip(served.outputs, native.outputs, expected, strict=True):
        for found in (output, twin_output):
            error = (found.float() - right).abs().max().item()
            limit = layer.tolerance * max(1.0, right.abs().max().item())
            assert error <= limit, f"{name}: off by {error}, at most {limit}; finite: {found.isfinite().all().item()}"
    micros = [(kernel_us(served.execute, handle), kernel_us(native.execute, handle)) for _ in range(5)]
    told = {
        "layer": name,
        "cudnn": cudnn.backend_version(),
        "source": outcome.source,
        "route": outcome.route,
        "plan": graph.get_plan_name_at_index(0),
        "native plan": twin.get_plan_name_at_index(0),
        "ms": round(1e3 * outcome.seconds, 1),
        "bit-equal": served.digest() == native.digest(),
        "us": min(one for one, _ in micros),
        "native us": min(one for _, one in micros),
        "ratio": min(one / other for one, other in micros),
    }
    print(json.dumps(told))


def _random(tensor):
    dim, stride = tensor.get_dim(), tensor.get_stride()
    if tensor.get_is_pass_by_value():
        return torch.full(dim, 1e-5)
    torch.manual_seed(len(tensor.get_name()) + dim[-1])
    span = 1 + sum((d - 1) * s for d, s in zip(dim, stride, strict=True))
    flat = torch.randn(span, device="cuda")
    # Softmax statistics are sums of exponentials' logarithms: around log(256) for random queries and keys.
    flat = 6 + 0.1 * flat if tensor.get_name() == "stats" else flat.half()
    return flat.as_strided(dim, stride)


def _on_device(given):
    return [value.cuda() for value in given]


class _run:
    def __init__(self, graph, inputs, outputs, given, handle):
        self.outputs = []
        for tensor in outputs:
            dim, stride = tensor.get_dim(), tensor.get_stride()
            span = 1 + sum((d - 1) * s for d, s in zip(dim, stride, strict=True))
            self.outputs.append(torch.zeros(span, device="cuda", dtype=torch.half).as_strided(dim, stride))
        self.workspace = torch.empty(max(1, graph.get_workspace_size()), device="cuda", dtype=torch.uint8)
        pack = {**dict(zip(inputs, given, strict=True)), **dict(zip(outputs, self.outputs, strict=True))}
        self.execute = lambda: graph.execute(pack, self.workspace, handle=handle)
        self.execute()
        torch.cuda.synchronize()

    def digest(self):
        return [hashlib.sha256(output.cpu().numpy().tobytes()).hexdigest() for output in self.outputs]


def swapped(directory, source, target):
    """Put a route's own record into the row of another route, as a bug or an attacker might."""
    with plancache.open(directory) as cache:
        (listed,) = [one for one in cache.rows() if one.row.route == source]
        record = cache.store.get(listed.row.key, source)
        assert cache.store.put(replace(listed.row, route=target), record)


def fill_ahead(name, directory):
    """What a host without a GPU would do, with the device's own JSON."""
    graph = LAYERS[name].declare
    with plancache.target(plancache.device(plancache.device(0).to_json())), plancache.open(directory) as cache:
        print(*sorted(cache.fill(graph()[0])))
