"""Plan rows in SQLite."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, fields
from pathlib import Path

from plancache.store.database import Database, faults
from plancache.store.interface import Row, Store

_COLUMNS = ", ".join(field.name for field in fields(Row))
_GET = "SELECT record FROM plans WHERE key = ? AND route = ?"
_ROWS = f"SELECT {_COLUMNS} FROM plans"
_NEWEST_FIRST = " ORDER BY created DESC, key, route"
_NAMES = frozenset(field.name for field in fields(Row))
_DISCARD = "DELETE FROM plans WHERE key = ? AND route = ? AND record = ?"
# One statement, so that of two writers each sees the other's row whole.
_PUT = f"""
INSERT INTO plans ({_COLUMNS}, record) VALUES ({", ".join("?" * (len(fields(Row)) + 1))})
ON CONFLICT (key, route) DO UPDATE SET
    {", ".join(f"{field.name} = excluded.{field.name}" for field in fields(Row))}, record = excluded.record
WHERE plans.record = ?
   OR (excluded.driver <= plans.driver AND excluded.frontend <= plans.frontend
       AND (excluded.driver < plans.driver OR excluded.frontend < plans.frontend))
"""


class SqliteStore(Store):
    """The store on local file systems. See `Store` for what is promised."""

    def __init__(self, path: Path, read_only: bool = False) -> None:
        self.database = Database(path, read_only)

    def get(self, key: str, route: str) -> bytes | None:
        connection = self.database.connection()
        with faults(self.database.file):
            found = connection.execute(_GET, (key, route)).fetchone()
        return None if found is None else found[0]

    def put(self, row: Row, record: bytes, replaces: bytes | None = None) -> bool:
        connection = self.database.connection()
        with faults(self.database.file):
            return connection.execute(_PUT, (*astuple(row), record, replaces)).rowcount > 0

    def discard(self, key: str, route: str, record: bytes) -> bool:
        connection = self.database.connection()
        with faults(self.database.file):
            return connection.execute(_DISCARD, (key, route, record)).rowcount > 0

    def rows(self, **equal: str) -> Iterator[Row]:
        unknown = set(equal) - _NAMES
        if unknown:
            raise TypeError(f"rows have no column {', '.join(sorted(unknown))}")
        where = " AND ".join(f"{name} = ?" for name in equal)
        connection = self.database.connection()
        with faults(self.database.file):
            statement = _ROWS + (f" WHERE {where}" if where else "") + _NEWEST_FIRST
            for values in connection.execute(statement, tuple(equal.values())):
                yield Row(*values)

    def close(self) -> None:
        self.database.close()
