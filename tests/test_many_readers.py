"""Two hundred processes that open one warm cache at once and read: none is kept waiting, and none finds it locked."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from plancache.store import records
from plancache.store.database import FILE
from plancache.store.directory import Access
from plancache.store.files import FileStore
from plancache.store.interface import Row
from plancache.store.plans import SqliteStore

ROOT = Path(__file__).resolve().parent.parent
ROW = Row("k" * 64, "native", "g", "t", "d", "e", "b", 13000, 13200, "eng4", 4, 1.0, 0.5, 100)
RECORD = records.encode(ROW, {"blob": bytes(range(256)) * 300})
STORES = {"sqlite": SqliteStore.at, "files": FileStore}
READERS = 200


def read_at_once(kind, directory, mode, readers):
    """In a process of its own: fork readers that wait for one another, then read. Prints what came of it.

    With the mode `read-write` each also opens the cache for writing, as a job does, and closes it: then the last one
    closes the journal just when the next one opens it. With `beside a writer` one process writes meanwhile. With
    `after a kill` the record is in a journal that a killed writer left, and the first one has to take it over.
    """
    results, report = os.pipe()
    gate, opening = os.pipe()
    processes = []
    for _ in range(int(readers)):
        process = os.fork()
        if process == 0:
            signal.alarm(60)
            os.close(opening)
            os.read(gate, 1)  # until the parent opens it for all
            os.write(report, read(kind, Path(directory), mode).encode())
            os._exit(0)
        processes.append(process)
    writer = None
    if mode == "beside a writer":
        writer = os.fork()
        if writer == 0:
            os.close(report)
            os.close(opening)
            write_until_killed(kind, Path(directory), gate)
    os.close(report)
    started = time.monotonic()
    os.close(opening)
    said = b""
    while part := os.read(results, 1 << 16):
        said += part
    for process in processes:
        os.waitpid(process, 0)
    if writer is not None:
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
    lines = said.decode().splitlines()
    found = sorted({line for line in lines if line != "right"})
    print(json.dumps({"right": lines.count("right"), "found": found, "seconds": time.monotonic() - started}))


def read(kind, directory, mode):
    """One line, short enough to be written at once."""
    try:
        store = STORES[kind](directory, Access(read_only=mode == "read-only"))
        right = all(store.get(ROW.key, ROW.route) == RECORD for _ in range(5))
        store.close()
        return "right\n" if right else "another record\n"
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:500].replace("\n", " ") + "\n"


def write_until_killed(kind, directory, gate):
    signal.alarm(60)  # also where the test is no longer there to do it
    os.read(gate, 1)
    store = STORES[kind](directory, Access(read_only=False))
    for number in range(1_000_000):
        store.put(replace(ROW, key=f"{number:064x}"), RECORD)
        store.maintain(thorough=False)


@pytest.mark.parametrize("mode", ["read-only", "read-write", "beside a writer", "after a kill"])
@pytest.mark.parametrize("kind", list(STORES))
def test_two_hundred_processes_open_and_read_one_record_at_once(kind, mode, tmp_path):
    directory = tmp_path / "cache"
    directory.mkdir()
    source = f"""
import os, pathlib, signal
from tests.test_many_readers import *
store = STORES[{kind!r}](pathlib.Path({str(directory)!r}), Access(read_only=False))
store.put(ROW, RECORD)
if {mode == "after a kill"}:
    os.kill(os.getpid(), signal.SIGKILL)
store.close()
"""
    warmed = subprocess.run([sys.executable, "-W", "error", "-c", source], cwd=ROOT)
    assert warmed.returncode == (-signal.SIGKILL if mode == "after a kill" else 0)
    source = "import sys; from tests.test_many_readers import read_at_once; read_at_once(*sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", source, kind, directory, mode, str(READERS)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert (found["right"], found["found"]) == (READERS, [])
    assert found["seconds"] < 30
    if kind == "sqlite" and mode == "read-write":
        # The last one has closed the journal: what is left is one file that can be copied.
        assert sorted(file.name for file in directory.iterdir()) == ["migrate.lock", FILE]


def test_a_process_that_only_reads_a_record_starts_without_what_writing_needs(tmp_path):
    # Each of hundreds of processes would pay for these imports before its first plan.
    SqliteStore.at(tmp_path, Access(read_only=False)).put(ROW, RECORD)
    source = """
import sys, pathlib
from plancache.store.directory import Access
from plancache.store.plans import SqliteStore
record = SqliteStore.at(pathlib.Path(sys.argv[1]), Access(read_only=False)).get("k" * 64, "native")
print(len(record), sorted({"cudnn", "filelock", "sqlite_utils", "click", "rich"} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", source, tmp_path], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{len(RECORD)} []\n"
