"""A miss explains itself: the nearest entry, and exactly the fields that differ."""

import csv
import json
import logging

import cudnn
import pytest
from click.testing import CliRunner

import plancache
from plancache.cli import cli
from plancache.errors import PlanCacheError
from plancache.outcome import Reason, Source
from tests import graphs


def told(explanation):
    return [str(one) for one in explanation.differences]


@pytest.fixture
def cache(warm):
    with plancache.open(warm) as cache:
        yield cache


def test_a_hit_is_explained_as_one(cache, targeted):
    explanation = cache.explain(graphs.matmul()[0])
    assert (explanation.reason, explanation.differences) == (Reason.FOUND, ())
    assert str(explanation) == f"{cache.key(graphs.matmul()[0])}: found"


def test_another_stride_is_named_with_its_tensor_and_both_values(cache, targeted):
    graph, (a, _, _) = graphs.matmul()
    a.set_stride([4096, 1, 64])
    explanation = cache.explain(graph)
    assert explanation.reason is Reason.ABSENT
    assert explanation.nearest == str(cache.key(graphs.matmul()[0]))
    assert told(explanation) == ["tensor a: stride [4096, 1, 64], cached [4096, 64, 1]"]
    assert "nearest entry is" in str(explanation)


def test_another_size_is_told_of_the_same_kind_of_graph_and_not_of_another(cache, targeted):
    explanation = cache.explain(graphs.matmul(m=32)[0])
    assert told(explanation) == [
        "tensor a: dim [1, 32, 64], cached [1, 64, 64]",
        "tensor a: stride [2048, 64, 1], cached [4096, 64, 1]",
    ]


def test_a_parameter_is_named_with_its_node(cache, targeted):
    graph = graphs.new()
    dim, stride = [2, 8, 512, 128], [8 * 512 * 128, 512 * 128, 128, 1]
    q, k, v = (graph.tensor(dim=dim, stride=stride, name=name) for name in "qkv")
    o, _ = graph.sdpa(q, k, v, attn_scale=0.2, use_causal_mask=True, is_inference=True)
    o.set_output(True)
    assert told(cache.explain(graph)) == ["node 0 (sdpa): attn_scale 0.2, cached 0.1"]


def test_an_argument_and_a_heuristic_are_named(cache, targeted):
    graph, _ = graphs.matmul(is_override_shape_enabled=True)
    assert told(cache.explain(graph)) == ["is_override_shape_enabled True, cached not set"]
    modes = cudnn.heur_mode
    assert told(cache.explain(graphs.matmul()[0], [modes.B])) == ["heuristics [B], cached [A, FALLBACK]"]


def test_another_device_and_another_environment_are_named(cache, h200, monkeypatch):
    text = h200.to_json().replace('"multiProcessorCount":132', '"multiProcessorCount":114')
    with plancache.target(plancache.device(text)):
        assert told(cache.explain(graphs.matmul()[0])) == ["multiProcessorCount 114, cached 132"]
    monkeypatch.setenv("CUDNN_FRONTEND_ENABLE_FROST_ENGINES", "1")
    with plancache.target(h200):
        explanation = cache.explain(graphs.matmul()[0])
    assert [one.part for one in explanation.differences] == ["environment"]


def test_another_operation_is_named(cache, targeted):
    graph = graphs.new()
    a = graph.tensor(dim=[1, 64, 64], stride=[4096, 64, 1], name="a")
    b = graph.tensor(dim=[1, 64, 128], stride=[64 * 128, 128, 1], name="b")
    graph.gelu(graph.matmul(a, b)).set_output(True)
    assert told(cache.explain(graph)) == ["node 1 (gelu): mode gelu, cached relu"]


def test_an_empty_cache_and_a_bypass_say_so(tmp_path, targeted):
    with plancache.open(tmp_path / "empty") as cache:
        assert str(cache.explain(graphs.matmul()[0])).endswith("no entry; nothing comparable is stored")
        graph, _ = graphs.matmul()
        graph.validate()
        assert cache.explain(graph).reason is Reason.VALIDATED


def test_outcomes_are_counted_by_source_and_reason(cache, targeted):
    cache.build(graphs.matmul()[0])
    cache.build(graphs.matmul()[0])
    cache.lookup(graphs.matmul(m=16)[0])
    assert cache.stats() == {(Source.DISK, Reason.FOUND): 2, (Source.MISS, Reason.ABSENT): 1}


def test_builds_and_the_first_miss_of_a_reason_are_logged(tmp_path, targeted, caplog):
    caplog.set_level(logging.INFO, logger="plancache")
    with plancache.open(tmp_path / "cache") as cache:
        for m in (16, 24):
            cache.build(graphs.matmul(m=m)[0])
    said = [record.getMessage() for record in caplog.records if record.name == "plancache"]
    assert [text.split(" ")[0] for text in said] == ["first", "building", "built", "building", "built"]
    assert all(record.levelno == logging.INFO for record in caplog.records if record.name == "plancache")


def test_the_last_misses_of_a_process_can_be_explained(cache, targeted):
    cache.build(graphs.matmul(m=40)[0])
    (miss,) = cache.misses
    assert miss.reason is Reason.ABSENT
    assert cache.explain_key(miss.key, miss.route, miss.labels).reason is Reason.FOUND  # it was built since


