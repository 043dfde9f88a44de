"""Copies all rows of one database to another, SQLite or PostgreSQL, and compares them."""

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from tinkex.server.store.connections import connection_pools
from tinkex.server.store.database import Database
from tinkex.server.store.schema import metadata, server_secrets

#: Rows that are read and written at a time. A row has at most 128 KiB of payload and result.
BATCH = 200
_MODULUS = 1 << 128


@dataclass(frozen=True, slots=True)
class Content:
    """What a table contains, whatever the order of its rows."""

    rows: int
    digest: int


@contextlib.contextmanager
def opened_alone(url: str) -> Iterator[sa.Connection]:
    """A connection to a database that no server uses. Its tables are created or upgraded first."""
    Database(url, exclusive=True).close()
    writing, reading = connection_pools(url, exclusive=True)
    try:
        # In PostgreSQL, it holds the lock of the database.
        with writing.connect() as connection:
            yield connection
    finally:
        writing.dispose()
        reading.dispose()


def copy_rows(source: sa.Connection, target: sa.Connection) -> int:
    """
    Copy all rows, table after table, in the order of their references; returns how many.

    Rows that the target has are replaced, so this can be repeated after an interruption. Each batch
    is committed.
    """
    copied = 0
    for table in metadata.sorted_tables:
        insert = _replace(table, target.dialect.name)
        for rows in _batches(source, table):
            target.execute(insert, rows)
            target.commit()
            copied += len(rows)
        _set_sequence(target, table)
        target.commit()
    return copied


def contents(connection: sa.Connection) -> dict[str, Content]:
    """The content of each table."""
    found = {}
    for table in metadata.sorted_tables:
        count = digest = 0
        for rows in _batches(connection, table):
            count += len(rows)
            digest = (digest + sum(map(_digest, rows))) % _MODULUS
        found[table.name] = Content(count, digest)
    return found


def changed_tables(source: sa.Connection, target: sa.Connection) -> list[str]:
    """
    The tables of the target that have rows which the source does not have, or has otherwise.

    An interrupted copy leaves only rows of the source. Other rows are newer, or of other data.
    """
    changed = []
    for table in metadata.sorted_tables:
        # A server that only started has made secrets: these may be replaced.
        names = [c.name for c in (table.primary_key if table is server_secrets else table.c)]
        left = set(_digests(target, table, names))
        if left:
            left.difference_update(_digests(source, table, names))
        if left:
            changed.append(table.name)
    return changed


def _digests(connection: sa.Connection, table: sa.Table, names: list[str]) -> Iterator[int]:
    for rows in _batches(connection, table):
        for row in rows:
            yield _digest({name: row[name] for name in names})


def _batches(connection: sa.Connection, table: sa.Table) -> Iterator[list[dict[str, Any]]]:
    # Of the statement: as options of the connection they would hold for its inserts too.
    result = connection.execute(sa.select(table).execution_options(stream_results=True))
    for rows in result.mappings().partitions(BATCH):
        yield [dict(row) for row in rows]


def _replace(table: sa.Table, dialect: str) -> Any:
    insert: Any = (sqlite if dialect == "sqlite" else postgresql).insert(table)
    key = [column.name for column in table.primary_key]
    others = {c.name: insert.excluded[c.name] for c in table.c if c.name not in key}
    return insert.on_conflict_do_update(index_elements=key, set_=others)


def _set_sequence(connection: sa.Connection, table: sa.Table) -> None:
    """PostgreSQL numbers new rows after the copied ones; SQLite does so by itself."""
    number = table.autoincrement_column
    if connection.dialect.name == "sqlite" or number is None:
        return
    connection.exec_driver_sql(
        f"SELECT setval(pg_get_serial_sequence('{table.name}', '{number.name}'), "
        f'coalesce((SELECT max("{number.name}") FROM "{table.name}"), 0) + 1, false)'
    )


def _digest(row: Mapping[str, Any]) -> int:
    text = json.dumps({name: _plain(value) for name, value in row.items()}, sort_keys=True)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:16])


def _plain(value: object) -> object:
    """A value that is equal for both databases."""
    if isinstance(value, bytes | memoryview):
        return hashlib.sha256(value).hexdigest()
    # PostgreSQL has no NUL characters in text (`sql_dialects.replace_nul_characters`).
    return value.replace("\0", "\ufffd") if isinstance(value, str) else value
