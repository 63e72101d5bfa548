"""The main job: build once, load everywhere, and nothing stored that was not built."""

import cudnn
import pytest

import plancache
from plancache.outcome import Reason, Source
from tests import graphs

LOAD = """
import sys, plancache
from tests import graphs
with plancache.target("h200"), plancache.open(sys.argv[1]) as cache:
    for name in sys.argv[2:]:
        graph, _ = getattr(graphs, name)()
        print(name, cache.build(graph).source, graph.get_workspace_size())
print("engines", "cudnn.sdpa" in sys.modules or "cutlass" in sys.modules)
"""


def test_a_second_process_builds_nothing(warm, run, built):
    out = run(LOAD, warm, "matmul", "conv", "sdpa").splitlines()
    assert out[:3] == [f"{name} disk {built[name][0].get_workspace_size()}" for name in ("matmul", "conv", "sdpa")]


def test_a_hit_does_not_import_the_python_engines(warm, run):
    # validate() would: 190 to 360 ms for a process's first SDPA graph.
    assert run(LOAD, warm, "sdpa").splitlines()[-1] == "engines False"


def test_a_miss_builds_and_stores_and_the_next_lookup_hits(tmp_path, targeted):
    with plancache.open(tmp_path / "cache") as cache:
        first = cache.build(graphs.matmul(m=32)[0])
        second = cache.build(graphs.matmul(m=32)[0])
    assert (first.source, first.reason, first.stored) == (Source.BUILT, Reason.ABSENT, True)
    assert (second.source, second.reason, second.stored) == (Source.DISK, Reason.FOUND, False)
    assert first.key == second.key
    assert first.route == second.route == "deviceless"


def test_lookup_never_builds_and_leaves_a_missed_graph_as_it_was(tmp_path, targeted):
    graph, (a, _, c) = graphs.matmul()
    with plancache.open(tmp_path / "cache") as cache:
        outcome = cache.lookup(graph)
    assert (outcome.source, outcome.reason) == (Source.MISS, Reason.ABSENT)
    assert graph.get_execution_plan_count() == 0
    assert c.get_dim() == []  # not inferred
    a.set_dim([1, 64, 64])  # not frozen


def test_contains_answers_without_loading(warm, targeted):
    with plancache.open(warm) as cache:
        graph, _ = graphs.sdpa()
        assert cache.contains(graph)
        assert graph.get_execution_plan_count() == 0
        assert not cache.contains(graphs.sdpa(length=256)[0])


def test_a_failed_build_stores_nothing_and_its_exception_reaches_the_caller(tmp_path, targeted):
    with pytest.raises(Exception) as plain:  # noqa: PT011 - whichever the frontend raises
        graphs.unsupported()[0].build()
    with plancache.open(tmp_path / "cache") as cache:
        with pytest.raises(type(plain.value)) as cached:
            cache.build(graphs.unsupported()[0])
        assert str(cached.value) == str(plain.value)
        assert list(cache.rows()) == []


def test_another_heuristic_another_filter_and_another_device_are_other_plans(warm, targeted, h200):
    modes = cudnn.heur_mode
    with plancache.open(warm) as cache:
        plain = cache.key(graphs.matmul()[0])
        assert cache.key(graphs.matmul()[0], [modes.A, modes.FALLBACK]) == plain  # the default, written out
        assert cache.key(graphs.matmul()[0], [modes.FALLBACK, modes.A]).build != plain.build
        graph, _ = graphs.matmul()
        graph.deselect_engines(["eng4"])
        assert cache.key(graph).build != plain.build
        assert not cache.contains(graph)
    smaller = plancache.device(h200.to_json().replace('"multiProcessorCount":132', '"multiProcessorCount":114'))
    with plancache.target(smaller), plancache.open(warm) as cache:
        assert cache.key(graphs.matmul()[0]).device != plain.device
        assert cache.lookup(graphs.matmul()[0]).reason is Reason.ABSENT


def test_a_row_serves_its_own_and_newer_drivers_and_an_older_one_takes_its_place(warm, h200):
    def device(driver):
        return plancache.device(h200.to_json().replace('"driverVer":13000', f'"driverVer":{driver}'))

    with plancache.open(warm) as cache:
        with plancache.target(device(13020)):
            assert cache.lookup(graphs.matmul()[0]).source is Source.DISK
        with plancache.target(device(12080)):
            outcome = cache.build(graphs.matmul()[0])
            assert (outcome.source, outcome.reason, outcome.stored) == (Source.BUILT, Reason.NEWER_DRIVER, True)
        for driver in (12080, 13000):
            with plancache.target(device(driver)):
                assert cache.lookup(graphs.matmul()[0]).source is Source.DISK
        assert [listed.row.driver for listed in cache.rows(key=outcome.key.hash)] == [12080]


