"""`plancache report`: one page about a cache, for a browser."""

from __future__ import annotations

from pathlib import Path

import click

from plancache.cli.listing import size_text
from plancache.cli.output import write_text
from plancache.cli.place import Place
from plancache.report import LIMIT, page


@click.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--limit", type=click.IntRange(min=1), default=LIMIT, show_default=True, help="Plans that are listed.")
@click.option("--force", is_flag=True, help="Overwrite FILE.")
@click.pass_obj
def report(place: Place, file: Path, limit: int, force: bool) -> None:
    """Write one HTML page about the cache to FILE: what it holds, what it saved, and drawings of the graphs.

    The page is whole in itself, and loads nothing from anywhere.
    """
    with place.open("read-only") as cache:
        text = page(cache, limit)
    size = write_text(file, text, force)
    click.echo(f"{file}: {size_text(size)}")
