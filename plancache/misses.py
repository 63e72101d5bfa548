"""Misses, kept with their documents: to be explained, and to be built by somebody else later.

A list of misses is a text file with one JSON object a line (`PLANCACHE_MISSES`), appended to by any number of
processes, each graph once by each. JSON keeps ints, floats and strings exactly as Python's own `json` writes them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plancache.errors import StoreError
from plancache.keys import PlanKey, topology
from plancache.outcome import Reason

_BEGIN = '{"key":'


@dataclass(frozen=True)
class Miss:
    """One miss.

    Attributes:
        key: the key, with its documents.
        route: the route that the graph would have taken.
        reason: why it missed.
        labels: the names of the graph's tensors by uid.
        builder: the function that declared the graph, where it is known.
        properties: cuDNN's JSON of the device, where it is known: what building for it elsewhere takes.
    """

    key: PlanKey
    route: str
    reason: Reason
    labels: Mapping[int, str]
    builder: str = ""
    properties: str = ""


def append(file: Path, miss: Miss) -> None:
    """Add a miss to a list.

    Raises:
        StoreError: the list cannot be written.
    """
    line = json.dumps(
        {
            "key": str(miss.key),
            "route": miss.route,
            "reason": miss.reason.name,
            "labels": {str(uid): name for uid, name in miss.labels.items()},
            "documents": dict(miss.key.documents),
            "builder": miss.builder,
            "properties": miss.properties,
        },
        separators=(",", ":"),
    )
    try:
        # One write of the whole line: with O_APPEND, lines of several processes do not mix on a local file system.
        descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, f"{line}\n".encode())
        finally:
            os.close(descriptor)
    except OSError as error:
        raise StoreError("the list of misses cannot be written", path=file, found=str(error)) from error


def read(file: Path, passed_over: Callable[[], object] | None = None) -> Iterator[Miss]:
    """The misses in a list. Lines that are cut short (a killed process, a full disk) or damaged are passed over.

    Args:
        file: the list.
        passed_over: called for each of those.

    Raises:
        StoreError: the list cannot be read.
    """
    for line in _lines(file):
        # What follows a line that was cut short stands in the same line.
        begin = max(line.rfind(_BEGIN), 0)
        if begin and passed_over is not None:
            passed_over()
        try:
            miss = _miss(json.loads(line[begin:]))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            if passed_over is not None and line.strip():
                passed_over()
            continue
        yield miss


def _miss(fields: Any) -> Miss:
    documents = fields["documents"]
    # What is looked at before a worker is given the documents, which can tell what is wrong with the rest.
    topology(documents["graph"])
    documents["device"].get("deviceName")
    key = PlanKey.of(documents["graph"], documents["device"], documents["environment"], documents["build"])
    labels = {int(uid): str(name) for uid, name in fields["labels"].items()}
    builder, properties = str(fields.get("builder", "")), str(fields.get("properties", ""))
    return Miss(key, str(fields["route"]), Reason[fields["reason"]], labels, builder, properties)


def _lines(file: Path) -> Iterator[str]:
    try:
        with file.open(encoding="utf-8", errors="replace") as lines:
            yield from lines
    except OSError as error:
        raise StoreError("the list of misses cannot be read", path=file, found=str(error)) from error
