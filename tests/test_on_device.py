"""What the parent does with what its child says of plans on the device: remove exactly what is unfit, and report it.

The child is a stand-in, since there is no GPU; tests/gpu runs the real one.
"""

import json
import signal
import sys
from dataclasses import replace
from types import SimpleNamespace as Some

import pytest
from click.testing import CliRunner

import plancache
from plancache import ondevice, tuning, worker
from plancache.cli import cli
from plancache.cli import ondevice as command
from plancache.errors import BuilderError, RunError
from plancache.filler import Line, Report
from plancache.tuning_table import Limits, Tuning
from plancache.worker import Worker
from tests.test_tuning import Device, finished, names, offered, on, once  # noqa: F401

_BEGIN = "import json, os, sys, time; sys.stdin.readline()\ndef say(**event): print(json.dumps(event), flush=True)\n"
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
if isinstance(verdict, int): os.kill(os.getpid(), verdict)
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


def test_a_process_that_the_system_or_a_person_ended_says_nothing_about_its_plan(warm, child):
    with plancache.open(warm) as cache:
        says(child, cache, int(signal.SIGKILL), int(signal.SIGTERM), int(signal.SIGSEGV))
        found = cache.verify_on_device(timeout=10.0)
        verdicts = [(one.verdict, one.removed) for one in found]
        assert verdicts == [("skipped", False), ("skipped", False), ("crashed", True)]
        assert [one.detail.split()[-1] for one in found] == ["SIGKILL", "SIGTERM", "SIGSEGV"]
        assert len(list(cache.rows())) == 2


def test_a_plan_of_which_nothing_was_proven_stays_is_counted_and_is_no_failure(warm, child, capsys, monkeypatch):
    monkeypatch.setattr(command, "here", lambda rows: list(rows))
    place, any_ = plancache.cli.place.Place(warm, None), plancache.cli.selection.Selection(*[None] * 9)
    with plancache.open(warm) as cache:
        says(child, cache, "unproven", "right", "unproven")
    for as_json in (False, True):
        with pytest.raises(SystemExit) as done:
            command.verify_on_device(place, any_, 10.0, False, None, as_json)
        assert done.value.code == 0
    out = capsys.readouterr().out
    summary = next(line for line in out.splitlines() if line.startswith("3 plans"))
    assert sorted(summary.split(": ")[1].split(", ")) == ["1 right", "2 unproven"]
    assert out.count('"verdict": "unproven"') == 2
    assert "unproven, bit-equal" not in out
    with plancache.open(warm) as cache:
        assert len(list(cache.rows())) == 3


def test_what_happens_while_the_graph_is_built_natively_is_not_laid_to_the_stored_plan(warm, child):
    with plancache.open(warm) as cache:
        says(child, cache, "native hangs", "refused", "skipped")
        found = cache.verify_on_device(timeout=2.0)
        assert [one.verdict for one in found] == ["skipped", "refused", "skipped"]
        assert len(list(cache.rows())) == 3


@pytest.mark.parametrize(("second", "removed"), [("right", False), ("wrong", True), ("hangs", True)])
def test_what_is_wrong_goes_only_if_a_fresh_process_says_so_too(warm, child, tmp_path, second, removed):
    with plancache.open(warm) as cache:
        listed = min(cache.rows(), key=lambda one: one.row.engine)
        first = tmp_path / "first"
        child(
            f"import pathlib\nfirst = pathlib.Path({str(first)!r})\n"
            f"verdict = {second!r} if first.exists() else 'wrong'\n"
            "say(event='stage', stage='native')\nsay(event='stage', stage='entry')\n"
            "first.write_text(first.read_text() + f'{os.getpid()} ' if first.exists() else f'{os.getpid()} ')\n"
            "if verdict == 'hangs': time.sleep(60)\n"
            "say(event='done', verdict=verdict, detail=f'{verdict} it is', exact=False, micros=None, native=1.0)"
        )
        (found,) = cache.verify_on_device([listed], timeout=2.0)
        assert found.verdict == ("hung" if second == "hangs" else second)
        assert found.removed is removed
        assert (listed.row.key in {one.row.key for one in cache.rows()}) is not removed
        assert second == "wrong" or "another process said: wrong it is" in found.detail
        one, two = first.read_text().split()
        assert one != two


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


