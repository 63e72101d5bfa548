"""A graph document as a drawing: DOT text, and SVG laid out here, so that no other program is needed.

Operations and the tensors that go in and out are boxes; what one operation gives to another is an edge with the
tensor's name. The SVG has layers from top to bottom: each box lies below everything that it is made from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from html import escape
from typing import Any

from plancache.cudnn.listing import kind_of, short_type, size_of

_CHARACTER, _LINE, _PAD = 7.0, 16.0, 12.0  # pixels, of the 12 pixel monospace face
_ACROSS, _DOWN = 22.0, 46.0
_SWEEPS = 6
STYLE = """
.graph text { font: 12px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; fill: #1d2530; }
.graph .small { font-size: 11px; fill: #5a6675; }
.graph rect { fill: #ffffff; stroke: #8a96a6; }
.graph .operation rect { fill: #dfeafb; stroke: #3f74c4; }
.graph .edge { fill: none; stroke: #8a96a6; stroke-width: 1.3; }
.graph .tip { fill: #8a96a6; }
"""
DARK_STYLE = """
.graph text { fill: #e6ebf2; }
.graph .small { fill: #a3afbf; }
.graph rect { fill: #1b222c; stroke: #6c7889; }
.graph .operation rect { fill: #1e3352; stroke: #6ea1ee; }
.graph .edge { stroke: #7d899a; }
.graph .tip { fill: #7d899a; }
"""


@dataclass
class Box:
    """An operation, a tensor that goes in or comes out, or (without text) a point that an edge goes through."""

    name: str
    kind: str
    lines: tuple[str, ...] = ()
    layer: int = 0
    x: float = 0.0
    above: list[Box] = field(default_factory=list)
    below: list[Box] = field(default_factory=list)

    @property
    def width(self) -> float:
        return max((_CHARACTER * len(line) for line in self.lines), default=0.0) + (2 * _PAD if self.lines else 8.0)

    @property
    def height(self) -> float:
        return _LINE * len(self.lines) + _PAD if self.lines else 0.0


@dataclass
class Edge:
    """From a box to one that takes what it gives; `label` is the tensor's, between two operations."""

    source: Box
    target: Box
    label: str = ""
    points: list[Box] = field(default_factory=list)


def dot(graph: Mapping[str, Any], labels: Mapping[int, str]) -> str:
    """The graph in Graphviz's language."""
    boxes, edges = _read(graph, labels)
    lines = ["digraph plan {", '  node [shape=box, fontname="monospace", fontsize=11];']
    for box in boxes:
        style = ', style="filled", fillcolor="#dfeafb"' if box.kind == "operation" else ', style="rounded"'
        lines.append(f"  {box.name} [label={_quoted(box.lines)}{style}];")
    for edge in edges:
        label = f" [label={_quoted((edge.label,))}]" if edge.label else ""
        lines.append(f"  {edge.source.name} -> {edge.target.name}{label};")
    return "\n".join([*lines, "}", ""])


def svg(graph: Mapping[str, Any], labels: Mapping[int, str], styled: bool = True) -> str:
    """The graph as an SVG element; `styled`: with its style sheet, for a file of its own."""
    boxes, edges = _read(graph, labels)
    layers = _layered(boxes, edges)
    width, tops, height = _placed(layers)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="graph" viewBox="0 0 {width:.0f} {height:.0f}"'
        f' width="{width:.0f}" height="{height:.0f}" role="img" aria-label="graph">'
    ]
    if styled:
        dark = f"@media (prefers-color-scheme: dark) {{{DARK_STYLE}svg {{ background: #12171e; }}}}"
        parts.append(f"<style>{STYLE}{dark}</style>")
    for edge in edges:
        parts += _drawn_edge(edge, tops)
    for box in boxes:
        parts += _drawn_box(box, tops[box.layer])
    return "\n".join([*parts, "</svg>", ""])


def _read(graph: Mapping[str, Any], labels: Mapping[int, str]) -> tuple[list[Box], list[Edge]]:
    tensors = {tensor["uid"]: tensor for tensor in graph["tensors"]}
    made: dict[int, Box] = {}
    boxes, edges = [], []
    for number, node in enumerate(graph["nodes"]):
        box = Box(f"n{number}", "operation", _shortened((kind_of(node), *_params(node))))
        boxes.append(box)
        made |= dict.fromkeys(node["outputs"].values(), box)
    inputs: dict[int, Box] = {}
    for number, node in enumerate(graph["nodes"]):
        for uid in dict.fromkeys(node["inputs"].values()):
            target = boxes[number]
            if uid in made:
                label = _whole(labels.get(uid) or "")
                # The frontend's own names (`relu.0::OUT_0`) say what the drawing shows.
                edges.append(Edge(made[uid], target, "" if "::" in label else label))
                continue
            if uid not in inputs:
                inputs[uid] = Box(f"t{uid}", "tensor", _shortened(_tensor(tensors[uid], uid, labels)))
            edges.append(Edge(inputs[uid], target))
    outputs = []
    for uid, source in made.items():
        if not tensors[uid]["is_virtual"]:
            outputs.append(Box(f"t{uid}", "tensor", _shortened(_tensor(tensors[uid], uid, labels))))
            edges.append(Edge(source, outputs[-1]))
    return [*inputs.values(), *boxes, *outputs], edges


def _params(node: Mapping[str, Any]) -> tuple[str, ...]:
    shown = []
    for name, value in node["params"].items():
        if name != "mode" and isinstance(value, bool | int | float | str | list) and value not in (False, [], ""):
            text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
            shown.append(name if value is True else f"{name} {text}")
    return tuple(shown[:4])


def _tensor(tensor: Mapping[str, Any], uid: int, labels: Mapping[int, str]) -> tuple[str, ...]:
    kind = short_type(tensor["data_type"]) if tensor["data_type"] else ""
    size = f"{size_of(tensor)} {kind}".strip()
    return (labels.get(uid) or f"%{uid}", size) if size else (labels.get(uid) or f"%{uid}",)


def _shortened(lines: tuple[str, ...]) -> tuple[str, ...]:
    shown = (_whole(line) for line in lines)
    return tuple(line if len(line) <= 48 else f"{line[:47]}…" for line in shown)


def _whole(text: str) -> str:
    """A name without what XML has no place for, such as control characters: one would spoil the whole file."""
    return "".join(character if character.isprintable() else "�" for character in text)


# ------------------------------------------------------------ layout


def _layered(boxes: list[Box], edges: list[Edge]) -> list[list[Box]]:
    """Boxes by layer, in an order that crosses few edges; an edge over several layers goes through points."""
    given: dict[str, list[Edge]] = {}
    for edge in edges:
        given.setdefault(edge.target.name, []).append(edge)
    for _ in range(len(boxes)):  # the longest way from the top; nodes come in order, so that it settles at once
        changed = False
        for box in boxes:
            layer = max((edge.source.layer + 1 for edge in given.get(box.name, ())), default=0)
            changed, box.layer = changed or layer != box.layer, layer
        if not changed:
            break
    for box in boxes:  # what goes in lies right above what takes it
        taken = [edge.target.layer for edge in edges if edge.source is box]
        if box.name not in given and taken:
            box.layer = min(taken) - 1
    layers: list[list[Box]] = [[] for _ in range(1 + max((box.layer for box in boxes), default=0))]
    for box in boxes:
        layers[box.layer].append(box)
    for number, edge in enumerate(edges):
        edge.points = [edge.source]
        for layer in range(edge.source.layer + 1, edge.target.layer):
            edge.points.append(Box(f"p{number}-{layer}", "point", layer=layer))
            layers[layer].append(edge.points[-1])
        edge.points.append(edge.target)
        for upper, lower in zip(edge.points, edge.points[1:], strict=False):
            upper.below.append(lower)
            lower.above.append(upper)
    _ordered(layers)
    return layers


def _ordered(layers: list[list[Box]]) -> None:
    for sweep in range(_SWEEPS):
        downward = sweep % 2 == 0
        for layer in layers if downward else reversed(layers):
            place = {box.name: index for row in layers for index, box in enumerate(row)}

            def middle(box: Box, down: bool = downward, place: dict[str, int] = place) -> float:
                near = box.above if down else box.below
                return sum(place[one.name] for one in near) / len(near) if near else place[box.name]

            layer.sort(key=middle)


def _placed(layers: list[list[Box]]) -> tuple[float, list[float], float]:
    """Give every box its place; the whole width, the top of each layer, the whole height."""
    for layer in layers:
        left = 0.0
        for box in layer:
            box.x = left + box.width / 2
            left += box.width + _ACROSS
    for sweep in range(2 * _SWEEPS):
        for layer in layers if sweep % 2 == 0 else reversed(layers):
            _pulled(layer, sweep % 2 == 0)
    left = min((box.x - box.width / 2 for layer in layers for box in layer), default=0.0) - _PAD
    right = max((box.x + box.width / 2 for layer in layers for box in layer), default=0.0) + _PAD
    tops, top = [], _PAD
    for layer in layers:
        tops.append(top)
        top += max((box.height for box in layer), default=0.0) + _DOWN
        for box in layer:
            box.x -= left
    return right - left, tops, top - _DOWN + _PAD


def _pulled(layer: list[Box], down: bool) -> None:
    """Move boxes towards the middle of their neighbours, as far as those beside them let them."""
    wanted = []
    for box in layer:
        near = (box.above if down else box.below) or box.above or box.below
        wanted.append(sum(one.x for one in near) / len(near) if near else box.x)
    edge = float("-inf")
    for box, x in zip(layer, wanted, strict=True):
        box.x = max(x, edge + box.width / 2)
        edge = box.x + box.width / 2 + _ACROSS
    shift = sum(x - box.x for box, x in zip(layer, wanted, strict=True)) / max(len(layer), 1)
    for box in layer:
        box.x += shift


# ------------------------------------------------------------ SVG


def _drawn_box(box: Box, top: float) -> Iterator[str]:
    left = box.x - box.width / 2
    radius = 3 if box.kind == "operation" else 12
    yield f'<g class="{box.kind}"><rect x="{left:.1f}" y="{top:.1f}" width="{box.width:.1f}"'
    yield f'  height="{box.height:.1f}" rx="{radius}"/>'
    for number, line in enumerate(box.lines):
        y = top + _PAD / 2 + _LINE * (number + 0.75)
        small = ' class="small"' if number else ""
        yield f'<text x="{box.x:.1f}" y="{y:.1f}" text-anchor="middle"{small}>{escape(line)}</text>'
    yield "</g>"


def _drawn_edge(edge: Edge, tops: list[float]) -> Iterator[str]:
    first, last = edge.points[0], edge.points[-1]
    x, y = first.x, tops[first.layer] + first.height
    path = [f"M{x:.1f} {y:.1f}"]
    for box in edge.points[1:]:
        end = tops[box.layer] - (5.0 if box is last else 0.0)
        bend = (y + end) / 2
        path.append(f"C{x:.1f} {bend:.1f} {box.x:.1f} {bend:.1f} {box.x:.1f} {end:.1f}")
        x, y = box.x, end
    yield f'<path class="edge" d="{" ".join(path)}"/>'
    yield f'<path class="tip" d="M{x - 4:.1f} {y - 2:.1f} L{x + 4:.1f} {y - 2:.1f} L{x:.1f} {y + 5:.1f} Z"/>'
    if edge.label:
        near = edge.points[1]
        middle_x = (first.x + near.x) / 2 + 6
        middle_y = (tops[first.layer] + first.height + tops[near.layer]) / 2 + 4
        yield f'<text class="small" x="{middle_x:.1f}" y="{middle_y:.1f}">{escape(edge.label)}</text>'


def _quoted(lines: tuple[str, ...]) -> str:
    text = "\\n".join(line.replace("\\", "\\\\").replace('"', '\\"') for line in lines)
    return f'"{text}"'
