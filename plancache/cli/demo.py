"""`plancache demo`: fill an empty cache from an example, then let a second process take everything from it."""

from __future__ import annotations

import importlib.util
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from plancache.builders import CachedBuilder, the_graph
from plancache.cache import PlanCache
from plancache.cli.place import Place
from plancache.cudnn import device as devices
from plancache.cudnn import frontend, libraries
from plancache.cudnn.target import target
from plancache.errors import DeviceError, LibraryError, PlanCacheError
from plancache.kernels import is_kernel
from plancache.opening import open as open_cache
from plancache.outcome import Source
from plancache.settings import shipped, user_cache_directory

EXAMPLES = ("resnet50", "llama_block", "vit")
# Its graphs have dynamic shapes: what is kept is not a plan each, but the kernels that serve all of them.
DYNAMIC = "decode_lengths"
_DYNAMIC_CASES = 40


@click.command()
@click.option("--example", type=click.Choice(EXAMPLES), default="resnet50", show_default=True, help="Whose layers.")
@click.option("--device", "device_name", help="Build for this device (a name or JSON file), with no GPU needed.")
@click.option("--json", "as_json", is_flag=True, help="Print the table as JSON.")
@click.option("--load", "loading", is_flag=True, hidden=True, help="The second process: load all, print timings.")
@click.pass_obj
def demo(place: Place, example: str, device_name: str | None, as_json: bool, loading: bool) -> None:
    """Build an example's plans into an empty cache, and load them in a second process.

    On a machine with a GPU the plans are built for it; elsewhere for an H200, with neither GPU nor driver.
    """
    name = device_name or _default_device()
    if loading:
        assert place.directory is not None
        print(json.dumps(_load_all(place.directory, example, name)))
        return
    path = _empty(place.directory)
    console = Console(stderr=as_json)
    console.print(f"Building the plans of [bold]{example}[/] for {_title(name)}")
    built = _build_all(path, example, name, console)
    console.print("Dynamic shapes: one kernel for many lengths")
    compiled = _dynamic(path, name)
    console.print("Starting a second process, which takes everything from disk")
    loaded = _second_process(path, example, name)
    rows = [{**one, **two} for one, two in zip(built, loaded["plans"], strict=True)]
    dynamic = [compiled, loaded["dynamic"]]
    if as_json:
        seconds = loaded["process_seconds"]
        print(json.dumps({"directory": str(path), "plans": rows, "dynamic": dynamic, "process_seconds": seconds}))
    else:
        _print(console, rows, loaded["process_seconds"])
        _print_dynamic(console, dynamic)
        console.print(f"The cache is in {path}", soft_wrap=True)
    rebuilt = [row["plan"] for row in rows if row["source"] != Source.DISK]
    if rebuilt:
        raise click.ClickException(f"the second process did not find: {', '.join(rebuilt)}")


def _default_device() -> str | None:
    """None for the GPU that is here; the name of one where there is none."""
    try:
        devices.live(0)
    except (DeviceError, LibraryError):
        return "h200"
    return None


def _title(name: str | None) -> str:
    if name is None:
        return f"this {devices.live(0).name}"
    return f"{devices.device(name).name}, which need not be here"


def _empty(directory: Path | None) -> Path:
    if directory is None:
        directory = user_cache_directory() / "demo"
        shutil.rmtree(directory, ignore_errors=True)
    elif directory.exists() and not directory.is_dir():
        raise click.ClickException(f"{directory} is no directory.")
    elif directory.exists() and any(directory.iterdir()):
        raise click.ClickException(
            f"{directory} is not empty. The demo starts from an empty cache: name another --dir."
        )
    return directory


@contextmanager
def _handle(name: str | None) -> Iterator[Any]:
    """A handle of the GPU that is here, or None inside the named target."""
    if name is not None:
        with target(name):
            yield None
        return
    # Not destroyed: graphs that were made with it are still alive, and the process ends soon.
    yield libraries.cudnn().create_handle()


def _cases(example: str) -> list[tuple[CachedBuilder, tuple[Any, ...]]]:
    builders = [value for value in vars(_module(example)).values() if isinstance(value, CachedBuilder)]
    return [(builder, case) for builder in builders for case in builder.cases]


def _module(example: str) -> ModuleType:
    file = shipped("examples") / f"{example}.py"
    spec = importlib.util.spec_from_file_location(f"plancache_example_{example}", file)
    if spec is None or spec.loader is None or not file.exists():
        raise PlanCacheError("an example is missing from this installation", found=None, expected=str(file))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _label(builder: CachedBuilder, case: tuple[Any, ...]) -> str:
    return f"{builder.function.__name__}({','.join(map(str, case))})"


