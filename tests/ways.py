"""Ways to build a graph with the frontend's own calls, and what a built graph can be asked without a GPU."""

import cudnn
import pytest

from plancache.outcome import Source
from tests.graphs import stages

A, FALLBACK = cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK
CHOICE, ALL = cudnn.build_plan_policy.HEURISTICS_CHOICE, cudnn.build_plan_policy.ALL
PAIR = (4, {cudnn.knob_type.KERNEL_CFG: 1})


def explicit(graph):
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plan(*PAIR)
    graph.check_support()
    graph.build_plans()


def validated_only(graph):
    graph.validate()
    graph.build_operation_graph()
    return graph.get_engine_count(), str(graph.get_knobs_for_engine(4)), graph.get_execution_plan_count()


def planned_only(graph):
    graph.validate()
    graph.create_execution_plans([A])
    with pytest.raises(RuntimeError, match="build"):
        graph.get_workspace_size()
    names = [graph.get_plan_name_at_index(index) for index in range(graph.get_execution_plan_count())]
    pairs = [graph.get_engine_and_knobs_at_index(index) for index in range(len(graph.plans))]
    graph.build_plans()
    return names, pairs


def chosen_by_index(graph):
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([A])
    graph.check_support()
    graph.build_plan_at_index(2)
    return graph.get_workspace_size_plan_at_index(2)


def pinned(graph):
    graph.validate()
    graph.create_execution_plans([A])
    graph.select_plan(1)
    graph.build_plans()


def mixed(graph):
    graph.validate()
    graph.create_execution_plans()
    graph.create_execution_plan(*PAIR)
    graph.build_plans()


def changing(graph):
    modes = [A]
    graph.validate()
    graph.create_execution_plans(modes)
    modes[:] = [FALLBACK]
    graph.build_plans()


def asked_for_the_backends_plans(graph):
    """As FlashInfer asks, between planning and building, whether the backend takes the graph at all."""
    entries = []
    stages(graph, after=lambda graph: entries.extend(graph.backend_plan_entries()))
    return [(entry.engine_id, entry.knobs, entry.cpp_index, entry.mode) for entry in entries]


# name -> what is done, and what it comes to on a warm cache
WAYS = {
    "build": (lambda graph: graph.build(), Source.DISK),
    "build with a mode": (lambda graph: graph.build([A]), Source.DISK),
    "stage by stage": (stages, Source.DISK),
    "with a policy": (lambda graph: stages(graph, policy=CHOICE), Source.DISK),
    "two modes": (lambda graph: stages(graph, [A, FALLBACK]), Source.DISK),
    "validated, then build": (lambda graph: (graph.validate(), graph.build([A]))[1], Source.DISK),
    "a filter before planning": (lambda g: stages(g, between=lambda g: g.deselect_engines(["eng4"])), Source.DISK),
    "a filter after planning": (lambda g: stages(g, after=lambda g: g.deselect_engines(["eng4"])), Source.DISK),
    "a late limit": (lambda g: stages(g, between=lambda g: g.deselect_workspace_greater_than(0)), Source.DISK),
    "a limit after planning": (lambda g: stages(g, after=lambda g: g.deselect_workspace_greater_than(0)), Source.DISK),
    "a note": (
        lambda g: stages(g, after=lambda g: g.select_behavior_notes([cudnn.behavior_note.RUNTIME_COMPILATION])),
        Source.DISK,
    ),
    "an explicit plan": (explicit, Source.DISK),
    "validated only": (validated_only, None),
    "asked before it is built": (planned_only, Source.DISK),
    "asked for the backend's plans": (asked_for_the_backends_plans, Source.DISK),
    "another index": (chosen_by_index, None),
    "pinned": (pinned, Source.BYPASSED),
    "planned, then build": (
        lambda g: (g.validate(), g.create_execution_plans([A]), g.build(), g.build([A, FALLBACK]))[2:],
        Source.DISK,
    ),
    "planned, then executed": (
        lambda g: (g.validate(), g.create_execution_plans([A]), g.check_support(), g.execute({}, 0))[3:],
        Source.DISK,
    ),
    "validated, then executed": (lambda g: (g.validate(), g.execute({}, 0))[1:], None),
    "heuristics and an explicit plan": (mixed, Source.BYPASSED),
    "planned twice": (lambda g: (g.validate(), g.create_execution_plans(), g.create_execution_plans())[2:], None),
    "serialized before it is built": (
        lambda g: (g.validate(), g.create_execution_plans([A]), g.get_plan_name_at_index(1), g.serialize())[2:],
        None,
    ),
    "a filter by keyword": (
        lambda g: stages(g, between=lambda g: g.deselect_engines(engine_names=["eng4"])),
        Source.DISK,
    ),
    "a filter from an iterator": (
        lambda g: stages(g, between=lambda g: (g.deselect_engines(n for n in ["eng4"]), g.get_execution_plan_count())),
        Source.DISK,
    ),
    "names, then a filter": (
        lambda g: stages(g, after=lambda g: (g.get_plan_name_at_index(0), g.deselect_engines(["eng4"]))),
        Source.DISK,
    ),
    "a list that changes": (changing, Source.DISK),
    "a filter of a wrong type": (
        lambda g: (g.validate(), g.build_operation_graph(), g.deselect_workspace_greater_than("x"))[2:],
        None,
    ),
}


def state(graph, c):
    """All that can be asked of a graph in whatever state it is, without a GPU."""
    answers = [list(c.get_dim()), list(c.get_stride()), c.get_data_type(), graph.get_execution_plan_count()]
    for ask in (
        lambda: graph.get_workspace_size(),
        lambda: [graph.get_plan_name_at_index(index) for index in range(graph.get_execution_plan_count())],
        lambda: [graph.get_engine_and_knobs_at_index(index) for index in range(graph.get_execution_plan_count())],
        lambda: graph.get_behavior_notes(),
        lambda: graph.selected_engine,
        lambda: graph.get_cuda_graph_retention(),
    ):
        try:
            answers.append(ask())
        except Exception as error:
            answers.append((type(error), str(error)))
    return answers
