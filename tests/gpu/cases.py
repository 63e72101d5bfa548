"""What the GPU tests run in processes of their own."""

import hashlib
import sys
import time

import cudnn
import torch

import plancache
from tests import graphs, layers


def buffers(tensors):
    """Random inputs and an empty output, with the strides that the graph declares."""
    torch.manual_seed(0)
    found = {}
    for tensor in tensors:
        dim, stride = tensor.get_dim(), tensor.get_stride()
        span = 1 + sum((d - 1) * s for d, s in zip(dim, stride, strict=True))
        flat = torch.randn(span, device="cuda", dtype=torch.float32).to(torch.float16)
        found[tensor] = flat.as_strided(dim, stride)
    return found


def reference(name, inputs):
    inputs = [value.float() for value in inputs]
    if name == "matmul":
        return torch.relu(inputs[0] @ inputs[1])
    if name == "linear":
        return torch.relu(inputs[0] @ inputs[1] + inputs[2])
    if name == "conv":
        return torch.relu(torch.nn.functional.conv2d(*inputs, padding=1))
    return torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True, scale=0.1)


def run(name, directory, pass_handle=True, mode=None):
    """Take or build the plan, execute it, compare with float32; prints source, plan, digest and kernel time."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    handle = cudnn.create_handle()
    with plancache.open(directory, mode=mode) as cache:
        graph, tensors = getattr(graphs, name)(handle)
        outcome = cache.build(graph)
        pack = buffers(tensors)
        workspace = torch.empty(max(1, graph.get_workspace_size()), device="cuda", dtype=torch.uint8)
        execute = lambda: graph.execute(pack, workspace, **({"handle": handle} if pass_handle else {}))  # noqa: E731
        execute()
        torch.cuda.synchronize()
        *inputs, output = pack.values()
        torch.testing.assert_close(output.float(), reference(name, inputs), atol=3e-2, rtol=2e-2)
        digest = hashlib.sha256(output.cpu().numpy().tobytes()).hexdigest()[:16]
        print(
            outcome.source, outcome.route, graph.get_plan_name_at_index(0), digest, f"{kernel_us(execute, handle):.1f}"
        )
        print(f"build {1e3 * outcome.seconds:.1f} ms")


def kernel_us(execute, handle, launches=20):
    """Microseconds of one execute, from a CUDA graph of many."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        cudnn.set_stream(handle, stream.cuda_stream)
        execute()
        stream.synchronize()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, stream=stream):
            for _ in range(launches):
                execute()
        best = float("inf")
        for _ in range(5):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record(stream)
            captured.replay()
            end.record(stream)
            end.synchronize()
            best = min(best, 1e3 * start.elapsed_time(end) / launches)
    cudnn.set_stream(handle, torch.cuda.current_stream().cuda_stream)  # as before: what comes next must wait for inputs
    return best


def fingerprint():
    """The live device's fingerprint and the one of its JSON, and how long the first took."""
    plancache.device(0)  # imports, cuInit
    from plancache.cudnn import device as devices

    devices._live.cache_clear()
    started = time.perf_counter()
    live = plancache.device(0).fingerprint
    micros = 1e6 * (time.perf_counter() - started)
    print(live)
    print(plancache.device(plancache.device(0).to_json()).fingerprint)
    print(f"{micros:.0f}")


def fill_ahead(name, directory, both=False):
    """What a host without a GPU would do for this device: its plan, or with `both` also what `replay` needs."""
    with plancache.target(plancache.device(plancache.device(0).to_json())), plancache.open(directory) as cache:
        graph, _ = getattr(graphs, name)()
        if both:
            print(*sorted(cache.fill(graph)))
        else:
            print(cache.build(graph).source)


def dynamic(directory):
    """Many lengths with one kernel, each compared with float32: source, milliseconds, digest, kernel time."""
    handle = cudnn.create_handle()
    with plancache.open(directory) as cache:
        for m in (8, 48, 64, 200):
            graph, tensors = graphs.matmul(handle, m=m, is_dynamic_shape_enabled=True)
            outcome = cache.build(graph)
            pack = buffers(tensors)
            workspace = torch.empty(max(1, graph.get_workspace_size()), device="cuda", dtype=torch.uint8)
            execute = lambda: graph.execute(pack, workspace, handle=handle)  # noqa: B023, E731
            execute()
            torch.cuda.synchronize()
            *inputs, output = pack.values()
            torch.testing.assert_close(output.float(), reference("matmul", inputs), atol=3e-2, rtol=2e-2)
            digest = hashlib.sha256(output.cpu().numpy().tobytes()).hexdigest()[:16]
            print(outcome.source, f"{1e3 * outcome.seconds:.1f}", digest, f"{kernel_us(execute, handle):.1f}")


