"""Every operation of the frontend, every parameter of it and every attribute of its tensors, flipped one at a time.

What there is to flip is read from the frontend: its tables of operations, its signatures, and the docstrings of the
compiled methods that its operations are lowered to. What a new frontend adds fails here until somebody decides about
it: a new operation in `test_every_public_method_is_an_operation_or_is_known_not_to_be`, a new parameter in `VALUES`,
a new attribute of tensors in `ATTRIBUTES`.

Nothing here is validated or built, so shapes need not make sense: a declaration is all that a key is made of.
"""

import dataclasses
import inspect
import re

import cudnn
import pytest
from cudnn import _pygraph

from plancache.cudnn import graph as graphs
from plancache.cudnn import rebuild
from plancache.keys import digest, pack

TYPES = cudnn.data_type
compiled = cudnn._compiled_module

# Two values for each parameter that is no tensor; "absent" is a third where the frontend allows it.
VALUES = {
    **dict.fromkeys(("padding", "pre_padding", "post_padding", "stride", "dilation"), ([1, 1], [2, 1])),
    "convolution_mode": tuple(compiled.convolution_mode.__members__.values()),
    "mode": (cudnn.reduction_mode.ADD, cudnn.reduction_mode.MAX),
    "moe_grouped_matmul.mode": (cudnn.moe_grouped_matmul_mode.NONE, cudnn.moe_grouped_matmul_mode.SCATTER),
    "matmul.padding": (1.0, 2.0),
    "norm_forward_phase": (cudnn.norm_forward_phase.INFERENCE, cudnn.norm_forward_phase.TRAINING),
    "reshape_mode": (cudnn.reshape_mode.VIEW_ONLY, cudnn.reshape_mode.LOGICAL),
    "slices": ([slice(0, 2), slice(None)], [slice(0, 2), slice(0, 4, 2)]),
    "permutation": ([0, 1, 3, 2], [1, 0, 2, 3]),
    "block_size": (16, 32),
    "block_scale_dequantize.block_size": ([1, 16], [1, 32]),
    "diagonal_alignment": tuple(cudnn.diagonal_alignment.__members__.values()),
    "implementation": (cudnn.attention_implementation.COMPOSITE, cudnn.attention_implementation.UNIFIED),
    "softmax_precision": (TYPES.FLOAT, TYPES.HALF),
    "gate_domain": ("log", "linear"),
    "out_dims": ([4, 8, 16, 16], [4, 8, 16, 8]),
    "compute_data_type": (TYPES.HALF, TYPES.DOUBLE),
    "dropout": ((0.1, 7, 8), (0.2, 7, 8)),
    **dict.fromkeys(
        ("negative_slope", "lower_clip", "upper_clip", "swish_beta", "attn_scale", "scale", "output_scale", "dt_min"),
        (0.25, 0.5),
    ),
    **dict.fromkeys(("dt_max", "gate_lower_bound", "beta_guard"), (0.75, 1.5)),
    **dict.fromkeys(
        (
            *("axis", "in_place_index", "top_k", "rope_dim", "checkpoint_every_n_tokens", "num_householder"),
            *("sliding_window_length", "sliding_window", "diagonal_band_left_bound", "diagonal_band_right_bound"),
            *("left_bound", "right_bound", "paged_attention_max_seq_len_kv"),
            *("max_total_seq_len_q", "max_total_seq_len_kv"),
        ),
        (2, 3),
    ),
    **dict.fromkeys(
        (
            *("has_dbias", "is_negative_scale", "transpose", "is_inference", "use_alibi_mask", "use_padding_mask"),
            *("use_causal_mask", "use_causal_mask_bottom_right", "generate_stats", "unfuse_fma", "stats_use_log2"),
            *("use_deterministic_algorithm", "attn_scale_prefolded", "output_final_state", "use_qk_l2norm"),
            *("use_beta_sigmoid", "allow_neg_eigval", "safe_gate", "batch_invariant", "overwrite_initial_state"),
            *("output_transition", "dt_softplus", "output_pre_gate"),
        ),
        (True, False),
    ),
}
# Callables have no exact encoding: a graph that holds one is not keyed at all (test_bad_input).
CALLBACKS = {"score_mod", "score_mod_bprop", "fn"}
LEFT_OUT_PARAMETERS = {"self", "name", "args", "kwargs"} | CALLBACKS

