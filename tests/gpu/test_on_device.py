"""On a GPU: `verify --on-device` runs every plan by its own route, finds what is wrong, and sets exactly that aside."""

import json

from tests.gpu.test_tuning import command


def test_plans_of_every_route_are_run_and_found_right(on_gpu, tmp_path):
    on_gpu(f"fill(('matmul', 'conv', 'sdpa'), {str(tmp_path)!r})")
    code, out, err = command(tmp_path, "verify", "--on-device", "--json")
    verdicts = [json.loads(line) for line in out.splitlines()]
    for one in verdicts:
        print("on device", one["route"], one["verdict"], one["exact"], one["micros"], one["native"], one["detail"])
    assert code == 0, err + out
    assert {one["verdict"] for one in verdicts} == {"right"}
    assert all(one["exact"] for one in verdicts if one["route"] == "native")
    assert {"native", "deviceless"} <= {one["route"] for one in verdicts}
    print(command(tmp_path, "verify", "--on-device")[1])


def test_a_plan_of_another_graph_in_a_whole_record_is_found_out_and_set_aside(on_gpu, tmp_path):
    right, wrong = on_gpu(f"exchanged({str(tmp_path)!r})")[-1].split()
    code, out, _ = command(tmp_path, "verify", "--on-device", "--json", "--keep")
    assert code == 1
    assert {one["key"]: one["verdict"] for one in map(json.loads, out.splitlines())} == {right: "right", wrong: "wrong"}
    code, out, _ = command(tmp_path, "verify", "--on-device")
    assert code == 1
    assert "wrong, removed" in out
    code, out, _ = command(tmp_path, "verify", "--on-device", "--json")
    assert code == 0
    assert [json.loads(line)["key"] for line in out.splitlines()] == [right]


def test_a_record_that_is_filed_under_another_route_is_never_loaded_so(on_gpu, tmp_path):
    # Built, and not loaded: on the device this plan would hang.
    assert on_gpu(f"misfiled('matmul', {str(tmp_path)!r})")[-1] == "built native DAMAGED"
