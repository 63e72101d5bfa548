"""Keys do not move: from process to process, with what differs between ranks, or with the frontend's bookkeeping."""

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import cudnn
import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

import plancache
from plancache.cudnn import environment, libraries, rebuild
from plancache.cudnn import graph as documents
from plancache.errors import LibraryError
from plancache.keys import digest, pack
from plancache.outcome import Reason, Source
from tests import graphs
from tests.conftest import ROOT

KEY = """
import random, sys
sys.path.insert(0, sys.argv[1])
import plancache
from tests import graphs
number = int(sys.argv[2])
def shuffled():
    '''SDPA with its keyword arguments in another order each time.'''
    graph = graphs.new(name=f"rank {number}")
    dim, stride = [2, 8, 512, 128], [8 * 512 * 128, 512 * 128, 128, 1]
    q, k, v = (graph.tensor(dim=dim, stride=stride, name=f"{name}{number}") for name in "qkv")
    given = list(dict(q=q, k=k, v=v, attn_scale=0.1, use_causal_mask=True, is_inference=True).items())
    random.Random(number).shuffle(given)
    o, _ = graph.sdpa(**dict(given))
    o.set_output(True)
    return graph
with plancache.target("h200"), plancache.open(sys.argv[3]) as cache:
    print(cache.key(graphs.matmul()[0]).hash, cache.key(graphs.conv()[0]).hash, cache.key(shuffled()).hash)
    print(cache.build(shuffled()).source)
"""


def test_fifty_processes_that_differ_in_everything_else_have_the_same_keys(warm, tmp_path):
    moved = tmp_path / "moved" / "elsewhere"
    shutil.copytree(warm, moved)

    def start(number):
        directory = tmp_path / f"rank{number}"
        directory.mkdir()
        different = {
            "PYTHONHASHSEED": str(number * 7919),
            "HOSTNAME": f"node{number}",
            **dict.fromkeys(("RANK", "LOCAL_RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"), str(number)),
            "TZ": f"UTC{number % 12 - 6:+d}",
            "LC_ALL": ("C", "C.UTF-8")[number % 2],
        }
        command = [sys.executable, "-c", KEY, ROOT, str(number), (warm, moved)[number % 2]]
        environment = {**os.environ, **different}
        return subprocess.Popen(command, cwd=directory, env=environment, stdout=subprocess.PIPE, text=True)

    answers = set()
    for first in range(0, 50, 4):
        running = [start(number) for number in range(first, min(50, first + 4))]
        answers |= {process.communicate(timeout=120)[0] for process in running}
    assert len(answers) == 1
    keys, source = answers.pop().splitlines()
    assert len(set(keys.split())) == 3
    assert source == "disk"


def test_a_fact_that_cannot_be_read_is_never_stored_and_never_matches(warm, targeted, monkeypatch):
    def unknown():
        raise LibraryError("a version cannot be read")

    for module, part in ((environment, "_sublibraries"), (libraries, "cuda_major")):
        with monkeypatch.context() as patch, plancache.open(warm) as cache:
            patch.setattr(module, part, unknown)
            before = len(list(cache.rows()))
            outcome = cache.build(graphs.matmul()[0])
            assert (outcome.source, outcome.reason) == (Source.BYPASSED, Reason.UNKNOWN_ENVIRONMENT)
            assert not cache.contains(graphs.matmul()[0])
            assert len(list(cache.rows())) == before


def test_another_version_or_flavour_of_any_library_is_another_environment(monkeypatch, targeted, tmp_path):
    plain = environment.document()
    seen = [digest(plain)]
    for module, part, value in (
        (environment, "_sublibraries", (("runtime_compiled",), True)),
        (environment, "_sublibraries", (tuple(plain["engines"]), not plain["heuristics"])),
        (libraries, "cuda_major", 99),
        (environment, "_engine_packages", {"nvidia_cutlass_dsl": "0.0.1", "apache_tvm_ffi": None}),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, part, lambda value=value: value)
            seen.append(digest(environment.document()))
    with monkeypatch.context() as patch:
        patch.setattr(environment.libraries, "backend_version", lambda: plain["cudnn"] + 1)
        seen.append(digest(environment.document()))
    assert len(set(seen)) == len(seen)


def test_packages_are_listed_anew_where_the_import_system_has_an_old_listing(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "known_by_now.py").touch()
    importlib.import_module("known_by_now")
    finder = sys.path_importer_cache[str(tmp_path)]
    assert environment._names(str(tmp_path)) is finder._path_cache  # as it is named by importlib

    (tmp_path / "nvidia_cutlass_dsl-99.1.dist-info").mkdir()
    os.utime(tmp_path, (1, 1))  # a later mark, however coarse the clock of this file system is
    assert environment._engine_packages.__wrapped__()["nvidia_cutlass_dsl"] == "99.1"


def test_every_listing_that_is_taken_over_is_what_the_directory_holds():
    for entry in filter(os.path.isdir, sys.path):
        assert set(environment._names(entry)) == {found.name for found in Path(entry).iterdir()}