def test_the_time_that_a_candidate_hangs_is_not_taken_from_the_others(tmp_path, child, finished):  # noqa: F811
    with plancache.open(tmp_path / "cache") as cache:
        table = json.dumps(finished[1].document())
        with plancache.open(finished[0]) as other:
            listed = next(other.rows())
        child(
            f"table = {{**json.loads({table!r}), 'seconds': job['seconds']}}\n"
            "if len(job['lost']) == 3: say(event='done', table=table)\n"
            "else: say(event='candidate', place=0, of=3, name=f\"eng{len(job['lost'])}\"); time.sleep(60)"
        )
        with Worker(cache, 0.5) as one:
            assert ondevice.tune_row(cache, one, listed.row, Limits(seconds=0.6)).seconds > 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_child_that_somebody_else_ends_is_noted_at_no_candidate(tmp_path, child, on, targeted, h200, names, number):  # noqa: F811
    with plancache.open(tmp_path / "cache") as cache:
        table = on(cache, Device(h200, {names[1]: 5.0}))
        (listed,) = cache.rows()
        child(f"say(event='candidate', place=1, of=3, name={names[1]!r})\nos.kill(os.getpid(), {int(number)})")
        with Worker(cache, 10.0) as one, pytest.raises(RunError, match=number.name):
            ondevice.tune_row(cache, one, listed.row, Limits(), again=True)
        assert cache.tuning(listed.row) == table  # and the tuned plan is there


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
    table = Tuning([]).document()
    busy = f"say(event='done', table={table}, outcome='busy', detail='another process: process 7')"
    child(f"for _ in range(8):\n    say(event='waiting')\n    time.sleep(0.5)\n{busy}")  # longer than the time limit
    with plancache.open(warm) as cache:
        listed = next(cache.rows())
        with Worker(cache, 2.0) as one:
            assert ondevice.tune_row(cache, one, listed.row, Limits()).outcome == "busy"
    child(busy)
    done = CliRunner().invoke(cli, ["--dir", str(warm), "tune"])
    assert done.exit_code == 0
    assert done.output.count("busy: another process: process 7") == 3
    assert "0 of 3 graphs tuned, 3 busy" in done.output
    done = CliRunner().invoke(cli, ["--dir", str(warm), "tune", "--json"])
    assert done.exit_code == 0
    told = [json.loads(line) for line in done.output.splitlines()]
    assert {(one["outcome"], one["detail"]) for one in told} == {("busy", "another process: process 7")}


def test_each_graph_is_counted_as_what_came_of_it_and_only_a_failure_is_an_exit_code(
    warm,
    child,
    finished,  # noqa: F811
):
    with plancache.open(warm) as cache:
        keys = [listed.row.key for listed in sorted(cache.rows(), key=lambda one: one.row.engine)]
    kept = finished[1].document()
    none = {**kept, "first": None, "chosen": None}
    nothing = {"event": "error", "text": "no heuristics", "fault": False, "kind": "BuilderError"}

    def answers(*events):
        child(f"say(**{dict(zip(keys, events, strict=True))!r}[job['key']])")

    answers({"event": "done", "table": kept}, nothing, {"event": "done", "table": none})
    done = CliRunner().invoke(cli, ["--dir", str(warm), "tune"])
    assert done.exit_code == 1  # of the last one nothing could be kept
    assert "1 of 3 graphs tuned, 1 nothing to tune, 1 failed" in done.output
    assert f"{keys[2][:12]} failed: no candidate can be kept: " in done.output
    answers({"event": "done", "table": kept}, nothing, nothing)
    done = CliRunner().invoke(cli, ["--dir", str(warm), "tune", "--json"])
    assert done.exit_code == 0
    outcomes = [json.loads(line)["outcome"] for line in done.output.splitlines()]
    assert outcomes == ["tuned", "nothing to tune", "nothing to tune"]


@pytest.mark.parametrize("stored_anew", [False, True])
def test_measuring_anew_goes_on_anew_where_a_candidate_was_lost_before_anything_was_stored(
    tmp_path,
    child,
    finished,  # noqa: F811
    stored_anew,
):
    with plancache.open(tmp_path / "cache") as cache, plancache.open(finished[0]) as other:
        (listed,) = other.rows()
        cache.store.put(listed.row, other.store.get(listed.row.key, "tuned"))
        # A candidate that is not the stored one: a lost one of those takes its record with it.
        name = finished[1].candidates[finished[1].first].name
        began, saw = tmp_path / "began", tmp_path / "saw"
        put = "store.put(row, records.encode(row, {**fields, 'plan': {**fields['plan'], 'seconds': 9.0}}), old)\n"
        child(
            "import pathlib, plancache\nfrom plancache.store import records\n"
            f"began, saw = pathlib.Path({str(began)!r}), pathlib.Path({str(saw)!r})\n"
            f"if began.exists(): saw.write_text(str(job['again'])); say(event='done', "
            f"table={finished[1].document()!r}); continue\n"
            "began.touch()\n"
            f"store = plancache.open({str(tmp_path / 'cache')!r}).store\n"
            "old = store.get(job['key'], 'tuned')\nrow, fields = records.decode(old)\n"
            + (put if stored_anew else "")
            + f"say(event='candidate', place=0, of=3, name={name!r})\nos._exit(9)"
        )
        with Worker(cache, 20.0) as one:
            ondevice.tune_row(cache, one, listed.row, Limits(), again=True)
    assert saw.read_text() == str(not stored_anew)


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


