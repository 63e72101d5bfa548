"""Filling ahead of time: everything that the builders will ask for is there, and nothing is built twice."""

import os
import pickle
import sqlite3
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace

import pytest

import plancache
from plancache import filler, workers
from plancache.builders import the_graph
from plancache.cudnn import libraries
from plancache.errors import BuilderError, DeviceError, SettingsError, StoreError
from plancache.kernels import is_kernel
from plancache.store import records
from plancache.store.database import FILE
from tests import graphs, layers

ALL = [layers.product, layers.attention, layers.lengths, layers.impossible, layers.broken, layers.every]
GOOD = ALL[:3]


class Idle(Executor):
    """Where nothing is to be built."""

    def submit(self, fn, /, *args, **kwargs):
        raise AssertionError("something was to be built")


class Padding(ThreadPoolExecutor):
    """Builds in this process, and makes the records so large."""

    def __init__(self, size):
        super().__init__(1)
        self._size = size

    def submit(self, fn, /, *args, **kwargs):
        return super().submit(self._padded, fn, *args)

    def _padded(self, fn, task):
        done = fn(task)
        return replace(done, made=[replace(made, record=self._record(made.record)) for made in done.made])

    def _record(self, record):
        row, fields = records.decode(record)
        return records.encode(row, {**fields, "padding": os.urandom(self._size)})


@pytest.fixture
def here():
    """Builds in this process, where cuDNN is loaded already."""
    with ThreadPoolExecutor(1) as executor:
        yield executor


@pytest.fixture(scope="session")
def warmed(tmp_path_factory):
    """A cache that was filled with everything in `ALL`, and the report."""
    directory = tmp_path_factory.mktemp("warmed") / "cache"
    with plancache.open(directory, mode="read-write") as cache, ThreadPoolExecutor(1) as executor:
        return directory, plancache.warm(ALL, ["h200"], executor, cache=cache)


def fates(report, builder):
    return [(line.args, line.route, line.outcome) for line in report.lines if line.builder == builder.name]


def test_every_case_is_built_by_each_route_that_its_graph_has(warmed):
    _, report = warmed
    assert sorted(fates(report, layers.product)) == [
        ((32,), "deviceless", "built"),
        ((32,), "replay", "built"),
        ((64,), "deviceless", "built"),
        ((64,), "replay", "built"),
    ]
    assert sorted(fates(report, layers.attention)) == [((), "deviceless", "built"), ((), "replay", "unsupported")]
    assert sorted(fates(report, layers.lengths)) == [((m,), "deviceless", "built") for m in (8, 48, 200)]
    assert all(line.seconds > 0 for line in report.lines if line.outcome == "built")


def test_what_fails_is_listed_with_its_own_message_and_stops_nothing(warmed, targeted):
    _, report = warmed
    assert not report
    with pytest.raises(libraries.cudnn().cudnnGraphNotSupportedError) as raised:
        graphs.unsupported()[0].build()
    texts = {line.builder: line.error for line in report.failures}
    assert texts == {
        layers.impossible.name: str(raised.value).strip(),
        layers.broken.name: "no a here",
        layers.every.name: "not cached: policy ALL asks for every plan, and one is kept",
    }


def test_what_was_filled_serves_every_case_and_nothing_is_compiled(warmed, targeted):
    with plancache.open(warmed[0], mode="require-hit") as cache:
        for builder in GOOD:
            for case in builder.cases:
                graph = the_graph(builder.function(None, *case), builder.name)
                assert cache.build(graph, builder.heuristics, builder.policy).source == "disk"


def test_what_is_there_is_passed_over_also_a_route_that_a_graph_does_not_have(warmed):
    with plancache.open(warmed[0]) as cache:
        report = plancache.warm(GOOD, ["h200"], Idle(), cache=cache)
    assert report
    assert report.counts == {"found": 8, "unsupported": 1}


def test_names_of_tensors_and_builders_are_kept(warmed):
    with plancache.open(warmed[0]) as cache:
        row = next(one.row for one in cache.rows(builder=layers.product.name))
        labels = cache.documents(row)["labels"].values()
    assert {"a", "b", "c"} <= set(labels)


def test_a_dynamic_topology_is_compiled_once(warmed):
    with plancache.open(warmed[0]) as cache:
        assert sum(is_kernel(one.row) and one.row.size > 0 for one in cache.rows()) == 1


def test_kernels_that_are_there_are_not_compiled_again(warmed, tmp_path, here):
    with plancache.open(warmed[0]) as full, plancache.open(tmp_path / "cache") as cache:
        kernels = [one for one in full.rows() if is_kernel(one.row)]
        full.export_bundle(tmp_path / "kernels", kernels)
        cache.import_bundle(tmp_path / "kernels")
        report = plancache.warm([layers.lengths], ["h200"], here, cache=cache)
        assert report.counts == {"built": 3}
        assert {one.row for one in cache.rows() if is_kernel(one.row)} == {one.row for one in kernels}


