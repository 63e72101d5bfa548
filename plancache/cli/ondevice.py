"""`plancache verify --on-device`: stored plans run on the device and compared with what is built there."""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import asdict
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from plancache.cli.place import Place
from plancache.cli.selection import Selection
from plancache.cli.store import progress
from plancache.ondevice import CRASHED, RIGHT, WRONG, Verdict, here, verify
from plancache.tuning_table import HUNG


def verify_on_device(
    place: Place, selection: Selection, timeout: float, keep: bool, memory: int | None, as_json: bool
) -> None:
    """Run, compare, report; the exit code is 1 if a plan was wrong, hung or crashed. One that is unproven is neither.

    What was found, and removed, is reported also where it ends before its time: interrupted, or with a device that
    takes no other process after one that hung.
    """
    verdicts: list[Verdict] = []
    with place.open("read-only" if keep else "read-write") as cache:
        rows = here(selection.of_cache(cache))
        try:
            with progress("running") as step:
                for one in verify(cache, rows, timeout, keep, memory, step(len(rows))):
                    verdicts.append(one)
                    if as_json:
                        click.echo(json.dumps(_as_json(one)))
        except BaseException:
            if verdicts and not as_json:
                _table(verdicts)
            raise
    if not as_json:
        _table(verdicts)
    sys.exit(1 if any(one.verdict in (WRONG, HUNG, CRASHED) for one in verdicts) else 0)


def _as_json(verdict: Verdict) -> dict[str, Any]:
    row = verdict.row
    known = {"key": row.key, "route": row.route, "name": row.name, "builder": row.builder}
    return known | {name: value for name, value in asdict(verdict).items() if name != "row"}


def _table(verdicts: list[Verdict]) -> None:
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for name in ("key", "plan", "route", "verdict"):
        table.add_column(name, no_wrap=True, overflow="ellipsis")
    for name in ("µs", "native µs", "ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in verdicts:
        ratio = one.micros / one.native if one.micros and one.native else None
        numbers = ("-" if value is None else f"{value:.1f}" for value in (one.micros, one.native))
        verdict = (
            one.verdict
            + (", bit-equal" if one.exact and one.verdict == RIGHT else "")
            + (", removed" if one.removed else "")
        )
        table.add_row(
            one.row.key[:12],
            one.row.name.split("_")[0],
            one.row.route,
            verdict,
            *numbers,
            "-" if ratio is None else f"{ratio:.2f}",
        )
    console = Console(highlight=False)
    console.print(table)
    for one in verdicts:
        if one.verdict != RIGHT and one.detail:
            console.print(f"{one.row.key[:12]} {one.row.route}: {one.detail}", soft_wrap=True, markup=False)
    counts = Counter(one.verdict for one in verdicts)
    said = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    console.print(f"{len(verdicts)} plans of this device and these libraries" + (f": {said}" if said else ""))
