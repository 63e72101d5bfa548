"""The benchmarks' page says what the results say, and a ratio that is worse than its bound fails the gate."""

import importlib
import json
import re
import subprocess
import sys

import pytest

from benchmarks import harness, page
from benchmarks.harness import Check, Rank, Result, Timing
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


def test_kept_results_are_plain_and_whole():
    for name in page.NAMES:
        kept = json.loads((harness.RESULTS / f"{name}.json").read_text())
        assert set(kept) == {*("command", "machine", "date", "seconds"), *("tables", "checks", "ranks", "notes")}
