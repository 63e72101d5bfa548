"""On a GPU: a bundle that a machine without one filled starts every example, nothing is built, each layer is right."""

import json
import os
from pathlib import Path

import pytest

from plancache.cli.demo import DYNAMIC, EXAMPLES
from plancache.cudnn import libraries

TOLERANCE = 2e-2  # of the largest value


@pytest.mark.parametrize("example", [*EXAMPLES, DYNAMIC])
def test_a_bundle_filled_without_a_gpu_starts_the_example_and_every_layer_is_right(on_gpu, tmp_path, example):
    environment = {
        "PLANCACHE_DIR": str(tmp_path / "cache"),
        "PLANCACHE_LAYERS": _bundle(),
        "PLANCACHE_MODE": "require-hit",
    }
    told = on_gpu(f"start({example!r})", timeout=240, module="examples", **environment)
    start, *layers = map(json.loads, told)
    for found in (start, *layers):
        print(json.dumps(found))
    assert len(layers) >= 5
    for found in layers:
        assert found["source"] == "layer", found
        assert found["off"] <= TOLERANCE, found
        assert found["native off"] <= TOLERANCE, found


def _bundle():
    place = os.environ.get("GPU_TEST_BUNDLES")
    if place is None:
        pytest.skip("GPU_TEST_BUNDLES names no bundles that a machine without a GPU filled")
    bundle = Path(place, f"{libraries.backend_version()}.examples.bundle")
    if not bundle.exists():
        pytest.skip(f"{bundle} is not there: `plancache warm examples/*.py --device h200`, then `plancache export`")
    return str(bundle)
