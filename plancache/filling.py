"""Filling ahead of time: a graph's plan, and beside it what another route needs."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from plancache import lookups
from plancache.cudnn import frontend, libraries, replaying
from plancache.cudnn.plans import Choice, Request, Route, UnkeptPlanError
from plancache.errors import RunError, StoreError
from plancache.outcome import Outcome, Reason, Source

if TYPE_CHECKING:
    from plancache.cache import PlanCache

_log = logging.getLogger("plancache")


def fill(cache: PlanCache, graph: Any, choice: Choice, builder: str) -> dict[str, Outcome]:
    """See `PlanCache.fill`."""
    started = time.perf_counter()
    wanted = cache._request(graph, choice, started, builder)
    if isinstance(wanted, Outcome) or frontend.is_dynamic(graph) or not cache._writes():
        made = cache.build(graph, choice.heuristics, choice.policy, choice.plan, builder)
        return {made.route or "none": made}
    outcome: Outcome | None = None
    with _turn(cache, wanted):
        own = cache._find_in(0, wanted, wanted.route)
        if own.reason is not Reason.FOUND:  # build() would be content with another route's
            outcome = cache._noted(graph, cache._build_now(wanted, own, started))
        outcomes = _replay(cache, wanted, started)
    if outcome is None:  # outside, since it takes a turn of its own if cuDNN refuses what is there
        outcome = cache.build(graph, choice.heuristics, choice.policy, choice.plan, builder)
    cache._maintain()
    return {outcome.route or "none": outcome} | outcomes


@contextmanager
def _turn(cache: PlanCache, wanted: Request) -> Iterator[None]:
    with ExitStack() as stack:
        try:
            stack.enter_context(cache._layers.locks().turn(wanted.key.hash, lambda: False))
        except StoreError as error:
            cache._warn(error)
        yield


def _replay(cache: PlanCache, wanted: Request, started: float) -> dict[str, Outcome]:
    found = cache._find_in(0, wanted, Route.REPLAY)
    if found.reason is Reason.FOUND:
        return {"replay": lookups.outcome(Source.DISK, found, wanted.key, started)}
    try:
        built = replaying.build_replay(wanted)
    except (libraries.cudnn().cudnnGraphNotSupportedError, UnkeptPlanError, RunError) as error:
        _log.info("no replay for %s: %s", wanted.key, error)
        return {}
    written = cache._put(replace(wanted, route=Route.REPLAY), built, found.record)
    outcome = lookups.outcome(Source.BUILT, found, wanted.key, started)
    return {"replay": replace(outcome, route="replay", stored=written)}
