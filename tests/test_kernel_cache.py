"""Kernel caches on disk: each kernel is compiled once, whoever needs it, and nothing is written without a change."""

import json
import logging
import os
import shutil
import sqlite3
import subprocess
import sys
import threading

import cudnn
import pytest
from click.testing import CliRunner

import plancache
from plancache.cli import cli
from plancache.cudnn import kernel_cache
from plancache.cudnn.kernel_cache import Tracked
from plancache.errors import BuilderError, StoreError
from plancache.kernels import MOST, KernelCache, is_kernel
from plancache.keys import Part
from plancache.outcome import Reason, Source
from plancache.store import records
from plancache.store.database import FILE
from plancache.store.interface import Row
from tests import graphs
from tests.conftest import ROOT

# Other alignments of the last dimension need other kernels; other lengths do not.
WIDTHS = (128, 100, 63)


def mlp(m, n=128, **kwargs):
    """relu(a @ b + bias), with dynamic shapes: [4, m, 64] x [4, 64, n]."""
    graph = graphs.new(is_dynamic_shape_enabled=True, **kwargs)
    a = graph.tensor(dim=[4, m, 64], stride=[m * 64, 64, 1], name="a")
    b = graph.tensor(dim=[4, 64, n], stride=[64 * n, n, 1], name="b")
    bias = graph.tensor(dim=[1, 1, n], stride=[n, n, 1], name="bias")
    c = graph.relu(graph.add(graph.matmul(a, b), bias))
    c.set_output(True)
    return graph


@pytest.fixture(scope="session")
def _compiled(tmp_path_factory, h200):
    """A cache that holds the kernels of the three widths, and the document that cuDNN gave."""
    directory = tmp_path_factory.mktemp("kernels") / "cache"
    with plancache.target(h200), plancache.open(directory) as cache:
        for n in WIDTHS:
            assert cache.build(mlp(32, n)).source is Source.BUILT
        (kernels,) = cache._dynamic._shared.values()
        document = kernels._tracked.document()
    return directory, document


@pytest.fixture
def kernels_dir(_compiled, tmp_path):
    shutil.copytree(_compiled[0], tmp_path / "kernels")
    return tmp_path / "kernels"


@pytest.fixture
def document(_compiled):
    return _compiled[1]


@pytest.fixture
def serializations(monkeypatch):
    """How often a kernel cache was serialized."""
    calls = []
    plain = Tracked.document
    monkeypatch.setattr(Tracked, "document", lambda self: (calls.append(1), plain(self))[1])
    return calls


BUILD = """
import sys, json, plancache
from tests.test_kernel_cache import mlp
with plancache.target("h200"), plancache.open(sys.argv[1]) as cache:
    for pair in json.loads(sys.argv[2]):
        outcome = cache.build(mlp(*pair))
        print(outcome.source, outcome.stored, flush=True)
"""


def test_another_process_compiles_nothing_for_lengths_that_were_never_seen(kernels_dir, run):
    out = run(BUILD, kernels_dir, json.dumps([[m, n] for m in (2, 3, 200, 999) for n in WIDTHS]))
    assert out.splitlines() == ["disk True"] * 12  # each length's own plan is stored, and next time loaded


def test_a_length_that_was_built_before_is_loaded_as_any_plan_without_asking_heuristics(kernels_dir, targeted):
    with plancache.open(kernels_dir) as cache:
        assert cache.build(mlp(55)).reason is Reason.KERNELS
        graph = mlp(55)
        outcome = cache.build(graph)
        assert (outcome.source, outcome.reason, outcome.route) == (Source.DISK, Reason.FOUND, "deviceless")
        built = mlp(55)
        built.build()
        assert graph.get_workspace_size() == built.get_workspace_size()
        assert cache.contains(mlp(55))
        assert not cache.contains(mlp(56))


def test_fifty_shapes_that_compile_two_kernels_are_serialized_twice_at_most(tmp_path, targeted, serializations):
    with plancache.open(tmp_path / "cache") as cache:
        outcomes = [cache.build(mlp(2 + m, n)) for m in range(25) for n in (128, 63)]
        assert [outcome.source for outcome in outcomes].count(Source.BUILT) == 2
        assert {outcome.reason for outcome in outcomes[2:]} == {Reason.KERNELS}
    assert len(serializations) == 2


