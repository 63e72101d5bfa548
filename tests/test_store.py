"""The database by itself: one schema for all, migrations, connections; and the records that it holds."""

import random
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from plancache.errors import RecordError, StoreError
from plancache.store import database, records
from plancache.store.database import FILE, _statements, migrations
from plancache.store.directory import Access
from plancache.store.plans import SqliteStore
from tests.conftest import ROOT
from tests.stores import fill, found, record, row

KEY = b"a key of more than sixteen bytes"


@pytest.fixture
def opened(tmp_path):
    """Opens the store of one directory, as often as asked; all are closed in the end."""
    (tmp_path / "cache").mkdir()
    stores = []

    def opener(**access):
        stores.append(SqliteStore.at(tmp_path / "cache", Access(**{"read_only": False, **access})))
        return stores[-1]

    yield opener
    for store in stores:
        store.close()


@pytest.fixture
def store(opened):
    return opened()


@pytest.fixture
def raw(tmp_path, store):
    """A connection of its own to the store's database, as another program would have it."""
    store.rows()
    connection = sqlite3.connect(tmp_path / "cache" / FILE, isolation_level=None)
    yield connection
    connection.close()


# ------------------------------------------------------------ schema and migrations


def test_the_ledger_names_each_migration_and_the_version_counts_them(store):
    connection = store.database.connection()
    applied = connection.execute("SELECT name FROM _sqlite_migrations WHERE migration_set = 'plancache'").fetchall()
    assert [name for (name,) in applied] == [file.stem for file in migrations()]
    assert connection.execute("PRAGMA user_version").fetchone() == (len(migrations()),)
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert connection.execute("PRAGMA page_size").fetchone() == (8192,)
    assert connection.execute("PRAGMA auto_vacuum").fetchone() == (2,)  # incremental


def test_an_older_database_is_migrated_when_it_is_opened_and_keeps_its_rows(opened, store, tmp_path, monkeypatch):
    stored = fill(store, 3)
    store.close()
    later = tmp_path / "0002_later.sql"
    later.write_text("-- one; two\nALTER TABLE plans ADD COLUMN later TEXT;\nCREATE INDEX i ON plans (later);\n")
    monkeypatch.setattr(database, "migrations", lambda: [*migrations(), later])
    with pytest.raises(StoreError, match="found schema 1; expected schema 2") as refused:
        opened(read_only=True).get("k", "native")
    assert "older plancache, and may not be written" in str(refused.value)
    assert found(store, stored) == 3
    connection = store.database.connection()
    assert connection.execute("PRAGMA user_version").fetchone() == (2,)
    assert connection.execute("SELECT count(*) FROM _sqlite_migrations").fetchone() == (2,)
    assert connection.execute("SELECT count(later), count(*) FROM plans").fetchone() == (0, 3)


def test_a_newer_database_is_refused_with_the_versions_named_and_left_alone(opened, store):
    stored = fill(store, 3)
    store.database.connection().execute("PRAGMA user_version = 7")
    store.database.connection().execute(
        "INSERT INTO _sqlite_migrations (migration_set, name, applied_at) VALUES ('plancache', '9999_future', '')"
    )
    store.close()
    for access in ({}, {"read_only": True}):
        with pytest.raises(
            StoreError, match=f"found schema 7; expected schema {len(migrations())} or older"
        ) as refused:
            opened(**access).get("k", "native")
        assert not refused.value.damaged
    with pytest.raises(StoreError, match="newer plancache"):
        opened().put(row(9), record(row(9)))
    connection = sqlite3.connect(store.database.file)
    connection.execute("PRAGMA user_version = 1")
    connection.close()
    assert found(store, stored) == 3


def test_a_migration_that_fails_leaves_nothing_behind(store, tmp_path, monkeypatch):
    bad = tmp_path / "0002_bad.sql"
    bad.write_text("CREATE TABLE half (a);\nCREATE TABLE plans (b);\n")
    with monkeypatch.context() as patched:
        patched.setattr(database, "migrations", lambda: [*migrations(), bad])
        with pytest.raises(StoreError, match="already exists"):
            store.put(row(1), record(row(1)))
    connection = sqlite3.connect(store.database.file)
    assert connection.execute("PRAGMA user_version").fetchone() == (1,)
    assert connection.execute("SELECT count(*) FROM sqlite_master WHERE name = 'half'").fetchone() == (0,)
    assert connection.execute("SELECT count(*) FROM _sqlite_migrations").fetchone() == (1,)
    connection.close()
    assert store.put(row(1), record(row(1)))


def test_reading_a_cache_that_nobody_has_written_to_makes_no_database(store):
    # It takes half a second, and a job whose plans all come from layers needs none.
    assert store.get("k", "native") is None
    assert store.keys("k") == list(store.rows()) == store.tallies() == []
    store.maintain()
    store.flush()
    assert not store.database.file.exists()
    assert store.put(row(1), record(row(1)))
    assert store.get(row(1).key, row(1).route) == record(row(1))


