"""The store against what a user would pick instead, in one run: `python -m benchmarks.store`.

Needs the packages of the dependency group `bench`. Ratios within one run are what counts; this machine is noisy.
Bounds of the project: get ≤ 1.5 × raw SQLite with a SHA-256, put ≤ 2 × raw, reopening ≤ 5 ms, get at 1,000,000 rows
of 1 KB ≤ 1.5 × get at 1,000, two readers ≥ 1.8 × one, put at the cap ≤ 3 × put below it.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from benchmarks.harness import machine, measure, measure_in_turns
from plancache.store import records
from plancache.store.directory import Access
from plancache.store.eviction import Bounds
from plancache.store.interface import Row
from plancache.store.plans import SqliteStore
from plancache.store.plans import _number as row_number

ROW = Row("", "native", "g" * 64, "t" * 64, "d" * 64, "e" * 64, "b" * 64, 13000, 13200, "eng4", 4, 1.0, 0.5, 100)
PUTS, GETS = 1000, 3000


def key_of(number: int) -> str:
    """A key as plans have them."""
    return hashlib.sha256(str(number).encode()).hexdigest()


def body(size: int, number: int) -> bytes:
    """Bytes that no compressor makes smaller."""
    return random.Random(number).randbytes(size)


def plancache_store(
    home: Path, size: int, bounds: Bounds | None = None
) -> tuple[Callable[[int], object], Callable[[int], object]]:
    """What `PlanCache` does on disk: get and check, encode and put."""
    store = SqliteStore.at(home, Access(read_only=False), bounds)
    values = [records.encode(ROW, {"blob": body(size, number)}) for number in range(64)]
    rows = [replace(ROW, key=key_of(number)) for number in range(2 * PUTS + 400)]  # made with the record, not by a put

    def put(number: int) -> object:
        stored = store.put(rows[number], values[number % 64])
        store.maintain(thorough=False)
        return stored

    def get(number: int) -> object:
        record = store.get(key_of(number), "native")
        assert record is not None
        return hashlib.sha256(record).digest()

    return put, get


def raw_sqlite(home: Path, size: int) -> tuple[Callable[[int], object], Callable[[int], object]]:
    """The least that SQLite can do: one table, WAL, a SHA-256 of what was read."""
    connection = sqlite3.connect(home / "raw.sqlite3", isolation_level=None)
    connection.execute("PRAGMA page_size = 16384")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute("CREATE TABLE IF NOT EXISTS blobs (key TEXT PRIMARY KEY, value BLOB)")
    values = [body(size, number) for number in range(64)]

    keys = [key_of(number) for number in range(2 * PUTS)]

    def put(number: int) -> object:
        return connection.execute("INSERT OR REPLACE INTO blobs VALUES (?, ?)", (keys[number], values[number % 64]))

    def get(number: int) -> object:
        (value,) = connection.execute("SELECT value FROM blobs WHERE key = ?", (key_of(number),)).fetchone()
        return hashlib.sha256(value).digest()

    return put, get


def plain_files(home: Path, size: int) -> tuple[Callable[[int], object], Callable[[int], object]]:
    """A file each, published by rename, a SHA-256 of what was read."""
    values = [body(size, number) for number in range(64)]

    def put(number: int) -> object:
        scratch = home / f"scratch{os.getpid()}"
        scratch.write_bytes(values[number % 64])
        return scratch.rename(home / key_of(number))

    return put, lambda number: hashlib.sha256((home / key_of(number)).read_bytes()).digest()


def disk_cache(home: Path, size: int) -> tuple[Callable[[int], object], Callable[[int], object]]:
    """diskcache, as it comes; it checks nothing."""
    import diskcache

    cache = diskcache.Cache(str(home))
    values = [body(size, number) for number in range(64)]
    return (lambda number: cache.set(key_of(number), values[number % 64]), lambda number: cache[key_of(number)])


def cuda_core(home: Path, size: int) -> tuple[Callable[[int], object], Callable[[int], object]]:
    """cuda.core's program cache of files; it checks nothing."""
    from cuda.core.utils import FileStreamProgramCache

    cache = FileStreamProgramCache(home)
    values = [body(size, number) for number in range(64)]

    def put(number: int) -> object:
        cache[key_of(number).encode()] = values[number % 64]
        return None

    return put, lambda number: cache[key_of(number).encode()]


PEERS = {
    "plancache": plancache_store,
    "raw sqlite3 + SHA-256": raw_sqlite,
    "files with rename": plain_files,
    "diskcache": disk_cache,
    "cuda.core files": cuda_core,
}


