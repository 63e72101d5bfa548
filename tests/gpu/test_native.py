"""On a GPU: a plan that was loaded computes what the built one computed, as fast, by its own route."""

import pytest

from plancache.cudnn import libraries

NAMES = ("matmul", "conv", "sdpa")
# Kernels that take 2 us differ by more than 5 % between two runs of one plan, and more between two processes.
NOISE_US, APART_US = 0.3, 0.5


@pytest.mark.parametrize("name", NAMES)
def test_a_loaded_plan_is_right_bit_equal_and_as_fast_as_the_built_one(on_gpu, tmp_path, name):
    built, seconds = on_gpu(f"run({name!r}, {str(tmp_path)!r})")
    loaded, milliseconds = on_gpu(f"run({name!r}, {str(tmp_path)!r})")
    print(name, built, seconds, loaded, milliseconds, sep=" | ")
    assert built.startswith("built native")
    assert loaded.startswith("disk native")
    assert built.split()[2:4] == loaded.split()[2:4]  # the plan's name, and every bit of the output


@pytest.mark.parametrize("name", NAMES)
def test_a_served_graph_runs_on_its_own_handle_where_none_is_given(on_gpu, tmp_path, name):
    on_gpu(f"run({name!r}, {str(tmp_path)!r}, pass_handle=False)")
    assert on_gpu(f"run({name!r}, {str(tmp_path)!r}, pass_handle=False)")[0].startswith("disk native")


@pytest.mark.parametrize("name", NAMES)
def test_a_deviceless_plan_is_taken_only_when_asked_for_and_is_right(on_gpu, tmp_path, name):
    assert on_gpu(f"fill_ahead({name!r}, {str(tmp_path)!r})") == ["built"]
    for pass_handle in (True, False):
        line, took = on_gpu(f"run({name!r}, {str(tmp_path)!r}, pass_handle={pass_handle}, mode='require-hit')")
        print(name, line, took, sep=" | ")
        assert line.startswith("disk deviceless")
    assert on_gpu(f"run({name!r}, {str(tmp_path)!r})", PLANCACHE_AOT="serve")[0].startswith("disk deviceless")
    assert on_gpu(f"run({name!r}, {str(tmp_path)!r})")[0].startswith("built native")


@pytest.mark.parametrize("name", NAMES)
def test_what_was_filled_ahead_is_replayed_on_the_gpu_and_is_right(on_gpu, tmp_path, name):
    (routes,) = on_gpu(f"fill_ahead({name!r}, {str(tmp_path)!r}, both=True)")
    line, took = on_gpu(f"run({name!r}, {str(tmp_path)!r})")
    print(name, routes, line, took, sep=" | ")
    # A graph without a dynamic-shape engine has no replay; its deviceless plan is not taken unasked.
    assert line.startswith("disk replay" if "replay" in routes else "built native")


def test_dynamic_shapes_compile_once_and_are_right_at_every_length(on_gpu, tmp_path):
    first, second = on_gpu(f"dynamic({str(tmp_path)!r})"), on_gpu(f"dynamic({str(tmp_path)!r})")
    print("dynamic", first, second)
    assert first[0].startswith("built")
    assert [line.split()[0] for line in second] == ["disk"] * 4
    for built, loaded in zip(first, second, strict=True):
        *_, digest, micros = built.split()
        *_, same, again = loaded.split()
        assert digest == same
        assert float(again) <= 1.05 * float(micros) or float(again) - float(micros) <= APART_US


def test_overridden_shapes_are_right_at_every_length_from_disk_too_and_bit_equal(on_gpu, tmp_path):
    if libraries.backend_version() < 92300:
        pytest.skip("this cuDNN does not tell the workspace of overridden shapes")
    first, second = on_gpu(f"overridden({str(tmp_path)!r})"), on_gpu(f"overridden({str(tmp_path)!r})")
    print("overridden", first, second)
    assert [line.split()[0] for line in (*first, *second)] == ["built"] * 3 + ["disk"] * 3
    for built, loaded in zip(first, second, strict=True):
        (_, digest, micros), (_, same, again) = built.split(), loaded.split()
        assert digest == same
        assert float(again) <= 1.05 * float(micros) or float(again) - float(micros) <= APART_US


def test_the_fingerprint_of_a_live_device_is_that_of_its_json_and_takes_no_json(on_gpu):
    live, described, micros = on_gpu("fingerprint()")
    print("fingerprint", live, f"{micros} us")
    assert live == described


def test_code_that_knows_only_cudnn_is_served_stage_by_stage_with_the_same_bits(on_gpu, tmp_path):
    first, second = on_gpu(f"staged({str(tmp_path)!r})"), on_gpu(f"staged({str(tmp_path)!r})")
    print("staged", first, second)
    assert [line.split()[0] for line in (*first, *second)] == ["built"] * 3 + ["disk"] * 3
    assert [line.split()[1] for line in first] == [line.split()[1] for line in second]


def test_while_a_stream_captures_memory_serves_and_the_rest_is_a_clear_error(on_gpu, tmp_path):
    assert on_gpu(f"capture({str(tmp_path)!r})") == ["CaptureError", "CaptureError", "True 1", "replayed"]