def test_the_decorator_returns_what_the_builder_returned_with_the_graph_ready(warm, targeted):
    calls = []

    @plancache.cached(cache=plancache.open(warm), cases=[(64,), (32,)])
    def builder(handle, m):
        calls.append(m)
        return graphs.matmul(handle, m)

    graph, (_, _, c) = builder(None, 64)
    assert graph.get_execution_plan_count() > 0
    assert c.get_dim() == [1, 64, 128]
    assert plancache.last_outcome(graph).source is Source.DISK
    assert builder(None, 64)[0] is graph  # the in-process layer
    assert calls == [64]
    assert builder.cases == ((64,), (32,))
    assert builder.name.endswith("builder")


def test_arguments_that_are_equal_but_of_other_types_do_not_share_a_graph(warm, targeted):
    @plancache.cached(cache=plancache.open(warm))
    def builder(handle, scale):
        graph, tensors = graphs.matmul(handle)
        return graph, tensors, scale

    for value in (1, 1.0, True, 0.0, -0.0, (1,), (1.0,), ((True,),), "1"):
        assert repr(builder(None, value)[2]) == repr(value)


def test_one_decorated_builder_serves_two_targets(warm, h200):
    smaller = plancache.device(h200.to_json().replace('"multiProcessorCount":132', '"multiProcessorCount":114'))
    builder = plancache.cached(cache=plancache.open(warm))(graphs.matmul)
    with plancache.target(h200):
        first = builder(None)[0]
    with plancache.target(smaller):
        second = builder(None)[0]
    assert first is not second
    assert plancache.last_outcome(second).source is Source.BUILT


def test_the_in_process_layer_is_bounded(warm, targeted):
    builder = plancache.cached(cache=plancache.open(warm), memory=1)(lambda handle, name: getattr(graphs, name)(handle))
    first = builder(None, "matmul")[0]
    builder(None, "conv")
    assert builder(None, "matmul")[0] is not first


def test_the_modes_do_what_they_say(warm, tmp_path, targeted, monkeypatch):
    graph = graphs.matmul(m=48)[0]
    with plancache.open(warm, mode="require-hit") as cache:
        assert cache.build(graphs.matmul()[0]).source is Source.DISK
        with pytest.raises(plancache.PlanCacheError, match="require-hit.*no entry") as missed:
            cache.build(graph)
        assert missed.value.reason is Reason.ABSENT
    with plancache.open(warm, mode="read-only") as cache:
        outcome = cache.build(graph)
        assert (outcome.source, outcome.stored) == (Source.BUILT, False)
        assert not cache.contains(graphs.matmul(m=48)[0])
    monkeypatch.setenv("PLANCACHE_MODE", "off")
    with plancache.open(tmp_path / "never") as cache:
        outcome = cache.build(graphs.matmul()[0])
        assert (outcome.source, outcome.reason) == (Source.BYPASSED, Reason.OFF)
    assert not (tmp_path / "never").exists()


def test_an_explicit_engine_with_knobs_is_a_plan_of_its_own(warm, targeted):
    with plancache.open(warm) as cache:
        reference, _ = graphs.matmul()
        cache.build(reference)
        engine, knobs = reference.get_engine_and_knobs_at_index(2)
        outcomes = []
        for _ in range(2):
            graph, _ = graphs.matmul()
            outcomes.append(cache.build(graph, plan=(engine, knobs)))
            assert graph.get_engine_and_knobs_at_index(0) == (engine, knobs)
            assert graph.get_execution_plan_count() == 1
        assert [outcome.source for outcome in outcomes] == [Source.BUILT, Source.DISK]
        assert cache.key(graphs.matmul()[0], plan=(engine, {})) != outcomes[0].key != cache.key(graphs.matmul()[0])
        with pytest.raises(plancache.PlanCacheError, match="nothing to heuristics"):
            cache.build(graphs.matmul()[0], heuristics=[cudnn.heur_mode.A], plan=(engine, knobs))
