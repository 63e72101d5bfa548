"""What things cost as rows of 1 KB grow from a thousand to a million: `python -m benchmarks.scale`.

Listings and explanations read every row by design, and are measured up to a hundred thousand.
"""

from __future__ import annotations

import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click

import plancache
from benchmarks.harness import Check, Column, Result, Table, child, environment, main
from benchmarks.peers import ROW, bodies, key_of
from plancache.cli import cli
from plancache.store.directory import Access
from plancache.store.eviction import Bounds
from plancache.store.plans import SqliteStore
from plancache.store.plans import _number as row_number
from tests import graphs

ROWS = (1000, 10_000, 100_000, 1_000_000)
LISTED = 100_000
_FREE = 8 << 30  # bytes of disk that the largest one needs, with room
# Against a thousand rows: nothing that a job does may grow with the rows.
BOUNDS = {"get": 2.0, "put": 3.0, "put at the cap": 3.0}

# Seconds of each, round by round, and the memory of the process; the last 10 puts are at the cap.
_JOB = """
import json, pathlib, random, sys, time
from dataclasses import replace
from benchmarks.peers import ROW, bodies, key_of
from plancache.store.directory import Access
from plancache.store.eviction import Bounds
from plancache.store.plans import SqliteStore
home, rows = pathlib.Path(sys.argv[1]), int(sys.argv[2])
def clocked(call, *args):
    started = time.perf_counter()
    call(*args)
    return time.perf_counter() - started
def peak():  # MB; getrusage's is that of the parent, if it was larger
    status = pathlib.Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith("VmHWM")).split()[1]) / 1024
def put(store, number):
    store.put(replace(ROW, key=key_of(number)), value)
    store.maintain(thorough=False)
def puts(store, first, count):
    return [clocked(put, store, first + n) for n in range(count)]
value = bodies(1024)[0]
store = SqliteStore.at(home, Access(read_only=False), Bounds(1 << 40))
order = random.Random(2)
answer = {"get": [clocked(store.get, key_of(order.randrange(rows)), "native") for _ in range(2000)][200:]}
answer["put"] = puts(store, rows, 300)[50:]
answer["memory"] = peak()
store.close()
size = (home / "plancache.sqlite3").stat().st_size
store = SqliteStore.at(home, Access(read_only=False), Bounds(size + (1 << 20)))
answer["put at the cap"] = puts(store, rows + 300, 2200)[-300:]
store.close()
print(json.dumps(answer))
"""


def fill(home: Path, rows: int) -> None:
    """One real plan, and so many rows beside it, in one transaction: what is measured is what comes after."""
    with plancache.target("h200"), plancache.open(home, max_bytes=1 << 40) as cache:
        cache.build(graphs.unary()[0])
    store = SqliteStore.at(home, Access(read_only=False), Bounds(1 << 40))
    _insert(store.database.connection(), rows)
    store.close()


def _insert(connection: sqlite3.Connection, rows: int) -> None:
    names = [name for (_, name, *_) in connection.execute("PRAGMA table_info(plans)")]
    template = {**{name: getattr(ROW, name, 0) for name in names}, "used": 0.0, "hits": 0, "record": bodies(1024)[0]}
    statement = f"INSERT INTO plans ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})"
    connection.execute("BEGIN")
    numbered = ({**template, "key": key_of(n), "id": row_number(key_of(n), ROW.route)} for n in range(rows))
    connection.executemany(statement, ([row[name] for name in names] for row in numbered))
    connection.execute("COMMIT")
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


def command(home: Path, *what: str) -> float | None:
    """Seconds of a command from start to end, in a process of its own; None for one that this plancache lacks."""
    if what[0] not in cli.list_commands(click.Context(cli)):
        return None
    started = time.perf_counter()
    line = [sys.executable, "-m", "plancache", "--dir", str(home), *what]
    subprocess.run(line, stdout=subprocess.DEVNULL, check=True, env=environment())
    return time.perf_counter() - started


def explained(home: Path) -> float:
    """Seconds that an explanation takes."""
    with plancache.target("h200"), plancache.open(home, mode="read-only") as cache:
        graph = graphs.matmul()[0]
        started = time.perf_counter()
        cache.explain(graph)
        return time.perf_counter() - started


def run(quick: bool) -> Result:
    """Each number of rows in a directory of its own."""
    table, medians = [], {}
    room = shutil.disk_usage(tempfile.gettempdir()).free > _FREE
    counts = (1000, 100_000) if quick else ROWS if room else ROWS[:-1]
    for rows in counts:
        with tempfile.TemporaryDirectory(prefix="plancache-bench-") as place:
            home = Path(place, "cache")
            fill(home, rows)
            listed: list[float | None] = [None, None, None]
            if rows <= LISTED and not quick:
                listed = [explained(home), command(home, "ls", "--json"), command(home, "stats")]
            done = child(_JOB, home, rows)
        medians[rows] = {what: statistics.median(done[what]) for what in BOUNDS}
        micros = [1e6 * seconds for what in BOUNDS for seconds in (medians[rows][what], _p99(done[what]))]
        table.append((f"{rows:,}", [*micros, *(None if one is None else 1e3 * one for one in listed), done["memory"]]))
    columns = [Column(title) for what in BOUNDS for title in (f"{what}, µs", "p99")]
    columns += [Column(title) for title in ("explain, ms", "`ls`, ms", "`stats`, ms", "memory, MB")]
    most = counts[-1]
    checks = [
        Check(f"{what} among {most:,} rows against 1,000", medians[most][what] / medians[1000][what], bound)
        for what, bound in BOUNDS.items()
    ]
    return Result([Table("rows", columns, table)], checks)


def _p99(seconds: list[float]) -> float:
    return sorted(seconds)[int(0.99 * (len(seconds) - 1))]


if __name__ == "__main__":
    main("scale", run)
