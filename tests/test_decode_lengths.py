"""Four processes that start together, then a fifth: 200 lengths, and each kernel compiled once in all."""

import json
import subprocess
import sys

import plancache
from plancache.kernels import is_kernel
from tests.conftest import ROOT

WORK = """
import json, sys, time, collections
import plancache
from examples import decode_lengths
builder = decode_lengths.up_projection
cache = plancache.open(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
outcomes = collections.Counter()
with plancache.target("h200"), cache:
    for case in builder.cases:
        graph, _ = builder.function(None, *case)
        outcome = cache.build(graph)
        outcomes[outcome.source] += 1
        outcomes["written"] += outcome.stored
print(json.dumps(outcomes))
"""


def start(directory):
    command = [sys.executable, "-W", "error", "-c", WORK, str(directory)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout.readline() == "ready\n"
    return process


def finish(processes):
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    return [json.loads(process.communicate(timeout=240)[0]) for process in processes]


def test_four_processes_and_a_fifth_compile_each_kernel_once(tmp_path):
    four = finish([start(tmp_path) for _ in range(4)])
    assert sum(outcomes.get("built", 0) for outcomes in four) == 1
    assert all(sum(outcomes.values()) - outcomes["written"] == 200 for outcomes in four)
    with plancache.open(tmp_path) as cache:
        rows = [(listed.row, listed.stored) for listed in cache.rows()]
    assert sum(is_kernel(row) and row.size > 0 for row, _ in rows) == 1
    (fifth,) = finish([start(tmp_path)])
    assert fifth == {"disk": 200, "written": 0}
    with plancache.open(tmp_path) as cache:
        assert [(listed.row, listed.stored) for listed in cache.rows()] == rows
