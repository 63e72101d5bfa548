"""Single flight: of all processes that miss one key at once, one builds, and nobody waits for ever."""

import errno
import fcntl
import json
import logging
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest

import plancache
from plancache.errors import StoreError
from plancache.outcome import Source
from plancache.store import eviction, locks
from plancache.store.database import FILE
from plancache.store.directory import Access
from plancache.store.locks import FILES, SingleFlight
from plancache.store.plans import SqliteStore
from tests import graphs
from tests.conftest import ROOT

KEY = "0a1b2c3d" * 8
LIGHT = """
import os, pathlib, signal, sys, time
from plancache.errors import StoreError
from plancache.store.directory import Access
from plancache.store.locks import SingleFlight

directory, key = pathlib.Path(sys.argv[1]), sys.argv[2]
flight = SingleFlight(directory, Access(read_only=False), 30.0)

def say(*words):
    os.write(1, " ".join(map(str, words)).encode() + b"\\n")
"""


@pytest.fixture
def warnings(caplog):
    caplog.set_level(logging.WARNING, logger="plancache")

    def said():
        return [record.getMessage() for record in caplog.records if record.name == "plancache"]

    return said


@pytest.fixture
def start():
    """Start Python source in a process of its own, with pipes; it and its children are killed when the test ends."""
    running = []

    def starter(source, *args):
        command = [sys.executable, "-W", "error", "-c", source, *map(str, args)]
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        running.append(process)
        return process

    yield starter
    for process in running:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def flight(directory, wait=30.0):
    return SingleFlight(directory, Access(read_only=False), wait)


def never():
    return False


def refuse(directory, holder):
    """Whoever asks now does not get the lock, and is told who has it."""
    says = f"held for 0 s by process {holder.pid} on"
    with pytest.raises(StoreError, match=says), flight(directory, 0.0).turn(KEY, never):
        raise AssertionError("two hold one lock")