def test_a_plan_is_for_the_lowest_driver_of_the_cuda_major_unless_told(tmp_path, here, h200):
    with plancache.open(tmp_path / "cache") as cache:

        def drivers(**options):
            plancache.warm([layers.simple], ["h200"], here, cache=cache, routes=["deviceless"], **options)
            return {one.row.driver for one in cache.rows()}

        def served(driver):
            with plancache.target(h200.with_driver(driver)):
                return cache.contains(graphs.unary()[0])

        lowest = libraries.library().cudnnGetCudartVersion() // 1000 * 1000
        assert drivers(driver=lowest + 80) == {lowest + 80}
        assert (served(lowest), served(lowest + 80), served(lowest + 990)) == (False, True, True)
        assert drivers() == {lowest}  # it takes the newer one's place
        assert served(lowest)
        assert drivers(driver=f"{lowest // 1000}.8") == {lowest}  # never the reverse


def test_routes_are_chosen(tmp_path, here):
    with plancache.open(tmp_path / "cache") as cache:
        report = plancache.warm([layers.simple], ["h200"], here, cache=cache, routes=["deviceless"])
        assert {(line.route, line.outcome) for line in report.lines} == {("deviceless", "built")}
        report = plancache.warm([layers.lengths], ["h200"], Idle(), cache=cache, routes=["replay"])
        assert {(line.route, line.outcome) for line in report.lines} == {("replay", "unsupported")}


def test_a_route_that_a_stored_plan_does_not_have_is_noted_with_it(warmed, tmp_path, here):
    with plancache.open(tmp_path / "cache") as cache:
        with plancache.target("h200"):
            cache.build(graphs.sdpa()[0])
        for executor in (here, Idle()):
            report = plancache.warm([layers.attention], ["h200"], executor, cache=cache, driver="13.0")
            assert report.counts == {"found": 1, "unsupported": 1}
        with plancache.target("h200"):
            assert cache.build(graphs.sdpa()[0]).source == "disk"


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"driver": "8"}, SettingsError, "driver"),
        ({"driver": "new"}, SettingsError, "as 12.8"),
        ({"driver": "12.80"}, SettingsError, "as 12.8"),
        ({"routes": ["fast"]}, SettingsError, "'fast'"),
        ({"routes": ["native"]}, SettingsError, "deviceless or replay"),
        ({"devices": ["h9000"]}, DeviceError, "h9000"),
    ],
)
def test_a_wrong_argument_is_an_error_that_says_what_is_allowed(tmp_path, options, error, text):
    with pytest.raises(error, match=text):
        plancache.warm([layers.simple], **{"devices": ["h200"], **options}, cache=plancache.open(tmp_path / "cache"))


@pytest.mark.parametrize("jobs", [0, -3])
def test_no_workers_at_all_is_an_error_before_anything_is_looked_up(tmp_path, jobs):
    with plancache.open(tmp_path / "cache") as cache, pytest.raises(SettingsError, match="1 or more"):
        plancache.warm([layers.simple], ["h200"], cache=cache, jobs=jobs)


def test_a_builder_that_ends_the_process_is_a_failing_case(tmp_path):
    def quits(handle):
        raise SystemExit(0)

    with plancache.open(tmp_path / "cache") as cache:
        report = plancache.warm([plancache.cached(cases=[()])(quits)], ["h200"], Idle(), cache=cache)
    assert report.counts == {"failed": 1}


def test_one_builder_one_device_and_one_route_need_no_list(warmed):
    with plancache.open(warmed[0]) as cache:
        report = plancache.warm(layers.product, "h200", Idle(), cache=cache, routes="deviceless")
    assert report.counts == {"found": len(layers.product.cases)}


def test_what_is_no_builder_and_no_devices_at_all_are_errors_and_no_success(tmp_path):
    with plancache.open(tmp_path / "cache") as cache:
        with pytest.raises(BuilderError, match="plancache.cached"):
            plancache.warm([layers.product.function], ["h200"], Idle(), cache=cache)
        with pytest.raises(DeviceError, match="an empty list"):
            plancache.warm([layers.product], [], Idle(), cache=cache)


def test_without_a_device_and_without_a_gpu_it_says_to_name_one(tmp_path):
    try:
        plancache.device(0)
    except plancache.PlanCacheError:
        with pytest.raises(DeviceError, match="plancache warm --device h200"):
            plancache.warm([layers.simple], cache=plancache.open(tmp_path / "cache"))
    else:
        pytest.skip("there is a GPU")


def test_a_cache_that_may_not_be_written_is_an_error_before_anything_is_built(warmed):
    with pytest.raises(StoreError, match="may not be written"):
        plancache.warm(GOOD, ["h200"], Idle(), cache=plancache.open(warmed[0], mode="read-only"))


