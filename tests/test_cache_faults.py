"""A fault of the cache itself is one warning, and the graph is built as if there were no cache."""

import logging
import sqlite3
from dataclasses import replace

import pytest

import plancache
from plancache.outcome import Reason, Source
from plancache.store import records
from plancache.store.database import FILE
from tests import graphs


@pytest.fixture
def warnings(caplog):
    caplog.set_level(logging.WARNING, logger="plancache")

    def said():
        return [record.getMessage() for record in caplog.records if record.name == "plancache"]

    return said


def change(directory, statement, *values):
    connection = sqlite3.connect(directory / FILE)
    with connection:
        connection.execute(statement, values)
    connection.close()


def stored(directory, statement="SELECT record FROM plans WHERE engine = 4 ORDER BY size"):
    connection = sqlite3.connect(directory / FILE)
    found = connection.execute(statement).fetchone()[0]
    connection.close()
    return found


def matmul_key(cache):
    return cache.key(graphs.matmul()[0]).hash


def test_a_damaged_record_is_never_loaded_and_is_replaced_by_a_good_one(warm, targeted, warnings):
    with plancache.open(warm) as cache:
        key = matmul_key(cache)
        record = bytearray(stored(warm, f"SELECT record FROM plans WHERE key = '{key}'"))
        record[len(record) // 2] ^= 1
        change(warm, "UPDATE plans SET record = ? WHERE key = ?", bytes(record), key)
        outcome = cache.build(graphs.matmul()[0])
        assert (outcome.source, outcome.reason, outcome.stored) == (Source.BUILT, Reason.DAMAGED, True)
        assert cache.build(graphs.matmul()[0]).source is Source.DISK
        assert len(warnings()) == 1
        assert "checksum is wrong" in warnings()[0]


def test_a_record_in_another_plans_row_is_not_served(warm, targeted, warnings):
    with plancache.open(warm) as cache:
        other = cache.key(graphs.conv()[0]).hash
        record = stored(warm, f"SELECT record FROM plans WHERE key = '{other}'")
        change(warm, "UPDATE plans SET record = ? WHERE key = ?", record, matmul_key(cache))
        outcome = cache.lookup(graphs.matmul()[0])
    assert (outcome.source, outcome.reason) == (Source.MISS, Reason.DAMAGED)
    assert "another plan's" in outcome.detail


def test_a_record_moved_to_another_route_is_not_served(warm, targeted):
    with plancache.open(warm) as cache:
        row, fields = records.decode(stored(warm, f"SELECT record FROM plans WHERE key = '{matmul_key(cache)}'"))
        forged = records.encode(replace(row, route="native"), fields)
        change(warm, "UPDATE plans SET record = ? WHERE key = ?", forged, matmul_key(cache))
        assert cache.lookup(graphs.matmul()[0]).reason is Reason.DAMAGED


def test_a_plan_that_cudnn_refuses_is_replaced_once_a_build_succeeds(warm, targeted):
    with plancache.open(warm) as cache:
        key = matmul_key(cache)
        row, fields = records.decode(stored(warm, f"SELECT record FROM plans WHERE key = '{key}'"))
        forged = records.encode(row, {**fields, "blob": fields["blob"][: len(fields["blob"]) // 2]})
        change(warm, "UPDATE plans SET record = ? WHERE key = ?", forged, key)
        assert cache.lookup(graphs.matmul()[0]).reason is Reason.REFUSED
        assert stored(warm, f"SELECT record FROM plans WHERE key = '{key}'") == forged  # a lookup sets nothing aside
        graph, (_, _, c) = graphs.matmul()
        outcome = cache.build(graph)
        assert (outcome.source, outcome.reason, outcome.stored) == (Source.BUILT, Reason.REFUSED, True)
        assert c.get_dim() == [1, 64, 128]
        assert cache.build(graphs.matmul()[0]).source is Source.DISK


def test_a_fault_of_the_process_sets_nothing_aside(warm, targeted, monkeypatch):
    from plancache.cudnn import frontend

    def sick(*args, **kwargs):
        raise RuntimeError("cuModuleLoadData failed: CUDA_ERROR_OUT_OF_MEMORY")

    with plancache.open(warm) as cache:
        key = matmul_key(cache)
        before = stored(warm, f"SELECT record FROM plans WHERE key = '{key}'")
        monkeypatch.setattr(frontend, "load", sick)
        graph, _ = graphs.matmul()
        assert cache.lookup(graphs.matmul()[0]).reason is Reason.FAULT
        outcome = cache.build(graph)  # built; and what this process cannot load it does not store either
        assert (outcome.source, outcome.reason, outcome.stored) == (Source.BYPASSED, Reason.UNLOADABLE, False)
        assert graph.get_workspace_size() >= 0
        assert stored(warm, f"SELECT record FROM plans WHERE key = '{key}'") == before


@pytest.mark.parametrize("content", [b"", b"no database at all" * 1000], ids=["of zero length", "nonsense"])
def test_a_database_that_is_none_costs_one_warning(tmp_path, targeted, warnings, content):
    directory = tmp_path / "cache"
    directory.mkdir()
    (directory / FILE).write_bytes(content)
    with plancache.open(directory) as cache:
        outcomes = [cache.build(graphs.matmul()[0]) for _ in range(2)]
    assert outcomes[0].source is Source.BUILT
    assert outcomes[1].source is Source.DISK  # what could not be used was set aside, and a new one made
    # SQLite takes an empty file for a new database: no fault at all.
    assert len(warnings()) == len(list(directory.glob("damaged-*.sqlite3"))) == (1 if content else 0)


def test_a_directory_that_cannot_be_made_costs_one_warning_(tmp_path, targeted, warnings):
    file = tmp_path / "file"
    file.write_text("in the way")
    with plancache.open(file / "cache") as cache:
        for _ in range(2):
            graph, _ = graphs.matmul()
            outcome = cache.build(graph)
            assert (outcome.source, outcome.reason, outcome.stored) == (Source.BUILT, Reason.STORE_FAULT, False)
            assert graph.get_execution_plan_count() > 0
    assert [text.split(";")[0] for text in warnings()] == [f"the cache directory cannot be made: {file}/cache"]


def test_a_full_disk_costs_one_warning_and_the_graph_is_built(run, warm):
    source = """
import logging, resource, signal, sys, plancache
from tests import graphs
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
with plancache.target("h200"), plancache.open(sys.argv[1]) as cache:
    cache.contains(graphs.matmul()[0])
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    for m in (16, 24):
        outcome = cache.build(graphs.matmul(m=m)[0])
        print(outcome.source, outcome.stored)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print(cache.build(graphs.matmul()[0]).source)
    print(cache.build(graphs.matmul(m=24)[0]).stored)
"""
    done = run(source, warm, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["built", "False", "built", "False", "disk", "True"]
    assert done.stderr.count("cannot be used") == 1


def test_a_warning_never_becomes_an_exception(run, tmp_path):
    # Under -W error (as `run` starts Python) warnings.warn would raise and stop the job.
    (tmp_path / "file").write_text("")
    source = """
import sys, plancache
from tests import graphs
with plancache.target("h200"), plancache.open(sys.argv[1]) as cache:
    print(cache.build(graphs.matmul()[0]).source)
"""
    assert run(source, tmp_path / "file" / "cache").split() == ["built"]


def test_a_cache_of_a_newer_plancache_is_left_alone(warm, targeted, warnings):
    change(warm, "PRAGMA user_version = 999")
    change(
        warm, "INSERT INTO _sqlite_migrations (migration_set, name, applied_at) VALUES ('plancache', '9999_future', '')"
    )
    with plancache.open(warm) as cache:
        outcome = cache.build(graphs.matmul()[0])
    assert (outcome.source, outcome.reason) == (Source.BUILT, Reason.STORE_FAULT)
    assert "schema 999" in warnings()[0]
    change(warm, "PRAGMA user_version = 1")
    change(warm, "DELETE FROM _sqlite_migrations WHERE name = '9999_future'")
    with plancache.open(warm) as cache:
        assert cache.contains(graphs.matmul()[0])


def test_parent_and_child_go_on_after_a_fork(run, warm):
    source = """
import os, sys, plancache
from tests import graphs
with plancache.target("h200"), plancache.open(sys.argv[1]) as cache:
    print(cache.build(graphs.matmul()[0]).source, flush=True)
    child = os.fork()
    print(cache.build(graphs.conv()[0]).source, cache.build(graphs.matmul(m=16)[0]).stored, flush=True)
    if child:
        print(os.waitpid(child, 0)[1])
    else:
        os._exit(0)
"""
    done = run(source, warm, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == sorted(["disk", "disk", "True", "disk", "False", "0"]) or sorted(
        done.stdout.split()
    ) == sorted(["disk", "disk", "True", "disk", "True", "0"])


def test_nothing_of_the_cache_is_readable_by_others(tmp_path, targeted):
    with plancache.open(tmp_path / "cache") as cache:
        cache.contains(graphs.matmul()[0])
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700
