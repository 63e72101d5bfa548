"""Switches plancache on in a pytest run of somebody else's tests: `-p tests.parity.plugin`, `PLANCACHE_PARITY=DIR`.

Says at the end what was served. Without the variable it does nothing.
"""

import json
import os
from collections import Counter

import plancache


def pytest_addoption(parser):
    parser.addoption("--parity-first", type=int, help="run only so many of the tests, the first ones")


def pytest_collection_modifyitems(config, items):
    first = config.getoption("--parity-first")
    if first is not None:
        del items[first:]


def pytest_configure(config):
    directory = os.environ.get("PLANCACHE_PARITY")
    config.plancache = plancache.enable(plancache.open(directory)) if directory else None


def pytest_unconfigure(config):
    cache = config.plancache
    if cache is not None:
        counts = Counter()
        for (source, reason), number in cache.stats().items():
            counts[f"{source}: {reason}"] += number
        print("plancache " + json.dumps(counts))
        cache.close()
