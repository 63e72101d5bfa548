"""Every code block of the README and of the pages runs: those of one page in order, in one directory."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conftest import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# What `make demo` and `make test` run is run by other tests; here, that the targets are there.
MAKE = f'make() {{ command make --dry-run --directory "{ROOT}" "$@"; }}\n'


class Block(NamedTuple):
    """A code block. With a title it is a file, which later blocks of the page may run or import."""

    language: str
    title: str
    text: str


def blocks(page):
    """The blocks of a page that are indented by nothing; every ``` is part of one."""
    text = page.read_text()
    found = [
        Block(*one)
        for one in re.findall(r'^```(\w+)(?: title="([\w.]+)")?\n(.*?)^```$', text, re.MULTILINE | re.DOTALL)
    ]
    assert text.count("```") == 2 * len(found), f"{page.name} has a block that this test does not see"
    return found


WITH_CODE = [page for page in PAGES if {"python", "bash"} & {block.language for block in blocks(page)}]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_there_are_no_blocks_of_other_kinds(page):
    assert {block.language for block in blocks(page)} <= {"python", "bash", "text"}


def test_there_are_blocks_to_run():
    languages = [block.language for page in PAGES for block in blocks(page)]
    assert languages.count("python") > 10
    assert languages.count("bash") > 10


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.name)
def test_the_blocks_of_a_page_run_in_their_order(page, warm, tmp_path):
    place = tmp_path / "place"
    place.mkdir()
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        # A cache that holds something, as its reader's does; and not the developer's.
        "PLANCACHE_DIR": str(warm),
        "XDG_CACHE_HOME": str(tmp_path / "user"),
    }
    found = blocks(page)
    commands = "".join(block.text for block in found if block.language == "bash")
    for number, block in enumerate(found):
        if block.language == "python":
            file = place / (block.title or f"block_{number}.py")
            file.write_text(block.text)
            if block.title and block.title in commands:
                continue
            command = [sys.executable, "-W", "error", file.name]
        elif block.language == "bash":
            command = ["bash", "-euo", "pipefail", "-c", MAKE + block.text]
        else:
            continue
        done = subprocess.run(
            command, cwd=place, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, f"{block.text}\n{done.stdout}\n{done.stderr}"
        assert done.stdout, block.text
