"""What the parent does with what its child says of plans on the device: remove exactly what is unfit, and report it.

The child is a stand-in, since there is no GPU; tests/gpu runs the real one.
"""

import json
import sys

import pytest
from click.testing import CliRunner

import plancache
from plancache import ondevice, tuning, worker
from plancache.cli import cli
from plancache.cli import ondevice as command
from plancache.errors import BuilderError, BusyError, RunError
from plancache.tuning import Limits, Tuning
from plancache.worker import Worker
from tests.test_tuning import Device, finished, names, offered, on, once  # noqa: F401

_BEGIN = "import json, sys, time; sys.stdin.readline()\ndef say(**event): print(json.dumps(event), flush=True)\n"
_BEGIN += "say(event='ready')\nfor line in sys.stdin:\n    job = json.loads(line)\n"


@pytest.fixture
def child(monkeypatch):
    """Let children run this source for each `job`."""

    def make(source):
        body = "".join(f"    {line}\n" for line in source.splitlines())
        monkeypatch.setattr(worker, "COMMAND", [sys.executable, "-c", _BEGIN + body])
        monkeypatch.setattr(ondevice, "here", lambda rows: sorted(rows, key=lambda one: one.row.engine))

    return make


_VERDICTS = """
verdict = {VERDICTS}[job["key"]]
say(event="stage", stage="native")
if verdict == "native hangs": time.sleep(60)
say(event="stage", stage="entry")
if verdict == "hangs": time.sleep(60)
if verdict == "dies": sys.exit(9)
if verdict == "fault": say(event="error", text="CUDA failed", fault=True)
else: say(event="done", verdict=verdict, detail="", exact=True, micros=2.0, native=1.0)
"""


def says(child, cache, *verdicts):
    """The child's answers, in the order of the rows' engines."""
    rows = sorted(cache.rows(), key=lambda one: one.row.engine)
    answers = {listed.row.key: verdict for listed, verdict in zip(rows, verdicts, strict=True)}
    child(_VERDICTS.replace("{VERDICTS}", repr(answers)))
    return [listed.row.key for listed in rows]


def test_wrong_and_hanging_plans_are_removed_and_others_stay(warm, child):
    with plancache.open(warm) as cache:
        first, second, third = says(child, cache, "wrong", "hangs", "right")
        found = cache.verify_on_device(timeout=2.0)
        assert [(one.verdict, one.removed) for one in found] == [("wrong", True), ("hung", True), ("right", False)]
        assert [one.row.key for one in cache.rows()] == [third]
        assert (found[2].micros, found[2].native) == (2.0, 1.0)
    assert len({first, second, third}) == 3


def test_a_plan_that_kills_its_process_or_the_device_is_removed_too(warm, child):
    with plancache.open(warm) as cache:
        says(child, cache, "dies", "fault", "right")
        found = cache.verify_on_device(timeout=10.0)
        assert [(one.verdict, one.removed) for one in found] == [("crashed", True), ("crashed", True), ("right", False)]
        assert "exit code 9" in found[0].detail


def test_what_happens_while_the_graph_is_built_natively_is_not_laid_to_the_stored_plan(warm, child):
    with plancache.open(warm) as cache:
        says(child, cache, "native hangs", "refused", "skipped")
        found = cache.verify_on_device(timeout=2.0)
        assert [one.verdict for one in found] == ["skipped", "refused", "skipped"]
        assert len(list(cache.rows())) == 3


def test_what_is_to_be_kept_is_kept(warm, child):
    with plancache.open(warm, mode="read-only") as cache:
        says(child, cache, "wrong", "wrong", "wrong")
        found = cache.verify_on_device(keep=True)
        assert [one.removed for one in found] == [False] * 3
        assert len(list(cache.rows())) == 3


def test_only_the_record_that_was_run_is_removed(warm, child, monkeypatch):
    with plancache.open(warm) as cache:
        rows = sorted(cache.rows(), key=lambda one: one.row.engine)
        says(child, cache, "wrong", "right", "right")
        row, record = rows[0].row, cache.store.get(rows[0].row.key, rows[0].row.route)

        def exchange(*_, **__):  # a job puts a good one there meanwhile
            cache.store.put(row, record + b"another", record)
            return asked(*_, **__)

        asked = ondevice._asked
        monkeypatch.setattr(ondevice, "_asked", exchange)
        found = cache.verify_on_device(rows[:1])
        assert [(one.verdict, one.removed) for one in found] == [("wrong", False)]
        assert cache.store.get(row.key, row.route) == record + b"another"


