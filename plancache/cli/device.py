"""`plancache device`: what a device is to cuDNN, and its document for hosts that have none."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from plancache.cli.listing import printable
from plancache.cli.output import write_text
from plancache.cudnn import device as devices


@click.group()
def device() -> None:
    """Device properties: show them, or export them for building on a host without a GPU."""


@device.command()
@click.argument("what", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print the document as cuDNN writes it.")
def show(what: str | None, as_json: bool) -> None:
    """Show a device: WHAT is a name, a JSON file or a CUDA ordinal; without it, the current GPU."""
    chosen = devices.device(named(what))
    if as_json:
        click.echo(chosen.to_json())
        return
    table = Table("property", "value", "decides", title=Text(printable(chosen.name)), title_justify="left")
    for name, value in json.loads(chosen.to_json()).items():
        table.add_row(Text(printable(name)), Text(printable(str(value))), "yes" if name in chosen.document else "")
    console = Console()
    console.print(table)
    console.print(f"Fingerprint {chosen.fingerprint[:16]}, of the properties that decide which plans fit.")


@device.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.argument("what", required=False)
@click.option("--force", is_flag=True, help="Overwrite FILE.")
def export(file: Path, what: str | None, force: bool) -> None:
    """Write a device's document to FILE, for `plancache.target(FILE)` on a host without the device."""
    chosen = devices.device(named(what))
    text = json.dumps(json.loads(chosen.to_json()), indent=1) + "\n"
    write_text(file, text, force)
    click.echo(f"{chosen.name}: written to {file}")


def named(what: str | None) -> str | int | None:
    """What `plancache.device` takes: digits are a CUDA ordinal."""
    return int(what) if what is not None and what.isdecimal() else what
