"""Several fills of one directory at once: together they build each plan once, and none waits for one that is gone."""

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

import plancache
from plancache.crew import WAIT
from plancache.keys import digest
from plancache.sharing import Claims, Turns
from plancache.store.locks import slot
from tests import layers
from tests.conftest import ROOT

ROUTES = ["deviceless"]


@pytest.fixture
def here():
    """Builds in this process, where cuDNN is loaded already."""
    with ThreadPoolExecutor(1) as executor:
        yield executor


@pytest.fixture(scope="session")
def other(tmp_path_factory):
    """A cache with the plans of `layers.product`, and their keys by case."""
    directory = tmp_path_factory.mktemp("other") / "cache"
    with plancache.open(directory, mode="read-write") as cache, ThreadPoolExecutor(1) as executor:
        report = plancache.warm([layers.product], ["h200"], executor, cache=cache, routes=ROUTES)
    return directory, {line.args: line.key for line in report.lines}


def claim_of(key):
    return digest([key, "deviceless"])


@pytest.mark.parametrize("stored", [True, False], ids=["which stores it", "which comes to nothing"])
def test_what_another_fill_is_building_is_put_off_until_that_one_is_done(stored, other, tmp_path, here):
    directory, keys = other
    with plancache.open(tmp_path / "cache") as cache, plancache.open(directory) as full:
        claims, key, told = Claims(cache._layers), keys[32,], []
        assert claims.take(claim_of(key))

        def progress(_done, _total, line):
            told.append((line.args, line.outcome))
            if line.args == (64,):  # all that is left is the other's
                if stored:
                    (row,) = [one.row for one in full.rows(key=key)]
                    cache.store.put(row, full.store.get(key, "deviceless"))
                claims.drop(claim_of(key))

        report = plancache.warm([layers.product], ["h200"], here, cache=cache, routes=ROUTES, progress=progress)
    assert report
    assert told == [((64,), "built"), ((32,), "found" if stored else "built")]


def test_what_was_stored_since_it_was_looked_up_is_found(other, tmp_path, here, monkeypatch):
    directory, keys = other
    with plancache.open(tmp_path / "cache") as cache, plancache.open(directory) as full:
        take = Claims.take

        def late(claims, name, anyway=False):
            for key in keys.values():
                (row,) = [one.row for one in full.rows(key=key)]
                cache.store.put(row, full.store.get(key, "deviceless"))
            return take(claims, name, anyway)

        monkeypatch.setattr(Claims, "take", late)
        report = plancache.warm([layers.product], ["h200"], here, cache=cache, routes=ROUTES)
    assert report.counts == {"found": 2}


def test_a_graph_that_is_there_twice_is_built_once(tmp_path, here):
    twice = plancache.cached(cases=[(32,), (32,)])(layers.product.function)
    with plancache.open(tmp_path / "cache") as cache:
        report = plancache.warm([twice], ["h200"], here, cache=cache, routes=ROUTES)
    assert report.counts == {"built": 1, "found": 1}


HOLDER = """
import sys, plancache
from plancache.sharing import Claims
cache = plancache.open(sys.argv[1])
claims = Claims(cache._layers)
print(claims.take(sys.argv[2]), flush=True)
sys.stdin.read()
"""


def test_the_claim_of_a_killed_fill_is_free(tmp_path):
    command = [sys.executable, "-c", HOLDER, tmp_path / "cache", "ab" * 32]
    holder = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with holder, plancache.open(tmp_path / "cache") as cache:
        assert holder.stdout.readline() == "True\n"
        claims = Claims(cache._layers)
        assert not claims.take("ab" * 32)
        assert claims.take("cd" * 32)
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        assert claims.take("ab" * 32)


def test_names_with_one_lock_file_do_not_keep_their_own_fill_off_and_free_it_with_the_last(tmp_path):
    first, second = "00000001" + "a" * 56, "00000401" + "b" * 56
    assert slot(first) == slot(second)
    with plancache.open(tmp_path / "cache") as cache:
        mine, others = Claims(cache._layers), Claims(cache._layers)
        assert mine.take(first)
        assert mine.take(second)
        assert not mine.take(first)  # a twin
        mine.drop(first)
        assert not others.take(first)
        mine.drop(second)
        assert others.take(first)
        others.drop_all()
        assert mine.take(second)


def test_where_the_file_system_cannot_lock_it_is_said_once_and_everything_is_built(tmp_path, said):
    with plancache.open(tmp_path / "cache") as cache:
        assert not cache.store.read_only
        (tmp_path / "cache" / "locks-filling").write_text("no directory")
        claims = Claims(cache._layers)
        assert claims.take("ab" * 32)
        assert claims.take("cd" * 32)
        claims.drop("ab" * 32)
        assert claims.take("ab" * 32)
    assert len(said()) == 1


def test_a_fill_that_never_comes_to_its_end_is_not_waited_for(tmp_path, said):
    with plancache.open(tmp_path / "cache") as cache:
        stuck, mine = Claims(cache._layers), Claims(cache._layers)
        names = [f"{number:08x}" * 8 for number in range(3)]
        assert stuck.take(names[1])
        turns = Turns(mine, lambda name: name, lambda name: iter([name]), patience=0.0)
        assert [item for item in turns.of(names) if item is not WAIT] == [names[0], names[2], names[1]]
    assert len(said()) == 1


MANY = """
import plancache
from tests import graphs

@plancache.cached(cases=[(m,) for m in range(8, 72, 8)])
def product(handle, m):
    return graphs.matmul(handle, m=m)

@plancache.cached(cases=[(m,) for m in range(8, 32, 8)])
def lengths(handle, m):
    return graphs.matmul(handle, m=m, is_dynamic_shape_enabled=True)
"""


@pytest.mark.parametrize("kind", ["sqlite", "files"])
def test_two_commands_at_once_build_each_plan_once(tmp_path, kind):
    file = tmp_path / "many.py"
    file.write_text(MANY)
    command = [sys.executable, "-m", "plancache", "--dir", tmp_path / "cache", "--store", kind, "warm", file]
    command += ["--device", "h200", "-j", "1", "--json", "--routes", "deviceless"]
    both = [
        subprocess.Popen(
            command, cwd=ROOT, env=dict(os.environ), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    answers = [process.communicate(timeout=300) for process in both]
    assert [(process.returncode, error) for process, (_, error) in zip(both, answers, strict=True)] == [(0, "")] * 2
    outcomes = [[json.loads(line)["outcome"] for line in out.splitlines()] for out, _ in answers]
    assert [len(one) for one in outcomes] == [11, 11]
    assert sorted(outcomes[0] + outcomes[1]) == ["built"] * 11 + ["found"] * 11