def test_kernel_times_of_what_lies_under_the_cache_are_told_too(warm, tmp_path, child):
    with plancache.open(warm) as cache:
        keys = says(child, cache, "right", "right", "right")
    child("say(event='done', verdict='right', detail='', exact=True, micros=1.0 + job['layer'], native=1.0)")
    layers = [tmp_path / "none", warm]  # one that is not there is passed over
    with plancache.open(tmp_path / "top", layers=layers) as cache, ondevice.Times(cache, 10.0) as times:
        assert times._worker._setup["layers"] == [str(path) for path in layers]
        assert times.of(keys[0]) == {"deviceless": 3.0}


def test_upgrade_prints_what_each_plan_has_gained(monkeypatch, tmp_path):
    lines = [
        Line("layers.mlp", (), "NVIDIA H200", "native", "built", key="a" * 64, gain={"native": 2.0, "replay": 5.0}),
        Line("layers.mlp", (), "NVIDIA H200", "native", "built", key="b" * 64),
    ]
    asked = []
    monkeypatch.setattr(plancache.PlanCache, "upgrade", lambda *_, **given: asked.append(given) or Report(lines, 1.0))
    done = CliRunner().invoke(cli, ["--dir", str(tmp_path), "upgrade", "-j", "1"])
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[1].split() == ["a" * 12, "mlp", "replay", "5.0", "2.0", "2.50"]
    assert "2 plans built" in done.stdout
    done = CliRunner().invoke(cli, ["--dir", str(tmp_path), "upgrade", "--no-measure", "--json"])
    assert [json.loads(line)["gain"] for line in done.stdout.splitlines()] == [{"native": 2.0, "replay": 5.0}, None]
    assert (asked[0]["measure"], asked[1]["measure"](lines[0])) == (None, None)


@pytest.mark.parametrize(
    ("right", "native_empty", "empty", "verdict"),
    [
        (True, False, False, "right"),
        (False, False, True, "wrong"),
        (False, True, False, "wrong"),
        (True, True, True, "unproven"),
        (False, True, True, "unproven"),  # zeros here and NaN there
    ],
)
def test_what_a_wrong_plan_ran_on_does_not_judge_the_next_one(monkeypatch, right, native_empty, empty, verdict):
    some = Some(chosen=Some(engine=1, knobs={}))
    monkeypatch.setattr(ondevice.plans, "load", lambda *_: None)
    monkeypatch.setattr(ondevice.plans, "plan_list", lambda _: some)
    monkeypatch.setattr(ondevice.frontend, "plan_list", lambda _: some)
    freed = []
    runner = Some(
        run=lambda *_: None,
        compare=lambda *_: Some(exact=right, right=right, largest=0.0),
        time=lambda *_: ondevice.Timing(2.0, 2.0),
        empty=lambda *_: empty and not freed,
        release=freed.append,
        free=freed.append,
    )
    native = ondevice._Native(
        "key", "graph", "operands", {1: 10}, {1: 20}, ondevice.Timing(1.0, 1.0), True, native_empty
    )
    checker = object.__new__(ondevice.Checker)
    checker._native = native
    fields = {"plan": None, "blob": b""}
    found = checker._compared(runner, native, Some(graph="graph"), ondevice.Route.REPLAY, fields)
    assert found["verdict"] == verdict  # two results of nothing but zeros prove nothing
    assert (checker._native, freed) == ((native, []) if right else (None, ["operands", 10, 20]))


