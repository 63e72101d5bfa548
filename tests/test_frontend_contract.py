"""Each private attribute of the frontend that plancache reads or writes is there and means what it is taken for.

A new frontend that changes one of them fails here, by name, before it fails anywhere else.
"""

import dataclasses
import inspect
import re

import cudnn
from cudnn.engines.base import PlanConfig
from cudnn.engines.engine_ids import is_python_engine

from plancache.cudnn import frontend, python_plans, target
from plancache.cudnn import graph as documents
from plancache.settings import PACKAGE
from tests import graphs

ATTRIBUTES = {
    "_context",
    "_cpp_graph_kwargs",
    "_handle",
    "_nodes",
    "_tensor_by_uid",
    "_barred_names",
    "_workspace_limit",
    "_note_filters",
    "_plans",
    "_plan_index",
    "_plan_pinned",
    "_planning_done",
    "_is_validated",
    "_is_built",
    "_frozen",
    "_lowered_graph",
    "_cpp_bog_done",
    "_cpp_plans_created",
    "_reserved_uids",
}


def test_every_graph_has_the_attributes_that_are_used(targeted):
    assert set(vars(graphs.matmul()[0])) >= ATTRIBUTES


def test_no_other_module_touches_them():
    names = "|".join(sorted(ATTRIBUTES - {"_handle", "_context"}))
    for file in PACKAGE.rglob("*.py"):
        if file.name != "frontend.py":
            assert not re.findall(rf"\.({names})\b", file.read_text()), file


def test_no_other_attribute_is_touched(targeted):
    text = (PACKAGE / "cudnn" / "frontend.py").read_text()
    graph = vars(graphs.matmul()[0])
    used = {name for name in re.findall(r"\b(?:graph|container)\.(_\w+)", text) if name in graph}
    assert used == ATTRIBUTES - set(frontend._FILTERS) | set(frontend._FILTERS)


def test_a_declared_graph_is_neither_validated_nor_frozen_nor_planned(targeted):
    graph, _ = graphs.matmul()
    assert not frontend.is_planned(graph)
    assert not frontend.is_validated(graph)
    graph.validate()
    assert frontend.is_validated(graph)
    assert not frontend.is_planned(graph)
    graph.build()
    assert frontend.is_planned(graph)


def test_tensors_hold_the_fields_that_the_key_takes_and_leaves_out():
    fields = {field.name for field in dataclasses.fields(cudnn.Tensor)}
    assert fields == {
        *("name", "owner", "uid", "uid_assigned", "dim", "dim_assigned", "stride", "stride_assigned", "data_type"),
        *("is_virtual", "is_pass_by_value", "pass_by_value", "scalar_type", "reordering_type", "alignment_value"),
        *("ragged_offset", "ragged_offset_multiplier"),
    }


def test_nodes_hold_the_fields_that_the_key_takes(targeted):
    (node, _) = frontend.nodes(graphs.matmul()[0])
    assert set(vars(node)) == {"name", "node_type", "compute_data_type", "inputs", "outputs", "params"}


def test_the_candidate_of_a_loaded_container_is_addressed_as_minus_one(built):
    # What PlanConfig(cpp_index=-1) of a served graph stands on.
    graph, _ = built["matmul"]
    assert [field.name for field in dataclasses.fields(PlanConfig)] == ["engine_id", "knobs", "cpp_index", "mode"]
    assert graph._plans[graph._plan_index].cpp_index >= 0
    source = (PACKAGE / "cudnn" / "frontend.py").read_text()
    assert "_CANDIDATE = -1" in source
    execute = inspect.getsource(cudnn.pygraph._execute)
    assert "-1 if cpp_index is None else cpp_index" in execute


def test_the_lowered_graph_has_every_method_that_is_passed_on(built):
    lowered = type(built["matmul"][0]._lowered_graph)
    for name in (*frontend._PASSED_ON, *frontend._HANDLE_AT):
        assert hasattr(lowered, name), name


def test_the_handle_is_where_the_launching_methods_are_told_to_take_it():
    backend = cudnn._pybind_module.backend_graph
    for name, place in frontend._HANDLE_AT.items():
        arguments = re.findall(r"(\w+): ", (getattr(backend, name).__doc__ or "").split("\n")[0])
        assert arguments[place] == "handle", (name, arguments)


def test_the_constructor_takes_its_arguments_in_the_order_that_target_names_them():
    names = [p.name for p in inspect.signature(cudnn.pygraph).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert tuple(names) == target._POSITIONAL


def test_the_private_methods_that_are_called_are_there():
    text = (PACKAGE / "cudnn" / "frontend.py").read_text()
    called = set(re.findall(r"\bgraph\.(_\w+)\(", text))
    assert called == {
        *("_freeze", "_register_tensor", "_backend_handle_for_lowering", "_python_native_validator"),
        *("_barred_indices", "_variant_pack_uids"),
    }
    assert all(callable(getattr(cudnn.pygraph, name)) for name in called)


def test_python_engines_are_told_by_their_id():
    assert is_python_engine(20517)
    assert not is_python_engine(9)


def test_a_stored_plan_of_a_python_engine_makes_its_knobs_when_asked():
    plan = frontend.Plan("sdpa_fwd_prefill_sm90", 20517, {}, None)
    config = python_plans.entry(plan, None)
    assert (config.engine_id, config.cpp_index) == (20517, None)
    assert isinstance(config, PlanConfig)


def test_the_heuristics_that_the_frontend_takes_by_itself(targeted):
    # The key names them where none are given: the plan list is that of the two written out, and not of the first.
    def names(heuristics):
        graph, _ = graphs.unary()
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans(heuristics)
        return [graph.get_plan_name_at_index(place) for place in range(graph.get_execution_plan_count())]

    assert documents._DEFAULT_HEURISTICS == ("A", "FALLBACK")
    written_out = [cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK]
    assert names(None) == names(written_out)
