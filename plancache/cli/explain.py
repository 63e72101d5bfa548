"""`plancache explain`: why a plan was not found."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from plancache import misses
from plancache.cache import PlanCache
from plancache.cli.device import named
from plancache.cli.listing import printable, write
from plancache.cli.place import Place
from plancache.cudnn import device as devices
from plancache.cudnn import environment
from plancache.errors import PlanCacheError
from plancache.explain import Explanation, value_text
from plancache.kernels import is_kernel
from plancache.keys import BuildSpec, PlanKey
from plancache.misses import Miss
from plancache.outcome import Reason
from plancache.settings import Settings

# The names of `explain --csv`.
FIELDS = ("key", "reason", "nearest", "part", "where", "field", "ours", "cached")


@click.command()
@click.argument("what", required=False)
@click.option("--device", "device_name", help="The device that a graph document is for. [default: the current GPU]")
@click.option("--json", "form", flag_value="json", help="Print JSON, one object for each explanation.")
@click.option("--csv", "form", flag_value="csv", help="CSV, a line for each field that differs.")
@click.pass_obj
def explain(place: Place, what: str | None, device_name: str | None, form: str | None) -> None:
    """Say why a plan was not found: the nearest stored one, and what differs.

    WHAT is a list of misses (as PLANCACHE_MISSES writes it), a file with a graph document (JSON), or the beginning of
    a key: of a miss in that list, or of a stored plan, whose nearest neighbour is then shown. Without it, the list
    that PLANCACHE_MISSES names.
    """
    with place.open("read-only") as cache:
        explanations = [_read(cache, miss) for miss in _wanted(cache, what, device_name)]
    if not explanations:
        raise click.ClickException(f"nothing to explain: no miss and no stored plan matches {what or 'the list'}")
    if form == "csv":
        write("csv", FIELDS, _lines(explanations))
        return
    for explanation in explanations:
        if form == "json":
            click.echo(json.dumps({**asdict(explanation), "reason": explanation.reason.name}))
        else:
            _print(explanation)


def _lines(explanations: list[Explanation]) -> Iterator[dict[str, Any]]:
    for one in explanations:
        head = {"key": one.key, "reason": one.reason.name, "nearest": one.nearest}
        nothing = dict.fromkeys(FIELDS)
        for difference in one.differences:
            yield {**head, **asdict(difference)}
        if not one.differences:
            yield {**nothing, **head}


def _wanted(cache: PlanCache, what: str | None, device_name: str | None) -> Iterator[Miss]:
    listed = Settings.read().misses
    if what is None:
        if listed is None:
            raise click.UsageError("say what to explain: a list of misses, a graph document, or a key")
        yield from _once(misses.read(listed))
    elif Path(what).is_file():
        yield from _from_file(Path(what), device_name)
    else:
        known = _once(misses.read(listed)) if listed is not None and listed.exists() else iter(())
        matching = [miss for miss in known if miss.key.hash.startswith(what)]
        yield from matching or _stored(cache, what)


def _once(found: Iterator[Miss]) -> Iterator[Miss]:
    """Each key once, the last one's reason."""
    yield from {miss.key.hash: miss for miss in found}.values()


def _from_file(file: Path, device_name: str | None) -> Iterator[Miss]:
    try:
        document = json.loads(file.read_text())
    except (OSError, ValueError):
        document = None
    if isinstance(document, dict) and {"arguments", "tensors", "nodes"} <= set(document):
        chosen = devices.device(named(device_name))
        spec = BuildSpec(("A", "FALLBACK"))
        key = PlanKey.of(document, chosen.document, environment.document(), spec.document())
        yield Miss(key, "native" if device_name is None else "deviceless", Reason.ABSENT, {})
        return
    found = list(_once(misses.read(file)))
    if not found:
        raise PlanCacheError(
            f"{file} holds nothing to explain",
            expected="a list of misses, or a graph document with arguments, tensors and nodes",
        )
    yield from found


def _stored(cache: PlanCache, prefix: str) -> Iterator[Miss]:
    for row in (listed.row for listed in cache.rows()):
        if row.key.startswith(prefix) and not is_kernel(row):
            parts = cache.documents(row)
            if parts is not None:
                key = PlanKey.of(parts["graph"], parts["device"], parts["environment"], parts["build"])
                yield Miss(key, row.route, Reason.FOUND, parts["labels"])


def _read(cache: PlanCache, miss: Miss) -> Explanation:
    """`_explained`, of a document that may be anything: it comes from a file that somebody may have written by hand."""
    try:
        return _explained(cache, miss)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise PlanCacheError(
            "a graph document cannot be read",
            found=f"{type(error).__name__}: {error}",
            expected="documents as PLANCACHE_MISSES and plancache show --json write them",
        ) from error


def _explained(cache: PlanCache, miss: Miss) -> Explanation:
    told = cache.explain_key(miss.key, miss.route, miss.labels, other_than=miss.reason is Reason.FOUND)
    if told.reason is miss.reason or told.reason is not Reason.FOUND:
        return told
    if miss.reason is Reason.ABSENT:  # the job that missed it has stored it: the next nearest says why it missed
        told = cache.explain_key(miss.key, miss.route, miss.labels, other_than=True)
    return replace(told, reason=miss.reason, detail="stored since")


def _print(explanation: Explanation) -> None:
    console = Console(highlight=False)
    console.print(Text(printable(str(explanation).splitlines()[0])), soft_wrap=True)
    if not explanation.differences:
        return
    table = Table("where", "field", "asked for", "cached", box=None, padding=(0, 2), pad_edge=False)
    for one in explanation.differences:
        # Text, as names of tensors are anything: no markup, and nothing that moves a terminal's cursor.
        cells = (one.where or one.part, one.field, value_text(one.ours), value_text(one.cached))
        table.add_row(*(Text(printable(cell)) for cell in cells))
    console.print(table)
