"""Many records in one portable file: out of one cache, and into another."""

import os
import random
import shutil
import signal
import subprocess
import sys

import pytest

import plancache
from plancache.errors import StoreError
from plancache.outcome import Source
from plancache.store.bundle import Counts
from plancache.store.database import FILE
from tests import graphs
from tests.conftest import ROOT
from tests.stores import fill, found, record, row

KEY = b"a key of more than sixteen bytes"


@pytest.fixture(params=["sqlite", "files"])
def kind(request):
    return request.param


@pytest.fixture
def opened(tmp_path):
    """Opens caches by name; all are closed in the end."""
    caches = []

    def opener(name="cache", **options):
        caches.append(plancache.open(tmp_path / name, **options))
        return caches[-1]

    yield opener
    for cache in caches:
        cache.close()


@pytest.fixture
def key_file(tmp_path):
    file = tmp_path / "key"
    file.write_bytes(KEY)
    return file


def counts(done=0, present=0, damaged=0):
    return Counts(done, present, damaged)


# ------------------------------------------------------------ out and in


def test_all_records_go_out_into_one_file_and_come_in_elsewhere(kind, opened, tmp_path):
    cache, other = opened("cache", store=kind), opened("other", store="files" if kind == "sqlite" else "sqlite")
    stored = fill(cache.store, 100)
    assert cache.export_bundle(tmp_path / "plans.bundle") == counts(done=100)
    assert [path.name for path in tmp_path.glob("*plans*")] == ["plans.bundle"]  # one file, nothing beside it
    assert (tmp_path / "plans.bundle").stat().st_mode & 0o777 == 0o644
    assert other.import_bundle(tmp_path / "plans.bundle") == counts(done=100)
    assert found(other.store, stored) == 100
    assert {listed.row for listed in other.rows()} == set(stored)


def test_some_rows_go_out(opened, tmp_path):
    cache = opened()
    for number in range(10):
        one = row(number, device=f"d{number % 2}")
        cache.store.put(one, record(one))
    assert cache.export_bundle(tmp_path / "some", cache.rows(device="d1")) == counts(done=5)
    with plancache.open(tmp_path / "some") as bundle:
        assert {listed.row.created for listed in bundle.rows()} == {1.0, 3.0, 5.0, 7.0, 9.0}
    assert cache.export_bundle(tmp_path / "none", []) == counts()
    assert opened("other").import_bundle(tmp_path / "none") == counts()


def test_the_same_bundle_twice_changes_nothing(kind, opened, tmp_path):
    stored = fill(opened().store, 20)
    opened().export_bundle(tmp_path / "plans.bundle")
    other = opened("other", store=kind)
    assert other.import_bundle(tmp_path / "plans.bundle") == counts(done=20)
    other.close()
    before = list(other.rows())
    for _ in range(2):
        assert other.import_bundle(tmp_path / "plans.bundle") == counts(present=20)
        other.close()
        assert list(other.rows()) == before
    assert found(other.store, stored) == 20


def test_an_older_drivers_row_wins_whichever_comes_in(kind, opened, tmp_path):
    for name, driver in (("older", 12080), ("newer", 13010)):
        one = row(1, driver=driver)
        opened(name).store.put(one, record(one))
        opened(name).export_bundle(tmp_path / f"{name}.bundle")
    cache = opened("cache", store=kind)
    results = [cache.import_bundle(tmp_path / f"{name}.bundle") for name in ("newer", "older", "newer")]
    assert results == [counts(done=1), counts(done=1), counts(present=1)]
    assert [listed.row.driver for listed in cache.rows()] == [12080]


def test_progress_is_told_of_each_record(kind, opened, tmp_path):
    cache, told = opened("cache", store=kind), []
    fill(cache.store, 130)
    cache.export_bundle(tmp_path / "plans.bundle", progress=lambda: told.append("out"))
    opened("other").import_bundle(tmp_path / "plans.bundle", progress=lambda: told.append("in"))
    assert told == ["out"] * 130 + ["in"] * 130


def test_a_bundle_is_a_layer_and_carries_real_plans(warm, tmp_path, targeted):
    with plancache.open(warm) as cache:
        assert cache.export_bundle(tmp_path / "plans.bundle") == counts(done=3)
    with plancache.open(tmp_path / "top", layers=[tmp_path / "plans.bundle"]) as cache:
        assert cache.build(graphs.matmul()[0]).source is Source.LAYER
        assert cache.import_bundle(tmp_path / "plans.bundle") == counts(done=3)
        assert cache.build(graphs.matmul()[0]).source is Source.DISK
        assert cache.verify().good == 3


