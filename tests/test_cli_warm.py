"""`plancache warm` and `rewarm` as commands: what they print, their exit codes, and being interrupted."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from click.testing import CliRunner

import plancache
from plancache.cli import cli
from tests import layers
from tests.conftest import ROOT

BUILDERS = str(ROOT / "tests" / "layers.py")


def invoke(*arguments, code=0):
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments])
    assert result.exit_code == code, (result.output, result.exception)
    return result


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A cache that the command filled from the builders in `tests.layers`, and what it printed."""
    directory = tmp_path_factory.mktemp("filled") / "cache"
    return directory, invoke("--dir", directory, "warm", BUILDERS, "--device", "h200", "--jobs", 2, code=1)


def test_it_prints_a_table_of_80_columns_and_each_failure_and_fails(filled):
    output = filled[1].stdout
    table, rest = output.split("\nall ", 1)
    assert max(map(len, table.splitlines())) <= 80
    assert "\x1b" not in output
    assert "9 plans built, 0 found, 3 failed" in rest
    assert "failed: tests.layers.broken('a'), NVIDIA H200, deviceless: no a here" in rest
    assert "failed: tests.layers.impossible, NVIDIA H200, deviceless: " in rest


def test_builders_without_cases_are_warned_of_and_no_bar_is_drawn_where_nobody_watches(filled):
    assert filled[1].stderr == "Warning: tests.layers.caseless has no cases, so nothing is built for it.\n"


def test_a_second_run_finds_everything_and_fails_only_for_what_still_fails(filled):
    result = invoke("--dir", filled[0], "warm", "tests.layers", "--device", "h200", "--json", code=1)
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert {line["outcome"] for line in lines} == {"found", "unsupported", "failed"}
    assert set(lines[0]) == {"builder", "args", "device", "route", "outcome", "seconds", "error", "key", "gain"}
    assert sum(line["outcome"] == "found" for line in lines) == 9


def test_a_run_in_which_nothing_fails_succeeds(filled, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("from tests.layers import attention, product\n")
    output = invoke("--dir", filled[0], "warm", file, "--device", "h200").stdout
    assert "0 plans built, 5 found, 0 failed" in output


def test_several_devices_are_filled_from_names_and_files(filled, tmp_path, h200):
    other = tmp_path / "other.json"
    other.write_text(json.dumps({**json.loads(h200.to_json()), "deviceName": "Other", "multiProcessorCount": 66}))
    file = tmp_path / "mine.py"
    file.write_text("from tests.layers import simple\n")
    both = ["--device", "h200", "--device", other]
    directory = tmp_path / "cache"
    output = invoke("--dir", directory, "warm", file, *both, "--routes", "deviceless", "--driver", "13.0", "-j", 1)
    assert "2 plans built" in output.stdout
    with plancache.open(directory) as cache:
        assert {one.row.driver for one in cache.rows()} == {13000}
        assert len({one.row.device for one in cache.rows()}) == 2


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("empty.py", "x = 1\n", "has no builders"),
        ("wrong.py", "raise KeyError('lost')\n", "cannot be imported: KeyError: 'lost'"),
        ("torn.py", "def f(:\n", "cannot be imported: SyntaxError"),
        ("script.py", "raise SystemExit(0)\n", "cannot be imported: SystemExit: 0"),
        (None, None, "there is no file"),
    ],
)
def test_a_file_that_is_of_no_use_is_an_error(tmp_path, name, text, said):
    file = tmp_path / (name or "none.py")
    if text is not None:
        file.write_text(text)
    assert said in invoke("--dir", tmp_path / "cache", "warm", file, "--device", "h200", code=1).stderr


def test_a_package_s_own_file_may_come_along_with_the_others(filled):
    files = [ROOT / "tests" / "__init__.py", BUILDERS]
    invoke("--dir", filled[0], "warm", *files, "--device", "h200", code=1)
    assert "No module named" in invoke("warm", "no.such", "--device", "h200", code=1).stderr


def test_a_file_whose_name_is_another_modules_is_taken_all_the_same(filled, tmp_path):
    file = tmp_path / "json.py"
    file.write_text("from tests.layers import attention\n")
    assert "1 found" in invoke("--dir", filled[0], "warm", file, "--device", "h200").stdout