@pytest.mark.parametrize("verdict", ["wrong", "right"])
def test_bits_that_differ_are_wrong_only_where_the_natively_built_plan_repeats_its_own(monkeypatch, verdict):
    some = Some(chosen=Some(engine=1, knobs={}))
    monkeypatch.setattr(ondevice.plans, "load", lambda *_: None)
    monkeypatch.setattr(ondevice.plans, "plan_list", lambda _: some)
    monkeypatch.setattr(ondevice.frontend, "plan_list", lambda _: some)
    graph, ran = "native", []

    def compare(*_):
        if ran[-1] == graph:  # the natively built plan against itself: equal, but for once in a while
            exact = not (len(ran) == 4 and verdict == "right")
        else:
            exact = False
        return Some(exact=exact, right=True, largest=0.0)

    runner = Some(
        run=lambda graph, *_: ran.append(graph),
        compare=compare,
        time=lambda *_: ondevice.Timing(2.0, 2.0),
        empty=lambda *_: False,
        release=lambda _: None,
        free=lambda _: None,
    )
    native = ondevice._Native("key", graph, "operands", {1: 10}, {1: 20}, ondevice.Timing(1.0, 1.0), True, False)
    checker = object.__new__(ondevice.Checker)
    checker._native = native
    found = checker._compared(runner, native, Some(graph="stored"), ondevice.Route.NATIVE, {"plan": None, "blob": b""})
    assert found["verdict"] == verdict
    assert len(ran) == (4 if verdict == "right" else 1 + ondevice._REPEATS)


@pytest.mark.parametrize("at", ["outputs", "run", "compare", "time"])
def test_a_graph_that_cannot_be_run_natively_leaves_no_memory_behind(monkeypatch, at):
    taken, calls = set(), []

    def outputs(made):
        calls.append("outputs")
        if at == "outputs" and calls.count("outputs") == 2:
            raise RunError("more memory than may be used")
        taken.add(len(calls))
        return {1: len(calls)}

    def step(name):
        def call(*_):
            if name == at:
                raise RunError("more memory than may be used")
            return Some(exact=True)

        return call

    runner = Some(
        handle=None,
        operands=lambda graph: taken.add("inputs") or "inputs",
        outputs=outputs,
        release=taken.remove,
        free=taken.remove,
        run=step("run"),
        compare=step("compare"),
        time=step("time"),
    )
    monkeypatch.setattr(ondevice.requests, "twin", lambda *_, **__: "graph")
    monkeypatch.setattr(ondevice.plans, "run_build", lambda *_: None)
    checker = object.__new__(ondevice.Checker)
    checker._native = None
    with pytest.raises(RunError, match="more memory"):
        checker._built(runner, Some(key=Some(hash="key"), choice=None))
    assert (taken, checker._native) == (set(), None)


@pytest.mark.parametrize("as_json", [False, True])
def test_what_was_found_before_an_interruption_is_reported(warm, child, capsys, monkeypatch, as_json):
    monkeypatch.setattr(command, "here", lambda rows: sorted(rows, key=lambda one: one.row.engine))
    place, any_ = plancache.cli.place.Place(warm, None), plancache.cli.selection.Selection(*[None] * 9)
    with plancache.open(warm) as cache:
        wrong, *_ = says(child, cache, "wrong", "right", "right")
    asked, count = ondevice._asked, []

    def interrupted(*arguments):
        count.append(1)
        if len(count) == 3:  # what is wrong is asked twice
            raise KeyboardInterrupt
        return asked(*arguments)

    monkeypatch.setattr(ondevice, "_asked", interrupted)
    with pytest.raises(KeyboardInterrupt):
        command.verify_on_device(place, any_, 10.0, False, None, as_json)
    out = capsys.readouterr().out
    assert wrong[:12] in out
    assert "removed" in out
    count.clear()
    tables = {"eng1": replace(Tuning([tuning.Candidate(1, [], "eng1", "ok")]), first=0, chosen=0)}
    monkeypatch.setattr(ondevice, "tune_row", lambda *_: tables.pop("eng1"))  # the second one raises a KeyError
    done = CliRunner().invoke(cli, ["--dir", str(warm), "tune", *(["--json"] if as_json else [])])
    assert isinstance(done.exception, KeyError)
    assert ('"outcome": "tuned"' if as_json else "1 of 1 graphs tuned") in done.output


@pytest.mark.parametrize("arguments", [["tune", "--timeout", "0"], ["tune", "--seconds", "-1"]])
def test_limits_that_make_every_plan_hang_are_wrong_usage(warm, arguments):
    assert CliRunner().invoke(cli, ["--dir", str(warm), *arguments]).exit_code == 2
    assert CliRunner().invoke(cli, ["--dir", str(warm), "verify", "--on-device", "--timeout", "0"]).exit_code == 2