def is_free(file):
    """Whether nobody holds a lock file, by the kernel's word."""
    descriptor = os.open(file, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def held(directory):
    return [file.name for file in (directory / "locks").iterdir() if not is_free(file)]


def test_of_many_processes_that_miss_one_plan_at_once_one_builds_and_the_others_load(start, tmp_path):
    source = """
import json, sys, plancache
from tests import graphs
with plancache.target("h200"), plancache.open(sys.argv[1]) as cache:
    graph, (_, _, c) = graphs.matmul()
    print(cache.key(graph), flush=True)  # all that can be done before is done
    sys.stdin.readline()
    outcome = cache.build(graph)
    print(json.dumps([outcome.source, outcome.stored, c.get_dim(), graph.get_execution_plan_count()]))
"""
    directory = tmp_path / "cache"
    processes = [start(source, directory) for _ in range(8)]
    assert len({process.stdout.readline() for process in processes}) == 1
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    outcomes = [json.loads(process.communicate(timeout=60)[0]) for process in processes]
    assert [process.returncode for process in processes] == [0] * 8
    sources = [source for source, *_ in outcomes]
    assert (sources.count("built"), sources.count("disk")) == (1, 7)
    assert all(stored == (source == "built") for source, stored, *_ in outcomes)
    assert all(dim == [1, 64, 128] and count > 0 for *_, dim, count in outcomes)


def test_a_stampede_into_record_files_builds_once_too(start, tmp_path):
    source = """
import sys, plancache
from tests import graphs
with plancache.target("h200"), plancache.open(sys.argv[1], store="files") as cache:
    graph = graphs.matmul()[0]
    print(cache.key(graph), flush=True)
    sys.stdin.readline()
    print(cache.build(graph).source)
"""
    processes = [start(source, tmp_path / "cache") for _ in range(4)]
    for process in processes:
        process.stdout.readline()
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    assert sorted(process.communicate(timeout=60)[0] for process in processes) == ["built\n", *["disk\n"] * 3]


def test_different_plans_are_built_side_by_side(start, tmp_path):
    holder = start(LIGHT + "with flight.turn(key, lambda: False): say('held'); time.sleep(60)", tmp_path, KEY)
    assert holder.stdout.readline() == "held\n"
    for first in ("00000000", "ffffffff", "0a1b2c3e"):
        with flight(tmp_path, wait=0.0).turn(first * 8, never) as mine:
            assert mine


def test_a_waiter_gives_up_after_a_bounded_wait_and_builds_for_itself(start, tmp_path, targeted, warnings):
    with plancache.open(tmp_path, wait=1.0) as cache:
        key = cache.key(graphs.matmul()[0]).hash
        holder = start(LIGHT + "with flight.turn(key, lambda: False): say('held'); time.sleep(60)", tmp_path, key)
        assert holder.stdout.readline() == "held\n"
        started = time.monotonic()
        outcome = cache.build(graphs.matmul()[0])
        assert 1.0 <= time.monotonic() - started < 5.0
        assert (outcome.source, outcome.stored) == (Source.BUILT, True)
        (warning,) = warnings()
        assert f"process {holder.pid} on " in warning
        assert "held for 1 s" in warning
        # The plan is there now: nobody needs the lock for it, and nothing more is said.
        assert cache.build(graphs.matmul()[0]).source is Source.DISK
        assert len(warnings()) == 1
    assert holder.poll() is None


def test_a_wait_of_no_time_is_no_wait(start, tmp_path):
    holder = start(LIGHT + "with flight.turn(key, lambda: False): say('held'); time.sleep(60)", tmp_path, KEY)
    assert holder.stdout.readline() == "held\n"
    started = time.monotonic()
    refuse(tmp_path, holder)
    assert time.monotonic() - started < 0.5


def test_a_waiter_goes_on_as_soon_as_the_plan_is_there_though_the_lock_is_held(start, tmp_path):
    # The holder may have more to do, or hang: what was waited for is the plan.
    holder = start(LIGHT + "with flight.turn(key, lambda: False): say('held'); time.sleep(60)", tmp_path, KEY)
    assert holder.stdout.readline() == "held\n"
    ready = time.monotonic() + 0.3
    with flight(tmp_path).turn(KEY, lambda: time.monotonic() > ready) as mine:
        assert not mine
    assert time.monotonic() - ready < 1.0
    assert held(tmp_path) != [], "a waiter has let go of another one's lock"


def test_a_killed_holder_frees_the_lock_at_once(start, tmp_path):
    holder = start(LIGHT + "with flight.turn(key, lambda: False): say('held'); time.sleep(60)", tmp_path, KEY)
    assert holder.stdout.readline() == "held\n"
    assert len(held(tmp_path)) == 1
    holder.kill()
    killed = time.monotonic()
    with flight(tmp_path).turn(KEY, never) as mine:
        assert mine
    assert time.monotonic() - killed < 1.0


def test_a_killed_holder_frees_the_lock_at_once_though_its_child_lives_on(start, tmp_path):
    source = """
with flight.turn(key, lambda: False):
    child = os.fork()
    if child:
        say(child)
    time.sleep(60)
"""
    holder = start(LIGHT + source, tmp_path, KEY)
    child = int(holder.stdout.readline())
    assert len(held(tmp_path)) == 1
    holder.kill()
    killed = time.monotonic()
    with flight(tmp_path).turn(KEY, never) as mine:
        assert mine
        assert time.monotonic() - killed < 1.0
        os.kill(child, 0)  # it is still there


def test_a_killed_holder_frees_the_lock_at_once_though_a_program_that_it_started_lives_on(start, tmp_path):
    source = """
import subprocess
with flight.turn(key, lambda: False):
    say(subprocess.Popen(["sleep", "60"], close_fds=False).pid)
    time.sleep(60)
"""
    holder = start(LIGHT + source, tmp_path, KEY)
    child = int(holder.stdout.readline())
    holder.kill()
    killed = time.monotonic()
    with flight(tmp_path).turn(KEY, never) as mine:
        assert mine
        assert time.monotonic() - killed < 1.0
        os.kill(child, 0)


def test_a_forked_child_of_a_holder_does_not_hold(start, tmp_path):
    # It neither has its parent's turn, nor ends it by leaving the block that it was forked in.
    source = """
child = None
try:
    with flight.turn(key, lambda: False):
        child = os.fork()
        if child == 0:
            try:
                with SingleFlight(directory, flight.access, 0.2).turn(key, lambda: False):
                    say("the child holds, too")
            except StoreError as error:
                say("refused", f"process {os.getppid()} on" in str(error))
        else:
            os.waitpid(child, 0)
            say("left")
            sys.stdin.readline()
finally:
    if child == 0:
        os._exit(0)
say("released")
time.sleep(60)
"""
    holder = start(LIGHT + source, tmp_path, KEY)
    assert holder.stdout.readline() == "refused True\n"
    assert holder.stdout.readline() == "left\n"
    assert len(held(tmp_path)) == 1, "the child has let go of its parent's lock"
    refuse(tmp_path, holder)
    holder.stdin.write("go\n")
    holder.stdin.flush()
    assert holder.stdout.readline() == "released\n"
    assert held(tmp_path) == []


def test_a_child_that_was_forked_while_its_parent_held_does_not_hold_after_it(start, tmp_path):
    source = """
with flight.turn(key, lambda: False):
    child = os.fork()
    if child == 0:
        time.sleep(60)
say("released")
time.sleep(60)
"""
    holder = start(LIGHT + source, tmp_path, KEY)
    assert holder.stdout.readline() == "released\n"
    with flight(tmp_path, 0.0).turn(KEY, never) as mine:
        assert mine


def test_threads_of_one_process_take_turns_too(tmp_path):
    import threading

    inside, most = 0, 0

    def work():
        nonlocal inside, most
        for _ in range(5):
            with flight(tmp_path).turn(KEY, never) as mine:
                assert mine
                inside += 1
                most = max(most, inside)
                time.sleep(0.002)
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


def test_lock_files_are_a_fixed_set_and_are_never_unlinked(tmp_path):
    chance = random.Random(1)
    keys = [f"{chance.getrandbits(256):064x}" for _ in range(6000)]
    lock = flight(tmp_path)
    for key in keys[:3000]:
        with lock.turn(key, never):
            pass
    before = {file.name: file.stat().st_ino for file in lock.directory.iterdir()}
    for key in keys[3000:]:
        with lock.turn(key, never):
            pass
    after = {file.name: file.stat().st_ino for file in lock.directory.iterdir()}
    assert len(after) <= FILES == 1024
    assert before.items() <= after.items(), "a lock file was unlinked or replaced: its waiters would be split"
    # They belong to a directory whose size is bounded: a free one takes no block.
    assert sum(file.stat().st_blocks for file in lock.directory.iterdir()) == 0


def test_where_the_file_system_cannot_lock_there_is_one_warning_and_the_graph_is_built(
    warm, targeted, warnings, monkeypatch
):
    def flock(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with plancache.open(warm) as cache:
        for m in (16, 24):
            outcome = cache.build(graphs.matmul(m=m)[0])
            assert (outcome.source, outcome.stored) == (Source.BUILT, True)
        assert cache.build(graphs.matmul(m=16)[0]).source is Source.DISK
    (warning,) = warnings()
    assert "cannot lock" in warning
    assert "No locks available" in warning


def test_nothing_is_maintained_and_no_journal_checkpointed_while_a_build_lock_is_held(warm, targeted, monkeypatch):
    looked = []

    def watched(where, name):
        real = getattr(where, name)

        def watching(*args, **kwargs):
            looked.append((name, held(warm)))
            return real(*args, **kwargs)

        monkeypatch.setattr(where, name, watching)

    watched(SqliteStore, "maintain")
    watched(eviction, "checkpoint")
    watched(eviction, "settle")
    real_put = SqliteStore.put

    def put(store, *args):
        assert len(held(warm)) == 1, "the build lock is held when the plan is stored"
        # Nor does SQLite checkpoint by itself when it commits.
        assert store.database.connection().execute("PRAGMA wal_autocheckpoint").fetchone() == (0,)
        before = (warm / FILE).read_bytes()
        stored = real_put(store, *args)
        assert (warm / FILE).read_bytes() == before
        return stored

    monkeypatch.setattr(SqliteStore, "put", put)
    with plancache.open(warm, max_bytes=2 << 20) as cache:  # so that the journal is full after every plan or two
        for k in (8, 16, 24, 32, 40):
            assert cache.build(graphs.conv(k=k)[0]).stored
    names = {name for name, _ in looked}
    assert "maintain" in names
    assert names & {"settle", "checkpoint"}
    assert [name for name, holding in looked if holding] == []


def test_a_lock_file_that_may_not_be_read_names_an_unknown_holder(tmp_path):
    assert locks.holder(tmp_path / "none") == "an unknown process"
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    assert locks.holder(tmp_path / "binary") == "an unknown process"
