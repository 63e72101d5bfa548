"""For tests of the stores by themselves: rows and records without cuDNN, and what a directory holds, byte for byte."""

import hashlib
import random
from dataclasses import replace

from plancache.store import records
from plancache.store.interface import Row

ROW = Row("", "native", "g", "t", "d", "e", "b", 13000, 13200, "eng4_k1=2", 4, 1.0, 0.5, 100, "builder")


def row(number, **changes):
    """The row number `number`: a key of its own, newer than those of lower numbers."""
    key = hashlib.sha256(str(number).encode()).hexdigest()
    return replace(ROW, **{"key": key, "created": float(number), **changes})


def record(of, content=b"", size=1000, key=None):
    """A whole record of a row; its `size` is that of a blob that does not shrink."""
    blob = random.Random(f"{of.key}{of.route}").randbytes(size)
    return records.encode(of, {"content": content, "blob": blob}, key)


def fill(store, count, size=1000, key=None):
    """Store rows 0, 1, …; gives them with their records."""
    stored = {}
    for number in range(count):
        one = row(number)
        stored[one] = record(one, size=size, key=key)
        assert store.put(one, stored[one])
    return stored


def found(store, stored):
    """How many of these rows the store gives, each with exactly its record; others count as none."""
    return sum(store.get(one.key, one.route) == record for one, record in stored.items())


def snapshot(directory):
    """What a directory, or a file, is and holds: mode, modification time and content of everything.

    It opens the files, so that a process with an SQLite connection to one of them must not call it.
    """
    every = [directory, *sorted(directory.rglob("*"))]
    return {
        str(path): (
            oct(path.stat().st_mode),
            path.stat().st_mtime_ns,
            hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "",
        )
        for path in every
    }
