"""Writes the tables of docs/benchmarks.md from the results: `python -m benchmarks.page`.

What stands between `<!-- NAME -->` and `<!-- /NAME -->` is made of benchmarks/results/NAME.json and never edited by
hand; a test compares them. The rest of the page says what the tables mean.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, checks_table, markdown

PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"
# In the order of the page. `summary` is made of all of them.
NAMES = ("ready", "hit", "adoption", "memory", "store", "herd", "dynamic", "scale", "keys", "warm")
_BLOCK = re.compile(r"<!-- (\w+) -->\n.*?<!-- /\1 -->", re.DOTALL)


def results() -> dict[str, Any]:
    """The kept results by name."""
    return {name: json.loads((RESULTS / f"{name}.json").read_text()) for name in NAMES}


def rendered(page: str, kept: Mapping[str, Any]) -> str:
    """The page with its tables made anew."""

    def block(found: re.Match[str]) -> str:
        name = found[1]
        made = _summary(kept) if name == "summary" else _section(kept[name])
        return f"<!-- {name} -->\n{made}\n<!-- /{name} -->"

    return _BLOCK.sub(block, page)


def _summary(kept: Mapping[str, Any]) -> str:
    machines = list(dict.fromkeys(one["machine"] for one in kept.values()))
    dates = sorted({one["date"] for one in kept.values()})
    lines = [f"{'; '.join(machines)}. {' to '.join(dict.fromkeys((dates[0], dates[-1])))}.", ""]
    lines += ["| | first is | plancache takes |", "|---|---|---:|"]
    for one in kept.values():
        for rank in one["ranks"]:
            first = "**plancache**" if rank["first"] == "plancache" else rank["first"]
            lines.append(f"| {rank['what']} | {first} | {rank['times']:.2f} × |")
    over = [check["what"] for one in kept.values() for check in one["checks"] if not _kept(check)]
    lines += ["", f"Bounds that were not kept in this run: {'; '.join(over) or 'none'}."]
    return "\n".join(lines)


def _kept(check: Mapping[str, Any]) -> bool:
    over = check["ratio"] < check["bound"] if check["least"] else check["ratio"] > check["bound"]
    return not over


def _section(one: Mapping[str, Any]) -> str:
    parts = [f"`{one['command']}`, {one['date']}, {one['seconds']:.0f} s."]
    parts += [markdown(table) for table in one["tables"]]
    parts += ["\n".join(f"- {note}" for note in one["notes"])] if one["notes"] else []
    return "\n\n".join([*parts, checks_table(one["checks"])])


def main() -> None:
    """Write the page."""
    PAGE.write_text(rendered(PAGE.read_text(), results()))


if __name__ == "__main__":
    main()
