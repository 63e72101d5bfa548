"""A disk that is full, and files that may grow no further: one warning, the graph is built, reads go on.

Once there is space again the next run is clean. The disk is a small tmpfs that the test mounts.
"""

import json
import logging
import os
import random
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace

import pytest

import plancache
from plancache.errors import StoreError
from plancache.outcome import Reason, Source
from plancache.store import records
from plancache.store.database import FILE
from plancache.store.directory import Access
from plancache.store.eviction import Bounds
from plancache.store.files import FileStore
from plancache.store.interface import Row
from plancache.store.plans import SqliteStore
from tests import graphs
from tests.conftest import ROOT

ROW = Row("k" * 64, "native", "g", "t", "d", "e", "b", 13000, 13200, "eng4", 4, 1.0, 0.5, 100)
STORES = {"sqlite": SqliteStore.at, "files": FileStore}


def open_store(kind, directory, read_only=False):
    return STORES[kind](directory, Access(read_only=read_only))


def record_of(name, size=20_000):
    row = replace(ROW, key=f"{name}")
    return row, records.encode(row, {"blob": random.Random(name).randbytes(size)})


def put(store, name, size=20_000):
    return store.put(*record_of(name, size))


def right(store, name, size=20_000):
    return store.get(f"{name}", ROW.route) == record_of(name, size)[1]


def attempt(store, name):
    """True, or the error."""
    try:
        stored = put(store, name)
    except StoreError as error:
        return error
    with suppress(StoreError):
        store.maintain(thorough=False)
    return stored


class Disk:
    """A small file system with a filler on it."""

    def __init__(self, path):
        self.path = path
        self.cache = path / "cache"
        self._filler = path / "filler"

    def reserve(self, size):
        self._filler.write_bytes(bytes(size))

    def fill(self):
        """Leave not one byte."""
        with self._filler.open("ab", buffering=0) as filler:
            for size in (1 << 16, 1 << 12, 1):
                with suppress(OSError):
                    while filler.write(bytes(size)) == size:
                        pass

    def free(self):
        self._filler.unlink()


@pytest.fixture
def disk(tmp_path):
    """A tmpfs of 8 MB."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a file system")
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m,mode=0700", "plancache-test", path], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield Disk(path)
    subprocess.run(["umount", "--lazy", path], check=True)


@pytest.fixture(params=list(STORES))
def kind(request):
    return request.param


@pytest.fixture
def warnings(caplog):
    caplog.set_level(logging.WARNING, logger="plancache")

    def said():
        return [record.getMessage() for record in caplog.records if record.name == "plancache"]

    return said


def test_a_full_disk_costs_one_warning_and_reads_go_on(disk, warm, targeted, warnings):
    shutil.copytree(warm, disk.cache)
    with plancache.open(disk.cache) as cache:
        assert cache.build(graphs.matmul()[0]).source is Source.DISK
        disk.fill()
        for m in (16, 24):
            graph, (_, _, c) = graphs.matmul(m=m)
            outcome = cache.build(graph)
            assert (outcome.source, outcome.reason, outcome.stored) == (Source.BUILT, Reason.ABSENT, False)
            assert c.get_dim() == [1, m, 128]
            assert graph.get_execution_plan_count() > 0
        assert cache.build(graphs.conv()[0]).source is Source.DISK
        assert len(warnings()) == 1, warnings()
        disk.free()
        assert cache.build(graphs.matmul(m=16)[0]).stored
    with plancache.open(disk.cache) as cache:
        assert cache.build(graphs.matmul(m=16)[0]).source is Source.DISK
        assert cache.build(graphs.matmul(m=24)[0]).stored
        assert cache.verify().clean
    assert len(warnings()) == 1, warnings()


def test_a_process_that_starts_on_a_full_disk_reads_what_is_there(disk, kind):
    disk.cache.mkdir()
    store = open_store(kind, disk.cache)
    assert put(store, "before")
    store.close()
    disk.fill()
    source = """
import pathlib, sys
from tests.test_disk_full import *
store = open_store(sys.argv[1], pathlib.Path(sys.argv[2]))
print(right(store, "before"))
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", source, kind, disk.cache], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


@pytest.mark.parametrize("journal", [False, True], ids=["closed cleanly", "with a left-over journal"])
def test_what_may_only_be_read_is_served_from_a_full_disk(disk, journal):
    disk.cache.mkdir()
    source = """
import os, pathlib, sys
from tests.test_disk_full import open_store, put
store = open_store("sqlite", pathlib.Path(sys.argv[1]))
assert all(put(store, name) for name in range(5))
os._exit(0) if sys.argv[2] == "True" else store.close()
"""
    subprocess.run([sys.executable, "-c", source, disk.cache, str(journal)], cwd=ROOT, check=True)
    (disk.cache / f"{FILE}-shm").unlink(missing_ok=True)
    disk.fill()
    store = open_store("sqlite", disk.cache, read_only=True)
    assert all(right(store, name) for name in range(5))
    store.close()
    writer = open_store("sqlite", disk.cache)
    assert all(right(writer, name) for name in range(5))
    writer.close()


