"""Kernel caches on disk: one for each name or topology, device and environment, kept entry by entry.

A kernel cache is rows of the same store as plans: one for the header, one for each kernel, so that jobs that add
different kernels both keep theirs, and damage costs one kernel. A document of an unknown schema is kept whole.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from plancache.cudnn import kernel_cache, libraries
from plancache.cudnn.device import Device
from plancache.cudnn.kernel_cache import Kernel, Tracked
from plancache.errors import RecordError
from plancache.keys import digest
from plancache.store import records
from plancache.store.interface import Listed, Row, Store

_log = logging.getLogger("plancache")
_PREFIX = "kernels-"
_HEADER, _WHOLE = f"{_PREFIX}header", f"{_PREFIX}whole"
# Kernels kept for one topology. A handful serves all lengths of a layer; more are a graph whose sizes never repeat.
MOST = 256


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

    def __init__(self, store: Store | None, key: KernelKey, signing_key: bytes | None, read_only: bool) -> None:
        self.key = key
        self._store = store
        self._signing_key = signing_key
        self._read_only = read_only or store is None
        self._entries: dict[str, Kernel] = {}
        self._header: str | None = None
        self._loaded_rows: list[tuple[Row, bytes]] = []
        self.lock = threading.RLock()
        self.written = 0
        self._tracked = self._load()

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
        return self._tracked.moved(build_seconds)

    def flush(self, build_seconds: float = float("inf")) -> int:
        """Write new kernels, if the revision moved; how many were written.

        Args:
            build_seconds: how long the build before took; only asked where cuDNN has no revision.

        Raises:
            StoreError: the cache cannot be written.
        """
        with self.lock:
            if not self.moved(build_seconds):
                return 0
            document = self._tracked.document()
            if document is None:
                return 0
            parts = kernel_cache.split(document)
            if parts is None:
                return self._write_whole(document)
            new = [kernel for kernel in parts.kernels if kernel.identity not in self._entries]
            self._header = self._header or parts.header
            self._entries |= {kernel.identity: kernel for kernel in new}
            return self._write(new)

    def refresh(self) -> bool:
        """Take in what other processes have stored since, as a new `native`; whether there was something.

        Raises:
            StoreError: the cache cannot be read or written.
        """
        with self.lock:
            if self._store is None:
                return False
            self.flush()
            there = {listed.row.route for listed in self._rows()}
            known = {_route(kernel.identity) for kernel in self._entries.values()}
            if not {route for route in there - known if route != _HEADER}:
                return False
            self._tracked = self._load()
            return True

    def reset(self) -> None:
        """Start again with an empty `native`: cuDNN did not take the loaded document."""
        with self.lock:
            self._entries, self._header = {}, None
            self._tracked = Tracked(None, 0)

    def discard_loaded(self) -> None:
        """Remove what was loaded and turned out to be unfit, if it is still there as it was.

        Raises:
            StoreError: the cache cannot be written.
        """
        rows, self._loaded_rows = self._loaded_rows, []
        if self._store is not None and not self._read_only:
            for row, record in rows:
                self._store.discard(row.key, row.route, record)

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
            return Tracked(whole, 1)
        if header is None or not entries:
            return Tracked(None, 0)
        document = kernel_cache.join(header, entries.values())
        parts = kernel_cache.split(document)
        assert parts is not None
        self._header = header
        self._entries |= {kernel.identity: kernel for kernel in parts.kernels}
        return Tracked(document, len(entries))

    def _rows(self) -> list[Listed]:
        return [] if self._store is None else list(self._store.rows(key=self.key.hash))

    def _read(self) -> tuple[str | None, str | None, Mapping[str, str]]:
        header = whole = None
        entries: dict[str, str] = {}
        self._loaded_rows = []
        for listed in self._rows():
            assert self._store is not None
            record = self._store.get(listed.row.key, listed.row.route)
            try:
                row, fields = records.decode(record or b"", self._signing_key)
            except RecordError as error:
                _log.warning("%s: a kernel of %s is passed over", error, self.key.label)
                continue
            if (row.key, row.route) != (self.key.hash, listed.row.route) or row.driver > self.key.device.driver:
                continue
            if row.frontend > libraries.frontend_version():
                continue
            self._loaded_rows.append((row, record or b""))
            text = fields["kernel"]
            if row.route == _HEADER:
                header = text
            elif row.route == _WHOLE:
                whole = text
            else:
                entries[row.route] = text
        return header, whole, entries

    def _write(self, new: list[Kernel]) -> int:
        if self._read_only or self._store is None or not new:
            return 0
        assert self._header is not None
        self._put(_HEADER, self._header, "header", 0, 0, ())
        for kernel in new:
            self._put(_route(kernel.identity), kernel.text, kernel.name, kernel.engine, kernel.size, kernel.operands)
        self.written += 1
        self._bound()
        return len(new)

    def _write_whole(self, document: str) -> int:
        _log.warning("a kernel cache of an unknown schema is kept whole: %s", self.key.label)
        if self._read_only or self._store is None:
            return 0
        self._store.discard(self.key.hash, _WHOLE)
        self._put(_WHOLE, document, "whole", 0, len(document), ())
        self.written += 1
        return 1

    def _put(self, route: str, text: str, name: str, engine: int, size: int, shape: Any) -> None:
        assert self._store is not None
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
        fields = {"kernel": text, "shape": json.dumps(shape)}
        self._store.put(row, records.encode(row, fields, self._signing_key))

    def _bound(self) -> None:
        """At most `MOST` kernels, the least recently useful first."""
        assert self._store is not None
        listed = [one for one in self._rows() if one.row.route not in (_HEADER, _WHOLE)]
        for one in sorted(listed, key=lambda each: each.used)[: max(0, len(listed) - MOST)]:
            self._store.discard(one.row.key, one.row.route)


def _route(identity: str) -> str:
    return f"{_PREFIX}{identity[:32]}"