def test_a_schema_number_that_was_damaged_is_put_right_by_the_ledger(opened, store):
    stored = fill(store, 3)
    store.database.connection().execute("PRAGMA user_version = 0")
    store.close()
    assert found(store, stored) == 3
    store.close()
    assert found(opened(read_only=True), stored) == 3


def test_statements_are_split_as_sqlite_does():
    assert list(_statements("-- a; b\nCREATE TABLE t (a);\nINSERT INTO t VALUES (';\n');\n")) == [
        "-- a; b\nCREATE TABLE t (a);\n",
        "INSERT INTO t VALUES (';\n');\n",
    ]


def test_opening_an_up_to_date_cache_imports_no_tool_of_migrations(store, run):
    fill(store, 1)
    store.close()
    source = """
import sys, pathlib
from plancache.store.directory import Access
from plancache.store.plans import SqliteStore
from tests.stores import row
store = SqliteStore.at(pathlib.Path(sys.argv[1]), Access(False))
assert store.get(row(0).key, "native")
print([name for name in ("sqlite_utils", "filelock", "click", "platformdirs", "cudnn") if name in sys.modules])
store.close()
"""
    assert run(source, store.database.file.parent) == "[]\n"


RACE = """
import sys, pathlib, time
import filelock, sqlite_utils
from plancache.store.directory import Access
from plancache.store.plans import SqliteStore
from tests.stores import record, row
store = SqliteStore.at(pathlib.Path(sys.argv[1]), Access(False))
print("ready", flush=True)
sys.stdin.readline()
one = row(int(sys.argv[2]))
print(store.put(one, record(one)))
store.close()
"""


def race(source, path, count=16):
    """Start so many processes, let them all go at once; what each said, and its complaints."""
    command = [sys.executable, "-W", "error", "-c", source, str(path)]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    running = [subprocess.Popen([*command, str(number)], cwd=ROOT, text=True, **pipes) for number in range(count)]
    for process in running:
        assert process.stdout.readline() == "ready\n"
    for process in running:
        print(file=process.stdin, flush=True)
    return [process.communicate(timeout=120) for process in running]


def test_sixteen_processes_that_make_one_cache_end_with_one_schema(store, tmp_path):
    for _ in range(2):
        for file in (tmp_path / "cache").iterdir():
            file.unlink()
        assert race(RACE, tmp_path / "cache") == [("True\n", "")] * 16
        assert found(store, {row(number): record(row(number)) for number in range(16)}) == 16
        connection = store.database.connection()
        assert connection.execute("SELECT count(*) FROM _sqlite_migrations").fetchone() == (len(migrations()),)
        store.close()
        assert sorted(file.name for file in (tmp_path / "cache").iterdir()) == ["migrate.lock", FILE]


def test_sixteen_processes_that_find_one_damaged_database_lose_nothing_of_what_they_store(store, tmp_path):
    for _ in range(2):
        for file in (tmp_path / "cache").iterdir():
            file.unlink()
        (tmp_path / "cache" / FILE).write_bytes(b"no database at all" * 1000)
        assert race(RACE, tmp_path / "cache") == [("True\n", "")] * 16
        assert found(store, {row(number): record(row(number)) for number in range(16)}) == 16
        store.close()
        assert len(list((tmp_path / "cache").glob("damaged-*"))) == 1


# ------------------------------------------------------------ connections


def test_a_reader_waits_for_no_writer(store, raw):
    stored = fill(store, 3)
    raw.execute("BEGIN IMMEDIATE")
    raw.execute("DELETE FROM plans")
    started = time.monotonic()
    assert found(store, stored) == 3
    assert len(list(store.rows())) == 3
    assert time.monotonic() - started < 1.0
    raw.execute("ROLLBACK")


def test_a_writer_waits_for_another_one_for_a_bounded_time(store, raw):
    fill(store, 1)
    raw.execute("BEGIN IMMEDIATE")
    started = time.monotonic()
    with pytest.raises(StoreError, match="database is locked") as locked:
        store.put(row(2), record(row(2)))
    assert 1.0 < time.monotonic() - started < 10.0
    assert not locked.value.damaged
    raw.execute("ROLLBACK")
    assert store.put(row(2), record(row(2)))


def descriptors(file):
    """How many of this process's descriptors are open on a file or its companions."""
    count = 0
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the descriptor of the listing itself
            count += str(entry.readlink()).startswith(str(file))
    return count


def test_connections_of_threads_that_ended_are_closed(store):
    fill(store, 3)
    before, connections = descriptors(store.database.file), []

    def work():
        assert store.get(row(0).key, "native")
        connections.append(store.database.connection())

    for _ in range(5):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert len(set(connections)) == 5
    for connection in connections:
        with pytest.raises(sqlite3.ProgrammingError, match="closed database"):
            connection.execute("SELECT 1")
    # SQLite itself keeps one descriptor for the next connection, since closing it would drop this thread's locks.
    assert descriptors(store.database.file) <= before + 1
    store.close()
    assert descriptors(store.database.file) == 0


