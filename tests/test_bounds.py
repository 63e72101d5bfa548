"""The bound is the directory's size on disk, and it holds at every moment; what is least useful goes first."""

import json
import os
import random
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from plancache.store import eviction, records
from plancache.store.database import FILE
from plancache.store.directory import Access
from plancache.store.eviction import Bounds
from plancache.store.files import FileStore
from plancache.store.interface import Row
from plancache.store.plans import SqliteStore

ROOT = Path(__file__).resolve().parent.parent
ROW = Row("k" * 64, "native", "g", "t", "d", "e", "b", 13000, 13200, "eng4", 4, 1.0, 0.5, 100)
MAX_BYTES = 17 << 20
DAY = 86400.0
STORES = {"sqlite": SqliteStore.at, "files": FileStore}


def row_of(key, environment="e"):
    """A row with keys like real ones: hashes, so that every index is written all over."""
    chance = random.Random(f"{key}")
    graph, topology, device = (f"{chance.getrandbits(256):064x}" for _ in range(3))
    return replace(ROW, key=key, graph=graph, topology=topology, device=device, environment=environment)


def key_of(number):
    return f"{random.Random(number).getrandbits(256):064x}"


def put(store, number, size=20_000, environment="e"):
    """Store a record of random bytes, which no compression makes smaller, as the cache does."""
    row = row_of(key_of(number), environment)
    stored = store.put(row, records.encode(row, {"blob": random.Random(number).randbytes(size)}))
    store.maintain(thorough=False)
    return stored


def there(store, number):
    return store.get(key_of(number), ROW.route) is not None


def numbers(store, upto):
    """Which of the records that were put are still there."""
    keys = {listed.row.key for listed in store.rows()}
    return [number for number in range(upto) if key_of(number) in keys]


def on_disk(directory):
    """Everything in a directory, itself included: bytes by length and bytes by blocks, whichever is more."""
    length = blocks = 0
    for parent, _, names in os.walk(directory):
        for path in (parent, *(os.path.join(parent, name) for name in names)):  # noqa: PTH118 (in a tight loop)
            try:
                status = os.lstat(path)
            except FileNotFoundError:
                continue
            length += status.st_size
            blocks += status.st_blocks * 512
    return max(length, blocks)


def write(kind, directory, worker, count):
    """A writer process: records of 4 to 40 KB, and as many reads; prints what came of it."""
    store = STORES[kind](Path(directory), Access(read_only=False), Bounds(MAX_BYTES))
    chance = random.Random(worker)
    written = refused = missing = 0
    errors = []
    for turn in range(int(count)):
        number, size = f"{worker}-{turn}", chance.randrange(4 << 10, 40 << 10)
        try:
            if put(store, number, size):
                written += size
                missing += not there(store, number)  # never the entry just written
            else:
                refused += 1
            store.get(key_of(f"{worker}-{chance.randrange(turn + 1)}"), ROW.route)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    store.close()
    print(json.dumps({"written": written, "refused": refused, "missing": missing, "errors": errors}))


@pytest.fixture(params=list(STORES))
def kind(request):
    return request.param


@pytest.fixture
def opened(kind, tmp_path):
    """Open the store in the test's directory with a bound; may be called again with another one."""
    directory = tmp_path / "cache"
    directory.mkdir(mode=0o700)
    stores = []

    def opener(max_bytes=MAX_BYTES):
        stores.append(STORES[kind](directory, Access(read_only=False), Bounds(max_bytes)))
        return stores[-1]

    opener.directory = directory
    yield opener
    for store in stores:
        store.close()


def age(store, uses):
    """Have records stored and last used at these times (number -> seconds), as if the clock had stood there."""
    if isinstance(store, FileStore):
        for number, when in uses.items():
            os.utime(store._file(key_of(number), ROW.route), (when, when))
        return
    connection = store.database.connection()
    numbered = dict(connection.execute("SELECT key, rowid FROM plans"))
    connection.execute("BEGIN IMMEDIATE")
    values = [(when, numbered[key_of(number)]) for number, when in uses.items()]
    connection.executemany("UPDATE plans SET used = ? WHERE rowid = ?", values)
    connection.execute("COMMIT")


