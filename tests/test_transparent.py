"""Under `enable()` code that knows only cuDNN gets the answers that it gets without, on an empty and a warm cache."""

import importlib
import subprocess
import sys
import textwrap
import threading

import cudnn
import pytest

import plancache
from plancache import transparent
from plancache.errors import MissError
from plancache.outcome import Reason, Source
from tests import graphs
from tests.conftest import ROOT
from tests.graphs import stages
from tests.ways import ALL, WAYS, A, explicit, mixed, state


@pytest.fixture(autouse=True)
def off(monkeypatch):
    yield
    transparent.disable()


@pytest.fixture
def declared(h200):
    """Graphs made by `cudnn.pygraph` itself, for a device that is not here."""

    def declare(m=32):
        graph = graphs.plain(h200, intermediate_data_type=cudnn.data_type.FLOAT)
        a = graph.tensor(dim=[1, m, 64], stride=[m * 64, 64, 1], name="a")
        b = graph.tensor(dim=[1, 64, 128], stride=[64 * 128, 128, 1], name="b")
        c = graph.matmul(a, b, name="product")
        c.set_output(True)
        return graph, c

    return declare


@pytest.mark.parametrize("way", list(WAYS))
def test_every_way_to_build_gives_the_same_on_no_an_empty_and_a_warm_cache(way, declared, tmp_path):
    do, source = WAYS[way]

    def once():
        graph, c = declared()
        try:
            result = do(graph)
        except Exception as error:
            result = type(error), str(error)
        return result, state(graph, c), plancache.last_outcome(graph)

    plain = once()
    assert plain[2] is None
    with plancache.open(tmp_path / "cache") as cache, plancache.enabled(cache):
        cold, warm = once(), once()
    assert cold[:2] == plain[:2]
    assert warm[:2] == plain[:2]
    if source is not None:
        assert warm[2] is not None, plain[0]
        assert warm[2].source is source


def test_on_a_hit_none_of_the_expensive_stages_runs(declared, tmp_path, monkeypatch):
    with plancache.open(tmp_path / "cache") as cache, plancache.enabled(cache):
        stages(declared()[0])

        def never(*_):
            raise AssertionError("a stage ran that a hit does not need")

        for name in ("_lower_to_cpp", "_candidate_engines", "_attach_facts"):
            monkeypatch.setattr(cudnn.pygraph, name, never)
        graph, c = declared()
        stages(graph)
        assert plancache.last_outcome(graph).source is Source.DISK
        assert graph.get_plan_name_at_index(0)
        assert c.get_dim() == [1, 32, 128] or tuple(c.get_dim()) == (1, 32, 128)


def test_two_orders_of_a_workspace_limit_are_two_plans(declared, tmp_path):
    # Before validate() it does not reach the backend (frontend 1.32); after, it does.
    with plancache.open(tmp_path / "cache") as cache, plancache.enabled(cache):
        for early in (True, False):
            graph, _ = declared()
            if early:
                graph.deselect_workspace_greater_than(0)
            stages(graph, between=lambda g, early=early: None if early else g.deselect_workspace_greater_than(0))
            assert plancache.last_outcome(graph).source is Source.BUILT
    with plancache.open(tmp_path / "cache") as cache:
        assert len({listed.row.build for listed in cache.rows()}) == 2


def test_policy_all_is_built_whole_and_not_cached(declared, tmp_path):
    with plancache.open(tmp_path / "cache") as cache, plancache.enabled(cache):
        stages(declared()[0])
        graph, _ = declared()
        stages(graph, policy=ALL)
        outcome = plancache.last_outcome(graph)
        assert (outcome.source, outcome.reason) == (Source.BYPASSED, Reason.EVERY_PLAN)
        sizes = [graph.get_workspace_size_plan_at_index(index) for index in (0, 1)]
    assert all(isinstance(size, int) for size in sizes)


def test_wrong_arguments_are_refused_by_the_frontend_as_ever(declared, tmp_path):
    def errors():
        found = []
        for call in (
            lambda g: g.build("A"),
            lambda g: stages(g, ["A"]),
            lambda g: g.create_execution_plan("four"),
            lambda g: (stages(g), g.create_execution_plans([A])),
            lambda g: (stages(g), g.get_plan_name_at_index(99)),
            lambda g: g.nothing_of_this_name,
            lambda g: (g.validate(), g.nothing_of_this_name),
            lambda g: g.select_plan(0),
        ):
            with pytest.raises(Exception) as caught:  # noqa: PT011 (whatever it is, it must be the same)
                call(declared()[0])
            found.append((type(caught.value), str(caught.value)))
        return found

    plain = errors()
    with plancache.open(tmp_path / "cache") as cache, plancache.enabled(cache):
        assert errors() == plain
        assert errors() == plain


