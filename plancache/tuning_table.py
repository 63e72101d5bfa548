"""The table of a tuning: a graph's candidates, and what came of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from plancache.cudnn.frontend import Plan

OK, WRONG, FAILED, HUNG, TOO_LARGE, WAITING = "ok", "wrong", "failed", "hung", "too large", "not run"
NO_ROOM = "no memory"
TUNED, BUSY = "tuned", "busy"


@dataclass
class Candidate:
    """One plan, and what came of it.

    Attributes:
        engine: engine id.
        knobs: (knob number, value).
        name: as cuDNN names it.
        status: `ok`, `wrong` (another result than the heuristics' first choice), `failed`, `hung`, `too large` (its
            workspace), `no memory` (on the device, then; it is tried again) or `not run`.
        median: microseconds of one execute, the median of the replays.
        best: the best of them.
        workspace: bytes.
        detail: more about the status.
    """

    engine: int
    knobs: list[tuple[int, int]]
    name: str
    status: str = WAITING
    median: float | None = None
    best: float | None = None
    workspace: int | None = None
    detail: str = ""

    @property
    def plan(self) -> Plan:
        """As the frontend lists it."""
        return Plan(self.name, self.engine, dict(self.knobs), None)


@dataclass
class Tuning:
    """What is known of a graph's candidates.

    Attributes:
        candidates: all of them, in the order of the heuristics.
        first: the heuristics' first choice that runs, by which the others are judged; None if there is none yet.
        chosen: the fastest, which is the one that is stored.
        workspace_limit: bytes that a candidate's workspace may take.
        seconds: what measuring took in all.
        outcome: `tuned`, or `busy`: another process is tuning the graph, and had not finished when this one had waited
            as long as it may. Nothing failed: the table is what that one had stored so far, and may be empty.
        detail: which process that is.
    """

    candidates: list[Candidate]
    first: int | None = None
    chosen: int | None = None
    workspace_limit: int | None = None
    seconds: float = 0.0
    outcome: str = TUNED
    detail: str = ""

    @property
    def complete(self) -> bool:
        """Whether every candidate was looked at."""
        return self.first is not None and not any(one.status == WAITING for one in self.candidates)

    @property
    def gain(self) -> float | None:
        """By what factor the chosen plan is faster than the heuristics' first choice."""
        if self.first is None or self.chosen is None:
            return None
        first, chosen = (self.candidates[one].median for one in (self.first, self.chosen))
        return first / chosen if first and chosen else None

    def document(self) -> dict[str, Any]:
        """As it is stored: without what only one call of `tune` came to."""
        return {name: value for name, value in asdict(self).items() if name not in ("outcome", "detail")}

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Tuning:
        """What `document` wrote."""
        known = [
            Candidate(**{**one, "knobs": [(int(knob), int(value)) for knob, value in one["knobs"]]})
            for one in document["candidates"]
        ]
        return cls(**{**document, "candidates": known})


@dataclass(frozen=True)
class Limits:
    """How much may be spent.

    Attributes:
        seconds: time for building and running candidates, in this call; and how much longer than `PLANCACHE_WAIT`
            another process that tunes the same graph is waited for.
        workspace: bytes that a candidate's workspace may take.
        memory: bytes on the device in all; None is most of what is free.
    """

    seconds: float = 60.0
    workspace: int | None = None
    memory: int | None = None
