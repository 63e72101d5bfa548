"""Files that commands write: whole or not there, and nothing is overwritten unasked."""

import os
import resource
import threading

import click
import pytest
from click.testing import CliRunner

import plancache
from plancache.cli import cli
from plancache.cli.output import write_text


def test_a_file_that_cannot_be_written_whole_leaves_the_one_before(tmp_path):
    file = tmp_path / "page.html"
    write_text(file, "before", force=False)
    file.chmod(0o640)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(click.ClickException, match="cannot be written"):
            write_text(file, "x" * 5000, force=True)
        with pytest.raises(click.ClickException, match="cannot be written"):
            write_text(tmp_path / "new.html", "x" * 5000, force=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {one.name: one.read_text() for one in tmp_path.iterdir()} == {"page.html": "before"}
    write_text(file, "after", force=True)
    assert (file.read_text(), file.stat().st_mode & 0o777) == ("after", 0o640)


def test_a_link_stays_one_and_a_pipe_is_written_to(tmp_path):
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    link.symlink_to("target")
    write_text(link, "page", force=False)
    assert link.is_symlink()
    assert (tmp_path / "target").read_text() == "page"
    os.mkfifo(pipe)
    found = []
    reader = threading.Thread(target=lambda: found.append(pipe.read_text()))
    reader.start()
    write_text(pipe, "page", force=True)
    reader.join()
    assert found == ["page"]
    assert pipe.is_fifo()


def test_show_overwrites_no_drawing_unasked(warm, tmp_path):
    with plancache.open(warm, mode="read-only") as cache:
        key = next(cache.rows()).row.key
    file = tmp_path / "mine.svg"
    file.write_text("mine")

    def show(*options):
        return CliRunner().invoke(cli, ["--dir", str(warm), "show", key, "--graph", str(file), *options])

    refused = show()
    assert (refused.exit_code, "exists" in refused.output, file.read_text()) == (1, True, "mine")
    assert show("--force").exit_code == 0
    assert file.read_text().startswith("<svg")
