"""Keys: what changes the plan changes the key, what does not, does not."""

import cudnn
import pytest

import plancache
from plancache.cudnn import plans
from plancache.keys import BuildSpec, PlanKey, digest
from plancache.outcome import Reason
from tests import graphs


@pytest.fixture
def key(targeted):
    return lambda graph: plans.declare(graph).request(graph, plans.Choice()).key


KEY = """
import sys, plancache
from tests import graphs
with plancache.target("h200"), plancache.open(sys.argv[1]) as cache:
    print(*(cache.key(builder()[0]).hash for builder in (graphs.matmul, graphs.conv, graphs.sdpa)))
"""


def test_the_key_is_the_same_in_another_process_with_another_hash_seed(run, tmp_path):
    keys = {run(KEY, tmp_path / seed, PYTHONHASHSEED=seed, RANK=seed, HOSTNAME=seed) for seed in ("0", "1", "7")}
    assert len(keys) == 1
    assert len(set(keys.pop().split())) == 3


def test_names_do_not_take_part(key):
    graph, (a, _, _) = graphs.matmul(name="another")
    a.set_name("renamed")
    assert key(graph) == key(graphs.matmul()[0])


def declare(change=None, **kwargs):
    graph = graphs.new(**kwargs)
    a = graph.tensor(dim=[1, 64, 64], stride=[4096, 64, 1])
    b = graph.tensor(dim=[1, 64, 64], stride=[4096, 64, 1])
    scalar = graph.tensor_scalar(2.0, cudnn.scalar_type.RUNTIME_PARAM)
    c = graph.mul(graph.matmul(a, b), scalar)
    c.set_output(True)
    if change:
        change(graph, a, b, c)
    return graph


CHANGES = {
    "a stride": lambda g, a, b, c: a.set_stride([4096, 1, 64]),
    "a shape": lambda g, a, b, c: a.set_dim([1, 32, 64]),
    "a type": lambda g, a, b, c: b.set_data_type(cudnn.data_type.BFLOAT16),
    "an output's stride": lambda g, a, b, c: c.set_stride([4096, 1, 64]),
    "what is an output": lambda g, a, b, c: c.set_output(False),
    "a reordering": lambda g, a, b, c: a.set_reordering_type(cudnn.tensor_reordering.F8_128x4),
    "a uid": lambda g, a, b, c: a.set_uid(77),
    "swapped uids": lambda g, a, b, c: (a.set_uid(102), b.set_uid(101)),
    "an alignment": lambda g, a, b, c: a.set_alignment_value(16),
    "by value": lambda g, a, b, c: a.set_is_pass_by_value(True),
    "a ragged offset": lambda g, a, b, c: a.set_ragged_offset(b),
    "a ragged multiplier": lambda g, a, b, c: a.set_ragged_offset_multiplier(4),
    "one more node": lambda g, a, b, c: g.relu(c),
    "one more node with a parameter": lambda g, a, b, c: g.relu(c, negative_slope=0.1),
    "another parameter": lambda g, a, b, c: g.relu(c, negative_slope=0.2),
    "a scalar that is not used": lambda g, a, b, c: g.tensor_scalar(3.0, cudnn.scalar_type.RUNTIME_PARAM),
    "another scalar": lambda g, a, b, c: g.tensor_scalar(3, cudnn.scalar_type.COMPILE_TIME_CONST),
}
ARGUMENTS = {
    "io": {"io_data_type": cudnn.data_type.BFLOAT16},
    "compute": {"compute_data_type": cudnn.data_type.HALF},
    "intermediate": {"intermediate_data_type": cudnn.data_type.HALF},
    "dynamic": {"is_dynamic_shape_enabled": True},
    "override": {"is_override_shape_enabled": True},
    "replay": {"is_cuda_graph_replay_expected": True},
    "kernel cache": {"kernel_cache": "made below"},
}


def test_every_change_of_a_graph_is_another_key_and_no_two_are_the_same(key):
    keys = {"plain": key(declare())}
    keys |= {name: key(declare(change)) for name, change in CHANGES.items()}
    for name, arguments in ARGUMENTS.items():
        if "kernel_cache" in arguments:
            arguments = {"kernel_cache": cudnn.create_kernel_cache()}
        keys[name] = key(declare(**arguments))
    assert len({one.graph for one in keys.values()}) == len(keys)
    assert keys["plain"] == key(declare())


