"""A graph that was served from the cache answers as the one that was built, and no question kills the process."""

import cudnn
import pytest

import plancache
from tests import graphs

BUILDERS = ("matmul", "conv", "sdpa")


@pytest.fixture
def served(warm, targeted):
    def serve(name):
        graph, tensors = getattr(graphs, name)()
        with plancache.open(warm, mode="require-hit") as cache:
            assert cache.build(graph).source == "disk"
        return graph, tensors

    return serve


def attributes(graph):
    return [(t.name, t.uid, list(t.dim), list(t.stride), t.get_data_type(), t.is_virtual) for t in tensors_of(graph)]


def tensors_of(graph):
    found = {t.uid: t for node in graph.nodes for t in (*node.inputs.values(), *node.outputs.values())}
    return [found[uid] for uid in sorted(found)]


@pytest.mark.parametrize("name", BUILDERS)
def test_every_tensor_has_the_inferred_shape_stride_and_type(served, built, name):
    graph, tensors = served(name)
    assert attributes(graph) == attributes(built[name][0])
    assert tensors[-1].get_dim() == built[name][1][-1].get_dim()
    assert tensors[-1].get_data_type() == cudnn.data_type.HALF


@pytest.mark.parametrize("name", BUILDERS)
def test_plans_names_engines_and_knobs_are_the_built_ones(served, built, name):
    graph, reference = served(name)[0], built[name][0]
    count = reference.get_execution_plan_count()
    assert graph.get_execution_plan_count() == count > 0
    for index in range(count):
        assert graph.get_plan_name_at_index(index) == reference.get_plan_name_at_index(index)
        assert graph.get_engine_and_knobs_at_index(index) == reference.get_engine_and_knobs_at_index(index)
    assert [(plan.engine_id, plan.knobs) for plan in graph.plans] == [(p.engine_id, p.knobs) for p in reference.plans]
    assert graph.selected_engine is reference.selected_engine is None


@pytest.mark.parametrize("name", BUILDERS)
def test_workspace_notes_and_serialization_are_the_plans(served, built, name, h200):
    graph, reference = served(name)[0], built[name][0]
    assert graph.get_workspace_size() == reference.get_workspace_size()
    assert graph.get_workspace_size_plan_at_index(0) == reference.get_workspace_size_plan_at_index(0)
    assert graph.get_behavior_notes() == reference.get_behavior_notes()
    assert graph.get_behavior_notes_for_plan_at_index(0) == reference.get_behavior_notes_for_plan_at_index(0)
    assert graph.get_cuda_graph_retention() == reference.get_cuda_graph_retention()
    blob = graph.serialize(as_bytes=True)
    assert list(blob) == graph.serialize()
    again = cudnn.pygraph(device_property=h200.native)
    again.deserialize(blob)
    assert again.get_workspace_size() == reference.get_workspace_size()
    assert "loaded by plancache" in repr(graph)  # none of this planned it again


def test_tensors_are_found_by_name_uid_or_themselves(served):
    graph, (a, _, c) = served("matmul")
    assert graph.find_tensor("c") is c
    assert graph.find_tensor(a.get_uid()) is a
    # The frontend resolves all three to the uid, and refuses a buffer that is missing before it touches a device.
    with pytest.raises(ValueError, match="missing a buffer for tensor uid .*'b'"):
        graph.execute({a: 4096, "c": 4096}, workspace=0)


def test_a_served_graph_is_frozen_as_a_built_one_is(served, built):
    for graph, tensors in (served("matmul"), built["matmul"]):
        with pytest.raises(RuntimeError, match="frozen"):
            graph.relu(tensors[0])
        with pytest.raises(RuntimeError, match="frozen"):
            tensors[0].set_dim([1, 1, 1])
        with pytest.raises(RuntimeError, match="already called"):
            graph.create_execution_plans([cudnn.heur_mode.A])


def test_building_a_served_graph_again_does_nothing(served):
    graph, _ = served("matmul")
    for call in (graph.build, graph.validate, graph.build_operation_graph, graph.check_support, graph.build_plans):
        call()
    graph.build_plan_at_index(0)
    graph.select_plan(0).build_plans()
    assert "loaded by plancache" in repr(graph)


def test_what_only_a_planned_graph_knows_plans_it_really(served, built):
    reference = built["matmul"][0]
    for ask in (
        lambda g: g.get_engine_count(),
        lambda g: g.key(),
        lambda g: g.get_knobs_for_engine(4),
        lambda g: str(g.query_tensor_attributes_of_uid(1)),
        lambda g: [(e.engine_id, e.knobs, e.cpp_index, e.mode) for e in g.backend_plan_entries()],
    ):
        graph, _ = served("matmul")
        assert str(ask(graph)) == str(ask(reference))
        assert "loaded by plancache" not in repr(graph)
        assert graph.get_workspace_size() == reference.get_workspace_size()
        assert graph.plans == reference.plans