def test_the_report_is_a_table_of_eighty_columns_or_json_and_the_exit_code_says_whether_all_is_well(
    warm, child, capsys, monkeypatch
):
    monkeypatch.setattr(command, "here", lambda rows: list(rows))
    place, any_ = plancache.cli.place.Place(warm, None), plancache.cli.selection.Selection(*[None] * 9)
    with plancache.open(warm) as cache:
        says(child, cache, "wrong", "right", "right")
    with pytest.raises(SystemExit) as done:
        command.verify_on_device(place, any_, 10.0, True, None, False)
    assert done.value.code == 1
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "right, bit-equal" in "\n".join(lines)
    assert lines[-1].startswith("3 plans of this device and these libraries: ")
    with plancache.open(warm) as cache:
        says(child, cache, "right", "right", "refused")
    with pytest.raises(SystemExit) as done:
        command.verify_on_device(place, any_, 10.0, True, None, True)
    assert done.value.code == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert sorted(one["verdict"] for one in found) == ["refused", "right", "right"]
    assert all(one["route"] == "deviceless" for one in found)


def test_a_candidate_that_hangs_is_ended_noted_and_the_rest_goes_on(tmp_path, child, on, targeted, h200, names):  # noqa: F811
    with plancache.open(tmp_path / "cache") as cache:
        on(cache, Device(h200, {}), seconds=0)
        (listed,) = cache.rows()
        # The first time the second candidate hangs; the second time the child has nothing left to do.
        table = json.dumps(cache.tuning(listed.row).document())
        flag = tmp_path / "began"
        child(
            f"import pathlib\nflag = pathlib.Path({str(flag)!r})\n"
            f"if flag.exists(): say(event='done', table=json.loads({table!r})); continue\n"
            f"flag.touch()\nsay(event='candidate', place=1, of=3, name={names[1]!r})\ntime.sleep(60)"
        )
        said = []
        with Worker(cache, 1.0) as one:
            ondevice.tune_row(cache, one, listed.row, Limits(), said=lambda *what: said.append(what))
        assert said == [(1, 3, names[1])]
        assert cache.tuning(listed.row).candidates[1].status == tuning.HUNG


def test_a_graph_whose_first_choice_hangs_cannot_be_tuned_and_says_so(warm, child):
    with plancache.open(warm) as cache:
        child("say(event='candidate', place=0, of=3, name='eng4')\ntime.sleep(60)")
        listed = next(cache.rows())
        with Worker(cache, 1.0) as one, pytest.raises(RunError, match="eng4 did not come back"):
            ondevice.tune_row(cache, one, listed.row, Limits())


@pytest.mark.parametrize("end", ["say(event='error', text='misaligned', fault=True)", "sys.exit(9)"])
def test_a_first_choice_that_ends_its_process_is_told_to_the_next_child_which_tries_the_others(
    tmp_path,
    child,
    finished,  # noqa: F811
    end,
):
    with plancache.open(tmp_path / "cache") as cache:
        table = json.dumps(finished[1].document())
        with plancache.open(finished[0]) as other:
            listed = next(other.rows())
        child(
            f"table = {{**json.loads({table!r}), 'seconds': 9.0}}\n"
            "if 'eng_first' in job['lost']: say(event='done', table=table); continue\n"
            f"say(event='candidate', place=0, of=3, name='eng_first')\n{end}"
        )
        with Worker(cache, 10.0) as one:
            assert ondevice.tune_row(cache, one, listed.row, Limits()).seconds == 9.0
        with Worker(cache, 10.0) as one, pytest.raises(RunError, match="eng_first"):  # no time is left for others
            ondevice.tune_row(cache, one, listed.row, Limits(seconds=0))


def test_a_graph_that_has_nothing_to_tune_is_told_from_one_that_cannot_be(warm, child):
    with plancache.open(warm) as cache:
        listed = next(cache.rows())
        child("say(event='error', text='this graph has nothing to tune', fault=False, kind='BuilderError')")
        with Worker(cache, 10.0) as one, pytest.raises(BuilderError, match="nothing to tune"):
            ondevice.tune_row(cache, one, listed.row, Limits())
        child("say(event='error', text='no memory', fault=False, kind='RunError')")
        with Worker(cache, 10.0) as one, pytest.raises(RunError, match="no memory"):
            ondevice.tune_row(cache, one, listed.row, Limits())


