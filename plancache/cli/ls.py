"""`plancache ls`: what is stored, one line each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import click
from rich.console import Console

from plancache.cache import PlanCache
from plancache.cli.device import named
from plancache.cli.listing import (
    FIELDS,
    age,
    console,
    document,
    formats,
    is_wide,
    print_table,
    size_text,
    sorted_by,
    sorting,
    write,
)
from plancache.cli.place import Place
from plancache.cli.selection import Selection, selecting
from plancache.cudnn import device as devices
from plancache.cudnn import environment, libraries
from plancache.cudnn.kernel_cache import Kernel
from plancache.cudnn.plans import Route
from plancache.errors import DeviceError
from plancache.kernels import is_kernel
from plancache.keys import digest
from plancache.settings import Settings
from plancache.store.interface import Listed
from plancache.totals import Names

_MARKS = {"deviceless": " *", "replay": " +", "tuned": " !"}


@click.command()
@click.argument("key", required=False)
@selecting
@sorting
@click.option("--here", is_flag=True, help="Only what this cuDNN would take, for the GPU here or for --device NAME.")
@click.option("--kernels", is_flag=True, help="List the kernels of kernel caches instead.")
@formats
@click.option("--verbose", "-v", is_flag=True, help="Every column, whatever the width.")
@click.pass_obj
def ls(
    place: Place,
    selection: Selection,
    sort: str | None,
    reverse: bool,
    here: bool,
    kernels: bool,
    form: str | None,
    verbose: bool,
) -> None:
    """List the plans, newest first; KEY is the beginning of their keys.

    With --here it says what would run here without compiling, also from the layers under the cache.
    """
    with place.open("read-only") as cache:
        stored = cache.rows_with_layers() if here else list(cache.rows())
        every = [listed for listed in stored if _is_listed(listed, kernels)]
        if here:
            names = Names()
            every = _served_here(every, selection.device, names)
            selection = replace(selection, device=None)
        else:
            names = cache.names(stored)  # of all: kernels say nothing of their environment, plans beside them do
        rows = sorted_by(selection.of(every, names), names, sort, reverse)
        if form is not None:
            write(form, FIELDS, (document(listed, names) for listed in rows))
        elif kernels:
            _print_kernels(cache, rows, by_topology=sort is None and not reverse)
        else:
            _print_plans(rows, names, verbose)


def _is_listed(listed: Listed, kernels: bool) -> bool:
    """A kernel, and not the header of its cache; or a plan."""
    return is_kernel(listed.row) == kernels and (not kernels or listed.row.size > 0)


def _served_here(rows: Sequence[Listed], device: str | None, names: Names) -> list[Listed]:
    """The rows that a graph of this process would be served, by the rules of a lookup; `names` learns the names."""
    what = named(device)
    try:
        chosen = devices.device(what)
    except DeviceError as error:
        if device is not None:
            raise
        raise click.ClickException(f"{error.what}. Name the one that is meant: --here --device h200") from error
    if what is None or isinstance(what, int):
        settings = Settings.read()
        routes = {Route.NATIVE, Route.REPLAY}
        routes |= {Route.TUNED} if settings.tuned else set()
        routes |= {Route.DEVICELESS} if settings.serve_ahead_of_time or settings.mode == "require-hit" else set()
    else:
        routes = {Route.DEVICELESS, Route.REPLAY}
    libraries_here = digest(environment.document())
    names.devices[chosen.fingerprint] = chosen.name
    names.environments[libraries_here] = environment.document()
    return [
        listed
        for listed in rows
        if (listed.row.device, listed.row.environment) == (chosen.fingerprint, libraries_here)
        and listed.row.driver <= chosen.driver
        and listed.row.frontend <= libraries.frontend_version()
        and (is_kernel(listed.row) or listed.row.route in routes)
    ]


def _print_plans(rows: Sequence[Listed], names: Names, verbose: bool) -> None:
    out = Console(highlight=False, width=1000) if verbose else console()
    wide = verbose or is_wide(out)
    more = ("device", "cuDNN") if wide else ()
    columns = ("key", "operation", *more, "engine", *(("builder",) if wide else ()), "build s", "KB", "hits", "used")
    lines = []
    for listed in rows:
        row = listed.row
        builder = row.builder if verbose else row.builder.rpartition(".")[2]
        lines.append(
            (
                row.key if verbose else row.key[:12],
                row.operation or "-",
                *((names.device(row.device).removeprefix("NVIDIA "), names.cudnn(row.environment)) if wide else ()),
                (row.name if verbose else row.name.split("_")[0]) + _MARKS.get(row.route, ""),
                *((builder or "-",) if wide else ()),
                f"{row.seconds:.2f}",
                f"{listed.stored / 1024:.0f}",
                str(listed.hits),
                age(listed.used),
            )
        )
    numbers = ("build s", "KB", "hits", "used")
    print_table(out, columns, lines, right=numbers, gives_way=("operation", "builder", "device"))
    marks = {route: mark for route, mark in _MARKS.items() if any(listed.row.route == route for listed in rows)}
    note = "".join(f"; {mark.strip()} {route}" for route, mark in marks.items())
    out.print(f"{len(rows)} plans, {size_text(sum(listed.stored for listed in rows))}{note}")


def _print_kernels(cache: PlanCache, rows: Sequence[Listed], by_topology: bool) -> None:
    """Engine and kernel, bytes of code, for which shape it was compiled and when; as sorted, or by topology."""
    lines = []
    for listed in sorted(rows, key=lambda one: (one.row.key, one.row.created)) if by_topology else rows:
        row = listed.row
        name = f"eng{row.engine} {row.name.rpartition('_knob_')[2]}" if "_knob_" in row.name else row.name
        shapes = compiled_for(cache.kernel(row))
        lines.append((row.key[:12], name, shapes, f"{row.size / 1024:.0f}", age(row.created)))
    out = console()
    columns = ("topology", "kernel", "compiled for", "KB", "age")
    print_table(out, columns, lines, right=("KB", "age"), gives_way=("kernel", "compiled for"))
    topologies = len({listed.row.key for listed in rows})
    out.print(f"{len(rows)} kernels of {topologies} topologies")


def compiled_for(kernel: Kernel | None) -> str:
    """The sizes of the operands that a kernel was compiled for."""
    return "?" if kernel is None else " ".join("x".join(map(str, dim)) for dim, _ in kernel.operands)