# ---------------------------------------------------------------- random graphs

SIZES = st.sampled_from([1, 2, 3, 8, 16])
TYPES = st.sampled_from([cudnn.data_type.HALF, cudnn.data_type.BFLOAT16, cudnn.data_type.FLOAT])
UNARY = st.tuples(st.sampled_from(["relu", "gelu", "exp", "neg", "sigmoid"]), TYPES)
LEAKY = st.tuples(st.just("leaky_relu"), st.floats(allow_nan=False))
MATMUL = st.tuples(st.just("matmul"), SIZES, st.booleans(), TYPES)
BINARY = st.tuples(st.sampled_from(["add", "mul", "sub", "max"]), st.booleans())
SCALAR = st.tuples(st.just("scalar"), st.one_of(st.integers(-(2**40), 2**40), st.floats(allow_nan=False)))
# A graph as plain data: what is drawn here and differs must be another key.
SPECS = st.tuples(
    st.tuples(SIZES, SIZES, SIZES, TYPES, TYPES, st.booleans()),
    st.lists(st.one_of(UNARY, LEAKY, MATMUL, BINARY, SCALAR), min_size=1, max_size=8),
)


def declared(spec):
    (batch, rows, columns, io, compute, transposed), operations = spec
    graph = plancache.pygraph(io_data_type=io, intermediate_data_type=cudnn.data_type.FLOAT, compute_data_type=compute)
    stride = [rows * columns, 1, rows] if transposed else [rows * columns, columns, 1]
    x = graph.tensor(dim=[batch, rows, columns], stride=stride)
    for name, *details in operations:
        if name == "matmul":
            width, is_output, data_type = details
            y = graph.tensor(dim=[batch, columns, width], stride=[columns * width, width, 1], data_type=data_type)
            x, columns = graph.matmul(x, y), width
            x.set_output(is_output)
        elif name == "leaky_relu":
            x = graph.leaky_relu(x, details[0])
        elif name == "scalar":
            x = graph.mul(x, graph.tensor_scalar(details[0], cudnn.scalar_type.RUNTIME_PARAM))
        elif name in ("add", "mul", "sub", "max"):
            other = graph.tensor(dim=[1, 1, columns], stride=[columns, columns, 1])
            method = getattr(graph, name)
            x = method(other, x) if details[0] else method(x, other)
        else:
            x = getattr(graph, name)(x)
            x.set_data_type(details[0])
    return graph


def exact(spec):
    """The spec with floats that compare equal but are not the same (0.0 and -0.0, 1 and 1.0) told apart."""
    return repr(spec)


RELAXED = settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@RELAXED
@given(SPECS)
def test_a_graph_declared_twice_has_one_document_and_it_survives_the_way_back(h200, spec):
    first, second = (documents.document(declared(spec), h200) for _ in range(2))
    assert pack(first) == pack(second)
    assert pack(documents.document(rebuild.graph(first, device=h200), h200)) == pack(first)


@RELAXED
@given(st.lists(SPECS, min_size=2, max_size=12))
def test_graphs_that_differ_have_keys_that_differ(h200, specs):
    distinct = {exact(spec): spec for spec in specs}
    hashes = {digest(documents.document(declared(spec), h200)) for spec in distinct.values()}
    assert len(hashes) == len(distinct)


@RELAXED
@given(SPECS, SPECS)
def test_one_changed_operation_is_another_key(h200, spec, other):
    head, operations = spec
    changed = (head, [*operations[:-1], other[1][0]])
    same = exact(changed) == exact(spec)
    keys = [digest(documents.document(declared(one), h200)) for one in (spec, changed)]
    assert (keys[0] == keys[1]) == same


def test_a_document_of_an_example_builds_to_the_same_plan(h200, built):
    graph, _ = graphs.matmul(device_property=h200.native, sm_version=900)
    document = documents.document(graph, h200)
    again = rebuild.graph(document, device=h200)
    again.build()
    assert again.get_plan_name_at_index(0) == built["matmul"][0].get_plan_name_at_index(0)


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.pop("nodes"),
        lambda d: d["nodes"][0].update(type="NO_SUCH_OPERATION"),
        lambda d: d["tensors"][0].update(data_type={"enum": "data_type.NO_SUCH_TYPE"}),
        lambda d: d["tensors"][0].update(no_such_field=1),
        lambda d: d["nodes"][0]["inputs"].update(A=99),
        lambda d: d["arguments"].update(io_data_type={"unknown": 1}),
    ],
    ids=["no nodes", "unknown operation", "unknown type", "unknown field", "unknown tensor", "unknown encoding"],
)
def test_a_document_that_this_frontend_cannot_have_written_is_refused(h200, change):
    graph, _ = graphs.matmul(device_property=h200.native, sm_version=900)
    document = documents.document(graph, h200)
    change(document)
    with pytest.raises(rebuild.DocumentError, match="cannot be turned into a graph"):
        rebuild.graph(document, device=h200)
