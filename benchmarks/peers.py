"""What a user would pick instead of plancache's store: each as functions that put and get by number.

Sizes are of bytes that no compressor makes smaller. With a cap the store keeps itself to so many bytes on disk.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import random
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from plancache.store import records
from plancache.store.directory import Access
from plancache.store.eviction import Bounds
from plancache.store.interface import Row
from plancache.store.plans import SqliteStore

ROW = Row("", "native", "g" * 64, "t" * 64, "d" * 64, "e" * 64, "b" * 64, 13000, 13200, "eng4", 4, 1.0, 0.5, 100)
_VALUES = 64
Pair = tuple[Callable[[int], object], Callable[[int], object]]


def key_of(number: int) -> str:
    """A key as plans have them."""
    return hashlib.sha256(str(number).encode()).hexdigest()


def bodies(size: int) -> list[bytes]:
    """A few values of a size."""
    return [random.Random(number).randbytes(size) for number in range(_VALUES)]


def plancache_store(home: Path, size: int, cap: int | None = None) -> Pair:
    """What `PlanCache` does on disk: put a record within the bound; get one and check its digest.

    Records are encoded beforehand: packing is no part of a store, and no peer packs.
    """
    store = SqliteStore.at(home, Access(read_only=False), Bounds(cap or 1 << 40))
    values = [records.encode(ROW, {"blob": body}) for body in bodies(size)]

    def put(number: int) -> object:
        stored = store.put(replace(ROW, key=key_of(number)), values[number % _VALUES])
        store.maintain(thorough=False)
        return stored

    def get(number: int) -> object:
        record = store.get(key_of(number), "native")
        return None if record is None else hashlib.sha256(record).digest()

    return put, get


def raw_sqlite(home: Path, size: int, cap: int | None = None) -> Pair:
    """The least that SQLite can do: one table, WAL, a SHA-256 of what was read. It has no bound."""
    connection = sqlite3.connect(home / "raw.sqlite3", isolation_level=None)
    for pragma in ("page_size = 16384", "journal_mode = WAL", "synchronous = NORMAL", "busy_timeout = 2000"):
        connection.execute(f"PRAGMA {pragma}")
    connection.execute("CREATE TABLE IF NOT EXISTS blobs (key TEXT PRIMARY KEY, value BLOB)")
    values = bodies(size)

    def put(number: int) -> object:
        statement = "INSERT OR REPLACE INTO blobs VALUES (?, ?)"
        return connection.execute(statement, (key_of(number), values[number % _VALUES]))

    def get(number: int) -> object:
        found = connection.execute("SELECT value FROM blobs WHERE key = ?", (key_of(number),)).fetchone()
        return None if found is None else hashlib.sha256(found[0]).digest()

    return put, get


def plain_files(home: Path, size: int, cap: int | None = None) -> Pair:
    """A file each, published by rename, a SHA-256 of what was read. It has no bound."""
    values = bodies(size)

    def put(number: int) -> object:
        scratch = home / f"scratch{os.getpid()}"
        scratch.write_bytes(values[number % _VALUES])
        return scratch.rename(home / key_of(number))

    return put, lambda number: hashlib.sha256((home / key_of(number)).read_bytes()).digest()


def disk_cache(home: Path, size: int, cap: int | None = None) -> Pair:
    """diskcache, as it comes; it checks nothing."""
    import diskcache

    cache, values = diskcache.Cache(str(home), **({} if cap is None else {"size_limit": cap})), bodies(size)
    return (
        lambda number: cache.set(key_of(number), values[number % _VALUES]),
        lambda number: cache.get(key_of(number)),
    )


def cuda_core(home: Path, size: int, cap: int | None = None) -> Pair:
    """cuda.core's program cache of files; it checks nothing."""
    from cuda.core.utils import FileStreamProgramCache

    cache, values = FileStreamProgramCache(home, **({} if cap is None else {"max_size_bytes": cap})), bodies(size)

    def put(number: int) -> object:
        cache[key_of(number).encode()] = values[number % _VALUES]
        return None

    return put, lambda number: cache.get(key_of(number).encode())


def jax_lru(home: Path, size: int, cap: int | None = None) -> Pair:
    """The files of JAX's compilation cache, as it comes; it checks nothing."""
    from jax._src.lru_cache import LRUCache

    cache, values = LRUCache(str(home), max_size=-1 if cap is None else cap), bodies(size)
    return (
        lambda number: cache.put(key_of(number), values[number % _VALUES]),
        lambda number: cache.get(key_of(number)),
    )


RAW, FILES = "raw sqlite3 + SHA-256", "files with rename"
PEERS: dict[str, Callable[..., Pair]] = {
    "plancache": plancache_store,
    RAW: raw_sqlite,
    FILES: plain_files,
    "diskcache": disk_cache,
    "cuda.core files": cuda_core,
    "JAX's LRUCache": jax_lru,
}
# Those that keep themselves to a bound on disk.
BOUNDED = ("plancache", "diskcache", "cuda.core files", "JAX's LRUCache")


def _plancache_again(home: Path) -> None:
    store = SqliteStore.at(home, Access(read_only=False))
    assert store.get(key_of(7), "native", use=False) is not None
    store.close()


def _raw_again(home: Path) -> None:
    connection = sqlite3.connect(home / "raw.sqlite3", isolation_level=None)
    assert connection.execute("SELECT value FROM blobs WHERE key = ?", (key_of(7),)).fetchone() is not None
    connection.close()


def _disk_cache_again(home: Path) -> None:
    import diskcache

    cache = diskcache.Cache(str(home))
    assert cache.get(key_of(7)) is not None
    cache.close()


def _cuda_core_again(home: Path) -> None:
    from cuda.core.utils import FileStreamProgramCache

    assert FileStreamProgramCache(home).get(key_of(7).encode()) is not None


def _jax_again(home: Path) -> None:
    from jax._src.lru_cache import LRUCache

    assert LRUCache(str(home), max_size=-1).get(key_of(7)) is not None


# Opening what is there, one get without looking at a digest, and closing.
REOPENED: dict[str, Callable[[Path], object]] = {
    "plancache": _plancache_again,
    RAW: _raw_again,
    FILES: lambda home: (home / key_of(7)).read_bytes(),
    "diskcache": _disk_cache_again,
    "cuda.core files": _cuda_core_again,
    "JAX's LRUCache": _jax_again,
}
_NEEDS = {"diskcache": "diskcache", "cuda.core files": "cuda.core", "JAX's LRUCache": "jax"}


def installed(quick: bool) -> dict[str, Callable[..., Pair]]:
    """All peers; with `quick` those that are here, since the gate judges none of those that may lack.

    Raises:
        SystemExit: one is not installed, and `quick` is not set.
    """
    lacking = {name for name, module in _NEEDS.items() if not _is_here(module)}
    if lacking and not quick:
        message = f"not installed: {', '.join(sorted(lacking))}. Run `make bench`, or `pip install --group bench`"
        raise SystemExit(f"{message}; with --quick they are left out.")
    return {name: make for name, make in PEERS.items() if name not in lacking}


def _is_here(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package that it is in
        return False
