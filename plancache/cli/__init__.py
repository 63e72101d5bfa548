"""The command line: one module per group of commands, imported when it is called."""

from __future__ import annotations

import importlib
import io
import os
import sys
from contextlib import suppress
from pathlib import Path

import click

from plancache import __version__
from plancache.cli.place import KINDS, Place
from plancache.errors import PlanCacheError
from plancache.settings import Settings
from plancache.store.directory import default_directory, filesystem

# Command -> module and name.
_COMMANDS = {
    "completion": ("completion", "completion"),
    "demo": ("demo", "demo"),
    "device": ("device", "device"),
    "doctor": ("doctor", "doctor"),
    "explain": ("explain", "explain"),
    "export": ("store", "export"),
    "import": ("store", "import_"),
    "ls": ("ls", "ls"),
    "prune": ("store", "prune"),
    "report": ("report", "report"),
    "rewarm": ("warm", "rewarm"),
    "show": ("show", "show"),
    "stats": ("stats", "stats"),
    "tune": ("tune", "tune"),
    "upgrade": ("warm", "upgrade"),
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


_EXIT_CODES = (
    "Exit codes: 0 done; 1 an error, which stderr explains, or something found wrong (verify, doctor), or interrupted; "
    "2 wrong usage; 130 warm or rewarm interrupted."
)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]}, epilog=_EXIT_CODES)
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
@click.option("--verbose", "-v", is_flag=True, help="Also what is there, and whether it may be deleted.")
@click.pass_obj
def path(place: Place, verbose: bool) -> None:
    """Print the cache's directory."""
    directory = place.directory or Settings.read().directory or default_directory()
    click.echo(directory)
    if verbose:
        click.echo(f"{_what_is_there(directory)} on {filesystem(directory)}.")
        click.echo("It may be deleted at any time: running jobs go on, and plans are built again when they are needed.")


def _what_is_there(directory: Path) -> str:
    if not directory.is_dir():
        return "Nothing is there yet,"
    taken = 0
    for file in directory.rglob("*"):
        with suppress(OSError):
            taken += file.stat().st_size if file.is_file() else 0
    kind = "SQLite" if (directory / "plancache.sqlite3").exists() else "Record files"
    return f"{kind}, {taken / 2**20:.1f} MB,"


def main() -> None:
    """The console script. Exit codes: 0 done, 1 an error that is explained on stderr, 2 wrong usage."""
    # Sizes are written with ×, which not every encoding has; names of files may be bytes that UTF-8 has not.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "backslashreplace"):
            unicode = stream.encoding.lower().replace("-", "") == "utf8"
            stream.reconfigure(errors="surrogateescape" if unicode else "replace")
    try:
        cli()
    except PlanCacheError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(1)
    except OSError as error:  # a full disk behind a redirection, a directory that nobody may enter
        with suppress(OSError):
            click.echo(f"Error: {error}", err=True)
        with suppress(OSError, ValueError):  # what could not be written is not tried again at the end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
