"""A store in memory: where a worker keeps what it makes until that travels back to whoever writes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from plancache.store import records
from plancache.store.interface import Listed, Row, Store
from plancache.store.tallies import Tally


class MemoryStore(Store):
    """One process's records. Unbounded, and gone with the process; for one thread at a time."""

    def __init__(self, seeds: Iterable[bytes] = ()) -> None:
        """Start with these records.

        Raises:
            RecordError: one of them is damaged or signed.
        """
        self.read_only = False
        self._records: dict[tuple[str, str], tuple[Row, bytes]] = {}
        for record in seeds:
            self.put(records.decode(record)[0], record)

    def get(self, key: str, route: str, use: bool = True) -> bytes | None:
        _, record = self._records.get((key, route), (None, None))
        return record

    def put(self, row: Row, record: bytes, replaces: bytes | None = None) -> bool:
        there = self._records.get((row.key, row.route))
        if there is not None and there[1] != replaces and not there[0].gives_way_to(row):
            return False
        self._records[row.key, row.route] = (row, record)
        return True

    def discard(self, key: str, route: str, record: bytes | None = None) -> bool:
        if record is not None and self.get(key, route) != record:
            return False
        return self._records.pop((key, route), None) is not None

    def keys(self, end: str) -> list[tuple[str, str]]:
        return [name for name in self._records if name[0].endswith(end)]

    def rows(self, **equal: str) -> Iterator[Listed]:
        for row, record in sorted(self._records.values(), key=lambda one: -one[0].created):
            if all(getattr(row, name) == value for name, value in equal.items()):
                yield Listed(row, time.time(), 0, len(record))

    def salvage(self) -> Iterator[tuple[str, str, Row | None, bytes]]:
        for (key, route), (row, record) in list(self._records.items()):
            yield key, route, row, record

    def maintain(self, thorough: bool = True) -> None:
        """Nothing: there is no bound."""

    def tallies(self) -> list[Tally]:
        return []

    def flush(self) -> None:
        """Nothing: use is not counted."""

    def forget(self) -> None:
        """Nothing: use is not counted."""

    def close(self) -> None:
        """Nothing is held."""