# Each attribute of a tensor, and how it is flipped; None is an attribute that is left out of keys.
ATTRIBUTES = {
    "name": None,  # a label
    "owner": None,  # the graph
    "uid_assigned": None,  # who chose the uid: only the uid itself reaches cuDNN
    "uid": lambda t, other: t.set_uid(901),
    "data_type": lambda t, other: t.set_data_type(TYPES.INT8),
    "dim": lambda t, other: setattr(t, "dim", [77, *list(t.dim)[1:]] if t.dim else [77]),
    "dim_assigned": lambda t, other: setattr(t, "dim_assigned", not t.dim_assigned),
    "stride": lambda t, other: setattr(t, "stride", [9999, *list(t.stride)[1:]] if t.stride else [9]),
    "stride_assigned": lambda t, other: setattr(t, "stride_assigned", not t.stride_assigned),
    "is_virtual": lambda t, other: t.set_is_virtual(not t.is_virtual),
    "is_pass_by_value": lambda t, other: t.set_is_pass_by_value(not t.is_pass_by_value),
    "pass_by_value": lambda t, other: setattr(t, "pass_by_value", 0.5),
    "scalar_type": lambda t, other: setattr(t, "scalar_type", cudnn.scalar_type.RUNTIME_PARAM),
    "reordering_type": lambda t, other: t.set_reordering_type(cudnn.tensor_reordering.F8_128x4),
    "ragged_offset": lambda t, other: t.set_ragged_offset(other),
    "ragged_offset_multiplier": lambda t, other: t.set_ragged_offset_multiplier(8),
    "alignment_value": lambda t, other: t.set_alignment_value(16),
}


@dataclasses.dataclass
class Operation:
    """What there is to flip: tensor ports, ports that take a list of tensors, and parameters."""

    name: str
    ports: tuple = ()
    lists: tuple = ()
    parameters: tuple = ()


def operations():
    found = {}
    for name, ports in cudnn.pygraph._POINTWISE_TENSOR_ARGS.items():
        found[name] = Operation(name, ports, parameters=("compute_data_type",))
    for name, spec in _pygraph._STRUCTURED_OPS.items():
        found[name] = Operation(
            name,
            (*spec["inputs"], *spec.get("keyword_inputs", ())),
            spec.get("list_inputs", ()),
            (*spec.get("attrs", ()), "compute_data_type", "out_dims"),
        )
    for name, spec in _pygraph._CAPTURED_OPS.items():
        tensors, plain = compiled_parameters(name)
        ports = dict.fromkeys(
            (*spec["pos"], *tensors, *spec.get("out_kwargs", ()), *spec.get("python_only_in_kwargs", ()))
        )
        plain = dict.fromkeys((*plain, *spec.get("python_only_attrs", ())))
        found[name] = Operation(name, tuple(ports), parameters=tuple(plain))
    for name in public_methods() - set(found) - NO_OPERATIONS:
        arguments = set(inspect.signature(getattr(cudnn.pygraph, name)).parameters) - LEFT_OUT_PARAMETERS
        ports = tuple(port for port in ("A", "B", "loss", "input") if port in arguments)
        found[name] = Operation(name, ports, parameters=tuple(sorted(arguments - set(ports))))
    return found


def compiled_parameters(name):
    """Tensor and other parameters of a compiled method, from its docstring."""
    signature = getattr(compiled.backend_graph, name).__doc__.splitlines()[0]
    tensors, plain = [], []
    for argument, kind in re.findall(r"(\w+): ([^=,()\[\]]+(?:\[[^()]*?\]\s*)?[^=,()]*)", signature):
        if argument not in LEFT_OUT_PARAMETERS:
            (tensors if "_compiled_module.tensor" in kind and "Callable" not in kind else plain).append(argument)
    return tensors, plain


def public_methods():
    return {name for name in dir(cudnn.pygraph) if not name.startswith("_")}


# Methods and properties that add no operation. A name that is in neither list fails.
NO_OPERATIONS = {
    *("backend_plan_entries", "build", "build_operation_graph", "build_plan_at_index", "build_plans", "check_support"),
    *("context", "create_execution_plan", "create_execution_plans", "deselect_behavior_notes", "deselect_engines"),
    *("deselect_numeric_notes", "deselect_workspace_greater_than", "deserialize", "execute", "execute_plan_at_index"),
    *("find_tensor", "get_behavior_notes", "get_behavior_notes_for_plan_at_index", "get_cuda_graph_retention"),
    *("get_engine_and_knobs_at_index", "get_execution_plan_count", "get_inputs", "get_node", "get_outputs"),
    *("get_plan_name_at_index", "get_workspace_size", "get_workspace_size_plan_at_index", "inspect", "key", "nodes"),
    *("plans", "populate_cuda_graph", "select_behavior_notes", "select_numeric_notes", "select_plan"),
    *("selected_engine", "serialize", "tensor", "tensor_like", "tensor_scalar", "tensors", "update_cuda_graph"),
    "validate",
}
EXPLICIT = {
    *("matmul", "relu", "leaky_relu", "swish", "gen_index", "relu_backward", "leaky_relu_backward", "swish_backward"),
}
OPERATIONS = operations()


