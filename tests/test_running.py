"""What plans are run on and judged by: inputs that make sense, outputs that are compared, a child that may be lost."""

import json
import math
import os
import random
import struct
import subprocess
import sys
from array import array
from types import SimpleNamespace

import cudnn
import pytest

import plancache
from plancache import worker
from plancache.cudnn import inputs, numbers, plans, running
from plancache.cudnn.plans import Choice
from plancache.errors import RunError
from plancache.worker import LostError, Worker
from tests import graphs
from tests.conftest import ROOT

FLOATS = ("DOUBLE", "FLOAT", "HALF", "BFLOAT16", "FP8_E4M3", "FP8_E5M2")
INTEGERS = ("INT64", "INT32", "INT8", "UINT8", "BOOLEAN")


def values(data, data_type):
    return numbers._decoded(memoryview(data), data_type, 1)


@pytest.mark.parametrize("data_type", FLOATS)
def test_random_numbers_of_a_type_lie_where_they_should_and_are_the_same_for_a_seed(data_type):
    block = numbers.block(data_type, 1, -1.0, 1.0)
    assert len(block) == numbers.span(data_type, numbers.BLOCK)
    found = values(block, data_type)
    assert -1.0 <= min(found) < -0.9
    assert 0.9 < max(found) <= 1.0
    assert min(values(numbers.block(data_type, 1, 0.25, 1.0), data_type)) >= 0.25
    assert block == numbers.block(data_type, 1, -1.0, 1.0) != numbers.block(data_type, 2, -1.0, 1.0)


@pytest.mark.parametrize("data_type", INTEGERS)
def test_random_whole_numbers_are_small(data_type):
    found = set(values(numbers.block(data_type, 1, -1.0, 1.0), data_type))
    assert found <= set(range(-3, 4))
    assert len(found) > 1