def overridden(directory):
    """One plan at its own and at other lengths, which are given when it is executed; each compared with float32."""
    handle = cudnn.create_handle()
    with plancache.open(directory) as cache:
        graph, (a, b, c) = graphs.matmul(handle, is_override_shape_enabled=True)
        outcome = cache.build(graph)
    for m in (64, 32, 8):
        _, (a_like, b_like, _) = graphs.matmul(handle, m=m)
        output = torch.zeros(1, m, 128, device="cuda", dtype=torch.half)
        values = [*buffers((a_like, b_like)).values(), output]
        strides = [[m * 64, 64, 1], [m * 128, 128, 1]]
        overrides = ([a.get_uid(), c.get_uid()], [[1, m, 64], [1, m, 128]], strides)
        size = graph.get_workspace_size(handle, *overrides)
        workspace = torch.empty(max(1, size), device="cuda", dtype=torch.uint8)
        pack = dict(zip((a, b, c), values, strict=True))
        execute = lambda: graph.execute(pack, workspace, handle, *overrides)  # noqa: B023, E731
        execute()
        torch.cuda.synchronize()
        torch.testing.assert_close(output.float(), reference("matmul", values[:2]), atol=3e-2, rtol=2e-2)
        digest = hashlib.sha256(output.cpu().numpy().tobytes()).hexdigest()[:16]
        print(outcome.source, digest, f"{kernel_us(execute, handle):.1f}")


def staged(directory):
    """Code that knows only cuDNN, stage by stage under enable(): where its plan came from, the output, milliseconds."""
    handle = cudnn.create_handle()
    with plancache.open(directory) as cache, plancache.enabled(cache):
        for name in ("matmul", "conv", "sdpa"):
            graph, tensors = getattr(graphs, name)(handle)
            started = time.perf_counter()
            graphs.stages(graph)
            took = time.perf_counter() - started
            pack = buffers(tensors)
            workspace = torch.empty(max(1, graph.get_workspace_size()), device="cuda", dtype=torch.uint8)
            graph.execute(pack, workspace, handle=handle)
            torch.cuda.synchronize()
            *inputs, output = pack.values()
            torch.testing.assert_close(output.float(), reference(name, inputs), atol=3e-2, rtol=2e-2)
            digest = hashlib.sha256(output.cpu().numpy().tobytes()).hexdigest()[:16]
            print(plancache.last_outcome(graph).source, digest, f"{1e3 * took:.1f}")


def capture(directory):
    """While a stream captures: what is in memory serves and is kept for ever, everything else is a clear error."""
    from plancache import builders
    from plancache.errors import CaptureError

    handle, stream = cudnn.create_handle(), torch.cuda.Stream()
    cudnn.set_stream(handle, stream.cuda_stream)
    cache = plancache.open(directory)
    matmul = plancache.cached(cache=cache, memory=1)(lambda handle, m: graphs.matmul(handle, m=m))
    graph, tensors = matmul(handle, 64)
    pack = buffers(tensors)
    workspace = torch.empty(max(1, graph.get_workspace_size()), device="cuda", dtype=torch.uint8)
    with torch.cuda.stream(stream):
        graph.execute(pack, workspace, handle=handle)
        stream.synchronize()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, stream=stream):
            again, _ = matmul(handle, 64)
            again.execute(pack, workspace, handle=handle)
            for call in (lambda: matmul(handle, 48), lambda: cache.build(graphs.matmul(handle, m=48)[0])):
                try:
                    call()
                except CaptureError as error:
                    print(type(error).__name__)
    print(again is graph, len(builders._forever))
    matmul(handle, 32)  # there is room for one: the captured one is evicted, and must live on
    *inputs, output = pack.values()
    output.zero_()
    captured.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(output.float(), reference("matmul", inputs), atol=3e-2, rtol=2e-2)
    print("replayed")


def tuned(name, directory, seconds=60):
    """Tune, then take the plan as a job would: what came of the candidates, where the plan came from, its digest."""
    from plancache.tuning_table import Tuning

    handle = cudnn.create_handle()
    with plancache.open(directory) as cache:
        graph, _ = getattr(graphs, name)(handle)
        before = cache.key(graph)
        table = cache.tune(graph, seconds=seconds)
        assert isinstance(table, Tuning)
        assert table.outcome == "tuned", table.detail
        assert cache.key(graph) == before  # as it was declared
        counts = {}
        for one in table.candidates:
            counts[one.status] = counts.get(one.status, 0) + 1
        first, chosen = (table.candidates[place] for place in (table.first, table.chosen))
        for one in table.candidates:  # on stderr: what is printed is counted
            print(name, one.name, one.status, one.median, one.workspace, one.detail, file=sys.stderr)
        print("complete" if table.complete else "partial", sorted(counts.items()))
        print(first.name, first.median, chosen.name, chosen.median, f"{table.gain:.2f}", f"{table.seconds:.1f} s")
        assert chosen.median <= first.median
    run(name, directory)


