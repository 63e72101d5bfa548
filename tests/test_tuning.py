"""Tuning, as far as it goes without a GPU: candidates are listed and built really; only what a device would say of them
(outputs and microseconds) is made up here. tests/gpu has the rest."""

import errno
import fcntl
import json
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace

import pytest
from click.testing import CliRunner

import plancache
from plancache import stored, tuning
from plancache.cli import cli
from plancache.cudnn import candidates, plans
from plancache.cudnn.numbers import Difference
from plancache.cudnn.plans import Choice, Route
from plancache.cudnn.running import Timing
from plancache.errors import BuilderError, DeviceError, RunError, SettingsError, StoreError
from plancache.outcome import Reason
from plancache.store import records
from plancache.tuning_table import Limits, Tuning
from tests import graphs
from tests.conftest import ROOT


def request(graph=None, **choice):
    graph = graphs.unary()[0] if graph is None else graph
    return plans.declare(graph).request(graph, Choice(**choice))


class Device:
    """Stands for the device: it executes nothing, and says of each plan what the test wants it to say."""

    made = 0

    def __init__(self, h200, micros, wrong=(), broken=(), fault=(), zeros=(), drifts=()):
        self.place = {"device": h200}
        self.zeros, self.drifts = zeros, drifts
        self.micros, self.wrong, self.broken, self.fault = micros, wrong, broken, fault
        self.ran = []

    def __call__(self, ordinal, memory):
        self.made += 1
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def operands(self, graph):
        return "operands"

    def outputs(self, made):
        return {}

    def refill(self, made):
        self.refilled = made

    def run(self, graph, made, outputs):
        name = graph.get_plan_name_at_index(0)
        self.ran.append(name)
        self.now = name
        if name in self.fault:
            raise RunError("the device is at fault", fault=True)
        if name in self.broken:
            raise RunError("a plan could not be launched")

    def compare(self, made, expected, found):
        return Difference("HALF", exact=False, largest=1.0 if self.now in self.wrong else 1e-4)

    def time(self, graph, made, outputs):
        value = self.micros.get(graph.get_plan_name_at_index(0), 100.0)
        value = value.pop(0) if isinstance(value, list) else value
        if isinstance(value, Exception):
            raise value
        if graph.get_plan_name_at_index(0) in self.drifts:
            self.wrong = {*self.wrong, self.now}
        return Timing(value, value - 1)

    def empty(self, made, outputs):
        return self.now in self.zeros

    def check(self):
        pass


@pytest.fixture(scope="session")
def offered(h200):
    """The candidates of a small graph."""
    with plancache.target(h200):
        return candidates.candidates(request(), device=h200)


@pytest.fixture
def names(offered):
    return [plan.name for plan in offered]


@pytest.fixture(scope="session")
def once():
    """Builds each candidate of the small graph once a session: the plans are the same each time."""
    plain, kept = candidates.build, {}

    def build(wanted, plan, **place):
        if (wanted.key, plan.name) not in kept:
            kept[wanted.key, plan.name] = plain(wanted, plan, **place)
        return kept[wanted.key, plan.name]

    return build


@pytest.fixture
def on(monkeypatch, h200, once):
    """Tune the small graph in a cache, on a device that says so."""
    monkeypatch.setattr(candidates, "build", once)

    def run(cache, device, said=lambda place, table: None, wanted=None, again=False, lost=None, **limits):
        monkeypatch.setattr(tuning, "Runner", device)
        return tuning.tune_request(cache, wanted or request(), Limits(**limits), said, again, lost)

    return run


@pytest.fixture(scope="session")
def finished(tmp_path_factory, h200, offered, once):
    directory = tmp_path_factory.mktemp("tuned") / "cache"
    names = [plan.name for plan in offered]
    device = Device(h200, {names[0]: 50.0, names[2]: 25.0}, wrong=names[1:2], broken=names[3:4])
    patch = pytest.MonkeyPatch()
    patch.setattr(tuning, "Runner", device)
    patch.setattr(candidates, "build", once)
    with plancache.target(h200), plancache.open(directory, mode="read-write") as cache:
        table = tuning.tune_request(cache, request(), Limits(), lambda place, table: None)
    patch.undo()
    return directory, table, device