def test_who_waits_for_another_process_does_not_hang_and_leaves_the_graph_to_it(warm, child):
    busy = "say(event='error', text='process 7 is tuning the same plan', fault=False, kind='BusyError')"
    child(f"for _ in range(8):\n    say(event='waiting')\n    time.sleep(0.5)\n{busy}")  # longer than the time limit
    with plancache.open(warm) as cache:
        listed = next(cache.rows())
        with Worker(cache, 2.0) as one, pytest.raises(BusyError, match="process 7"):
            ondevice.tune_row(cache, one, listed.row, Limits())
    child(busy)
    for arguments in ([], ["--json"]):
        done = CliRunner().invoke(cli, ["--dir", str(warm), "tune", *arguments])
        assert (done.exit_code, "process 7" in done.output) == (0, True)


def test_a_device_that_is_at_fault_twice_at_one_candidate_ends_the_tuning(warm, child):
    with plancache.open(warm) as cache:
        listed = next(cache.rows())
        child("say(event='candidate', place=0, of=1, name='eng4')\nsay(event='error', text='at fault', fault=True)")
        with Worker(cache, 10.0) as one, pytest.raises(RunError, match="at fault"):
            ondevice.tune_row(cache, one, listed.row, Limits())


def test_kernel_times_are_those_of_the_plans_that_run(warm, child):
    with plancache.open(warm) as cache:
        keys = says(child, cache, "right", "right", "right")
        with ondevice.Times(cache, 10.0) as times:
            assert times.of(keys[0]) == {"deviceless": 2.0}
            assert times.of("no such key") == {}


@pytest.mark.parametrize(
    ("right", "empty", "verdict"), [(True, False, "right"), (False, False, "wrong"), (True, True, "skipped")]
)
def test_what_a_wrong_plan_ran_on_does_not_judge_the_next_one(monkeypatch, right, empty, verdict):
    from types import SimpleNamespace as Some

    some = Some(chosen=Some(engine=1, knobs={}))
    monkeypatch.setattr(ondevice.plans, "load", lambda *_: None)
    monkeypatch.setattr(ondevice.plans, "plan_list", lambda _: some)
    monkeypatch.setattr(ondevice.frontend, "plan_list", lambda _: some)
    freed = []
    runner = Some(
        run=lambda *_: None,
        compare=lambda *_: Some(exact=right, right=right),
        time=lambda *_: ondevice.Timing(2.0, 2.0),
        release=freed.append,
        free=freed.append,
    )
    native = ondevice._Native("key", "graph", "operands", {1: 10}, {1: 20}, ondevice.Timing(1.0, 1.0), True, empty)
    checker = object.__new__(ondevice.Checker)
    checker._native = native
    fields = {"plan": None, "blob": b""}
    found = checker._compared(runner, native, Some(graph="graph"), ondevice.Route.REPLAY, fields)
    assert found["verdict"] == verdict  # two results of nothing but zeros prove nothing
    assert (checker._native, freed) == ((native, []) if right else (None, ["operands", 10, 20]))


@pytest.mark.parametrize("as_json", [False, True])
def test_what_was_found_before_an_interruption_is_reported(warm, child, capsys, monkeypatch, as_json):
    monkeypatch.setattr(command, "here", lambda rows: sorted(rows, key=lambda one: one.row.engine))
    place, any_ = plancache.cli.place.Place(warm, None), plancache.cli.selection.Selection(*[None] * 9)
    with plancache.open(warm) as cache:
        wrong, *_ = says(child, cache, "wrong", "right", "right")
    asked, count = ondevice._asked, []

    def interrupted(*arguments):
        count.append(1)
        if len(count) == 2:
            raise KeyboardInterrupt
        return asked(*arguments)

    monkeypatch.setattr(ondevice, "_asked", interrupted)
    with pytest.raises(KeyboardInterrupt):
        command.verify_on_device(place, any_, 10.0, False, None, as_json)
    out = capsys.readouterr().out
    assert wrong[:12] in out
    assert "removed" in out
    count.clear()
    tables = {"eng1": Tuning([])}
    monkeypatch.setattr(ondevice, "tune_row", lambda *_: tables.pop("eng1"))  # the second one raises a KeyError
    done = CliRunner().invoke(cli, ["--dir", str(warm), "tune", *(["--json"] if as_json else [])])
    assert isinstance(done.exception, KeyError)
    assert ('"candidates": []' if as_json else "1 of 1 graphs tuned") in done.output


@pytest.mark.parametrize("arguments", [["tune", "--timeout", "0"], ["tune", "--seconds", "-1"]])
def test_limits_that_make_every_plan_hang_are_wrong_usage(warm, arguments):
    assert CliRunner().invoke(cli, ["--dir", str(warm), *arguments]).exit_code == 2
    assert CliRunner().invoke(cli, ["--dir", str(warm), "verify", "--on-device", "--timeout", "0"]).exit_code == 2
