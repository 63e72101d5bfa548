"""`plancache stats`: how big the cache is, and what it was good for."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import click
from rich.table import Table
from rich.text import Text

from plancache.cli.listing import console, duration, print_table, printable, size_text, write
from plancache.cli.place import Place
from plancache.totals import Names, Part, Totals, reason_text

# The names of `stats --csv`: a line for the whole, one for each device, one for each environment.
FIELDS = ("part", "hash", "name", "hits", "misses", "bypassed", "saved", "spent", "plans", "kernels", "bytes")
_BAR = 24


@click.command()
@click.option("--json", "form", flag_value="json", help="One JSON object: the whole and its parts.")
@click.option("--csv", "form", flag_value="csv", help="CSV: the whole, then devices, then environments.")
@click.option("--verbose", "-v", is_flag=True, help="Also what was saved on each day.")
@click.pass_obj
def stats(place: Place, form: str | None, verbose: bool) -> None:
    """Say how big the cache is, and what it was good for so far, over all processes.

    Counted are graphs that were served (hits), built (misses, by reason) and not cached (bypassed). Saved is what
    building took when the plans that were served were built, less what serving them took. Counts are best effort: a
    process adds its own when it stores a plan and when it ends; caches that are only read count nothing.
    """
    with place.open("read-only") as cache:
        rows = list(cache.rows())
        totals, names, directory = cache.totals(), cache.names(rows), cache.directory
        again = sum(listed.row.seconds for listed in rows)
    if form == "json":
        click.echo(json.dumps({"directory": str(directory), **_document(totals, names), "rebuild_seconds": again}))
    elif form == "csv":
        write("csv", FIELDS, _lines(totals, names))
    else:
        _print(totals, names, str(directory), again, verbose)


def _document(totals: Totals, names: Names) -> dict[str, Any]:
    whole = asdict(totals)
    whole["devices"] = [
        {"device": one, "device_name": names.device(one), **asdict(part)} for one, part in totals.devices.items()
    ]
    whole["environments"] = [
        {"environment": one, "cudnn": names.cudnn(one), **asdict(part)} for one, part in totals.environments.items()
    ]
    whole["saved_by_day"] = {_day(day): saved for day, saved in totals.saved_by_day.items()}
    return whole


def _lines(totals: Totals, names: Names) -> list[dict[str, Any]]:
    def line(kind: str, value: str, name: str, part: Part) -> dict[str, Any]:
        counts = {"misses": part.missed, "bypassed": sum(part.bypassed.values())}
        return {"part": kind, "hash": value, "name": name, **asdict(part), **counts}

    return [
        line("all", "", "", totals),
        *(line("device", one, names.device(one), part) for one, part in totals.devices.items()),
        *(line("environment", one, names.environment(one), part) for one, part in totals.environments.items()),
    ]


def _print(totals: Totals, names: Names, directory: str, again: float, verbose: bool) -> None:
    out = console()
    asked = totals.hits + totals.missed
    since = f" since {_day(totals.since)}" if totals.since is not None else ", nothing counted yet"
    share = f" ({totals.hits / asked:.0%} of {asked:,})" if asked else ""
    facts = {
        "cache": directory,
        "holds": f"{totals.plans:,} plans, {totals.kernels:,} kernels, {size_text(totals.bytes)}",
        "hits": f"{totals.hits:,}{share}{since}",
        "misses": _reasons(totals.misses),
        "not cached": _reasons(totals.bypassed),
        "saved": f"{duration(totals.saved)} of building; {duration(totals.spent)} were spent on it",
        "to delete": f"is safe; to build all of it again would take {duration(again)}",
    }
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(name, Text(printable(value)))
    out.print(table)
    _print_parts(out, "device", {names.device(one): part for one, part in totals.devices.items() if one})
    _print_parts(out, "environment", {names.environment(one): part for one, part in totals.environments.items() if one})
    if verbose:
        most = max(totals.saved_by_day.values(), default=0.0) or 1.0
        for day, saved in totals.saved_by_day.items():
            out.print(f"{_day(day)}  {'█' * round(_BAR * saved / most):<{_BAR}} {duration(saved)}")


def _print_parts(out: Any, title: str, parts: Mapping[str, Part]) -> None:
    if not parts:
        return
    numbers = ("hits", "misses", "saved", "plans", "size")
    lines = [
        (name, f"{one.hits:,}", f"{one.missed:,}", duration(one.saved), f"{one.plans:,}", size_text(one.bytes))
        for name, one in parts.items()
    ]
    out.print()
    print_table(out, (title, *numbers), lines, right=numbers, gives_way=(title,))


def _reasons(counts: Mapping[str, int]) -> str:
    if not counts:
        return "0"
    most = [f"{count:,} {reason_text(name)}" for name, count in sorted(counts.items(), key=lambda one: -one[1])]
    return most[0] if len(most) == 1 else f"{sum(counts.values()):,}: {', '.join(most)}"


def _day(when: float | None) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(when))
