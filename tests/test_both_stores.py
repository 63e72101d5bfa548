"""What is promised of a store, for both of them: the database and the directory of record files."""

import os
import random
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import pytest

import plancache
from plancache.errors import SettingsError, StoreError
from plancache.outcome import Reason, Source
from plancache.store import directory, records
from plancache.store.database import FILE
from plancache.store.directory import Access
from plancache.store.files import DIRECTORY, FileStore
from plancache.store.layers import Options, open_store
from plancache.store.plans import SqliteStore
from tests import graphs
from tests.conftest import ROOT
from tests.stores import fill, found, record, row, snapshot

KEY = b"a key of more than sixteen bytes"


@pytest.fixture(params=["sqlite", "files"])
def kind(request):
    return request.param


@pytest.fixture
def opened(kind, tmp_path):
    """Opens the store of this kind in a directory, as often as asked; all are closed in the end."""
    stores = []

    def opener(name="cache", read_only=False, key=None):
        path = tmp_path / name
        if not read_only:
            path.mkdir(exist_ok=True)
        access = Access(read_only)
        store = SqliteStore.at(path, access) if kind == "sqlite" else FileStore(path, access, key=key)
        stores.append(store)
        return store

    yield opener
    for store in stores:
        store.close()


@pytest.fixture
def store(opened):
    return opened()


# ------------------------------------------------------------ records in and out


def test_a_record_comes_back_as_it_went_in(store):
    one = row(1)
    assert store.get(one.key, one.route) is None
    assert store.put(one, record(one))
    assert store.get(one.key, one.route) == record(one)
    assert store.get(one.key, "deviceless") is None
    assert store.get(row(2).key, one.route) is None
    assert [listed.row for listed in store.rows()] == [one]
    assert next(store.rows()).stored == len(record(one))


def test_a_key_has_a_record_for_each_route(store):
    stored = {one: record(one) for one in (row(1, route=route) for route in ("native", "deviceless", "replay"))}
    for one, whole in stored.items():
        assert store.put(one, whole)
    assert found(store, stored) == 3
    assert store.discard(row(1).key, "deviceless")
    assert {listed.row.route for listed in store.rows(key=row(1).key)} == {"native", "replay"}


def test_records_of_every_size_come_back(store):
    for number, size in enumerate((0, 1, 4095, 16384, 75_000, 1_000_000)):
        one = row(number)
        assert store.put(one, record(one, size=size))
        assert store.get(one.key, one.route) == record(one, size=size)


def test_rows_are_listed_newest_first_and_by_their_columns(store):
    for number in (3, 1, 2):
        one = row(number, graph=f"g{number % 2}", device="d1" if number == 3 else "d")
        store.put(one, record(one))
    assert [listed.row.created for listed in store.rows()] == [3.0, 2.0, 1.0]
    assert [listed.row.created for listed in store.rows(graph="g1")] == [3.0, 1.0]
    assert [listed.row.created for listed in store.rows(graph="g1", device="d")] == [1.0]
    assert [listed.row.created for listed in store.rows(builder="builder")] == [3.0, 2.0, 1.0]
    assert list(store.rows(graph="another")) == []
    with pytest.raises(TypeError, match="no column colour"):
        list(store.rows(colour="red"))


def test_an_older_driver_or_frontend_replaces_a_newer_and_never_the_reverse(store):
    def put(content, driver, frontend):
        one = row(1, driver=driver, frontend=frontend)
        return store.put(one, record(one, content))

    def there():
        return records.decode(store.get(row(1).key, row(1).route))[1]["content"]

    assert put(b"first", 13000, 13200)
    assert not put(b"same", 13000, 13200)
    assert not put(b"newer driver", 13010, 13200)
    assert not put(b"newer frontend", 13000, 13201)
    assert not put(b"one older, one newer", 12080, 13201)
    assert there() == b"first"
    assert put(b"older driver", 12080, 13200)
    assert put(b"older frontend", 12080, 13100)
    assert there() == b"older frontend"
    assert [(listed.row.driver, listed.row.frontend) for listed in store.rows()] == [(12080, 13100)]


def test_an_unfit_record_is_replaced_only_if_it_is_still_the_one_that_is_there(store):
    unfit, newer = record(row(1)), row(1, driver=14000)
    store.put(row(1), unfit)
    assert not store.put(newer, record(newer), replaces=record(row(1), b"another"))
    assert not store.put(newer, record(newer))
    assert store.get(newer.key, newer.route) == unfit
    assert store.put(newer, record(newer), replaces=unfit)
    assert store.get(newer.key, newer.route) == record(newer)
    assert not store.put(newer, record(newer, b"late"), replaces=unfit)
    assert store.put(row(2), record(row(2)), replaces=b"what was removed meanwhile")