def test_every_code_of_the_eight_bit_floats_has_its_value():
    e4m3, e5m2 = numbers._table("FP8_E4M3"), numbers._table("FP8_E5M2")
    assert (e4m3[0x7E], e4m3[0x38], e4m3[0x01], e4m3[0xB8]) == (448.0, 1.0, 2.0**-9, -1.0)
    assert math.isnan(e4m3[0x7F])
    assert (e5m2[0x7B], e5m2[0x3C], e5m2[0x01], e5m2[0x7C]) == (57344.0, 1.0, 2.0**-16, math.inf)
    assert [numbers._table("FP4_E2M1")[code] for code in range(8)] == [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def test_two_results_that_differ_by_rounding_are_the_same_and_others_are_not():
    rng = random.Random(1)
    exact = [rng.gauss(0, 3) for _ in range(5000)]
    half = struct.pack("<5000e", *exact)
    rounded = struct.pack("<5000e", *(value * (1 + rng.choice((-1, 1)) * 2**-11) for value in exact))
    found = numbers.difference([(half, rounded)], len(half), "HALF")
    assert (found.exact, found.right) == (False, True)
    tanh = struct.pack("<5000e", *map(math.tanh, exact))
    relu = struct.pack("<5000e", *(max(0.0, value) for value in exact))
    assert not numbers.difference([(relu, tanh)], len(half), "HALF").right
    assert numbers.difference([(half, half)], len(half), "HALF").exact


def test_results_of_nothing_but_zeros_and_nan_are_empty():
    nan, one = struct.pack("<e", math.nan), struct.pack("<e", 1.0)
    for data, expected in (
        (bytes(9000), True),
        (nan * 4500, True),
        (bytes(8998) + nan, True),
        (bytes(8998) + one, False),
    ):
        assert numbers.is_empty(data, "HALF") is expected
    assert numbers.is_empty(struct.pack("<2f", -0.0, 0.0), "FLOAT")
    assert not numbers.is_empty(bytes(8) + b"\x10", "FP4_E2M1")


def test_one_number_among_many_nan_is_found_wherever_it_lies():
    nan, one = struct.pack("<e", math.nan), struct.pack("<e", 1.0)
    for place in (0, 2047, 2048, 3 * 2048, 5 * 2048 - 1):
        data = nan * place + one + nan * (5 * 2048 - place - 1)
        assert not numbers.is_empty(data, "HALF")
    assert numbers.is_empty(nan * 2048 * 2 + bytes(4096) + nan * 2048, "HALF")


@pytest.mark.parametrize("data_type", [*FLOATS, "FP4_E2M1", "INT32", "INT8"])
def test_the_negative_part_of_random_inputs_and_the_positive_one_alone_are_not_empty(data_type):
    found = values(numbers.block(data_type, 1, -1.0, 1.0), data_type)[:64]  # as relu of a small tensor
    assert max(found) > 0 > min(found)


def test_of_two_values_in_a_byte_both_are_compared():
    assert values(b"\x21", "FP4_E2M1") == [0.5, 1.0]
    low, high = bytes([0x77]) * 64, bytes([0xF7]) * 64  # 6 and 6; 6 and -6
    assert not numbers.difference([(low, high)], 64, "FP4_E2M1").right


def test_a_wrong_part_of_a_large_output_is_found_in_whatever_chunk_it_lies():
    good = array("f", [1.0]) * (1 << 20)
    bad = array("f", good)
    bad[700_000:720_000] = array("f", [0.0]) * 20_000
    one, two = good.tobytes(), bad.tobytes()
    chunks = [(one[at : at + 65536], two[at : at + 65536]) for at in range(0, len(one), 65536)]
    assert not numbers.difference(chunks, len(one), "FLOAT").right


def test_columns_that_are_wrong_in_every_row_are_found_though_few_elements_are_looked_at(monkeypatch):
    monkeypatch.setattr(numbers, "SAMPLE", 1 << 12)  # 8 of each piece, as of an output of 128 MB
    rows, row, rng = 128, 8192, random.Random(1)
    code = array("H", struct.pack(f"<{row}e", *(rng.uniform(1, 2) for _ in range(row))))
    noisy = array("H", (one ^ 1 for one in code))  # another last bit everywhere
    for first in range(0, row, 1000):
        wrong = array("H", noisy)
        wrong[first : first + 128] = array("H", struct.pack("<128e", *[9.0] * 128))
        found = numbers.difference([(code.tobytes(), wrong.tobytes())] * rows, 2 * row * rows, "HALF")
        assert not found.right, first
    assert numbers.difference([(code.tobytes(), noisy.tobytes())] * rows, 2 * row * rows, "HALF").right


def test_how_far_off_is_told_by_the_size_of_all_values_and_not_by_the_few_that_differ():
    large, small = array("f", [1000.0]) * 100_000, array("f", [0.01]) * 1024
    one, two = (large + small).tobytes(), (large + array("f", [0.0101]) * 1024).tobytes()
    assert numbers.difference([(one, two)], len(one), "FLOAT").right  # what is left over where large ones cancel out
    assert not numbers.difference([(one[400_000:], two[400_000:])], 4096, "FLOAT").right


@pytest.mark.parametrize(("expected", "found"), [(1.0, math.nan), (1.0, math.inf), (math.inf, 1.0), (math.nan, 1.0)])
def test_what_is_no_number_on_one_side_only_is_wrong(expected, found):
    one, two = array("f", [2.0, expected]).tobytes(), array("f", [2.0, found]).tobytes()
    assert not numbers.difference([(one, two)], len(one), "FLOAT").right


def test_whole_numbers_are_the_same_or_wrong_but_for_what_is_rounded_to_eight_bits():
    def right(data_type, one, two):
        chunks = [(numbers.whole(data_type, [one, 5]), numbers.whole(data_type, [two, 5]))]
        return numbers.difference(chunks, 2, data_type).right

    assert right("INT8", 3, 4)
    assert not right("INT8", 3, 5)
    assert not right("INT32", 3, 4)
    assert not right("BOOLEAN", 0, 1)


def test_a_type_that_is_not_known_is_refused_by_name():
    with pytest.raises(RunError, match="INT8x32"):
        numbers.span("INT8x32", 1)


def test_the_operands_of_a_built_graph_are_its_inputs_filled_and_its_outputs(built):
    graph, (a, b, c) = built["matmul"]
    found = {one.uid: one for one in inputs.operands(graph)}
    assert set(found) == {a.uid, b.uid, c.uid}
    assert [found[one.uid].output for one in (a, b, c)] == [False, False, True]
    assert found[a.uid].size == 64 * 64 * 2
    assert found[a.uid].content != found[b.uid].content
    assert found[c.uid].content == b""


def test_attention_gets_full_lengths_offsets_by_the_strides_and_a_fixed_seed(targeted):
    graph = graphs.new()
    dim, stride = [2, 8, 512, 128], [8 * 512 * 128, 128, 8 * 128, 1]

    def whole(shape, data_type):
        return graph.tensor(dim=shape, stride=[shape[0] and 1, 1, 1, 1], data_type=data_type)

    q, k, v = (graph.tensor(dim=dim, stride=stride) for _ in range(3))
    lengths = [whole([2, 1, 1, 1], cudnn.data_type.INT32) for _ in range(2)]
    offsets = whole([3, 1, 1, 1], cudnn.data_type.INT32)
    for one in (q, k, v):
        one.set_ragged_offset(offsets)
    o, _ = graph.sdpa(
        q, k, v, attn_scale=0.1, use_padding_mask=True, seq_len_q=lengths[0], seq_len_kv=lengths[1], is_inference=True
    )
    o.set_output(True).set_dim(dim).set_stride(stride).set_ragged_offset(offsets)
    plans.run_build(graph, Choice())
    found = {one.uid: one for one in inputs.operands(graph)}
    assert {values(found[one.uid].content, "INT32")[0] for one in lengths} == {512.0}
    assert values(found[offsets.uid].content, "INT32") == [0.0, 512 * 1024.0, 2 * 512 * 1024.0]
    assert found[o.uid].output
    assert found[o.uid].size >= 2 * 8 * 512 * 128 * 2


def test_numbers_that_are_given_by_value_and_scales_are_above_zero(targeted):
    graph = graphs.new()
    x = graph.tensor(dim=[64, 256, 1, 1], stride=[256, 1, 256, 256])
    scale = graph.tensor(dim=[1, 256, 1, 1], stride=[256, 1, 256, 256])
    epsilon = graph.tensor(
        dim=[1, 1, 1, 1], stride=[1, 1, 1, 1], is_pass_by_value=True, data_type=cudnn.data_type.FLOAT
    )
    y, _ = graph.rmsnorm(norm_forward_phase=cudnn.norm_forward_phase.INFERENCE, input=x, scale=scale, epsilon=epsilon)
    y.set_output(True)
    plans.run_build(graph, Choice())
    found = {one.uid: one for one in inputs.operands(graph)}
    assert found[epsilon.uid].by_value
    assert struct.unpack("<f", found[epsilon.uid].content) == (0.125,)
    assert min(values(found[scale.uid].content, "HALF")) > 0


@pytest.mark.parametrize("function", ["log", "sqrt", "rsqrt", "reciprocal", "relu"])
def test_what_a_function_is_not_defined_for_is_no_input_of_it(targeted, function):
    # Half of its values would be NaN, and behind a sum all of them, by which nothing can be judged.
    graph = graphs.new()
    x = graph.tensor(dim=[1, 64, 64], stride=[4096, 64, 1])
    y = getattr(graph, function)(x)
    y.set_output(True)
    plans.run_build(graph, Choice())
    (content,) = (one.content for one in inputs.operands(graph) if not one.output)
    assert (min(values(content, "HALF")) > 0) == (function != "relu")


@pytest.mark.parametrize(
    ("status", "fault"), [(1, False), (2, False), (801, False), (901, False), (700, True), (716, True)]
)
def test_only_an_error_that_stays_is_a_fault_of_the_device(status, fault):
    runner = object.__new__(running.Runner)
    with pytest.raises(RunError) as caught:
        runner._ask((status,), "cuGraphInstantiate")
    assert caught.value.fault is fault


def test_a_capture_that_failed_leaves_no_graph_behind():
    gone = []
    runner = object.__new__(running.Runner)
    runner._stream = 0
    runner._driver = SimpleNamespace(
        CUstreamCaptureMode=SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED=2),
        cuStreamBeginCapture=lambda *_: (0,),
        cuStreamEndCapture=lambda _: (0, "captured"),
        cuGraphDestroy=gone.append,
    )

    def launch():
        raise RunError("a plan could not be launched")

    with pytest.raises(RunError, match="launched"):
        runner._captured(launch, 3)
    assert gone == ["captured"]


