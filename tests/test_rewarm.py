"""Building again from stored documents, with no user code: for other libraries, other devices, from misses."""

import json
from concurrent.futures import Executor, ThreadPoolExecutor
from types import SimpleNamespace

import cudnn
import pytest

import plancache
from plancache import misses, rewarming
from plancache.errors import DeviceError, MissError, StoreError
from plancache.kernels import is_kernel
from plancache.store import records
from plancache.store.interface import Row
from tests import graphs, layers

# Part of the environment that a key is made of: with it, the same cuDNN is another one.
OTHER = "NVIDIA_TF32_OVERRIDE"
MODES = cudnn.heur_mode


class Idle(Executor):
    """Where nothing is to be built."""

    def submit(self, fn, /, *args, **kwargs):
        raise AssertionError("something was to be built")


@pytest.fixture
def here():
    """Builds in this process, where cuDNN is loaded already."""
    with ThreadPoolExecutor(1) as executor:
        yield executor


@pytest.fixture
def upgraded(monkeypatch):
    """The libraries are other ones from here on."""
    return lambda: monkeypatch.setenv(OTHER, "1")


@pytest.fixture
def smaller(h200):
    """A device that differs from the H200 in what decides which plans fit."""
    properties = json.loads(h200.to_json())
    return plancache.device(json.dumps({**properties, "deviceName": "Smaller", "multiProcessorCount": 66}))


def plans_of(cache):
    """What is stored by environment: graph, build, device, route and the names' record of each plan."""
    found = {}
    for one in cache.rows():
        if not is_kernel(one.row):
            found.setdefault(one.row.environment, set()).add((one.row.graph, one.row.build, one.row.device))
    return found


def chosen():
    """One small graph, with its plan chosen in every way that a key tells apart: (graph, arguments of build)."""
    plain = graphs.unary()[0]
    limited = graphs.unary()[0].deselect_workspace_greater_than(1 << 20)
    barred = graphs.unary()[0].deselect_engines(["eng999"])
    behaving = graphs.unary()[0].deselect_behavior_notes([cudnn.behavior_note.CUBLASLT_DEPENDENCY])
    noted = graphs.unary()[0].deselect_numeric_notes([cudnn.numerical_note.FFT])
    return [
        (plain, {}),
        (limited, {}),
        (barred, {}),
        (behaving, {}),
        (noted, {}),
        (graphs.unary()[0], {"heuristics": [MODES.B, MODES.FALLBACK]}),
        (graphs.unary()[0], {"policy": cudnn.build_plan_policy.HEURISTICS_CHOICE, "heuristics": [MODES.A]}),
    ]


def test_every_plan_is_built_again_for_other_libraries_with_its_build_spec(tmp_path, here, upgraded, targeted):
    with plancache.open(tmp_path / "cache") as cache:
        for graph, how in chosen():
            assert cache.build(graph, **how).stored
        first = cache.build(graphs.unary()[0])
        (row,) = [one.row for one in cache.rows() if one.row.key == first.key.hash]
        recipe = (row.engine, {})
        assert cache.build(graphs.unary()[0], plan=recipe).stored
        (before,) = plans_of(cache).values()
        assert len(before) == 8
        upgraded()
        report = plancache.rewarm(cache.directory, executor=here, cache=cache, routes=["deviceless"])
        assert report.counts == {"built": 8}
        assert list(plans_of(cache).values()) == [before, before]  # what was there stays
        for graph, how in [*chosen(), (graphs.unary()[0], {"plan": recipe})]:
            assert cache.build(graph, **how).source == "disk"
        assert plancache.rewarm(cache.directory, executor=Idle(), cache=cache, routes=["deviceless"])


def test_a_workspace_limit_that_was_set_after_validation_is_set_there_again(tmp_path, here, upgraded, targeted):
    def staged(cache):
        graph = plancache.pygraph(io_data_type=graphs.HALF, compute_data_type=graphs.FLOAT)
        x = graph.tensor(dim=[1, 64, 64], stride=[4096, 64, 1])
        graph.relu(x).set_output(True)
        with plancache.enabled(cache):
            graphs.stages(graph, between=lambda graph: graph.deselect_workspace_greater_than(1 << 20))
        return plancache.last_outcome(graph)

    with plancache.open(tmp_path / "cache") as cache:
        assert staged(cache).stored
        upgraded()
        report = plancache.rewarm(cache.directory, executor=here, cache=cache)
        assert [(line.route, line.outcome) for line in report.lines] == [
            ("deviceless", "built"),
            ("replay", "unsupported"),
        ]
        assert staged(cache).source == "disk"
        assert plancache.rewarm(cache.directory, executor=Idle(), cache=cache)