def test_a_damaged_record_is_built_again(warm, here):
    database = sqlite3.connect(warm / FILE)
    with database:
        database.execute("UPDATE plans SET record = substr(record, 1, 100) WHERE engine = 9")
    database.close()
    with plancache.open(warm) as cache:
        same = {"cache": cache, "routes": ["deviceless"], "driver": "13.0"}
        assert plancache.warm([layers.product], ["h200"], here, **same).counts["found"] == 1
        assert plancache.warm([layers.attention], ["h200"], here, **same).counts == {"built": 1}
        assert plancache.warm([layers.attention], ["h200"], Idle(), **same)


def test_signed_records_are_left_to_those_who_have_the_key(tmp_path, here):
    key = tmp_path / "key"
    key.write_bytes(b"a secret of 16 bytes or more")
    key.chmod(0o600)
    with plancache.open(tmp_path / "cache", key_file=key) as cache:
        assert plancache.warm([layers.simple], ["h200"], here, cache=cache, routes=["deviceless"])
    with plancache.open(tmp_path / "cache") as cache:
        report = plancache.warm([layers.simple], ["h200"], Idle(), cache=cache, routes=["deviceless"])
        assert report.counts == {"failed": 1}
        assert "PLANCACHE_KEY_FILE" in report.failures[0].error
    with plancache.open(tmp_path / "cache", key_file=key) as cache:
        report = plancache.warm([layers.simple], ["h200"], Idle(), cache=cache, routes=["deviceless"])
        assert report.counts == {"found": 1}


def test_records_are_signed_by_the_process_that_writes_and_workers_have_no_key(tmp_path, here):
    key = tmp_path / "key"
    key.write_text("0123456789abcdef0123")
    with plancache.open(tmp_path / "cache", key_file=key) as cache:
        report = plancache.warm([layers.simple, layers.lengths], ["h200"], here, cache=cache, routes=["deviceless"])
        assert report.counts == {"built": 4}
        for _, _, _, record in cache.store.salvage():
            assert records.decode(record, key.read_bytes())
        assert plancache.warm([layers.simple], ["h200"], Idle(), cache=cache, routes=["deviceless"])


@pytest.mark.parametrize(("size", "text"), [(450_000, "make room for others"), (5_000_000, "does not fit")])
def test_what_a_cache_is_too_small_for_is_a_failure_and_not_forgotten(tmp_path, size, text):
    with plancache.open(tmp_path / "cache", max_bytes=2 << 20) as cache, Padding(size) as executor:
        report = plancache.warm([layers.product, layers.simple], ["h200"], executor, cache=cache, routes=["deviceless"])
        assert report.counts["built"] == len(list(cache.rows())) < 3
        assert len(report.failures) == 3 - report.counts["built"]
        assert all(text in line.error for line in report.failures)


def test_a_worker_with_other_libraries_says_so_and_makes_nothing(h200):
    wanted = workers.Wanted({"arguments": {}}, {}, {}, "", ("deviceless",))
    (made,) = workers.work(workers.Task(h200.to_json(), "another environment", (wanted,))).made
    assert (made.outcome, made.record) == ("failed", None)
    assert "other libraries" in made.error


def test_interrupted_it_keeps_what_came_back_and_goes_on_from_there(tmp_path, here):
    def interrupt(done, _total, _line):
        if done == 2:
            raise KeyboardInterrupt

    with plancache.open(tmp_path / "cache") as cache:
        with pytest.raises(KeyboardInterrupt):
            plancache.warm([layers.product], ["h200"], here, cache=cache, routes=["deviceless"], progress=interrupt)
        stored = len(list(cache.rows()))
        assert stored >= 1
        report = plancache.warm([layers.product], ["h200"], here, cache=cache, routes=["deviceless"])
        assert report.counts["found"] == stored
        assert report.counts["found"] + report.counts["built"] == 2


def test_progress_counts_graphs_and_ends_with_all_of_them(warmed):
    told = []
    with plancache.open(warmed[0]) as cache:
        plancache.warm(GOOD, ["h200"], Idle(), cache=cache, progress=lambda *event: told.append(event))
    assert [total for _, total, _ in told] == [6] * 9
    assert [done for done, _, _ in told] == sorted(done for done, _, _ in told)
    assert told[-1][0] == 6


def test_neighbours_of_one_topology_go_together_and_the_rest_alone(warmed, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(filler.workers, "work", lambda task: seen.append(len(task.wanted)) or workers.Done())
    with plancache.open(tmp_path / "cache") as cache, ThreadPoolExecutor(1) as executor:
        plancache.warm([layers.lengths, layers.product, layers.simple], ["h200"], executor, cache=cache)
    assert seen == [3, 1, 1, 1]


def test_a_builder_travels_by_reference():
    assert pickle.loads(pickle.dumps(layers.product)) is layers.product  # noqa: S301 (one's own bytes)
