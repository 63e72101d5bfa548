"""`PLANCACHE_MODE=check`: what a hit would have served is built too, and compared, so that no key is too small."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from plancache import lookups, stored
from plancache.cudnn import plans
from plancache.cudnn.plans import Request, UnkeptPlanError
from plancache.errors import MismatchError
from plancache.outcome import Outcome, Reason, Source

if TYPE_CHECKING:
    from plancache.cache import PlanCache


def is_first_hit(cache: PlanCache, wanted: Request) -> bool:
    """Whether this is a key's first hit in this process."""
    if wanted.key.hash in cache._proven or cache._find(wanted).reason is not Reason.FOUND:
        return False
    cache._proven.add(wanted.key.hash)
    return True


def check(cache: PlanCache, wanted: Request, started: float) -> Outcome:
    """Build the request's graph, and compare its plan with the stored one of the same route.

    Raises:
        MismatchError: they differ.
    """
    found = cache._find(wanted)
    try:
        built = plans.build(wanted)
    except UnkeptPlanError as unkept:
        return replace(lookups.bypassed(lookups.UNKEPT[unkept.kind], str(unkept), started), key=wanted.key)
    if found.fields is None or found.route is not wanted.route:
        return replace(lookups.outcome(Source.BUILT, found, wanted.key, started), route=None)
    ours = lookups.summary(plans.described(built), built.blob)
    theirs = lookups.summary(found.fields["plan"], found.fields["blob"])
    if ours != theirs:
        raise MismatchError(
            "a stored plan is not the one that building gives",
            key=wanted.key,
            built={**ours, "graph": wanted.key.documents["graph"]},
            cached={**theirs, "graph": stored.documents(found.fields)["graph"]},
        )
    return lookups.outcome(Source.BUILT, found, wanted.key, started)
