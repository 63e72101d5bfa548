"""What a file system does with locks, renames and killed writers, tried in a directory of it with two processes.

`run` is called by `plancache doctor --filesystem DIR`; the other process is `python -m plancache.trial WHAT PLACE`.
Everything happens in one new directory below DIR, which is removed at the end; one that a killed trial left is removed
by the next.

Not tried: two hosts. Of a network file system it says only what one client does.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from plancache import child
from plancache.doctor import ERROR, OK, WARNING, Finding
from plancache.errors import PlanCacheError
from plancache.store import directory as directories
from plancache.store import records
from plancache.store.directory import Access
from plancache.store.files import FileStore
from plancache.store.interface import Row, Store
from plancache.store.plans import SqliteStore
from plancache.store.verify import verify

_PREFIX = ".plancache-trial-"
_STALE = 3600.0  # seconds after which a directory is a killed trial's
_READS, _KILLS = 1.0, 5  # seconds of reading beside a writer that renames; writers that are killed, for each store
_PATIENCE = 20.0


def run(directory: Path, progress: TextIO | None = None) -> list[Finding]:
    """Try everything in `directory`, and say how it went."""
    local = directories.filesystem(directory) in directories.LOCAL
    found = [_kind(directory, local)]
    try:
        with _scratch(directory) as place:
            tries: list[Callable[[Path], Finding]] = [_modes, _clock, _locks, _renames, _killed_files]
            for step in [*tries, *([_killed_sqlite] if local else [])]:
                if progress is not None and progress.isatty():
                    progress.write(f"\rtrying {step.__name__.strip('_').replace('_', ' '):<24}")
                    progress.flush()
                found.append(_tried(step, place))
    except OSError as error:
        found.append(Finding("directory", ERROR, str(error), "Name a directory in which you may write."))
    if progress is not None and progress.isatty():
        progress.write("\r" + " " * 40 + "\r")
    return found


def _kind(directory: Path, local: bool) -> Finding:
    store = "an SQLite database" if local else "record files"
    return Finding("file system", OK, f"{directories.filesystem(directory)}: a new cache here is kept in {store}")


@contextmanager
def _scratch(directory: Path) -> Iterator[Path]:
    for left in directory.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if left.stat().st_mtime < time.time() - _STALE:
                shutil.rmtree(left)
    place = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=directory))
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _tried(step: Callable[[Path], Finding], place: Path) -> Finding:
    here = place / step.__name__.strip("_")
    here.mkdir()
    try:
        return step(here)
    except (OSError, PlanCacheError) as error:
        name = step.__name__.strip("_").replace("_", " ")
        return Finding(name, ERROR, f"{type(error).__name__}: {error}", "Keep the cache elsewhere (PLANCACHE_DIR).")


@contextmanager
def _other(what: str, place: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that does `what`, once it says that it has begun; killed at the end."""
    process = subprocess.Popen(
        child.command("plancache.trial", what, str(place)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            if not process.stdout.readline():
                raise OSError((process.stderr.read().strip().splitlines() or ["the other process ended"])[-1])
            yield process
        finally:
            process.kill()


# ------------------------------------------------------------ the trials


def _modes(place: Path) -> Finding:
    file = place / "file"
    os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    mode, owner = stat.S_IMODE(file.stat().st_mode), file.stat().st_uid
    if mode == 0o600 and owner == os.geteuid():
        return Finding("modes", OK, "a file is its owner's alone, where it is made so")
    what = f"a file made with mode 0600 has {mode:04o}, and owner {owner}"
    return Finding("modes", WARNING, what, "Others may write native code here: sign records (PLANCACHE_KEY_FILE).")


def _clock(place: Path) -> Finding:
    file = place / "file"
    before = time.time()
    file.touch()
    off = file.stat().st_mtime - before
    if abs(off) < 60:
        return Finding("clock", OK, "file times agree with this host's clock")
    return Finding(
        "clock", WARNING, f"file times are {off:.0f} s off", "What was last used is told by them: set the clocks."
    )


def _locks(place: Path) -> Finding:
    import filelock

    file = place / "lock"
    todo = "Several processes may build the same plan; nothing else depends on it."
    try:
        with _other("hold", file):
            mine = filelock.FileLock(file, fallback_to_soft=False, preserve_lock_file=True)
            try:
                mine.acquire(blocking=False)
            except filelock.Timeout:
                pass
            else:
                mine.release()
                return Finding("locks", WARNING, "two processes hold one lock at once", todo)
        # It was killed: the kernel gives its lock back.
        mine.acquire(timeout=_PATIENCE)
        mine.release()
    except filelock.Timeout:
        return Finding(
            "locks", WARNING, "the lock of a killed process stays held", "Set PLANCACHE_WAIT to a few seconds."
        )
    except (OSError, NotImplementedError) as error:
        return Finding("locks", WARNING, f"this file system cannot lock: {error}", todo)
    return Finding("locks", OK, "one holder at a time, and a killed holder's is free at once")


def _renames(place: Path) -> Finding:
    file, seen, torn, gone = place / "file", set[bytes](), 0, 0
    with _other("rename", place):
        until = time.monotonic() + _READS
        while time.monotonic() < until or (len(seen) < 2 and time.monotonic() < until + _PATIENCE):
            try:
                content = file.read_bytes()
            except FileNotFoundError:
                gone += 1
                continue
            torn += not _is_whole(content)
            seen.add(content[:32])
    if torn or gone:
        what = f"while another process renamed files onto it, one was torn {torn} times and gone {gone} times"
        return Finding("renames", ERROR, what, "Keep the cache elsewhere (PLANCACHE_DIR).")
    return Finding("renames", OK, f"a reader saw {len(seen)} versions of a file, each whole")


def _killed_files(place: Path) -> Finding:
    return _killed("killed writers, files", "files", place)


def _killed_sqlite(place: Path) -> Finding:
    return _killed("killed writers, SQLite", "sqlite", place)


def _killed(name: str, kind: str, place: Path) -> Finding:
    """Kill processes that store records; everything that is there then must be whole."""
    for number in range(_KILLS):
        with _other(kind, place):
            time.sleep(0.02 + 0.03 * number)
    store = _store(kind, place)
    try:
        report = verify(store, place, None, repair=False)
        written = _put(store, -1)
    finally:
        store.close()
    if not report.clean or not written:
        faults = "; ".join(fault for *_, fault in report.bad[:3]) or "nothing can be stored any more"
        return Finding(
            name, ERROR, f"of {report.good + len(report.bad)} records: {faults}", "Keep the cache elsewhere."
        )
    return Finding(name, OK, f"{_KILLS} writers were killed; all {report.good} records that they left are whole")


# ------------------------------------------------------------ the other process


def _store(kind: str, place: Path) -> Store:
    access = Access(read_only=False, mode=0o700)
    return FileStore(place, access) if kind == "files" else SqliteStore.at(place, access)


def _row(number: int) -> Row:
    key = hashlib.sha256(str(number).encode()).hexdigest()
    return Row(key, "native", "g", "t", "d", "e", "b", 13000, 13200, "trial", 0, time.time(), 0.0, 20_000)


def _put(store: Store, number: int) -> bool:
    row = _row(number)
    return store.put(row, records.encode(row, {"blob": os.urandom(row.size)}))


def _whole(number: int) -> bytes:
    content = str(number).encode() * 5_000
    return hashlib.sha256(content).digest() + content


def _is_whole(content: bytes) -> bool:
    return hashlib.sha256(content[32:]).digest() == content[:32]


def _hold(file: Path) -> Iterator[None]:
    import filelock

    with filelock.FileLock(file, fallback_to_soft=False, preserve_lock_file=True, timeout=_PATIENCE):
        while True:
            yield
            time.sleep(0.1)


def _rename(place: Path) -> Iterator[None]:
    number = 0
    while True:
        scratch, number = place / "scratch", number + 1
        scratch.write_bytes(_whole(number))
        scratch.rename(place / "file")
        yield


def _keep_storing(kind: str, place: Path) -> Iterator[None]:
    store, number = _store(kind, place), 0
    while True:
        number += 1
        _put(store, os.getpid() * 1_000_000 + number)
        yield


def main(what: str, place: Path) -> None:
    """Do one thing for ever, and say so once it has begun."""
    work = {"hold": _hold, "rename": _rename}.get(what)
    steps = work(place) if work is not None else _keep_storing(what, place)
    next(steps)
    print("begun", flush=True)
    parent = os.getppid()
    for _ in steps:
        if os.getppid() != parent:  # it was killed, and nobody kills this one
            return


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
