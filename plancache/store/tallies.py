"""Counts of what lookups came to, kept with the store: over processes, by day, device, environment and reason.

Best effort, like stamps of use. They are added up in memory, where a hit pays for one dictionary entry, and written
with the next put, flush or exit. What a killed process had not written is lost; a fork's child starts from nothing.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from plancache.store.directory import Access

DIRECTORY, SCRATCH = "tallies", "scratch"
_DAY = 86400
# Beyond so many rows the days before the last ninety are added up: some 200 KB are enough for what is only counted.
_MOST, _DAYS = 1000, 90
# Files of a file store before they are merged into one.
_FILES = 16
_STALE = 3600.0  # seconds after which what a merger has claimed is a killed one's
# Bytes of the bound for each entry whose hits a file store remembers: it has no row to count them in. An entry takes a
# block of 4 KB at least, so that there is room for every one; beyond it those with the most hits stay.
_PER_ENTRY, _ENTRIES = 4096, 10_000

Name = tuple[str, str, str, str]
Use = tuple[str, str]


@dataclass(frozen=True)
class Tally:
    """How often something came up on one day.

    Attributes:
        device, environment: hashes, as rows have them; empty where a graph had no key.
        source, reason: what a lookup came to: the value of a `Source`, and the name of a `Reason`.
        day: days since 1970-01-01 (UTC); older ones are added up under the first.
        count: how often.
        recorded: seconds that building took when the plans that were served were built.
        spent: seconds that these lookups and builds took.
    """

    device: str
    environment: str
    source: str
    reason: str
    day: int
    count: int
    recorded: float
    spent: float


class Counting:
    """What this process has counted and not written yet."""

    def __init__(self) -> None:
        self._counts: dict[Name, list[float]] = {}

    def __bool__(self) -> bool:
        return bool(self._counts)

    def add(self, name: Name, recorded: float, spent: float) -> None:
        """Count a lookup; the caller holds a lock of his own."""
        one = self._counts.setdefault(name, [0, 0.0, 0.0])
        one[0] += 1
        one[1] += recorded
        one[2] += spent

    def take(self) -> list[Tally]:
        """Everything so far, of today."""
        counts, self._counts = self._counts, {}
        day = int(time.time()) // _DAY
        return [
            Tally(*name, day, int(count), recorded, spent) for name, (count, recorded, spent) in list(counts.items())
        ]

    def clear(self) -> None:
        """Forget it: in a fork's child, it is its parent's."""
        self._counts = {}


def added_up(tallies: Iterable[Tally]) -> list[Tally]:
    """Tallies of one name and day made one."""
    sums: dict[tuple[str, str, str, str, int], list[float]] = {}
    for one in tallies:
        sum_ = sums.setdefault((one.device, one.environment, one.source, one.reason, one.day), [0, 0.0, 0.0])
        for place, value in enumerate((one.count, one.recorded, one.spent)):
            sum_[place] += value
    return [Tally(*name, int(count), recorded, spent) for name, (count, recorded, spent) in sums.items()]


# ------------------------------------------------------------ in a database

_ADD = """
INSERT INTO tallies VALUES (?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (device, environment, source, reason, day) DO UPDATE SET
    count = count + excluded.count, recorded = recorded + excluded.recorded, spent = spent + excluded.spent
"""
_SHORTEN = """
INSERT INTO tallies
SELECT device, environment, source, reason, min(day), sum(count), sum(recorded), sum(spent)
FROM tallies WHERE day < ? GROUP BY device, environment, source, reason HAVING count(*) > 1
ON CONFLICT (device, environment, source, reason, day) DO UPDATE SET
    count = excluded.count, recorded = excluded.recorded, spent = excluded.spent
"""
_SHORTENED = """
DELETE FROM tallies WHERE day < ? AND day > (
    SELECT min(day) FROM tallies AS first
    WHERE (first.device, first.environment, first.source, first.reason)
        = (tallies.device, tallies.environment, tallies.source, tallies.reason))
"""


def write(connection: sqlite3.Connection, counting: Counting) -> None:
    """Within a transaction: add what was counted."""
    if counting:
        connection.executemany(_ADD, [tuple(asdict(one).values()) for one in counting.take()])


def read(connection: sqlite3.Connection) -> list[Tally]:
    """Everything that was counted."""
    return [Tally(*row) for row in connection.execute("SELECT * FROM tallies ORDER BY day").fetchall()]


def too_many(connection: sqlite3.Connection) -> bool:
    """Whether old days are to be added up."""
    return bool(connection.execute("SELECT count(*) FROM tallies").fetchone()[0] > _MOST)


def shorten(connection: sqlite3.Connection) -> None:
    """Within a transaction: add up the days before the last ninety."""
    before = int(time.time()) // _DAY - _DAYS
    connection.execute(_SHORTEN, (before,))
    connection.execute(_SHORTENED, (before,))


# ------------------------------------------------------------ in files


class TallyFiles:
    """The same for a store of files. Each flush adds a file; whoever finds many of them merges them into one.

    A file is never changed. A merger claims files by renaming each to `NAME.MINE`, adds them up in a new one named
    `MINE`, and removes them: a claimed file counts until the file that it went into is there. Of two mergers one gets
    each file, and one that is killed at any moment loses and doubles nothing.
    """

    def __init__(self, path: Path, access: Access, max_bytes: int) -> None:
        self.path = path / DIRECTORY
        self._scratch = path / SCRATCH
        self._access = access
        self._most = min(_ENTRIES, max_bytes // _PER_ENTRY)

    def write(self, tallies: list[Tally], hits: dict[Use, int]) -> None:
        """Add what was counted.

        Raises:
            OSError: it cannot be written.
        """
        for directory in (self.path, self._scratch):
            self._access.make(directory)
        mine, claimed = f"{int(time.time())}-{os.urandom(8).hex()}", list[Path]()
        names = self._names()
        if len(names) >= _FILES:
            before = int(time.time()) // _DAY - _DAYS
            claimed = self._claim(names, mine)
            for file in claimed:
                old, old_hits = _parsed(file)
                tallies += old
                for use, count in old_hits.items():
                    hits[use] = hits.get(use, 0) + count
            tallies = added_up(tallies)
            if len(tallies) > _MOST:
                first = min(one.day for one in tallies)
                tallies = added_up(
                    Tally(**{**asdict(one), "day": one.day if one.day >= before else first}) for one in tallies
                )
        best = sorted(hits.items(), key=lambda one: -one[1])[: self._most]
        document = {
            "tallies": [list(asdict(one).values()) for one in tallies],
            "hits": [[*use, count] for use, count in best],
        }
        scratch = self._scratch / f"tallies-{mine}"
        try:
            descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, self._access.file_mode)
            with os.fdopen(descriptor, "w") as out:
                json.dump(document, out, separators=(",", ":"))
            self._access.follow(scratch)
            scratch.rename(self.path / mine)
        finally:
            with suppress(FileNotFoundError):
                scratch.unlink()
        for file in claimed:
            with suppress(OSError):
                file.unlink()

    def read(self) -> tuple[list[Tally], dict[Use, int]]:
        """Everything that was counted, and the hits of entries. What cannot be read counts as nothing."""
        tallies: list[Tally] = []
        hits: dict[Use, int] = {}
        names = self._names()
        for name in names:
            if name.rpartition(".")[2] in names and "." in name:
                continue  # its merger is there
            more, more_hits = _parsed(self.path / name)
            tallies += more
            for use, count in more_hits.items():
                hits[use] = hits.get(use, 0) + count
        return sorted(added_up(tallies), key=lambda one: one.day), hits

    def _names(self) -> set[str]:
        try:
            return set(os.listdir(self.path))  # noqa: PTH208 (names alone)
        except OSError:
            return set()

    def _claim(self, names: set[str], mine: str) -> list[Path]:
        claimed = []
        for name in sorted(names):
            first, _, merger = name.partition(".")
            if merger in names:  # it went into that one, whose merger was killed before it removed this
                with suppress(OSError):
                    (self.path / name).unlink()
                continue
            if merger and _age(merger) < _STALE:
                continue  # somebody is at it
            with suppress(OSError):
                (self.path / name).rename(self.path / f"{first}.{mine}")
                claimed.append(self.path / f"{first}.{mine}")
        return claimed


def _age(name: str) -> float:
    digits = name.partition("-")[0]
    return time.time() - int(digits) if digits.isdecimal() else _STALE


def _parsed(file: Path) -> tuple[list[Tally], dict[Use, int]]:
    try:
        document = json.loads(file.read_bytes())
        tallies = [
            Tally(str(a), str(b), str(c), str(d), int(day), int(count), float(recorded), float(spent))
            for a, b, c, d, day, count, recorded, spent in document["tallies"]
        ]
        return tallies, {(str(key), str(route)): int(count) for key, route, count in document["hits"]}
    except (OSError, ValueError, TypeError, KeyError):
        return [], {}
