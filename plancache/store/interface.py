"""The one interface of stores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

from plancache.store.tallies import Counting, Tally


@dataclass(frozen=True)
class Row:
    """What a record is filed under and listed by. It is part of the record too, which is the truth."""

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
    builder: str = ""
    operation: str = ""

    def gives_way_to(self, other: Row) -> bool:
        """Whether `other` may take this row's place: newer drivers and frontends take what older ones made."""
        no_newer = other.driver <= self.driver and other.frontend <= self.frontend
        return no_newer and (other.driver < self.driver or other.frontend < self.frontend)


@dataclass(frozen=True)
class Listed:
    """A row as it is listed: with its use, which is best effort, and what its record takes on disk."""

    row: Row
    used: float
    hits: int
    stored: int


class Store(ABC):
    """Records by key and route. Every method may raise `StoreError`; none changes a record's bytes."""

    #: Whether nothing may be written; `put` and `discard` then raise.
    read_only: bool
    #: What was counted and is not written yet. Whoever counts adds to it; `put` and `flush` write it.
    counting: Counting

    @abstractmethod
    def get(self, key: str, route: str, use: bool = True) -> bytes | None:
        """The record, or None. Writes nothing and takes no write lock.

        Its use is remembered and written later, unless it is only looked at (`use` is false).
        """

    @abstractmethod
    def put(self, row: Row, record: bytes, replaces: bytes | None = None) -> bool:
        """Store a record in one step; whether it was stored.

        It takes the place of one that gives way to it (`Row.gives_way_to`) and of no other, but for `replaces`: a
        record found to be unfit, if it is still the one that is there.
        """

    @abstractmethod
    def discard(self, key: str, route: str, record: bytes | None = None) -> bool:
        """Remove a record, if it is still this one (None: whichever it is); whether there was one."""

    @abstractmethod
    def keys(self, end: str) -> list[tuple[str, str]]:
        """Key and route of the records whose keys end so (with the last 32 digits). As cheap as a get."""

    @abstractmethod
    def rows(self, **equal: str) -> Iterator[Listed]:
        """The rows whose columns have these values (all of them without any), newest first.

        Not promised: that a row still has a record when it is asked for.
        """

    @abstractmethod
    def salvage(self) -> Iterator[tuple[str, str, Row | None, bytes]]:
        """Every record that can be read, also of a damaged store: key, route, the row that lists it, the record.

        The row is None where there is no listing apart from the record.
        """

    @abstractmethod
    def maintain(self, thorough: bool = True) -> None:
        """Keep the bound on disk and tidy up. Never called under a build lock, since it may take a while.

        Not `thorough` is for after a put: most of it is then done only now and then.
        """

    @abstractmethod
    def tallies(self) -> list[Tally]:
        """What was counted and written so far, by all processes."""

    @abstractmethod
    def flush(self) -> None:
        """Write what is remembered of use, and what was counted. Best effort: it raises nothing."""

    @abstractmethod
    def forget(self) -> None:
        """Drop what is remembered of use and counted: in a fork's child it is its parent's."""

    @abstractmethod
    def close(self) -> None:
        """Release what this thread holds. The store may be used again; it opens itself."""
