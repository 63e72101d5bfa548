"""The executors of others: workers on other machines build, records travel back, one process writes."""

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import plancache
from plancache.kernels import is_kernel
from tests import layers
from tests.conftest import ROOT

FILL = """
import json, sys
import plancache
from tests import layers

BUILDERS = [layers.product, layers.attention, layers.lengths, layers.impossible]

def fill(executor, directory):
    with plancache.open(directory) as cache:
        report = plancache.warm(BUILDERS, ["h200"], executor, cache=cache)
    fates = [(line.builder, line.args, line.route, line.outcome, line.error) for line in report.lines]
    print(json.dumps(sorted(fates)))
"""
POOL = """
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
if __name__ == "__main__":
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as executor:
        fill(executor, sys.argv[1])
"""
THREADS = """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(4) as executor:
    fill(executor, sys.argv[1])
"""
DASK = """
from distributed import LocalCluster
if __name__ == "__main__":
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
        with cluster.get_client() as client:
            fill(client.get_executor(), sys.argv[1])
"""
MPI = """
from mpi4py.futures import MPIPoolExecutor
if __name__ == "__main__":
    with MPIPoolExecutor() as executor:
        fill(executor, sys.argv[1])
"""


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """What filling in this process alone comes to: (fates, rows)."""
    directory = tmp_path_factory.mktemp("expected") / "cache"
    builders = [layers.product, layers.attention, layers.lengths, layers.impossible]
    with ThreadPoolExecutor(1) as executor, plancache.open(directory, mode="read-write") as cache:
        report = plancache.warm(builders, ["h200"], executor, cache=cache)
    fates = [[line.builder, list(line.args), line.route, line.outcome, line.error] for line in report.lines]
    return sorted(fates), rows(directory)


def rows(directory):
    """Everything that is the same of two fills: not times and sizes, nor which of two lengths needed a kernel first."""
    with plancache.open(directory) as cache:
        found = [one.row for one in cache.rows()]
        assert cache.verify().clean
    plans = {(row.key, row.route, row.driver, row.name, row.builder) for row in found if not is_kernel(row)}
    return plans | {(row.key, row.name) for row in found if is_kernel(row)}


def filled(tmp_path, source, *launcher):
    script, directory = tmp_path / "fill.py", tmp_path / "cache"
    script.write_text(FILL + source)
    command = [*(launcher or (sys.executable, "-W", "error")), str(script), str(directory)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), rows(directory)


def test_a_process_pool_gives_the_same_rows(expected, tmp_path):
    assert filled(tmp_path, POOL) == expected


def test_threads_that_begin_in_one_process_at_once_give_the_same_rows(expected, tmp_path):
    assert filled(tmp_path, THREADS) == expected


def test_dask_workers_give_the_same_rows(expected, tmp_path):
    pytest.importorskip("distributed", reason="needs Dask (distributed)")
    assert filled(tmp_path, DASK) == expected


def test_mpi_workers_give_the_same_rows(expected, tmp_path):
    pytest.importorskip("mpi4py", reason="needs mpi4py")
    launcher = Path(sys.executable).parent / "mpiexec"
    mpiexec = str(launcher) if launcher.exists() else shutil.which("mpiexec")
    if mpiexec is None:
        pytest.skip("needs MPI (mpiexec)")
    assert filled(tmp_path, MPI, mpiexec, "-n", "3", sys.executable, "-m", "mpi4py.futures") == expected
