"""SQLite connections of a process that may fork.

A fork copies what SQLite keeps in memory, and not the kernel's locks that this memory speaks of. Beside an inherited
connection a child would believe that its own one holds the parent's locks: the parent, which closes the database as
the last one, then removes a journal that the child goes on writing to (measured). So a child closes what it inherited
before it opens anything; that writes nothing while the parent, or anybody else, has the database open.

A thread that is inside SQLite while its process forks would leave SQLite's mutexes locked in the child for ever
(measured: the child hangs). So whoever uses a connection holds its thread's gate, and a fork waits until it has all
gates. Where it cannot have them in time, the child leaves SQLite alone: its caches say so once, and it builds as if
there were none.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
import weakref
from contextlib import suppress
from typing import Any

# What a fork waits for the other threads: longer than any of them waits for another process.
_PATIENCE = 5.0

# Milliseconds that a statement waits for another process's write (a put takes 0.2 ms).
BUSY = 2000

_every: weakref.WeakSet[Connection] = weakref.WeakSet()
_gates: weakref.WeakSet[Gate] = weakref.WeakSet()
_registry = threading.RLock()  # of gates
_opening = threading.RLock()  # SQLite's own lists change; taken within a gate, or by none
_local = threading.local()
_held: list[Gate] = []
_left_alone = _interrupted = False


class Gate:
    """A thread's: held while it is inside SQLite."""

    def __init__(self) -> None:
        lock = threading.RLock()
        self.acquire, self.release = lock.acquire, lock.release


def gate() -> Gate:
    """The calling thread's gate."""
    mine: Gate | None = getattr(_local, "gate", None)
    if mine is None:
        with _registry:  # not in the middle of a fork
            mine = _local.gate = Gate()
            _gates.add(mine)
    return mine


class Connection(sqlite3.Connection):
    """A connection; its user holds his gate."""

    def __init__(self, address: str, **options: Any) -> None:
        with _opening:
            super().__init__(address, **options)
            _every.add(self)
        self._patience = round(1000 * options["timeout"])

    def wait(self, milliseconds: int) -> None:
        """How long its next statements wait for a lock that another connection holds."""
        if milliseconds != self._patience:
            self.execute(f"PRAGMA busy_timeout = {milliseconds}")
            self._patience = milliseconds

    def close(self) -> None:
        # Also by a thread that ends, or by whoever drops the last reference to it: those hold no gate.
        with _opening:
            super().close()

    def __del__(self) -> None:
        # Python 3.13 warns of a database that the garbage collector closes.
        with suppress(sqlite3.Error, AttributeError):
            self.close()


def connect(address: str, **options: Any) -> Connection:
    """Open a database, by its path or URI.

    Raises:
        sqlite3.OperationalError: it cannot be opened, or this process was forked while other threads were using it.
    """
    if _left_alone:
        raise sqlite3.OperationalError("this process was forked while other threads were using the cache")
    return Connection(address, **options)


def _before() -> None:
    global _interrupted
    _registry.acquire()
    deadline, every = time.monotonic() + _PATIENCE, list(_gates)
    _held.extend(one for one in every if one.acquire(timeout=max(0.0, deadline - time.monotonic())))
    _interrupted = len(_held) < len(every)
    _opening.acquire()


def _in_the_parent() -> None:
    _opening.release()
    while _held:
        _held.pop().release()
    _registry.release()


def _in_the_child() -> None:
    global _left_alone
    inherited = list(_every)
    if not _interrupted and not any(map(_in_transaction, inherited)):
        for connection in inherited:
            with suppress(sqlite3.Error):
                connection.close()
    elif inherited:
        import ctypes

        _left_alone = True
        for connection in inherited:  # never let go of: closing it might wait for a thread that is not here
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))
    for one in set(_gates) - set(_held):  # of threads that are not here: nobody would ever open them
        _gates.discard(one)
    _in_the_parent()


def _in_transaction(connection: Connection) -> bool:
    with suppress(sqlite3.ProgrammingError):  # it is closed, and somebody still holds it
        return connection.in_transaction
    return False


os.register_at_fork(before=_before, after_in_parent=_in_the_parent, after_in_child=_in_the_child)
