"""A cache that is alive when its process forks, and one that many threads use: everybody works on, nothing is damaged.

The stores are tried in light processes of their own, which fork and then say what they found.
"""

import os
import signal
import subprocess
import sys
from contextlib import suppress
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
STORES = {"sqlite": SqliteStore.at, "files": FileStore}

# What every process here starts with: a store that is in use.
PRELUDE = """
import os, pathlib, random, signal, sys, threading, time, warnings
from dataclasses import replace
from plancache.store import records
from tests.test_fork import ROW, STORES, open_store

# Python 3.12 warns of a fork beside threads; whoever does it all the same (data loaders do) must get on.
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
kind, directory = sys.argv[1], pathlib.Path(sys.argv[2])
store = open_store(kind, directory)

def record_of(name):
    row = replace(ROW, key=name)
    return row, records.encode(row, {"blob": random.Random(name).randbytes(20_000)})

def put(name, into=store):
    return into.put(*record_of(name))

def right(name, of=store):
    return of.get(name, ROW.route) == record_of(name)[1]

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def fork(work):
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # whatever becomes of its parent
        try:
            work()
        except BaseException as error:
            say(type(error).__name__, error)
            os._exit(1)
        os._exit(0)
    return child

def wait(child):
    # Not by an alarm alone: a child may hang before it gets to set one.
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "hung"

def pipe():
    # wait, go
    reading, writing = os.pipe()
    return lambda: os.read(reading, 1), lambda: os.write(writing, b"x")

assert put("before")
"""


def open_store(kind, directory):
    return STORES[kind](directory, Access(read_only=False))


@pytest.fixture(params=list(STORES))
def kind(request):
    return request.param


@pytest.fixture
def forking(kind, tmp_path):
    """Run source after the prelude in a process of its own; gives the lines that it and its children said."""
    directory = tmp_path / "cache"
    directory.mkdir()

    def runner(source):
        process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", PRELUDE + source, kind, directory],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            out, errors = process.communicate(timeout=60)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and a child that hangs
            process.wait()
        assert (process.returncode, errors) == (0, "")
        return out.splitlines()

    runner.directory = directory
    yield runner
    check(kind, directory)


def check(kind, directory):
    """Nothing is damaged, and nobody has left anything open behind him."""
    store = open_store(kind, directory)
    for *_, record in store.salvage():
        records.decode(record)
    if kind == "sqlite":
        assert store.database.connection().execute("PRAGMA integrity_check").fetchone() == ("ok",)
    store.close()
    if kind == "sqlite":
        assert sorted(file.name for file in directory.iterdir()) == ["migrate.lock", FILE]


def there(kind, directory, names):
    store = open_store(kind, directory)
    found = [store.get(name, ROW.route) is not None for name in names]
    store.close()
    return found


def test_parent_and_child_read_and_write_on(forking, kind):
    source = """
def work():
    say("child", right("before"), put("of the child"), right("of the child"))

child = fork(work)
say("parent", right("before"), put("of the parent"), right("of the parent"))
say(wait(child), right("of the child"))
"""
    assert sorted(forking(source)) == ["0 True", "child True True True", "parent True True True"]
    assert there(kind, forking.directory, ["before", "of the child", "of the parent"]) == [True] * 3


def test_what_a_child_stores_after_its_parent_has_closed_is_not_lost(forking, kind):
    # The parent is the last one that closes the database, as it believes: it removes the journal.
    source = """
opened, open_ = pipe()
closed, close = pipe()

def work():
    assert right("before")
    open_()
    closed()
    say("child", put("of the child"), right("of the child"))

child = fork(work)
opened()
store.close()
close()
say(wait(child), right("of the child"))
"""
    assert forking(source) == ["child True True", "0 True"]
    assert there(kind, forking.directory, ["of the child"]) == [True]


def test_what_a_child_stores_after_its_parent_has_ended_is_not_lost(forking, kind):
    source = """
ready, get_ready = pipe()
parent = os.getpid()

def work():
    assert right("before")
    get_ready()
    while os.getppid() == parent:
        time.sleep(0.01)
    say("child", put("of the child"), right("of the child"))

fork(work)
ready()
"""
    assert forking(source) == ["child True True"]
    assert there(kind, forking.directory, ["before", "of the child"]) == [True, True]