def test_a_file_beside_the_builders_that_is_named_as_pythons_own_modules_breaks_no_worker(tmp_path):
    (tmp_path / "mine.py").write_text("from sibling import simple\n")
    (tmp_path / "sibling.py").write_text("from tests.layers import simple\n")
    for name in ("queue", "random", "signal"):
        (tmp_path / f"{name}.py").write_text("raise SystemError('this is no module of Python')\n")
    # As the console script is started, which leaves the working directory out of where modules are looked for.
    begin = f"import sys; sys.path[0] = {str(ROOT)!r}; from plancache.cli import main; main()"
    command = [sys.executable, "-c", begin]
    done = subprocess.run(
        [*command, "--dir", "cache", "warm", "mine.py", "--device", "h200", "--routes", "deviceless", "-j", "1"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "1 plans built, 0 found, 0 failed" in done.stdout, done.stderr
    assert done.returncode == 0


def test_an_output_that_takes_only_ascii_costs_a_few_characters_and_not_the_exit_code(filled, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("from tests.layers import attention\n")
    done = subprocess.run(
        [sys.executable, "-m", "plancache", "--dir", filled[0], "warm", file, "--device", "h200"],
        cwd=ROOT,
        env={**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "30"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "0 plans built, 1 found, 0 failed" in done.stdout


def test_rewarming_a_bundle_into_another_cache_finds_what_was_imported(filled, tmp_path):
    bundle = tmp_path / "plans.bundle"
    invoke("--dir", filled[0], "export", bundle)
    invoke("--dir", tmp_path / "cache", "import", bundle)
    result = invoke("--dir", tmp_path / "cache", "rewarm", bundle)
    assert "0 plans built, 9 found, 0 failed" in result.stdout
    rows = [
        json.loads(line) for line in invoke("--dir", tmp_path / "cache", "rewarm", bundle, "--json").stdout.splitlines()
    ]
    assert {row["builder"] for row in rows} == {
        "tests.layers.product",
        "tests.layers.attention",
        "tests.layers.lengths",
        "tests.layers.simple",
    }


MANY = """
import plancache
from tests import graphs

@plancache.cached(cases=[(m,) for m in range(8, 8008, 8)])
def product(handle, m):
    return graphs.matmul(handle, m=m)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_or_killed_it_has_stored_what_was_built_and_goes_on_there(tmp_path, number):
    file, directory = tmp_path / "many.py", tmp_path / "cache"
    file.write_text(MANY)
    command = [sys.executable, "-m", "plancache", "--dir", directory, "warm", file, "--device", "h200", "-j", "1"]
    process = subprocess.Popen(
        [*command, "--routes", "deviceless"],
        cwd=ROOT,
        env=dict(os.environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with plancache.open(directory, mode="read-only") as cache:
        stored = _wait_for(cache, 2, process)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=120)
        if number == signal.SIGINT:
            assert process.returncode == 130
            assert stderr == "Interrupted. What was built is stored; the same command goes on from there.\n"
        else:
            assert process.returncode == -signal.SIGKILL
        rows = [one.row for one in cache.rows()]
        assert len(rows) >= stored
        assert cache.verify().clean
    # What goes on is what lacks: the next run begins with what is stored, in the order of the cases.
    told = []

    def stop(_done, _total, line):
        told.append(line.outcome)
        if line.outcome == "built":
            raise KeyboardInterrupt

    from concurrent.futures import ThreadPoolExecutor

    builder = plancache.cached(cases=[(m,) for m in range(8, 8008, 8)])(layers.product.function)
    with ThreadPoolExecutor(1) as here, plancache.open(directory) as cache, pytest.raises(KeyboardInterrupt):
        plancache.warm([builder], ["h200"], here, cache=cache, routes=["deviceless"], progress=stop)
    assert told[: len(rows)] == ["found"] * len(rows)


def _wait_for(cache, count, process):
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None, process.stderr.read()
        try:
            rows = sum(1 for _ in cache.rows())
        except plancache.PlanCacheError:
            rows = 0
        if rows >= count:
            return rows
        time.sleep(0.05)
    raise AssertionError("nothing was built")
