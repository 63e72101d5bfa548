"""A graph, as it was declared, as a canonical document.

Everything that decides about the plan is in it: nodes in order with every parameter, tensors with every attribute,
and the constructor's arguments. Left out are names (labels), whether a uid was chosen or given, the handle, the
device, how CUDA graphs are retained, and the kernel cache itself (that there is one counts). A field that a newer
frontend adds to its tensors is taken in by itself. A value that has no exact encoding, such as a callback, makes the
graph not keyable.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import index
from typing import Any

from plancache.cudnn import frontend
from plancache.cudnn.device import Device
from plancache.errors import DeviceError
from plancache.keys import BuildSpec, Document

# Of a tensor: labels and process-local things.
_TENSOR_LEFT_OUT = frozenset({"name", "owner", "uid_assigned"})
_KNOWN_FIELDS = 17  # the contract test pins them
_type_documents: dict[Any, Any] = {None: None}
# Of the constructor: labels, and what is the row's device and route instead.
_ARGUMENTS_LEFT_OUT = frozenset({"name", "handle", "device_property", "sm_version"})
# What the frontend takes where none are given; a contract test pins it.
_DEFAULT_HEURISTICS = ("A", "FALLBACK")
_PLAIN = frozenset({type(None), bool, float, str})
_BIG = 2**63


class NotKeyableError(Exception):
    """A value has no exact encoding; the text says where and what."""


def document(graph: Any, device: Device) -> Document:
    """The canonical document of a declared graph.

    Args:
        graph: a graph that was not validated yet.
        device: what it will be built for; decides whether `sm_count` says anything.

    Raises:
        NotKeyableError: the graph holds a value that has no exact encoding.
        DeviceError: the graph's `sm_version` contradicts the device.
    """
    try:
        return {
            "arguments": _arguments(frontend.arguments(graph), device),
            "tensors": [_tensor(tensor) for tensor in frontend.tensors(graph).values()],
            "nodes": [_node(node) for node in frontend.nodes(graph)],
        }
    except (TypeError, frontend.SharedUidError) as error:  # a dim or stride that is no whole number
        raise NotKeyableError(str(error)) from error


def build_spec(
    graph: Any,
    heuristics: Any,
    policy: Any,
    plan: tuple[int, Mapping[Any, int]] | None,
    late_workspace_limit: bool = False,
) -> BuildSpec:
    """How the plan of `graph` will be chosen. `heuristics` None is the frontend's default list."""
    engine, knobs = plan or (None, {})
    filters = frontend.filters(graph)
    return BuildSpec(
        heuristics=_names(heuristics) if plan is None else (),
        policy="HEURISTICS_CHOICE" if policy is None else policy.name,
        deselected_engines=filters.deselected_engines,
        workspace_limit=filters.workspace_limit,
        late_workspace_limit=late_workspace_limit and filters.workspace_limit is not None,
        notes=tuple((kind, note.name, keep) for kind, note, keep in filters.notes),
        engine=engine,
        knobs=tuple((knob.name, int(value)) for knob, value in knobs.items()),
    )


def labels(graph: Any) -> dict[int, str]:
    """The tensors' names by uid: no part of the key, kept so that people can be told which tensor is meant."""
    return {uid: tensor.name for uid, tensor in frontend.tensors(graph).items()}


def _names(heuristics: Any) -> tuple[str, ...]:
    return tuple(mode.name for mode in heuristics) if heuristics else _DEFAULT_HEURISTICS


def _arguments(given: Mapping[str, Any], device: Device) -> dict[str, Any]:
    version = given.get("sm_version")
    if version is not None and version != device.sm_version:
        raise DeviceError(
            "the graph's sm_version is not its device's",
            field="sm_version",
            found=version,
            expected=f"{device.sm_version} ({device.name})",
            todo="Leave sm_version out, or take the device's deviceVer. cuDNN itself ignores a wrong one silently.",
        )
    kept = {}
    for name in sorted(given):
        value = given[name]
        if name in _ARGUMENTS_LEFT_OUT or (name == "sm_count" and value == device.sm_count):
            continue
        if name == "kernel_cache":
            value = True
        elif name == "cuda_graph_retention":
            continue  # how captures are kept at run time: no part of the plan, and given to the container anew
        elif name.endswith("_data_type"):
            kept[name] = _type_document(value)
            continue
        kept[name] = _encoded(value, name)
    return kept