def test_a_cache_on_a_full_disk_from_the_start_costs_one_warning_and_is_made_later(disk, kind, targeted, warnings):
    disk.fill()
    with plancache.open(disk.cache, store=kind) as cache:
        for _ in range(2):
            graph, (_, _, c) = graphs.matmul()
            outcome = cache.build(graph)
            assert (outcome.source, outcome.stored) == (Source.BUILT, False)
            assert c.get_dim() == [1, 64, 128]
    assert len(warnings()) == 1, warnings()
    disk.free()
    with plancache.open(disk.cache, store=kind) as cache:
        assert cache.build(graphs.matmul()[0]).stored
        assert cache.build(graphs.matmul()[0]).source is Source.DISK
        assert cache.verify().clean
    assert len(warnings()) == 1, warnings()


@pytest.mark.parametrize("size", [80, 100, 120, 160], ids=lambda size: f"{size} KiB")
def test_what_is_called_stored_is_there_though_the_database_could_not_be_made(mounted, tmp_path, size):
    path = mounted("-t", "tmpfs", "-o", f"size={size}k,mode=0700", "plancache-test", tmp_path / "small")
    (path / "cache").mkdir()
    store = open_store("sqlite", path / "cache")
    called = [name for name in range(8) if attempt(store, name) is True]
    assert not called  # not even one has room
    subprocess.run(["mount", "-o", "remount,size=4m", path], check=True)
    assert put(store, "after")  # the same process goes on when there is room
    store.close()
    again = open_store("sqlite", path / "cache")
    assert right(again, "after")
    assert len(list(again.rows())) == 1
    again.close()


def test_what_was_stored_before_the_disk_was_full_stays_and_the_rest_follows(disk, kind):
    disk.reserve(1 << 20)
    disk.cache.mkdir()
    store = STORES[kind](disk.cache, Access(read_only=False), Bounds(12 << 20))  # of which there are 8
    outcomes = [attempt(store, name) for name in range(400)]
    stored = [name for name, outcome in enumerate(outcomes) if outcome is True]
    refused = [name for name, outcome in enumerate(outcomes) if outcome is not True]
    assert stored
    assert refused
    assert not any(outcomes[name].damaged for name in refused)
    assert all(right(store, name) for name in stored)
    assert not any(store.get(f"{name}", ROW.route) for name in refused)
    # Nothing is left of the failures, and it goes on in the same process.
    assert not (disk.cache / "scratch").exists() or not list((disk.cache / "scratch").iterdir())
    disk.free()
    assert put(store, "after")
    for name in stored[: len(stored) // 2]:
        assert store.discard(f"{name}", ROW.route)
    store.maintain()
    assert shutil.disk_usage(disk.path).free > 3 << 20
    store.close()
    again = open_store(kind, disk.cache)
    assert len(list(again.rows())) == len(stored) - len(stored) // 2 + 1
    assert all(right(again, name) for name in ("after", *stored[len(stored) // 2 :]))
    if kind == "sqlite":
        assert again.database.connection().execute("PRAGMA integrity_check").fetchone() == ("ok",)
    again.close()


def test_a_full_disk_is_no_reason_to_set_the_database_aside(disk):
    disk.cache.mkdir()
    store = open_store("sqlite", disk.cache)
    assert put(store, "before")
    disk.fill()
    for name in range(3):
        with pytest.raises(StoreError):
            put(store, name)
    store.maintain()
    store.flush()
    store.close()
    assert list(disk.cache.glob("damaged-*")) == []
    disk.free()
    store = open_store("sqlite", disk.cache)
    assert right(store, "before")
    assert put(store, 0)
    store.close()


LIMITED = """
import json, pathlib, resource, sys
from plancache.errors import StoreError
from tests.test_disk_full import *

kind, directory, limit, warm = sys.argv[1], pathlib.Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "warm"
store = open_store(kind, directory)
if warm:
    assert put(store, "before")
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
found = []
for name in range(4):
    try:
        found.append(put(store, name, 100_000))
    except StoreError as error:
        found.append(error.damaged)
reads = right(store, "before") if warm else None
there = [right(store, name, 100_000) for name in range(4)] if warm or True in found else []
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
print(json.dumps([found, reads, there]))
store.close()
"""


@pytest.mark.parametrize("state", ["warm", "new"])
@pytest.mark.parametrize("limit", [0, 1000, 4096, 20_000, 50_000, 150_000, 400_000])
def test_where_files_may_grow_no_further_puts_fail_cleanly_and_reads_go_on(kind, limit, state, tmp_path):
    directory = tmp_path / "cache"
    directory.mkdir()
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", LIMITED, kind, directory, str(limit), state],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    found, reads, there = json.loads(done.stdout)
    # True: stored; False: refused, and the database is not taken for damaged.
    assert len(found) == 4
    assert there in ([], found), "what was said to be stored is there, and nothing else"
    if limit <= 50_000:
        assert found == [False] * 4
    assert reads is (True if state == "warm" else None)
    assert list(directory.glob("damaged-*")) == []
    # The next run is clean.
    store = open_store(kind, directory)
    assert all(right(store, name, 100_000) == stored for name, stored in enumerate(found))
    assert put(store, "after")
    assert right(store, "after")
    if kind == "sqlite":
        assert store.database.connection().execute("PRAGMA integrity_check").fetchone() == ("ok",)
    else:
        assert list((directory / "scratch").iterdir()) == []
    store.close()
