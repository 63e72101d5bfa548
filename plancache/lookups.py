"""What a lookup came to, and the outcomes that are made of it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from plancache.cudnn import plans
from plancache.cudnn.plans import Request, Route
from plancache.errors import MissError, PlanCacheError
from plancache.keys import PlanKey
from plancache.outcome import Outcome, Reason, Source

# Kinds of plans that are built and not kept.
UNKEPT = {
    "python": Reason.PYTHON_ENGINE,
    "delegated": Reason.DELEGATED,
    "unreadable": Reason.UNREADABLE,
    "unloadable": Reason.UNLOADABLE,
}


class Found(NamedTuple):
    """What a lookup came to: a record that may be loaded, or why there is none."""

    reason: Reason
    route: Route
    record: bytes | None = None  # also of an unfit record, so that exactly this one can be replaced
    fields: dict[str, Any] | None = None
    detail: str = ""
    layer: int = 0


def source(found: Found) -> Source:
    return Source.DISK if found.layer == 0 else Source.LAYER


def bypassed(reason: Reason, detail: str, started: float) -> Outcome:
    return Outcome(Source.BYPASSED, reason, None, time.perf_counter() - started, detail)


def outcome(source: Source, found: Found, key: PlanKey, started: float) -> Outcome:
    served = found.fields is not None and found.reason is Reason.FOUND
    return Outcome(
        source,
        found.reason,
        key,
        time.perf_counter() - started,
        found.detail,
        route=found.route.value if found.reason is Reason.FOUND else None,
        build_seconds=found.fields["plan"].get("seconds", 0.0) if served and found.fields else 0.0,
    )


def properties(wanted: Request) -> str:
    """The JSON of the request's device; empty where it cannot be told. A live one's first takes 18 to 190 ms."""
    try:
        return wanted.device.to_json()
    except (PlanCacheError, RuntimeError):
        return ""


def miss_error(reason: Reason, detail: str, key: PlanKey | None) -> MissError:
    return MissError(
        "a plan is not in the cache, and the mode is require-hit",
        key=key,
        reason=reason,
        found=f"{reason}{f' ({detail})' if detail else ''}, key {key}",
        todo="Fill the cache first, or unset PLANCACHE_MODE.",
    )


def summary(plan: Mapping[str, Any], blob: bytes) -> dict[str, Any]:
    """What two plans for the same key must agree in."""
    name, engine, knobs, _ = plan["plans"][plan["selected"]]
    return {
        "name": name,
        "engine": engine,
        "knobs": sorted(map(list, knobs)),
        "inferred": [list(tensor) for tensor in plan["inferred"]],
        "operation_graph": plans.operation_graph(blob),
    }