@pytest.fixture
def tuned(finished, targeted):
    with plancache.open(finished[0]) as cache:
        yield cache


def test_every_plan_of_all_heuristics_is_a_candidate_once_and_the_own_first_choice_comes_first(names, targeted, built):
    graph, _ = graphs.unary()
    plans.run_build(graph, Choice())
    assert names[0] == graph.get_plan_name_at_index(0)
    assert len(names) == len(set(names)) > 3


def test_what_the_filters_of_a_graph_exclude_is_no_candidate(names, targeted, h200):
    graph, _ = graphs.unary()
    graph.deselect_engines([names[1]])
    left = [plan.name for plan in candidates.candidates(request(graph), device=h200)]
    assert names[1] not in left
    assert names[0] in left


def test_a_candidate_is_built_as_itself_and_leaves_the_declared_graph_alone(offered, targeted, h200):
    wanted = request()
    built, seconds = candidates.build(wanted, offered[1], device=h200)
    assert built.get_plan_name_at_index(0) == offered[1].name
    assert seconds > 0
    assert request(wanted.graph).key == wanted.key


def test_a_graph_that_has_no_plan_is_the_callers_error(targeted, h200):
    import cudnn

    with pytest.raises(cudnn.cudnnGraphNotSupportedError):
        candidates.candidates(request(graphs.unsupported()[0]), device=h200)


def test_the_fastest_right_candidate_is_kept_with_the_table_of_all(finished, tuned, names):
    _, table, _ = finished
    statuses = {one.name: one.status for one in table.candidates}
    assert [statuses[name] for name in names[:4]] == ["ok", "wrong", "ok", "failed"]
    assert (table.candidates[table.first].name, table.candidates[table.chosen].name) == (names[0], names[2])
    assert table.complete
    assert table.gain == 2.0
    (listed,) = tuned.rows()
    assert (listed.row.route, listed.row.name) == ("tuned", names[2])
    assert tuned.tuning(listed.row) == table


def test_after_a_wrong_plan_the_inputs_and_the_expected_outputs_are_made_anew(finished, names):
    _, _, device = finished
    assert device.refilled == "operands"  # names[1] was wrong, and may have written anywhere
    assert device.ran[:4] == [names[0], names[1], names[0], names[2]]


def test_the_first_choice_stays_where_it_was_only_slow_because_it_came_first(tmp_path, on, targeted, h200, names):
    with plancache.open(tmp_path / "cache") as cache:
        device = Device(h200, {names[0]: [100.0, 20.0, 21.0, 22.0], names[1]: [50.0, 51.0, 52.0, 53.0]})
        table = on(cache, device)
        assert (table.first, table.chosen, table.gain) == (0, 0, 1.0)
        assert [one.median for one in table.candidates[:2]] == [20.0, 51.0]
        (listed,) = cache.rows()
        assert listed.row.name == names[0]


def test_candidates_that_are_close_to_the_fastest_are_timed_again_with_it(tmp_path, on, targeted, h200, names):
    # The one that seemed the fastest had a good moment; another one is faster than the first choice all the same.
    times = {
        names[0]: [50.0, 50.0, 50.0, 50.0],
        names[1]: [40.0, 52.0, 52.0, 52.0],
        names[2]: [43.0, 43.0, 44.0, 45.0],
        names[3]: 48.0,
    }
    with plancache.open(tmp_path / "cache") as cache:
        table = on(cache, Device(h200, times))
        assert [one.median for one in table.candidates[:4]] == [50.0, 52.0, 43.0, 48.0]
        (listed,) = cache.rows()
    assert (table.first, table.chosen, listed.row.name) == (0, 2, names[2])