def test_a_child_that_closes_takes_nothing_from_its_parent(forking, kind):
    source = """
def work():
    assert right("before")
    store.close()

assert wait(fork(work)) == 0
say(right("before"), put("after"), right("after"))
other = open_store(kind, directory)
say(put("of another", other), right("of another"), right("after", other))
other.close()
say(put("at last"), right("at last"))
store.close()
"""
    assert forking(source) == ["True True True", "True True True", "True True"]
    assert there(kind, forking.directory, ["before", "after", "of another", "at last"]) == [True] * 4


def test_children_of_children_work_on(forking, kind):
    source = """
def work(depth):
    assert right("before")
    assert put(f"at {depth}")
    if depth < 5:
        say(depth, wait(fork(lambda: work(depth + 1))), right(f"at {depth + 1}"))

work(0)
"""
    assert sorted(forking(source)) == [f"{depth} 0 True" for depth in range(5)]
    assert there(kind, forking.directory, [f"at {depth}" for depth in range(6)]) == [True] * 6


def test_many_children_write_side_by_side_with_their_parent(forking, kind):
    source = """
def work(name):
    for number in range(10):
        assert put(f"{name}-{number}")
        assert right(f"{name}-{number}") and right("before")

children = [fork(lambda: work(which)) for which in range(8)]
work("parent")
say(*[wait(child) for child in children])
"""
    assert forking(source) == ["0 0 0 0 0 0 0 0"]
    names = [f"{name}-{number}" for name in (*range(8), "parent") for number in range(10)]
    assert there(kind, forking.directory, names) == [True] * len(names)


def test_a_fork_in_the_middle_of_a_listing_harms_neither_side(forking, kind):
    source = """
for number in range(20):
    assert put(f"row {number}")
listing = store.rows()
next(listing)

def work():
    say("child", right("row 7"), put("of the child"), len(list(store.rows())))

child = fork(work)
say("parent", wait(child), len(list(listing)), put("of the parent"))
"""
    assert sorted(forking(source)) == ["child True True 22", "parent 0 20 True"]
    assert there(kind, forking.directory, ["of the child", "of the parent"]) == [True, True]


def test_children_that_are_forked_while_threads_use_the_cache_work_on(forking, kind):
    # A thread may be anywhere when its process forks: in a transaction, or in a lock of SQLite's own.
    source = """
stop = threading.Event()
faults = []

def use(which):
    number = 0
    try:
        while not stop.is_set():
            number += 1
            assert put(f"{which}-{number}") and right(f"{which}-{number}")
            assert all(right("before") for _ in range(5))
    except BaseException as error:
        faults.append(f"{type(error).__name__}: {error}")

def work(name):
    assert right("before"), "a child reads something else"
    assert put(name), "a child cannot write"
    assert right(name), "a child does not find what it wrote"

threads = [threading.Thread(target=use, args=(which,)) for which in range(4)]
for thread in threads:
    thread.start()
states = []
for number in range(40):
    states.append(wait(fork(lambda: work(f"child {number}"))))
    if states[-1] != 0:
        break
stop.set()
for thread in threads:
    thread.join()
say("children", len(states), set(states) == {0}, "threads", faults)
say("lost", [number for number, state in enumerate(states) if state == 0 and not right(f"child {number}")])
"""
    assert forking(source) == ["children 40 True threads []", "lost []"]


