"""Kernel caches on disk: one for each name or topology, device and environment, kept entry by entry.

A kernel cache is rows of the same store as plans: one for the header, one for each kernel, so that jobs that add
different kernels both keep theirs, and damage costs one kernel. A document of an unknown schema is kept whole.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from plancache.cudnn import kernel_cache, libraries
from plancache.cudnn.device import Device
from plancache.cudnn.kernel_cache import Kernel, Tracked
from plancache.errors import PlanCacheError, RecordError, StoreError
from plancache.keys import digest
from plancache.store import records
from plancache.store.interface import Listed, Row, Store

_PREFIX = "kernels-"
_HEADER, _WHOLE = f"{_PREFIX}header", f"{_PREFIX}whole"
# Kernels kept for one topology. A handful serves all lengths of a layer; more are a graph whose sizes never repeat.
MOST = 256
_TOUCH = 60.0  # seconds
_live: weakref.WeakSet[KernelCache] = weakref.WeakSet()


def is_kernel(row: Row) -> bool:
    """Whether a row of the store is part of a kernel cache, and not a plan."""
    return row.route.startswith(_PREFIX)


@dataclass(frozen=True)
class KernelKey:
    """What a kernel cache is filed under: its name or the topology of its graphs, the device and the libraries."""

    subject: str
    device: Device
    environment: str
    label: str
    of_topology: bool = False

    @property
    def hash(self) -> str:
        """The key's name on disk."""
        return digest(["kernels", self.subject, self.device.fingerprint, self.environment])


