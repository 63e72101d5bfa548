"""What all processes have counted: hits, misses by reason, seconds saved; and that counting costs nobody anything."""

import json
import time

import pytest

import plancache
from plancache.cudnn import device as devices
from plancache.outcome import Reason, Source
from plancache.store import tallies
from plancache.store.directory import Access
from plancache.store.layers import Options, open_store
from plancache.store.tallies import Counting, Tally, TallyFiles, added_up
from plancache.totals import Names
from tests import graphs
from tests.stores import fill, snapshot

NAME = ("d", "e", "disk", "FOUND")


@pytest.fixture(params=["sqlite", "files"])
def kind(request):
    return request.param


@pytest.fixture
def moved(kind, warm, tmp_path):
    """A cache of this kind with the plans of matmul, conv and sdpa, in which nothing was counted yet."""
    with plancache.open(warm) as cache:
        cache.export_bundle(tmp_path / "plans.bundle")
    with plancache.open(tmp_path / "moved", store=kind) as cache:
        cache.import_bundle(tmp_path / "plans.bundle")
    return tmp_path / "moved"


SERVE = """
import sys, plancache
from tests import graphs
with plancache.target("h200"), plancache.open(sys.argv[1]) as cache:
    for _ in range(int(sys.argv[2])):
        assert cache.build(graphs.sdpa()[0]).source == "disk"
"""


def totals(path):
    with plancache.open(path, mode="read-only") as cache:
        return cache.totals()


def test_hits_misses_and_seconds_saved_add_up_over_processes(moved, run, targeted):
    assert (totals(moved).hits, totals(moved).since, totals(moved).plans) == (0, None, 3)
    run(SERVE, moved, 2)
    run(SERVE, moved, 3)
    with plancache.open(moved) as cache:
        outcomes = [cache.build(graphs.unary()[0]), cache.build(graphs.sdpa()[0])]
        assert [outcome.source for outcome in outcomes] == [Source.BUILT, Source.DISK]
        assert outcomes[0].build_seconds == 0 < outcomes[1].build_seconds
        row = next(listed.row for listed in cache.rows(key=outcomes[1].key.hash))
        assert outcomes[1].build_seconds == row.seconds
    found = totals(moved)
    assert (found.hits, dict(found.misses), found.plans) == (6, {"ABSENT": 1}, 4)
    assert 0.5 * 6 * row.seconds < found.saved < 6 * row.seconds
    assert found.spent == pytest.approx(outcomes[0].seconds)
    assert found.bytes == sum(listed.stored for listed in plancache.open(moved).rows())
    assert list(found.devices) == [targeted.fingerprint]
    assert [part.hits for part in found.environments.values()] == [6]
    assert found.since <= time.time() < found.since + 2 * 86400
    assert sum(found.saved_by_day.values()) == pytest.approx(found.saved)


def test_an_entry_knows_how_often_and_when_it_was_last_used(moved, run):
    before = time.time()
    run(SERVE, moved, 2)
    run(SERVE, moved, 1)
    with plancache.open(moved, mode="read-only") as cache:
        hits = {listed.row.engine: (listed.hits, listed.used >= before) for listed in cache.rows()}
    assert hits.pop(9) == (3, True)
    assert set(hits.values()) == {(0, False)}


def test_a_cache_that_is_only_read_counts_nothing(moved, targeted, monkeypatch):
    before = snapshot(moved)
    for mode in ("read-only", "require-hit"):
        with plancache.open(moved, mode=mode) as cache:
            assert cache.build(graphs.sdpa()[0]).source is Source.DISK
    with plancache.open(moved, mode="off") as cache:
        assert cache.build(graphs.unary()[0]).source is Source.BYPASSED
    assert totals(moved).hits == 0
    if (moved / "records").exists():  # SQLite's shared memory is there while somebody reads
        assert snapshot(moved) == before


def test_reasons_of_bypassed_graphs_are_counted_apart(moved, targeted):
    with plancache.open(moved) as cache:
        graph = graphs.unary()[0]
        graph.validate()
        assert cache.build(graph).reason is Reason.VALIDATED
        cache.build(graphs.sdpa()[0])
    found = totals(moved)
    assert (found.hits, dict(found.misses), dict(found.bypassed)) == (1, {}, {"VALIDATED": 1})
    assert found.devices[""].bypassed == {"VALIDATED": 1}


def test_a_forked_child_does_not_count_again_what_its_parent_counted(moved, run):
    run(
        """
import os, sys, plancache
from tests import graphs
with plancache.target("h200"), plancache.open(sys.argv[1]) as cache:
    cache.build(graphs.sdpa()[0])
    child = os.fork()
    if not child:
        cache.close()
        os._exit(0)
    os.waitpid(child, 0)
""",
        moved,
    )
    assert totals(moved).hits == 1
    with plancache.open(moved, mode="read-only") as cache:
        assert sum(listed.hits for listed in cache.rows()) == 1


def test_what_cannot_be_counted_is_no_fault(moved, targeted, said, kind):
    with plancache.open(moved) as cache:
        cache.build(graphs.sdpa()[0])
        if kind == "sqlite":
            cache.store.database.connection().execute("DROP TABLE tallies")
        else:
            (moved / "tallies").write_text("in the way")
        cache.flush()
        assert cache.build(graphs.sdpa()[0]).source is Source.DISK
    assert said() == []


