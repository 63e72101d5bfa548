"""Read-only directories and bundles under a writable cache: what is served from where, and what is wrong with one."""

import os
import shutil
import sqlite3
from dataclasses import replace

import pytest

import plancache
from plancache.outcome import Reason, Source
from plancache.store import records
from plancache.store.database import FILE
from plancache.store.layers import Options, open_store
from tests import graphs
from tests.stores import snapshot

KEY = b"a key of more than sixteen bytes"


@pytest.fixture(scope="module")
def plans(_filled, h200):
    """Two different plans of matmul as rows and records of one key, so that it can be seen which one was served."""
    with plancache.target(h200), plancache.open(_filled[0]) as cache:
        key = cache.key(graphs.matmul()[0]).hash
        row, fields = records.decode(cache.store.get(key, "deviceless"))
        graph, _ = graphs.matmul()
        cache.lookup(graph)
        other = next(
            (engine, knobs)
            for engine, knobs in map(graph.get_engine_and_knobs_at_index, range(graph.get_execution_plan_count()))
            if engine != row.engine
        )
    with plancache.target(h200), plancache.open(_filled[0].parent / "other") as cache:
        outcome = cache.build(graphs.matmul()[0], plan=other)
        _, others = records.decode(cache.store.get(outcome.key.hash, "deviceless"))
    return {"first": (row, fields), "other": (replace(row, engine=other[0]), others)}


@pytest.fixture
def layer(plans, tmp_path):
    """Makes a cache with one plan of matmul, as a directory of either kind or as a bundle."""

    def maker(name, plan="first", kind="sqlite", key=None, damaged=False, **changes):
        row, fields = plans[plan]
        row = replace(row, **changes)
        record = records.encode(row, fields, key)
        store, _ = open_store(tmp_path / name, Options(kind="sqlite" if kind == "bundle" else kind))
        assert store.put(row, record[:-1] + bytes([record[-1] ^ 1]) if damaged else record)
        store.close()
        if kind == "bundle":
            with plancache.open(tmp_path / name) as cache:
                cache.export_bundle(tmp_path / f"{name}.bundle")
            shutil.rmtree(tmp_path / name)
            return tmp_path / f"{name}.bundle"
        return tmp_path / name

    return maker


def served(cache):
    """The outcome of matmul, and the engine of the plan that was served."""
    graph, _ = graphs.matmul()
    outcome = cache.lookup(graph)
    engine = graph.get_engine_and_knobs_at_index(0)[0] if outcome.hit else None
    return outcome, engine


@pytest.fixture
def engines(plans):
    return {name: row.engine for name, (row, _) in plans.items()}


@pytest.mark.parametrize("kind", ["sqlite", "files", "bundle"])
def test_a_layer_serves_what_the_writable_cache_does_not_have_and_nothing_is_copied(kind, layer, tmp_path, targeted):
    under = layer("under", kind=kind)
    content = under.read_bytes() if kind == "bundle" else {path.name for path in under.iterdir()}
    with plancache.open(tmp_path / "top", layers=[under]) as cache:
        graph, (_, _, c) = graphs.matmul()
        assert cache.contains(graphs.matmul()[0])
        outcome = cache.build(graph)
        assert (outcome.source, outcome.reason, outcome.stored) == (Source.LAYER, Reason.FOUND, False)
        assert (outcome.source, outcome.hit) == ("layer", True)
        assert c.get_dim() == [1, 64, 128]
        assert list(cache.rows()) == []
    if kind == "bundle":
        assert under.read_bytes() == content
    elif kind == "files":
        assert {path.name for path in under.iterdir()} == content


def test_the_writable_cache_comes_before_its_layers(layer, tmp_path, targeted, engines):
    with plancache.open(layer("top", "other"), layers=[layer("under", "first")]) as cache:
        outcome, engine = served(cache)
    assert (outcome.source, engine) == (Source.DISK, engines["other"])


def test_the_nearest_layer_comes_first(layer, tmp_path, targeted, engines):
    under = {"first": layer("one", "first"), "other": layer("two", "other", kind="bundle")}
    for order in (["first", "other"], ["other", "first"]):
        with plancache.open(tmp_path / "top", layers=[under[name] for name in order]) as cache:
            outcome, engine = served(cache)
            assert (outcome.source, engine) == (Source.LAYER, engines[order[0]])