def fill(store, count, start, environment="e"):
    """Put records that were used one second apart from `start` on."""
    for number in range(count):
        assert put(store, number, environment=environment)
    age(store, {number: start + number for number in range(count)})


def test_eight_writers_at_the_cap_keep_the_directory_under_it_at_every_moment(kind, tmp_path):
    directory = tmp_path / "cache"
    directory.mkdir()
    source = "import sys; from tests.test_bounds import write; write(*sys.argv[1:])"
    writers = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", source, kind, directory, str(worker), "250"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for worker in range(8)
    ]
    samples = []
    while any(writer.poll() is None for writer in writers):
        samples.append(on_disk(directory))
        time.sleep(0.005)
    results = [writer.communicate(timeout=60) for writer in writers]
    assert [error for _, error in results] == [b""] * 8
    done = [json.loads(out) for out, _ in results]
    assert [error for result in done for error in result["errors"]] == []
    assert sum(result["written"] for result in done) > 2 * MAX_BYTES
    over = [size for size in samples if size > MAX_BYTES]
    assert not over, f"{len(over)} of {len(samples)} samples over the bound, the largest {max(over) / MAX_BYTES:.2f} x"
    assert max(samples) > MAX_BYTES // 2, "the bound was never near"
    assert sum(result["missing"] for result in done) == 0
    assert sum(result["refused"] for result in done) <= 8 * 250 // 50
    assert on_disk(directory) <= MAX_BYTES


def test_what_was_least_recently_used_goes_first(opened):
    store = opened()
    start = time.time() - 5000
    fill(store, 400, start)
    assert numbers(store, 400) == list(range(400))
    read = range(0, 200, 10)
    for number in read:
        assert there(store, number)
    store.flush()
    number = 400
    while len(left := numbers(store, 400)) > 250:
        for _ in range(20):
            assert put(store, number)
            number += 1
    gone = set(range(400)) - set(left)
    assert set(read) <= set(left), "what was read lately is gone"
    rest = [number for number in range(400) if number not in read]
    assert gone == set(rest[: len(gone)]), "not the least recently used ones are gone"
    assert numbers(store, number)[-(number - 400) :] == list(range(400, number)), "something new is gone"


def test_the_entry_just_written_stays_whatever_the_times_of_the_others(opened):
    # Each time all others lie in the future, as after a clock that jumped back: by its time the new one is the oldest.
    store = opened(4 << 20)
    fill(store, 100, time.time() + DAY)
    for number in range(100, 160):
        assert put(store, number)
        assert there(store, number)
        age(store, {number: time.time() + DAY + number})


def test_dead_environments_go_before_live_ones(opened):
    store = opened()
    now = time.time()
    for number in range(300):
        assert put(store, number, environment="dead" if number % 2 else "live")
    # By its last use each row of the dead one is later than all of the live one, but for the live one's last.
    before = now - eviction.DEAD_AFTER
    age(store, {number: before - (100 if number % 2 else 1000 * DAY) - number for number in range(300)})
    age(store, {0: now - 10})
    assert put(store, 300, environment="live")
    number = 301
    while len(dead := [one for one in numbers(store, 300) if one % 2]) > 50:
        for _ in range(10):
            assert put(store, number, environment="live")
            number += 1
        assert len([one for one in numbers(store, 300) if not one % 2]) == 150, "a live plan went before a dead one"
    assert dead == list(range(1, 300, 2))[: len(dead)], "of the dead ones, not the least recently used ones went first"