def test_an_import_keeps_the_bound_of_the_directory(kind, opened, tmp_path):
    cache = opened("large")
    fill(cache.store, 200, size=50_000)
    cache.export_bundle(tmp_path / "plans.bundle")
    assert (tmp_path / "plans.bundle").stat().st_size > 10_000_000
    largest = 0

    def watch():
        nonlocal largest
        files = [path for path in (tmp_path / "small").rglob("*") if path.is_file()]
        largest = max(largest, sum(path.stat().st_size for path in files))

    bound = 4_000_000
    small = opened("small", store=kind, max_bytes=bound)
    small.import_bundle(tmp_path / "plans.bundle", progress=watch)
    small.close()
    watch()
    # Files are counted in batches, so that while the import runs there may be one batch too many.
    assert largest <= bound + (64 * 50_100 if kind == "files" else 0)
    assert 10 < len(list(small.rows())) < 100


# ------------------------------------------------------------ signed


def test_a_signed_bundle_is_taken_by_whoever_has_the_key(opened, tmp_path, key_file):
    cache = opened("cache", key_file=key_file)
    stored = fill(cache.store, 5, key=KEY)
    assert cache.export_bundle(tmp_path / "plans.bundle") == counts(done=5)
    (tmp_path / "foreign").write_bytes(KEY[::-1])
    assert opened("mine", key_file=key_file).import_bundle(tmp_path / "plans.bundle") == counts(done=5)
    assert opened("none").import_bundle(tmp_path / "plans.bundle") == counts(damaged=5)
    assert opened("theirs", key_file=tmp_path / "foreign").import_bundle(tmp_path / "plans.bundle") == counts(damaged=5)
    assert found(opened("mine").store, stored) == 5
    assert list(opened("none").rows()) == list(opened("theirs").rows()) == []


def test_of_records_signed_by_several_only_ones_own_go_out_and_in(opened, tmp_path, key_file):
    plain = opened("mixed", store="sqlite")
    for number in range(9):
        one = row(number)
        plain.store.put(one, record(one, key=(KEY, None, KEY[::-1])[number % 3]))
    assert plain.export_bundle(tmp_path / "unsigned") == counts(done=3, damaged=6)
    mine = opened("mixed", key_file=key_file)
    assert mine.export_bundle(tmp_path / "signed") == counts(done=3, damaged=6)
    plain.close()
    mine.close()
    # A bundle that somebody has put together of records of several.
    shutil.copy(tmp_path / "mixed" / "plancache.sqlite3", tmp_path / "mixed.bundle")
    other = opened("other", key_file=key_file)
    assert other.import_bundle(tmp_path / "mixed.bundle") == counts(done=3, damaged=6)
    assert {listed.row.created for listed in other.rows()} == {0.0, 3.0, 6.0}


# ------------------------------------------------------------ damaged

COUNT, SIZE = 60, 6000


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """The bytes of a bundle, and what is in it."""
    directory = tmp_path_factory.mktemp("bundle")
    with plancache.open(directory / "cache") as cache:
        stored = fill(cache.store, COUNT, size=SIZE)
        cache.export_bundle(directory / "plans.bundle")
    return (directory / "plans.bundle").read_bytes(), stored


@pytest.fixture
def imported(tmp_path):
    """Imports a bundle of these bytes into an empty cache; gives the counts, and the records that came in."""

    def importer(content, stored):
        (tmp_path / "damaged.bundle").write_bytes(content)
        shutil.rmtree(tmp_path / "into", ignore_errors=True)
        with plancache.open(tmp_path / "into", store="files") as cache:
            result = cache.import_bundle(tmp_path / "damaged.bundle")
            came = found(cache.store, stored)
            assert len(list(cache.store.salvage())) == came == result.done  # nothing but whole records came in
        return result

    return importer


def test_damaged_records_are_counted_and_the_rest_goes_in(bundle, imported):
    content, stored = bundle
    chance = random.Random(1)
    for _ in range(20):
        damaged = bytearray(content)
        hit = chance.sample(sorted(stored, key=lambda one: one.key), 5)
        for one in hit:
            # The end of a record, which lies on one page; its beginning may be found in an index, too.
            start = content.index(stored[one][-100:])
            damaged[start + chance.randrange(100)] ^= 1 << chance.randrange(8)
        assert imported(bytes(damaged), stored) == counts(done=COUNT - 5, damaged=5)