def test_a_graph_whose_outputs_are_nothing_but_zeros_is_not_tuned(tmp_path, on, targeted, h200, names):
    with plancache.open(tmp_path / "cache") as cache:
        with pytest.raises(BuilderError, match="zeros and NaN"):
            on(cache, Device(h200, {}, zeros=names[:1]))
        assert list(cache.rows()) == []


def test_what_is_stored_is_the_plan_of_the_fastest_and_can_be_loaded(tuned, names, h200):
    wanted = request()
    record = tuned.store.get(wanted.key.hash, "tuned")
    _, fields = stored.decode(record, wanted.key, "tuned", None)
    # Built for a device that is not here, it is loaded so; on the device it is built and loaded with the handle.
    plans.load(wanted, Route.DEVICELESS, fields["plan"], fields["blob"])
    assert wanted.graph.get_plan_name_at_index(0) == names[2]
    assert wanted.graph.get_execution_plan_count() == 1
    assert wanted.graph.get_workspace_size() >= 0


def test_tuning_that_is_complete_runs_nothing_again(tuned, on, h200, finished):
    device = Device(h200, {})
    assert on(tuned, device) == finished[1]
    assert device.made == 0


def test_tuning_without_time_keeps_the_first_and_the_next_goes_on_with_the_rest(tmp_path, on, targeted, h200, names):
    with plancache.open(tmp_path / "cache") as cache:
        first = on(cache, Device(h200, {}), seconds=0)
        assert [one.status for one in first.candidates] == ["ok"] + ["not run"] * (len(names) - 1)
        assert not first.complete
        device = Device(h200, {names[-1]: 1.0})
        whole = on(cache, device)
        assert whole.complete
        assert whole.candidates[whole.chosen].name == names[-1]
        assert device.ran == names  # the first one again, since the others are judged by it


def test_what_was_measured_before_an_interruption_is_there_afterwards(tmp_path, on, targeted, h200, names):
    def interrupt(place, table):
        if place == 2:
            raise KeyboardInterrupt

    with plancache.open(tmp_path / "cache") as cache:
        with pytest.raises(KeyboardInterrupt):
            on(cache, Device(h200, {}), interrupt)
        (listed,) = cache.rows()
        statuses = [one.status for one in cache.tuning(listed.row).candidates]
    assert statuses[:3] == ["ok", "ok", "not run"]


def test_a_fault_of_the_device_ends_the_tuning_and_the_candidate_is_not_tried_again(
    tmp_path, on, targeted, h200, names
):
    with plancache.open(tmp_path / "cache") as cache:
        with pytest.raises(RunError) as caught:
            on(cache, Device(h200, {}, fault=names[1:2]))
        assert caught.value.fault
        device = Device(h200, {})
        table = on(cache, device)
    assert table.candidates[1].status == "failed"
    assert names[1] not in device.ran


@pytest.mark.parametrize("fault", [True, False])
def test_a_plan_that_fails_in_the_last_comparison_is_not_the_one_that_is_kept(
    tmp_path, on, targeted, h200, names, fault
):
    micros = {names[1]: [5.0, RunError("CUDA failed", fault=fault)], names[2]: 6.0}
    with plancache.open(tmp_path / "cache") as cache:
        if fault:
            with pytest.raises(RunError):
                on(cache, Device(h200, micros))
        else:
            on(cache, Device(h200, micros))
        (listed,) = cache.rows()
        table = cache.tuning(listed.row)
    assert table.candidates[1].status == "failed"
    assert (table.chosen, listed.row.name) == (2, names[2])


def test_a_plan_that_gives_something_else_after_many_runs_is_wrong_also_the_first_choice(
    tmp_path, on, targeted, h200, names
):
    with plancache.open(tmp_path / "cache") as cache:
        table = on(cache, Device(h200, {names[1]: 5.0, names[2]: 6.0}, drifts=[names[0], names[1]]))
    assert [one.status for one in table.candidates[:3]] == ["wrong", "wrong", "ok"]
    assert "after many runs" in table.candidates[0].detail
    assert (table.first, table.chosen) == (2, 2)


