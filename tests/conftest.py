"""Real plans cost about a second each: they are built once a session, into one cache that tests copy or read."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import plancache
from tests import graphs

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch, tmp_path):
    """No test sees the developer's cache or settings."""
    for name in list(os.environ):
        if name.startswith("PLANCACHE_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PLANCACHE_DIR", str(tmp_path / "default-cache"))


@pytest.fixture(scope="session")
def h200():
    return plancache.device("h200")


@pytest.fixture(scope="session")
def _filled(tmp_path_factory, h200):
    """A cache with the plans of matmul, conv and sdpa, and the graphs as they were built."""
    directory = tmp_path_factory.mktemp("filled") / "cache"
    built = {}
    with plancache.target(h200), plancache.open(directory, mode="read-write") as cache:
        for builder in (graphs.matmul, graphs.conv, graphs.sdpa):
            graph, tensors = builder()
            outcome = cache.build(graph)
            assert outcome.source == "built", outcome
            assert outcome.stored, outcome
            built[builder.__name__] = (graph, tensors)
    return directory, built


@pytest.fixture
def warm(_filled, tmp_path):
    """The directory of a cache of one's own that holds the plans of matmul, conv and sdpa."""
    copy = tmp_path / "warm"
    shutil.copytree(_filled[0], copy)
    return copy


@pytest.fixture
def built(_filled):
    """The graphs that were built for the filled cache: name -> (graph, tensors). Not to be changed."""
    return _filled[1]


@pytest.fixture
def targeted(h200):
    """The test runs inside target("h200")."""
    with plancache.target(h200):
        yield h200


@pytest.fixture
def run():
    """Run Python source in a process of its own, from the project's root; gives its stdout."""

    def runner(source, *args, check=True, **environment):
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", source, *map(str, args)],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env={**os.environ, **environment},
            timeout=300,
            check=False,
        )
        if check:
            assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
            return done.stdout
        return done

    return runner
