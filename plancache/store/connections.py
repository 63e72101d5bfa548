"""SQLite connections of a process that may fork.

A fork copies what SQLite keeps in memory, and not the kernel's locks that this memory speaks of. Beside an inherited
connection a child would believe that its own one holds the parent's locks: the parent, which closes the database as
the last one, then removes a journal that the child goes on writing to (measured). So a child closes what it inherited
before it opens anything; that writes nothing while the parent, or anybody else, has the database open.

Where other threads had connections, one of them may have been inside SQLite at that moment, and a mutex that it held
stays locked in the child for ever (measured: the child hangs). Such a child leaves SQLite alone: its caches say so
once, and it builds as if there were none.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import weakref
from contextlib import suppress
from typing import Any

_every: weakref.WeakSet[Connection] = weakref.WeakSet()
_left_alone = False


class Connection(sqlite3.Connection):
    """A connection that knows which thread it belongs to."""

    def __init__(self, address: str, **options: Any) -> None:
        super().__init__(address, **options)
        self.thread = threading.get_ident()
        _every.add(self)


def connect(address: str, **options: Any) -> Connection:
    """Open a database, by its path or URI.

    Raises:
        sqlite3.OperationalError: it cannot be opened, or this process was forked while other threads had it open.
    """
    if _left_alone:
        raise sqlite3.OperationalError("this process was forked while other threads had the cache open")
    return Connection(address, **options)


def _in_the_child() -> None:
    global _left_alone
    inherited, mine = list(_every), threading.get_ident()
    if all(connection.thread == mine and not connection.in_transaction for connection in inherited):
        for connection in inherited:
            with suppress(sqlite3.Error):
                connection.close()
    elif inherited:
        import ctypes

        _left_alone = True
        for connection in inherited:  # never let go of: closing it might wait for a thread that is not here
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))


os.register_at_fork(after_in_child=_in_the_child)