@pytest.mark.parametrize("limits", [{"again": True}, {"workspace": 1 << 40}])
def test_measuring_anew_that_is_interrupted_keeps_the_plan_that_there_was(tmp_path, on, targeted, h200, names, limits):
    def interrupt(place, table):
        if place == 1:
            raise KeyboardInterrupt

    with plancache.open(tmp_path / "cache") as cache:
        on(cache, Device(h200, {names[2]: 5.0}))
        with pytest.raises(KeyboardInterrupt):
            on(cache, Device(h200, {}), interrupt, **limits)
        (listed,) = cache.rows()
        assert listed.row.name == names[2]
        assert on(cache, Device(h200, {names[3]: 50.0}), seconds=0, **limits).chosen == 2
        table = on(cache, Device(h200, {names[3]: 5.0, names[2]: 60.0}), **limits)
        assert (table.complete, table.chosen) == (True, 3)
        assert [one.row.name for one in cache.rows()] == [names[3]]


def test_the_fastest_of_an_earlier_tuning_is_timed_again_beside_what_was_left(tmp_path, on, targeted, h200, names):
    def interrupt(place, table):
        if place == 2:
            raise KeyboardInterrupt

    with plancache.open(tmp_path / "cache") as cache:
        with pytest.raises(KeyboardInterrupt):
            on(cache, Device(h200, {names[1]: 5.0}), interrupt)
        # The clock is another one by now: what took 5 takes 50, and so do not the others.
        table = on(cache, Device(h200, {names[1]: 50.0, names[2]: 40.0}))
        assert table.chosen == 2
        assert table.candidates[1].median == 50.0


def test_a_candidate_that_found_no_memory_is_tried_again(tmp_path, on, targeted, h200, names):
    micros = {names[1]: [RunError("no memory", memory=True), 5.0, 5.0, 5.0, 5.0]}
    with plancache.open(tmp_path / "cache") as cache:
        table = on(cache, Device(h200, micros))
        assert table.candidates[1].status == "no memory"
        table = on(cache, Device(h200, micros))
        assert (table.candidates[1].status, table.chosen) == ("ok", 1)


def test_what_cannot_be_kept_is_not_called_tuned(tmp_path, on, targeted, h200, monkeypatch):
    with plancache.open(tmp_path / "cache") as cache:
        monkeypatch.setattr(cache.store, "put", lambda *_: False)
        with pytest.raises(StoreError, match="could not be kept"):
            on(cache, Device(h200, {}))


def test_a_tuned_plan_that_somebody_else_has_put_there_meanwhile_is_replaced(tmp_path, on, targeted, h200, finished):
    with plancache.open(tmp_path / "cache") as cache, plancache.open(finished[0]) as other:
        (listed,) = other.rows()
        record, done = other.store.get(listed.row.key, "tuned"), []

        def interfere(place, table):
            if place == 2 and not done:
                done.append(cache.store.discard(listed.row.key, "tuned"))
                assert cache.store.put(listed.row, record)

        table = on(cache, Device(h200, {}), interfere)
        assert cache.tuning(next(cache.rows()).row) == table


@pytest.mark.parametrize("name", ["driver", "frontend"])
def test_a_tuning_for_a_newer_driver_or_frontend_is_not_gone_on_with(tmp_path, on, targeted, h200, names, name):
    with plancache.open(tmp_path / "cache") as cache:
        on(cache, Device(h200, {}), seconds=0)
        (listed,) = cache.rows()
        old = cache.store.get(listed.row.key, "tuned")
        row, fields = records.decode(old)
        newer = replace(row, **{name: getattr(row, name) + 1000})
        assert cache.store.put(newer, records.encode(newer, fields), old)
        device = Device(h200, {})
        assert on(cache, device).complete
        assert device.ran == names
        (listed,) = cache.rows()
        assert getattr(listed.row, name) == getattr(row, name)


