"""`plancache verify`, `prune`, `export`, `import`: what is on disk, and keeping it in order."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from plancache.cli.listing import FIELDS, document, formats, size_text, write
from plancache.cli.place import Place
from plancache.cli.selection import Selection, ago, selecting
from plancache.cli.values import memory_option, size_value, timeout_option


@click.command()
@click.argument("key", required=False)
@selecting
@click.option("--on-device", is_flag=True, help="Run the plans that the options select, each in a child process.")
@timeout_option("plan")
@click.option("--keep", is_flag=True, help="Remove nothing of what was wrong on the device.")
@memory_option
@click.option("--repair", is_flag=True, help="Remove what is wrong, and keep what is good of a damaged database.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.pass_obj
def verify(
    place: Place,
    selection: Selection,
    on_device: bool,
    timeout: float,
    keep: bool,
    memory: int | None,
    repair: bool,
    as_json: bool,
) -> None:
    """Check every record. Exit code 1 if something is wrong and stays so.

    With --on-device, plans for this device are loaded, run on random inputs and compared with what is built here of the
    same graph; wrong ones, and those that hang, are removed. Where both give nothing but zeros and NaN a plan is
    unproven, and stays. KEY (the beginning of keys) and the options say which. Exit code 1 if any were wrong, hung or
    crashed.
    """
    if on_device:
        if repair:
            raise click.UsageError("--repair is about records on disk: call it without --on-device")
        from plancache.cli.ondevice import verify_on_device

        verify_on_device(place, selection, timeout, keep, memory, as_json)
    elif keep or memory is not None or any(value for value in vars(selection).values()):
        raise click.UsageError("a selection, --keep and --memory go with --on-device; records are checked all together")
    with place.open("read-write" if repair else "read-only") as cache, progress("checking") as step:
        report = cache.verify(repair, step(None))
    if as_json:
        click.echo(json.dumps({**asdict(report), "aside": [str(file) for file in report.aside]}))
    else:
        click.echo(f"{report.good} good, {len(report.bad)} bad, {report.removed} removed, {report.recovered} recovered")
        for key, route, fault in report.bad:
            click.echo(f"  {key[:16] or 'the database'} {route}: {fault}")
        for file in report.aside:
            click.echo(f"  set aside as damaged: {file}")
        if not report.clean:
            click.echo("plancache verify --repair puts it right and keeps what is good.")
    sys.exit(0 if report.clean else 1)


@click.command()
@click.argument("key", required=False)
@selecting
@click.option(
    "--max-bytes",
    callback=size_value,
    metavar="SIZE",
    help="Least recently used first, until the records take no more: 500M.",
)
@click.option("--dry-run", is_flag=True, help="Remove nothing; say what would go.")
@formats
@click.pass_obj
def prune(place: Place, selection: Selection, max_bytes: int | None, dry_run: bool, form: str | None) -> None:
    """Remove what was least recently used, or what the options select; KEY is the beginning of keys.

    With --max-bytes, of what is selected only as much as is beyond it.
    """
    if max_bytes is None and selection.is_everything:
        raise click.UsageError("say what is to go: --max-bytes SIZE, --older-than AGE, a KEY or another option")
    before = None if selection.older_than is None else ago(selection.older_than)
    with place.open("read-write") as cache:
        cache.flush()
        every = list(cache.rows())
        names = cache.names(every)
        among = replace(selection, older_than=None).of(every, names)
        gone = cache.prune(max_bytes, before, dry_run, among)
        if form is not None:
            write(form, FIELDS, (document(listed, names) for listed in gone))
            return
    verb = "would be removed" if dry_run else "removed"
    click.echo(f"{len(gone)} plans, {size_text(sum(listed.stored for listed in gone))}, {verb}")


@click.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.argument("key", required=False)
@selecting
@click.option("--force", is_flag=True, help="Overwrite FILE.")
@click.pass_obj
def export(place: Place, file: Path, selection: Selection, force: bool) -> None:
    """Write plans into one portable FILE: all, or those that the options select."""
    if file.exists() and not force:
        raise click.ClickException(f"{file} exists. Give --force to overwrite it.")
    with place.open("read-only") as cache, progress("exporting") as step:
        rows = selection.of_cache(cache)
        counts = cache.export_bundle(file, rows, step(len(rows)))
    click.echo(f"{counts.done} plans written to {file} ({size_text(file.stat().st_size)})" + _damaged(counts.damaged))


@click.command(name="import")
@click.argument("file", type=click.Path(dir_okay=False, exists=True, path_type=Path))
@click.pass_obj
def import_(place: Place, file: Path) -> None:
    """Merge a bundle into the cache. What is there already stays."""
    with place.open("read-write") as cache, progress("importing") as step:
        counts = cache.import_bundle(file, step(None))
    click.echo(
        f"{counts.done} plans imported, {counts.present} were there already" + _damaged(counts.damaged, counts.refused)
    )


def _damaged(count: int, refused: int = 0) -> str:
    text = f", {count} damaged or wrongly signed ones passed over" if count else ""
    return text + (f", {refused} did not fit" if refused else "")


@contextmanager
def progress(what: str) -> Iterator[Callable[[int | None], Callable[[], None]]]:
    """A bar on stderr, only where somebody watches; gives what starts it with a total."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:

        def start(total: int | None) -> Callable[[], None]:
            task = bar.add_task(what, total=total)
            return lambda: bar.advance(task)

        yield start
