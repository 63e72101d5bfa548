"""On a GPU: what the cache serves of eight layers, by each route, against float32 and the plan that is built there."""

import json
import os
from pathlib import Path

import pytest

from plancache.cudnn import libraries
from plancache.cudnn.replaying import FIRST_REPLAY
from tests.gpu.layers import LAYERS, bundle_name
from tests.gpu.test_native import NOISE_US

NAMES = tuple(LAYERS)
# Without a dynamic-shape engine there is no replay, and norms compile again in theirs, as everything does before 9.27.
NO_REPLAY = {"SDPA", "SDPA backward", "layer norm", "RMS norm"}


@pytest.fixture
def prove(on_gpu):
    """Run `proof.prove` in a process of its own; gives what it found."""

    def runner(*arguments, **keywords):
        told = on_gpu(f"prove(*{arguments!r}, **{keywords!r})", timeout=90, module="proof")
        found = json.loads(told[-1])
        print(json.dumps(found))
        return found

    return runner


@pytest.mark.parametrize("name", NAMES)
def test_from_disk_it_is_right_bit_equal_and_at_native_speed(prove, tmp_path, name):
    directory = str(tmp_path / "cache")
    assert (prove(name, directory)["source"], prove(name, directory)["source"]) == ("built", "disk")
    found = prove(name, directory)
    assert (found["source"], found["route"]) == ("disk", "native")
    assert found["plan"] == found["native plan"]
    assert found["bit-equal"]
    assert found["ratio"] <= 1.05 or found["us"] - found["native us"] <= NOISE_US


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("route", ["replay", "deviceless"])
def test_what_a_machine_without_a_gpu_filled_is_right_on_one(prove, tmp_path, name, route):
    bundle = _bundle(route)
    # What was filled without the device serves it unasked by `replay` alone.
    mode = "require-hit" if route == "deviceless" else None
    if route == "replay" and (name in NO_REPLAY or libraries.backend_version() < FIRST_REPLAY):
        pytest.skip("this cuDNN cannot replay it")
    found = prove(name, str(tmp_path / "cache"), bundle=bundle, mode=mode)
    assert (found["source"], found["route"]) == ("layer", route)


@pytest.mark.parametrize(("source", "target"), [("deviceless", "native"), ("replay", "native")])
def test_a_row_that_was_made_for_another_route_is_refused(on_gpu, prove, tmp_path, source, target):
    directory = str(tmp_path / "cache")
    filled = on_gpu(f"fill_ahead('conv + ReLU', {directory!r})", module="proof")
    if libraries.backend_version() < FIRST_REPLAY:  # there it compiles in every process, and is not stored
        assert filled == ["deviceless"]
        if source == "replay":
            pytest.skip("this cuDNN cannot replay it")
    else:
        assert filled == ["deviceless replay"]
    on_gpu(f"swapped({directory!r}, {source!r}, {target!r})", module="proof")
    found = prove("conv + ReLU", directory)
    assert (found["source"], found["route"]) != ("disk", "native")


def _bundle(route):
    place = os.environ.get("GPU_TEST_BUNDLES")
    if place is None:
        pytest.skip("GPU_TEST_BUNDLES names no bundles that a machine without a GPU filled (tests/gpu/layers.py)")
    bundle = Path(place, bundle_name(route))
    if not bundle.exists():
        pytest.skip(f"{bundle} is not there: `python -m tests.gpu.layers` makes it, with this cuDNN")
    return str(bundle)