@pytest.fixture
def child(monkeypatch, tmp_path):
    """A worker whose child runs this Python source, for what only a sick device would bring about."""
    workers = []

    def make(source, timeout):
        ready = "import json, os, sys, time; sys.stdin.readline(); print(json.dumps({'event': 'ready'}), flush=True)\n"
        monkeypatch.setattr(worker, "COMMAND", [sys.executable, "-c", ready + source])
        workers.append(Worker(plancache.open(tmp_path / "cache"), timeout))
        return workers[-1]

    yield make
    for one in workers:
        one.end()


def test_a_child_that_hangs_is_ended_and_the_next_job_gets_a_new_one(child):
    serve = "for line in sys.stdin:\n    job = json.loads(line)\n    time.sleep(60 * job['hang'])\n"
    one = child(serve + "    print(json.dumps({'event': 'done', 'pid': os.getpid()}), flush=True)\n", 1.0)
    (first,) = one.ask({"hang": 0})
    with pytest.raises(LostError) as lost:
        list(one.ask({"hang": 1}))
    assert lost.value.hung
    (second,) = one.ask({"hang": 0})
    assert second["pid"] != first["pid"]
    (third,) = one.ask({"hang": 0})
    assert third["pid"] == second["pid"]


def test_a_child_that_dies_is_told_from_one_that_hangs(child):
    one = child("sys.stdin.readline(); os._exit(7)\n", 30.0)
    with pytest.raises(LostError, match="exit code 7") as lost:
        list(one.ask({}))
    assert not lost.value.hung