def test_another_plan_of_the_list_can_be_built_and_chosen(served):
    graph, _ = served("matmul")
    graph.build_plan_at_index(3)
    assert "eng4" in graph.get_plan_name_at_index(3)
    assert graph.get_workspace_size() >= 0
    graph, _ = served("matmul")
    graph.select_plan(2)
    with pytest.raises(RuntimeError, match="build"):
        graph.get_workspace_size()
    graph.build_plans()
    assert graph.serialize(as_bytes=True)


def test_attributes_that_the_caller_put_on_the_graph_stay_there(served):
    graph, _ = served("matmul")
    graph.my_workspace = "kept"
    assert graph.get_engine_count() > 0
    assert graph.my_workspace == "kept"


def test_a_graph_with_tensors_from_outside_is_served(tmp_path, targeted):
    def declare():
        graph = graphs.new()
        a = cudnn.Tensor(dim=[1, 64, 64], stride=[4096, 64, 1], data_type=graphs.HALF, uid=1001, dim_assigned=True)
        b = graph.tensor(dim=[1, 64, 64], stride=[4096, 64, 1])
        c = graph.matmul(a, b)
        c.set_output(True)
        return graph, c

    with plancache.open(tmp_path) as cache:
        assert cache.build(declare()[0]).source == "built"
        graph, c = declare()
        assert cache.build(graph).source == "disk"
        assert c.get_dim() == [1, 64, 64]
        assert graph.get_engine_count() > 0


def test_an_explicit_plan_can_be_added_as_to_a_built_graph(served):
    graph, _ = served("matmul")
    engine, knobs = graph.get_engine_and_knobs_at_index(1)
    count = graph.get_execution_plan_count()
    graph.create_execution_plan(engine, knobs)
    assert graph.get_execution_plan_count() == count + 1
    graph.build_plan_at_index(count)


def test_a_filter_after_serving_excludes_the_served_plan(served):
    graph, _ = served("matmul")
    served_name = graph.get_plan_name_at_index(0)
    graph.deselect_engines(["eng4_"])
    with pytest.raises(RuntimeError, match="build"):
        graph.get_workspace_size()
    graph.build_plans()
    assert served_name.startswith("eng4_")
    with pytest.raises(ValueError, match="excluded"):
        graph.build_plan_at_index(0)


def test_if_planning_really_fails_the_graph_is_served_as_before(served, monkeypatch):
    graph, _ = served("matmul")

    def fails(*args, **kwargs):
        raise RuntimeError("no memory for this")

    monkeypatch.setattr(cudnn.pygraph, "validate", fails)
    with pytest.raises(RuntimeError, match="no memory for this"):
        graph.get_engine_count()
    assert "loaded by plancache" in repr(graph)
    assert graph.get_workspace_size() == 0
    monkeypatch.undo()
    assert graph.get_engine_count() > 0


# Called without arguments and with an index; a Python exception is an answer, a signal is not.
WALK = """
import faulthandler, sys
faulthandler.enable()
import cudnn, plancache
from tests import graphs
names = sorted({n for n in (*dir(cudnn.pygraph), *dir(cudnn._pybind_module.backend_graph)) if not n.startswith("__")})
names = [n for n in names if not n.startswith("_execute")]  # raw pointers: the caller's, not ours to make up
with plancache.target("h200"), plancache.open(sys.argv[1], mode="require-hit") as cache:
    for name in names[int(sys.argv[2])::2]:
        for arguments in ((), (0,), (1,), (-1,)):
            graph, _ = graphs.matmul()
            cache.build(graph)
            print(name, arguments, flush=True)
            try:
                value = getattr(graph, name)
                if callable(value):
                    value(*arguments)
                graph.get_workspace_size()
                graph.serialize(as_bytes=True)
            except Exception as error:
                print("  ", type(error).__name__)
assert {"get_engine_count", "get_knobs_for_engine", "create_execution_plan", "execute"} <= set(names)
print("walked", len(names))
"""


@pytest.mark.parametrize("part", range(2))
def test_no_method_of_a_served_graph_kills_the_process(warm, run, part):
    done = run(WALK, warm, part, check=False)
    assert done.returncode == 0, done.stdout[-300:] + done.stderr[-2000:]
    assert "walked" in done.stdout


def test_the_plan_is_freed_with_its_graph(served):
    # No reference cycle: the garbage collector must not free plans while somebody's stream captures.
    import gc
    import weakref

    gc.collect()
    gc.disable()
    try:
        graph, tensors = served("conv")
        gone = weakref.ref(graph)
        del graph, tensors
        assert gone() is None
    finally:
        gc.enable()