def against_peers(size: int) -> None:
    """Medians and p99 of put and get, and each peer's against raw SQLite's."""
    puts: dict[str, Callable[[], object]] = {}
    gets: dict[str, Callable[[], object]] = {}
    with ExitStack() as stack:
        for name, make in PEERS.items():
            home = stack.enter_context(tempfile.TemporaryDirectory(prefix="plancache-bench-"))
            try:
                put, get = make(Path(home), size)
            except ImportError as error:
                print(f"{name:<24} not measured: {error}")
                continue
            numbers, order = iter(range(10**9)), random.Random(1)
            puts[name] = lambda put=put, numbers=numbers: put(next(numbers))
            gets[name] = lambda get=get, order=order: get(order.randrange(PUTS))
        putting = measure_in_turns(puts, rounds=20, times=PUTS // 20)
        getting = measure_in_turns(gets, rounds=20, times=GETS // 20)
    raw_put, raw_get = putting["raw sqlite3 + SHA-256"], getting["raw sqlite3 + SHA-256"]
    print(f"{size // 1024} KB{'':<20}{'put µs':>9}{'p99':>9}{'× raw':>7}{'get µs':>9}{'p99':>9}{'× raw':>7}")
    for name, timing in putting.items():
        ratios = timing.median / raw_put.median, getting[name].median / raw_get.median
        print(
            f"{name:<24}{1e6 * timing.median:>9.0f}{1e6 * timing.p99:>9.0f}{ratios[0]:>7.2f}"
            f"{1e6 * getting[name].median:>9.0f}{1e6 * getting[name].p99:>9.0f}{ratios[1]:>7.2f}"
        )


def at_the_cap(size: int = 64 << 10) -> None:
    """A put into a directory at its bound against one far below it."""
    timings = []
    for bounds in (Bounds(1 << 40), Bounds(64 << 20)):
        with tempfile.TemporaryDirectory(prefix="plancache-bench-") as home:
            put, _ = plancache_store(Path(home), size, bounds)
            numbers = iter(range(10**9))
            for _ in range(1200):  # 75 MB: past the bound
                put(next(numbers))
            started = time.perf_counter()
            timing = measure(lambda put=put, numbers=numbers: put(next(numbers)), 1000)
            timings.append((timing, time.perf_counter() - started))
    (free, free_total), (capped, capped_total) = timings
    print(
        f"put at the cap of 64 MB: median {1e6 * capped.median:.0f} µs, {capped.median / free.median:.2f} × uncapped; "
        f"all 1,000 of them {capped_total / free_total:.2f} ×"
    )


def many_rows() -> None:
    """A get among a million rows of 1 KB against one among a thousand."""
    medians = []
    for rows in (1000, 1_000_000):
        with tempfile.TemporaryDirectory(prefix="plancache-bench-") as home:
            store = SqliteStore.at(Path(home), Access(read_only=False), Bounds(1 << 40))
            store.put(replace(ROW, key="first"), b"x")
            connection = store.database.connection()
            fill(connection, rows)
            order = random.Random(2)
            keys = [key_of(order.randrange(rows)) for _ in range(5010)]
            medians.append(measure(lambda store=store, keys=keys: store.get(keys.pop(), "native"), 5000).median)
            store.close()
    print(f"get among 1,000,000 rows of 1 KB: {1e6 * medians[1]:.1f} µs, {medians[1] / medians[0]:.2f} × among 1,000")


def fill(connection: sqlite3.Connection, rows: int) -> None:
    """Insert rows in one transaction: what is measured is reading."""
    names = [name for (_, name, *_) in connection.execute("PRAGMA table_info(plans)")]
    template = {**{name: getattr(ROW, name, 0) for name in names}, "used": 0.0, "hits": 0, "record": body(1024, 0)}
    statement = f"INSERT INTO plans ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})"
    connection.execute("BEGIN")
    numbered = ({**template, "key": key_of(n), "id": row_number(key_of(n), ROW.route)} for n in range(rows))
    connection.executemany(statement, ([row[name] for name in names] for row in numbered))
    connection.execute("COMMIT")
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


READER = """
import sys, time, random, pathlib
from benchmarks.store import key_of
from plancache.store.directory import Access
from plancache.store.plans import SqliteStore
store = SqliteStore.at(pathlib.Path(sys.argv[1]), Access(read_only=False))
store.get(key_of(0), "native")
order = random.Random(int(sys.argv[2]))
print("ready", flush=True)
sys.stdin.readline()
end, done = time.perf_counter() + 2.0, 0
while time.perf_counter() < end:
    for _ in range(100):
        store.get(key_of(order.randrange(1000)), "native")
    done += 100
print(done)
"""


def readers(home: Path, count: int) -> int:
    """Gets of 64 KB that `count` processes do in two seconds."""
    running = [
        subprocess.Popen(
            [sys.executable, "-c", READER, str(home), str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(count)
    ]
    for process in running:
        assert process.stdout is not None
        process.stdout.readline()
    for process in running:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    return sum(int(process.communicate()[0]) for process in running)


def reopening() -> None:
    """Opening a warm cache and the first get, and two readers against one."""
    with tempfile.TemporaryDirectory(prefix="plancache-bench-") as home:
        put, _ = plancache_store(Path(home), 64 << 10)
        for number in range(1000):
            put(number)

        def reopen() -> None:
            store = SqliteStore.at(Path(home), Access(read_only=False))
            store.get(key_of(7), "native")
            store.close()

        opened = measure(reopen, 300)
        print(f"reopening a warm cache and one get: {1e3 * opened.median:.2f} ms, p99 {1e3 * opened.p99:.2f} ms")
        one, two = readers(Path(home), 1), readers(Path(home), 2)
        print(f"two readers: {two / one:.2f} × one ({one / 2:,.0f} gets a second)")


def main() -> None:
    """Print everything."""
    print(machine())
    for size in (4 << 10, 64 << 10, 200 << 10):
        against_peers(size)
    at_the_cap()
    reopening()
    if shutil.disk_usage(tempfile.gettempdir()).free > 8 << 30:
        many_rows()


if __name__ == "__main__":
    main()
