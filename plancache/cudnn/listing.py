"""A graph document as lines that people read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


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
