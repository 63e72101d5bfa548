"""The store by itself: bytes in, the same bytes out, by one schema."""

import random
import sqlite3
import subprocess
import sys
from dataclasses import replace

import pytest

from plancache.errors import RecordError, StoreError
from plancache.store import records
from plancache.store.database import FILE, _statements, migrations
from plancache.store.interface import Row
from plancache.store.plans import SqliteStore
from tests.conftest import ROOT

ROW = Row("k" * 64, "native", "g", "t", "d", "e", "b", 13000, 13200, "eng4", 4, 1.0, 0.5, 100)


@pytest.fixture
def store(tmp_path):
    store = SqliteStore(tmp_path / "cache")
    yield store
    store.close()


def test_a_record_comes_back_as_it_went_in(store):
    assert store.get(ROW.key, ROW.route) is None
    assert store.put(ROW, b"record")
    assert store.get(ROW.key, ROW.route) == b"record"
    assert store.get(ROW.key, "deviceless") is None
    assert list(store.rows()) == [ROW]
    assert list(store.rows(graph="g", device="d")) == [ROW]
    assert list(store.rows(graph="another")) == []
    with pytest.raises(TypeError, match="no column colour"):
        list(store.rows(colour="red"))


def test_an_older_driver_or_frontend_replaces_a_newer_and_never_the_reverse(store):
    def put(record, driver, frontend):
        return store.put(replace(ROW, driver=driver, frontend=frontend), record)

    assert put(b"first", 13000, 13200)
    assert not put(b"same", 13000, 13200)
    assert not put(b"newer driver", 13010, 13200)
    assert not put(b"newer frontend", 13000, 13201)
    assert not put(b"one older, one newer", 12080, 13201)
    assert store.get(ROW.key, ROW.route) == b"first"
    assert put(b"older driver", 12080, 13200)
    assert put(b"older frontend", 12080, 13100)
    assert store.get(ROW.key, ROW.route) == b"older frontend"


def test_an_unfit_record_is_replaced_only_if_it_is_still_the_one_that_is_there(store):
    store.put(ROW, b"unfit")
    newer = replace(ROW, driver=14000)
    assert not store.put(newer, b"good", replaces=b"another")
    assert store.put(newer, b"good", replaces=b"unfit")
    assert not store.discard(ROW.key, ROW.route, b"unfit")
    assert store.discard(ROW.key, ROW.route, b"good")
    assert list(store.rows()) == []


def test_a_read_only_store_makes_nothing_and_writes_nothing(tmp_path):
    with pytest.raises(StoreError, match="there is no cache here"):
        SqliteStore(tmp_path / "none", read_only=True).get("k", "native")
    assert not (tmp_path / "none").exists()
    writer = SqliteStore(tmp_path / "cache")
    writer.put(ROW, b"record")
    reader = SqliteStore(tmp_path / "cache", read_only=True)
    assert reader.get(ROW.key, ROW.route) == b"record"
    with pytest.raises(StoreError, match="readonly database"):
        reader.put(replace(ROW, key="x"), b"record")
    reader.close()
    writer.close()


def test_opening_an_up_to_date_cache_asks_nothing_of_sqlite_utils(tmp_path):
    SqliteStore(tmp_path / "cache").put(ROW, b"record")
    source = """
import sys, pathlib
from plancache.store.plans import SqliteStore
print(SqliteStore(pathlib.Path(sys.argv[1])).get("k" * 64, "native"), "sqlite_utils" in sys.modules)
"""
    out = subprocess.run(
        [sys.executable, "-c", source, tmp_path / "cache"], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert out.stdout.strip() == "b'record' False"


def test_the_ledger_names_each_migration_and_the_version_counts_them(store):
    store.put(ROW, b"record")
    connection = store.database.connection()
    applied = connection.execute("SELECT name FROM _sqlite_migrations WHERE migration_set = 'plancache'").fetchall()
    assert [name for (name,) in applied] == [file.stem for file in migrations()]
    assert connection.execute("PRAGMA user_version").fetchone() == (len(migrations()),)
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert connection.execute("PRAGMA page_size").fetchone() == (16384,)


def test_a_migration_that_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    good = migrations()
    bad = tmp_path / "0002_bad.sql"
    bad.write_text("CREATE TABLE half (a);\nCREATE TABLE plans (b);\n")
    monkeypatch.setattr("plancache.store.database.migrations", lambda: [*good, bad])
    with pytest.raises(StoreError, match="already exists"):
        SqliteStore(tmp_path / "cache").get("k", "native")
    connection = sqlite3.connect(tmp_path / "cache" / FILE)
    assert connection.execute("PRAGMA user_version").fetchone() == (1,)
    assert connection.execute("SELECT count(*) FROM sqlite_master WHERE name = 'half'").fetchone() == (0,)
    connection.close()
    monkeypatch.undo()
    assert SqliteStore(tmp_path / "cache").put(ROW, b"record")


def test_statements_are_split_as_sqlite_does():
    assert list(_statements("-- a; b\nCREATE TABLE t (a);\nINSERT INTO t VALUES (';\n');\n")) == [
        "-- a; b\nCREATE TABLE t (a);\n",
        "INSERT INTO t VALUES (';\n');\n",
    ]


def test_sixteen_processes_that_make_one_cache_end_with_one_schema(tmp_path):
    source = """
import sys, pathlib
from dataclasses import replace
from plancache.store.plans import SqliteStore
from tests.test_store import ROW
print(SqliteStore(pathlib.Path(sys.argv[1])).put(replace(ROW, key=sys.argv[2]), b"x" * 1000))
"""
    command = [sys.executable, "-W", "error", "-c", source, tmp_path / "cache"]
    running = [
        subprocess.Popen([*command, str(number)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for number in range(16)
    ]
    results = [process.communicate(timeout=120) for process in running]
    assert [out for out, _ in results] == [b"True\n"] * 16, results
    store = SqliteStore(tmp_path / "cache")
    assert len(list(store.rows())) == 16
    store.close()


@pytest.fixture(scope="module")
def record():
    return records.encode({"key": ["a", "b"], "driver": 13000, "blob": bytes(range(256)) * 20})


def test_every_flipped_bit_is_found(record):
    chance = random.Random(1)
    for _ in range(1000):
        flipped = bytearray(record)
        flipped[chance.randrange(len(record))] ^= 1 << chance.randrange(8)
        with pytest.raises(RecordError):
            records.decode(bytes(flipped))


def test_a_record_that_is_cut_or_continued_is_found(record):
    assert records.decode(record)["driver"] == 13000
    for damaged in (b"", record[:7], record[:39], record[:-1], record + b"\0", b"\0" * len(record)):
        with pytest.raises(RecordError):
            records.decode(damaged)
