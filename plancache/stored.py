"""A built plan as a stored record, and back."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import msgpack

from plancache.cudnn import graph, libraries, plans
from plancache.cudnn.listing import summary
from plancache.cudnn.plans import BuiltPlan, Request
from plancache.errors import RecordError
from plancache.keys import PlanKey, digest, pack, topology
from plancache.store import records
from plancache.store.interface import Row

# Of a plan whose graph has no `replay`: why not, so that filling ahead of time does not try again each time.
NO_REPLAY = "no_replay"


def encode(
    wanted: Request,
    built: BuiltPlan,
    signing_key: bytes | None,
    tuning: Mapping[str, Any] | None = None,
    no_replay: str = "",
) -> tuple[Row, bytes]:
    """The row and the record of a plan that was just built.

    `tuning` is the table of what it was measured against; `no_replay` says why its graph has no such route.
    """
    key, chosen = wanted.key, built.plans.chosen
    row = Row(
        key=key.hash,
        route=wanted.route,
        graph=key.graph,
        topology=digest(topology(key.documents["graph"])),
        device=key.device,
        environment=key.environment,
        build=key.build,
        driver=wanted.device.driver,
        frontend=libraries.frontend_version(),
        name=chosen.name,
        engine=chosen.engine,
        created=time.time(),
        seconds=built.seconds,
        size=len(built.blob),
        builder=wanted.builder,
        operation=summary(key.documents["graph"]),
    )
    documents = {**key.documents, "properties": wanted.device.to_json(), "labels": graph.labels(wanted.graph)}
    fields = {
        "plan": plans.described(built),
        # Packed by themselves: a hit needs none of them, and does not pay for them.
        "documents": pack(documents),
        "blob": built.blob,
        **({NO_REPLAY: no_replay} if no_replay else {}),
    }
    if tuning is not None:
        fields["tuning"] = pack(tuning)
    return row, records.encode(row, fields, signing_key)


def decode(
    record: bytes, key: PlanKey, route: str, signing_key: bytes | None, any_build: bool = False
) -> tuple[Row, dict[str, Any]]:
    """The row and the fields of a record that was found under `key` and `route`; of any way to build with `any_build`.

    Raises:
        RecordError: it is damaged, or another plan's, whatever row it was found in.
    """
    row, fields = records.decode(record, signing_key)
    found = (row.graph, row.device, row.environment, row.route, None if any_build else row.build)
    expected = (key.graph, key.device, key.environment, route, None if any_build else key.build)
    if found != expected:
        raise RecordError("the record in this row is another plan's", found=found, expected=expected)
    return row, fields


def documents(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The documents in a record: graph, device, environment, build, the device's properties, the tensors' names.

    Raises:
        RecordError: it has none that can be read.
    """
    try:
        unpacked: dict[str, Any] = msgpack.unpackb(fields["documents"], strict_map_key=False)
        return unpacked
    except (KeyError, ValueError, TypeError, msgpack.UnpackException) as error:
        raise RecordError("a record holds no documents", found=f"{type(error).__name__}: {error}") from error


def with_tuning(fields: Mapping[str, Any], tuning: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a tuned plan with another table."""
    return {**fields, "tuning": pack(tuning)}


def tuning(fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """The table of a tuned plan: every candidate with what came of it; None for any other plan."""
    packed = fields.get("tuning")
    return None if packed is None else msgpack.unpackb(packed, strict_map_key=False)