class KernelCache:
    """A live kernel cache that is loaded from disk, and written again only when its revision moved.

    Made by `PlanCache.kernel_cache`; a context manager that flushes at its end. `native` goes to
    `pygraph(kernel_cache=...)`. What other processes add later is not taken in by a `native` that is already held:
    cuDNN loads a kernel cache once.
    """

    def __init__(
        self,
        stores: Sequence[Store],
        key: KernelKey,
        signing_key: bytes | None,
        writes: Callable[[], bool],
        warn: Callable[[PlanCacheError], None],
    ) -> None:
        """Made by a cache.

        Args:
            stores: its layers, the writable one first.
            writes: whether it writes, which may change while it rests after a fault.
            warn: where faults go.
        """
        self.key = key
        self._stores = stores
        self._signing_key = signing_key
        self._writes = writes
        self._warn = warn
        self._pending: list[Kernel] = []
        self._whole: str | None = None
        self._retired: list[Any] = []
        self._touched: dict[str, float] = {}
        self._entries: dict[str, Kernel] = {}
        self._header: str | None = None
        self._loaded_rows: list[tuple[Row, bytes]] = []
        self.lock = threading.RLock()
        self.written = 0
        self._tracked = self._load()
        _live.add(self)

    @property
    def native(self) -> Any:
        """cuDNN's kernel cache."""
        return self._tracked.native

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The kernels that are known to be in it."""
        return tuple(self._entries.values())

    @property
    def loaded(self) -> bool:
        """Whether it was loaded with something from disk."""
        return self._tracked.loaded > 0

    @property
    def serves(self) -> bool:
        """Whether there is a kernel in it at all; a build that compiled nothing else took an engine that needs none."""
        return bool(self._entries) or self.loaded or self._whole is not None

    @property
    def revision(self) -> int | None:
        """cuDNN's revision of it; None before the first build, or where this cuDNN has none."""
        return self._tracked.revision

    @property
    def state(self) -> dict[str, Any]:
        """The bookkeeping of this process: what was loaded, what cuDNN says now, and what was written."""
        return {
            "key": self.key.hash,
            "name": self.key.label,
            "kernels": len(self._entries),
            "loaded": self._tracked.loaded,
            "revision": self._tracked.revision,
            "written_revision": self._tracked.known,
            "serialized": self._tracked.serialized,
            "written": self.written,
        }

    def moved(self, build_seconds: float = float("inf")) -> bool:
        """Whether kernels were compiled since it was loaded or last written."""
        return bool(self._pending) or self._tracked.moved(build_seconds)

    def is_native(self, native: Any) -> bool:
        """Whether `native` is this one's, or was before cuDNN refused what it was loaded with."""
        return self.native is native or any(one is native for one in self._retired)

    def use(self, kernel: Kernel) -> None:
        """Note that a kernel served, so that it is not what goes first; on disk once a minute at most."""
        now = time.monotonic()
        if self._stores and now - self._touched.get(kernel.identity, -_TOUCH) >= _TOUCH:
            self._touched[kernel.identity] = now
            try:
                for route in (_HEADER, _route(kernel.identity)):
                    self._stores[0].get(self.key.hash, route)
            except StoreError as error:
                self._warn(error)

    def flush(self, build_seconds: float = float("inf")) -> int:
        """Write new kernels, if the revision moved; how many were written.

        Args:
            build_seconds: how long the build before took; only asked where cuDNN has no revision.

        What cannot be written is a warning, as every fault of the cache.
        """
        with self.lock:
            if self._tracked.moved(build_seconds):
                document = self._tracked.document()
                if document is None:
                    return 0
                parts = kernel_cache.split(document)
                if parts is None:
                    return self._write_whole(document)
                new = [kernel for kernel in parts.kernels if kernel.identity not in self._entries]
                self._header = self._header or parts.header
                self._entries |= {kernel.identity: kernel for kernel in new}
                self._pending += new
            return self._write_pending()

    def refresh(self) -> bool:
        """Take in what other processes have stored since, as a new `native`; whether there was something."""
        with self.lock:
            self.flush()
            there = {listed.row.route for _, listed in self._rows()}
            known = {_route(kernel.identity) for kernel in self._entries.values()}
            if not {route for route in there - known if route != _HEADER}:
                return False
            self._tracked = self._load()
            return True

    def reset(self) -> Callable[[], None]:
        """Start again with an empty `native`, since cuDNN may not have taken the loaded document; gives a way back."""
        before = self._entries, self._header, self._whole, self._tracked, list(self._retired)
        self._retired.append(self.native)
        self._entries, self._header, self._whole = {}, None, None
        self._tracked = Tracked(None, 0)

        def back() -> None:
            self._entries, self._header, self._whole, self._tracked, self._retired = before

        return back

    def discard_loaded(self) -> None:
        """Remove what was loaded and turned out to be unfit, if it is still there as it was."""
        rows, self._loaded_rows = self._loaded_rows, []
        self._discard(rows)

    def _discard(self, rows: list[tuple[Row, bytes]]) -> None:
        if self._stores and self._writes():
            try:
                for row, record in rows:
                    self._stores[0].discard(row.key, row.route, record)
            except StoreError as error:
                self._warn(error)

    def __enter__(self) -> KernelCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.flush()

    # ------------------------------------------------------------ disk

    def _load(self) -> Tracked:
        header, whole, entries = self._read()
        if whole is not None:
            self._whole = whole
            return Tracked(whole, 1)
        if header is None or not entries:
            return Tracked(None, 0)
        document = kernel_cache.join(header, entries.values())
        parts = kernel_cache.split(document)
        assert parts is not None
        self._header = header
        self._entries |= {kernel.identity: kernel for kernel in parts.kernels}
        return Tracked(document, len(entries))

    def _rows(self) -> list[tuple[Store, Listed]]:
        found = []
        for store in self._stores:
            try:
                found += [(store, listed) for listed in store.rows(key=self.key.hash)]
            except StoreError as error:
                self._warn(error)
        return found

    def _read(self) -> tuple[str | None, str | None, Mapping[str, str]]:
        header = whole = None
        entries: dict[str, str] = {}
        unfit: list[tuple[Row, bytes]] = []
        self._loaded_rows = []
        for store, listed in self._rows():
            try:
                record = store.get(listed.row.key, listed.row.route, use=False)
                row, fields = records.decode(record or b"", self._signing_key)
            except StoreError as error:
                self._warn(error)
                continue
            except RecordError as error:
                self._warn(error)
                if store is self._stores[0] and not error.foreign:
                    unfit.append((listed.row, record or b""))
                continue
            if (row.key, row.route) != (self.key.hash, listed.row.route) or row.driver > self.key.device.driver:
                continue
            if row.frontend > libraries.frontend_version():
                continue
            self._loaded_rows.append((row, record or b""))
            text = fields["kernel"]
            if row.route == _HEADER:
                header = header or text
            elif row.route == _WHOLE:
                whole = whole or text
            else:
                entries.setdefault(row.route, text)
        if unfit:
            self._discard(unfit)  # else they would stand in the way of what is compiled anew
        return header, whole, entries

    def _write_pending(self) -> int:
        """Write what was compiled; what cannot be written stays for the next time."""
        if not self._pending or not self._stores or not self._writes():
            return 0
        try:
            assert self._header is not None
            self._put(_HEADER, self._header, "header", 0, 0)
            for kernel in self._pending:
                self._put(_route(kernel.identity), kernel.text, kernel.name, kernel.engine, kernel.size)
            written, self._pending = len(self._pending), []
            self.written += 1
            self._bound()
        except StoreError as error:
            self._warn(error)
            return 0
        return written

    def _write_whole(self, document: str) -> int:
        self._warn(PlanCacheError("a kernel cache of an unknown schema is kept whole", found=self.key.label))
        if document == self._whole or not self._stores or not self._writes():
            return 0
        try:
            self._stores[0].discard(self.key.hash, _WHOLE)
            self._put(_WHOLE, document, "whole", 0, len(document))
        except StoreError as error:
            self._warn(error)
            return 0
        self._whole = document
        self.written += 1
        return 1

    def _put(self, route: str, text: str, name: str, engine: int, size: int) -> None:
        row = Row(
            key=self.key.hash,
            route=route,
            graph=self.key.subject,
            topology=self.key.subject,
            device=self.key.device.fingerprint,
            environment=self.key.environment,
            build="",
            driver=self.key.device.driver,
            frontend=libraries.frontend_version(),
            name=name,
            engine=engine,
            created=time.time(),
            seconds=0.0,
            size=size,
            builder=self.key.label,
        )
        self._stores[0].put(row, records.encode(row, {"kernel": text}, self._signing_key))

    def _bound(self) -> None:
        """At most `MOST` kernels, the least recently useful first."""
        store = self._stores[0]
        listed = [one for one in store.rows(key=self.key.hash) if one.row.route not in (_HEADER, _WHOLE)]
        for one in sorted(listed, key=lambda each: each.used)[: max(0, len(listed) - MOST)]:
            store.discard(one.row.key, one.row.route)


def _route(identity: str) -> str:
    return f"{_PREFIX}{identity[:32]}"


@atexit.register
def _flush_all() -> None:
    """Also of kernel caches whose `PlanCache` is gone."""
    for kernels in list(_live):
        kernels.flush()
