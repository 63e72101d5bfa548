"""The one interface of stores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """What a store files a record under, and what it lists of it: an index over the record, never the truth."""

    key: str
    route: str
    graph: str
    topology: str
    device: str
    environment: str
    build: str
    driver: int
    frontend: int
    name: str
    engine: int
    created: float
    seconds: float
    size: int


class Store(ABC):
    """Records by key and route. Every method may raise `StoreError`; none changes a record's bytes."""

    @abstractmethod
    def get(self, key: str, route: str) -> bytes | None:
        """The record, or None. Writes nothing and takes no write lock."""

    @abstractmethod
    def put(self, row: Row, record: bytes, replaces: bytes | None = None) -> bool:
        """Store a record in one step; whether it was stored.

        A record for an older driver and frontend replaces one for newer ones, never the reverse, since newer ones
        take what older ones made. `replaces` is a record found to be unfit: it is replaced whatever it was made
        for, if it is still the one that is there.
        """

    @abstractmethod
    def discard(self, key: str, route: str, record: bytes) -> bool:
        """Remove the record if it is still this one; whether it was."""

    @abstractmethod
    def rows(self, **equal: str) -> Iterator[Row]:
        """The rows whose columns have these values (all of them without any), newest first.

        Not promised: that a row still has a record when it is asked for.
        """

    @abstractmethod
    def close(self) -> None:
        """Release what this process holds. The store may be used again; it opens itself."""
