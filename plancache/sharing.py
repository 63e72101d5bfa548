"""Several fills of one directory at once share the work: each builds what no other one is building.

Before a plan is built it is claimed: by a lock file of a set of its own, which the kernel frees when its holder dies.
What another fill has claimed is put off, and looked at again later; nobody waits where there is other work. Claims are
there to save work and for nothing else: where they fail, a plan is built twice.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from plancache.crew import WAIT
from plancache.errors import StoreError
from plancache.faults import is_space
from plancache.store.layers import Layers
from plancache.store.locks import slot

_log = logging.getLogger("plancache")
_SAID = 10.0  # seconds of waiting until somebody is told
_AGAIN = 1.0  # seconds between two looks at what was put off, while there is other work


class Claims:
    """What this fill is building, so that no other fill of the directory does."""

    def __init__(self, layers: Layers) -> None:
        self._layers = layers
        # By lock file, of which several names may have the same one.
        self._held: dict[int, tuple[Callable[[], None], set[str]]] = {}
        self._locking = True

    def take(self, name: str, anyway: bool = False) -> bool:
        """Claim `name`, a hash in hex; false where somebody has claimed it, this fill included (a twin).

        With `anyway`, what another fill has claimed is taken too.
        """
        number = slot(name)
        if number not in self._held:
            release = self._lock(number)
            if release is None and not anyway:
                return False
            self._held[number] = release or _nothing, {name}
            return True
        names = self._held[number][1]
        if name in names:
            return False
        names.add(name)
        return True

    def drop(self, name: str) -> None:
        """Let go of a claim."""
        release, names = self._held[slot(name)]
        names.remove(name)
        if not names:
            del self._held[slot(name)]
            release()

    def drop_all(self) -> None:
        """Let go of every claim."""
        while self._held:
            self._held.popitem()[1][0]()

    def _lock(self, number: int) -> Callable[[], None] | None:
        if not self._locking:
            return _nothing
        try:
            return self._layers.locks(filling=True).claim(number)
        except StoreError as error:
            self._locking = False
            if not is_space(error):  # of a full disk there is more to be said when a plan is stored
                _log.warning("%s (of several fills at once each builds everything; said once)", error)
            return _nothing


class Turns:
    """Items in an order in which nobody waits for another fill while there is other work.

    Args:
        claims: what is taken before an item is built.
        named: what an item is claimed by; empty if there is nothing to be built.
        look: what becomes of an item that was just claimed: it may have been stored meanwhile.
        patience: seconds to wait for other fills that come to nothing (one that was stopped, a host that is gone and
            whose locks a file server still keeps). What they have claimed is then built here too.
    """

    def __init__(
        self, claims: Claims, named: Callable[[Any], str], look: Callable[[Any], Iterator[Any]], patience: float
    ) -> None:
        self._claims = claims
        self._named = named
        self._look = look
        self._patience = patience
        self._later: list[Any] = []

    def of(self, items: Iterable[Any]) -> Iterator[Any]:
        """The items; and `WAIT`, where all that is left is being built by others."""
        due = time.monotonic() + _AGAIN
        for item in items:
            yield from self._turn(item)
            if self._later and time.monotonic() >= due:
                yield from self._again()
                due = time.monotonic() + _AGAIN
        began = moved = time.monotonic()
        said = False
        while self._later:
            before = len(self._later)
            yield from self._again()
            if len(self._later) < before:
                moved = time.monotonic()
            elif time.monotonic() > moved + self._patience:
                _log.warning(
                    "another fill has been building %d plans for more than %.0f s; building them here too",
                    before,
                    self._patience,
                )
                yield from self._again(anyway=True)
                moved = time.monotonic()
            if self._later:
                if not said and time.monotonic() > began + _SAID:
                    said = True
                    _log.warning("waiting for another fill of this cache, which is building what is left")
                yield WAIT

    def _again(self, anyway: bool = False) -> Iterator[Any]:
        tried, self._later = self._later, []
        for item in tried:
            yield from self._turn(item, anyway)

    def _turn(self, item: Any, anyway: bool = False) -> Iterator[Any]:
        name = self._named(item)
        if not name:
            yield item
        elif self._claims.take(name, anyway):
            yield from self._look(item)
        else:
            self._later.append(item)


def _nothing() -> None:
    pass
