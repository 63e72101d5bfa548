"""A graph document as lines that people read, and as one line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

_TYPES = {"HALF": "f16", "FLOAT": "f32", "DOUBLE": "f64", "BFLOAT16": "bf16", "BOOLEAN": "bool"}
_KINDS = {"CONV_FPROP": "conv", "CONV_DGRAD": "conv dgrad", "CONV_WGRAD": "conv wgrad"}
# The tensors that say how large an operation is; of others, its largest input.
_OPERANDS = {
    "MATMUL": ("A", "B"),
    "CONV_FPROP": ("image", "weight"),
    "CONV_DGRAD": ("loss", "filter"),
    "CONV_WGRAD": ("image", "loss"),
    "SDPA": ("q", "k"),
    "SDPA_BWD": ("q", "k"),
}
_SUMMARIZED = 8  # operations


def summary(graph: Mapping[str, Any]) -> str:
    """A graph in a few words: `conv 8×64×56×56 * 64×64×3×3 → relu, f16`.

    Operations in order, with the sizes of what goes in where that is no other operation's output, and the types of
    the graph's inputs.
    """
    tensors = {tensor["uid"]: tensor for tensor in graph["tensors"]}
    nodes = graph["nodes"]
    made = {uid for node in nodes for uid in node["outputs"].values()}
    words = [_words(node, tensors, made) for node in nodes[:_SUMMARIZED]]
    if len(nodes) > _SUMMARIZED:
        words.append(f"… {len(nodes) - _SUMMARIZED} more")
    types = [
        short_type(tensor["data_type"] or graph["arguments"].get("io_data_type"))
        for uid, tensor in tensors.items()
        if uid not in made and prod(tensor["dim"]) > 1
    ]
    return ", ".join([" → ".join(words), *(["/".join(dict.fromkeys(types))] if types else [])])


def _words(node: Mapping[str, Any], tensors: Mapping[int, Any], made: set[int]) -> str:
    kind = kind_of(node)
    given = [tensors[uid] for uid in node["inputs"].values() if uid not in made]
    ports = _OPERANDS.get(node["type"], ())
    operands = [tensors[node["inputs"][port]] for port in ports if port in node["inputs"]]
    if ports and operands:
        shown = [size_of(one) for one in operands if one["uid"] not in made]
        if node["type"].startswith("SDPA") and len(set(shown)) == 1:
            shown = shown[:1]
        left = "* " if shown and operands[0]["uid"] in made else ""
        causal = " causal" if _causal(node["params"]) else ""
        return f"{kind} {left}{' * '.join(shown)}".rstrip() + causal
    largest = max(given, key=lambda tensor: prod(tensor["dim"]), default=None)
    # Of an operation that goes on with another's output, the second operand's size is no news.
    return kind if largest is None or len(given) < len(node["inputs"]) else f"{kind} {size_of(largest)}".rstrip()


def _causal(params: Mapping[str, Any]) -> bool:
    return bool(params.get("use_causal_mask") or params.get("use_causal_mask_bottom_right"))


def kind_of(node: Mapping[str, Any]) -> str:
    """What an operation is called: its pointwise mode, or its type."""
    mode = node["params"].get("mode")
    if node["type"] == "POINTWISE" and mode is not None:
        return str(_value(mode)).lower()
    name = str(node["type"])
    return _KINDS.get(name, name.lower().replace("_", " "))


def size_of(tensor: Mapping[str, Any]) -> str:
    """A tensor's size, as 8×64×56×56; empty where it is inferred by building."""
    return "×".join(map(str, tensor["dim"]))


def short_type(value: Any) -> str:
    """A data type as people write it: f16, bf16, fp8_e4m3."""
    name = str(_value(value)) if value is not None else "?"
    return _TYPES.get(name, name.lower())


def listing(graph: Mapping[str, Any], labels: Mapping[int, str]) -> Iterator[str]:
    """The tensors that go in, the operations in order, and what comes out.

    Args:
        graph: a graph document, as a key holds it.
        labels: names of tensors by uid; those without one are called by their uid.
    """
    tensors = {tensor["uid"]: tensor for tensor in graph["tensors"]}
    made = {uid for node in graph["nodes"] for uid in node["outputs"].values()}
    for uid, tensor in tensors.items():
        if uid not in made:
            yield f"{_name(uid, labels)}: {_shape(tensor)}"
    for node in graph["nodes"]:
        outputs = ", ".join(_name(uid, labels) for uid in node["outputs"].values())
        inputs = [f"{port}={_name(uid, labels)}" for port, uid in node["inputs"].items()]
        params = [f"{name}={_value(value)}" for name, value in node["params"].items() if value not in (None, [])]
        yield f"{outputs} = {node['type'].lower()}({', '.join(inputs + params)})"
    for uid in sorted(made):
        if not tensors[uid]["is_virtual"]:
            yield f"→ {_name(uid, labels)}: {_shape(tensors[uid])}"


def _name(uid: int, labels: Mapping[int, str]) -> str:
    return labels.get(uid) or f"%{uid}"


def _shape(tensor: Mapping[str, Any]) -> str:
    dim, stride = ("x".join(map(str, tensor[name])) or "inferred" for name in ("dim", "stride"))
    return f"{dim} (strides {stride}), {_value(tensor['data_type'] or 'type inferred')}"


def _value(value: Any) -> str:
    if isinstance(value, Mapping) and set(value) == {"enum"}:
        return str(value["enum"]).rpartition(".")[2]
    return str(value)