def _build_all(path: Path, example: str, name: str | None, console: Console) -> list[dict[str, Any]]:
    rows = []
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with (
        _handle(name) as handle,
        open_cache(path, mode="read-write") as cache,
        Progress(*columns, console=console) as bar,
    ):
        cases = _cases(example)
        task = bar.add_task("building", total=len(cases))
        for builder, case in cases:
            graph, outcome = _ready(cache, builder, handle, case)
            rows.append(
                {
                    "plan": _label(builder, case),
                    "engine": frontend.plan_list(graph).chosen.name,
                    "build_seconds": outcome.seconds,
                    "bytes": len(graph.serialize(as_bytes=True)),
                }
            )
            bar.advance(task)
    return rows


def _ready(cache: PlanCache, builder: CachedBuilder, handle: Any, case: tuple[Any, ...]) -> tuple[Any, Any]:
    graph = the_graph(builder.function(handle, *case), builder.name)
    return graph, cache.build(graph, builder.heuristics, builder.policy, builder=builder.name)


def _load_all(path: Path, example: str, name: str | None) -> dict[str, Any]:
    with _handle(name) as handle, open_cache(path, mode="read-write") as cache:
        rows = []
        for builder, case in _cases(example):
            _, outcome = _ready(cache, builder, handle, case)
            rows.append({"source": outcome.source, "load_ms": 1e3 * outcome.seconds})
    return {"plans": rows, "dynamic": _dynamic(path, name)}


def _dynamic(path: Path, name: str | None) -> dict[str, Any]:
    """Build the first lengths of the example with dynamic shapes; what was compiled and written for them."""
    with _handle(name) as handle, open_cache(path, mode="read-write") as cache:
        outcomes = [_ready(cache, builder, handle, case)[1] for builder, case in _cases(DYNAMIC)[:_DYNAMIC_CASES]]
        kernels = [listed for listed in cache.rows() if is_kernel(listed.row) and listed.row.size]
        written = sum(state["written"] for state in cache.kernel_stats())
    return {
        "shapes": len(outcomes),
        "compiled": sum(outcome.source == Source.BUILT for outcome in outcomes),
        "written": written,
        "kernels": len(kernels),
        "first_ms": 1e3 * outcomes[0].seconds,
        "median_ms": 1e3 * statistics.median(outcome.seconds for outcome in outcomes[1:]),
    }


def _second_process(path: Path, example: str, name: str | None) -> dict[str, Any]:
    command = [sys.executable, "-m", "plancache", "--dir", str(path), "demo", "--load", "--example", example]
    if name is not None:
        command += ["--device", name]
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - started
    if done.returncode:
        raise click.ClickException(f"the second process failed:\n{done.stderr.strip()}")
    return {**json.loads(done.stdout), "process_seconds": seconds}


def _print_dynamic(console: Console, dynamic: list[dict[str, Any]]) -> None:
    table = Table("dynamic shapes", box=None, padding=(0, 1), pad_edge=False)
    for column in ("shapes", "kernels compiled", "written", "first ms", "others ms"):
        table.add_column(column, justify="right", no_wrap=True)
    for label, one in zip(("first process", "second process"), dynamic, strict=True):
        numbers = (one["shapes"], one["compiled"], one["written"])
        table.add_row(label, *map(str, numbers), f"{one['first_ms']:.0f}", f"{one['median_ms']:.1f}")
    console.print(table)


def _print(console: Console, rows: list[dict[str, Any]], process_seconds: float) -> None:
    table = Table("plan", "engine", box=None, padding=(0, 1), pad_edge=False)
    for column in ("build s", "load ms", "KB", "ratio"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(row["plan"], row["engine"].split("_")[0], *_numbers([row]))
    table.add_section()
    table.add_row(f"{len(rows)} plans", "", *_numbers(rows), style="bold")
    console.print(table)
    loaded = sum(row["source"] == Source.DISK for row in rows)
    console.print(
        f"The second process built {len(rows) - loaded} plans and loaded {loaded}; "
        f"from start to end it took {process_seconds:.1f} s."
    )


def _numbers(rows: list[dict[str, Any]]) -> list[str]:
    built = sum(row["build_seconds"] for row in rows)
    loaded = sum(row["load_ms"] for row in rows)
    size = sum(row["bytes"] for row in rows)
    return [f"{built:.2f}", f"{loaded:.1f}", f"{size / 1024:.0f}", f"{1e3 * built / loaded:,.0f} x"]
