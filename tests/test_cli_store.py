"""The commands that look after what is on disk."""

import json
import os
import sqlite3
import subprocess
import sys

import pytest
from click.testing import CliRunner

import plancache
from plancache.cli import cli
from plancache.store.database import FILE
from tests import graphs
from tests.conftest import ROOT


def invoke(*arguments, code=0):
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments])
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


def test_ls_lists_plans_at_80_columns_and_as_json(warm):
    output = invoke("--dir", warm, "ls")
    assert max(map(len, output.splitlines())) <= 80
    assert "3 plans" in output
    rows = [json.loads(line) for line in invoke("--dir", warm, "ls", "--json").splitlines()]
    assert len(rows) == 3
    assert {"key", "route", "driver", "engine", "builder", "used", "hits", "stored"} <= set(rows[0])
    assert {row["key"][:12] for row in rows} == {line[:12] for line in output.splitlines()[1:4]}


def test_rows_are_selected_by_key_engine_route_device_builder_and_use(warm, h200, targeted):
    def count(*options):
        return len(invoke("--dir", warm, "ls", "--json", *options).splitlines())

    key = json.loads(invoke("--dir", warm, "ls", "--json").splitlines()[0])["key"]
    assert count(key[:10]) == 1
    assert count("--engine", 9) == 1
    assert count("--route", "native") == 0
    assert count("--device", h200.fingerprint[:8]) == 3
    assert count("--since", "1h") == 3
    assert count("--older-than", "1h") == 0
    assert count("--builder", "small") == 0
    plancache.cached(cache=plancache.open(warm))(small)(None)
    assert count("--builder", "test_cli_store.small") == 1
    assert "is no age" in invoke("--dir", warm, "ls", "--since", "soon", code=2)


def small(handle):
    return graphs.unary(handle)


def test_export_and_import_carry_plans_to_another_cache(warm, tmp_path, targeted):
    bundle, other = tmp_path / "plans.bundle", tmp_path / "other"
    assert "3 plans written" in invoke("--dir", warm, "export", bundle)
    assert "exists" in invoke("--dir", warm, "export", bundle, code=1)
    assert "1 plans written" in invoke("--dir", warm, "export", bundle, "--engine", 9, "--force")
    invoke("--dir", warm, "export", bundle, "--force")
    assert "3 plans imported, 0 were there" in invoke("--dir", other, "import", bundle)
    assert "0 plans imported, 3 were there" in invoke("--dir", other, "import", bundle)
    with plancache.open(other, mode="require-hit") as cache:
        assert cache.build(graphs.sdpa()[0]).source == "disk"


def test_prune_says_what_would_go_and_what_went(warm):
    assert "say what is to go" in invoke("--dir", warm, "prune", code=2)
    assert "0 plans" in invoke("--dir", warm, "prune", "--older-than", "1d")
    assert "would be removed" in invoke("--dir", warm, "prune", "--max-bytes", "25K", "--dry-run")
    assert "3 plans" in invoke("--dir", warm, "ls")
    assert "2 plans" in invoke("--dir", warm, "prune", "--max-bytes", "25K")
    assert "1 plans" in invoke("--dir", warm, "ls")


@pytest.mark.parametrize(
    "wrong",
    [
        "prune --max-bytes few",
        "prune --older-than soon",
        "ls --since 7",
        "verify --on-device --memory 0",
        "verify --on-device --timeout 0",
        "verify --on-device --timeout nan",
        "tune --seconds -1",
        "tune --workspace 1X",
    ],
)
def test_a_value_that_is_none_is_wrong_usage_whatever_is_there(wrong, tmp_path):
    *_, option, value = wrong.split()
    output = invoke("--dir", tmp_path / "nowhere", *wrong.split(), code=2)
    assert option in output
    assert value in output


def test_verify_finds_and_repairs(warm):
    assert "3 good, 0 bad" in invoke("--dir", warm, "verify")
    database = sqlite3.connect(warm / FILE)
    with database:
        database.execute("UPDATE plans SET engine = engine + 1 WHERE engine = 9")
    database.close()
    output = invoke("--dir", warm, "verify", code=1)
    assert "2 good, 1 bad" in output
    assert "not the one that its row lists" in output
    report = json.loads(invoke("--dir", warm, "verify", "--json", code=1))
    assert (report["good"], len(report["bad"])) == (2, 1)
    assert "1 removed" in invoke("--dir", warm, "verify", "--repair")
    assert ", 0 bad" in invoke("--dir", warm, "verify")


def test_show_tells_everything_about_a_plan_and_its_graph(warm):
    rows = [json.loads(line) for line in invoke("--dir", warm, "ls", "--json").splitlines()]
    row = next(row for row in rows if row["engine"] == 9)
    output = invoke("--dir", warm, "show", row["key"][:10])
    assert row["key"] in output
    assert row["name"] in output
    assert "NVIDIA H200" in output
    assert "sdpa" in output
    (shown,) = map(json.loads, invoke("--dir", warm, "show", row["key"], "--json").splitlines())
    assert shown["documents"]["graph"]["nodes"]
    assert {name: shown[name] for name in row} == row


def test_show_of_an_unknown_or_ambiguous_key_says_so(warm):
    assert "nothing is stored under zz" in invoke("--dir", warm, "show", "zz", code=1)
    assert "3 keys begin with" in invoke("--dir", warm, "show", "", code=1)


def test_what_the_last_run_used_is_selected_back_to_a_pause(warm, tmp_path):
    keys = [json.loads(line)["key"] for line in invoke("--dir", warm, "ls", "--json").splitlines()]
    connection = sqlite3.connect(warm / FILE)
    for key, minutes in zip(keys, (0, 5, 60), strict=True):
        connection.execute("UPDATE plans SET used = ? WHERE key = ?", (2e9 - 60 * minutes, key))
    connection.commit()
    connection.close()
    used = {json.loads(line)["key"] for line in invoke("--dir", warm, "ls", "--last-run", "--json").splitlines()}
    assert used == set(keys[:2])
    assert "2 plans written" in invoke("--dir", warm, "export", tmp_path / "last.bundle", "--last-run")


def ran(*arguments, stdout=subprocess.PIPE, **environment):
    command = [sys.executable, "-m", "plancache", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(command, env=environment, stdout=stdout, stderr=subprocess.PIPE, check=False)


def test_tables_are_written_in_whatever_encoding_the_terminal_has(warm):
    for command in (("ls",), ("show", listed_keys(warm)[0]), ("stats", "-v")):
        done = ran("--dir", warm, *command, PYTHONIOENCODING="ascii")
        assert (done.returncode, done.stderr) == (0, b""), command
        assert done.stdout.isascii()
    strange = os.fsencode(warm.parent) + b"/\xff"
    assert ran("--dir", os.fsdecode(strange), "path", PYTHONIOENCODING="utf-8").stdout == strange + b"\n"


def test_an_output_that_takes_nothing_is_one_line_and_exit_code_1(warm):
    for command in (("ls",), ("ls", "--json"), ("ls", "--csv"), ("stats",), ("path",)):
        with open("/dev/full", "wb") as full:  # noqa: PTH123
            done = ran("--dir", warm, *command, stdout=full)
        assert done.returncode == 1, command
        assert done.stderr == b"Error: [Errno 28] No space left on device\n", command


def listed_keys(path):
    return [json.loads(line)["key"] for line in invoke("--dir", path, "ls", "--json").splitlines()]