def test_nothing_is_serialized_or_written_where_nothing_was_compiled(kernels_dir, targeted, serializations):
    before = {file.name: file.read_bytes() for file in kernels_dir.iterdir() if file.suffix == ".sqlite3"}
    with plancache.open(kernels_dir) as cache:
        for m in (5, 6, 7):
            assert cache.build(mlp(m)).source is Source.DISK
        kernels = list(cache._dynamic._shared.values())
        assert [one.written for one in kernels] == [0]
        rows = [(listed.row, listed.stored) for listed in cache.rows()]
    assert serializations == []
    with plancache.open(kernels_dir) as cache:
        assert [(listed.row, listed.stored) for listed in cache.rows()] == rows
    assert before


def test_processes_that_start_from_the_same_state_both_keep_their_kernels(tmp_path, run, h200):
    run(BUILD, tmp_path / "cache", "[[32, 128]]")
    hold = """
import sys, json, plancache
from tests.test_kernel_cache import mlp
with plancache.target("h200"), plancache.open(sys.argv[1]) as cache:
    with cache.kernel_cache(mlp(8)) as kernels:       # loaded now, flushed at the end
        mlp(8, int(sys.argv[2]), kernel_cache=kernels.native).build()
        print("compiled", kernels.moved(), flush=True)
        sys.stdin.readline()
"""
    running = [
        subprocess.Popen(
            [sys.executable, "-c", hold, tmp_path / "cache", str(n)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=dict(os.environ),
        )
        for n in (100, 63)
    ]
    for process in running:
        assert process.stdout.readline() == "compiled True\n"
    for process in reversed(running):
        process.communicate("\n", timeout=60)
    out = run(BUILD, tmp_path / "cache", json.dumps([[9, n] for n in WIDTHS]))
    assert [line.split()[0] for line in out.splitlines()] == ["disk"] * 3


def test_two_topologies_never_share_one(kernels_dir, targeted):
    def gelu(m):
        graph = graphs.new(is_dynamic_shape_enabled=True)
        a = graph.tensor(dim=[4, m, 64], stride=[m * 64, 64, 1])
        b = graph.tensor(dim=[4, 64, 128], stride=[64 * 128, 128, 1])
        bias = graph.tensor(dim=[1, 1, 128], stride=[128, 128, 1])
        graph.gelu(graph.add(graph.matmul(a, b), bias)).set_output(True)
        return graph

    with plancache.open(kernels_dir) as cache:
        keys = {cache.kernel_cache(graph).key.hash for graph in (mlp(8), mlp(16), gelu(8), gelu(16))}
        assert len(keys) == 2
        assert cache.kernel_cache(mlp(1)).key.hash not in keys  # a size of 1 is another topology
        assert cache.build(gelu(8)).source is Source.BUILT


def test_a_named_kernel_cache_is_loaded_flushed_and_loaded_again(tmp_path, targeted, serializations):
    with plancache.open(tmp_path / "cache") as cache:
        with cache.kernel_cache("decoder") as kernels:
            assert (kernels.revision, kernels.kernels) == (None, ())
            assert cache.build(mlp(8, kernel_cache=kernels.native)).source is Source.BUILT
            mlp(9, 63, kernel_cache=kernels.native).build()  # past plancache: written at the end of the block
            assert kernels.revision == 2
        with cache.kernel_cache("decoder") as again:
            assert len(again.kernels) == 2
            assert not again.moved()
            assert cache.build(mlp(77, 63, kernel_cache=again.native)).source is Source.DISK
        assert cache.kernel_cache("another").kernels == ()
    assert len(serializations) == 2


@pytest.mark.parametrize(
    "poison",
    ["{}", "x", None],
    ids=["an empty document", "no document", "one cut short"],
)
def test_a_document_that_cudnn_does_not_take_is_made_anew_with_one_warning(
    kernels_dir, targeted, monkeypatch, caplog, poison
):
    class Bad(Tracked):
        def __init__(self, document, entries):
            cut = None if document is None else (poison if poison is not None else document[: len(document) // 2])
            super().__init__(cut, entries)

    monkeypatch.setattr("plancache.kernels.Tracked", Bad)
    with plancache.open(kernels_dir) as cache:
        outcome = cache.build(mlp(12))
    assert outcome.source is Source.BUILT
    warned = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warned) == 1
    assert "made anew" in warned[0].getMessage()
    monkeypatch.undo()
    with plancache.target("h200"), plancache.open(kernels_dir) as cache:
        assert cache.build(mlp(13)).source is Source.DISK
        assert sum(is_kernel(listed.row) for listed in cache.rows()) == 2  # the header and the one kernel


def test_a_damaged_kernel_is_passed_over_and_the_others_serve(kernels_dir, targeted, caplog):
    with plancache.open(kernels_dir) as cache:
        victim = next(listed.row for listed in cache.rows() if is_kernel(listed.row) and listed.row.size)
        record = bytearray(cache.store.get(victim.key, victim.route))
        record[-1] ^= 1
        connection = cache.store.database.connection()
        connection.execute(
            "UPDATE plans SET record = ? WHERE key = ? AND route = ?", (bytes(record), victim.key, victim.route)
        )
        sources = sorted(cache.build(mlp(21, n)).source for n in WIDTHS)
    assert sources == ["built", "disk", "disk"]
    assert "checksum is wrong" in caplog.text


def test_a_document_of_an_unknown_schema_is_kept_whole(tmp_path, targeted, monkeypatch, caplog):
    monkeypatch.setattr(kernel_cache, "SCHEMAS", (99,))
    with plancache.open(tmp_path / "cache") as cache:
        assert cache.build(mlp(8)).stored
        assert [listed.row.route for listed in cache.rows() if is_kernel(listed.row)] == ["kernels-whole"]
    assert "unknown schema" in caplog.text
    with plancache.open(tmp_path / "cache") as cache:
        assert cache.build(mlp(9)).source is Source.DISK


def test_where_cudnn_has_no_revision_only_builds_that_took_long_are_looked_at(tmp_path, targeted, monkeypatch):
    monkeypatch.setattr(Tracked, "revision", None)
    monkeypatch.setattr(kernel_cache, "FIRST_REVISION", 10**6)
    written = []
    plain = Tracked.document
    monkeypatch.setattr(Tracked, "document", lambda self: (written.append(1), plain(self))[1])
    with plancache.open(tmp_path / "cache") as cache:
        sources = [cache.build(mlp(m)).source for m in (8, 9, 10, 11)]
        assert sources[0] is Source.BUILT
        assert sources[2:] == [Source.MEMORY] * 2
        count = len(written)
        assert count <= 2
        kernels = [listed for listed in cache.rows() if is_kernel(listed.row) and listed.row.size]
    assert len(kernels) == 1


def test_a_version_of_another_cudnn_is_a_miss(kernels_dir, targeted, monkeypatch):
    from plancache.cudnn import environment

    other = Part({**environment.document(), "cudnn": 92700})
    monkeypatch.setattr(environment, "part", lambda: other)
    with plancache.open(kernels_dir) as cache:
        assert cache.kernel_cache(mlp(8)).kernels == ()


def test_threads_that_build_with_one_kernel_cache_give_the_right_counts(tmp_path, h200):
    outcomes, failures = [], []
    with plancache.open(tmp_path / "cache") as cache:

        def work(number):
            try:
                with plancache.target(h200):
                    for m in range(5):
                        outcomes.append(cache.build(mlp(1 + number * 5 + m)).source)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 7)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (kernels,) = cache._dynamic._shared.values()
        assert kernels.revision == len(kernels.kernels) == 1
    assert failures == []
    assert sorted(outcomes).count(Source.BUILT) == 1
    assert len(outcomes) == 30


def test_a_graph_that_has_no_dynamic_engine_fails_as_it_does_without_a_cache(tmp_path, targeted):
    with pytest.raises(cudnn.cudnnGraphNotSupportedError) as plain:
        graphs.sdpa(is_dynamic_shape_enabled=True)[0].build()
    with plancache.open(tmp_path / "cache") as cache:
        with pytest.raises(cudnn.cudnnGraphNotSupportedError) as cached:
            cache.build(graphs.sdpa(is_dynamic_shape_enabled=True)[0])
        assert list(cache.rows()) == []
    assert str(cached.value)[:60] == str(plain.value)[:60]


def test_modes_that_do_not_write_use_what_is_there(kernels_dir, tmp_path, targeted):
    with plancache.open(kernels_dir, mode="require-hit") as cache:
        assert cache.build(mlp(40)).source is Source.DISK
    with plancache.open(tmp_path / "none", mode="require-hit") as cache, pytest.raises(plancache.PlanCacheError):
        cache.build(mlp(40))
    with plancache.open(kernels_dir, mode="read-only") as cache:
        assert cache.build(mlp(41)).source is Source.DISK


# ---------------------------------------------------------------- documents


def test_a_document_taken_apart_and_joined_is_the_same(document):
    parts = kernel_cache.split(document)
    assert len(parts.kernels) == len({kernel.identity for kernel in parts.kernels}) == 3
    again = kernel_cache.join(parts.header, [kernel.text for kernel in parts.kernels])
    assert json.loads(again) == json.loads(document)
    assert kernel_cache.split(again) == parts


def test_the_joined_document_of_two_serves_the_kernels_of_both(document, targeted):
    parts = kernel_cache.split(document)
    tracked = Tracked(kernel_cache.join(parts.header, [kernel.text for kernel in parts.kernels[:2]]), 2)
    for n in WIDTHS:
        mlp(11, n, kernel_cache=tracked.native).build()
    assert tracked.moved(0.0)
    assert tracked.revision == 3  # one of three had to be compiled


def test_twins_under_other_sizes_are_one_kernel(document):
    fields = json.loads(document)
    twin = json.loads(json.dumps(fields["kernel_cache"][0]))
    for tensor in twin["key"]["operationGraph"]["tensors"]:
        tensor["dim"] = [size if size == 1 else size * 2 for size in tensor["dim"]]
    fields["kernel_cache"].append(twin)
    kernels = kernel_cache.split(json.dumps(fields)).kernels
    assert kernels[0].identity == kernels[-1].identity
    twin["value"][0]["cubin"] = twin["value"][0]["cubin"][:-8] + "AAAAAAA="
    assert kernel_cache.split(json.dumps(fields)).kernels[-1].identity != kernels[0].identity


@pytest.mark.parametrize("text", ["", "{}", "[]", "x", '{"schemaVersion":4}', '{"schemaVersion":4,"kernel_cache":[1]}'])
def test_what_is_no_document_of_a_known_schema_is_not_taken_apart(text):
    assert kernel_cache.split(text) is None


def test_show_lists_the_kernels_of_a_topology_and_what_each_was_compiled_for(kernels_dir):
    with plancache.open(kernels_dir, mode="read-only") as cache:
        rows = [listed.row for listed in cache.rows() if is_kernel(listed.row) and listed.row.size]
    by_key = {row.key: [one for one in rows if one.key == row.key] for row in rows}
    assert sum(map(len, by_key.values())) >= len(WIDTHS)
    for key, kernels in by_key.items():
        result = CliRunner().invoke(cli, ["--dir", str(kernels_dir), "show", key])
        assert result.exit_code == 0, result.output
        assert f"{len(kernels)} kernels" in result.output
        assert "4x32x64" in result.output
        assert max(map(len, result.output.splitlines()[4:])) <= 80


def test_the_bookkeeping_of_a_process_says_what_was_loaded_compiled_and_written(kernels_dir, targeted):
    with plancache.open(kernels_dir) as cache:
        cache.build(mlp(48))
        (state,) = cache.kernel_stats()
        loaded = state["loaded"]
        assert loaded == state["kernels"] == state["written_revision"] > 0
        assert (state["serialized"], state["written"]) == (0, 0)
        cache.build(mlp(48, 66))  # an alignment that is not there
        (state,) = cache.kernel_stats()
        assert state["kernels"] > loaded
        assert (state["serialized"], state["written"]) == (1, 1)
        if state["revision"] is not None:  # cuDNN 9.27 and later
            assert state["revision"] == state["written_revision"] > loaded


def test_a_topology_keeps_a_bounded_number_of_kernels(tmp_path, targeted, document):
    parts = kernel_cache.split(document)
    with plancache.open(tmp_path / "cache") as cache:
        kernels = cache.kernel_cache("many")
        kernels._header = parts.header
        template = parts.kernels[0]
        for number in range(MOST + 5):
            row = Row(
                kernels.key.hash, f"kernels-{number:032x}", "x", kernels.key.subject, "x", "x", "",
                1, 1, "n", 7, float(number), 0.0, 10,
            )  # fmt: skip
            cache.store.put(row, records.encode(row, {"kernel": template.text}))
        assert isinstance(kernels, KernelCache)
        kernels._pending = [parts.kernels[1]]
        assert kernels.flush() == 1
        left = [listed for listed in cache.rows(key=kernels.key.hash) if listed.row.size]
    assert len(left) == MOST
    assert any(listed.row.name == parts.kernels[1].name and listed.row.size > 10 for listed in left)


# ------------------------------------------------------------ faults, and what must not be lost


def kernel_rows(cache):
    return [listed.row for listed in cache.rows() if is_kernel(listed.row) and listed.row.size]


def test_a_database_that_cannot_be_read_costs_a_warning_and_the_graph_is_built(kernels_dir, targeted, caplog):
    database = kernels_dir / FILE
    database.write_bytes(database.read_bytes()[:4096] + os.urandom(60_000))
    with plancache.open(kernels_dir) as cache:
        graph = mlp(77)
        assert cache.build(graph).source is Source.BUILT
        assert graph.get_workspace_size() >= 0
        with cache.kernel_cache("another") as kernels:
            assert kernels.kernels == ()
    assert caplog.records


def test_kernels_that_could_not_be_written_are_written_the_next_time(tmp_path, targeted, monkeypatch):
    with plancache.open(tmp_path / "cache") as cache:
        monkeypatch.setattr(type(cache.store), "put", lambda *_: (_ for _ in ()).throw(StoreError("busy", path=None)))
        cache.build(mlp(8))
        monkeypatch.undo()
        assert kernel_rows(cache) == []
        (kernels,) = cache._dynamic._shared.values()
        assert kernels.moved()
        cache.flush()
        assert len(kernel_rows(cache)) == 1
        assert not kernels.moved()


def test_a_damaged_kernel_is_replaced_by_the_one_that_is_compiled_anew(kernels_dir, targeted):
    connection = sqlite3.connect(kernels_dir / FILE)
    connection.execute("UPDATE plans SET record = substr(record, 1, length(record) - 1) WHERE route LIKE 'kernels-%'")
    connection.commit()
    connection.close()
    sources = []
    for m in (301, 302):
        with plancache.open(kernels_dir) as cache:
            sources.append(cache.build(mlp(m)).source)
            assert cache.verify().bad == []
    assert sources == [Source.BUILT, Source.DISK]


def test_kernels_that_were_loaded_and_written_again_are_no_new_ones(tmp_path, run):
    # After a load cuDNN writes the bound of a ReLU in another way, which must make no difference.
    for n in WIDTHS:
        assert run(BUILD, tmp_path / "cache", json.dumps([[32, n]])) == "built True\n"
    with plancache.open(tmp_path / "cache") as cache:
        assert len(kernel_rows(cache)) == len(WIDTHS)


def test_a_graph_that_cannot_be_built_leaves_the_kernel_cache_as_it_was(kernels_dir, targeted):
    with plancache.open(kernels_dir) as cache, cache.kernel_cache(mlp(8)) as kernels:
        native, count = kernels.native, len(kernels.kernels)
        with pytest.raises(Exception, match=r"(?i)not.supported|engine|invalid"):
            cache.build(mlp(50, kernel_cache=native), plan=(999, {}))
        assert kernels.native is native
        assert len(kernels.kernels) == count
        assert cache.build(mlp(51, kernel_cache=native)).source is Source.DISK


def test_kernels_of_a_layer_are_used(kernels_dir, tmp_path, targeted):
    with plancache.open(kernels_dir, mode="read-only") as cache:
        cache.export_bundle(tmp_path / "kernels.bundle")
    for under in (kernels_dir, tmp_path / "kernels.bundle"):
        with plancache.open(tmp_path / "top", layers=[under]) as cache:
            assert cache.build(mlp(91)).source is Source.DISK
            assert kernel_rows(cache) == []
        shutil.rmtree(tmp_path / "top")
    with plancache.open(tmp_path / "top", layers=[kernels_dir], mode="require-hit") as cache:
        assert cache.build(mlp(92)).source is Source.DISK


def test_a_kernel_cache_of_another_topology_is_an_error_that_says_so(tmp_path, targeted):
    with plancache.open(tmp_path / "cache") as cache, cache.kernel_cache(mlp(8)) as kernels:
        graph = graphs.new(is_dynamic_shape_enabled=True, kernel_cache=kernels.native)
        a = graph.tensor(dim=[1, 8, 64], stride=[512, 64, 1])
        b = graph.tensor(dim=[1, 64, 128], stride=[8192, 128, 1])
        graph.matmul(a, b).set_output(True)
        with pytest.raises(BuilderError, match=r"another topology's; found matmul .*; expected matmul"):
            cache.build(graph)


def test_what_a_held_native_compiled_is_kept_whoever_lets_go_of_what(tmp_path, run):
    source = """
import sys, plancache
from tests.test_kernel_cache import mlp
with plancache.target("h200"):
    cache = plancache.open(sys.argv[1])
    print(cache.build(mlp(8, kernel_cache=cache.kernel_cache("first").native)).source)
    kernels = plancache.open(sys.argv[1]).kernel_cache("second")
    mlp(9, kernel_cache=kernels.native).build()
"""
    assert run(source, tmp_path / "cache") == "built\n"
    with plancache.open(tmp_path / "cache") as cache:
        assert sorted(row.builder for row in kernel_rows(cache)) == ["first", "second"]


def test_switched_off_a_kernel_cache_is_empty_and_nothing_is_made(tmp_path, targeted):
    with plancache.open(tmp_path / "cache", mode="off") as cache:
        for what in ("name", mlp(8)):
            with cache.kernel_cache(what) as kernels:
                mlp(8, kernel_cache=kernels.native).build()
    assert not (tmp_path / "cache").exists()