def test_a_bundle_is_built_for_another_device_by_both_routes_and_with_its_names(warm, tmp_path, here, smaller):
    with plancache.open(warm) as full:
        full.export_bundle(tmp_path / "plans", [one for one in full.rows() if one.row.engine != 9])
    with plancache.open(tmp_path / "cache") as cache:
        report = plancache.rewarm(tmp_path / "plans", [smaller], here, cache=cache)
        assert report
        assert {line.device for line in report.lines} == {"Smaller"}
        rows = [one.row for one in cache.rows()]
        labels = [set(cache.documents(row)["labels"].values()) for row in rows]
        assert any({"a", "b", "c"} <= names for names in labels)
    with plancache.target(smaller), plancache.open(tmp_path / "cache", mode="require-hit") as cache:
        for builder in (graphs.matmul, graphs.conv):
            assert cache.build(builder()[0]).source == "disk"


def test_what_a_job_missed_is_built_from_its_list(warm, tmp_path, here, monkeypatch):
    listed = tmp_path / "misses"
    monkeypatch.setenv("PLANCACHE_MISSES", str(listed))
    with plancache.target("h200"):
        job = plancache.cached(cache=plancache.open(warm, mode="read-only"), memory=0)(layers.simple.function)
        for _ in range(2):
            job(None)
        with plancache.open(warm, mode="read-only") as cache, plancache.enabled(cache):
            graphs.matmul(m=48)[0].build()
    assert len(list(misses.read(listed))) == 2
    with plancache.open(tmp_path / "cache") as cache:
        report = plancache.rewarm(listed, executor=here, cache=cache)
        assert (report.counts["built"], len(report.failures)) == (3, 0)  # a replay of the matmul, too
        assert "tests.layers.simple" in {line.builder for line in report.lines}
    with plancache.target("h200"), plancache.open(tmp_path / "cache", mode="require-hit") as cache:
        assert cache.build(graphs.matmul(m=48)[0]).source == "disk"
        assert cache.build(graphs.unary()[0]).source == "disk"


def test_a_list_without_the_devices_full_description_takes_one_that_is_known_or_asks(
    tmp_path, here, smaller, monkeypatch
):
    listed = tmp_path / "misses"
    monkeypatch.setenv("PLANCACHE_MISSES", str(listed))
    for device in ("h200", smaller):
        with plancache.target(device), pytest.raises(MissError):
            plancache.open(tmp_path / "empty", mode="require-hit").build(graphs.unary()[0])
    lines = [{**json.loads(line), "properties": ""} for line in listed.read_text().splitlines()]
    listed.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    with plancache.open(tmp_path / "cache") as cache:
        report = plancache.rewarm(listed, executor=here, cache=cache, routes=["deviceless"])
        assert [line.outcome for line in report.lines if line.device == "NVIDIA H200"] == ["built"]
        (failure,) = report.failures
        assert "plancache device export" in failure.error
        assert "Smaller" in failure.error
        assert plancache.rewarm(listed, [smaller], here, cache=cache, routes=["deviceless"]).counts == {"built": 1}


def test_dynamic_graphs_get_their_kernels_again_and_other_kernel_caches_are_named(tmp_path, here, upgraded, targeted):
    with plancache.open(tmp_path / "cache") as cache:
        for m in (8, 48):
            cache.build(graphs.matmul(m=m, is_dynamic_shape_enabled=True)[0])
        with cache.kernel_cache("by-hand") as kernels:
            graph, _ = graphs.matmul(kernel_cache=kernels.native, is_dynamic_shape_enabled=True)
            cache.build(graph)
        upgraded()
        report = plancache.rewarm(cache.directory, executor=here, cache=cache)
        assert report.counts == {"built": 2, "unsupported": 1}
        assert [line.builder for line in report.lines if line.outcome == "unsupported"] == ["by-hand"]
        kernels = [one.row for one in cache.rows() if is_kernel(one.row) and one.row.size]
        assert len({row.environment for row in kernels}) == 2
        graph, _ = graphs.matmul(m=200, is_dynamic_shape_enabled=True)  # a length that was not stored
        assert cache.build(graph).source == "disk"