def test_a_tuned_plan_that_is_signed_with_another_key_is_left_alone(tmp_path, on, targeted, h200, monkeypatch):
    with plancache.open(tmp_path / "cache") as cache:
        on(cache, Device(h200, {}), seconds=0)
        (listed,) = cache.rows()
        old = cache.store.get(listed.row.key, "tuned")
        row, fields = records.decode(old)
        signed = records.encode(row, fields, b"k" * 32)
        assert cache.store.put(row, signed, old)
        with pytest.raises(StoreError, match="cannot be checked here"):
            on(cache, Device(h200, {}))
        assert cache.store.get(listed.row.key, "tuned") == signed


def test_a_candidate_that_hung_is_noted_and_never_tried_again(tmp_path, on, targeted, h200, names):
    with plancache.open(tmp_path / "cache") as cache:
        on(cache, Device(h200, {}), seconds=0)
        (listed,) = cache.rows()
        assert tuning.mark(cache, listed.row, names[1], tuning.HUNG, "nothing came of it for 60 s")
        assert not tuning.mark(cache, listed.row, "no such plan", tuning.HUNG, "")
        for changes in ({}, {"workspace": 1 << 30}, {"again": True}):  # also where all others are measured anew
            device = Device(h200, {names[2]: 5.0})
            table = on(cache, device, **changes)
            assert table.candidates[1].status == "hung"
            assert device.ran == [name for name in names if name != names[1]]
            (listed,) = cache.rows()
            assert cache.tuning(listed.row) == table


def test_a_first_choice_that_was_lost_before_is_passed_over_and_the_next_one_judges(
    tmp_path, on, targeted, h200, names
):
    with plancache.open(tmp_path / "cache") as cache:
        device = Device(h200, {names[2]: 5.0}, fault=names[:1])
        table = on(cache, device, lost={names[0]: ("failed", "the device is at fault")})
        assert device.ran == names[1:]
        assert [one.status for one in table.candidates[:2]] == ["failed", "ok"]
        assert (table.first, table.chosen, table.complete) == (1, 2, True)


def test_where_the_judge_of_an_earlier_tuning_is_lost_all_but_the_lost_ones_are_judged_anew(
    tmp_path, on, targeted, h200, names
):
    def interrupted(place, table):
        if place == 3:
            raise KeyboardInterrupt

    with plancache.open(tmp_path / "cache") as cache:
        with suppress(KeyboardInterrupt):
            on(cache, Device(h200, {names[1]: 5.0}), interrupted)
        device = Device(h200, {}, fault=names[:1])
        table = on(cache, device, lost={names[0]: ("hung", "")})
        assert device.ran == names[1:]
        assert (table.first, table.candidates[0].status, table.complete) == (1, "hung", True)


def test_the_record_of_a_tuned_plan_that_did_not_come_back_goes(tmp_path, on, targeted, h200, names):
    with plancache.open(tmp_path / "cache") as cache:
        on(cache, Device(h200, {}), seconds=0)
        (listed,) = cache.rows()
        assert not tuning.mark(cache, listed.row, names[0], tuning.HUNG, "nothing came of it for 60 s")
        assert list(cache.rows()) == []


def test_the_two_that_are_timed_in_turns_are_named_before_since_they_may_not_come_back(
    tmp_path, on, targeted, h200, names
):
    told = []
    with plancache.open(tmp_path / "cache") as cache:
        on(cache, Device(h200, {names[1]: 5.0}), lambda place, table: told.append(place))
    assert told == [*range(len(names)), 0, 1, 0, 1, 0, 1]


def test_candidates_with_a_larger_workspace_are_passed_over(tmp_path, on, targeted, h200):
    with plancache.open(tmp_path / "cache") as cache:
        table = on(cache, Device(h200, {}), workspace=-1)
    assert {one.status for one in table.candidates} == {"too large"}
    assert table.chosen is None


