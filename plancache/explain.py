"""Why a lookup missed: the nearest stored entry, and exactly what differs, in the words of the frontend's API.

Pure: documents in, differences out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plancache.keys import Document
from plancache.outcome import Reason

Documents = Mapping[str, Document]
_ABSENT = object()


@dataclass(frozen=True)
class Difference:
    """One field that differs between what was asked for and what is stored.

    Attributes:
        part: `graph`, `device`, `environment`, `build`, `driver`, `frontend` or `route`.
        where: the tensor, node or argument, for people; empty where the field says it all.
        field: the field's name in the frontend's API.
        ours: its value in what was asked for; None where it has none.
        cached: its value in what is stored.
    """

    part: str
    where: str
    field: str
    ours: Any
    cached: Any

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        return f"{place}{self.field} {value_text(self.ours)}, cached {value_text(self.cached)}"


@dataclass(frozen=True)
class Explanation:
    """What a lookup would come to, and how far the nearest entry is.

    Attributes:
        key: the short key that was asked for; None where the graph has none.
        reason: why; FOUND if it would hit.
        detail: more about the reason.
        nearest: the short key of the nearest stored entry; None where nothing comparable is stored.
        differences: what keeps the nearest entry from being served.
    """

    key: str | None
    reason: Reason
    detail: str = ""
    nearest: str | None = None
    differences: tuple[Difference, ...] = ()

    def __str__(self) -> str:
        head = f"{self.key or 'no key'}: {self.reason}{f' ({self.detail})' if self.detail else ''}"
        if self.nearest is not None:
            head += f"; the nearest entry is {self.nearest}"
        elif self.reason is Reason.ABSENT:
            head += "; nothing comparable is stored"
        return "\n".join([head, *(f"  {one}" for one in self.differences)])


def differences(ours: Documents, cached: Documents, labels: Mapping[int, str]) -> Iterator[Difference]:
    """Every field in which two keys' documents differ: device, environment, build, then the graph.

    Args:
        ours: what was asked for, by part.
        cached: what is stored.
        labels: the names of our tensors by uid.
    """
    for part in ("device", "environment", "build"):
        yield from _fields(part, "", ours[part], cached[part])
    yield from _graphs(ours["graph"], cached["graph"], labels)


def _graphs(ours: Document, cached: Document, labels: Mapping[int, str]) -> Iterator[Difference]:
    yield from _fields("graph", "", ours["arguments"], cached["arguments"])
    here = {tensor["uid"]: tensor for tensor in ours["tensors"]}
    there = {tensor["uid"]: tensor for tensor in cached["tensors"]}
    for uid in sorted({*here, *there}):
        where = f"tensor {labels.get(uid) or uid}"
        if uid in here and uid in there:
            yield from _fields("graph", where, here[uid], there[uid])
        else:
            yield Difference("graph", where, "uid", _either(here, uid), _either(there, uid))
    pairs = max(len(ours["nodes"]), len(cached["nodes"]))
    for number in range(pairs):
        yield from _nodes(number, _at(ours["nodes"], number), _at(cached["nodes"], number))


def _nodes(number: int, ours: Document | None, cached: Document | None) -> Iterator[Difference]:
    kind = _kind(ours or cached or {})
    where = f"node {number} ({kind})"
    if ours is None or cached is None or ours["type"] != cached["type"]:
        yield Difference("graph", f"node {number}", "operation", ours and _kind(ours), cached and _kind(cached))
        return
    yield from _fields("graph", where, {"compute_data_type": ours["compute_data_type"]}, cached, ("compute_data_type",))
    for part in ("inputs", "outputs", "params"):
        yield from _fields("graph", where, ours[part], cached[part])


def _fields(
    part: str, where: str, ours: Document, cached: Document, names: Sequence[str] | None = None
) -> Iterator[Difference]:
    for name in names or sorted({*ours, *cached}):
        mine, theirs = ours.get(name, _ABSENT), cached.get(name, _ABSENT)
        # An int is not a float, nor a bool an int: they are other keys.
        if mine != theirs or type(mine) is not type(theirs):
            yield Difference(part, where, name, _value(mine), _value(theirs))


def _kind(node: Document) -> str:
    mode = node.get("params", {}).get("mode")
    return mode if node.get("type") == "POINTWISE" and isinstance(mode, str) else str(node.get("type", "?")).lower()


def _at(items: Sequence[Document], number: int) -> Document | None:
    return items[number] if number < len(items) else None


def _either(tensors: Mapping[int, Any], uid: int) -> int | None:
    return uid if uid in tensors else None


def _value(value: Any) -> Any:
    return None if value is _ABSENT else value


def value_text(value: Any) -> str:
    """A document's value as people write it: enum members by their name."""
    if value is None:
        return "not set"
    if isinstance(value, dict) and set(value) == {"enum"}:
        return str(value["enum"]).partition(".")[2]
    if isinstance(value, dict) and len(value) == 1:
        return value_text(next(iter(value.values())))
    if isinstance(value, list):
        return f"[{', '.join(value_text(item) for item in value)}]"
    return str(value)