def test_what_cannot_be_built_again_is_listed_and_stops_nothing(tmp_path, here, targeted):
    with plancache.open(tmp_path / "cache") as cache:
        cache.build(graphs.unary()[0])
    listed = tmp_path / "misses"
    with plancache.open(tmp_path / "cache") as cache:
        for graph in (graphs.unsupported()[0], graphs.unary()[0]):
            misses.append(listed, misses.Miss(cache.key(graph), "deviceless", plancache.Reason.ABSENT, {}))
        key = cache.key(graphs.unary()[0])
        key.documents["graph"]["nodes"][0]["type"] = "TELEPORT"
        misses.append(listed, misses.Miss(key, "deviceless", plancache.Reason.ABSENT, {}))
    with plancache.open(tmp_path / "new") as cache:
        report = plancache.rewarm(listed, ["h200"], here, cache=cache, routes=["deviceless"])
        assert report.counts == {"built": 1, "failed": 2}
        assert any("TELEPORT" in line.error for line in report.failures)


def test_a_job_that_misses_the_same_graph_again_and_again_lists_it_once(tmp_path, targeted, monkeypatch):
    listed = tmp_path / "misses"
    monkeypatch.setenv("PLANCACHE_MISSES", str(listed))
    with plancache.open(tmp_path / "empty", mode="require-hit") as cache:
        for build in (graphs.unary, graphs.matmul, graphs.unary, graphs.unary):
            with pytest.raises(MissError):
                cache.build(build()[0])
        assert len(cache.misses) == 4
    assert len(list(misses.read(listed))) == 2


def test_a_list_that_cannot_be_written_is_said_and_plans_are_kept_all_the_same(tmp_path, targeted, monkeypatch, said):
    monkeypatch.setenv("PLANCACHE_MISSES", str(tmp_path / "none" / "misses"))
    with plancache.open(tmp_path / "cache") as cache:
        assert cache.build(graphs.unary()[0]).stored
    (text,) = said()
    assert "misses are not listed" in text
    assert "as if there were no cache" not in text


def test_lines_of_nonsense_in_a_list_are_passed_over_and_one_after_a_torn_line_is_read(tmp_path, here, targeted, said):
    listed = tmp_path / "misses"
    with plancache.open(tmp_path / "cache") as cache:
        miss = misses.Miss(cache.key(graphs.unary()[0]), "deviceless", plancache.Reason.ABSENT, {})
    misses.append(listed, miss)
    good = json.loads(listed.read_text())
    documents = good["documents"]
    bad = [
        {**good, "labels": []},
        {**good, "documents": {**documents, "graph": "x"}},
        {**good, "documents": {**documents, "graph": {"arguments": {}}}},
        {**good, "documents": {**documents, "device": "x"}},
        {**good, "documents": {**documents, "graph": {**documents["graph"], "tensors": [1]}}},
        [1],
    ]
    torn = json.dumps(good)[:99]  # a full disk
    lines = [*map(json.dumps, bad), "[" * 100_000, torn + json.dumps(good, separators=(",", ":"))]
    listed.write_bytes(b"\xff\xfe\n" + "\n".join(lines).encode() + b"\n")
    assert list(misses.read(listed)) == [miss]
    with plancache.open(tmp_path / "cache") as cache:
        plancache.rewarm(listed, ["h200"], here, cache=cache, routes=["deviceless"])
    (text,) = said()
    assert text.startswith("9 lines of ")


@pytest.mark.parametrize("text", ["nonsense", None])
def test_a_source_that_is_none_is_an_error(tmp_path, text):
    source = tmp_path / "source"
    if text is not None:
        source.write_text(text)
    with pytest.raises(StoreError, match="nothing to build again"):
        plancache.rewarm(source, ["h200"], Idle(), cache=plancache.open(tmp_path / "cache"))


def test_upgrading_needs_a_gpu_and_says_so(warm):
    try:
        plancache.device(0)
    except plancache.PlanCacheError:
        with plancache.open(warm) as cache, pytest.raises(DeviceError, match="no GPU here"):
            cache.upgrade()
    else:
        pytest.skip("there is a GPU")


@pytest.mark.parametrize(("tuned", "expected"), [(True, ["3"]), (False, ["2", "3"])])
def test_only_what_is_served_by_a_way_to_start_is_upgraded(tmp_path, tuned, expected):
    stored = {"1": ("native", "replay"), "2": ("tuned", "replay"), "3": ("replay", "deviceless"), "4": ("tuned",)}
    place = SimpleNamespace(device=SimpleNamespace(fingerprint="device"))
    with plancache.open(tmp_path / "cache", tuned=tuned) as cache:
        for key, routes in stored.items():
            for route in routes:
                row = Row(key * 64, route, key, "t", "device", "libraries", "b", 1, 1, "eng1", 1, 0.0, 0.0, 1)
                assert cache.store.put(row, records.encode(row, {"blob": b"1"}))
        found = rewarming._served_otherwise(cache, "libraries", place)
        assert sorted({one.graph for one in found}) == expected
