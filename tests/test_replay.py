"""The replay route: a kernel document with engine and knobs, from which a plan is rebuilt and nothing compiled."""

import pytest

import plancache
from plancache.cudnn import libraries, plans, replaying
from plancache.cudnn.plans import Route
from plancache.outcome import Reason, Source
from tests import graphs
from tests.gpu.layers import LAYERS


@pytest.fixture(scope="session")
def filled(tmp_path_factory, h200):
    """A cache that was filled with matmul and conv by both routes."""
    directory = tmp_path_factory.mktemp("replay") / "cache"
    with plancache.target(h200), plancache.open(directory) as cache:
        outcomes = {name: cache.fill(getattr(graphs, name)()[0]) for name in ("matmul", "conv")}
    return directory, outcomes


@pytest.fixture
def replays(filled, tmp_path, targeted):
    """A cache of one's own that holds only the replay rows."""
    with plancache.open(filled[0]) as source, plancache.open(tmp_path / "replays") as cache:
        source.export_bundle(tmp_path / "b", [one for one in source.rows() if one.row.route == "replay"])
        assert cache.import_bundle(tmp_path / "b").done == 2
        yield cache


def test_filling_stores_both_routes_under_one_key(filled):
    directory, outcomes = filled
    assert {route: outcome.stored for route, outcome in outcomes["matmul"].items()} == {
        "replay": True,
        "deviceless": True,
    }
    with plancache.open(directory) as cache:
        rows = [listed.row for listed in cache.rows()]
    assert len({row.key for row in rows}) == 2
    assert sorted(row.route for row in rows) == ["deviceless", "deviceless", "replay", "replay"]


def test_filling_again_builds_nothing(filled, targeted):
    with plancache.open(filled[0]) as cache:
        outcomes = cache.fill(graphs.matmul()[0])
    assert {outcome.source for outcome in outcomes.values()} == {Source.DISK}


def test_a_graph_without_a_dynamic_shape_engine_has_no_replay(tmp_path, targeted):
    with plancache.open(tmp_path / "cache") as cache:
        assert set(cache.fill(graphs.sdpa()[0])) == {"deviceless"}


@pytest.mark.parametrize(
    ("child", "why"),
    [("kill -SEGV $$", "kills the process"), ("cat > /dev/null; echo refused >&2; exit 1", "refused"), ("exit 3", "3")],
    ids=["dies", "refuses", "says nothing"],
)
def test_what_a_child_process_cannot_replay_is_not_stored(tmp_path, targeted, monkeypatch, caplog, child, why):
    # cuDNN 9.19 kills the process that replays a layer norm.
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{child}\n")
    python.chmod(0o755)
    monkeypatch.setattr(replaying.sys, "executable", str(python))
    monkeypatch.setattr(replaying, "_verdicts", {})
    with plancache.open(tmp_path / "cache") as cache, caplog.at_level("INFO", "plancache"):
        assert set(cache.fill(graphs.matmul()[0])) == {"deviceless"}
        assert [listed.row.route for listed in cache.rows()] == ["deviceless"]
    assert any("no replay" in line and why in line for line in caplog.messages)


def test_what_is_compiled_again_in_each_replay_is_not_stored(tmp_path, targeted, caplog):
    # The kernels of norms are in the document, and cuDNN does not take them from there.
    with plancache.open(tmp_path / "cache") as cache, caplog.at_level("INFO", "plancache"):
        assert set(cache.fill(LAYERS["layer norm"].declare()[0])) == {"deviceless"}
    assert any("no replay" in line and "compiled again" in line for line in caplog.messages)


@pytest.mark.parametrize("name", ["matmul", "conv"])
def test_a_plan_is_rebuilt_from_its_recipe_and_nothing_is_compiled(replays, name, monkeypatch):
    tracked = []
    plain = plans.Tracked

    def noted(document, entries):
        tracked.append(plain(document, entries))
        return tracked[-1]

    monkeypatch.setattr(plans, "Tracked", noted)
    graph, tensors = getattr(graphs, name)()
    outcome = replays.build(graph)
    assert (outcome.source, outcome.reason, outcome.route) == (Source.DISK, Reason.FOUND, "replay")
    (kernels,) = tracked
    assert kernels.revision == 1  # as many as were loaded: none came in
    assert tensors[-1].get_dim()
    assert graph.get_execution_plan_count() == 1
    assert graph.get_workspace_size() >= 0
    assert graph.serialize(as_bytes=True)
    (listed,) = replays.rows(key=outcome.key.hash)
    assert graph.get_plan_name_at_index(0) == listed.row.name
    assert graph.get_engine_count() > 0  # it is a planned graph like any other


def test_the_deviceless_plan_is_taken_before_the_replay(filled, targeted):
    with plancache.open(filled[0]) as cache:
        assert cache.build(graphs.matmul()[0]).route == "deviceless"


def test_a_document_that_cudnn_does_not_take_is_a_miss_that_leaves_the_graph_as_it_was(replays, monkeypatch):
    monkeypatch.setattr(plans, "replay", plans.replay)
    graph, (a, _, c) = graphs.matmul()
    wanted = plans.declare(graph).request(graph, plans.Choice())
    (listed,) = replays.rows(key=wanted.key.hash)
    from plancache import stored

    _, fields = stored.decode(replays.store.get(listed.row.key, "replay"), wanted.key, Route.REPLAY, None)
    with pytest.raises((RuntimeError, libraries.cudnn().cudnnGraphNotSupportedError)):
        plans.load(wanted, Route.REPLAY, fields["plan"], fields["blob"][: len(fields["blob"]) // 2])
    assert c.get_dim() == []
    a.set_dim([1, 64, 64])
    assert replays.build(graph).route == "replay"


def test_filters_count_for_the_replay_too(tmp_path, targeted):
    with plancache.open(tmp_path / "cache") as cache:
        graph, _ = graphs.matmul()
        graph.deselect_engines(["eng7_k24=21"])
        outcomes = cache.fill(graph)
        names = {listed.row.route: listed.row.name for listed in cache.rows()}
    assert "replay" in outcomes
    assert "eng7_k24=21" not in names["replay"]