# ------------------------------------------------------------ bounds


def test_old_days_of_a_database_are_added_up(tmp_path):
    (tmp_path / "cache").mkdir()
    store, _ = open_store(tmp_path / "cache", Options(kind="sqlite"))
    fill(store, 1)
    today = int(time.time()) // 86400
    connection = store.database.connection()
    rows = [("d", "e", "disk", reason, today - day, 1, 2.0, 0.5) for day in range(400) for reason in ("A", "B", "C")]
    connection.executemany("INSERT INTO tallies VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)
    store.maintain()
    kept = store.tallies()
    assert len(kept) == 3 * 92
    assert (sum(one.count for one in kept), sum(one.recorded for one in kept)) == (1200, 2400.0)
    assert kept[0].day == today - 399
    assert kept[0].count == 400 - 91
    store.maintain()
    assert store.tallies() == kept
    store.close()


def test_files_are_merged_and_old_days_added_up(tmp_path):
    files = TallyFiles(tmp_path, Access(read_only=False), 2 << 20)
    today = int(time.time()) // 86400
    for day in range(400):
        files.write(
            [Tally("d", "e", "disk", reason, today - day, 1, 2.0, 0.5) for reason in "ABC"], {("k", "native"): 1}
        )
    assert len(list(files.path.iterdir())) <= 17
    kept, hits = files.read()
    assert (sum(one.count for one in kept), sum(one.recorded for one in kept)) == (1200, 2400.0)
    assert hits == {("k", "native"): 400}
    assert len(kept) < 1050


def test_hits_of_entries_are_bounded_and_those_with_the_most_stay(tmp_path):
    files = TallyFiles(tmp_path, Access(read_only=False), 2 << 20)
    for number in range(20):
        files.write([], {(f"{number}-{entry}", "native"): entry + 1 for entry in range(100)})
    hits = files.read()[1]
    assert len(hits) <= 512 + 4 * 100
    assert all(hits[f"{number}-99", "native"] == 100 for number in range(20))
    assert sum(file.stat().st_size for file in files.path.iterdir()) < 64 << 10


def test_a_merger_that_is_killed_at_any_moment_loses_and_doubles_nothing(tmp_path, monkeypatch):
    def filled(name):
        files = TallyFiles(tmp_path / name, Access(read_only=False), 2 << 20)
        (tmp_path / name).mkdir()
        for _ in range(16):
            files.write([Tally(*NAME, 20000, 1, 2.0, 0.5)], {})
        return files

    class Killed(BaseException):
        pass

    steps = 0
    for fatal in range(100):
        files, left = filled(str(fatal)), [fatal]

        def step(call, left=left):
            def stepped(*arguments, **options):
                if not left[0]:
                    raise Killed
                left[0] -= 1
                return call(*arguments, **options)

            return stepped

        with monkeypatch.context() as patched:
            for name in ("rename", "unlink"):
                patched.setattr(tallies.Path, name, step(getattr(tallies.Path, name)))
            patched.setattr(tallies.json, "dump", step(json.dump))
            try:
                files.write([Tally(*NAME, 20000, 1, 2.0, 0.5)], {})
            except Killed:
                steps += 1
            else:
                break
        assert sum(one.count for one in files.read()[0]) in (16, 17)
        monkeypatch.setattr(tallies, "_STALE", -1.0)  # the next merger takes over what this one has left
        for _ in range(20):
            files.write([Tally(*NAME, 20000, 1, 2.0, 0.5)], {})
        assert sum(one.count for one in files.read()[0]) in (36, 37)
        monkeypatch.undo()
    assert steps > 30


def test_what_is_no_file_of_tallies_counts_as_nothing(tmp_path):
    files = TallyFiles(tmp_path, Access(read_only=False), 2 << 20)
    files.write([Tally(*NAME, 20000, 1, 2.0, 0.5)], {("k", "native"): 1})
    for number, text in enumerate(("", "{", "[]", '{"tallies": [[1]], "hits": []}', '{"tallies": 1, "hits": 2}')):
        (files.path / str(number)).write_text(text)
    (files.path / "directory").mkdir()
    assert files.read() == ([Tally(*NAME, 20000, 1, 2.0, 0.5)], {("k", "native"): 1})


def test_counting_adds_up_by_name():
    counting = Counting()
    assert not counting
    for name in (NAME, NAME, ("d", "e", "built", "ABSENT")):
        counting.add(name, 1.0, 0.25)
    found = counting.take()
    assert [(one.source, one.count, one.recorded, one.spent) for one in found] == [
        ("disk", 2, 2.0, 0.5),
        ("built", 1, 1.0, 0.25),
    ]
    assert not counting
    assert counting.take() == []
    assert added_up([*found, *found])[0].count == 4


def test_the_devices_that_come_with_plancache_are_read_once_for_a_whole_listing(monkeypatch):
    asked = []
    shipped = devices.names
    monkeypatch.setattr(devices, "names", lambda: asked.append(1) or shipped())
    names = Names()
    h200 = plancache.device("h200").fingerprint
    assert names.device("d" * 64) == "dddddddddddd"
    once = len(asked)
    assert [names.device(one) for one in (h200, "d" * 64, "", h200)] == [
        "NVIDIA H200",
        "dddddddddddd",
        "-",
        "NVIDIA H200",
    ]
    assert len(asked) == once > 0
