"""Small graphs that the tests declare; each builds for an H200 in about half a second, with no GPU."""

import cudnn

import plancache

HALF, FLOAT = cudnn.data_type.HALF, cudnn.data_type.FLOAT


def new(handle=None, **kwargs):
    types = {"io_data_type": HALF, "intermediate_data_type": FLOAT, "compute_data_type": FLOAT}
    return plancache.pygraph(handle=handle, **{**types, **kwargs})


def matmul(handle=None, m=64, **kwargs):
    """relu(a @ b): [1, m, 64] x [1, 64, 128]."""
    graph = new(handle, **kwargs)
    a = graph.tensor(dim=[1, m, 64], stride=[m * 64, 64, 1], name="a")
    b = graph.tensor(dim=[1, 64, 128], stride=[64 * 128, 128, 1], name="b")
    c = graph.relu(graph.matmul(a, b))
    c.set_output(True).set_name("c")
    return graph, (a, b, c)


def linear(handle=None, **kwargs):
    """relu(x @ w + bias): 2,048 tokens, 1,024 features in and out."""
    graph = new(handle, **kwargs)
    x = graph.tensor(dim=[1, 2048, 1024], stride=[2048 * 1024, 1024, 1], name="x")
    w = graph.tensor(dim=[1, 1024, 1024], stride=[1024 * 1024, 1, 1024], name="w")
    bias = graph.tensor(dim=[1, 1, 1024], stride=[1024, 1024, 1], name="bias")
    y = graph.relu(graph.bias(graph.matmul(x, w), bias))
    y.set_output(True)
    return graph, (x, w, bias, y)


def conv(handle=None, k=64, **kwargs):
    """relu(conv(x, w)): 8 x 64 x 28 x 28, channels last, 3 x 3."""
    graph = new(handle, **kwargs)
    x = graph.tensor(dim=[8, 64, 28, 28], stride=[64 * 28 * 28, 1, 64 * 28, 64], name="x")
    w = graph.tensor(dim=[k, 64, 3, 3], stride=[64 * 9, 1, 64 * 3, 64], name="w")
    y = graph.relu(graph.conv_fprop(x, w, padding=[1, 1], stride=[1, 1], dilation=[1, 1]))
    y.set_output(True)
    return graph, (x, w, y)


def sdpa(handle=None, length=512, **kwargs):
    """Causal attention: batch 2, 8 heads, `length` tokens, head dimension 128."""
    graph = new(handle, **kwargs)
    dim, stride = [2, 8, length, 128], [8 * length * 128, length * 128, 128, 1]
    q, k, v = (graph.tensor(dim=dim, stride=stride, name=name) for name in "qkv")
    o, _ = graph.sdpa(q, k, v, attn_scale=0.1, use_causal_mask=True, is_inference=True)
    o.set_output(True)
    return graph, (q, k, v, o)


def unsupported(handle=None):
    """A graph that cuDNN has no engine for: a matmul of 64-bit integers."""
    graph = new(handle, io_data_type=cudnn.data_type.INT64, compute_data_type=cudnn.data_type.INT64)
    a = graph.tensor(dim=[1, 8, 8], stride=[64, 8, 1])
    b = graph.tensor(dim=[1, 8, 8], stride=[64, 8, 1])
    graph.matmul(a, b).set_output(True)
    return graph, (a, b)


def unary(handle=None):
    """relu of a tensor: few plans, each built quickly."""
    graph = new(handle)
    x = graph.tensor(dim=[1, 64, 64], stride=[4096, 64, 1])
    y = graph.relu(x)
    y.set_output(True)
    return graph, (x, y)


def plain(device, **kwargs):
    """An empty graph made by `cudnn.pygraph` itself, for a device that is not here."""
    return cudnn.pygraph(
        io_data_type=HALF,
        compute_data_type=FLOAT,
        device_property=device.native,
        sm_version=device.sm_version,
        **kwargs,
    )


def stages(graph, heuristics=(cudnn.heur_mode.A,), between=lambda graph: None, after=lambda graph: None, policy=None):
    """The frontend's stages one by one; `between` comes before planning, `after` behind it."""
    graph.validate()
    graph.build_operation_graph()
    between(graph)
    graph.create_execution_plans(list(heuristics))
    after(graph)
    graph.check_support()
    graph.build_plans(*([] if policy is None else [policy]))
