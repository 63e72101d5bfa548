"""Bad input gets an error that says what was found and what was expected; a graph without a key is just built."""

import cudnn
import pytest

import plancache
from plancache.errors import BuilderError, DeviceError, SettingsError
from plancache.outcome import Reason, Source
from tests import graphs


@pytest.fixture
def cache(tmp_path):
    with plancache.open(tmp_path / "cache") as cache:
        yield cache


def test_heuristics_policies_and_cases_of_the_wrong_kind_are_told_so(cache, targeted):
    graph, _ = graphs.matmul()
    for heuristics in (cudnn.heur_mode.A, ["A"], 5):
        with pytest.raises(BuilderError, match="list of cudnn.heur_mode"):
            cache.build(graph, heuristics)
    with pytest.raises(BuilderError, match="unknown policy; found 'ALL'"):
        cache.build(graph, policy="ALL")
    with pytest.raises(BuilderError, match="a case is a tuple"):
        plancache.cached(cases=[1, 2])(graphs.matmul)
    assert cache.key(graph, iter([cudnn.heur_mode.A])) == cache.key(graph, [cudnn.heur_mode.A])


def test_a_graph_with_a_kernel_cache_of_its_own_or_policy_all_is_built_and_not_cached(cache, targeted):
    # A loaded plan would leave the kernel cache empty, and has one plan where ALL promises every one.
    kernels = cudnn.create_kernel_cache()
    outcome = cache.build(graphs.matmul(kernel_cache=kernels)[0])
    assert (outcome.source, outcome.reason) == (Source.BYPASSED, Reason.KERNEL_CACHE)
    assert kernels.size() == 1
    graph, _ = graphs.unary()
    outcome = cache.build(graph, policy=cudnn.build_plan_policy.ALL)
    assert (outcome.source, outcome.reason) == (Source.BYPASSED, Reason.EVERY_PLAN)
    graph.get_workspace_size_plan_at_index(graph.get_execution_plan_count() - 1)
    assert list(cache.rows()) == []


def test_a_built_graph_whose_plan_cannot_be_kept_is_ready_all_the_same(cache, targeted, monkeypatch):
    def fails(*args, **kwargs):
        raise RuntimeError("no serialization for this plan")

    with monkeypatch.context() as patch:
        patch.setattr(cudnn.pygraph, "serialize", fails)
        graph, _ = graphs.unary()
        outcome = cache.build(graph)
    assert (outcome.source, outcome.reason) == (Source.BYPASSED, Reason.UNREADABLE)
    assert "no serialization" in outcome.detail
    assert graph.get_workspace_size() >= 0
    monkeypatch.setattr(plancache.Device, "to_json", fails)
    assert not cache.build(graphs.unary()[0]).stored


def test_a_builder_that_returns_no_graph_or_two_is_told_so(cache, targeted):
    with pytest.raises(
        BuilderError, match=r"must return one graph; found no graph but a str; expected a cudnn\.pygraph"
    ):
        plancache.cached(cache=cache)(lambda handle: "graph")(None)
    with pytest.raises(BuilderError, match="found 2 graphs"):
        plancache.cached(cache=cache)(lambda handle: (graphs.matmul()[0], graphs.matmul()[0]))(None)


def test_one_graph_may_come_alone_or_in_a_tuple_list_or_dict_and_twice(warm, targeted):
    cache = plancache.open(warm)
    for shape in (lambda g: g, lambda g: (g, g), lambda g: [1, g], lambda g: {"graph": g, "tensors": ()}):
        result = plancache.cached(cache=cache)(lambda handle, shape=shape: shape(graphs.matmul()[0]))(None)
        assert result is not None


def test_a_graph_that_was_planned_already_is_an_error(cache, built):
    with pytest.raises(BuilderError, match="already made.*Leave build"):
        cache.build(built["matmul"][0])


def test_what_is_no_graph_is_an_error(cache):
    with pytest.raises(BuilderError, match="found str"):
        cache.build("a graph")
    with pytest.raises(BuilderError, match="found dict"):
        cache.key({})