def test_a_graph_that_is_not_supported_fails_with_the_frontends_own_error(h200, tmp_path):
    def attempt():
        graph = graphs.plain(h200)
        x = graph.tensor(dim=[1, 3, 5, 7], stride=[105, 35, 7, 1])
        w = graph.tensor(dim=[4, 2, 3, 3], stride=[18, 9, 3, 1])
        graph.conv_fprop(x, w, padding=[0, 0], stride=[1, 1], dilation=[1, 1]).set_output(True)
        with pytest.raises(Exception) as caught:  # noqa: PT011
            stages(graph)
        return type(caught.value), str(caught.value)

    plain = attempt()
    with plancache.open(tmp_path / "cache") as cache, plancache.enabled(cache):
        assert [attempt(), attempt()] == [plain, plain]
        assert list(cache.rows()) == []


def test_the_graph_wrapper_is_served_too(targeted, tmp_path):
    def wrapped():
        with cudnn.Graph(
            io_data_type=cudnn.data_type.HALF, compute_data_type=cudnn.data_type.FLOAT, heuristics=[A]
        ) as graph:
            a = graph.tensor(dim=[1, 32, 64], stride=[2048, 64, 1], name="a")
            b = graph.tensor(dim=[1, 64, 128], stride=[8192, 128, 1], name="b")
            graph.matmul(a, b, name="c").set_output(True)

    with plancache.open(tmp_path / "cache") as cache, plancache.enabled(cache):
        try:
            wrapped()
        except Exception as error:
            pytest.skip(f"needs a GPU: {error}")
        wrapped()
        assert [source for source, _ in cache.stats()] == [Source.BUILT, Source.DISK]


def test_target_reaches_builders_that_call_cudnn_themselves(targeted, tmp_path):
    with plancache.open(tmp_path / "cache") as cache, plancache.enabled(cache):
        graph = cudnn.pygraph(io_data_type=cudnn.data_type.HALF, compute_data_type=cudnn.data_type.FLOAT)
        a = graph.tensor(dim=[1, 32, 64], stride=[2048, 64, 1])
        b = graph.tensor(dim=[1, 64, 128], stride=[8192, 128, 1])
        graph.matmul(a, b).set_output(True)
        graph.build()
        assert plancache.last_outcome(graph).stored


def test_dynamic_shapes_get_the_kernel_cache_of_their_topology(targeted, tmp_path):
    from tests.test_kernel_cache import mlp

    with plancache.open(tmp_path / "cache") as cache, plancache.enabled(cache):
        outcomes = []
        for m in (8, 9, 8):
            graph = mlp(m)
            stages(graph)
            outcomes.append(plancache.last_outcome(graph))
        assert [outcome.reason for outcome in outcomes] == [Reason.ABSENT, Reason.KERNELS, Reason.FOUND]
    with plancache.open(tmp_path / "cache") as cache, plancache.enabled(cache):
        graph = mlp(77)
        stages(graph)
        assert plancache.last_outcome(graph).reason is Reason.KERNELS


# ------------------------------------------------------------ on, off and twice


def test_off_again_nothing_is_hooked(declared, tmp_path):
    before = dict(vars(cudnn.pygraph))
    for _ in range(2):
        plancache.enable(plancache.open(tmp_path / "cache"))
    assert vars(cudnn.pygraph)["build"] is not before["build"]
    plancache.disable()
    plancache.disable()
    assert dict(vars(cudnn.pygraph)) == before
    graph, _ = declared()
    stages(graph)
    assert plancache.last_outcome(graph) is None


def test_what_was_put_off_is_done_when_it_is_switched_off(declared, tmp_path):
    cache = plancache.enable(plancache.open(tmp_path / "cache"))
    stages(declared()[0])
    validated, planned = declared()[0], declared()[0]
    validated.validate()
    planned.validate()
    planned.create_execution_plans([A])
    plancache.disable()
    assert validated.get_execution_plan_count() == 0
    assert planned.get_execution_plan_count() > 0
    planned.build_plans()
    assert planned.get_workspace_size() >= 0
    cache.close()


