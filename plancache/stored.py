"""A built plan as a stored record, and back."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import msgpack

from plancache.cudnn import frontend, graph, plans
from plancache.cudnn.plans import BuiltPlan, Request, Route
from plancache.errors import RecordError
from plancache.keys import PlanKey, digest, pack, topology
from plancache.store import records
from plancache.store.interface import Row


def encode(wanted: Request, built: BuiltPlan) -> tuple[Row, bytes]:
    """The row and the record of a plan that was just built."""
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
        frontend=frontend.frontend_version(),
        name=chosen.name,
        engine=chosen.engine,
        created=time.time(),
        seconds=built.seconds,
        size=len(built.blob),
    )
    documents = {**key.documents, "properties": wanted.device.to_json(), "labels": graph.labels(wanted.graph)}
    record = records.encode(
        {
            "key": [key.graph, key.device, key.environment, key.build],
            "route": row.route,
            "driver": row.driver,
            "frontend": row.frontend,
            "created": row.created,
            "plan": plans.described(built),
            # Packed by themselves: a hit needs none of them, and does not pay for them.
            "documents": pack(documents),
            "blob": built.blob,
        }
    )
    return row, record


def decode(record: bytes, key: PlanKey, route: Route) -> dict[str, Any]:
    """The fields of a record that was found under `key` and `route`.

    Raises:
        RecordError: it is damaged, or another plan's, whatever row it was found in.
    """
    fields = records.decode(record)
    expected = [key.graph, key.device, key.environment, key.build]
    if fields.get("key") != expected or fields.get("route") != route:
        raise RecordError("the record in this row is another plan's", found=fields.get("key"), expected=expected)
    return fields


def documents(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The documents in a record: graph, device, environment, build, the device's properties, the tensors' names."""
    unpacked: dict[str, Any] = msgpack.unpackb(fields["documents"], strict_map_key=False)
    return unpacked