def test_a_table_of_a_later_version_or_a_damaged_record_begins_anew(tmp_path, on, targeted, h200, names, said):
    with plancache.open(tmp_path / "cache") as cache:
        on(cache, Device(h200, {}), seconds=0)
        (listed,) = cache.rows()
        old = cache.store.get(listed.row.key, "tuned")
        row, fields = records.decode(old)
        strange = records.encode(row, stored.with_tuning(fields, {"rows": []}))
        assert cache.store.put(row, strange, old)
        assert on(cache, Device(h200, {})).complete
        damaged = cache.store.get(listed.row.key, "tuned")
        assert cache.store.put(row, damaged[:-1], damaged)
        assert on(cache, Device(h200, {})).complete
        (listed,) = cache.rows()
        assert cache.tuning(listed.row).complete


def test_one_process_tunes_a_key_and_another_one_waits_no_longer_than_it_may(tmp_path, monkeypatch, targeted, h200):
    with plancache.open(tmp_path / "cache", wait=0.05) as cache:
        wanted = request()
        with cache._layers.locks(tuning=True).turn(wanted.key.hash, lambda: False) as mine:
            assert mine
            alive, device = [], Device(h200, {})
            monkeypatch.setattr(tuning, "Runner", device)
            limits = Limits(seconds=0.05)
            table = tuning.tune_request(cache, wanted, limits, lambda *_: None, waiting=lambda: alive.append(1))
            assert (table.outcome, table.candidates, device.made) == ("busy", [], 0)  # a value: nothing failed
            assert "another process is tuning this graph" in table.detail
            assert f"process {os.getpid()}" in table.detail
            assert alive
            # Whoever only wants the plan does not wait.
            assert cache.build(wanted.graph).stored


def test_who_waited_takes_what_the_other_process_has_found(tmp_path, on, targeted, h200, tuned, finished):
    with plancache.open(tmp_path / "cache") as cache:
        wanted, device = request(), Device(h200, {})
        with cache._layers.locks(tuning=True).turn(wanted.key.hash, lambda: False):
            (listed,) = tuned.rows()
            cache.store.put(listed.row, tuned.store.get(listed.row.key, "tuned"))
            assert on(cache, device, wanted=wanted) == finished[1]
        assert device.made == 0


_HOLDER = """
import sys, plancache
from pathlib import Path
directory, key, source = sys.argv[1:]
with plancache.open(directory) as cache, plancache.open(source, mode="read-only") as other:
    with cache._layers.locks(tuning=True).turn(key, lambda: False):
        print("holds", flush=True)
        if sys.stdin.readline():
            (listed,) = other.rows()
            cache.store.put(listed.row, other.store.get(listed.row.key, "tuned"))
"""