def test_the_best_route_comes_before_the_nearest_layer(layer, tmp_path, targeted, engines):
    # A replay row in the writable cache, and in a nearer layer, is not as good as a plan that can be loaded as it is.
    top, near = layer("top", route="replay"), layer("near", route="replay")
    with plancache.open(top, layers=[near, layer("far", "other")]) as cache:
        outcome, engine = served(cache)
    assert (outcome.source, outcome.route, engine) == (Source.LAYER, "deviceless", engines["other"])


def test_a_miss_in_every_layer_is_built_and_stored_in_the_writable_cache_alone(layer, tmp_path, targeted):
    under = layer("under")
    with plancache.open(tmp_path / "top", layers=[under, layer("bundle", kind="bundle")]) as cache:
        outcome = cache.build(graphs.unary()[0])
        assert (outcome.source, outcome.reason, outcome.stored) == (Source.BUILT, Reason.ABSENT, True)
        assert cache.build(graphs.unary()[0]).source is Source.DISK
        assert [listed.row.key for listed in cache.rows()] == [outcome.key.hash]
    with plancache.open(under) as cache:
        assert len(list(cache.rows())) == 1


SERVE = """
import sys, plancache
from tests import graphs
with plancache.target("h200"), plancache.open(sys.argv[1]) as cache:
    print(cache.lookup(graphs.matmul()[0]).source)
"""


def test_layers_come_from_the_environment_where_no_argument_names_them(layer, tmp_path, run, targeted, monkeypatch):
    paths = os.pathsep.join(map(str, (layer("under", damaged=True), layer("bundle", kind="bundle"))))
    assert run(SERVE, tmp_path / "top", PLANCACHE_LAYERS=paths) == "layer\n"
    monkeypatch.setenv("PLANCACHE_LAYERS", paths)
    with plancache.open(tmp_path / "top") as cache:
        assert served(cache)[0].source is Source.LAYER
    with plancache.open(tmp_path / "top", layers=[]) as cache:
        assert served(cache)[0].reason is Reason.ABSENT


def test_a_layer_on_a_read_only_mount_stays_as_it_is(layer, mounted, tmp_path, targeted):
    under = layer("under")
    before = snapshot(under)
    place = mounted("-o", "bind,ro", under, tmp_path / "mount")
    with plancache.open(tmp_path / "top", layers=[place]) as cache:
        assert served(cache)[0].source is Source.LAYER
    assert snapshot(under) == before


@pytest.mark.parametrize("mode", ["read-only", "require-hit"])
def test_layers_serve_also_where_nothing_may_be_written(mode, layer, tmp_path, targeted):
    with plancache.open(layer("top", damaged=True), mode=mode, layers=[layer("under", kind="bundle")]) as cache:
        assert served(cache)[0].source is Source.LAYER


# ------------------------------------------------------------ layers that are of no use


def nothing(path):
    assert not path.exists()


def garbage_as_a_bundle(path):
    path.write_bytes(b"no bundle at all" * 1000)


def another_database(path):
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE something (else_ TEXT)")
    connection.close()


def an_empty_file(path):
    path.write_bytes(b"")


def a_directory_without_a_cache(path):
    path.mkdir()


def a_directory_that_everybody_may_write(path):
    path.mkdir()
    path.chmod(0o777)


def a_damaged_database(path):
    path.mkdir()
    (path / FILE).write_bytes(b"no database at all" * 1000)


def a_newer_database(path):
    path.mkdir()
    connection = sqlite3.connect(path / FILE)
    connection.execute("PRAGMA user_version = 99")
    connection.close()


BROKEN = [
    nothing,
    garbage_as_a_bundle,
    another_database,
    an_empty_file,
    a_directory_without_a_cache,
    a_directory_that_everybody_may_write,
    a_damaged_database,
    a_newer_database,
]


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_a_layer_that_is_of_no_use_is_one_warning_and_the_others_serve(broken, layer, tmp_path, targeted, said):
    broken(tmp_path / "broken")
    before = snapshot(tmp_path / "broken") if (tmp_path / "broken").exists() else None
    with plancache.open(tmp_path / "top", layers=[tmp_path / "broken", layer("under")]) as cache:
        for _ in range(3):
            assert served(cache)[0].source is Source.LAYER
    assert len(said()) == 1, said()
    assert (snapshot(tmp_path / "broken") if before else None) == before