def test_of_two_caches_the_innermost_counts(declared, tmp_path):
    outer, inner = plancache.open(tmp_path / "outer"), plancache.open(tmp_path / "inner")
    with plancache.enabled(outer), plancache.enabled(inner):
        declared()[0].build()
        with plancache.enabled(outer):
            declared()[0].build()
    assert [sum(cache.stats().values()) for cache in (outer, inner)] == [1, 1]
    assert "build" not in transparent._installed


def test_reloading_the_module_hooks_once(declared, tmp_path):
    plain = vars(cudnn.pygraph)["build"]
    plancache.enable(plancache.open(tmp_path / "cache"))
    importlib.reload(transparent)
    with plancache.open(tmp_path / "cache") as cache, transparent.enabled(cache):
        graph, _ = declared()
        graph.build()
        assert sum(cache.stats().values()) == 1
    transparent.disable()
    assert vars(cudnn.pygraph)["build"] is plain


def test_explicit_builds_and_decorated_ones_go_to_their_own_cache_once(tmp_path, targeted):
    own = plancache.open(tmp_path / "own")
    with plancache.open(tmp_path / "enabled") as cache, plancache.enabled(cache):
        assert own.build(graphs.matmul()[0]).stored
        assert cache.stats() == {}


def test_require_hit_is_an_error_and_off_changes_nothing(declared, tmp_path):
    with plancache.open(tmp_path / "cache", mode="require-hit") as cache, plancache.enabled(cache):
        for attempt in (lambda g: g.build(), stages):
            with pytest.raises(MissError):
                attempt(declared()[0])
    with plancache.open(tmp_path / "cache", mode="off") as cache, plancache.enabled(cache):
        graph, _ = declared()
        stages(graph)
        assert plancache.last_outcome(graph).reason is Reason.OFF


def test_check_mode_builds_what_a_hit_would_have_served(declared, tmp_path):
    for mode, source in (("read-write", Source.BUILT), ("check", Source.BUILT), ("check", Source.BUILT)):
        with plancache.open(tmp_path / "cache", mode=mode) as cache, plancache.enabled(cache):
            graph, _ = declared()
            stages(graph)
            assert plancache.last_outcome(graph).source is source


SCRIPT = """
import sys, time
from cudnn import data_type, heur_mode, pygraph
import plancache
plancache.enable(plancache.open(sys.argv[1]))
with plancache.target("h200"):
    graph = pygraph(io_data_type=data_type.HALF, compute_data_type=data_type.FLOAT)
    q, k, v = (graph.tensor(dim=[1, 8, 512, 128], stride=[8 * 512 * 128, 512 * 128, 128, 1]) for _ in range(3))
    o, _ = graph.sdpa(q=q, k=k, v=v, attn_scale=0.1, is_inference=True, use_causal_mask=True)
    o.set_output(True)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([heur_mode.A])
    graph.check_support()
    graph.build_plans()
print(plancache.last_outcome(graph).source, "cudnn.sdpa.fwd.engines" in sys.modules)
"""


