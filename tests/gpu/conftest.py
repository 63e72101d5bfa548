"""These tests need a GPU; each case runs in a process of its own, with a time limit: a plan that is loaded the wrong
way can hang a kernel for ever."""

import os
import subprocess
import sys

import pytest

import plancache
from plancache.errors import PlanCacheError
from tests.conftest import ROOT


@pytest.fixture(scope="session", autouse=True)
def gpu():
    """The device, or the reason why there is none."""
    try:
        return plancache.device(0)
    except PlanCacheError as error:
        pytest.skip(f"needs a GPU: {error}")


@pytest.fixture
def on_gpu():
    """Run a function of a module beside this in a fresh process; gives the lines that it printed."""
    pytest.importorskip("torch")

    def runner(call, timeout=120, module="cases", **environment):
        source = f"from tests.gpu import {module}; {module}.{call}"
        done = subprocess.run(
            [sys.executable, "-c", source],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env={**os.environ, **environment},
            timeout=timeout,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.splitlines()

    return runner
