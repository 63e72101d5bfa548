"""Every code block of the README and of the pages runs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    block
    for page in PAGES
    for block in re.findall(r"^```(\w+)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
]
PYTHON = [text for language, text in BLOCKS if language == "python"]
COMMANDS = [line for language, text in BLOCKS if language == "bash" for line in text.splitlines()]


def test_there_are_no_blocks_of_other_kinds():
    assert {language for language, _ in BLOCKS} == {"python", "bash", "text"}
    assert PYTHON
    assert COMMANDS


@pytest.mark.parametrize("source", PYTHON, ids=range(len(PYTHON)))
def test_each_python_block_runs_by_itself(run, source):
    assert run(source)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_runs(command, tmp_path):
    if command.startswith("make "):
        # What `make demo` and `make test` run is run by these tests; here, that the targets are there.
        arguments, where = ["make", "--dry-run", *command.split()[1:]], ROOT
    else:
        arguments, where = command.split(), tmp_path
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        arguments, cwd=where, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
