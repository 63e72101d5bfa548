"""Damage on disk: the caller gets its graph, with one warning a kind, and the next run is clean."""

import random
import shutil
import sqlite3
import subprocess
import sys
from contextlib import suppress

import pytest

import plancache
from plancache.errors import StoreError
from plancache.outcome import Source
from plancache.store import records
from plancache.store.database import FILE
from plancache.store.eviction import Bounds
from plancache.store.layers import Options, open_store
from plancache.store.verify import verify
from tests import graphs
from tests.conftest import ROOT
from tests.damages import (
    DAMAGES,
    PAGE,
    cut_short,
    everywhere,
    in_the_middle,
    noise,
    overwrite,
    to_zero_length,
)
from tests.stores import fill, found, record, row

COUNT, SIZE = 60, 6000
STORED = {row(number): record(row(number), size=SIZE) for number in range(COUNT)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The bytes of a database with the records of `STORED`."""
    directory = tmp_path_factory.mktemp("whole")
    store, _ = open_store(directory, Options(kind="sqlite"))
    fill(store, COUNT, SIZE)
    store.close()
    return (directory / FILE).read_bytes()


@pytest.fixture
def directory(whole, tmp_path):
    """A cache with the records of `STORED`."""
    path = tmp_path / "cache"
    path.mkdir(mode=0o700)
    (path / FILE).write_bytes(whole)
    return path


@pytest.fixture
def opened(directory):
    """Opens the cache's store, as often as asked; all are closed in the end."""
    stores = []

    def opener(**options):
        stores.append(open_store(directory, Options(**options))[0])
        return stores[-1]

    yield opener
    for store in stores:
        with suppress(StoreError):  # of what the test has left damaged
            store.close()


@pytest.fixture(params=DAMAGES, ids=lambda damage: damage.__name__)
def damage(request):
    return request.param


def used(store, number=0):
    """What a job does: look, and store what is not there or cannot be read. Whether it was stored."""
    one = row(number)
    try:
        there = store.get(one.key, one.route)
    except StoreError:
        there = None
    if there == record(one, size=SIZE):
        return True
    return store.put(one, record(one, size=SIZE), replaces=there)


def assert_clean(directory):
    """A new process finds the cache in order, and stores and finds in it."""
    source = """
import pathlib, sys
from plancache.store.layers import Options, open_store
from tests.stores import record, row
store, _ = open_store(pathlib.Path(sys.argv[1]), Options())
for number in (0, 1000):
    one = row(number)
    assert (number == 0 and store.get(one.key, one.route)) or store.put(one, record(one, size=6000))
    assert store.get(one.key, one.route) == record(one, size=6000)
print(store.database.connection().execute("PRAGMA integrity_check").fetchone()[0])
store.close()
"""
    command = [sys.executable, "-W", "error", "-c", source, str(directory)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("ok\n", "")


# ------------------------------------------------------------ damage before, and while a process has it open


def test_a_damaged_database_is_replaced_at_the_next_put_and_the_next_run_is_clean(damage, opened, directory):
    damage(directory / FILE)
    store = opened()
    for number in [*range(COUNT)] * 2:  # what was found before the database was set aside is stored again then
        assert used(store, number)
    assert found(store, STORED) == COUNT
    store.close()
    assert_clean(directory)


def test_a_database_that_is_damaged_while_it_is_open_is_replaced_too(damage, opened, directory):
    store = opened()
    assert found(store, STORED) == COUNT
    assert store.put(row(500), record(row(500)))
    damage(directory / FILE)
    for number in range(COUNT):
        assert used(store, number)
    store.close()
    # What this process had read before it may go on with.
    again = opened()
    for number in [*range(COUNT)] * 2:
        assert used(again, number)
    assert found(again, STORED) == COUNT
    again.close()
    assert_clean(directory)


def test_noise_anywhere_never_gives_a_wrong_record(opened, directory, whole):
    chance = random.Random(3)
    for _ in range(40):
        content = bytearray(whole)
        for _ in range(chance.choice((1, 20))):
            start = chance.randrange(len(content))
            length = chance.choice((1, 100, PAGE))
            content[start : start + length] = noise(len(content[start : start + length]), start)
        for file in directory.iterdir():
            file.unlink()
        (directory / FILE).write_bytes(content)
        store = opened()
        for one, expected in STORED.items():
            try:
                there = store.get(one.key, one.route)
            except StoreError:
                continue
            if there is not None and there != expected:
                with pytest.raises(plancache.errors.RecordError):
                    records.decode(there)
        store.close()


def other_database(directory, number):
    """A whole database of its own with one record."""
    directory.mkdir()
    store, _ = open_store(directory, Options(kind="sqlite"))
    store.put(row(number), record(row(number)))
    store.close()
    return directory / FILE


def test_a_database_that_is_replaced_while_it_is_open_is_gone_over_to(opened, directory, tmp_path):
    store = opened()
    assert found(store, STORED) == COUNT
    other_database(tmp_path / "other", 900).rename(directory / FILE)
    assert found(store, STORED) in (0, COUNT)  # the one it had open, or the new one
    assert store.put(row(901), record(row(901)))
    for number in (900, 901):
        assert store.get(row(number).key, "native") == record(row(number))
    store.close()
    assert_clean(directory)


@pytest.mark.parametrize("everything", [False, True], ids=["the database alone", "with its journal"])
def test_a_database_that_is_deleted_while_it_is_open_is_made_again(everything, opened, directory):
    store = opened()
    assert store.put(row(800), record(row(800)))
    for file in list(directory.iterdir()) if everything else [directory / FILE]:
        file.unlink()
    assert store.put(row(801), record(row(801)))
    assert store.get(row(801).key, "native") == record(row(801))
    assert store.get(row(800).key, "native") is None
    store.close()
    assert_clean(directory)


def test_a_directory_that_is_deleted_while_it_is_open_is_a_fault_and_no_crash(opened, directory):
    store = opened()
    assert found(store, STORED) == COUNT
    shutil.rmtree(directory)
    with pytest.raises(StoreError):
        store.put(row(801), record(row(801)))
    store.flush()
    directory.mkdir(mode=0o700)
    assert store.put(row(801), record(row(801)))


def test_of_a_damaged_log_only_what_was_whole_is_taken(opened, directory):
    source = """
import os, pathlib, signal, sys
from plancache.store.layers import Options, open_store
from tests.stores import record, row
store, _ = open_store(pathlib.Path(sys.argv[1]), Options())
for number in range(100, 120):
    assert store.put(row(number), record(row(number), size=6000))
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", source, str(directory)], cwd=ROOT, check=False)
    log = directory / f"{FILE}-wal"
    assert log.stat().st_size > 20 * SIZE
    overwrite(log, log.stat().st_size // 2, noise(1000))
    store = opened()
    assert found(store, STORED) == COUNT
    later = {row(number): record(row(number), size=SIZE) for number in range(100, 120)}
    assert 5 <= found(store, later) < 20
    store.close()
    assert_clean(directory)


def test_journals_of_another_database_do_no_harm(opened, directory):
    for end in ("-wal", "-shm", "-journal"):
        (directory / f"{FILE}{end}").write_bytes(noise(50_000))
    store = opened()
    assert found(store, STORED) == COUNT
    store.close()
    assert_clean(directory)


def test_rows_from_the_future_are_rows_like_others(opened, directory):
    store = opened()
    connection = store.database.connection()
    connection.execute("UPDATE plans SET used = used + 1e9, created = created + 1e9")
    assert found(store, STORED) == COUNT
    store.flush()
    assert store.put(row(700), record(row(700)))
    assert store.discard(row(700).key, "native")
    small = opened(bounds=Bounds(1 << 20))
    small.maintain()
    assert small.put(row(701), record(row(701)))
    assert small.get(row(701).key, "native") == record(row(701))


# ------------------------------------------------------------ a job gets its graph

JOB = """
import logging, os, sys, plancache
from tests import graphs
logging.basicConfig(format="%(message)s", stream=sys.stdout)
with plancache.target("h200"), plancache.open(*sys.argv[1:]) as cache:
    for _ in range(2):
        outcome = cache.build(graphs.unary()[0])
        print(outcome.source, outcome.stored)
"""


@pytest.fixture(scope="module")
def planned(tmp_path_factory, h200):
    """A cache with the plan of `unary`, and enough else to be of many pages."""
    path = tmp_path_factory.mktemp("planned") / "cache"
    with plancache.target(h200), plancache.open(path) as cache:
        fill(cache.store, COUNT, SIZE)
        assert cache.build(graphs.unary()[0]).stored
        assert cache.build(graphs.unary()[0]).source is Source.DISK
    return path


def test_a_job_gets_its_graph_from_a_damaged_cache_and_the_next_run_is_clean(damage, planned, tmp_path, run):
    shutil.copytree(planned, tmp_path / "cache")
    damage(tmp_path / "cache" / FILE)
    *warnings, first, second = run(JOB, tmp_path / "cache").splitlines()
    assert len({warning.partition(";")[0] for warning in warnings}) == len(warnings) <= 2, warnings  # one a kind
    assert first in ("built True", "disk False")
    assert second == "disk False"
    assert run(JOB, tmp_path / "cache") == "disk False\ndisk False\n"


def test_a_job_goes_on_when_its_cache_is_damaged_replaced_or_deleted_under_it(planned, tmp_path, targeted, said):
    shutil.copytree(planned, tmp_path / "cache")
    file = tmp_path / "cache" / FILE
    with plancache.open(tmp_path / "cache") as cache:
        for change in (
            lambda: everywhere(file),
            lambda: other_database(tmp_path / "other", 1).rename(file),
            lambda: to_zero_length(file),
            file.unlink,
        ):
            assert cache.build(graphs.unary()[0]).source in (Source.DISK, Source.BUILT)
            change()
            graph, (_, y) = graphs.unary()
            assert cache.build(graph).source in (Source.DISK, Source.BUILT)
            assert y.get_dim() == [1, 64, 64]
    assert len(said()) <= 2, said()
    with plancache.open(tmp_path / "cache") as cache:
        cache.build(graphs.unary()[0])
        assert cache.build(graphs.unary()[0]).source is Source.DISK


def test_a_job_without_a_home_keeps_its_plans_under_the_temporary_directory(users):
    nobody = 54321  # has no entry in the list of users, which would say where home is
    place = users.directory("tmp", owner=nobody, mode=0o700)
    for _ in range(2):
        out = users.run(nobody, JOB, HOME=None, TMPDIR=str(place)).splitlines()
    assert out == ["disk False", "disk False"]
    plans = place / f"plancache-{nobody}" / "plans"
    assert (plans / FILE).exists()
    assert plans.stat().st_mode & 0o777 == 0o700


def test_a_job_whose_home_is_not_there_gets_its_graph_and_one_warning(users):
    warning, *outcomes = users.run(1000, JOB, HOME="/nonexistent").splitlines()
    assert warning.startswith("the cache directory cannot be made")
    assert outcomes == ["built False", "built False"]


# ------------------------------------------------------------ verify


def change(directory, statement, *values):
    connection = sqlite3.connect(directory / FILE)
    with connection:
        assert connection.execute(statement, values).rowcount == 1
    connection.close()


def verified(store, directory, repair=False, key=None):
    return verify(store, directory, key, repair=repair)


def test_a_whole_cache_is_clean_and_repairing_it_changes_nothing(opened, directory):
    store, told = opened(), []
    report = verify(store, directory, None, repair=True, progress=lambda: told.append(1))
    assert (report.good, report.bad, report.removed, report.recovered, report.clean) == (COUNT, [], 0, 0, True)
    assert len(told) == COUNT
    assert found(store, STORED) == COUNT


def flip(directory, number):
    damaged = bytearray(STORED[row(number)])
    damaged[len(damaged) // 2] ^= 1
    change(directory, "UPDATE plans SET record = ? WHERE key = ?", bytes(damaged), row(number).key)


@pytest.mark.parametrize(
    ("name", "value"),
    [("route", "deviceless"), ("driver", 1), ("frontend", 1), ("device", "other"), ("engine", 9), ("builder", "x")],
)
def test_an_index_column_that_was_changed_is_found_and_put_right(name, value, opened, directory):
    change(directory, f"UPDATE plans SET {name} = ? WHERE key = ?", value, row(7).key)
    store = opened()
    report = verified(store, directory)
    assert (report.good, len(report.bad), report.clean) == (COUNT - 1, 1, False)
    assert report.bad[0][0] == row(7).key
    assert report.bad[0][2] == "the record is not the one that its row lists"
    report = verified(store, directory, repair=True)
    assert (report.removed, report.recovered, report.clean) == (1, 1, True)
    assert found(store, STORED) == COUNT  # the record was whole, and is in its place again
    assert {listed.row for listed in store.rows()} == set(STORED)
    assert verified(store, directory).good == COUNT


def test_text_that_is_no_utf8_any_more_costs_its_row_alone(opened, directory):
    change(directory, "UPDATE plans SET builder = CAST(x'ff00fe' AS TEXT) WHERE key = ?", row(7).key)
    store = opened()
    assert len(list(store.rows())) == COUNT
    report = verified(store, directory)
    assert (report.good, [key for key, _, _ in report.bad]) == (COUNT - 1, [row(7).key])
    report = verified(store, directory, repair=True)
    assert (report.removed, report.recovered, report.clean) == (1, 1, True)
    assert {listed.row for listed in store.rows()} == set(STORED)


def test_damaged_records_are_found_and_removed_and_the_others_stay(opened, directory):
    for number in (3, 4, 5):
        flip(directory, number)
    change(directory, "UPDATE plans SET record = 'text' WHERE key = ?", row(6).key)
    change(directory, "UPDATE plans SET record = x'' WHERE key = ?", row(8).key)
    store = opened()
    report = verified(store, directory)
    assert (report.good, len(report.bad), report.clean) == (COUNT - 5, 5, False)
    assert {key for key, _, _ in report.bad} == {row(number).key for number in (3, 4, 5, 6, 8)}
    assert "a record's checksum is wrong" in {fault for _, _, fault in report.bad}
    report = verified(store, directory, repair=True)
    assert (report.removed, report.recovered, report.clean) == (5, 0, True)
    assert found(store, STORED) == COUNT - 5
    assert verified(store, directory).clean


def test_a_record_in_another_records_row_is_found_and_removed(opened, directory):
    change(directory, "UPDATE plans SET record = ? WHERE key = ?", STORED[row(1)], row(2).key)
    store = opened()
    assert [key for key, _, _ in verified(store, directory).bad] == [row(2).key]
    report = verified(store, directory, repair=True)
    assert (report.removed, report.recovered, report.clean) == (1, 0, True)  # it is in its own row, too
    assert found(store, STORED) == COUNT - 1
    assert store.get(row(2).key, "native") is None


def test_with_a_key_unsigned_records_are_found(opened, directory):
    store = opened()
    signed = row(99)
    key = b"a key of more than sixteen bytes"
    store.put(signed, record(signed, key=key))
    assert (verified(store, directory).good, len(verified(store, directory).bad)) == (COUNT, 1)
    report = verified(store, directory, key=key)
    assert (report.good, len(report.bad)) == (1, COUNT)


@pytest.mark.parametrize("page", ["leaf", "index"])
def test_a_page_that_was_overwritten_is_found_and_what_is_good_is_kept(page, opened, directory, whole):
    if page == "leaf":
        start = whole.index(STORED[row(30)][-100:]) // PAGE * PAGE
    else:
        start = (index_page(directory) - 1) * PAGE
    overwrite(directory / FILE, start, noise(PAGE))
    store = opened()
    report = verified(store, directory)
    assert not report.clean
    assert ("", "") in {(key, route) for key, route, _ in report.bad}
    assert any("the database is damaged" in fault for _, _, fault in report.bad)
    report = verified(store, directory, repair=True)
    assert report.clean, report
    assert found(store, STORED) == report.recovered >= COUNT - (3 if page == "leaf" else 0)
    assert list(directory.glob("damaged-*")) == []
    report = verified(store, directory)
    assert (report.good, report.clean) == (found(store, STORED), True)


def index_page(directory):
    connection = sqlite3.connect(directory / FILE)
    page = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'plans_by_use'").fetchone()[0]
    connection.close()
    return page


def test_whatever_the_damage_repair_ends_with_a_clean_cache_and_keeps_what_can_be_read(damage, opened, directory):
    damage(directory / FILE)
    store = opened()
    report = verified(store, directory, repair=True)
    assert report.clean, report
    kept = found(store, STORED)
    assert kept == len(list(store.rows())) >= {cut_short: 10, in_the_middle: 10}.get(damage, 0)
    store.close()
    report = verified(store, directory)
    assert (report.good, report.clean, report.aside) == (kept, True, [])
    assert_clean(directory)


def test_a_database_that_was_set_aside_is_found_and_what_is_good_in_it_taken_over(opened, directory, whole):
    start = whole.index(STORED[row(30)][-100:]) // PAGE * PAGE
    damaged = whole[:start] + noise(PAGE) + whole[start + PAGE :]
    (directory / FILE).unlink()
    (directory / f"damaged-1-{FILE}").write_bytes(damaged)
    (directory / f"damaged-2-{FILE}").write_bytes(noise(50_000))
    store = opened()
    newer = row(0, driver=1)
    assert store.put(newer, record(newer, size=SIZE))
    report = verified(store, directory)
    assert (report.good, report.bad, report.clean) == (1, [], False)
    assert [path.name for path in report.aside] == [f"damaged-1-{FILE}", f"damaged-2-{FILE}"]
    report = verified(store, directory, repair=True)
    assert (report.clean, report.aside) == (True, [])
    assert COUNT - 4 <= report.recovered == found(store, STORED) < COUNT
    assert store.get(newer.key, newer.route) == record(newer, size=SIZE)  # what is there, and better, stays
    assert list(directory.glob("damaged-*")) == []


def test_what_jobs_set_aside_is_taken_over_with_its_log(opened, directory):
    source = """
import os, pathlib, signal, sys
from plancache.store.layers import Options, open_store
from tests.stores import record, row
store, _ = open_store(pathlib.Path(sys.argv[1]), Options())
assert store.put(row(100), record(row(100)))
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", source, str(directory)], cwd=ROOT, check=False)
    store = opened()
    store.database.set_aside()
    assert found(store, STORED) == 0
    assert store.put(row(101), record(row(101)))
    report = verified(store, directory, repair=True)
    assert (report.recovered, report.clean) == (COUNT + 1, True)
    assert store.get(row(100).key, "native") == record(row(100))
    assert store.get(row(101).key, "native") == record(row(101))


def test_nothing_that_was_set_aside_is_lost_where_the_repair_cannot_be_written(opened, directory):
    (directory / FILE).rename(directory / f"damaged-1-{FILE}")
    store = opened()
    store.put(row(700), record(row(700)))
    blocker = sqlite3.connect(directory / FILE, isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match="locked"):
        verified(store, directory, repair=True)
    blocker.close()
    report = verified(store, directory, repair=True)
    assert (report.recovered, report.clean) == (COUNT, True)


def test_a_read_only_cache_is_verified_and_not_repaired(directory):
    flip(directory, 3)
    store, _ = open_store(directory, Options(), read_only=True)
    assert len(verified(store, directory).bad) == 1
    with pytest.raises(StoreError, match="may not be written"):
        verified(store, directory, repair=True)
    store.close()
    in_the_middle(directory / FILE)
    store, _ = open_store(directory, Options(), read_only=True)
    with pytest.raises(StoreError, match="may not be written"):
        verified(store, directory, repair=True)
    store.close()
    assert list(directory.glob("damaged-*")) == []


def test_record_files_are_verified_and_repaired_too(tmp_path):
    path = tmp_path / "files"
    store, _ = open_store(path, Options(kind="files"))
    fill(store, 10, SIZE)
    files = {file.name.partition(".")[0]: file for file in (path / "records").rglob("*.native")}
    damaged, cut, empty, swapped, renamed = (files[row(number).key] for number in range(5))
    damaged.write_bytes(STORED[row(0)][:-1] + b"x")
    cut.write_bytes(STORED[row(1)][:1000])
    empty.write_bytes(b"")
    swapped.write_bytes(STORED[row(9)])
    renamed.rename(renamed.with_name(f"{row(4).key}.deviceless"))
    (path / "records" / ".nfs000000001").write_bytes(b"what a network file system keeps")
    report = verified(store, path)
    assert (report.good, len(report.bad), report.clean) == (5, 5, False)
    report = verified(store, path, repair=True)
    assert (report.removed, report.recovered, report.clean) == (5, 1, True)
    assert found(store, STORED) == 6
    assert verified(store, path).good == 6
    store.close()


def test_real_plans_are_verified_repaired_and_served(warm, targeted):
    with plancache.open(warm) as cache:
        assert (cache.verify().good, cache.verify().clean) == (3, True)
        key = cache.key(graphs.conv()[0]).hash
    change(warm, "UPDATE plans SET driver = driver + 1 WHERE key = ?", key)
    with plancache.open(warm) as cache:
        (bad,) = cache.verify().bad
        assert bad[0] == key
        assert cache.build(graphs.conv()[0]).source is Source.DISK  # the record is the truth
        report = cache.verify(repair=True)
        assert (report.removed, report.recovered, report.clean) == (1, 1, True)
        assert [cache.build(builder()[0]).source for builder in (graphs.matmul, graphs.conv, graphs.sdpa)] == [
            Source.DISK
        ] * 3
