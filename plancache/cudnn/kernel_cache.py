"""cuDNN's kernel caches: their documents taken apart and joined, and one live kernel cache that is kept track of.

A document (schema 4, cuDNN 9.11 to 9.28) is `{cudnnVersion, schemaVersion, operationGraph, kernel_cache: [{key,
value}, …]}`. Joining the entries of two documents of one graph gives a document that serves the kernels of both
(measured). cuDNN takes any string for a document and fails, if at all, at the first build; so what is given to it was
checksummed before.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from plancache.cudnn import libraries

SCHEMAS = (4,)
FIRST_REVISION = 92700  # the first cuDNN whose kernel caches have a revision
# Seconds that a build takes at least if it compiled something; where a cuDNN has no revision (before 9.27) only such
# builds are worth a look at the document.
COMPILES = 0.1


@dataclass(frozen=True)
class Kernel:
    """One entry of a document.

    Attributes:
        identity: SHA-256, in hex, of its key without sizes, its kernels' names and their code. An entry's key holds
            the sizes of the shape that first needed it, so that one kernel comes under many keys.
        text: the entry as JSON.
        name: its first kernel's name.
        engine: the engine's id.
        knobs: its knobs, each (name without prefix, value).
        size: bytes of code.
        operands: dim and stride of each tensor that is no intermediate, as it was compiled for.
    """

    identity: str
    text: str
    name: str
    engine: int
    knobs: tuple[tuple[str, int], ...]
    size: int
    operands: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


@dataclass(frozen=True)
class Parts:
    """A document taken apart: everything but its entries, as JSON, and the entries."""

    header: str
    kernels: tuple[Kernel, ...]


def split(document: str) -> Parts | None:
    """Take a document apart; None if it is of a shape or schema that is not known, and must be kept whole."""
    try:
        fields = json.loads(document)
        entries = fields.pop("kernel_cache")
        if fields["schemaVersion"] not in SCHEMAS or not isinstance(entries, list):
            return None
        kernels = tuple(map(_kernel, entries))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return None
    return Parts(_text(fields), kernels)


def join(header: str, entries: Iterable[str]) -> str:
    """The document of a header and entries, all as JSON."""
    fields = json.loads(header)
    return _text({**fields, "kernel_cache": [json.loads(entry) for entry in entries]})


def kernel(text: str) -> Kernel:
    """One entry, from its JSON."""
    return _kernel(json.loads(text))


def _kernel(entry: Mapping[str, Any]) -> Kernel:
    key, kernels = entry["key"], entry["value"]
    tensors = key["operationGraph"]["tensors"]
    shapeless = {**key["operationGraph"], "tensors": [_shapeless(tensor) for tensor in tensors]}
    names = [kernel["kernelName"] for kernel in kernels]
    code = [hashlib.sha256(kernel["cubin"].encode()).hexdigest() for kernel in kernels]
    identity = _text(_rounded([{**key, "operationGraph": shapeless}, names, code]))
    return Kernel(
        identity=hashlib.sha256(identity.encode()).hexdigest(),
        text=_text(entry),
        name=str(names[0]),
        engine=int(key["engineId"]),
        knobs=tuple((name.removeprefix("CUDNN_KNOB_TYPE_"), int(value)) for name, value in key["knobChoices"].items()),
        size=sum(len(kernel["cubin"]) * 3 // 4 for kernel in kernels),
        operands=tuple(
            (tuple(tensor["dim"]), tuple(tensor["stride"])) for tensor in tensors if not tensor["isVirtual"]
        ),
    )


def _rounded(value: Any) -> Any:
    """The same with floats of seven digits: after a load cuDNN writes a clip's bound in another way (9.28)."""
    if isinstance(value, float):
        return f"{value:.7g}"
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return {name: _rounded(item) for name, item in value.items()} if isinstance(value, dict) else value


def _shapeless(tensor: Mapping[str, Any]) -> dict[str, Any]:
    stride = tensor["stride"]
    order = sorted(range(len(stride)), key=lambda axis: -stride[axis])
    return {**tensor, "dim": [size == 1 for size in tensor["dim"]], "stride": order}


def _text(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), sort_keys=True)


class Tracked:
    """A live kernel cache, and whether it holds kernels that its last document did not.

    cuDNN's `revision()` is compared only with the same object's earlier value. A loaded cache's baseline is its number
    of entries: after loading N of them the first build shows N without a compile and N + 1 with one.

    Attributes:
        native: cuDNN's object, for `pygraph(kernel_cache=...)`.
        loaded: how many entries it was loaded with.
        serialized: how often its document was made.
    """

    def __init__(self, document: str | None, entries: int) -> None:
        self.native = libraries.cudnn().create_kernel_cache()
        self.loaded = entries
        self.serialized = 0
        self._known: int | None = entries
        if document is not None:
            self.native.deserialize(document)

    @property
    def revision(self) -> int | None:
        """cuDNN's revision; None before the first build, and where this cuDNN has none."""
        try:
            return int(self.native.revision())
        except (RuntimeError, AttributeError):
            return None

    @property
    def known(self) -> int | None:
        """The revision that its last document had; of a loaded one at first its number of entries."""
        return self._known

    def moved(self, build_seconds: float) -> bool:
        """Whether kernels came in since `document` was last asked for.

        Args:
            build_seconds: how long the builds since then took at most; decides where there is no revision.
        """
        now = self.revision
        if now is None:  # before the first build, or never
            return libraries.backend_version() < FIRST_REVISION and build_seconds >= COMPILES
        return now != self._known

    def unwritten(self) -> None:
        """The last document could not be kept: there is something to write again."""
        self._known = None

    def document(self) -> str | None:
        """The document of now; None where there is none yet, since nothing was built. Costs a serialization."""
        try:
            text = self.native.serialize()
        except RuntimeError:
            return None
        self._known = self.revision
        self.serialized += 1
        return text if isinstance(text, str) else bytes(text).decode()
