"""A cache that may not be written is served all the same, and not one byte of it changes."""

import os
import signal
import sqlite3
import subprocess
import sys

import pytest

import plancache
from plancache.errors import MissError, StoreError
from plancache.outcome import Reason, Source
from plancache.store.database import FILE
from plancache.store.directory import Access
from plancache.store.layers import Options, open_store
from plancache.store.plans import SqliteStore
from tests import graphs
from tests.conftest import ROOT
from tests.stores import fill, found, record, row, snapshot
from tests.users import ALICE, BOB

COUNT, SIZE = 20, 20_000
STORED = {row(number): record(row(number), size=SIZE) for number in range(COUNT)}

# ------------------------------------------------------------ in what state a cache was left

KILLED = """
import os, pathlib, signal, sys
from plancache.store.layers import Options, open_store
from tests.stores import fill
store, _ = open_store(pathlib.Path(sys.argv[1]), Options(kind="sqlite"))
fill(store, int(sys.argv[2]), size=int(sys.argv[3]))
os.kill(os.getpid(), signal.SIGKILL)
"""
# A transaction that does not fit into memory is written to the database before it is committed; the journal takes it
# back. (A write-ahead log leaves no such journal; other tools, and older bundles, do.)
KILLED_IN_A_TRANSACTION = """
import os, signal, sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("PRAGMA journal_mode = DELETE")
connection.execute("PRAGMA cache_size = 2")
connection.execute("BEGIN IMMEDIATE")
connection.execute("UPDATE plans SET record = zeroblob(length(record))")
os.kill(os.getpid(), signal.SIGKILL)
"""


