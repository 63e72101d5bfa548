"""What a cache holds and what it was good for, over all processes; and what devices and environments are called."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from plancache.cudnn import device as devices
from plancache.kernels import is_kernel
from plancache.outcome import Reason, Source
from plancache.store.interface import Listed, Row
from plancache.store.tallies import Tally

DAY = 86400
_HITS = frozenset({Source.DISK.value, Source.LAYER.value, Source.MEMORY.value})
_MISSES = frozenset({Source.BUILT.value, Source.MISS.value})


@dataclass(frozen=True)
class Part:
    """What belongs to one device, or to one environment; `Totals` is the sum of all.

    Attributes:
        hits: graphs that a stored plan, or a stored kernel, served.
        misses: graphs that were not served, by reason (the name of a `Reason`).
        bypassed: graphs that are not cached, by reason.
        saved: seconds: what building took of what was served, less what serving it took.
        spent: seconds that building took.
        plans, kernels: what is stored now.
        bytes: what the records of these take.
    """

    hits: int
    misses: Mapping[str, int]
    bypassed: Mapping[str, int]
    saved: float
    spent: float
    plans: int
    kernels: int
    bytes: int

    @classmethod
    def of(cls, tallies: Iterable[Tally], rows: Iterable[Listed]) -> Part:
        """The sum of these."""
        hits, misses, bypassed = 0, Counter[str](), Counter[str]()
        saved = spent = 0.0
        for one in tallies:
            if one.source in _HITS:
                hits += one.count
                saved += saved_by(one)
            elif one.source in _MISSES:
                misses[one.reason] += one.count
                spent += one.spent
            else:
                bypassed[one.reason] += one.count
        listed = list(rows)
        kernels = sum(is_kernel(one.row) for one in listed)
        stored = sum(one.stored for one in listed)
        return cls(hits, dict(misses), dict(bypassed), saved, spent, len(listed) - kernels, _code(listed), stored)

    @property
    def missed(self) -> int:
        """Misses of every reason."""
        return sum(self.misses.values())


@dataclass(frozen=True)
class Totals(Part):
    """What a cache holds, and what all processes have counted, since `since` (seconds since 1970; None: nothing was).

    Attributes:
        devices, environments: the parts, by fingerprint and by hash; what had no key is under an empty one.
        saved_by_day: seconds saved on each day (seconds since 1970 of its start, UTC).
    """

    since: float | None
    devices: Mapping[str, Part]
    environments: Mapping[str, Part]
    saved_by_day: Mapping[float, float]

    @classmethod
    def of(cls, tallies: Iterable[Tally], rows: Iterable[Listed]) -> Totals:
        """Everything added up."""
        counted, listed = list(tallies), list(rows)
        whole = Part.of(counted, listed)
        by_day: dict[float, float] = {}
        for one in counted:
            if one.source in _HITS:
                by_day[float(one.day * DAY)] = by_day.get(float(one.day * DAY), 0.0) + saved_by(one)
        return cls(
            **vars(whole),
            since=min((float(one.day * DAY) for one in counted), default=None),
            devices=_parts(counted, listed, "device"),
            environments=_parts(counted, listed, "environment"),
            saved_by_day=dict(sorted(by_day.items())),
        )


def _parts(tallies: list[Tally], rows: list[Listed], name: str) -> dict[str, Part]:
    values = {getattr(one, name) for one in tallies} | {getattr(one.row, name) for one in rows}
    return {
        value: Part.of(
            (one for one in tallies if getattr(one, name) == value),
            (one for one in rows if getattr(one.row, name) == value),
        )
        for value in sorted(values)
    }


def _code(rows: list[Listed]) -> int:
    """Kernels without the headers of their caches."""
    return sum(is_kernel(one.row) and one.row.size > 0 for one in rows)


def saved_by(one: Tally) -> float:
    """Seconds that hits saved; none where it is not recorded what building took (kernels of dynamic shapes)."""
    return max(0.0, one.recorded - one.spent) if one.recorded else 0.0


def reason_text(name: str) -> str:
    """A reason's words by its name; the name itself, where a later version wrote it."""
    return str(Reason[name]) if name in Reason.__members__ else name


class Names:
    """What the hashes in rows mean: devices by name, environments by cuDNN version."""

    def __init__(self) -> None:
        self.devices: dict[str, str] = {}
        self.environments: dict[str, Mapping[str, Any]] = {}
        self._shipped: Mapping[str, str] | None = None

    def knows(self, row: Row) -> bool:
        """Whether both of a row's are known."""
        return row.device in self.devices and row.environment in self.environments

    def learn(self, row: Row, documents: Mapping[str, Any]) -> None:
        """Take in the documents of one row."""
        self.devices[row.device] = str(documents["device"].get("deviceName", "?"))
        self.environments[row.environment] = documents["environment"]

    def device(self, fingerprint: str) -> str:
        """A device's name; of an unknown one the beginning of its fingerprint."""
        known = self.devices.get(fingerprint)
        if known is None and fingerprint:
            if self._shipped is None:  # some milliseconds: only where a row asks for it, and once
                self._shipped = _shipped()
            known = self._shipped.get(fingerprint)
        return known or fingerprint[:12] or "-"

    def cudnn(self, environment: str) -> str:
        """The cuDNN version of an environment, as 9.28.0; of an unknown one the beginning of its hash."""
        document = self.environments.get(environment)
        return environment[:12] or "-" if document is None else version_text(document["cudnn"])

    def environment(self, environment: str) -> str:
        """An environment in a few words."""
        document = self.environments.get(environment)
        if document is None:
            return environment[:12] or "-"
        flavour = "full" if any(name.startswith("precompiled") for name in document["engines"]) else "JIT"
        return f"cuDNN {version_text(document['cudnn'])} {flavour}, CUDA {document['cuda']}"


def _shipped() -> dict[str, str]:
    return {one.fingerprint: one.name for one in map(devices.device, devices.names())}


def version_text(number: int) -> str:
    """92800 as 9.28.0."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"