@pytest.fixture
def misses(warm, run, tmp_path):
    """A list of misses that another process wrote in read-only mode: one of another size, twice."""
    source = """
import sys, plancache
from tests import graphs
with plancache.target("h200"), plancache.open(sys.argv[1], mode="read-only") as cache:
    for _ in range(2): print(cache.build(graphs.matmul(m=32)[0]).key)
"""
    file = tmp_path / "misses.jsonl"
    key = run(source, warm, PLANCACHE_MISSES=str(file)).split()[0]
    return file, key


def invoke(*arguments, code=0):
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments])
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


def test_the_command_explains_what_a_job_missed(warm, misses, monkeypatch):
    file, key = misses
    output = invoke("--dir", warm, "explain", file)
    assert output.count("nearest entry is") == 1  # each key once
    assert "tensor a" in output
    assert "[1, 32, 64]" in output
    assert max(map(len, output.splitlines()[1:])) <= 80
    (explanation,) = [json.loads(line) for line in invoke("--dir", warm, "explain", file, "--json").splitlines()]
    assert (explanation["key"], explanation["reason"]) == (key, "ABSENT")
    assert [one["field"] for one in explanation["differences"]] == ["dim", "stride"]
    monkeypatch.setenv("PLANCACHE_MISSES", str(file))
    lines = list(csv.DictReader(invoke("--dir", warm, "explain", file, "--csv").splitlines()))
    assert [(line["key"], line["field"]) for line in lines] == [
        (explanation["key"], difference["field"]) for difference in explanation["differences"]
    ]
    assert invoke("--dir", warm, "explain") == output
    assert invoke("--dir", warm, "explain", key[:8]) == output


def test_the_nearest_entry_is_told_of_layers_too(warm, misses, tmp_path, targeted, monkeypatch):
    file, _ = misses
    with plancache.open(tmp_path / "top", layers=[warm]) as cache:
        cache.build(graphs.unary()[0])
        assert told(cache.explain(graphs.matmul(m=32)[0])) == [
            "tensor a: dim [1, 32, 64], cached [1, 64, 64]",
            "tensor a: stride [2048, 64, 1], cached [4096, 64, 1]",
        ]
    expected = invoke("--dir", warm, "explain", file)
    monkeypatch.setenv("PLANCACHE_LAYERS", str(warm))
    assert invoke("--dir", tmp_path / "top", "explain", file) == expected
    assert invoke("--dir", tmp_path / "nowhere", "explain", file) == expected


def test_the_command_explains_what_a_job_missed_and_then_stored(warm, misses):
    file, key = misses
    with plancache.target("h200"), plancache.open(warm) as cache:
        assert str(cache.build(graphs.matmul(m=32)[0]).key) == key
    output = invoke("--dir", warm, "explain", file)
    assert output.startswith(f"{key}: no entry (stored since); the nearest entry is ")
    assert "[1, 64, 64]" in output


def test_the_command_explains_a_graph_document_and_a_stored_key(warm, tmp_path, targeted, cache):
    file = tmp_path / "graph.json"
    graph, _ = graphs.matmul(m=32)
    file.write_text(json.dumps(cache.key(graph).documents["graph"]))
    output = invoke("--dir", warm, "explain", file, "--device", "h200")
    assert "tensor 1" in output
    assert "[1, 64, 64]" in output
    stored = str(cache.key(graphs.matmul()[0]))
    assert "found; the nearest entry is" in invoke("--dir", warm, "explain", stored)


def test_the_command_says_what_it_wants(warm, tmp_path):
    assert "say what to explain" in invoke("--dir", warm, "explain", code=2)
    assert "nothing to explain" in invoke("--dir", warm, "explain", "ffffffffffff0", code=1)
    (tmp_path / "nonsense").write_text("{}\n")
    result = CliRunner().invoke(cli, ["--dir", str(warm), "explain", str(tmp_path / "nonsense")])
    assert "holds nothing to explain" in str(result.exception)


def test_a_list_of_misses_that_cannot_be_written_costs_one_warning(warm, targeted, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("PLANCACHE_MISSES", str(tmp_path / "no" / "such" / "file"))
    with plancache.open(warm, mode="read-only") as cache:
        for m in (16, 24):
            assert cache.build(graphs.matmul(m=m)[0]).source is Source.BUILT
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1


def test_the_command_shows_names_of_tensors_as_they_are(warm, misses):
    file, _ = misses
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        line["labels"] = dict.fromkeys(line["labels"], "[/red] [bold]\x1b[31m")
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    output = invoke("--dir", warm, "explain", file)
    assert "[/red] [bold]�[31m" in output
    assert "\x1b" not in output


@pytest.mark.parametrize(
    "document",
    [
        {"arguments": 1, "tensors": 2, "nodes": 3},
        {"arguments": {}, "tensors": [], "nodes": [3]},
        {"arguments": {}, "tensors": [{"uid": 1}], "nodes": []},
    ],
)
def test_a_graph_document_that_is_none_is_an_error_that_says_so(warm, tmp_path, document):
    file = tmp_path / "graph.json"
    file.write_text(json.dumps(document))
    result = CliRunner().invoke(cli, ["--dir", str(warm), "explain", str(file), "--device", "h200"])
    assert isinstance(result.exception, PlanCacheError)
    assert "a graph document cannot be read" in str(result.exception)


def test_damaged_lines_of_a_list_cost_no_others(warm, misses):
    file, key = misses
    whole = file.read_bytes()
    file.write_bytes(b"\xff\xfe\n[]\n1\n" + b"[" * 100_000 + b'\n{"documents": 1}\n\0\0\n' + whole + whole[:500])
    (explanation,) = [json.loads(line) for line in invoke("--dir", warm, "explain", file, "--json").splitlines()]
    assert explanation["key"] == key