def test_under_layers_that_are_all_of_no_use_graphs_are_built_and_stored(tmp_path, targeted, said):
    for broken in BROKEN:
        broken(tmp_path / broken.__name__)
    layers = [tmp_path / broken.__name__ for broken in BROKEN]
    with plancache.open(tmp_path / "top", layers=layers) as cache:
        outcome = cache.build(graphs.unary()[0])
        assert (outcome.source, outcome.stored) == (Source.BUILT, True)
        assert cache.build(graphs.unary()[0]).source is Source.DISK
    kinds = [text.split(";")[0] for text in said()]
    assert len(kinds) == len(set(kinds)) < len(BROKEN)  # one a kind


def test_a_layer_that_comes_later_is_used_from_then_on(layer, tmp_path, targeted, said):
    with plancache.open(tmp_path / "top", layers=[tmp_path / "under"]) as cache:
        assert served(cache)[0].source is Source.MISS
        layer("under")
        assert served(cache)[0].source is Source.LAYER
    assert len(said()) == 1


def test_a_damaged_record_in_a_layer_hides_no_good_one_in_another(layer, tmp_path, targeted, said, engines):
    order = [layer("damaged", damaged=True), layer("under", "other")]
    with plancache.open(tmp_path / "top", layers=order) as cache:
        outcome, engine = served(cache)
        assert (outcome.source, engine) == (Source.LAYER, engines["other"])
        served(cache)
    assert len(said()) == 1
    assert "checksum" in said()[0]


def test_a_damaged_record_over_a_good_one_in_a_layer_warns_once_and_is_gone(layer, tmp_path, targeted, said):
    top, under = layer("top", damaged=True), layer("under")
    for _ in range(2):
        with plancache.open(top, layers=[under]) as cache:
            assert served(cache)[0].source is Source.LAYER
    assert len(said()) == 1
    with plancache.open(top) as cache:
        assert list(cache.rows()) == []


def test_a_damaged_record_in_a_layer_alone_is_built_once(layer, tmp_path, targeted, said):
    with plancache.open(tmp_path / "top", layers=[layer("damaged", damaged=True)]) as cache:
        outcome = cache.build(graphs.matmul()[0])
        assert (outcome.source, outcome.reason, outcome.stored) == (Source.BUILT, Reason.DAMAGED, True)
        assert cache.build(graphs.matmul()[0]).source is Source.DISK
    assert len(said()) == 1


def test_a_row_for_a_newer_driver_hides_no_usable_one_in_another_layer(layer, tmp_path, targeted, engines):
    order = [layer("newer", driver=99000), layer("under", "other")]
    with plancache.open(tmp_path / "top", layers=order) as cache:
        outcome, engine = served(cache)
        assert (outcome.source, engine) == (Source.LAYER, engines["other"])
    with plancache.open(tmp_path / "top", layers=order[:1]) as cache:
        assert served(cache)[0].reason is Reason.NEWER_DRIVER


def test_with_a_key_only_signed_records_of_layers_are_taken(layer, tmp_path, targeted, said, engines):
    (tmp_path / "key").write_bytes(KEY)
    order = [layer("plain"), layer("foreign", key=KEY[::-1]), layer("plain too", kind="bundle")]
    with plancache.open(tmp_path / "top", layers=order, key_file=tmp_path / "key") as cache:
        assert served(cache)[0].reason is Reason.DAMAGED
    order.append(layer("signed", "other", key=KEY))
    with plancache.open(tmp_path / "top", layers=order, key_file=tmp_path / "key") as cache:
        outcome, engine = served(cache)
        assert (outcome.source, engine) == (Source.LAYER, engines["other"])
    assert {text[:22] for text in said()} == {"a record is not signed", "a record's signature i"}
    with plancache.open(tmp_path / "top", layers=order[-1:]) as cache:
        assert served(cache)[0].reason is Reason.FOREIGN
    assert "there is no key to check it" in said()[-1]


def test_a_record_that_cudnn_refuses_hides_no_good_one_in_another_layer(layer, plans, tmp_path, targeted, engines):
    row, fields = plans["first"]
    store, _ = open_store(tmp_path / "refused", Options())
    assert store.put(row, records.encode(row, {**fields, "blob": fields["blob"][: len(fields["blob"]) // 2]}))
    store.close()
    with plancache.open(tmp_path / "refused", layers=[layer("under", "other")], mode="require-hit") as cache:
        outcome, engine = served(cache)
        assert (outcome.source, engine) == (Source.LAYER, engines["other"])
    with plancache.open(tmp_path / "refused") as cache:
        assert len(list(cache.rows())) == 1  # it is set aside only where a fresh build succeeds
