"""What a graph's operands are filled with: random numbers, and where the numbers mean something, ones that make sense.

Sequences have their full length, pages are numbered, offsets of ragged tensors follow from their strides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plancache.cudnn import frontend, numbers
from plancache.errors import RunError

# Where the values of operations' inputs must be above zero: variances, and what these functions are defined for.
_POSITIVE_MODES = ("SQRT", "RSQRT", "LOG", "DIV", "POW", "RECIPROCAL")
_POSITIVE_PORTS = ("var", "scale", "epsilon")
_SIGNED, _POSITIVE = (-1.0, 1.0), (0.25, 1.0)
# A scale that is laid out in tiles takes more room than its shape says: each side is rounded up to a tile's.
_TILES = 8


@dataclass(frozen=True)
class Operand:
    """One tensor that has to be given when a graph is executed.

    Attributes:
        uid: which one.
        data_type: its type's name.
        size: bytes that it takes, with its strides.
        output: whether the graph writes it.
        by_value: whether the host gives it as a number.
        content: what it starts with, repeated over its size; empty for an output.
    """

    uid: int
    data_type: str
    size: int
    output: bool
    by_value: bool
    content: bytes


def operands(graph: Any) -> list[Operand]:
    """The operands of a graph that is ready, in ascending order of their uids.

    Raises:
        RunError: nothing is known that would make sense for one of them.
    """
    tensors = frontend.tensors(graph)
    made = {tensor.uid for node in frontend.nodes(graph) for tensor in node.outputs.values() if tensor is not None}
    uses = _uses(graph)
    offsets = {tensor.ragged_offset.uid: tensor for tensor in tensors.values() if tensor.ragged_offset is not None}
    found = []
    for uid in frontend.operands(graph):
        tensor = tensors[uid]
        data_type = tensor.get_data_type()
        name = "NOT_SET" if data_type is None else data_type.name
        size = numbers.span(name, _elements(tensor))
        content = b""
        if tensor.is_pass_by_value:
            content = numbers.scalar(name, 0.125)
        elif uid in offsets:
            content = _offsets(name, offsets[uid])
        elif uid not in made:
            content = _content(graph, tensors, name, tensor, uses.get(uid, []))
        found.append(Operand(uid, name, size, uid in made, bool(tensor.is_pass_by_value), content))
    return found


def _uses(graph: Any) -> dict[int, list[tuple[Any, str]]]:
    """By tensor: the operations that read it, and by which port."""
    uses: dict[int, list[tuple[Any, str]]] = {}
    for node in frontend.nodes(graph):
        for port, tensor in node.inputs.items():
            if tensor is not None:
                uses.setdefault(tensor.uid, []).append((node, port))
    return uses


def _elements(tensor: Any) -> int:
    """From the first to the last element."""
    dims = list(zip(tensor.dim, tensor.stride, strict=True))
    elements: int = 1 + sum((size - 1) * abs(stride) for size, stride in dims)
    if tensor.ragged_offset is not None:
        elements = max(elements, _ragged_step(tensor) * tensor.dim[0] + elements)
    reordering = getattr(tensor.reordering_type, "name", "NONE")
    return elements if reordering == "NONE" else max(elements, int(math.prod(tensor.dim))) * _TILES + 512


def _ragged_step(tensor: Any) -> int:
    """Elements from one sequence of full length to the next."""
    return int(tensor.dim[2] * tensor.stride[2]) if len(tensor.dim) > 2 else int(tensor.stride[0])


def _offsets(data_type: str, ragged: Any) -> bytes:
    step = _ragged_step(ragged) // max(1, ragged.ragged_offset_multiplier)
    return numbers.whole(data_type, (step * number for number in range(ragged.dim[0] + 1)))


def _content(graph: Any, tensors: Mapping[int, Any], data_type: str, tensor: Any, uses: list[tuple[Any, str]]) -> bytes:
    kinds = {node.node_type.name for node, _ in uses}
    if data_type in ("INT32", "INT64") and kinds != {"POINTWISE"}:
        return _meaning(data_type, tensor, uses)
    low, high = _SIGNED
    single = all(size == 1 for size in tensor.dim)
    if single or any(_needs_positive(node, port) for node, port in uses):
        low, high = _POSITIVE
    stats = [node for node, port in uses if port == "stats"]
    if stats:  # of a softmax: about what the row of scores sums up to
        low = math.log(max(1, stats[0].inputs["k"].dim[2]))
        high = low + 1.0
    return numbers.block(data_type, tensor.uid, low, high)


def _needs_positive(node: Any, port: str) -> bool:
    mode = node.params.get("mode")
    return str(getattr(mode, "name", mode)).upper() in _POSITIVE_MODES or any(
        part in port.lower() for part in _POSITIVE_PORTS
    )


def _meaning(data_type: str, tensor: Any, uses: list[tuple[Any, str]]) -> bytes:
    """Whole numbers that attention reads."""
    for node, port in uses:
        if not node.node_type.name.startswith("SDPA"):
            continue
        if port == "seq_len_q":
            return numbers.whole(data_type, [node.inputs["q"].dim[2]])
        if port == "seq_len_kv":
            longest = node.params.get("paged_attention_max_seq_len_kv") or node.inputs["k"].dim[2]
            return numbers.whole(data_type, [longest])
        if port.startswith("dropout_"):  # seed and offset
            return numbers.whole(data_type, [1])
        if port.startswith("paged_attention_") and port.endswith("_table"):
            pages = node.inputs["k" if "_k_" in port else "v"].dim[0]
            return numbers.whole(data_type, range(pages))
    port = uses[0][1] if uses else "an offset"
    kind = uses[0][0].node_type.name if uses else "no operation"
    raise RunError(
        "nothing is known that would make sense for an input of whole numbers",
        found=f"{port} of {kind}, tensor uid {tensor.uid}",
        expected="lengths, pages, seeds or offsets of attention, or an input of a pointwise operation",
    )
