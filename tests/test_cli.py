"""The command line."""

import json
import re

import pytest
from click.testing import CliRunner

import plancache
from plancache.cli import cli, main
from plancache.errors import DeviceError


@pytest.fixture
def invoke():
    def call(*arguments, code=0):
        result = CliRunner().invoke(cli, [str(argument) for argument in arguments])
        assert result.exit_code == code, result.output
        return result.output

    return call


def test_help_lists_every_command(invoke):
    listed = re.findall(r"^  (\w+)  ", invoke("--help").partition("Commands:")[2], re.MULTILINE)
    assert {"completion", "demo", "device", "doctor", "explain", "export", "import", "ls", "path", "prune"} <= set(
        listed
    )
    assert {"report", "show", "stats", "verify"} <= set(listed)
    for name in listed:
        invoke(name, "--help")
    assert plancache.__version__ in invoke("--version")
    assert "No such command" in invoke("nothing", code=2)


def test_device_show_fits_80_columns_and_gives_json(invoke, h200):
    lines = invoke("device", "show", "h200").splitlines()
    assert max(map(len, lines)) <= 80
    assert any("multiProcessorCount" in line and "132" in line and "yes" in line for line in lines)
    assert json.loads(invoke("device", "show", "h200", "--json")) == json.loads(h200.to_json())


def test_device_export_writes_a_file_that_target_takes_and_does_not_overwrite(invoke, tmp_path, h200):
    file = tmp_path / "my.json"
    assert "NVIDIA H200" in invoke("device", "export", file, "h200")
    assert plancache.device(file) == h200
    assert "exists" in invoke("device", "export", file, "h200", code=1)
    invoke("device", "export", file, "h200", "--force")
    assert "cannot be written" in invoke("device", "export", tmp_path / "no" / "my.json", "h200", code=1)


def test_a_digit_that_is_no_number_is_no_device():
    assert isinstance(CliRunner().invoke(cli, ["device", "show", "²"]).exception, DeviceError)


def test_an_error_of_plancache_is_one_line_and_exit_code_1(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["plancache", "device", "show", "rtx1"])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 1
    assert capsys.readouterr().err.startswith("Error: unknown device; found 'rtx1'; expected one of h200")


def test_the_demo_builds_then_loads_in_a_second_process(tmp_path, invoke):
    output = invoke("--dir", tmp_path / "cache", "demo", "--example", "vit", "--device", "h200")
    assert "The second process built 0 plans and loaded 9" in output
    assert [line.split()[-5:-2] for line in output.splitlines() if line.startswith(("first p", "second p"))] == [
        ["40", "1", "1"],
        ["40", "0", "0"],
    ]
    assert max(map(len, output.split("The cache is in")[0].splitlines())) <= 80
    assert str(tmp_path / "cache") in output
    assert "not empty" in invoke("--dir", tmp_path / "cache", "demo", code=1)
    loaded = json.loads(invoke("--dir", tmp_path / "cache", "demo", "--load", "--example", "vit", "--device", "h200"))
    assert {row["source"] for row in loaded["plans"]} == {"disk"}
