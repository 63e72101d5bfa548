"""`plancache warm` and `rewarm`: fill the cache ahead of time, on a machine that needs no GPU."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from plancache.cli.device import named
from plancache.cli.loading import builders
from plancache.cli.place import Place
from plancache.filler import BUILT, FAILED, FOUND, NOT_TRIED, UNSUPPORTED, Line, Report
from plancache.filler import Progress as Told
from plancache.places import ROUTES
from plancache.rewarming import rewarm as rewarm_
from plancache.warming import warm as warm_

_SHOWN = 20


@dataclass(frozen=True)
class Options:
    """What both commands take."""

    device: tuple[str, ...]
    driver: str | None
    jobs: int | None
    routes: str | None
    as_json: bool

    @property
    def filling(self) -> dict[str, Any]:
        """As arguments of `plancache.warm`."""
        routes = None if self.routes is None else [route.strip() for route in self.routes.split(",")]
        devices = [named(one) for one in self.device] or None
        return {"devices": devices, "driver": self.driver, "jobs": self.jobs, "routes": routes}


def _options(command: Callable[..., Any]) -> Callable[..., Any]:
    def call(**given: Any) -> Any:
        chosen = {name: given.pop(name) for name in Options.__dataclass_fields__}
        return command(options=Options(**chosen), **given)

    call.__name__, call.__doc__ = command.__name__, command.__doc__
    for option in (
        click.option("--json", "as_json", is_flag=True, help="One JSON object a line, for each plan."),
        click.option("--routes", metavar="LIST", help=f"Only these, separated by commas: {', '.join(ROUTES)}."),
        click.option("--jobs", "-j", type=click.IntRange(1), help="Worker processes. [default: usable processors]"),
        click.option(
            "--driver", metavar="VERSION", help="The fleet's driver, as 12.8. [default: lowest of CUDA major]"
        ),
        click.option(
            "--device", multiple=True, help="A name, a JSON file, or a CUDA ordinal; more than once for more."
        ),
    ):
        call = option(call)
    call.__click_params__.extend(getattr(command, "__click_params__", []))  # type: ignore[attr-defined]
    return call


@click.command()
@click.argument("what", metavar="MODULE_OR_FILE...", nargs=-1, required=True)
@_options
@click.pass_obj
def warm(place: Place, what: tuple[str, ...], options: Options) -> None:
    """Build every case of the cached builders in these modules or files, for each --device.

    Without --device, for the GPU that is here. What is stored already is passed over, so that an interrupted run goes
    on where it was. PLANCACHE_MODE is for jobs and has no say here: the cache is written. Exit code 0 only if
    everything that should be there is.
    """
    with _prints_on_stderr():
        found = builders(what)
        for builder in found:
            if not builder.cases:
                click.echo(f"Warning: {builder.name} has no cases, so nothing is built for it.", err=True)
        with place.open("read-write") as cache, _progress("building") as told:
            report = warm_(found, cache=cache, progress=told, **options.filling)
    _finish(report, options.as_json)


@click.command()
@click.argument("source", type=click.Path(path_type=Path, exists=True))
@_options
@click.pass_obj
def rewarm(place: Place, source: Path, options: Options) -> None:
    """Build everything that SOURCE has seen again, for the cuDNN that is installed now, with no user code.

    SOURCE is a cache's directory (also the one that is filled), a bundle, or a list of misses as PLANCACHE_MISSES
    writes it. Without --device, for each graph's own device: natively where that is here, else ahead of time. What
    is stored for other versions stays.
    """
    with _prints_on_stderr(), place.open("read-write") as cache, _progress("building") as told:
        report = rewarm_(source, cache=cache, progress=told, **options.filling)
    _finish(report, options.as_json)


@click.command()
@click.option("--jobs", "-j", type=click.IntRange(1), help="Worker processes. [default: usable processors]")
@click.option("--measure/--no-measure", default=True, help="Run old and new plans, and tell what was gained.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line, for each plan.")
@click.pass_obj
def upgrade(place: Place, jobs: int | None, measure: bool, as_json: bool) -> None:
    """Build natively what the GPU that is here has only by the routes replay and deviceless, also in layers.

    Those are ways to start: their kernels may be several times slower. What each new plan gains is told: microseconds
    of one execute, before and now.
    """
    with _prints_on_stderr(), place.open("read-write") as cache, _progress("upgrading") as told:
        report = cache.upgrade(jobs=jobs, progress=told, measure=None if measure else lambda _: None)
    if not as_json:
        _gains(report)
    _finish(report, as_json)


def _gains(report: Report) -> None:
    """A table of plans that were measured by the route that served before and natively."""
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for name in ("key", "builder", "before"):
        table.add_column(name, no_wrap=True, overflow="ellipsis")
    for name in ("before µs", "native µs", "times as fast"):
        table.add_column(name, justify="right", no_wrap=True)
    for line in report.lines:
        times = {} if line.gain is None else dict(line.gain)
        native = times.pop("native", None)
        for route in (route for route in ("replay", "deviceless") if native and route in times):
            numbers = (f"{times[route]:.1f}", f"{native:.1f}", f"{times[route] / native:.2f}")
            table.add_row(line.key[:12], line.builder.rpartition(".")[2] or "-", route, *numbers)
    if table.row_count:
        Console(highlight=False).print(table)


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:.1f}/s")


@contextmanager
def _progress(what: str) -> Iterator[Told | None]:
    """A bar on stderr with rate and time left, only where somebody watches."""
    console = Console(stderr=True)
    if not console.is_terminal:
        with _interruptible():
            yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _Rate(), TimeRemainingColumn())
    with _interruptible(), Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None)

        def told(done: int, total: int | None, _line: Line) -> None:
            bar.update(task, completed=done, total=total)

        yield told


@contextmanager
def _prints_on_stderr() -> Iterator[None]:
    """What builders and libraries print, here and in workers, does not come between the lines of the report."""
    with ExitStack() as stack:
        with suppress(OSError, AttributeError):  # one of them is closed
            sys.stdout.flush()
            out = os.dup(1)
            stack.callback(os.close, out)
            stack.callback(os.dup2, out, 1)
            os.dup2(2, 1)
        stack.enter_context(redirect_stdout(sys.stderr))
        yield


@contextmanager
def _interruptible() -> Iterator[None]:
    # Workers begin as `python -c`, for which modules in the working directory come before Python's own.
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    except KeyboardInterrupt:
        click.echo("Interrupted. What was built is stored; the same command goes on from there.", err=True)
        sys.exit(130)
    finally:
        if before is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = before


def _finish(report: Report, as_json: bool) -> None:
    if as_json:
        for line in report.lines:
            click.echo(json.dumps(asdict(line), default=repr))
    else:
        _print(report)
    if report.stopped:
        click.echo(f"Stopped: {report.stopped}", err=True)
    sys.exit(0 if report else 1)


def _print(report: Report) -> None:
    console = Console(highlight=False)
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    table.add_column("builder", no_wrap=True, overflow="ellipsis")
    table.add_column("device", no_wrap=True, overflow="ellipsis")
    outcomes = {BUILT: "built", FOUND: "found", UNSUPPORTED: "no route", FAILED: "failed"}
    if report.counts[NOT_TRIED]:
        outcomes[NOT_TRIED] = "not tried"
    for name in (*outcomes.values(), "build s"):
        table.add_column(name, justify="right", no_wrap=True)
    groups: dict[tuple[str, str], list[Line]] = {}
    for line in report.lines:
        groups.setdefault((line.builder, line.device), []).append(line)
    for (builder, device), lines in groups.items():
        table.add_row(Text(builder.rpartition(".")[2] or "-"), Text(device), *_numbers(lines, outcomes))
    table.add_section()
    table.add_row("all", "", *_numbers(report.lines, outcomes), style="bold")
    console.print(table)
    cut = [_list(console, report, outcome) for outcome in (UNSUPPORTED, FAILED)]
    if any(cut):
        console.print("--json has all of them, and all of their messages.")
    console.print(f"{_plural(report.counts)} in {report.seconds:.1f} s", soft_wrap=True)


def _numbers(lines: list[Line], outcomes: Iterable[str]) -> list[str]:
    counts = Counter(line.outcome for line in lines)
    seconds = sum(line.seconds for line in lines)
    return [*(str(counts[outcome] or "") for outcome in outcomes), f"{seconds:.1f}"]


def _list(console: Console, report: Report, outcome: str) -> bool:
    """The failures, each by itself; of routes that graphs do not have, only those that leave a graph without any.

    Gives whether something was cut short.
    """
    served = {(line.key, line.device) for line in report.lines if line.outcome in (BUILT, FOUND)}
    lines = [line for line in report.lines if line.outcome == outcome]
    if outcome == UNSUPPORTED:
        lines = [line for line in lines if (line.key, line.device) not in served]
    for line in lines[:_SHOWN]:
        console.print(_told(line), markup=False, soft_wrap=True)
    if len(lines) > _SHOWN:
        console.print(f"... and {len(lines) - _SHOWN} more")
    return len(lines) > _SHOWN or any("\n" in line.error for line in lines)


def _told(line: Line) -> str:
    case = f"{line.builder or 'a graph'}({', '.join(map(repr, line.args))})" if line.args else line.builder or "a graph"
    # cuDNN's own messages go on with one line for each engine, with all its knobs.
    first, *more = line.error.splitlines() or [""]
    text = f"{first} [...]" if more else first
    return f"{line.outcome}: {case}, {line.device}, {line.route or 'no route'}: {text}"


def _plural(counts: Counter[str]) -> str:
    rest = f", {counts[NOT_TRIED]} not tried" if counts[NOT_TRIED] else ""
    return f"{counts[BUILT]} plans built, {counts[FOUND]} found, {counts[FAILED]} failed{rest}"