def test_a_graph_that_was_validated_before_is_built_and_not_cached(cache, targeted):
    graph, _ = graphs.matmul()
    graph.validate()
    outcome = cache.build(graph)
    assert (outcome.source, outcome.reason, outcome.key) == (Source.BYPASSED, Reason.VALIDATED, None)
    assert graph.get_execution_plan_count() > 0
    assert list(cache.rows()) == []


def test_a_graph_that_holds_a_callback_is_not_keyed(cache, targeted):
    graph, _ = graphs.new(), None
    dim, stride = [2, 8, 128, 128], [8 * 128 * 128, 128 * 128, 128, 1]
    q, k, v = (graph.tensor(dim=dim, stride=stride) for _ in range(3))
    o, _ = graph.sdpa(q, k, v, score_mod=lambda graph, score: graph.relu(score), is_inference=True)
    o.set_output(True)
    outcome = cache.lookup(graph)
    assert (outcome.source, outcome.reason) == (Source.BYPASSED, Reason.NOT_KEYABLE)
    assert "score_mod" in outcome.detail
    with pytest.raises(BuilderError, match="no key.*score_mod"):
        cache.key(graph)


def test_an_sm_version_that_is_not_the_devices_is_an_error(cache, h200):
    # cuDNN ignores it silently.
    graph, _ = graphs.matmul(device_property=h200.native, sm_version=800)
    with pytest.raises(DeviceError, match=r"found 800; expected 900 \(NVIDIA H200\)"):
        cache.build(graph)


def test_an_sm_count_that_is_the_devices_counts_as_none(cache, targeted, h200):
    plain = cache.key(graphs.matmul()[0])
    assert cache.key(graphs.matmul(sm_count=132)[0]) == plain
    assert cache.key(graphs.matmul(sm_count=66)[0]) != plain


def test_a_setting_with_a_wrong_value_is_named(tmp_path, monkeypatch):
    with pytest.raises(SettingsError, match="found 'readonly'; expected read-write or read-only"):
        plancache.open(tmp_path, mode="readonly")
    with pytest.raises(SettingsError, match="found 1000 bytes; expected at least 2097152"):
        plancache.open(tmp_path, max_bytes=1000)
    monkeypatch.setenv("PLANCACHE_AOT", "yes")
    with pytest.raises(SettingsError, match="found 'yes'"):
        plancache.open(tmp_path)
    monkeypatch.delenv("PLANCACHE_AOT")
    monkeypatch.setenv("PLANCACHE_MODE", "fast")
    with pytest.raises(SettingsError) as caught:
        plancache.open(tmp_path)
    assert caught.value.name == "PLANCACHE_MODE"


@pytest.mark.parametrize(
    ("version", "backend", "says"),
    [
        ("1.31.9", None, "frontend is too old; found nvidia-cudnn-frontend 1.31.9; expected 1.32 or later"),
        (None, 91002, "this cuDNN is not supported; found cuDNN 9.28.0; expected 9.11 or later"),
        (None, None, "cuDNN cannot be loaded; found Unable to find symbol"),
        (None, 0, "the module cudnn is not NVIDIA's cuDNN frontend"),
    ],
    ids=["old frontend", "old cuDNN", "no cuDNN", "another package"],
)
def test_a_missing_or_old_library_is_named(run, version, backend, says):
    source = f"""
import cudnn
version, backend = {version!r}, {backend!r}
if version: cudnn.__version__ = version
elif backend: cudnn.backend_version = lambda: backend
elif backend == 0: del cudnn.backend_version
else:
    def missing(): raise RuntimeError("Unable to find symbol cudnnGetVersion")
    cudnn.backend_version = missing
import plancache
try:
    with plancache.target("h200") as device: plancache.pygraph()
except plancache.PlanCacheError as error:
    print(type(error).__name__, error)
"""
    expected = says.replace("9.28.0", cudnn.backend_version_string())
    assert run(source).startswith(f"LibraryError {'the cuDNN ' if version else ''}{expected}")


def test_a_host_without_a_gpu_gets_cudnns_own_error_for_a_graph_without_a_target(cache):
    try:
        plancache.device()
    except DeviceError:
        pass
    else:
        pytest.skip("this host has a GPU")
    with pytest.raises(Exception) as plain:  # noqa: PT011 - whichever the frontend raises
        graphs.matmul()[0].build()
    with pytest.raises(type(plain.value)):
        cache.build(graphs.matmul()[0])
