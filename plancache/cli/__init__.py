"""The command line: one module per group of commands, imported when it is called."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import click

from plancache import __version__
from plancache.cli.place import KINDS, Place
from plancache.errors import PlanCacheError
from plancache.settings import Settings
from plancache.store.directory import default_directory

# Command -> module and name.
_COMMANDS = {
    "demo": ("demo", "demo"),
    "device": ("device", "device"),
    "explain": ("explain", "explain"),
    "export": ("store", "export"),
    "import": ("store", "import_"),
    "ls": ("store", "ls"),
    "prune": ("store", "prune"),
    "rewarm": ("warm", "rewarm"),
    "show": ("show", "show"),
    "tune": ("tune", "tune"),
    "verify": ("store", "verify"),
    "warm": ("warm", "warm"),
}


class _Commands(click.Group):
    """Imports a command's module when the command is called: `plancache path` needs no cuDNN."""

    def list_commands(self, context: click.Context) -> list[str]:
        return sorted({*super().list_commands(context), *_COMMANDS})

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name in _COMMANDS:
            module, attribute = _COMMANDS[name]
            command = getattr(importlib.import_module(f"plancache.cli.{module}"), attribute)
            assert isinstance(command, click.Command)
            return command
        return super().get_command(context, name)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="plancache")
@click.option("--store", type=click.Choice(KINDS), help="Kind of store. [default: what is there, else by file system]")
@click.option(
    "--dir", "directory", type=click.Path(path_type=Path), help="The cache's directory. [default: PLANCACHE_DIR]"
)
@click.pass_context
def cli(context: click.Context, directory: Path | None, store: str | None) -> None:
    """Keeps cuDNN execution plans on disk, so that a plan is built once per fleet and not once per process."""
    context.obj = Place(directory, store)


@cli.command()
@click.pass_obj
def path(place: Place) -> None:
    """Print the cache's directory."""
    click.echo(place.directory or Settings.read().directory or default_directory())


def main() -> None:
    """The console script. Exit codes: 0 done, 1 an error that is explained on stderr, 2 wrong usage."""
    try:
        cli()
    except PlanCacheError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(1)
