"""`PLANCACHE_MODE=check` proves on the real workload that no key is too small."""

import sqlite3

import pytest

import plancache
from plancache.errors import MismatchError
from plancache.outcome import Reason, Source
from plancache.store import records
from plancache.store.database import FILE
from tests import graphs


def test_the_first_hit_of_each_key_is_built_too_and_agrees(warm, targeted):
    with plancache.open(warm, mode="check") as cache:
        for builder in (graphs.matmul, graphs.conv, graphs.sdpa):
            outcome = cache.build(builder()[0])
            assert (outcome.source, outcome.reason) == (Source.BUILT, Reason.FOUND)
        assert cache.build(graphs.matmul()[0]).source is Source.DISK  # only the first
        assert cache.build(graphs.matmul(m=16)[0]).stored  # a miss is built and stored as always


@pytest.mark.parametrize("what", ["knobs", "operation graph", "inferred tensors"])
def test_a_plan_that_is_not_what_building_gives_is_an_error_that_shows_both(warm, targeted, what):
    with plancache.open(warm, mode="check") as cache:
        key = cache.key(graphs.matmul()[0])
        database = sqlite3.connect(warm / FILE)
        (record,) = database.execute("SELECT record FROM plans WHERE key = ?", (key.hash,)).fetchone()
        row, fields = records.decode(record)
        plan = fields["plan"]
        if what == "knobs":
            plan["plans"][plan["selected"]][2][0][1] += 1
        elif what == "inferred tensors":
            plan["inferred"][0][1][0] += 1
        else:  # what a key that misses a parameter would bring about: the plan of another graph
            fields["blob"] = fields["blob"].replace(b"POINTWISE_RELU_FWD", b"POINTWISE_TANH_FWD")
        with database:
            database.execute("UPDATE plans SET record = ? WHERE key = ?", (records.encode(row, fields), key.hash))
        database.close()
        with pytest.raises(MismatchError, match="not the one that building gives") as caught:
            cache.build(graphs.matmul()[0])
    field = what.split()[0] if what != "operation graph" else "operation_graph"
    assert caught.value.built[field] != caught.value.cached[field]
    assert caught.value.built["graph"] == caught.value.cached["graph"]
    assert caught.value.key == key


def test_a_blob_names_the_operations_that_it_is_for(built):
    from plancache.cudnn.plans import operation_graph

    nodes = operation_graph(built["matmul"][0].serialize(as_bytes=True))["nodes"]
    assert [node["operation"].split("_")[3] for node in nodes] == ["MATMUL", "POINTWISE"]
    assert operation_graph(built["sdpa"][0].serialize(as_bytes=True))["nodes"]
    assert operation_graph(b"no blob") is None
    assert operation_graph(b'{"cudnnVersion": cut') is None
