"""What listings share: JSON and CSV with stable names, sorting, and how numbers are shown to people."""

from __future__ import annotations

import csv
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import click
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from plancache.store.interface import Listed
from plancache.totals import Names

# The names of `ls --json` and `--csv`, in this order. New ones come at the end; none is ever taken away.
FIELDS = (
    *("key", "route", "operation", "device", "device_name", "environment", "cudnn", "engine", "name", "builder"),
    *("graph", "topology", "build", "driver", "frontend", "created", "seconds", "size", "stored", "hits", "used"),
)
# What listings are sorted by, and whether the largest comes first.
_SORTED = {
    **dict.fromkeys(("key", "op", "device", "cudnn", "engine", "builder"), False),
    **dict.fromkeys(("created", "seconds", "size", "hits", "used"), True),
}
_NARROWEST = 12
_WIDE = 120  # columns, from which on tables show more


def formats(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command `--json` and `--csv`, as one `form` argument: `json`, `csv` or None."""
    csv_ = click.option("--csv", "form", flag_value="csv", help="CSV with a line of names.")
    json_ = click.option("--json", "form", flag_value="json", help="One JSON object a line.")
    return json_(csv_(command))


def sorting(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command `--sort` and `--reverse`."""
    reverse = click.option("--reverse", is_flag=True, help="The other way round.")
    names = click.Choice(list(_SORTED))
    sort = click.option("--sort", type=names, help="By what: largest, newest or first letter first. [default: created]")
    return sort(reverse(command))


def sorted_by(rows: Sequence[Listed], names: Names, by: str | None, reverse: bool) -> list[Listed]:
    """Rows in the order that was asked for; those that are equal stay in the store's."""
    by = by or "created"

    def value(listed: Listed) -> Any:
        row = listed.row
        if by == "device":
            return names.device(row.device)
        if by == "cudnn":
            return [int(part) if part.isdecimal() else 0 for part in names.cudnn(row.environment).split(".")]
        return {"op": row.operation, "size": listed.stored, "hits": listed.hits, "used": listed.used}.get(
            by, getattr(row, by, None)
        )

    return sorted(rows, key=value, reverse=_SORTED[by] != reverse)


def document(listed: Listed, names: Names) -> dict[str, Any]:
    """A row as `--json` gives it."""
    fields = {
        **vars(listed.row),  # asdict copies deeply: half of what a long listing takes
        "device_name": names.device(listed.row.device),
        "cudnn": names.cudnn(listed.row.environment),
        "stored": listed.stored,
        "hits": listed.hits,
        "used": listed.used,
    }
    return {name: fields[name] for name in FIELDS}


def write(form: str, fields: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Print rows as JSON or CSV."""
    if form == "json":
        sys.stdout.writelines(f"{json.dumps({name: row[name] for name in fields})}\n" for row in rows)
        return
    out = csv.writer(sys.stdout, lineterminator="\n")
    out.writerow(fields)
    for row in rows:
        out.writerow(["" if row[name] is None else row[name] for name in fields])


def console() -> Console:
    """Where tables go: without colours where nobody looks at them."""
    return Console(highlight=False)


def is_wide(place: Console) -> bool:
    """Whether there is room for more than 80 columns."""
    return place.width >= _WIDE


def print_table(
    out: Console,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Sequence[str] = (),
    gives_way: Sequence[str] = (),
) -> None:
    """Print a table without lines; columns in `right` hold numbers.

    Where there is too little room, the columns of `gives_way` are cut, the first one first, and no others.
    """
    widths = [max(map(cell_len, (name, *(row[place] for row in rows)))) for place, name in enumerate(columns)]
    beyond = sum(widths) + len(widths) - 1 - out.width
    for name in gives_way:
        place = columns.index(name) if name in columns else -1
        if place >= 0 and beyond > 0:
            cut = min(beyond, max(0, widths[place] - _NARROWEST))
            widths[place] -= cut
            beyond -= cut

    def line(cells: Iterable[str]) -> str:
        sized = (_sized(cell, width, name in right) for cell, width, name in zip(cells, widths, columns, strict=True))
        return " ".join(sized).rstrip()

    out.print(Text(line(columns), style="bold"))
    # Line by line: rich takes a minute to lay out a table of 100,000.
    out.file.writelines(f"{line(map(printable, row))}\n" for row in rows)


def _sized(cell: str, width: int, right: bool) -> str:
    length = cell_len(cell)
    if length > width:
        return f"{set_cell_size(cell, width - 1)}…"
    return " " * (width - length) + cell if right else cell + " " * (width - length)


def printable(text: str) -> str:
    """A stored string as a terminal may have it: whoever wrote the cache must not move its cursor."""
    return "".join(character if character.isprintable() else "�" for character in text)


def age(when: float) -> str:
    """How long ago, as 5m or 3d."""
    seconds = max(0.0, time.time() - when)
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f}{unit}"
    return f"{seconds:.0f}s"


def size_text(number: float) -> str:
    """Bytes, as 1.5 MB."""
    for unit in ("bytes", "KB", "MB", "GB"):
        if number < 1024 or unit == "GB":
            return f"{number:.0f} {unit}" if unit == "bytes" else f"{number:.1f} {unit}"
        number /= 1024
    raise AssertionError


def duration(seconds: float) -> str:
    """A length of time, as 12.3 s, 4 min 10 s, 5 h 12 min or 3 d 4 h."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for (unit, length), (lower, part) in (
        (("d", 86400), ("h", 3600)),
        (("h", 3600), ("min", 60)),
        (("min", 60), ("s", 1)),
    ):
        if whole >= length:
            rest = whole % length // part
            return f"{whole // length} {unit} {rest} {lower}" if rest else f"{whole // length} {unit}"
    raise AssertionError
