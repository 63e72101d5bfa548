"""The key of a plan: graph, device, environment and build, each a SHA-256 of a canonical document.

Pure: nothing here knows cuDNN or the disk. A document is made of None, bool, int, float, str, list and dict
with string keys. Two documents are the same exactly if their msgpack encodings are: an int is not a float, a
float keeps all its bits, and the order of a dict's entries counts, so whoever makes a document writes its
fields in one fixed order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import msgpack

Document = Mapping[str, Any]
# Part of every graph hash: raised when the meaning of a document changes, so that no older row can match.
FORMAT = 1
_POLICY = "HEURISTICS_CHOICE"


def pack(document: Any) -> bytes:
    """The canonical bytes of a document."""
    return msgpack.packb(document, use_bin_type=True)  # type: ignore[no-any-return]


def digest(document: Any) -> str:
    """The SHA-256 of a document, in hex."""
    return hashlib.sha256(pack(document)).hexdigest()


@dataclass(frozen=True)
class Part:
    """A document with its hash, which is worked out once for all the keys that share it.

    Attributes:
        document: the canonical document.
    """

    document: Document

    @cached_property
    def hash(self) -> str:
        """Its SHA-256, in hex."""
        return digest(self.document)


@dataclass(frozen=True)
class PlanKey:
    """What a stored plan is filed under. Comparable and hashable by its four hashes; `str()` is one short name.

    The documents are kept beside the hashes so that two keys can be told apart in words; they do not take part
    in comparisons.

    Attributes:
        graph: SHA-256, in hex, of the graph as declared: operations, tensors, constructor arguments.
        device: of the device's properties that decide whether cuDNN takes a plan (`Device.fingerprint`).
        environment: of the libraries: cuDNN's version and engines, CUDA's major version, the Python engines on offer.
        build: of the way the plan is chosen: heuristic modes, policy, filters, or engine and knobs.
        documents: the four documents, by these names.
    """

    graph: str
    device: str
    environment: str
    build: str
    documents: Mapping[str, Document] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, graph: Document, device: Document, environment: Document, build: Document) -> PlanKey:
        """The key of four documents.

        Args:
            graph: the graph as declared.
            device: `Device.document`.
            environment: the libraries.
            build: how the plan is chosen.
        """
        return cls.of_parts(graph, Part(device), Part(environment), Part(build))

    @classmethod
    def of_parts(cls, graph: Document, device: Part, environment: Part, build: Part) -> PlanKey:
        """The same; a graph is another one each time, and the rest is not.

        Args:
            graph: the graph as declared.
            device: `Device.part`.
            environment: the libraries.
            build: how the plan is chosen.
        """
        documents = {
            "graph": graph,
            "device": device.document,
            "environment": environment.document,
            "build": build.document,
        }
        return cls(digest([FORMAT, graph]), device.hash, environment.hash, build.hash, documents)

    @cached_property
    def hash(self) -> str:
        """The key's name on disk: 128 bits of a SHA-256 over all four hashes, and 128 of one over all but the build.

        By the second half the plans of one graph are found, however they were chosen.
        """
        whole = hashlib.sha256(f"{self.graph}{self.device}{self.environment}{self.build}".encode())
        return whole.hexdigest()[:32] + family(self.graph, self.device, self.environment)

    def __str__(self) -> str:
        return self.hash[:16]


def family(graph: str, device: str, environment: str) -> str:
    """The second half of the hash of every key with these parts."""
    return hashlib.sha256(f"{graph}{device}{environment}".encode()).hexdigest()[:32]


@dataclass(frozen=True)
class BuildSpec:
    """How a plan is chosen: part of the key, since another choice is another plan.

    Attributes:
        heuristics: the modes in order, by name (`A`, `B`, `FALLBACK`, `OPENSOURCE`).
        policy: `HEURISTICS_CHOICE` or `ALL`.
        deselected_engines: name parts given to `deselect_engines`.
        workspace_limit: bytes, as given to `deselect_workspace_greater_than`.
        late_workspace_limit: whether it was set after `validate()`; before, it does not reach the backend.
        notes: the note filters in order, each (kind, note, keep).
        engine: the engine of an explicit plan; the heuristics are then not asked.
        knobs: its knobs, each (name, value).
    """

    heuristics: Sequence[str]
    policy: str = _POLICY
    deselected_engines: Sequence[str] = ()
    workspace_limit: int | None = None
    late_workspace_limit: bool = False
    notes: Sequence[tuple[str, str, bool]] = ()
    engine: int | None = None
    knobs: Sequence[tuple[str, int]] = ()

    def part(self) -> Part:
        """The document as a part of a key; one for all plans that are chosen by the same heuristics alone."""
        heuristics = tuple(self.heuristics)
        limited = self.workspace_limit is not None or self.late_workspace_limit
        if limited or self.deselected_engines or self.notes or self.engine is not None or self.policy != _POLICY:
            return Part(self.document())
        return _by_heuristics(heuristics)

    def document(self) -> Document:
        """The canonical document; the order of `deselect_engines` calls makes no difference to cuDNN, nor here."""
        return {
            "heuristics": list(self.heuristics),
            "policy": self.policy,
            "deselected_engines": sorted(self.deselected_engines),
            "workspace_limit": self.workspace_limit,
            "late_workspace_limit": self.late_workspace_limit,
            "notes": [list(note) for note in self.notes],
            "engine": self.engine,
            "knobs": [list(knob) for knob in sorted(self.knobs)],
        }


@lru_cache(maxsize=64)
def _by_heuristics(heuristics: tuple[str, ...]) -> Part:
    return Part(BuildSpec(heuristics).document())


def topology(graph: Document) -> Document:
    """A graph document without its sizes: what graphs of one kind have in common, whatever their shapes.

    Of each tensor's shape and strides stay the rank, which sizes are 1, and the order of the strides; types and
    every parameter stay as they are. That it was given a kernel cache makes no difference: it is given its topology's.
    """
    arguments = {name: value for name, value in graph["arguments"].items() if name != "kernel_cache"}
    return {**graph, "arguments": arguments, "tensors": [_shapeless(tensor) for tensor in graph["tensors"]]}


def _shapeless(tensor: Mapping[str, Any]) -> Mapping[str, Any]:
    stride = tensor["stride"]
    order = sorted(range(len(stride)), key=lambda axis: -stride[axis])
    return {**tensor, "dim": [size == 1 for size in tensor["dim"]], "stride": order}