def test_an_environment_is_not_dead_while_it_is_used_by_its_writer(tmp_path):
    (tmp_path / "cache").mkdir()
    store = SqliteStore.at(tmp_path / "cache", Access(read_only=False), Bounds(4 << 20))
    fill(store, 50, time.time() - 100 * DAY, environment="mine")
    for number in range(50, 100):
        assert put(store, number, environment="other")
    age(store, {number: time.time() - 200 * DAY + number for number in range(50, 100)})
    for number in range(100, 150):
        assert put(store, number, environment="mine")
    left = numbers(store, 150)
    assert not [number for number in left if 50 <= number < 100 and number + 40 < 100], "the dead ones were to go first"
    assert left[-50:] == list(range(100, 150))
    store.close()


def test_a_lower_bound_gives_space_back_at_the_next_record(opened):
    store = opened()
    fill(store, 500, time.time() - 1000)
    assert on_disk(opened.directory) > MAX_BYTES // 2
    store.close()
    lower = opened(MAX_BYTES // 4)
    assert put(lower, 500)
    assert on_disk(opened.directory) <= MAX_BYTES // 4
    left = numbers(lower, 501)
    assert left == list(range(501))[-len(left) :]
    assert len(left) > 50


def test_a_lower_bound_gives_space_back_at_the_next_maintenance(opened):
    store = opened()
    fill(store, 500, time.time() - 1000)
    store.close()
    lower = opened(MAX_BYTES // 4)
    lower.maintain()
    assert on_disk(opened.directory) <= MAX_BYTES // 4
    assert len(numbers(lower, 500)) > 50


def test_what_is_removed_is_given_back_to_the_file_system(opened):
    store = opened()
    fill(store, 500, time.time() - 1000)
    for number in range(450):
        assert store.discard(key_of(number), ROW.route)
    store.maintain()
    assert on_disk(opened.directory) < MAX_BYTES // 4
    assert numbers(store, 500) == list(range(450, 500))


def test_after_the_clock_jumped_back_new_records_stay_and_old_ones_make_room(opened):
    store = opened(4 << 20)
    fill(store, 80, time.time() + 30 * DAY)  # as it was stamped before the jump
    for number in range(80, 180):
        assert put(store, number)
        age(store, {number: time.time() - 1000 + number})
    left = numbers(store, 180)
    assert left[-50:] == list(range(130, 180)), "new records went, and those stay that nobody has used since"


def test_a_use_after_the_clock_jumped_back_counts(tmp_path):
    (tmp_path / "cache").mkdir()
    store = SqliteStore.at(tmp_path / "cache", Access(read_only=False), Bounds(MAX_BYTES))
    fill(store, 10, time.time() + 30 * DAY)
    assert there(store, 3)
    store.flush()
    used = {listed.row.key: listed.used for listed in store.rows()}
    assert used[key_of(3)] == pytest.approx(time.time(), abs=60)
    assert used[key_of(4)] > time.time() + 29 * DAY
    store.close()


def test_small_records_share_pages_and_keep_the_bound_all_the_same(opened):
    store = opened(4 << 20)
    largest = 0
    chance = random.Random(5)
    for number in range(1500):
        assert put(store, number, size=chance.randrange(200, 3000))
        there(store, chance.randrange(number + 1))  # so that what goes is spread over all pages
        if number % 10 == 0:
            largest = max(largest, on_disk(opened.directory))
    assert 3 << 20 < largest <= 4 << 20


def test_a_record_that_would_take_most_of_the_bound_is_not_stored(opened):
    store = opened(4 << 20)
    fill(store, 20, time.time() - 100)
    assert not put(store, 20, size=3 << 20)
    assert numbers(store, 21) == list(range(20))
    assert on_disk(opened.directory) <= 4 << 20


def test_a_reader_that_stands_still_does_not_break_the_bound(tmp_path):
    # It keeps the journal from being cut off. The writer then stores nothing more until the reader has gone.
    directory = tmp_path / "cache"
    directory.mkdir()
    store = SqliteStore.at(directory, Access(read_only=False), Bounds(4 << 20))
    fill(store, 50, time.time() - 100)
    reader = sqlite3.connect(directory / FILE, isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM plans").fetchone()
    largest, refused, started = 0, 0, time.monotonic()
    for number in range(50, 65):
        refused += not put(store, number)
        largest = max(largest, on_disk(directory))
    assert largest <= 4 << 20
    assert refused > 0
    assert time.monotonic() - started < 30
    reader.close()
    assert put(store, 200)
    assert there(store, 200)
    assert on_disk(directory) <= 4 << 20
    store.close()


def test_reads_alone_do_not_let_the_journal_grow(tmp_path):
    # Nobody stores anything; each of many short processes writes down its reads, while another keeps the cache open.
    directory = tmp_path / "cache"
    directory.mkdir()
    store = SqliteStore.at(directory, Access(read_only=False), Bounds(4 << 20))
    fill(store, 100, time.time() - 100)
    for _ in range(300):
        other = SqliteStore.at(directory, Access(read_only=False), Bounds(4 << 20))
        for number in range(0, 100, 7):
            assert there(other, number)
        other.close()
        assert on_disk(directory) <= 4 << 20
    store.close()


def test_a_record_that_is_stored_after_thousands_of_reads_does_not_write_all_of_them_down(tmp_path):
    directory = tmp_path / "cache"
    directory.mkdir()
    store = SqliteStore.at(directory, Access(read_only=False), Bounds(MAX_BYTES))
    fill(store, 450, time.time() - 1000)
    store.maintain()
    for number in range(450):
        assert there(store, number)
    row = row_of(key_of(450))
    assert store.put(row, b"record")  # and no maintenance yet, as under the build lock
    assert on_disk(directory) <= MAX_BYTES
    store.flush()
    assert on_disk(directory) <= MAX_BYTES
    now = time.time()
    assert all(listed.used > now - 60 for listed in store.rows()), "a use was forgotten"
    store.close()


def test_a_damaged_database_that_was_set_aside_counts_to_the_bound(tmp_path):
    directory = tmp_path / "cache"
    directory.mkdir()
    store = SqliteStore.at(directory, Access(read_only=False), Bounds(MAX_BYTES))
    fill(store, 450, time.time() - 1000)
    store.close()
    (directory / FILE).write_bytes(b"no database" * 1_000_000)
    store = SqliteStore.at(directory, Access(read_only=False), Bounds(MAX_BYTES))
    aside = set()
    for number in range(450):
        assert put(store, number)
        assert on_disk(directory) <= MAX_BYTES
        aside.add(len(list(directory.glob("damaged-*.sqlite3"))))
    assert aside == {1, 0}, "it is kept for as long as there is room for it"
    store.close()


def test_a_directory_that_is_replaced_by_another_process_while_a_record_is_on_its_way_costs_nothing(tmp_path):
    (tmp_path / "cache").mkdir()
    store = FileStore(tmp_path / "cache", Access(read_only=False))
    real = store.access.follow
    replaced = []

    def follow(path):  # between writing the record and renaming it
        real(path)
        if not replaced:
            place = store._file(key_of(1), ROW.route).parent
            replaced.append(place)
            place.rmdir()

    object.__setattr__(store.access, "follow", follow)
    assert put(store, 1)
    assert replaced
    assert there(store, 1)


def test_a_bound_that_was_lowered_far_is_reached_bit_by_bit_and_the_journal_stays_short(tmp_path):
    (tmp_path / "cache").mkdir()
    store = SqliteStore.at(tmp_path / "cache", Access(read_only=False), Bounds(64 << 20))
    fill(store, 1500, time.time() - 1000)
    store.close()
    before = on_disk(tmp_path / "cache")
    lower = SqliteStore.at(tmp_path / "cache", Access(read_only=False), Bounds(4 << 20))
    largest = []
    real = eviction.checkpoint

    def watched(connection):
        largest.append(on_disk(tmp_path / "cache"))
        real(connection)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eviction, "checkpoint", watched)
        assert put(lower, 1500)
    lower.maintain()
    assert max(largest) < before + (4 << 20)
    assert on_disk(tmp_path / "cache") <= 4 << 20
    lower.close()
