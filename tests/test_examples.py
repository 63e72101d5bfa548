"""The examples are real: each case has a plan of its own, and builds with no GPU."""

import pytest

import plancache
from plancache.builders import CachedBuilder, the_graph
from plancache.cli.demo import DYNAMIC, EXAMPLES, _cases
from plancache.settings import shipped


def test_every_example_is_one_that_the_demo_offers():
    files = {file.stem for file in shipped("examples").glob("*.py")} - {"__init__"}
    assert files == {*EXAMPLES, DYNAMIC}


@pytest.mark.parametrize("example", EXAMPLES)
def test_all_cases_differ_in_their_key(example, tmp_path, targeted):
    with plancache.open(tmp_path) as cache:
        keys = [cache.key(the_graph(builder.function(None, *case), builder.name)) for builder, case in _cases(example)]
    assert len(set(keys)) == len(keys) >= 8
    assert all(isinstance(builder, CachedBuilder) for builder, _ in _cases(example))


@pytest.mark.parametrize("example", ["llama_block", "resnet50"])  # vit is built by the test of the demo
def test_one_case_of_each_builder_builds(example, targeted):
    for builder, case in {builder: (builder, case) for builder, case in _cases(example)}.values():
        graph, tensors = builder(None, *case)
        assert plancache.last_outcome(graph).source == "built"
        assert all(tensor.get_dim() for tensor in tensors)