def _tensor(tensor: Any) -> dict[str, Any]:
    """A tensor's fields in alphabetical order, with its ragged offset as a uid."""
    if len(vars(tensor)) != _KNOWN_FIELDS:
        return _any_tensor(tensor)
    ragged, value = tensor.ragged_offset, tensor.pass_by_value
    reordering, scalar = tensor.reordering_type, tensor.scalar_type
    return {
        "alignment_value": tensor.alignment_value,
        "data_type": _type_document(tensor.data_type),
        "dim": list(map(index, tensor.dim)),
        "dim_assigned": tensor.dim_assigned,
        "is_pass_by_value": tensor.is_pass_by_value,
        "is_virtual": tensor.is_virtual,
        "pass_by_value": None if value is None else _encoded(value, f"tensor {tensor.name!r}, pass_by_value"),
        "ragged_offset": None if ragged is None else ragged.uid,
        "ragged_offset_multiplier": tensor.ragged_offset_multiplier,
        "reordering_type": None if reordering is None else _encoded(reordering, "reordering_type"),
        "scalar_type": None if scalar is None else _encoded(scalar, "scalar_type"),
        "stride": list(map(index, tensor.stride)),
        "stride_assigned": tensor.stride_assigned,
        "uid": tensor.uid,
    }


def _any_tensor(tensor: Any) -> dict[str, Any]:
    """The same for a frontend whose tensors have more fields: whatever they are, they count."""
    fields = {**vars(tensor), "data_type": _data_type(tensor.data_type)}
    fields["ragged_offset"] = None if tensor.ragged_offset is None else tensor.ragged_offset.uid
    kept = sorted(set(fields) - _TENSOR_LEFT_OUT)
    return {name: _encoded(fields[name], f"tensor {tensor.name!r}, {name}") for name in kept}


def _node(node: Any) -> dict[str, Any]:
    params = node.params
    return {
        "type": node.node_type.name,
        "compute_data_type": _type_document(node.compute_data_type),
        "inputs": {port: tensor.uid for port, tensor in sorted(node.inputs.items())},
        "outputs": {port: tensor.uid for port, tensor in sorted(node.outputs.items())},
        "params": {
            name: value if type(value := params[name]) in _PLAIN else _encoded(value, f"node {node.name!r}, {name}")
            for name in sorted(params)
        },
    }


def _type_document(value: Any) -> Any:
    try:
        return _type_documents[value]
    except (KeyError, TypeError):
        document = _encoded(_data_type(value), "data_type")
        if hasattr(type(value), "__members__"):
            _type_documents[value] = document
        return document


def _data_type(value: Any) -> Any:
    # A framework's data type says the same as cuDNN's own, which is what the frontend lowers it to.
    if value is None or hasattr(type(value), "__members__"):
        return value
    try:
        return frontend.library_type(value)
    except Exception as error:
        raise NotKeyableError(f"data type {value!r}: {error}") from error


def _encoded(value: Any, where: str) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is int:
        return value if -_BIG <= value < _BIG else {"integer": str(value)}
    if hasattr(kind, "__members__"):
        return {"enum": f"{kind.__name__}.{value.name}"}
    if kind in (list, tuple):
        return [_encoded(item, where) for item in value]
    if kind is dict:
        if not all(isinstance(name, str) for name in value):
            raise NotKeyableError(f"{where}: a dict with keys that are not strings")
        return {"dict": {name: _encoded(value[name], where) for name in sorted(value)}}
    if kind is slice:
        return {"slice": [_encoded(part, where) for part in (value.start, value.stop, value.step)]}
    if kind.__module__ == "numpy" and getattr(value, "shape", None) == ():
        return _encoded(value.item(), where)
    raise NotKeyableError(f"{where}: a {kind.__module__}.{kind.__qualname__} has no exact encoding")
