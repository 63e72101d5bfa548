"""Real plans cost about a second each: they are built once a session, into one cache that tests copy or read."""

import logging
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import plancache
from tests import graphs
from tests.users import Users, interpreter

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


@pytest.fixture
def said(caplog):
    """What plancache has warned of so far, in this test."""
    caplog.set_level(logging.WARNING, logger="plancache")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "plancache"]


@pytest.fixture
def mounted():
    """Mounts a file system on a place that it makes: `mounted("-t", "tmpfs", "tmpfs", place)`. Skips if it may not."""
    places = []

    def mount(*arguments):
        if os.geteuid() != 0:
            pytest.skip("only root can mount a file system")
        place = Path(arguments[-1])
        place.mkdir(exist_ok=True)
        done = subprocess.run(["mount", *map(str, arguments)], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"this machine lets nobody mount: {done.stderr.strip()}")
        places.append(place)
        return place

    yield mount
    for place in reversed(places):
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.fixture
def users():
    """Runs Python as other users (`Users`); skips where that cannot be."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    if interpreter() is None:
        pytest.skip("no Python of this version, with this checkout and its packages, can be run by another user")
    place = Path(tempfile.mkdtemp(prefix="plancache-tests-"))  # pytest's own directories let nobody else in
    place.chmod(0o755)
    yield Users(place)
    shutil.rmtree(place)
