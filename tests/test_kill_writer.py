"""Writers that are killed at any moment: nothing is torn, nothing is lost that was acknowledged, nothing is left over.

No cuDNN here: the rounds run in one light process of their own, which forks the writers.
"""

import json
import os
import random
import select
import signal
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from plancache.errors import RecordError
from plancache.store import files, records
from plancache.store.database import FILE
from plancache.store.directory import Access
from plancache.store.eviction import Bounds
from plancache.store.files import FileStore
from plancache.store.interface import Row
from plancache.store.plans import SqliteStore

ROOT = Path(__file__).resolve().parent.parent
ROW = Row("k" * 64, "native", "g", "t", "d", "e", "b", 13000, 13200, "eng4", 4, 1.0, 0.5, 100)
STORES = {"sqlite": SqliteStore.at, "files": FileStore}
ROUNDS, DIRECTORIES = 100, 20


class Hasty(Bounds):
    """Nothing is evicted here, and the journal is checkpointed after every few records: writers are killed in that."""

    journal = 256 << 10
    database = 1 << 40


def open_store(kind, directory):
    return STORES[kind](directory, Access(read_only=False), Hasty())


def write(kind, directory, name, acknowledge):
    """A writer: stores records until it is killed, and says of each that it was stored."""
    try:
        store = open_store(kind, directory)
        chance = random.Random(name)
        for number in range(1_000_000):
            row = replace(ROW, key=f"{chance.getrandbits(256):064x}", name=f"{name}-{number}")
            record = records.encode(row, {"blob": chance.randbytes(chance.randrange(1000, 60_000))})
            if not store.put(row, record):
                raise AssertionError("it was not stored")
            os.write(acknowledge, f"{row.key}\n".encode())
            store.maintain(thorough=number % 4 == 0)
    except BaseException as error:
        os.write(acknowledge, f"error: {type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(1)


def start_writer(kind, directory, name):
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        write(kind, directory, name, writing)
    os.close(writing)
    return process, reading


def acknowledged(reading):
    """Whole lines of what a writer said before it was killed."""
    said = b""
    while part := os.read(reading, 1 << 16):
        said += part
    os.close(reading)
    return said.decode().split("\n")[:-1]


def run_rounds(kind, place, seed):
    """In a process of its own: kill writers at random moments, and look at what is there. Prints the findings.

    Each directory sees several rounds, so that writers also die in making it and in taking over what a dead one left.
    Two writers run at a time: one survives the other for a while.
    """
    if kind == "sqlite":
        # Imported here once: a writer that makes a database needs them, and every round would pay for it.
        import filelock  # noqa: F401
        import sqlite_utils  # noqa: F401
    chance = random.Random(int(seed))
    found = {"acknowledged": 0, "errors": [], "lost": [], "torn": [], "strays": []}
    for number in range(DIRECTORIES):
        directory = Path(place, f"{kind}-{number}")
        directory.mkdir()
        keys = set()
        for turn in range(ROUNDS // DIRECTORIES):
            writers = [start_writer(kind, directory, f"{number}-{turn}-{which}") for which in range(2)]
            for process, reading in writers:
                # The first round of a directory is about making it; the others start once something was stored.
                if turn:
                    select.select([reading], [], [], 10)
                time.sleep(chance.uniform(0, 0.06))
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
            said = [line for _, reading in writers for line in acknowledged(reading)]
            found["errors"] += [line for line in said if line.startswith("error")]
            keys.update(line for line in said if not line.startswith("error"))
            # In another process: a connection here would be inherited by the next writers.
            check_apart(kind, directory, keys, found)
        found["acknowledged"] += len(keys)
    print(json.dumps(found))


def check_apart(kind, directory, keys, found):
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            os.write(writing, json.dumps(check(kind, directory, keys)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    said = b""
    while part := os.read(reading, 1 << 16):
        said += part
    os.close(reading)
    os.waitpid(process, 0)
    for name, what in json.loads(said).items():
        found[name] += what


def check(kind, directory, keys):
    store = open_store(kind, directory)
    lost = [key for key in keys if store.get(key, ROW.route) is None]
    torn = []
    for key, route, listed, record in store.salvage():
        try:
            row, _ = records.decode(record)
        except RecordError as error:
            torn.append(f"{key}: {error}")
        else:
            if (row.key, row.route) != (key, route) or listed not in (None, row):
                torn.append(f"{key}: filed wrongly")
    if kind == "sqlite":
        (state,) = store.database.connection().execute("PRAGMA integrity_check").fetchone()
        torn += [state] if state != "ok" else []
    # Half made files are somebody's who is still at it, until they are old.
    make_old(directory)
    store.maintain()
    store.close()
    return {"lost": lost, "torn": torn, "strays": strays(kind, directory)}


def make_old(directory):
    old = time.time() - files._STALE - 60
    for file in directory.rglob(".*"):
        os.utime(file, (old, old))


def strays(kind, directory):
    names = {file.relative_to(directory).as_posix() for file in directory.rglob("*") if file.is_file()}
    if kind == "sqlite":
        return sorted(names - {FILE, "migrate.lock"})
    # What was being written lies in the scratch directory, and nowhere else.
    return sorted(name for name in names if not name.startswith(("records/", "scratch/", "tallies/")))


@pytest.mark.parametrize("kind", list(STORES))
def test_a_hundred_killed_writers_tear_nothing_and_lose_nothing_that_was_acknowledged(kind, tmp_path):
    source = "import sys; from tests.test_kill_writer import run_rounds; run_rounds(*sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", source, kind, tmp_path, "1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found.pop("acknowledged") > 500, "the writers were killed before they had written anything"
    assert found == {"errors": [], "lost": [], "torn": [], "strays": []}


def test_what_a_killed_writer_of_files_left_is_removed_when_it_is_old_and_not_before(tmp_path):
    # Killed where it matters: all is written, and not yet in its place.
    source = f"""
import os, pathlib, signal
from tests.test_kill_writer import ROW, open_store
rename = pathlib.Path.rename
pathlib.Path.rename = lambda file, to: (
    os.kill(os.getpid(), signal.SIGKILL) if file.parent.name == "scratch" else rename(file, to)
)
open_store("files", pathlib.Path({str(tmp_path)!r})).put(ROW, b"record")
"""
    killed = subprocess.run([sys.executable, "-W", "error", "-c", source], cwd=ROOT, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    (left,) = (tmp_path / "scratch").iterdir()
    store = open_store("files", tmp_path)
    assert store.get(ROW.key, ROW.route) is None
    assert store.put(ROW, b"record")
    store.maintain()
    assert left.exists(), "it may be what another process is writing just now"
    old = time.time() - files._STALE - 60
    os.utime(left, (old, old))
    store.maintain()
    assert not left.exists()
    assert store.get(ROW.key, ROW.route) == b"record"


def test_a_writer_killed_in_its_transaction_leaves_a_database_that_others_use_at_once(tmp_path):
    source = f"""
import os, pathlib, signal
from tests.test_kill_writer import ROW, open_store
store = open_store("sqlite", pathlib.Path({str(tmp_path)!r}))
store.put(ROW, b"record")
connection = store.database.connection()
connection.execute("BEGIN IMMEDIATE")
connection.execute("UPDATE plans SET record = ?", (b"x" * 10_000_000,))
os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-W", "error", "-c", source], cwd=ROOT, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    started = time.monotonic()
    store = open_store("sqlite", tmp_path)
    assert store.get(ROW.key, ROW.route) == b"record"
    assert store.put(replace(ROW, key="other"), b"another")
    assert time.monotonic() - started < 1.0
    store.maintain()
    store.close()
    assert strays("sqlite", tmp_path) == []
    with sqlite3.connect(tmp_path / FILE) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()


def test_what_a_process_left_that_was_killed_in_making_the_database_is_removed_when_it_is_old(tmp_path):
    source = f"""
import os, pathlib, signal
from tests.test_kill_writer import ROW, open_store
os.link = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
open_store("sqlite", pathlib.Path({str(tmp_path)!r})).put(ROW, b"record")
"""
    killed = subprocess.run([sys.executable, "-W", "error", "-c", source], cwd=ROOT, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    left = strays("sqlite", tmp_path)
    assert len(left) == 1
    store = open_store("sqlite", tmp_path)
    assert store.put(ROW, b"record")
    store.maintain()
    assert (tmp_path / left[0]).exists(), "it may be what another process is making just now"
    make_old(tmp_path)
    store.maintain()
    store.close()
    assert strays("sqlite", tmp_path) == []
