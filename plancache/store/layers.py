"""Opening stores: a cache directory of either kind, a bundle; and read-only layers under a writable one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from plancache.errors import SettingsError, StoreError
from plancache.store import directory
from plancache.store.database import FILE
from plancache.store.directory import Access
from plancache.store.eviction import Bounds
from plancache.store.files import DIRECTORY, FileStore
from plancache.store.interface import Store
from plancache.store.locks import SingleFlight
from plancache.store.memory import MemoryStore
from plancache.store.plans import SqliteStore
from plancache.store.tallies import Counting

KINDS = ("sqlite", "files")


@dataclass(frozen=True)
class Options:
    """How stores are opened.

    Attributes:
        kind: `sqlite` or `files`; None chooses by what is there, and else by the file system.
        bounds: the bound on disk of the writable one.
        key: with it, records are signed and only signed ones are taken.
        trusted: directories of other owners that are taken although they are not signed.
        wait: seconds that a process waits for another one's build of the same plan.
    """

    kind: str | None = None
    bounds: Bounds = field(default_factory=Bounds)
    key: bytes | None = None
    trusted: tuple[str, ...] = ()
    wait: float = 120.0

    def __post_init__(self) -> None:
        if self.kind not in (None, *KINDS):
            raise SettingsError(
                "unknown kind of store", name="store", found=repr(self.kind), expected=" or ".join(KINDS)
            )


def open_store(path: Path, options: Options, read_only: bool = False) -> tuple[Store, Access]:
    """The store in a cache directory, or of a bundle file.

    Raises:
        StoreError: it is not there and may not be made, or it is refused.
    """
    signed = options.key is not None
    bundle = directory.bundle_access(path, signed=signed, trusted=options.trusted)
    if bundle is not None:
        return SqliteStore(path, bundle, bundle=True), bundle
    access = directory.access(path, read_only=read_only, signed=signed, trusted=options.trusted)
    # What is there is gone on with: all hosts must agree, whatever each one's mount table says.
    there = directory.check_file(path / FILE)
    if (options.kind or ("sqlite" if there else _kind(path))) == "files":
        return FileStore(path, access, options.bounds, options.key), access
    return SqliteStore.at(path, access, options.bounds), access


def _kind(path: Path) -> str:
    if (path / DIRECTORY).is_dir():
        return "files"
    return "sqlite" if directory.filesystem(path) in directory.LOCAL else "files"


class Layers:
    """The writable store and the read-only ones under it, each opened when it is first asked."""

    def __init__(self, path: Path, options: Options, read_only: bool, under: Sequence[Path] = ()) -> None:
        self.path = path
        self.options = options
        self._read_only = read_only
        self.under = tuple(under)
        self._opened: dict[int, Store] = {}
        self._access: Access | None = None
        self._nothing = MemoryStore()
        self._nothing.read_only = True
        #: What lookups came to; the writable store writes it, once it is opened.
        self.counting = self._nothing.counting = Counting()

    def __len__(self) -> int:
        return 1 + len(self.under)

    def __getitem__(self, number: int) -> Store:
        """The store of a layer, 0 the writable one.

        Where there are others under it, and it may not be made, it is an empty one until somebody makes it.

        Raises:
            StoreError: it cannot be opened.
        """
        opened = self._opened.get(number)
        if opened is not None:
            return opened
        if number == 0 and self._read_only and self.under and not self.path.exists():
            return self._nothing
        return self._open(number)

    def _open(self, number: int) -> Store:
        opened = self._opened.get(number)
        if opened is None:
            path = self.path if number == 0 else self.under[number - 1]
            opened, access = open_store(path, self.options, self._read_only or number > 0)
            if number == 0:
                self._access = access
                opened.counting = self.counting
            self._opened[number] = opened
        return opened

    @property
    def top(self) -> Store:
        """The writable one.

        Raises:
            StoreError: it cannot be opened.
        """
        return self._open(0)

    def locks(self, tuning: bool = False, filling: bool = False) -> SingleFlight:
        """The build locks of the writable one, or its tuning locks, or those by which fills share their work.

        Raises:
            StoreError: it cannot be opened, or may not be written.
        """
        if self.top.read_only or self._access is None:
            raise StoreError("a cache that may not be written has no locks", path=self.path)
        return SingleFlight(self.path, self._access, self.options.wait, tuning, filling)

    def opened(self) -> Iterator[Store]:
        """Those that were opened so far."""
        yield from list(self._opened.values())