def outside(stride=(4096, 64, 1), data_type=cudnn.data_type.HALF, offset=cudnn.data_type.INT32, **kwargs):
    """A graph with tensors that it did not make itself: the frontend lowers them as its own."""
    graph = graphs.new()
    a = cudnn.Tensor(dim=[1, 64, 64], stride=list(stride), data_type=data_type, uid=1001)
    ragged = cudnn.Tensor(dim=[2, 1, 1], stride=[1, 1, 1], data_type=offset, uid=1002)
    b = graph.tensor(dim=[1, 64, 64], stride=[4096, 64, 1], ragged_offset=ragged)
    graph.matmul(a, b).set_output(True)
    return graph


def test_tensors_that_a_graph_did_not_make_itself_take_part(key):
    plain = key(outside())
    assert key(outside()) == plain
    for change in (
        {"stride": (4096, 1, 64)},
        {"data_type": cudnn.data_type.BFLOAT16},
        {"offset": cudnn.data_type.INT64},
    ):
        assert key(outside(**change)) != plain


def test_two_tensors_with_one_uid_cannot_be_keyed(targeted, tmp_path):
    graph = graphs.new()
    a, b = (cudnn.Tensor(dim=[1, 64, 64], stride=[4096, 64, 1], data_type=graphs.HALF, uid=7) for _ in range(2))
    graph.matmul(a, b).set_output(True)
    with plancache.open(tmp_path) as cache:
        assert cache.lookup(graph).reason is Reason.NOT_KEYABLE


def test_numbers_of_other_types_and_signs_are_other_documents():
    values = [1, 1.0, True, "1", None, 0.0, -0.0, float("inf"), 1e-300, [1], {"integer": 1}]
    assert len({digest(value) for value in values}) == len(values)


def test_a_tuple_says_what_a_list_says(key):
    plain, other = graphs.new(), graphs.new()
    plain.tensor(dim=[1, 2], stride=[2, 1])
    other.tensor(dim=(1, 2), stride=(2, 1))
    assert key(plain) == key(other)


def test_keys_compare_by_their_hashes_and_print_short():
    one = PlanKey.of({"a": 1}, {"b": 1}, {"c": 1}, {"d": 1})
    same = PlanKey(one.graph, one.device, one.environment, one.build)
    assert one == same
    assert hash(one) == hash(same)
    assert str(one) == one.hash[:16]
    others = [
        PlanKey.of({"a": 2}, {"b": 1}, {"c": 1}, {"d": 1}),
        PlanKey.of({"a": 1}, {"b": 2}, {"c": 1}, {"d": 1}),
        PlanKey.of({"a": 1}, {"b": 1}, {"c": 2}, {"d": 1}),
        PlanKey.of({"a": 1}, {"b": 1}, {"c": 1}, {"d": 2}),
        PlanKey.of({"b": 1}, {"a": 1}, {"c": 1}, {"d": 1}),
    ]
    assert len({one.hash, *(other.hash for other in others)}) == 6


def test_the_order_of_deselected_engines_does_not_matter_and_that_of_heuristics_does():
    assert BuildSpec(["A"], deselected_engines=["x", "y"]).document() == (
        BuildSpec(["A"], deselected_engines=["y", "x"]).document()
    )
    assert BuildSpec(["A", "B"]).document() != BuildSpec(["B", "A"]).document()


def test_the_environment_names_versions_and_flavour(key):
    document = key(graphs.matmul()[0]).documents["environment"]
    assert document["cudnn"] == cudnn.backend_version()
    assert document["cuda"] in (12, 13)
    assert "runtime_compiled" in document["engines"]
    assert document["python_engines"]["opt_in"] is False


@pytest.mark.parametrize("name", ["CUDNN_FRONTEND_ENABLE_FROST_ENGINES", "NVIDIA_TF32_OVERRIDE"])
def test_switches_that_change_the_plan_list_take_part(key, monkeypatch, name):
    plain = key(graphs.matmul()[0])
    monkeypatch.setenv(name, "1")
    assert key(graphs.matmul()[0]).environment != plain.environment
