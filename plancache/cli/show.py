"""`plancache show`: everything about one plan, or about the kernel cache of one topology."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from plancache.cache import PlanCache
from plancache.cli.listing import age, document, printable, size_text
from plancache.cli.ls import compiled_for
from plancache.cli.output import write_text
from plancache.cli.place import Place
from plancache.cli.tune import print_table, table_json
from plancache.cudnn import drawing
from plancache.cudnn.listing import listing
from plancache.errors import PlanCacheError
from plancache.kernels import is_kernel
from plancache.store.interface import Listed
from plancache.totals import Names


@click.command()
@click.argument("key")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one object for each row.")
@click.option(
    "--graph", type=click.Path(dir_okay=False, path_type=Path), help="Draw the graph in FILE.svg or FILE.dot."
)
@click.option("--force", is_flag=True, help="Overwrite the drawing's FILE.")
@click.pass_obj
def show(place: Place, key: str, as_json: bool, graph: Path | None, force: bool) -> None:
    """Show everything about what is stored under KEY, which may be the beginning of one.

    A plan: what it computes, how it was built and where, and its graph. A kernel cache: its kernels, each with engine
    and knobs, and the shape that it was compiled for.
    """
    with place.open("read-only") as cache:
        rows = [listed for listed in cache.rows() if listed.row.key.startswith(key)]
        keys = sorted({listed.row.key for listed in rows})
        if not keys:
            raise click.ClickException(f"nothing is stored under {key}. plancache ls lists the keys.")
        if len(keys) > 1:
            raise click.ClickException(f"{len(keys)} keys begin with {key}: {', '.join(one[:16] for one in keys[:8])}")
        if graph is not None:
            _draw(cache, rows[0], graph, force)
        elif as_json:
            names = cache.names(rows)
            for listed in rows:
                click.echo(json.dumps(_as_json(cache, listed, names)))
        elif is_kernel(rows[0].row):
            _show_kernels(cache, rows)
        else:
            for listed in rows:
                _show_plan(cache, listed)


def _draw(cache: PlanCache, listed: Listed, file: Path, force: bool) -> None:
    draw = {".svg": drawing.svg, ".dot": drawing.dot}.get(file.suffix)
    if draw is None:
        raise click.UsageError(f"{file} says no kind of drawing: name it .svg or .dot")
    parts = None if is_kernel(listed.row) else cache.documents(listed.row)
    if parts is None:
        raise click.ClickException(f"{listed.row.key[:16]} is a kernel cache, which has no graph")
    write_text(file, draw(parts["graph"], labels_in(parts)), force)
    click.echo(f"{printable(listed.row.operation or listed.row.key[:16])}: drawn in {file}")


def labels_in(parts: Mapping[str, Any]) -> dict[int, str]:
    """The names of a record's tensors by uid."""
    return {int(uid): label for uid, label in parts["labels"].items()}


def _as_json(cache: PlanCache, listed: Listed, names: Names) -> dict[str, Any]:
    row = document(listed, names)
    if is_kernel(listed.row):
        kernel = cache.kernel(listed.row) if listed.row.size else None
        return row if kernel is None else {**row, "knobs": dict(kernel.knobs), "operands": kernel.operands}
    try:
        known = {**row, "documents": cache.documents(listed.row)}
        tuning = cache.tuning(listed.row)
        return known if tuning is None else {**known, "tuning": table_json(tuning)}
    except PlanCacheError as error:
        return {**row, "fault": str(error)}


def _show_plan(cache: PlanCache, listed: Listed) -> None:
    row, console = listed.row, Console(highlight=False, soft_wrap=True)
    parts = cache.documents(row)
    if parts is None:
        return
    facts = {
        "key": row.key,
        "operation": row.operation or "-",
        "plan": row.name,
        "engine": row.engine,
        "route": row.route,
        "builder": row.builder or "-",
        "device": f"{parts['device'].get('deviceName', '?')} ({row.device[:12]})",
        "environment": f"{_flat(parts['environment'])} ({row.environment[:12]})",
        "build": _flat(parts["build"]),
        "driver, frontend": f"{row.driver}, {row.frontend}",
        "built": f"in {row.seconds:.2f} s, {age(row.created)} ago",
        "size": f"{size_text(row.size)}, {size_text(listed.stored)} on disk",
        "used": f"{listed.hits} hits, last {age(listed.used)} ago",
    }
    for name, value in facts.items():
        console.print(f"[bold]{name:<17}[/bold]", end="")
        console.print(printable(str(value)), markup=False)
    for line in listing(parts["graph"], labels_in(parts)):
        console.print(f"  {printable(line)}", markup=False)
    tuning = cache.tuning(row)
    if tuning is not None:
        print_table(Console(highlight=False), tuning)
    console.print()


def _flat(document: Mapping[str, Any]) -> str:
    """What is set in a document, on one line."""
    set_ = {name: value for name, value in document.items() if value not in (None, [], {})}
    return ", ".join(f"{name} {_words(value)}" for name, value in set_.items())


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"({_flat(value)})"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _show_kernels(cache: PlanCache, rows: list[Listed]) -> None:
    row, console = rows[0].row, Console(highlight=False)
    kernels = sorted((one for one in rows if one.row.size), key=lambda one: one.row.created)
    console.print(f"[bold]{'key':<17}[/bold]{row.key}", soft_wrap=True)
    console.print(f"[bold]{'kernel cache of':<17}[/bold]{escape(printable(row.builder))}", soft_wrap=True)
    console.print(f"[bold]{'device':<17}[/bold]{row.device[:12]}, environment {row.environment[:12]}", soft_wrap=True)
    console.print(f"[bold]{'driver, frontend':<17}[/bold]{row.driver}, {row.frontend}", soft_wrap=True)
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for name in ("engine", "knobs"):
        table.add_column(name, overflow="fold")
    table.add_column("compiled for", overflow="fold")
    for name in ("KB", "age"):
        table.add_column(name, justify="right", no_wrap=True)
    for listed in kernels:
        kernel = cache.kernel(listed.row)
        knobs = " ".join(f"{name}={value}" for name, value in kernel.knobs) if kernel is not None else "?"
        size = f"{listed.row.size / 1024:.0f}"
        table.add_row(str(listed.row.engine), knobs, compiled_for(kernel), size, age(listed.row.created))
    console.print(table)
    console.print(f"{len(kernels)} kernels, {size_text(sum(listed.row.size for listed in kernels))} of code")
