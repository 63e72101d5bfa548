"""On a GPU: the fastest plan is found, kept with its table, and served before any other; nothing wrong is kept."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.conftest import ROOT

NAMES = ("matmul", "linear", "conv", "sdpa")


def command(directory, *arguments):
    done = subprocess.run(
        [sys.executable, "-m", "plancache", "--dir", str(directory), *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=400,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_the_fastest_plan_is_kept_and_served_and_is_right(on_gpu, tmp_path, name):
    counts, found, served, took = on_gpu(f"tuned({name!r}, {str(tmp_path)!r})")
    print("tuned", name, counts, found, served, took, sep=" | ")
    assert counts.startswith("complete")
    assert "wrong" not in counts
    assert served.startswith("disk tuned")
    # In another process too; and it can ask not to.
    assert on_gpu(f"run({name!r}, {str(tmp_path)!r})")[0].split()[:4] == served.split()[:4]
    assert on_gpu(f"run({name!r}, {str(tmp_path)!r})", PLANCACHE_TUNED="0")[0].startswith("built native")


def test_a_tuning_that_had_no_time_goes_on_where_it_was(on_gpu, tmp_path):
    counts, *_ = on_gpu(f"tuned('conv', {str(tmp_path)!r}, seconds=0)")
    assert counts.startswith("partial")
    assert "('ok', 1)" in counts
    counts, *_ = on_gpu(f"tuned('conv', {str(tmp_path)!r})")
    assert counts.startswith("complete")


def test_of_two_commands_at_once_one_tunes_each_graph_and_the_other_takes_its_table(on_gpu, tmp_path):
    on_gpu(f"fill(('matmul', 'sdpa'), {str(tmp_path)!r})")
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda _: command(tmp_path, "tune", "--json"), range(2)))
    assert [code for code, _, _ in answers] == [0, 0], answers
    one, two = ({told["key"]: told for told in map(json.loads, out.splitlines())} for _, out, _ in answers)
    assert {told["outcome"] for told in (*one.values(), *two.values())} == {"tuned"}
    assert len(one) == 2
    for key, told in one.items():
        assert told["complete"]
        assert (told["candidates"], told["chosen"]) == (two[key]["candidates"], two[key]["chosen"])


def test_the_command_tunes_stored_graphs_in_a_child_and_shows_the_table(on_gpu, tmp_path):
    on_gpu(f"fill(('matmul', 'sdpa'), {str(tmp_path)!r})")
    code, out, err = command(tmp_path, "tune", "--json")
    assert code == 0, err + out
    results = [json.loads(line) for line in out.splitlines()]
    assert [one["complete"] for one in results] == [True, True]
    for one in results:
        _, shown, _ = command(tmp_path, "show", one["key"])
        assert "first choice" in shown
    print(shown)
    assert on_gpu(f"run('matmul', {str(tmp_path)!r})")[0].startswith("disk tuned")
    print(command(tmp_path, "tune")[1])
