"""Which cache a command is about: the options before the command."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plancache.cache import PlanCache

KINDS = ("sqlite", "files")


@dataclass(frozen=True)
class Place:
    """A cache directory (None: the one that the environment says) and the kind of store that is forced on it."""

    directory: Path | None
    store: str | None

    def open(self, mode: str) -> PlanCache:
        """The cache, opened in a mode."""
        from plancache import opening  # cuDNN's modules: `plancache path` and --help need none

        return opening.open(self.directory, mode=mode, store=self.store)