def nothing(directory):
    """Build relu(log(x)): the inputs of a logarithm lie between 0.25 and 1, so that every output is zero."""
    handle = cudnn.create_handle()
    with plancache.open(directory) as cache:
        graph = graphs.new(handle)
        x = graph.tensor(dim=[1, 64, 64], stride=[4096, 64, 1])
        graph.relu(graph.log(x)).set_output(True)
        print(cache.build(graph).source)


def fill(names, directory):
    """Build natively, and fill ahead of time for this device, as a host without a GPU would."""
    for name in names:
        handle = cudnn.create_handle()
        with plancache.open(directory) as cache:
            graph, _ = getattr(graphs, name)(handle)
            print(cache.build(graph).source)
        fill_ahead(name, directory, both=True)


def exchanged(directory):
    """Put the native plan of relu(a @ b) where that of tanh(a @ b) is, in a record that is whole."""
    from plancache.store import records

    handle = cudnn.create_handle()
    with plancache.open(directory) as cache:
        keys = []
        for activation in ("relu", "tanh"):
            graph = graphs.new(handle)
            a = graph.tensor(dim=[1, 64, 64], stride=[4096, 64, 1])
            b = graph.tensor(dim=[1, 64, 128], stride=[8192, 128, 1])
            getattr(graph, activation)(graph.matmul(a, b)).set_output(True)
            outcome = cache.build(graph)
            assert outcome.stored, outcome
            keys.append(outcome.key.hash)
        (_, relu_fields), (tanh, tanh_fields) = (
            records.decode(cache.store.get(key, "native", use=False)) for key in keys
        )
        wrong = records.encode(tanh, {**tanh_fields, "blob": relu_fields["blob"]})
        assert cache.store.put(tanh, wrong, cache.store.get(keys[1], "native"))
        print(*keys)


def relabelled(directory):
    """Store a deviceless plan as a native one, in a record that is whole: nothing on disk is wrong."""
    from dataclasses import replace

    from plancache.store import records

    fill_ahead("conv", directory)
    with plancache.open(directory) as cache:
        (listed,) = cache.rows()
        record = cache.store.get(listed.row.key, "deviceless", use=False)
        row, fields = records.decode(record)
        native = replace(row, route="native")
        assert cache.store.put(native, records.encode(native, fields))
        assert cache.store.discard(row.key, "deviceless")
        print(row.name, cudnn.backend_version())


def fill_layers(directory):
    """Build every layer natively, and fill it ahead of time for this device."""
    from tests.gpu.layers import LAYERS

    handle = cudnn.create_handle()
    with plancache.open(directory) as cache:
        for layer in LAYERS.values():
            print(cache.build(layer.declare(handle)[0], builder=f"layers.{layer.name}").source)
        with plancache.target(plancache.device(plancache.device(0).to_json())):
            for layer in LAYERS.values():
                cache.fill(layer.declare()[0], builder=f"layers.{layer.name}")


def upgrade(directory):
    """Build natively what this device has by other routes only; a line for each plan."""
    with plancache.open(directory, mode="read-write") as cache:
        report = cache.upgrade(jobs=1)
    for line in report.lines:
        print(line.gain, file=sys.stderr)
        routes = sorted(line.gain) if isinstance(line.gain, dict) and min(line.gain.values()) > 0 else []
        print(line.route, line.outcome, *routes or [line.error])


def warm_here(directory):
    """Fill for the GPU that is here."""
    builders = [plancache.cached(cases=[()])(getattr(graphs, name)) for name in ("matmul", "conv", "sdpa")]
    with plancache.open(directory) as cache:
        report = plancache.warm(builders, cache=cache, jobs=2)
    for line in report.lines:
        print(line.route, line.outcome, *([line.error] if line.error else []))


def warm_lengths(directory):
    """Fill three lengths of a graph with dynamic shapes."""
    with plancache.open(directory) as cache:
        report = plancache.warm([layers.lengths], cache=cache, jobs=1)
    for line in report.lines:
        print(line.route, line.outcome, *([line.error] if line.error else []))


def rewarm(directory):
    """Build again, from the documents alone, into the same cache."""
    with plancache.open(directory) as cache:
        report = plancache.rewarm(directory, cache=cache, jobs=1)
    for line in report.lines:
        print(line.route, line.outcome, *([line.error] if line.error else []))