def test_bits_that_are_flipped_anywhere_let_no_damaged_record_in(bundle, imported):
    content, stored = bundle
    chance, refused = random.Random(2), 0
    for _ in range(60):
        damaged = bytearray(content)
        for _ in range(chance.choice((1, 10, 100))):
            damaged[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        try:
            result = imported(bytes(damaged), stored)
            assert result.done + result.damaged <= COUNT
        except StoreError:
            refused += 1
    assert refused < 20  # only where a flip hit what says where everything is


def test_pages_that_are_overwritten_cost_the_records_on_them(bundle, imported):
    content, stored = bundle
    page = 8192
    done = []
    for start in range(0, len(content), page):
        damaged = content[:start] + random.Random(start).randbytes(page) + content[start + page :]
        if start == 0:
            with pytest.raises(StoreError, match="not a database"):
                imported(damaged, stored)
        else:
            result = imported(damaged, stored)
            assert result.done + result.damaged == COUNT
            done.append(result.done)
    assert sorted(done)[1] >= COUNT - 3  # the one page that leads to all others costs all
    assert len(done) > 20


def test_of_a_bundle_that_was_cut_the_whole_records_go_in(bundle, imported):
    content, stored = bundle
    whole = []
    for length in (len(content) - 1, len(content) * 3 // 4, len(content) // 2):
        result = imported(content[:length], stored)
        assert result.damaged > 0
        whole.append(result.done)
    assert whole[0] >= COUNT - 4
    assert COUNT // 2 < whole[1] < COUNT
    assert COUNT // 4 < whole[2] < whole[1]
    for length in (8192, 100, 1):
        with pytest.raises(StoreError):
            imported(content[:length], stored)


@pytest.mark.parametrize("content", [b"", b"no bundle" * 5000], ids=["of zero length", "nonsense"])
def test_a_file_that_is_no_bundle_is_an_error_that_names_it(content, opened, tmp_path):
    (tmp_path / "plans.bundle").write_bytes(content)
    with pytest.raises(StoreError) as refused:
        opened().import_bundle(tmp_path / "plans.bundle")
    assert refused.value.path == tmp_path / "plans.bundle"
    assert (tmp_path / "plans.bundle").read_bytes() == content
    for path in (tmp_path / "none", tmp_path / "cache"):
        with pytest.raises(StoreError, match="there is no such bundle"):
            opened().import_bundle(path)


# ------------------------------------------------------------ interrupted, and in the way

EXPORT = """
import pathlib, sys, time, plancache
from tests.stores import fill
with plancache.open(sys.argv[1]) as cache:
    fill(cache.store, 100)
    def progress():
        print("one", flush=True)
        sys.stdin.readline()
    cache.export_bundle(sys.argv[2], progress=progress)
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_export_leaves_no_half_file(how, tmp_path):
    target = tmp_path / "out" / "plans.bundle"
    target.parent.mkdir()
    target.write_bytes(b"the bundle of last week")
    command = [sys.executable, "-c", EXPORT, str(tmp_path / "cache"), str(target)]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as exporter:
        for _ in range(50):
            assert exporter.stdout.readline() == "one\n"
            print(file=exporter.stdin, flush=True)
        exporter.send_signal(how)
        exporter.communicate(timeout=60)
    assert exporter.returncode != 0
    assert target.read_bytes() == b"the bundle of last week"
    left = [path for path in target.parent.iterdir() if path != target]
    assert left == [] if how == signal.SIGINT else all(path.name.startswith(".plans.bundle.") for path in left)
    for path in left:
        os.utime(path, (0, 0))
    with plancache.open(tmp_path / "cache") as cache:
        cache.export_bundle(target)
    assert list(target.parent.iterdir()) == [target]  # the next one cleans up


def test_an_export_into_a_cache_directory_leaves_its_locks_alone(opened, tmp_path):
    cache = opened()
    fill(cache.store, 3)
    lock = (tmp_path / "cache" / "migrate.lock").stat().st_ino
    cache.export_bundle(tmp_path / "cache" / "plans.bundle")
    assert (tmp_path / "cache" / "migrate.lock").stat().st_ino == lock


def test_an_export_that_cannot_be_written_is_an_error_that_names_the_file(opened, mounted, tmp_path):
    cache = opened()
    fill(cache.store, 50, size=50_000)
    full = mounted("-t", "tmpfs", "-o", "size=1m", "tmpfs", tmp_path / "full")
    for target in (tmp_path / "no" / "such" / "plans.bundle", full / "plans.bundle"):
        with pytest.raises(StoreError) as failed:
            cache.export_bundle(target)
        assert str(target.parent) in str(failed.value) + str(failed.value.path)
        assert not target.exists()
    assert list(full.iterdir()) == []


def test_an_export_replaces_no_database_of_a_cache_and_nothing_but_files(kind, opened, tmp_path):
    cache = opened(store=kind)
    stored = fill(cache.store, 3)
    database, pipe = tmp_path / "cache" / FILE, tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(StoreError, match="not overwritten by a bundle"):
        cache.export_bundle(database, [])
    with pytest.raises(StoreError, match="no regular file"):
        cache.export_bundle(pipe)
    assert pipe.is_fifo()
    assert found(cache.store, stored) == 3
    link = tmp_path / "link"
    for target, fault in ((database, "not overwritten"), (pipe, "no regular file")):
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        with pytest.raises(StoreError, match=fault):
            cache.export_bundle(link)
    link.unlink()
    link.symlink_to("plans.bundle")
    assert cache.export_bundle(link) == counts(done=3)
    assert link.is_symlink()
    assert (tmp_path / "plans.bundle").is_file()
