"""A cache that cannot be written or read while it is filled: filling stops, says so, and builds nothing in vain."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from click.testing import CliRunner

import plancache
from plancache.cli import cli
from plancache.errors import StoreError
from plancache.faults import READING, STORING, Faults
from plancache.store.database import FILE
from tests import layers
from tests.conftest import ROOT
from tests.test_warm import Idle, Padding

SIZES = range(16, 16 * 11, 16)


@pytest.fixture
def many():
    return plancache.cached(cases=[(m,) for m in SIZES])(layers.product.function)


@pytest.fixture(params=["sqlite", "files"])
def kind(request):
    return request.param


def test_on_a_disk_that_fills_up_it_stops_and_goes_on_there_when_there_is_room(kind, mounted, tmp_path, many):
    disk = mounted("-t", "tmpfs", "-o", "size=6m,mode=0700", "plancache-test", tmp_path / "disk")
    with plancache.open(disk / "cache", store=kind) as cache, Padding(1_200_000) as executor:
        report = plancache.warm([many], ["h200"], executor, cache=cache, routes=["deviceless"])
        counts = report.counts
        assert not report
        assert counts["failed"] == 3  # in a row
        assert 1 <= counts["built"] == len(list(cache.rows())) < 7
        assert counts["not tried"] == len(SIZES) - counts["built"] - 3
        assert sorted(line.args for line in report.lines) == [(m,) for m in SIZES]
        assert f"{counts['not tried']} plans were not tried" in report.stopped
        room = int(report.stopped.partition("Free about ")[2].split()[0])
        assert 1.2 * (counts["not tried"] + 3) <= room <= 40
    subprocess.run(["mount", "-o", f"remount,size={room + 6}m", disk], check=True)
    with plancache.open(disk / "cache", store=kind) as cache, Padding(1_200_000) as executor:
        report = plancache.warm([many], ["h200"], executor, cache=cache, routes=["deviceless"])
        assert report
        assert report.counts == {"found": counts["built"], "built": len(SIZES) - counts["built"]}
        assert cache.verify().clean


def test_the_command_says_why_it_stopped_and_fails(kind, mounted, tmp_path):
    disk = mounted("-t", "tmpfs", "-o", "size=40k,mode=0700", "plancache-test", tmp_path / "disk")
    (tmp_path / "mine.py").write_text(
        f"import plancache\nfrom tests import layers\n"
        f"many = plancache.cached(cases=[(m,) for m in {list(SIZES)}])(layers.product.function)\n"
    )
    arguments = ["--dir", disk / "cache", "--store", kind, "warm", tmp_path / "mine.py", "--device", "h200"]
    result = CliRunner().invoke(cli, [*map(str, arguments), "--routes", "deviceless", "-j", "1"])
    assert result.exit_code == 1
    table, _, rest = result.stdout.partition("\nall ")
    assert max(map(len, table.splitlines())) <= 80
    assert "not tried" in table
    assert " not tried in " in rest
    (said,) = result.stderr.splitlines()
    assert said.startswith("Stopped: 3 times in a row a plan could not be ")
    assert "Free about " in said


def test_what_cannot_be_read_is_said_and_not_built_again(tmp_path):
    with plancache.open(tmp_path / "cache", store="files") as cache:
        with ThreadPoolExecutor(1) as here:
            report = plancache.warm([layers.product], ["h200"], here, cache=cache, routes=["deviceless"])
        lost = report.lines[0]
        (record,) = (tmp_path / "cache" / "records").glob(f"*/{lost.key}.deviceless")
        record.unlink()
        record.mkdir()
        report = plancache.warm([layers.product], ["h200"], Idle(), cache=cache, routes=["deviceless"])
        assert [(line.args, line.outcome) for line in report.lines] == [((32,), "failed"), ((64,), "found")]
        assert "could not be read" in report.failures[0].error
        assert not report.stopped


def test_a_database_that_cannot_be_read_is_left_as_it_is_and_ends_it(tmp_path, warm, many):
    damaged = bytes(5_000)
    (warm / FILE).write_bytes(damaged)
    with plancache.open(warm) as cache:
        report = plancache.warm([many], ["h200"], Idle(), cache=cache)
    assert not report
    assert report.counts == {"failed": 6, "not tried": 2 * (len(SIZES) - 3)}
    assert "verify --repair" in report.stopped
    assert (warm / FILE).read_bytes() == damaged


def test_rewarming_what_cannot_be_stored_stops_too(mounted, tmp_path, warm):
    disk = mounted("-t", "tmpfs", "-o", "size=40k,mode=0700", "plancache-test", tmp_path / "disk")
    with plancache.open(disk / "cache") as cache, ThreadPoolExecutor(1) as here:
        report = plancache.rewarm(warm, executor=here, cache=cache)
    assert not report
    assert report.counts["built"] == 0
    assert "could not be stored" in report.stopped


def failing(times):
    left = [times]

    def call():
        left[0] -= 1
        if left[0] >= 0:
            raise StoreError("away", found=left[0])
        return "there"

    return call


def test_a_fault_that_passes_costs_one_more_try_and_counts_for_nothing():
    faults = Faults()
    for _ in range(5):
        assert faults.attempt(READING, failing(1)) == "there"
    assert not faults


def test_only_faults_in_a_row_are_too_many_and_reading_does_not_break_a_row_of_those_of_storing():
    faults = Faults()
    for times in (2, 2, 0, 2, 2):
        try:
            faults.attempt(STORING, failing(times))
        except StoreError:
            faults.attempt(READING, failing(0))
    assert not faults
    with pytest.raises(StoreError):
        faults.attempt(STORING, failing(2))
    assert faults
    assert not faults.blind


def test_what_builders_and_libraries_print_is_not_in_the_report(tmp_path):
    (tmp_path / "loud.py").write_text(
        "import os, plancache\nfrom tests import graphs\nprint('imported')\n"
        "@plancache.cached(cases=[(1,)])\ndef loud(handle, n):\n"
        "    print('declared')\n    os.write(1, b'from C\\n')\n    raise ValueError('no graph')\n"
    )
    command = [sys.executable, "-m", "plancache", "--dir", tmp_path / "cache", "warm", tmp_path / "loud.py"]
    done = subprocess.run([*command, "--device", "h200", "--json"], cwd=ROOT, capture_output=True, text=True)
    (line,) = map(json.loads, done.stdout.splitlines())
    assert line["error"] == "no graph"
    assert {"imported", "declared", "from C"} <= set(done.stderr.splitlines())