def test_a_child_whose_parent_would_not_let_go_in_time_leaves_the_database_alone(tmp_path):
    source = """
import os, pathlib, sqlite3, sys, threading, warnings
from plancache.errors import StoreError
from plancache.store import connections
from tests.test_fork import ROW, open_store

warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
connections._PATIENCE = 0.2
store = open_store("sqlite", pathlib.Path(sys.argv[1]))
store.put(ROW, b"record")
inside, done = threading.Event(), threading.Event()

def stay():
    with store.database.use():
        inside.set()
        done.wait()

thread = threading.Thread(target=stay)
thread.start()
inside.wait()
child = os.fork()
if child == 0:
    try:
        store.get(ROW.key, ROW.route)
    except StoreError as error:
        os._exit(7 if "forked while other threads were using the cache" in str(error) else 1)
    os._exit(2)
state = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
done.set()
thread.join()
print(state, store.get(ROW.key, ROW.route))
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", source, tmp_path], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "7 b'record'\n", "")


def test_eight_threads_of_one_process_read_and_write_side_by_side(forking, kind):
    source = """
faults = []

def use(which):
    chance = random.Random(which)
    try:
        for number in range(40):
            assert put(f"{which}-{number}")
            store.maintain()
            for _ in range(5):
                assert right(f"{which}-{chance.randrange(number + 1)}") and right("before")
            if number % 10 == 0:
                store.flush()
                assert len(list(store.rows())) > number
    except BaseException as error:
        faults.append(f"{type(error).__name__}: {error}")
    finally:
        store.close()

threads = [threading.Thread(target=use, args=(which,)) for which in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
say(faults, all(right(f"{which}-{number}") for which in range(8) for number in range(40)))
store.close()
"""
    assert forking(source) == ["[] True"]


def test_eight_threads_write_one_key_and_one_record_of_them_stays(forking, kind):
    source = """
gate = threading.Barrier(8)
stored = []

def use(which):
    gate.wait()
    stored.append(put("one"))
    assert right("one")

threads = [threading.Thread(target=use, args=(which,)) for which in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
say(len(stored), any(stored), len(list(store.rows(key="one"))))
if kind == "sqlite":
    assert stored.count(True) == 1
"""
    assert forking(source) == ["8 True 1"]


def test_threads_that_end_close_what_they_opened(tmp_path):
    # A job that starts threads for ever must not run out of descriptors.
    source = """
import os, pathlib, sys, threading
from tests.test_fork import ROW, open_store

store = open_store("sqlite", pathlib.Path(sys.argv[1]))
store.put(ROW, b"record")

def use():
    assert store.get(ROW.key, ROW.route) == b"record"

counts = []
for _ in range(50):
    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    counts.append(len(os.listdir("/proc/self/fd")))
print(counts[-1] - counts[0])
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", source, tmp_path], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")


def test_graphs_are_built_and_served_on_both_sides_of_a_fork(run, warm):
    source = """
import os, sys, warnings, plancache
from tests import graphs
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
with plancache.target("h200"), plancache.open(sys.argv[1]) as cache:
    assert cache.build(graphs.matmul()[0]).source == "disk"
    child = os.fork()
    m = 24 if child else 16
    outcomes = [cache.build(graphs.conv()[0]), cache.build(graphs.matmul(m=m)[0]), cache.build(graphs.matmul(m=m)[0])]
    words = ["parent" if child else "child", *(outcome.source for outcome in outcomes), str(outcomes[1].stored)]
    os.write(1, (" ".join(words) + "\\n").encode())  # in one piece, whatever the other one writes
    if child == 0:
        os._exit(0)
    print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    print("parent", cache.build(graphs.matmul(m=16)[0]).source)
"""
    said = run(source, warm).splitlines()
    assert sorted(said) == ["child 0", "child disk built disk True", "parent disk", "parent disk built disk True"]


def test_a_closed_connection_that_somebody_still_holds_does_not_harm_a_child(tmp_path):
    source = """
import os, pathlib, sys, threading
from plancache.store import connections
from tests.test_fork import ROW, open_store

store = open_store("sqlite", pathlib.Path(sys.argv[1]))
store.put(ROW, b"record")
closed = connections.connect(str(store.database.file), timeout=1.0)
closed.close()
child = os.fork()
if child == 0:
    found = []
    thread = threading.Thread(target=lambda: found.append(store.get(ROW.key, ROW.route)), daemon=True)
    thread.start()
    thread.join(20)
    os._exit(0 if found == [b"record"] else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", source, tmp_path], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")
