"""`plancache doctor`: what stands in the way of a cache, and what to do about it."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from plancache import doctor as examination
from plancache.cli.listing import printable
from plancache.cli.place import Place
from plancache.doctor import ERROR, OK, WARNING, Finding

_COLOURS = {OK: "green", WARNING: "yellow", ERROR: "red"}


@click.command()
@click.option(
    "--filesystem",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="Try locks, renames and killed writers in DIR instead, with two processes; nothing stays there.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line: name, state, found, todo.")
@click.pass_obj
def doctor(place: Place, filesystem: Path | None, as_json: bool) -> None:
    """Look at libraries, driver, compiler, cache directory, locks, layers and signing; change nothing.

    Each is ok, a warning (plancache goes on, with less) or an error (plans are not built, or not cached), with what to
    do about it. Exit code 1 if there is an error.
    """
    if filesystem is None:
        found = examination.examine(place.directory)
    else:
        from plancache.trial import run

        found = run(filesystem, sys.stderr)
    if as_json:
        for one in found:
            click.echo(json.dumps(asdict(one)))
    else:
        _print(found)
    sys.exit(1 if any(one.state == ERROR for one in found) else 0)


def _print(found: list[Finding]) -> None:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    for _ in range(2):
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for one in found:
        text = Text(printable(one.found))
        if one.todo and one.state != OK:
            text.append(f"\n→ {printable(one.todo)}", style="bold")
        table.add_row(Text(one.state, style=_COLOURS[one.state]), one.name, text)
    console = Console(highlight=False)
    console.print(table)
    errors, warnings = (sum(one.state == state for one in found) for state in (ERROR, WARNING))
    console.print(f"{errors} errors, {warnings} warnings" if errors or warnings else "All is well.")