def test_a_second_process_imports_no_python_engine(tmp_path):
    said = [
        subprocess.run(
            [sys.executable, "-W", "error", "-c", textwrap.dedent(SCRIPT), tmp_path],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for _ in range(2)
    ]
    assert said == ["built True\n", "disk False\n"]


def test_a_graph_that_is_still_open_after_validation_may_be_changed(h200, tmp_path):
    # Where one of the frontend's Python engines may take it, validate() neither lowers nor freezes a graph.
    def attention():
        graph = graphs.plain(h200)
        q, k, v = (graph.tensor(dim=[1, 2, 64, 64], stride=[8192, 4096, 64, 1]) for _ in range(3))
        o, _ = graph.sdpa(q=q, k=k, v=v, attn_scale=0.1, is_inference=True)
        o.set_output(True)
        return graph, o

    def changed():
        graph, o = attention()
        graph.validate()
        try:
            o.set_name("renamed")
            graph.relu(o).set_output(True)
            stages(graph)
        except Exception as error:
            return type(error), str(error)
        return state(graph, o)

    changed()  # what the Python engines say on a machine without a GPU depends on whether they were asked before
    plain = changed()
    with plancache.open(tmp_path / "cache") as cache, plancache.enabled(cache):
        stages(attention()[0])
        assert changed() == plain
        assert changed() == plain


def test_an_explicit_plan_is_never_served_for_heuristics_nor_the_other_way_round(declared, tmp_path):
    def explicitly():
        graph, _ = declared()
        explicit(graph)
        return graph.get_plan_name_at_index(0), graph.get_execution_plan_count()

    plain = explicitly()
    for first in (mixed, explicit):
        with plancache.open(tmp_path / first.__name__) as cache, plancache.enabled(cache):
            first(declared()[0])
            graph, _ = declared()
            mixed(graph)
            assert graph.get_execution_plan_count() > plain[1]
            assert explicitly() == plain


def test_a_tensor_that_comes_after_validation_harms_no_other_graph(declared, tmp_path):
    with plancache.open(tmp_path / "cache") as cache, plancache.enabled(cache):
        for extra in (True, False):
            graph, _ = declared()
            graph.validate()
            if extra:
                graph.tensor(dim=[1, 2, 3], stride=[6, 3, 1], name="extra")
            graph.create_execution_plans([A])
            graph.build_plans()
        assert plancache.last_outcome(graph).source is Source.DISK


@pytest.mark.parametrize("when", ["before plans", "before the plan", "afterwards"])
def test_a_tensor_that_comes_after_validation_is_among_the_tensors_of_a_served_graph(declared, tmp_path, when):
    def tensors():
        graph, _ = declared()
        graph.validate()
        for stage, call in {
            "before plans": lambda: graph.create_execution_plans([A]),
            "before the plan": graph.build_plans,
            "afterwards": lambda: graph.get_engine_and_knobs_at_index(0),
        }.items():
            if stage == when:
                graph.tensor(dim=[1, 2, 3], stride=[6, 3, 1], name="extra")
            call()
        assert graph.get_engine_count() > 0  # plans a served graph really
        return list(graph.tensors)

    plain = tensors()
    assert "extra" in plain
    with plancache.open(tmp_path / "cache") as cache, plancache.enabled(cache):
        assert [tensors(), tensors()] == [plain, plain]


def test_a_graph_that_passes_for_planned_refuses_changes_like_a_planned_one(h200, tmp_path):
    def change():
        graph = graphs.plain(h200)
        q, k, v = (graph.tensor(dim=[1, 2, 64, 64], stride=[8192, 4096, 64, 1]) for _ in range(3))
        o, _ = graph.sdpa(q=q, k=k, v=v, attn_scale=0.1, is_inference=True)
        o.set_output(True)
        graph.validate()
        graph.create_execution_plans([A])
        try:
            graph.relu(o)
        except RuntimeError as error:
            return str(error)
        finally:
            graph.build_plans()
        return "taken"

    plain = change()
    assert "frozen" in plain
    with plancache.open(tmp_path / "cache") as cache, plancache.enabled(cache):
        assert [change(), change()] == [plain, plain]


def test_threads_that_are_on_their_way_go_on_while_others_switch_off(declared, h200, tmp_path):
    faults = []
    with plancache.open(tmp_path / "cache") as cache:
        with plancache.enabled(cache):
            stages(declared()[0])

        def work():
            try:
                for _ in range(60):
                    graph, _ = declared()
                    stages(graph)
                    assert graph.get_workspace_size() >= 0
            except BaseException as error:
                faults.append(error)

        with plancache.enabled(cache):
            thread = threading.Thread(target=work)
            thread.start()
            while thread.is_alive():
                with plancache.enabled(cache):
                    thread.join(0.002)
        assert faults == []
        assert transparent._installed == {}


def test_what_jit_serves_is_served_whoever_switches_off_meanwhile(declared, tmp_path, monkeypatch):
    cache = plancache.open(tmp_path / "cache")
    with transparent.serving(cache):
        with plancache.enabled(cache):
            pass
        graph, _ = declared()
        graph.build()
        assert plancache.last_outcome(graph).source is Source.BUILT
    assert transparent._installed == {}


def test_a_reloaded_module_goes_on_and_can_switch_off(declared, tmp_path):
    plain = vars(cudnn.pygraph)["build"]
    plancache.enable(plancache.open(tmp_path / "cache"))
    importlib.reload(transparent)
    graph, _ = declared()
    graph.build()
    assert plancache.last_outcome(graph).source is Source.BUILT
    transparent.disable()
    assert vars(cudnn.pygraph)["build"] is plain