def declare(operation, change=None, drop=(), swap=None, **parameters):
    """A graph with one operation, all ports bound; `change` is called with the graph, its tensors and outputs."""
    graph = cudnn.pygraph(io_data_type=TYPES.HALF, intermediate_data_type=TYPES.FLOAT, compute_data_type=TYPES.FLOAT)
    other = graph.tensor(dim=[4, 8, 16, 32], stride=[4096, 512, 32, 1])
    bound = {
        port: graph.tensor(dim=[4, 8, 16, 32], stride=[4096, 512, 32, 1])
        for port in (*operation.ports, *(f"{port}_{i}" for port in operation.lists for i in range(2)))
    }
    given = {port: bound[port] for port in operation.ports if port not in drop}
    if swap:
        given[swap] = other
    lists = {port: [bound[f"{port}_{i}"] for i in range(2)] for port in operation.lists if port not in drop}
    for parameter in required(operation.name):
        parameters.setdefault(parameter, values(operation.name, parameter)[0])
    outputs = getattr(graph, operation.name)(**given, **lists, **parameters)
    outputs = [output for output in (outputs if isinstance(outputs, list) else [outputs]) if output is not None]
    if change:
        change(graph, bound, outputs, other)
    return graph


def required(name):
    """Parameters that the frontend's builders need to get as far as a declaration."""
    if name not in EXPLICIT:
        return ()
    parameters = inspect.signature(getattr(cudnn.pygraph, name)).parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.name in VALUES]


def values(name, parameter):
    return VALUES[f"{name}.{parameter}"] if f"{name}.{parameter}" in VALUES else VALUES[parameter]


def test_every_public_method_is_an_operation_or_is_known_not_to_be():
    assert set(OPERATIONS) - NO_OPERATIONS == set(OPERATIONS)
    explicit = set(OPERATIONS) - set(cudnn.pygraph._POINTWISE_TENSOR_ARGS)
    explicit -= {*_pygraph._STRUCTURED_OPS, *_pygraph._CAPTURED_OPS}
    assert explicit == EXPLICIT
    assert public_methods() == set(OPERATIONS) | NO_OPERATIONS
    assert len(OPERATIONS) > 100


def test_every_attribute_of_a_tensor_is_decided_about():
    assert {field.name for field in dataclasses.fields(cudnn.Tensor)} == set(ATTRIBUTES)


@pytest.mark.parametrize("name", [name for name in OPERATIONS if hasattr(compiled.backend_graph, name)])
def test_every_parameter_of_the_compiled_method_is_known(name):
    """What the frontend's tables leave out would be passed by nobody; what they name must be flipped below."""
    tensors, plain = compiled_parameters(name)
    operation = OPERATIONS[name]
    known = {*operation.ports, *operation.lists, *operation.parameters, *(f"{port}s" for port in operation.lists)}
    if name in cudnn.pygraph._POINTWISE_TENSOR_ARGS:
        known |= set(tensors)  # handed over by position; the frontend's names are the wrapper's own
    assert {*tensors, *plain} <= known | CALLBACKS, name


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_every_flip_is_another_key_and_survives_the_way_back(name, h200):
    operation = OPERATIONS[name]
    flips = {"nothing": {}}
    for parameter in operation.parameters:
        for number, value in enumerate(values(name, parameter)):
            flips[f"{parameter} {number}"] = {parameter: value}
    for port in (*operation.ports, *operation.lists):
        if optional(operation, port):
            flips[f"without {port}"] = {"drop": (port,)}
    for port in operation.ports:
        flips[f"another {port}"] = {"swap": port}
    graphs_of = {flip: declare(operation, **how) for flip, how in flips.items()}
    for port in declare_names(operation):
        for attribute, change in ATTRIBUTES.items():
            if change is not None:
                graphs_of[f"{port}: {attribute}"] = declare(operation, attribute_change(port, change))
    documents = {flip: graphs.document(graph, h200) for flip, graph in graphs_of.items()}
    hashes = {}
    for flip, document in documents.items():
        hashes.setdefault(digest(document), []).append(flip)
        again = graphs.document(rebuild.graph(document, device=h200), h200)
        assert pack(again) == pack(document), flip
    same = [flips for flips in hashes.values() if len(flips) > 1]
    assert [group for group in same if not default_written_out(name, group)] == []


def declare_names(operation):
    ports = [*operation.ports, *(f"{port}_{i}" for port in operation.lists for i in range(2))]
    count = []
    declare(operation, lambda graph, bound, outputs, other: count.extend(outputs))
    return [*ports, *range(len(count))]


def attribute_change(port, change):
    def apply(graph, bound, outputs, other):
        change(outputs[port] if isinstance(port, int) else bound[port], other)

    return apply


def optional(operation, port):
    try:
        declare(operation, drop=(port,))
    except (TypeError, KeyError, ValueError, AttributeError):
        return False
    return True


def default_written_out(name, group):
    """Flips that say what absence says to the frontend itself: it drops them before the graph holds anything."""
    defaults = {"nothing", *(f"{parameter} 0" for parameter in required(name))}
    return set(group) <= defaults


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_names_are_left_out(name, h200):
    operation = OPERATIONS[name]

    def rename(graph, bound, outputs, other):
        for number, tensor in enumerate((*bound.values(), *outputs)):
            tensor.set_name(f"renamed {number}")

    renamed = declare(operation, rename, name="another")
    assert digest(graphs.document(renamed, h200)) == digest(graphs.document(declare(operation), h200))