def test_a_record_is_discarded_only_if_it_is_still_the_one_that_is_there(store):
    store.put(row(1), record(row(1)))
    assert not store.discard(row(1).key, "native", record(row(1), b"another"))
    assert not store.discard(row(1).key, "deviceless")
    assert store.discard(row(1).key, "native", record(row(1)))
    assert not store.discard(row(1).key, "native", record(row(1)))
    assert not store.discard(row(1).key, "native")
    assert list(store.rows()) == []
    store.put(row(1), record(row(1)))
    assert store.discard(row(1).key, "native")
    assert store.get(row(1).key, "native") is None


def test_salvage_gives_every_record_also_those_that_are_none(store):
    stored = fill(store, 5)
    broken = row(9)
    store.put(broken, b"no record")
    salvaged = list(store.salvage())
    assert {(key, route): whole for key, route, _, whole in salvaged} == {
        **{(one.key, one.route): whole for one, whole in stored.items()},
        (broken.key, broken.route): b"no record",
    }
    assert {listed for _, _, listed, _ in salvaged} == ({None} if isinstance(store, FileStore) else {*stored, broken})


def test_a_thousand_random_calls_do_what_a_dictionary_would(store):
    chance, model = random.Random(4), {}
    for number in range(1000):
        one = row(chance.randrange(6), driver=chance.randrange(3), frontend=chance.randrange(3))
        there = model.get(one.key)
        call = chance.randrange(4)
        if call == 0:
            assert store.get(one.key, one.route) == (there and there[1])
        elif call == 1:
            assert store.discard(one.key, one.route, there and there[1]) == (there is not None)
            model.pop(one.key, None)
        else:
            new = record(one, str(number).encode(), size=100)
            replaces = there[1] if there and call == 2 and chance.random() < 0.3 else None
            expected = there is None or replaces is not None or there[0].gives_way_to(one)
            assert store.put(one, new, replaces) == expected
            if expected:
                model[one.key] = (one, new)
    assert {(listed.row, listed.stored) for listed in store.rows()} == {(one, len(new)) for one, new in model.values()}
    assert {key: whole for key, _, _, whole in store.salvage()} == {key: new for key, (_, new) in model.items()}


