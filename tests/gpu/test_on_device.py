"""On a GPU: `verify --on-device` runs every plan by its own route, finds what is wrong, and sets exactly that aside."""

import json

from tests.gpu.test_tuning import command


def verdicts(directory, *arguments):
    code, out, err = command(directory, "verify", "--on-device", "--json", *arguments)
    found = [json.loads(line) for line in out.splitlines()]
    for one in found:
        numbers = one["micros"], one["native"], one["detail"]
        print("on device", one["builder"], one["name"], one["route"], one["verdict"], *numbers, sep=" | ")
    return code, found, err


def test_plans_of_eight_layers_of_every_route_are_found_right_also_after_tuning(on_gpu, tmp_path):
    on_gpu(f"fill_layers({str(tmp_path)!r})", timeout=300)
    code, found, err = verdicts(tmp_path)
    assert code == 0, err
    assert {one["verdict"] for one in found} == {"right"}
    assert all(one["exact"] for one in found if one["route"] == "native")
    assert {"native", "deviceless"} <= {one["route"] for one in found}
    code, out, err = command(tmp_path, "tune", "--seconds", "20")
    print(out)
    assert code == 0, err
    code, found, err = verdicts(tmp_path, "--route", "tuned")
    assert (code, {one["verdict"] for one in found}, len(found)) == (0, {"right"}, 8), err
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


def test_a_graph_that_gives_nothing_but_zeros_is_unproven_and_stays_and_is_not_tuned(on_gpu, tmp_path):
    assert on_gpu(f"nothing({str(tmp_path)!r})") == ["built"]
    code, found, err = verdicts(tmp_path)
    assert (code, [(one["verdict"], one["removed"]) for one in found]) == (0, [("unproven", False)]), err
    code, out, err = command(tmp_path, "tune", "--json")
    (one,) = map(json.loads, out.splitlines())
    assert (code, one["outcome"]) == (0, "nothing to tune"), err
    assert "zeros and NaN" in one["detail"]
    assert command(tmp_path, "ls", "--route", "tuned", "--json")[1] == ""


def test_a_record_in_the_place_of_another_route_is_refused_and_not_run(on_gpu, tmp_path):
    directory = str(tmp_path)
    filled = on_gpu(f"fill_ahead('conv + ReLU', {directory!r})", module="proof")[0].split()
    on_gpu(f"swapped({directory!r}, 'deviceless', 'native')", module="proof")
    code, found, _ = verdicts(tmp_path)
    assert code == 0
    assert "deviceless" in filled
    assert {one["route"]: one["verdict"] for one in found} == dict.fromkeys(filled, "right") | {"native": "refused"}


def test_a_plan_that_hangs_the_device_is_ended_and_set_aside(on_gpu, tmp_path):
    # cuDNN 9.26 and later hang for good where a deviceless plan of engine 4 is loaded with a handle; 9.19 does not.
    name, version = on_gpu(f"relabelled({str(tmp_path)!r})")[-1].split()
    code, found, _ = verdicts(tmp_path, "--timeout", "20")
    (one,) = found
    if name.startswith("eng4") and int(version) >= 92600:
        assert (code, one["verdict"], one["removed"]) == (1, "hung", True)
        assert command(tmp_path, "ls", "--json")[1] == ""
    else:
        assert one["verdict"] == "right"
