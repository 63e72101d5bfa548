"""`plancache tune`: the fastest plan of every stored graph, measured on the device that is here."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from plancache.cli.listing import size_text
from plancache.cli.place import Place
from plancache.cli.selection import Selection, selecting
from plancache.cli.values import memory_option, seconds_value, size_value, timeout_option
from plancache.errors import BuilderError, RunError
from plancache.store.interface import Row
from plancache.tuning_table import BUSY, FAILED, OK, TUNED, WAITING, Limits, Tuning

NOTHING = "nothing to tune"


@dataclass(frozen=True)
class _Result:
    """What came of one graph: `tuned`, `busy` (another process is tuning it), `nothing to tune` or `failed`."""

    row: Row
    outcome: str
    table: Tuning | None = None
    detail: str = ""


@click.command()
@click.argument("key", required=False)
@selecting
@click.option(
    "--seconds",
    type=float,
    callback=seconds_value,
    default=60.0,
    show_default=True,
    help="Time for one graph's candidates.",
)
@click.option(
    "--workspace", callback=size_value, metavar="SIZE", help="Pass over candidates whose workspace is larger: 64M."
)
@timeout_option("candidate")
@memory_option
@click.option("--again", is_flag=True, help="Measure anew what was measured already.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object for each graph.")
@click.pass_obj
def tune(
    place: Place,
    selection: Selection,
    seconds: float,
    workspace: int | None,
    timeout: float,
    memory: int | None,
    again: bool,
    as_json: bool,
) -> None:
    """Run every plan that cuDNN offers for the stored graphs, and keep the fastest of each; KEY begins their keys.

    Candidates run in a child process: one that hangs is ended, noted, and not tried again. Interrupted, it goes on next
    time with what was not measured yet. What another process tunes is waited for, for --seconds and PLANCACHE_WAIT, and
    its table taken; after that it is left to it, which is no failure. Exit code 1 if a graph could not be tuned.
    """
    from plancache import ondevice
    from plancache.worker import Worker

    limits = Limits(seconds, workspace, memory)
    results: list[_Result] = []
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with place.open("read-write") as cache:
        # One row of each key: what is tuned is the graph, whatever routes it has plans of.
        every = {listed.row.key: listed.row for listed in ondevice.here(selection.of_cache(cache))}
        with (
            Worker(cache, timeout) as worker,
            Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar,
        ):
            graphs, plans = bar.add_task("graphs", total=len(every)), bar.add_task("plans", total=None)

            def said(number: int, of: int, name: str) -> None:
                bar.update(plans, completed=number, total=of, description=name.split("_")[0])

            try:
                for row in every.values():
                    try:
                        result = _result(row, ondevice.tune_row(cache, worker, row, limits, again, said))
                    except BuilderError as error:  # no fault
                        result = _Result(row, NOTHING, detail=str(error))
                    except RunError as error:
                        result = _Result(row, FAILED, detail=str(error))
                    results.append(result)
                    if as_json:
                        click.echo(json.dumps(_document(result)))
                    bar.advance(graphs)
            except BaseException:  # an interruption, or a cache that cannot be written any more
                bar.stop()
                if results and not as_json:
                    _report(results)
                raise
    if not as_json:
        _report(results)
    if any(one.outcome == FAILED for one in results):
        raise SystemExit(1)


def _result(row: Row, table: Tuning) -> _Result:
    if table.outcome == TUNED and table.chosen is None:
        counts = Counter(one.status for one in table.candidates)
        said = ", ".join(f"{count} {status}" for status, count in counts.items())
        return _Result(row, FAILED, table, f"no candidate can be kept: {said or 'there are none'}")
    return _Result(row, table.outcome, table, table.detail)


def _document(result: _Result) -> dict[str, Any]:
    table = {} if result.table is None else table_json(result.table)
    row = result.row
    return {"key": row.key, "builder": row.builder, **table, "outcome": result.outcome, "detail": result.detail}


def _report(results: list[_Result]) -> None:
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    table.add_column("key", no_wrap=True, min_width=12)
    for name, width in (("builder", 12), ("tuned plan", 16)):
        table.add_column(name, no_wrap=True, overflow="ellipsis", max_width=width)
    for name in ("first µs", "tuned µs", "ratio", "run"):
        table.add_column(name, justify="right", no_wrap=True, min_width=len(name))
    console = Console(highlight=False)
    counts = Counter(one.outcome for one in results)
    for row, known in ((one.row, one.table) for one in results if one.outcome == TUNED):
        if known is not None:
            run = sum(one.status != WAITING for one in known.candidates)
            name = row.builder.rpartition(".")[2] or "-"
            table.add_row(row.key[:12], name, *_told(known), f"{run}/{len(known.candidates)}")
    if table.row_count:
        console.print(table)
    for one in results:
        if one.outcome != TUNED:
            console.print(f"{one.row.key[:12]} {one.outcome}: {one.detail}", soft_wrap=True, markup=False)
    rest = "".join(f", {counts[outcome]} {outcome}" for outcome in (BUSY, NOTHING, FAILED) if counts[outcome])
    console.print(f"{counts[TUNED]} of {len(results)} graphs tuned{rest}")


def _told(tuning: Tuning) -> tuple[str, str, str, str]:
    """The tuned plan's name, what the first choice and it take, and the ratio of both."""
    if tuning.first is None or tuning.chosen is None:
        return "-", "-", "-", "-"
    first, chosen = tuning.candidates[tuning.first], tuning.candidates[tuning.chosen]
    ratio = "-" if tuning.gain is None else f"{tuning.gain:.2f}"
    return chosen.name, _micros(first.median), _micros(chosen.median), ratio


def _micros(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def table_json(tuning: Tuning) -> dict[str, Any]:
    """A tuning's table as JSON has it."""
    return {**asdict(tuning), "complete": tuning.complete, "gain": tuning.gain}


def print_table(console: Console, tuning: Tuning) -> None:
    """Every candidate, the fastest first; below, what is to be said of those that are not right."""
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    table.add_column("candidate", no_wrap=True, overflow="ellipsis")
    for name in ("µs", "best µs", "workspace"):
        table.add_column(name, justify="right", no_wrap=True, min_width=len(name))
    table.add_column("status", no_wrap=True)
    ranked = sorted(enumerate(tuning.candidates), key=lambda one: (one[1].median is None, one[1].median or 0.0, one[0]))
    for place, one in ranked:
        marks = ["first choice"] * (place == tuning.first) + ["tuned"] * (place == tuning.chosen)
        workspace = "-" if one.workspace is None else size_text(one.workspace)
        table.add_row(one.name, _micros(one.median), _micros(one.best), workspace, ", ".join([one.status, *marks]))
    console.print(table, markup=False)
    for _, one in ranked:
        if one.detail and one.status != OK:
            console.print(f"{one.name} {one.status}: {one.detail}", soft_wrap=True, markup=False)
    left = sum(one.status == WAITING for one in tuning.candidates)
    rest = f", {left} not run yet" if left else ""
    console.print(f"{len(tuning.candidates)} candidates, {tuning.seconds:.1f} s{rest}", highlight=False)
