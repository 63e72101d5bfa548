"""Decorated builders in memory: which calls share a live graph, how many live, and what is never freed."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import cudnn
import numpy as np
import pytest

import plancache
from plancache import builders
from plancache.errors import CaptureError
from plancache.outcome import Source
from tests import graphs


@pytest.fixture
def counted(cache):
    """A decorated matmul, and how often it was declared."""
    declared = []

    def make(**options):
        @plancache.cached(cache=cache, **options)
        def matmul(handle, m, *rest):
            declared.append(m)
            return graphs.matmul(m=m if isinstance(m, int) else 32)

        return matmul

    make.declared = declared
    return make


@pytest.fixture
def cache(tmp_path):
    with plancache.open(tmp_path / "cache") as cache:
        yield cache


def test_equal_calls_share_a_graph_and_calls_of_other_types_do_not(counted, targeted):
    matmul = counted()
    assert matmul(None, 32) is matmul(None, 32)
    for m in (32.0, True, "32"):
        assert matmul(None, m) is not matmul(None, 32)
    assert counted.declared == [32, 32.0, True, "32"]


def test_fields_of_arguments_are_told_apart_as_exactly(counted, targeted):
    @dataclass(frozen=True)
    class Config:
        alpha: float

    matmul = counted()
    made = {id(matmul(None, Config(alpha))) for alpha in (0.0, -0.0, False, 0)}
    assert len(made) == 4
    assert matmul(None, Config(0.0)) is matmul(None, Config(0.0))


def test_a_key_function_says_what_calls_have_in_common(counted, targeted):
    matmul = counted(key=lambda handle, m, rest: m)
    assert matmul(None, 32, [1]) is matmul(None, 32, [2])
    assert matmul(None, 32, [1]) is not matmul(None, 48, [1])
    unkeyed = counted()
    assert unkeyed(None, 32, [1]) is not unkeyed(None, 32, [1])  # a list cannot be compared by value: not remembered


def test_a_tensor_stands_for_its_shape_strides_and_type(counted, targeted):
    matmul = counted()
    a = np.zeros((4, 8), dtype=np.float16)
    assert matmul(None, a) is matmul(None, np.ones((4, 8), dtype=np.float16))
    for other in (a.T, a[:, ::2], a.astype(np.float32)):
        assert matmul(None, other) is not matmul(None, a)


def test_the_least_recently_used_graph_goes_first(counted, targeted):
    matmul = counted(memory=2)
    first, _ = matmul(None, 16), matmul(None, 24)
    assert matmul(None, 16) is first
    matmul(None, 32)
    assert matmul(None, 16) is first
    assert counted.declared == [16, 24, 32]
    matmul(None, 24)
    assert counted.declared == [16, 24, 32, 24]


def test_in_a_class_a_builder_is_a_method(cache, targeted):
    class Layer:
        m = 16

        @plancache.cached(cache=cache)
        def graph(self, handle):
            return graphs.matmul(m=self.m)

    layer = Layer()
    assert layer.graph(None) is layer.graph(None)
    assert layer.graph(None) is not Layer().graph(None)


def test_threads_that_call_at_once_build_once_and_share_no_graph(counted, cache, h200):
    matmul, gate = counted(), threading.Barrier(4)

    def call(_):
        gate.wait()
        with plancache.target(h200):
            return matmul(None, 40)[0]

    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(call, range(4)))
    assert len(set(map(id, made))) == 4
    assert [number for (source, _), number in cache.stats().items() if source is Source.BUILT] == [1]


def test_while_a_stream_captures_only_memory_serves_and_what_it_serves_is_never_freed(counted, targeted, monkeypatch):
    # What a real capture does is tried on a GPU (tests/gpu); here, what follows from the driver's answer.
    matmul = counted(memory=1)
    first = matmul(None, 16)
    monkeypatch.setattr(builders, "is_capturing", lambda handle: True)
    monkeypatch.setattr(builders.frontend, "handle_of", lambda graph: "a handle")
    with pytest.raises(CaptureError, match="before the capture"):
        matmul(None, 24)
    slot = next(iter(matmul._local.graphs))
    matmul._local.graphs[slot].handle = "a handle"
    assert matmul(None, 16) is first
    assert builders._forever[-1].result is first
    builders._forever.clear()


def test_jit_and_graph_cache_are_the_frontends_own_and_served(cache, targeted, h200):
    def declare(m):
        graph = graphs.plain(h200)
        a = graph.tensor(dim=[1, m, 64], stride=[m * 64, 64, 1])
        b = graph.tensor(dim=[1, 64, 128], stride=[8192, 128, 1])
        c = graph.matmul(a, b)
        c.set_output(True)
        return graph, [a, b, c]

    with plancache.enabled(cache):
        for make in (plancache.jit, cudnn.jit, plancache.jit):
            graph, uids = make(heur_modes=[cudnn.heur_mode.A])(declare)(16)
            assert (uids, graph.get_workspace_size()) == ([1, 2, 3], 0)
        built = plancache.graph_cache(lambda m: m, maxsize=1)(lambda m: plancache.jit()(declare)(m))
        assert built(16) is built(16)
        assert built(16) is not built(24)
    sources = [source for source, _ in cache.stats()]
    assert set(sources) == {Source.BUILT, Source.DISK}
    with pytest.raises(TypeError):
        plancache.jit(heur_modes=["A"])(declare)(16)


def test_what_a_function_of_the_frontends_jit_has_built_is_not_built_again(cache, targeted, h200):
    @cudnn.graph_cache(lambda number: number)
    @cudnn.jit(heur_modes=[cudnn.heur_mode.A])
    def built_inside(number):
        graph = graphs.plain(h200)
        a = graph.tensor(dim=[1, 16, 64], stride=[16 * 64, 64, 1])
        b = graph.tensor(dim=[1, 64, 128], stride=[8192, 128, 1])
        c = graph.matmul(a, b)
        c.set_output(True)
        graphs.stages(graph)
        assert graph.get_execution_plan_count() > 0  # by which jit sees that it is built
        return graph, [a, b, c]

    with plancache.enabled(cache):
        (cold, uids), (warm, again) = built_inside(1), built_inside(2)
        assert built_inside(2)[0] is warm
    assert uids == again
    assert [plancache.last_outcome(graph).source for graph in (cold, warm)] == [Source.BUILT, Source.DISK]
    assert sum(cache.stats().values()) == 2


def test_a_process_that_keeps_graphs_ends_without_a_word(run, tmp_path):
    source = """
import sys, plancache
from tests import graphs
builder = plancache.cached(cache=plancache.open(sys.argv[1]))(lambda handle: graphs.matmul())
with plancache.target("h200"):
    kept = builder(None)
print("done")
"""
    done = run(source, tmp_path / "cache", check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
