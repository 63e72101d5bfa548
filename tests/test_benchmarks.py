"""The benchmarks' page says what the results say, and a ratio that is worse than its bound fails the gate."""

import importlib
import json
import re
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import plancache
from benchmarks import harness, page, peers, ready
from benchmarks.harness import Check, Rank, Result, Timing
from plancache.store.directory import filesystem
from tests.conftest import ROOT


def test_the_tables_of_the_page_are_those_of_the_results():
    text = page.PAGE.read_text()
    assert page.rendered(text, page.results()) == text, "run: python -m benchmarks.page"


def test_every_benchmark_has_its_place_on_the_page():
    blocks = re.findall(r"^<!-- (\w+) -->$", page.PAGE.read_text(), re.MULTILINE)
    assert sorted(blocks) == sorted(["summary", *page.NAMES])
    assert {file.stem for file in harness.RESULTS.glob("*.json")} == set(page.NAMES)


@pytest.mark.parametrize("name", page.NAMES)
def test_every_benchmark_has_bounds_that_its_kept_ratios_are_compared_with(name):
    assert callable(importlib.import_module(f"benchmarks.{name}").run)
    kept = page.results()[name]
    assert kept["command"] == f"python -m benchmarks.{name}"
    assert kept["checks"]
    assert all(Check(**check).bound > 0 for check in kept["checks"])


def test_a_changed_number_changes_the_page():
    kept = page.results()
    kept["memory"]["tables"][0]["rows"][0][1][0] += 1
    assert page.rendered(page.PAGE.read_text(), kept) != page.PAGE.read_text()


def test_ratios_are_made_pair_by_pair():
    # Both sides are slower in the second round by what else the machine did: that is no part of the ratio.
    ours, theirs = Timing.of([[2.0], [20.0], [2.0]]), Timing.of([[1.0], [10.0], [1.0]])
    assert ours.against(theirs) == 2.0


def test_each_is_first_in_its_turn():
    called = []
    calls = {name: lambda name=name: called.append(name) for name in "abc"}
    harness.measure_in_turns(calls, rounds=4, times=1, warm_up=0)
    assert "".join(called) == "abcbcacababc"


def test_what_a_call_gives_is_freed_when_its_clock_has_stopped(monkeypatch):
    events = []

    class Given:
        def __del__(self):
            events.append("freed")

    monkeypatch.setattr(harness.time, "perf_counter", lambda: events.append("clock") or 0.0)
    harness.measure_in_turns({"given": Given}, rounds=1, times=2, warm_up=0)
    assert events == ["clock", "clock", "freed"] * 2


def test_a_hundredth_of_the_calls_is_above_p99():
    assert Timing.of([[float(number) for number in range(1, 201)]]).p99 == 198.0


def test_a_bound_is_at_most_or_at_least():
    assert Check("", 2.0, 2.0).kept
    assert not Check("", 2.1, 2.0).kept
    assert Check("", 2.1, 2.0, least=True).kept
    assert not Check("", 1.9, 2.0, least=True).kept


def test_the_first_of_all_is_told_and_how_many_times_we_take():
    assert Rank.of("", {"plancache": [3.0, 30.0], "other": [2.0, 20.0]}) == Rank("", "other", 1.5)
    assert Rank.of("", {"plancache": [1.0, 9.0], "once": [6.0]}) == Rank("", "plancache", 1.0)
    assert Rank.of("", {"plancache": [6.0, 9.0], "once": [3.0]}) == Rank("", "once", 2.5)
    # Who is first is told by pairs too: the other's median is smaller, and it is slower in two rounds of three.
    assert Rank.of("", {"plancache": [1.0, 5.0, 5.0], "other": [2.0, 2.0, 6.0]}) == Rank("", "plancache", 1.0)


@pytest.mark.parametrize(("ratio", "code"), [(1.0, 0), (3.0, 1)])
def test_the_gate_fails_where_a_ratio_is_worse_than_its_bound(ratio, code, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmark", "--quick"])
    monkeypatch.setattr(harness, "machine", lambda: "")
    found = 0
    try:
        harness.main("memory", lambda quick: Result(checks=[Check("something", ratio, 2.0)]))
    except SystemExit as left:
        found = left.code
    assert found == code
    assert "something" in capsys.readouterr().out


def test_a_benchmark_that_runs_prints_its_table_and_its_ratios():
    command = [sys.executable, "-m", "benchmarks.memory", "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "| `cudnn.graph_cache`" in done.stdout, done.stderr
    assert "against `cudnn.graph_cache`" in done.stdout


def test_a_peer_that_lacks_ends_a_full_run_and_not_the_gate(monkeypatch):
    monkeypatch.setitem(peers._NEEDS, "diskcache", "no_such_package.of_anyone")
    with pytest.raises(SystemExit, match=r"not installed: .*diskcache.*pip install --group bench"):
        peers.installed(quick=False)
    assert set(peers.installed(quick=True)) >= {"plancache", peers.RAW, peers.FILES}
    assert "diskcache" not in peers.installed(quick=True)


@pytest.mark.parametrize("name", ["plancache", peers.RAW, peers.FILES])
def test_a_peer_that_is_opened_again_has_what_was_put(name, tmp_path):
    put, _ = peers.PEERS[name](tmp_path, 100)
    put(7)
    assert peers.REOPENED.keys() == peers.PEERS.keys()
    peers.REOPENED[name](tmp_path)  # raises where it is not there


def test_blobs_are_loaded_without_plancaches_cache():
    # A user of blobs would import none of it: the other ways' imports are no part of his time.
    source = ready._JOB.partition('if how in ("directory of blobs"')[0]
    source += "\nprint(json.dumps(sorted(sys.modules)))"
    imported = harness.child(source, "directory of blobs", "vit", "/nowhere", cwd=ROOT)
    assert "cudnn" in imported
    assert "plancache.cudnn.target" in imported
    assert not {"plancache.cache", "plancache.builders", "sqlite3"} & set(imported)


def test_a_result_says_which_versions_and_which_file_system():
    told = harness.machine()
    assert f"plancache {plancache.__version__}" in told
    assert f"SQLite {sqlite3.sqlite_version}" in told
    assert f"files on {filesystem(Path(tempfile.gettempdir()))}" in told


def test_kept_results_are_plain_and_whole():
    for name in page.NAMES:
        kept = json.loads((harness.RESULTS / f"{name}.json").read_text())
        assert set(kept) == {*("command", "machine", "date", "seconds"), *("tables", "checks", "ranks", "notes")}