def killed(source, *arguments):
    done = subprocess.run([sys.executable, "-c", source, *map(str, arguments)], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL


def filled(directory, kind):
    store, _ = open_store(directory, Options(kind=kind))
    fill(store, COUNT, SIZE)
    store.close()


def closed_cleanly(directory):
    filled(directory, "sqlite")
    assert [file.name for file in directory.iterdir() if file.name != "migrate.lock"] == [FILE]


def with_a_left_over_log(directory):
    killed(KILLED, directory, COUNT, SIZE)
    assert (directory / f"{FILE}-wal").stat().st_size > COUNT * SIZE
    assert (directory / FILE).stat().st_size < SIZE  # everything is in the log


def with_a_left_over_log_alone(directory):
    with_a_left_over_log(directory)
    (directory / f"{FILE}-shm").unlink()


def with_a_left_over_journal(directory):
    closed_cleanly(directory)
    killed(KILLED_IN_A_TRANSACTION, directory / FILE)
    assert (directory / f"{FILE}-journal").stat().st_size > SIZE


def as_files(directory):
    filled(directory, "files")


STATES = [closed_cleanly, with_a_left_over_log, with_a_left_over_log_alone, with_a_left_over_journal, as_files]


@pytest.fixture(params=STATES, ids=lambda state: state.__name__)
def left(request):
    """Leaves a cache with the records of `STORED` in a directory, in one of these states."""
    return request.param


READ = """
import pathlib, sys
from plancache.store.layers import Options, open_store
from tests.stores import found
from tests.test_read_only import STORED
path = pathlib.Path(sys.argv[1])
store, _ = open_store(path, Options(trusted=(str(path),)))
assert store.read_only
print(found(store, STORED), len(list(store.rows())), len(list(store.salvage())))
store.flush()
store.maintain()
store.close()
"""
ALL_OF_IT = f"{COUNT} {COUNT} {COUNT}\n"


def test_on_a_read_only_mount(left, mounted, tmp_path, run, monkeypatch):
    directory, scratch = tmp_path / "cache", tmp_path / "scratch"
    directory.mkdir()
    scratch.mkdir()
    left(directory)
    before = snapshot(directory)
    place = mounted("-o", "bind,ro", directory, tmp_path / "mount")
    assert run(READ, place, TMPDIR=str(scratch)) == ALL_OF_IT
    assert snapshot(directory) == before
    assert list(scratch.iterdir()) == []  # what had to be copied is gone


def test_in_a_directory_that_this_user_may_not_write(left, users):
    directory = users.directory("baked")
    left(directory)
    before = snapshot(directory)
    assert users.run(ALICE, READ, directory) == ALL_OF_IT
    assert snapshot(directory) == before
    assert list(users.temporary(ALICE).iterdir()) == []


def test_in_another_owners_directory_also_by_root_that_could_write(left, users, run):
    directory = users.directory("theirs")
    left(directory)
    for path in (directory, *directory.rglob("*")):
        os.chown(path, BOB, BOB)
    before = snapshot(directory)
    assert run(READ, directory) == ALL_OF_IT
    assert snapshot(directory) == before
    assert users.run(ALICE, READ, directory) == ALL_OF_IT
    assert snapshot(directory) == before


def test_a_directory_of_ones_own_opened_to_be_read_only(left, tmp_path):
    directory = tmp_path / "cache"
    directory.mkdir()
    left(directory)
    before = snapshot(directory)
    store, access = open_store(directory, Options(), read_only=True)
    assert access.read_only
    assert found(store, STORED) == COUNT
    with pytest.raises(StoreError, match="may not be written"):
        store.put(row(99), record(row(99)))
    store.close()
    after = snapshot(directory)
    # A writer may come at any time, so SQLite needs what it shares between processes: memory, no data.
    shared = {str(directory), f"{directory / FILE}-shm", f"{directory / FILE}-wal"}
    assert {name for name in {*before, *after} if before.get(name) != after.get(name)} <= shared
    log = directory / f"{FILE}-wal"
    assert before.get(str(log)) == after.get(str(log)) or log.stat().st_size == 0


def test_a_bundle_is_read_wherever_it_lies(mounted, users, tmp_path, run):
    directory = users.directory("bundles")
    with plancache.open(tmp_path / "cache") as cache:
        fill(cache.store, COUNT, SIZE)
        cache.export_bundle(directory / "plans.bundle")
    before = snapshot(directory)
    assert run(READ, directory / "plans.bundle") == ALL_OF_IT
    assert users.run(ALICE, READ, directory / "plans.bundle") == ALL_OF_IT
    place = mounted("-o", "bind,ro", directory, tmp_path / "mount")
    assert run(READ, place / "plans.bundle") == ALL_OF_IT
    assert snapshot(directory) == before


# ------------------------------------------------------------ when it changes all the same


@pytest.fixture
def watched(mounted, tmp_path):
    """A cache that others write, and the store that reads it from a read-only mount."""
    directory = tmp_path / "cache"
    directory.mkdir()
    closed_cleanly(directory)
    place = mounted("-o", "bind,ro", directory, tmp_path / "mount")
    store, _ = open_store(place, Options())
    assert found(store, STORED) == COUNT
    yield directory, store
    store.close()


WRITE = """
import pathlib, sys
from plancache.store.directory import Access
from plancache.store.plans import SqliteStore
from tests.stores import record, row
store = SqliteStore.at(pathlib.Path(sys.argv[1]), Access(False))
for number in map(int, sys.argv[2:]):
    assert store.put(row(number), record(row(number)))
    print("put", number, flush=True)
    sys.stdin.readline()
store.close()
"""


def has(store, number):
    return store.get(row(number).key, "native") == record(row(number))


def test_what_another_process_stores_is_seen_once_it_is_closed(watched, run):
    directory, store = watched
    assert not has(store, 100)
    run(WRITE, directory, 100)
    assert has(store, 100)
    run(WRITE, directory, 101)
    assert has(store, 101)
    assert found(store, STORED) == COUNT


def test_what_a_writer_stores_is_seen_while_it_has_the_cache_open(watched):
    directory, store = watched
    command = [sys.executable, "-c", WRITE, str(directory), "100", "101"]
    pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as writer:
        for number in (100, 101):
            assert writer.stdout.readline() == f"put {number}\n"
            assert has(store, number)
            assert found(store, STORED) == COUNT
            print(file=writer.stdin, flush=True)
    assert writer.returncode == 0
    assert has(store, 101)


def test_a_database_that_takes_the_others_place_is_seen(watched, tmp_path):
    directory, store = watched
    (tmp_path / "other").mkdir()
    other = SqliteStore.at(tmp_path / "other", Access(False))
    assert other.put(row(100), record(row(100)))
    other.close()
    (tmp_path / "other" / FILE).rename(directory / FILE)
    assert has(store, 100)
    assert found(store, STORED) == 0


def test_a_database_that_is_removed_is_a_fault_and_no_crash(watched):
    directory, store = watched
    (directory / FILE).unlink()
    with pytest.raises(StoreError, match="there is no cache here"):
        store.get(row(0).key, "native")


def test_a_new_bundle_under_the_same_name_is_seen(tmp_path):
    with plancache.open(tmp_path / "cache") as cache, plancache.open(tmp_path / "plans.bundle") as reader:
        fill(cache.store, 2)
        cache.export_bundle(tmp_path / "plans.bundle")
        assert has(reader.store, 1)
        cache.store.put(row(2), record(row(2)))
        assert not has(reader.store, 2)
        cache.export_bundle(tmp_path / "plans.bundle")
        assert has(reader.store, 2)


def test_a_damaged_read_only_database_stays_where_it_is(watched):
    directory, store = watched
    content = (directory / FILE).read_bytes()
    (directory / FILE).write_bytes(b"damage" * 100)
    with pytest.raises(StoreError, match="cannot be used") as damaged:
        store.get(row(0).key, "native")
    assert damaged.value.damaged
    assert list(directory.glob("damaged-*")) == []
    (directory / FILE).write_bytes(content)
    assert found(store, STORED) == COUNT


# ------------------------------------------------------------ real plans

SERVE = """
import sys, plancache
from tests import graphs
with plancache.target("h200"), plancache.open(sys.argv[1]) as cache:
    print([cache.build(getattr(graphs, name)()[0]).source.value for name in ("matmul", "conv", "sdpa")])
"""


@pytest.mark.parametrize("mode", ["read-write", "read-only", "require-hit"])
def test_real_plans_are_served_from_a_read_only_mount_in_every_mode(mode, warm, mounted, tmp_path, run):
    before = snapshot(warm)
    place = mounted("-o", "bind,ro", warm, tmp_path / "mount")
    assert run(SERVE, place, PLANCACHE_MODE=mode) == "['disk', 'disk', 'disk']\n"
    assert snapshot(warm) == before


def test_a_miss_on_a_read_only_mount_is_built_and_not_stored_or_an_error(warm, mounted, tmp_path, targeted, said):
    before = snapshot(warm)
    place = mounted("-o", "bind,ro", warm, tmp_path / "mount")
    with plancache.open(place) as cache:
        for _ in range(2):
            outcome = cache.build(graphs.unary()[0])
            assert (outcome.source, outcome.reason, outcome.stored) == (Source.BUILT, Reason.ABSENT, False)
    with plancache.open(place, mode="require-hit") as cache, pytest.raises(MissError) as missed:
        cache.build(graphs.unary()[0])
    assert missed.value.reason is Reason.ABSENT
    assert snapshot(warm) == before
    assert said() == []


def test_nothing_of_a_cache_in_mode_read_only_or_require_hit_is_written(warm, tmp_path, run):
    connection = sqlite3.connect(warm / FILE)
    before = connection.execute("SELECT * FROM plans").fetchall()
    connection.close()
    bytes_before = (warm / FILE).read_bytes()
    for mode in ("read-only", "require-hit"):
        assert run(SERVE, warm, PLANCACHE_MODE=mode) == "['disk', 'disk', 'disk']\n"
    assert (warm / FILE).read_bytes() == bytes_before
    connection = sqlite3.connect(warm / FILE)
    assert connection.execute("SELECT * FROM plans").fetchall() == before
    connection.close()


def test_real_plans_are_served_from_a_bundle_with_nothing_written(warm, tmp_path, run):
    place = tmp_path / "bundles"
    place.mkdir()
    with plancache.open(warm) as cache:
        cache.export_bundle(place / "plans.bundle")
    before = snapshot(place)
    for mode in ("read-write", "require-hit"):
        assert run(SERVE, place / "plans.bundle", PLANCACHE_MODE=mode) == "['disk', 'disk', 'disk']\n"
    assert snapshot(place) == before


@pytest.mark.parametrize("mode", ["read-only", "require-hit"])
def test_a_directory_that_nobody_has_made_is_an_empty_one_where_layers_serve(mode, warm, tmp_path, targeted, said):
    with plancache.open(tmp_path / "none", mode=mode, layers=[warm]) as cache:
        assert cache.build(graphs.matmul()[0]).source is Source.LAYER
        assert cache.lookup(graphs.matmul(m=48)[0]).reason is Reason.ABSENT
        with pytest.raises(StoreError, match="there is no cache here"):  # nothing is exported from it by mistake
            cache.export_bundle(tmp_path / "bundle")
        (tmp_path / "none").mkdir()
        with plancache.open(tmp_path / "none", mode="read-write") as other:
            assert other.build(graphs.matmul(m=48)[0]).stored
        assert cache.build(graphs.matmul(m=48)[0]).source is Source.DISK
    assert said() == []