@pytest.mark.parametrize("killed", [False, True])
def test_who_waits_does_so_as_long_as_the_other_process_lives_and_then_takes_its_table_or_tunes(
    tmp_path, monkeypatch, once, targeted, h200, finished, killed
):
    device, looks = Device(h200, {}), []
    monkeypatch.setattr(tuning, "Runner", device)
    monkeypatch.setattr(candidates, "build", once)
    with plancache.open(tmp_path / "cache", wait=0.05) as cache:
        wanted = request()
        arguments = [str(tmp_path / "cache"), wanted.key.hash, str(finished[0])]
        holder = subprocess.Popen(
            [sys.executable, "-c", _HOLDER, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
        )

        def waiting():
            looks.append(1)
            if len(looks) == 10:  # longer by then than what a build is waited for
                holder.kill() if killed else holder.communicate(b"go\n")

        with holder:
            assert holder.stdout.readline() == b"holds\n"
            table = tuning.tune_request(cache, wanted, Limits(), lambda *_: None, waiting=waiting)
    assert (table.outcome, table.complete, device.made) == ("tuned", True, int(killed))
    assert killed or table == finished[1]


def test_what_another_process_measures_anew_meanwhile_is_not_measured_once_more(tmp_path, on, targeted, h200, finished):
    with plancache.open(tmp_path / "cache") as cache, plancache.open(finished[0]) as other:
        (listed,) = other.rows()
        record = other.store.get(listed.row.key, "tuned")
        row, fields = records.decode(record)
        anew = records.encode(row, stored.with_tuning(fields, {**finished[1].document(), "seconds": 77.0}))
        cache.store.put(row, record)
        wanted, device = request(), Device(h200, {})
        with cache._layers.locks(tuning=True).turn(wanted.key.hash, lambda: False):
            table = tuning.tune_request(
                cache, wanted, Limits(), lambda *_: None, True, waiting=lambda: cache.store.put(row, anew, record)
            )
        assert (table.seconds, device.made) == (77.0, 0)


def test_a_table_is_complete_for_others_only_after_the_last_comparison(tmp_path, on, targeted, h200, names):
    seen = []
    with plancache.open(tmp_path / "cache") as cache:

        def said(place, table):
            seen.extend(cache.tuning(listed.row).complete for listed in cache.rows())

        on(cache, Device(h200, {names[1]: 5.0}), said)
        assert len(seen) > len(names)  # also while the fastest were compared
        assert not any(seen)
        (listed,) = cache.rows()
        assert cache.tuning(listed.row).complete


def test_where_a_file_system_cannot_lock_graphs_are_tuned_all_the_same(tmp_path, on, targeted, h200, monkeypatch, said):
    def flock(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with plancache.open(tmp_path / "cache", store="files") as cache:
        assert on(cache, Device(h200, {})).complete
    assert any("cannot lock" in text for text in said())


def test_a_candidate_that_did_not_come_back_cannot_be_noted_in_a_damaged_record(tmp_path, on, targeted, h200, names):
    with plancache.open(tmp_path / "cache") as cache:
        on(cache, Device(h200, {}), seconds=0)
        (listed,) = cache.rows()
        record = cache.store.get(listed.row.key, "tuned")
        assert cache.store.put(listed.row, record[:-1], record)
        assert not tuning.mark(cache, listed.row, names[1], tuning.HUNG, "")
        row, fields = records.decode(record)
        later = records.encode(row, stored.with_tuning(fields, {"rows": []}))
        assert cache.store.put(row, later, record[:-1])
        assert not tuning.mark(cache, listed.row, names[1], tuning.HUNG, "")


def test_a_tuned_plan_comes_before_all_others_unless_it_is_not_asked_for(tmp_path, targeted, monkeypatch):
    wanted = replace(request(), route=Route.NATIVE)
    with plancache.open(tmp_path / "cache") as cache:
        assert cache._routes(wanted) == (Route.TUNED, Route.NATIVE, Route.REPLAY)
    with plancache.open(tmp_path / "cache", tuned=False) as cache:
        assert cache._routes(wanted) == (Route.NATIVE, Route.REPLAY)
    with plancache.open(tmp_path / "cache", mode="check") as cache:  # which compares with what building gives
        assert cache._routes(wanted) == (Route.NATIVE, Route.REPLAY)
    monkeypatch.setenv("PLANCACHE_TUNED", "0")
    with plancache.open(tmp_path / "cache") as cache:
        assert Route.TUNED not in cache._routes(wanted)
    with plancache.open(tmp_path / "cache", tuned=True) as cache:
        assert Route.TUNED in cache._routes(wanted)
    monkeypatch.setenv("PLANCACHE_TUNED", "no")
    with pytest.raises(SettingsError, match="PLANCACHE_TUNED|1, 0"):
        plancache.open(tmp_path / "cache")


def test_a_tuned_plan_is_not_for_graphs_of_a_device_that_is_not_here(tuned):
    assert tuned.lookup(graphs.unary()[0]).reason is Reason.ABSENT


def test_a_damaged_tuned_record_is_set_aside_and_the_next_best_serves(tuned, tmp_path, targeted, monkeypatch, said):
    with plancache.open(tmp_path / "cache") as cache:
        (listed,) = tuned.rows()
        record = tuned.store.get(listed.row.key, "tuned")
        cache.store.put(listed.row, record[:-1])
        assert cache.build(graphs.unary()[0]).stored
        monkeypatch.setattr(cache, "_routes", lambda wanted: (Route.TUNED, Route.DEVICELESS))
        assert cache.build(graphs.unary()[0]).route == "deviceless"
        assert [one.row.route for one in cache.rows()] == ["deviceless"]
    assert "checksum" in said()[0]


@pytest.mark.parametrize(
    ("build", "error", "text"),
    [
        (lambda cache: cache.tune(graphs.unary()[0]), DeviceError, "not here"),
        (lambda cache: cache.tune(graphs.matmul(is_dynamic_shape_enabled=True)[0]), BuilderError, "dynamic shapes"),
        (lambda cache: cache.tune("no graph"), BuilderError, "no graph"),
    ],
)
def test_what_cannot_be_tuned_says_why(tmp_path, targeted, build, error, text):
    with plancache.open(tmp_path / "cache") as cache, pytest.raises(error, match=text):
        build(cache)


def test_a_cache_that_may_not_be_written_tunes_nothing(tmp_path, targeted, monkeypatch):
    native = replace(request(), route=Route.NATIVE)
    with plancache.open(tmp_path / "cache", mode="read-only") as cache:
        monkeypatch.setattr(cache, "_request", lambda *_: native)
        with pytest.raises(StoreError, match="cannot be kept"):
            cache.tune(native.graph)


def test_show_prints_the_table_and_gives_it_as_json(finished, names):
    directory, table, _ = finished
    with plancache.open(directory) as cache:
        (listed,) = cache.rows()
    shown = CliRunner().invoke(cli, ["--dir", str(directory), "show", listed.row.key])
    assert shown.exit_code == 0, shown.output
    lines = shown.output.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("candidate"))
    assert lines[at + 1].startswith(names[2])
    assert "ok, tuned" in lines[at + 1]
    assert "ok, first choice" in shown.output
    assert f"{len(names)} candidates" in shown.output
    answer = CliRunner().invoke(cli, ["--dir", str(directory), "show", listed.row.key, "--json"])
    known = json.loads(answer.output)["tuning"]
    assert (known["gain"], known["complete"]) == (2.0, True)
    assert Tuning.of({name: known[name] for name in table.document()}) == table


def test_tuned_plans_are_listed_checked_exported_and_imported_like_others(finished, tmp_path):
    directory, _, _ = finished
    command = CliRunner()
    listed = command.invoke(cli, ["--dir", str(directory), "ls", "--route", "tuned"])
    assert "1 plans" in listed.output
    assert "! tuned" in listed.output
    assert "1 good, 0 bad" in command.invoke(cli, ["--dir", str(directory), "verify"]).output
    bundle = str(tmp_path / "bundle")
    assert command.invoke(cli, ["--dir", str(directory), "export", bundle, "--route", "tuned"]).exit_code == 0
    done = command.invoke(cli, ["--dir", str(tmp_path / "other"), "import", bundle])
    assert "1 plans imported" in done.output
    with plancache.open(tmp_path / "other") as cache:
        (one,) = cache.rows()
        assert cache.tuning(one.row).complete


@pytest.mark.parametrize("arguments", [["tune"], ["verify", "--on-device"]])
def test_without_a_gpu_the_commands_say_so_in_one_line(run, warm, arguments):
    try:
        plancache.device(0)
    except plancache.PlanCacheError:
        pass
    else:
        pytest.skip("there is a GPU here")
    done = run("from plancache.cli import main; main()", "--dir", warm, *arguments, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("Error: plans are run on the GPU that they are for")
    assert len(done.stderr.splitlines()) == 1


def test_the_options_of_verify_that_need_the_device_are_refused_without_it(warm):
    for arguments in (["--keep"], ["--route", "native"], ["abc"], ["--on-device", "--repair"]):
        done = CliRunner().invoke(cli, ["--dir", str(warm), "verify", *arguments])
        assert done.exit_code == 2, done.output
