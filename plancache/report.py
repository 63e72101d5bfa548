"""One self-contained page about a cache: it loads nothing, and runs no script and no style but its own.

Whatever was stored may have been written by somebody else. Stored strings reach the page escaped, or as JSON that its
script puts in as text; a Content-Security-Policy with the hashes of script and style keeps all else from running.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from plancache import __version__
from plancache.cudnn import drawing
from plancache.errors import RecordError
from plancache.kernels import is_kernel
from plancache.settings import PACKAGE
from plancache.store.interface import Listed
from plancache.totals import Names, Totals, reason_text
from plancache.upkeep import Upkeep

LIMIT = 5_000
_DRAWN, _DRAWN_BYTES = 150, 3 << 20
_BARS, _DAYS = 10, 60
# Name, title and kind of what the table shows; the script knows the kinds.
_COLUMNS = (
    ("key", "key", "key"),
    ("operation", "operation", "wide"),
    ("device", "device", "text"),
    ("cudnn", "cuDNN", "text"),
    ("engine", "engine", "text"),
    ("route", "route", "text"),
    ("builder", "builder", "part"),
    ("seconds", "build s", "seconds"),
    ("stored", "KB", "size"),
    ("hits", "hits", "count"),
    ("used", "last used", "time"),
    ("created", "built", "time"),
)
_AGES = (("hour", 3600.0), ("day", 86400.0), ("week", 7 * 86400.0), ("month", 30 * 86400.0), ("year", 365 * 86400.0))


def page(cache: Upkeep, limit: int = LIMIT) -> str:
    """The page about what is in `cache`, with the newest `limit` plans listed.

    Raises:
        StoreError: the cache cannot be read.
    """
    every = list(cache.rows())
    plans = [listed for listed in every if not is_kernel(listed.row)]
    shown = plans[:limit]
    names, totals = cache.names(plans), cache.totals()
    graphs = _graphs(cache, shown)
    style = _file("report.css") + drawing.STYLE + f"@media (prefers-color-scheme: dark) {{{drawing.DARK_STYLE}}}"
    script = _file("report.js")
    return _filled(
        {
            "policy": _policy(script, style),
            "style": style,
            "script": script,
            "directory": escape(str(cache.directory)),
            "made": escape(f"{time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC, plancache {__version__}"),
            "tiles": _tiles(totals),
            "charts": _charts(plans, totals, names),
            "listed": _listed(len(shown), len(plans)),
            "drawn": f"{len(graphs)} of the graphs of these plans, one of each kind and size of graph.",
            "graphs": "\n".join(text for _, text in graphs.values()),
            "data": _data(shown, names, {graph: name for graph, (name, _) in graphs.items()}),
        }
    )


def _filled(parts: Mapping[str, str]) -> str:
    # In one pass: what is filled in is not looked at again, whatever it says.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _file("report.html"))


def _file(name: str) -> str:
    return (PACKAGE / "web" / name).read_text(encoding="utf-8")


def _policy(script: str, style: str) -> str:
    def allowed(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    return (
        f"default-src 'none'; script-src {allowed(script)}; style-src {allowed(style)};"
        " base-uri 'none'; form-action 'none'"
    )


def _listed(shown: int, every: int) -> str:
    if shown == every:
        return f"All {every:,} plans."
    return f"The newest {shown:,} of {every:,} plans; tiles and charts count all of them."


def _data(rows: Sequence[Listed], names: Names, drawings: Mapping[str, str]) -> str:
    columns = [{"name": name, "title": title, "kind": kind} for name, title, kind in _COLUMNS]
    lines = [[*_line(listed, names), drawings.get(listed.row.graph)] for listed in rows]
    text = json.dumps({"columns": columns, "rows": lines}, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    # Nothing in it can end the element that it is in.
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _line(listed: Listed, names: Names) -> list[Any]:
    row = listed.row
    return [
        row.key,
        row.operation or row.name,
        names.device(row.device).removeprefix("NVIDIA "),
        names.cudnn(row.environment),
        row.name.split("_")[0],
        row.route,
        row.builder,
        round(row.seconds, 3),
        listed.stored,
        listed.hits,
        round(listed.used),
        round(row.created),
    ]


# ------------------------------------------------------------ tiles and charts


def _tiles(totals: Totals) -> str:
    asked = totals.hits + totals.missed
    since = "nothing counted yet" if totals.since is None else f"since {_day(totals.since)}"
    reasons = sorted(totals.misses.items(), key=lambda one: -one[1])
    tiles = (
        ("Plans", f"{totals.plans:,}", f"and {totals.kernels:,} kernels"),
        ("Size", _bytes(totals.bytes), "records on disk"),
        ("Hits", f"{totals.hits:,}", since),
        ("Hit rate", f"{totals.hits / asked:.0%}" if asked else "–", f"of {asked:,} graphs"),
        ("Misses", f"{totals.missed:,}", ", ".join(f"{count:,} {reason_text(name)}" for name, count in reasons[:2])),
        ("Build time saved", _time(totals.saved), f"{_time(totals.spent)} spent on building"),
    )
    return "\n".join(
        f'<div class="tile"><div class="name">{escape(name)}</div><div class="value">{escape(value)}</div>'
        f'<div class="note">{escape(note)}</div></div>'
        for name, value, note in tiles
    )


def _charts(plans: Sequence[Listed], totals: Totals, names: Names) -> str:
    operations = Counter(_family(listed.row.operation) for listed in plans)
    by_device = Counter(names.device(listed.row.device) for listed in plans)
    sizes = dict.fromkeys([*(f"last {name}" for name, _ in _AGES), "older"], 0)
    for listed in plans:
        sizes[_age(listed.row.created)] += listed.stored
    charts = (
        ("Plans by operation", _bars(_most(operations), lambda value: f"{value:,.0f}")),
        ("Plans by device", _bars(_most(by_device), lambda value: f"{value:,.0f}")),
        ("Build time saved, by day (UTC)", _columns(totals.saved_by_day)),
        ("Size of plans, by age", _bars(list(sizes.items()), _bytes)),
    )
    return "\n".join(f'<figure class="chart"><h3>{escape(title)}</h3>{svg}</figure>' for title, svg in charts)


def _family(operation: str) -> str:
    """The first operation without its sizes."""
    words = re.split(r" → |, | causal", operation)[0].split()
    return " ".join(word for word in words if not re.match(r"[\d*]", word)) or "not known"


def _age(when: float) -> str:
    age = time.time() - when
    return next((f"last {name}" for name, length in _AGES if age < length), "older")


def _most(counts: Counter[str]) -> list[tuple[str, int]]:
    most = counts.most_common(_BARS)
    rest = sum(counts.values()) - sum(count for _, count in most)
    return [*most, *([(f"{len(counts) - len(most)} others", rest)] if rest else [])]


def _bars(values: Iterable[tuple[str, float]], text: Any) -> str:
    lines = list(values)
    if not any(value for _, value in lines):
        return _nothing()
    most, parts = max(value for _, value in lines), []
    for number, (name, value) in enumerate(lines):
        y, width = 24 * number, max(2.0 if value else 0.0, 240 * value / most)
        cut = name if len(name) <= 24 else f"{name[:23]}…"
        parts.append(
            f'<g><title>{escape(name)}: {escape(text(value))}</title><text x="0" y="{y + 16}">{escape(cut)}</text>'
            f'<rect x="160" y="{y + 4}" width="{width:.1f}" height="16" rx="2"/>'
            f'<text class="number" x="{166 + width:.1f}" y="{y + 16}">{escape(text(value))}</text></g>'
        )
    return f'<svg viewBox="0 0 480 {24 * len(lines)}" role="img">{"".join(parts)}</svg>'


def _columns(values: Mapping[float, float]) -> str:
    """One column a day, from the first day that is counted, or the last sixty, until the last."""
    if not any(values.values()):
        return _nothing()
    last = max(values)
    first = max(min(values), last - 86400.0 * (_DAYS - 1))
    days = [first + 86400.0 * number for number in range(round((last - first) / 86400.0) + 1)]
    most = max(values.get(day, 0.0) for day in days) or 1.0
    step = min(480 / len(days), 48.0)
    parts = ['<line class="axis" x1="0" y1="124" x2="480" y2="124"/>']
    for number, day in enumerate(days):
        value = values.get(day, 0.0)
        height = max(2.0 if value else 0.0, 100 * value / most)
        parts.append(
            f"<g><title>{_day(day)}: {_time(value)}</title>"
            f'<rect x="{step * number + 1:.1f}" y="{124 - height:.1f}" width="{max(step - 2, 1):.1f}"'
            f' height="{height:.1f}" rx="2"/></g>'
        )
    parts.append(f'<text class="number" x="0" y="14">{_time(most)} on the best day</text>')
    parts.append(f'<text class="number" x="0" y="142">{_day(days[0])}</text>')
    if len(days) > 1:
        parts.append(f'<text class="number" x="480" y="142" text-anchor="end">{_day(days[-1])}</text>')
    return f'<svg viewBox="0 0 480 148" role="img">{"".join(parts)}</svg>'


def _nothing() -> str:
    return '<p class="quiet">Nothing yet.</p>'


# ------------------------------------------------------------ graphs


def _graphs(cache: Upkeep, rows: Sequence[Listed]) -> dict[str, tuple[str, str]]:
    """Drawings by graph hash, the newest first: the element's id, and the element."""
    drawn: dict[str, tuple[str, str]] = {}
    taken = 0
    for row in (listed.row for listed in rows):
        if len(drawn) == _DRAWN or taken > _DRAWN_BYTES:
            break
        if row.graph in drawn:
            continue
        try:
            parts = cache.documents(row)
        except RecordError:
            continue
        if parts is None:
            continue
        labels = {int(uid): str(label) for uid, label in parts["labels"].items()}
        try:
            picture = drawing.svg(parts["graph"], labels, styled=False)
        except (KeyError, TypeError, ValueError, AttributeError):  # a document that a later version wrote
            continue
        name = f"g{len(drawn)}"
        title = escape(f"{row.operation or row.name} · {row.builder or row.key[:12]}")
        text = f'<details id="{name}"><summary>{title}</summary><div class="drawing">{picture}</div></details>'
        drawn[row.graph] = name, text
        taken += len(text)
    return drawn


def _day(when: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(when))


def _bytes(number: float) -> str:
    for unit in ("bytes", "KB", "MB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "bytes" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} GB"


def _time(seconds: float) -> str:
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.1f} s"