def test_eight_threads_put_and_get_at_once(store):
    rows = [row(number) for number in range(80)]
    faults = []

    def work(mine):
        try:
            for one in mine:
                assert store.put(one, record(one))
                assert store.get(one.key, one.route) == record(one)
            store.flush()
        except Exception as error:
            faults.append(error)
        finally:
            store.close()

    threads = [threading.Thread(target=work, args=(rows[start::8],)) for start in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    assert found(store, {one: record(one) for one in rows}) == 80


# ------------------------------------------------------------ reading, and what it must not do

STEPS = """
import pathlib, sys
from plancache.store.directory import Access
from plancache.store.files import FileStore
from plancache.store.plans import SqliteStore
from tests.stores import row
kind, path = sys.argv[1], pathlib.Path(sys.argv[2])
store = SqliteStore.at(path, Access(False)) if kind == "sqlite" else FileStore(path, Access(False))
for step in ("open", "get", "list", "flush"):
    if step == "open":
        assert store.get(row(9).key, "native") is None
    elif step == "get":
        assert all(store.get(row(number).key, "native") for number in range(3))
    elif step == "list":
        assert len(list(store.rows())) == len(list(store.salvage())) == 3
    else:
        store.flush()
    print(step, flush=True)
    sys.stdin.readline()
store.close()
"""


def test_reading_writes_nothing_and_use_is_written_with_the_next_flush(opened, kind, tmp_path):
    store = opened()
    fill(store, 3)
    before = {listed.row: listed for listed in store.rows()}
    store.close()
    states = {}
    with subprocess.Popen(
        [sys.executable, "-W", "error", "-c", STEPS, kind, str(tmp_path / "cache")],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as reader:
        # The reader has the store open all the while; the files are looked at from this process, which has not.
        for line in reader.stdout:
            states[line.strip()] = snapshot(tmp_path / "cache")
            print(file=reader.stdin, flush=True)
    assert reader.returncode == 0
    assert states["open"] == states["get"] == states["list"] != states["flush"]
    after = {listed.row: listed for listed in store.rows()}
    assert after.keys() == before.keys()
    assert all(after[one].used > before[one].used for one in before)
    if kind == "sqlite":
        assert [after[one].hits - before[one].hits for one in before] == [1, 1, 1]


def test_a_put_is_no_use_and_a_refused_one_changes_nothing(store, tmp_path):
    stored = fill(store, 2)
    store.close()
    before = [(listed.row, listed.used, listed.hits) for listed in store.rows()]
    for one, whole in stored.items():
        assert not store.put(one, whole)
    store.close()
    assert [(listed.row, listed.used, listed.hits) for listed in store.rows()] == before


def test_a_read_only_store_makes_nothing_and_writes_nothing(opened, tmp_path):
    with pytest.raises(StoreError, match="there is no cache here"):
        opened("none", read_only=True).get("k", "native")
    assert not (tmp_path / "none").exists()
    store = opened()
    stored = fill(store, 3)
    reader = opened(read_only=True)
    assert found(reader, stored) == len(list(reader.rows())) == len(list(reader.salvage())) == 3
    for write in (
        lambda: reader.put(row(9), record(row(9))),
        lambda: reader.discard(row(1).key, "native"),
    ):
        with pytest.raises(StoreError, match="may not be written"):
            write()
    used = [listed.used for listed in store.rows()]
    reader.flush()
    reader.maintain()
    reader.close()
    assert [listed.used for listed in store.rows()] == used
    assert found(store, stored) == 3


def test_a_closed_store_opens_itself_again(store):
    stored = fill(store, 1)
    store.close()
    store.close()
    assert found(store, stored) == 1
    store.close()
    assert store.put(row(2), record(row(2)))


def test_flushing_where_nothing_can_be_written_raises_nothing(opened, kind, tmp_path):
    store = opened()
    stored = fill(store, 3)
    assert found(store, stored) == 3
    if kind == "files":
        for file in (tmp_path / "cache" / DIRECTORY).rglob("*.native"):
            file.unlink()
    else:
        (tmp_path / "cache" / FILE).write_bytes(b"damage " * 1000)
    store.flush()


def test_the_clock_may_jump_back(opened, monkeypatch):
    store = opened()
    now = time.time()
    with monkeypatch.context() as ahead:
        ahead.setattr(time, "time", lambda: now + 86400.0)
        stored = fill(store, 3)
        assert found(store, stored) == 3
        store.flush()
    assert all(listed.used > now for listed in store.rows())
    assert found(store, stored) == 3
    store.flush()
    assert store.put(row(9), record(row(9)))
    assert all(now <= listed.used <= time.time() for listed in store.rows())  # a use in the future is put right
    assert store.discard(row(9).key, "native", record(row(9)))


def test_the_entry_just_written_is_never_evicted_even_by_a_clock_that_jumped_back(kind, tmp_path, monkeypatch):
    path = tmp_path / "small"
    path.mkdir()
    store, _ = open_store(path, Options(kind=kind, bounds=plancache.store.eviction.Bounds(2 << 20)))
    now = time.time()
    with monkeypatch.context() as ahead:
        ahead.setattr(time, "time", lambda: now + 86400.0)
        fill(store, 12, size=100_000)
    for file in path.rglob("*.native"):
        os.utime(file, (now + 86400.0, now + 86400.0))
    for number in range(20, 30):
        assert store.put(row(number), record(row(number), size=100_000))
        store.maintain()
        assert store.get(row(number).key, "native") == record(row(number), size=100_000)
    assert len(list(store.rows())) < 22
    store.close()


# ------------------------------------------------------------ which store it is


def test_the_file_system_chooses_the_store(mounted, tmp_path):
    cases = {"tmpfs": "sqlite", "ramfs": "files"}
    for type_of, expected in cases.items():
        place = mounted("-t", type_of, type_of, tmp_path / f"{type_of} für Pläne")
        assert directory.filesystem(place) == directory.filesystem(place / "not" / "there" / "yet") == type_of
        assert chosen(place / "cache") == expected


def test_file_systems_are_told_apart_by_the_mount_table(tmp_path):
    assert directory.filesystem(Path("/proc/self")) == "proc"
    kind = subprocess.run(["stat", "-f", "-c", "%T", tmp_path], capture_output=True, text=True, check=True).stdout
    assert directory.filesystem(tmp_path)[:3] == kind[:3]  # stat says ext2/ext3, the table ext4


def test_what_is_there_is_gone_on_with_whatever_the_file_system(mounted, tmp_path, kind):
    place = mounted("-t", "ramfs", "ramfs", tmp_path / "ramfs")
    for here in (place / "cache", tmp_path / "cache"):
        assert chosen(here, kind) == kind
        assert chosen(here) == kind


def test_a_symbolic_link_is_followed_to_its_file_system(mounted, tmp_path):
    place = mounted("-t", "ramfs", "ramfs", tmp_path / "ramfs")
    (tmp_path / "link").symlink_to(place)
    assert directory.filesystem(tmp_path / "link" / "cache") == "ramfs"


def chosen(path, kind=None):
    """The kind of store that is opened there, with one record in it."""
    store, _ = open_store(path, Options(kind=kind))
    store.put(row(1), record(row(1)))
    store.close()
    assert (path / FILE).exists() != (path / DIRECTORY).exists()
    return "sqlite" if isinstance(store, SqliteStore) else "files"


def test_another_kind_of_store_is_a_settings_error(tmp_path):
    with pytest.raises(SettingsError, match="'diskcache'; expected sqlite or files"):
        plancache.open(tmp_path / "cache", store="diskcache")


# ------------------------------------------------------------ real plans


@pytest.fixture(params=[None, KEY], ids=["plain", "signed"])
def key_file(request, tmp_path):
    if request.param is None:
        return None
    file = tmp_path / "key"
    file.write_bytes(request.param)
    return file


SERVE = """
import sys, plancache
from tests import graphs
with plancache.target("h200"), plancache.open(sys.argv[1]) as cache:
    print(type(cache.store).__name__, cache.build(graphs.unary()[0]).source)
"""


def test_real_plans_are_built_stored_found_again_and_verified(kind, key_file, tmp_path, targeted, run):
    path = tmp_path / "cache"
    with plancache.open(path, store=kind, key_file=key_file) as cache:
        first = cache.build(graphs.unary()[0])
        second = cache.build(graphs.unary()[0])
        assert (first.source, first.reason, first.stored) == (Source.BUILT, Reason.ABSENT, True)
        assert (second.source, second.stored) == (Source.DISK, False)
        (listed,) = cache.rows()
        assert asdict(listed.row)["key"] == first.key.hash
        assert cache.documents(listed.row)["build"] == first.key.documents["build"]
        assert (cache.verify().good, cache.verify().clean) == (1, True)
    environment = {} if key_file is None else {"PLANCACHE_KEY_FILE": str(key_file)}
    store = {"sqlite": "SqliteStore", "files": "FileStore"}[kind]
    assert run(SERVE, path, **environment).split() == [store, "disk"]
    if key_file is not None:
        assert run(SERVE, path, PLANCACHE_MODE="read-only").split() == [store, "built"]


def test_real_plans_move_from_one_kind_of_store_to_the_other(kind, warm, tmp_path, targeted):
    with plancache.open(warm) as cache:
        cache.export_bundle(tmp_path / "plans.bundle")
    with plancache.open(tmp_path / "cache", store=kind) as cache:
        counts = cache.import_bundle(tmp_path / "plans.bundle")
        assert (counts.done, counts.present, counts.damaged) == (3, 0, 0)
        assert [cache.build(builder()[0]).source for builder in (graphs.matmul, graphs.conv, graphs.sdpa)] == [
            Source.DISK
        ] * 3


def test_a_damaged_record_is_built_again_and_replaced(kind, warm, tmp_path, targeted):
    with plancache.open(warm) as cache:
        cache.export_bundle(tmp_path / "plans.bundle")
    with plancache.open(tmp_path / "cache", store=kind) as cache:
        cache.import_bundle(tmp_path / "plans.bundle")
        key = cache.key(graphs.matmul()[0]).hash
        whole = cache.store.get(key, "deviceless")
        damaged = bytes([*whole[:-1], whole[-1] ^ 1])
        row_of = next(cache.rows(key=key)).row
        assert cache.store.put(row_of, damaged, replaces=whole)
        outcome = cache.build(graphs.matmul()[0])
        assert (outcome.source, outcome.reason, outcome.stored) == (Source.BUILT, Reason.DAMAGED, True)
        assert cache.build(graphs.matmul()[0]).source is Source.DISK
        assert cache.verify().clean