def test_a_store_that_is_dropped_leaves_nothing_open(tmp_path):
    (tmp_path / "cache").mkdir()
    for number in range(3):
        store = SqliteStore.at(tmp_path / "cache", Access(False))
        assert store.put(row(number), record(row(number)))
        assert store.get(row(0).key, "native")
        del store
    assert descriptors(tmp_path / "cache") == 0


def test_a_process_that_closes_nothing_ends_without_a_word(run, tmp_path):
    # From 3.13 on a connection that was left open is a ResourceWarning: an error here.
    (tmp_path / "cache").mkdir()
    source = """
import os, pathlib, sys, threading
from plancache.store.directory import Access
from plancache.store.plans import SqliteStore
from tests.stores import fill, row
store = SqliteStore.at(pathlib.Path(sys.argv[1]), Access(False))
fill(store, 3)
thread = threading.Thread(target=lambda: store.get(row(0).key, "native"))
thread.start()
thread.join()
child = os.fork()
if child:
    assert os.waitpid(child, 0)[1] == 0
print(len(list(store.rows())), flush=True)
"""
    done = run(source, tmp_path / "cache", check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("3\n3\n", "", 0)


def test_a_forked_child_closes_what_it_inherits_and_its_parents_connection_lives_on(run, tmp_path):
    (tmp_path / "cache").mkdir()
    source = """
import os, pathlib, sqlite3, sys
from plancache.store.directory import Access
from plancache.store.plans import SqliteStore
from tests.stores import fill, found, record, row
store = SqliteStore.at(pathlib.Path(sys.argv[1]), Access(False))
stored = fill(store, 3)
parents = store.database.connection()
child = os.fork()
if child == 0:
    try:
        parents.execute("SELECT 1")
    except sqlite3.ProgrammingError as closed:
        assert "closed database" in str(closed)
        assert found(store, stored) == 3
        assert store.put(row(8), record(row(8)))
        store.close()
        os._exit(0)
    os._exit(1)
assert os.waitpid(child, 0)[1] == 0
assert store.database.connection() is parents
assert store.put(row(9), record(row(9)))
print(len(list(store.rows())), parents.execute("PRAGMA integrity_check").fetchone())
store.close()
"""
    assert run(source, tmp_path / "cache") == "5 ('ok',)\n"


# ------------------------------------------------------------ records


@pytest.fixture(scope="module", params=[None, KEY], ids=["plain", "signed"])
def key(request):
    return request.param


@pytest.fixture(scope="module")
def real(key):
    """A real plan's record: a matmul for an H200."""
    plain = (ROOT / "tests" / "data" / "records" / "1-matmul-h200.bin").read_bytes()
    return plain if key is None else records.encode(*records.decode(plain), key)


def test_every_flipped_bit_is_found(real, key):
    chance = random.Random(1)
    places = {(0, 0), (len(real) - 1, 7)}
    while len(places) < 1000:
        places.add((chance.randrange(len(real)), chance.randrange(8)))
    for place, bit in places:
        flipped = bytearray(real)
        flipped[place] ^= 1 << bit
        with pytest.raises(RecordError):
            records.decode(bytes(flipped), key)
    assert records.decode(real, key)[0].engine == 4


def test_a_record_that_is_cut_or_continued_is_found(real, key):
    middle = len(real) // 2
    for damaged in (
        *(real[:length] for length in (0, 1, 6, 7, 8, 39, 40, 41, middle, len(real) - 1)),
        real + b"\0",
        real + real,
        real[:middle] + real[middle + 1 :],
        bytes(len(real)),
        real[:40],
    ):
        with pytest.raises(RecordError):
            records.decode(damaged, key)


def test_a_record_says_why_it_is_not_taken():
    one = row(1)
    plain, signed = record(one), record(one, key=KEY)
    for whole, key, why in (
        (plain, KEY, "a record is not signed; expected a signature by the key in PLANCACHE_KEY_FILE"),
        (signed, None, "a record is signed, and there is no key to check it; expected PLANCACHE_KEY_FILE"),
        (signed, b"another key of sixteen", "a record's signature is wrong"),
        (plain[:-1], None, "a record's checksum is wrong"),
        (b"SQLite format 3", None, "this is no plancache record"),
        (b"PLANCA\2s" + plain[8:], None, "a record of another version or kind"),
        (b"PLANCA\1x" + plain[8:], None, "a record of another version or kind"),
    ):
        with pytest.raises(RecordError) as refused:
            records.decode(whole, key)
        assert str(refused.value).startswith(why)


def test_a_record_whose_checksum_is_right_and_whose_content_is_none_is_refused():
    for body in (b"", b"no zstd", b"\x28\xb5\x2f\xfd"):
        prefix = b"PLANCA\1s"
        forged = prefix + records._digest(prefix, body, None) + body
        with pytest.raises(RecordError, match="cannot be unpacked"):
            records.decode(forged)
