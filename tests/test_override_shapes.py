"""Graphs with override shapes: keyed by the shape they are cached at, and checked where cuDNN does not."""

import pytest

import plancache
from plancache.outcome import Source
from tests import graphs


@pytest.fixture(scope="session")
def filled(tmp_path_factory, h200):
    directory = tmp_path_factory.mktemp("override") / "cache"
    with plancache.target(h200), plancache.open(directory) as cache:
        graph, _ = graphs.matmul(is_override_shape_enabled=True)
        assert cache.build(graph).stored
    return directory, graph


@pytest.fixture
def served(filled, targeted):
    with plancache.open(filled[0], mode="require-hit") as cache:
        graph, tensors = graphs.matmul(is_override_shape_enabled=True)
        assert cache.build(graph).source is Source.DISK
    return graph, tensors


def test_the_flag_and_the_cache_shape_are_in_the_key(filled, targeted):
    with plancache.open(filled[0]) as cache:
        assert cache.contains(graphs.matmul(is_override_shape_enabled=True)[0])
        assert not cache.contains(graphs.matmul()[0])
        assert not cache.contains(graphs.matmul(m=32, is_override_shape_enabled=True)[0])


def test_a_served_graph_answers_as_the_built_one(served, filled):
    graph, built = served[0], filled[1]
    assert graph.get_plan_name_at_index(0) == built.get_plan_name_at_index(0)
    assert graph.get_workspace_size() == built.get_workspace_size()


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (([1, 4], [[1, 32, 64]], [[2048, 64, 1], [4096, 128, 1]]), r"2 override_uids, 1 override_shapes.*uid \[4\]"),
        (([1], [[1, 32, 64]], None), r"0 override_strides; tensor uid \[1\]"),
        (([1], [[32, 64]], [[64, 1]]), "tensor uid 1: got shape .*expected 3 sizes"),
        (([99], [[1, 32, 64]], [[2048, 64, 1]]), "tensor uid 99.*a tensor of this graph"),
    ],
    ids=["a shape is missing", "no strides", "another rank", "an unknown tensor"],
)
def test_overrides_that_do_not_fit_are_told_with_the_uid(served, overrides, says):
    graph, tensors = served
    pack = dict.fromkeys(tensors, 4096)
    with pytest.raises(ValueError, match=says):
        graph.execute(pack, 0, None, *overrides)
    with pytest.raises(ValueError, match=says):
        graph.get_workspace_size(None, *overrides)


@pytest.mark.parametrize("stride", [[2048, 64, 1], [64, 1]], ids=["of the shape's rank", "of a packed tensor"])
def test_overrides_that_fit_reach_cudnn(served, stride):
    # There is no device here: it is cuDNN itself that says so.
    graph, tensors = served
    with pytest.raises(Exception, match="(?i)cudnn|cuda|handle"):
        graph.execute(dict.fromkeys(tensors, 4096), 0, None, [1], [[1, 32, 64]], [stride])
