"""`plancache ls`, `verify`, `prune`, `export`, `import`: what is on disk, and keeping it in order."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from plancache.cache import PlanCache
from plancache.cli.place import Place
from plancache.cli.selection import Selection, ago, selecting
from plancache.cudnn.kernel_cache import Kernel
from plancache.kernels import is_kernel
from plancache.settings import size
from plancache.store.interface import Listed


@click.command()
@click.argument("key", required=False)
@selecting
@click.option("--kernels", is_flag=True, help="List the kernels of kernel caches instead.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
@click.pass_obj
def ls(place: Place, selection: Selection, kernels: bool, as_json: bool) -> None:
    """List the plans, newest first; KEY is the beginning of their keys."""
    with place.open("read-only") as cache:
        rows = [listed for listed in selection.of(cache.rows()) if is_kernel(listed.row) == kernels]
        if kernels and not as_json:
            _kernel_table(cache, rows)
            return
    if as_json:
        for listed in rows:
            click.echo(json.dumps({**asdict(listed.row), **_use(listed)}))
        return
    _table(rows)


@click.command()
@click.argument("key", required=False)
@selecting
@click.option("--on-device", is_flag=True, help="Run the plans that the options select, each in a child process.")
@click.option("--timeout", type=float, default=60.0, show_default=True, help="Seconds after which a plan hangs.")
@click.option("--keep", is_flag=True, help="Remove nothing of what was wrong on the device.")
@click.option("--memory", metavar="SIZE", help="Memory on the device for one graph. [default: most of what is free]")
@click.option("--repair", is_flag=True, help="Remove what is wrong, and keep what is good of a damaged database.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.pass_obj
def verify(
    place: Place,
    selection: Selection,
    on_device: bool,
    timeout: float,
    keep: bool,
    memory: str | None,
    repair: bool,
    as_json: bool,
) -> None:
    """Check every record. Exit code 1 if something is wrong and stays so.

    With --on-device, plans for this device are loaded, run on random inputs and compared with what is built here of the
    same graph; wrong ones, and those that hang, are removed. KEY (the beginning of keys) and the options say which.
    Exit code 1 if there were any.
    """
    if on_device:
        if repair:
            raise click.UsageError("--repair is about records on disk: call it without --on-device")
        from plancache.cli.ondevice import verify_on_device

        bound = None if memory is None else size(memory, "--memory")
        verify_on_device(place, selection, timeout, keep, bound, as_json)
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
@click.option("--max-bytes", metavar="SIZE", help="Least recently used first, until the records take no more: 500M.")
@click.option("--older-than", metavar="AGE", help="What was not used since: 30d.")
@click.option("--dry-run", is_flag=True, help="Remove nothing; say what would go.")
@click.pass_obj
def prune(place: Place, max_bytes: str | None, older_than: str | None, dry_run: bool) -> None:
    """Remove what was least recently used."""
    if max_bytes is None and older_than is None:
        raise click.UsageError("say what is to go: --max-bytes SIZE, --older-than AGE, or both")
    limit = None if max_bytes is None else size(max_bytes, "--max-bytes")
    with place.open("read-write") as cache:
        gone = cache.prune(limit, None if older_than is None else ago(older_than), dry_run)
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
        rows = selection.of(cache.rows())
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


_MARKS = {"deviceless": " *", "replay": " +", "tuned": " !"}


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


def _table(rows: list[Listed]) -> None:
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for name in ("key", "plan", "builder"):
        table.add_column(name, no_wrap=True, overflow="ellipsis")
    for name in ("build s", "KB", "hits", "used"):
        table.add_column(name, justify="right", no_wrap=True)
    for listed in rows:
        row = listed.row
        table.add_row(
            row.key[:12],
            row.name.split("_")[0] + _MARKS.get(row.route, ""),
            row.builder.rpartition(".")[2] or "-",
            f"{row.seconds:.2f}",
            f"{listed.stored / 1024:.0f}",
            str(listed.hits),
            age(listed.used),
        )
    console = Console()
    console.print(table)
    marks = {route: mark for route, mark in _MARKS.items() if any(listed.row.route == route for listed in rows)}
    note = "".join(f"; {mark.strip()} {route}" for route, mark in marks.items())
    console.print(f"{len(rows)} plans, {size_text(sum(listed.stored for listed in rows))}{note}", highlight=False)


def _kernel_table(cache: PlanCache, rows: list[Listed]) -> None:
    """Topology by topology: engine and kernel, bytes of code, for which shape it was compiled and when."""
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    table.add_column("topology", no_wrap=True, min_width=12)
    for name in ("kernel", "compiled for"):
        table.add_column(name, no_wrap=True, overflow="ellipsis")
    for name in ("KB", "age"):
        table.add_column(name, justify="right", no_wrap=True, min_width=4)
    kept = [listed for listed in rows if listed.row.size]
    for listed in sorted(kept, key=lambda one: (one.row.key, one.row.created)):
        shapes = compiled_for(cache.kernel(listed.row))
        row = listed.row
        name = f"eng{row.engine} {row.name.rpartition('_knob_')[2]}" if "_knob_" in row.name else row.name
        table.add_row(row.key[:12], name, shapes, f"{row.size / 1024:.0f}", age(row.created))
    console = Console()
    console.print(table)
    topologies = len({listed.row.key for listed in kept})
    console.print(f"{len(kept)} kernels of {topologies} topologies", highlight=False)


def compiled_for(kernel: Kernel | None) -> str:
    """The sizes of the operands that a kernel was compiled for."""
    return "?" if kernel is None else " ".join("x".join(map(str, dim)) for dim, _ in kernel.operands)


def _use(listed: Listed) -> dict[str, float | int]:
    return {"used": listed.used, "hits": listed.hits, "stored": listed.stored}


def age(when: float) -> str:
    seconds = max(0.0, time.time() - when)
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f}{unit}"
    return f"{seconds:.0f}s"


def size_text(number: float) -> str:
    for unit in ("bytes", "KB", "MB", "GB"):
        if number < 1024 or unit == "GB":
            return f"{number:.0f} {unit}" if unit == "bytes" else f"{number:.1f} {unit}"
        number /= 1024
    raise AssertionError