def test_a_child_whose_device_is_at_fault_gets_no_other_job_also_if_nobody_listens_to_the_end(child):
    one = child(
        "for line in sys.stdin:\n"
        "    print(json.dumps({'event': 'error', 'text': 'sick', 'fault': True, 'pid': os.getpid()}), flush=True)\n",
        30.0,
    )
    first = next(iter(one.ask({})))  # as one who raises an error of his own
    second = next(iter(one.ask({})))
    assert second["pid"] != first["pid"]


def test_a_child_that_never_gets_ready_is_said_to_have_had_as_long_as_it_had(child, monkeypatch):
    one = child("", 30.0)
    monkeypatch.setattr(worker, "COMMAND", [sys.executable, "-c", "import time; time.sleep(60)"])
    monkeypatch.setattr(worker, "_START", 1.0)
    with pytest.raises(LostError, match="for 1 s"):
        list(one.ask({}))


@pytest.mark.parametrize("mode", ["read-write", "read-only"])
def test_the_child_opens_the_cache_as_its_parent_has_it(tmp_path, mode):
    key = tmp_path / "key"
    key.write_bytes(bytes(range(32)))
    key.chmod(0o600)
    given = {"max_bytes": 20 << 30, "key_file": key, "store": "files", "wait": 7.0, "mode": mode}
    cache = plancache.open(tmp_path / "cache", **given)
    opened = worker._open(json.loads(json.dumps(Worker(cache, 1.0)._setup)))
    # With a smaller bound it would throw plans away.
    assert (opened._layers.options, opened.mode) == (cache._layers.options, mode)
    assert opened._layers._read_only is cache._layers._read_only


_PARENT = """
import subprocess, sys
source = "import ctypes, os; from plancache.worker import _end_with_the_parent as begin; begin(); "
# As a call into cuDNN that never comes back: no other thread of the child runs meanwhile.
source += "print(os.getpid(), flush=True); ctypes.PyDLL(None).sleep(30); print('lived')"
subprocess.run([sys.executable, "-c", source], stdout=sys.stdout)
"""


def test_a_child_that_hangs_ends_with_its_parent_however_that_ends():
    with subprocess.Popen([sys.executable, "-c", _PARENT], stdout=subprocess.PIPE, text=True, cwd=ROOT) as parent:
        pid = int(parent.stdout.readline())
        os.kill(pid, 0)
        parent.kill()
        assert parent.stdout.read() == ""  # until the last one that can write there is gone


def test_a_child_that_cannot_begin_says_why(tmp_path):
    try:
        plancache.device(0)
    except plancache.PlanCacheError:
        pass
    else:
        pytest.skip("there is a GPU here")
    with Worker(plancache.open(tmp_path / "cache"), 60.0) as one, pytest.raises(RunError, match="no CUDA device"):
        list(one.ask({"job": "check"}))


def test_files_beside_a_script_do_not_break_the_child_and_it_finds_what_only_the_script_found(tmp_path):
    (tmp_path / "json.py").write_text("raise SystemExit('no json of mine')")
    script = (
        f"import sys; sys.path[:0] = [{str(ROOT)!r}]\n"
        "import plancache\nfrom plancache.errors import RunError\nfrom plancache.worker import Worker\n"
        f"with Worker(plancache.open({str(tmp_path / 'cache')!r}), 60.0) as one:\n"
        "    try: print(list(one.ask({'job': 'nothing'})))\n"
        "    except RunError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], capture_output=True, text=True, cwd=tmp_path, env=_plain(), check=False
    )
    assert "no CUDA device" in done.stdout or "KeyError" in done.stdout, done.stdout + done.stderr


def _plain():
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
