"""A graph from its canonical document: what `rewarm` builds, and the proof that a document lacks nothing."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from plancache.cudnn import frontend, libraries
from plancache.cudnn.device import Device
from plancache.errors import PlanCacheError
from plancache.keys import Document


class DocumentError(PlanCacheError):
    """A graph document that this frontend cannot make a graph of: it names what is not there, or is malformed."""


def graph(
    document: Document,
    *,
    device: Device | None = None,
    handle: Any = None,
    labels: Mapping[int, str] | None = None,
) -> Any:
    """A declared graph whose own document equals `document`, byte for byte.

    Args:
        document: what `plancache.cudnn.graph.document` gave, or `PlanKey.documents["graph"]`.
        device: build for this device, with no GPU needed.
        handle: build with this handle; without either, for the current device.
        labels: names of tensors by uid, which a document lacks; the others get names of their own.

    Raises:
        DocumentError: the document is malformed, or names something that this frontend does not have.

    """
    try:
        return _graph(document, device, handle, labels or {})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise unreadable("graph", error) from error


def unreadable(kind: str, error: Exception) -> DocumentError:
    """The error for a document of this kind."""
    return DocumentError(
        f"the {kind} document cannot be turned into a graph",
        found=f"{type(error).__name__}: {error}",
        expected="a document that this frontend, or an older one, could have written",
    )


def _graph(document: Document, device: Device | None, handle: Any, labels: Mapping[int, str]) -> Any:
    module = libraries.cudnn()
    arguments = {name: _decoded(value) for name, value in document["arguments"].items()}
    if arguments.pop("kernel_cache", False):
        arguments["kernel_cache"] = module.create_kernel_cache()
    if device is not None:
        arguments |= {"device_property": device.native, "sm_version": device.sm_version}
    made = module.pygraph(handle=handle, **arguments)
    tensors: dict[int, Any] = {}
    for fields in document["tensors"]:
        plain = {name: _decoded(value) for name, value in fields.items() if name != "ragged_offset"}
        uid = plain["uid"]
        tensors[uid] = module.Tensor(name=labels.get(uid) or f"tensor_{uid}", uid_assigned=True, **plain)
    for fields in document["tensors"]:
        if fields["ragged_offset"] is not None:
            tensors[fields["uid"]].ragged_offset = tensors[fields["ragged_offset"]]
    nodes = [_node(module, fields, number, tensors) for number, fields in enumerate(document["nodes"])]
    frontend.assemble(made, tensors, nodes)
    return made


def _node(module: Any, fields: Mapping[str, Any], number: int, tensors: Mapping[int, Any]) -> Any:
    kind = module.NodeType[fields["type"]]
    node = module.Node(f"{kind.name.lower()}.{number}", kind, _decoded(fields["compute_data_type"]))
    node.inputs = {port: tensors[uid] for port, uid in fields["inputs"].items()}
    node.outputs = {port: tensors[uid] for port, uid in fields["outputs"].items()}
    node.params = {name: _decoded(value) for name, value in fields["params"].items()}
    return node


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "enum":
        return _enum(content)
    if kind == "integer":
        return int(content)
    if kind == "slice":
        return slice(*(_decoded(part) for part in content))
    if kind == "dict":
        return {name: _decoded(item) for name, item in content.items()}
    raise ValueError(f"an unknown encoding {kind!r}")


@cache
def _enum(text: str) -> Any:
    kind, _, name = text.partition(".")
    module = libraries.cudnn()
    # Some of the frontend's enumerations (convolution_mode) are only in its compiled part.
    enumeration = getattr(module, kind, None) or getattr(module._compiled_module, kind)
    members = enumeration.__members__
    return members[name]
