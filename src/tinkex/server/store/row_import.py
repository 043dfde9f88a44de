"""Adds the rows of one SQLite database to another that has the same tables."""

import sqlite3
from contextlib import closing
from pathlib import Path

import sqlalchemy as sa

from tinkex.server.store.schema import metadata

#: Not imported: keys, secrets and logs belong to a server, not to its runs.
SKIPPED = frozenset({"api_keys", "audit", "server_secrets", "telemetry"})


def add_missing_rows(source: Path, target: Path, *, only: str | None = None) -> dict[str, int]:
    """
    Add the rows of `source` that `target` does not have; returns how many, by table.

    All in one transaction. `only` restricts it to one table.
    """
    with closing(sqlite3.connect(target, isolation_level=None)) as connection:
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("ATTACH DATABASE ? AS source", (str(source),))
        connection.execute("BEGIN IMMEDIATE")
        added = {
            table.name: connection.execute(_statement(table)).rowcount
            for table in metadata.sorted_tables
            if table.name not in SKIPPED and only in (None, table.name)
        }
        connection.execute("COMMIT")
    return added


def _statement(table: sa.Table) -> str:
    key = ", ".join(f'"{column.name}"' for column in table.primary_key)
    # Numbers that a database assigns itself are new here, in the same order.
    numbered = table.dialect_options["sqlite"]["autoincrement"]
    columns = [one.name for one in table.columns if not (numbered and one.primary_key)]
    names = ", ".join(f'"{name}"' for name in columns)
    return (
        f'INSERT OR IGNORE INTO main."{table.name}" ({names}) '
        f'SELECT {names} FROM source."{table.name}" ORDER BY {key}'
    )
