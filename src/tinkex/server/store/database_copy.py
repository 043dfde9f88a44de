"""Copies of SQLite databases: for back-ups, and for imports, which add the rows of a copy."""

import contextlib
import sqlite3
from pathlib import Path

import sqlalchemy as sa

from tinkex.server.store.blobs import is_key
from tinkex.server.store.schema import metadata

#: Not imported: keys, secrets and logs belong to a server, not to its runs.
SKIPPED = frozenset({"api_keys", "audit", "console_sessions", "server_secrets", "telemetry"})

# A sampler that was there keeps its row, and may have got events of the source: its next event
# must not get the position of one of them.
_COUNT_EVENTS = """
UPDATE main.samplers SET events = max(events, coalesce((
    SELECT max(position) FROM main.completions
    WHERE completions.sampling_session_id = samplers.sampling_session_id
), 0))
"""


# Keys are not imported, so what came with one has no key here.
_FORGET_KEYS = """
UPDATE requests SET key_id = 0 WHERE key_id;
CREATE TEMP TABLE together AS
    SELECT owner, hour, session_id, base_model, what, writer, sum(amount) AS amount
    FROM usage GROUP BY owner, hour, session_id, base_model, what, writer;
DELETE FROM usage;
INSERT INTO usage (owner, hour, session_id, base_model, what, writer, amount)
    SELECT owner, hour, session_id, base_model, what, writer, amount FROM together;
DROP TABLE together;
"""


class CopyFailed(Exception):
    """The database cannot be copied; the text says why."""

    def __init__(self, message: str, *, is_full: bool = False) -> None:
        super().__init__(message)
        #: Whether the disk of the copy is full.
        self.is_full = is_full


def copy_database(source: Path, target: Path) -> None:
    """Copy a consistent state of a database that may be in use, and check the copy."""
    target.unlink(missing_ok=True)
    try:
        with (
            contextlib.closing(sqlite3.connect(source)) as original,
            contextlib.closing(sqlite3.connect(target)) as copy,
        ):
            original.backup(copy)
            # One file, without a WAL.
            copy.execute("PRAGMA journal_mode = DELETE")
            found = copy.execute("PRAGMA quick_check(3)").fetchall()
    except sqlite3.Error as error:
        name = getattr(error, "sqlite_errorname", None)
        raise CopyFailed(str(error), is_full=name == "SQLITE_FULL") from error
    if found != [("ok",)]:
        raise CopyFailed(f"it is damaged: {'; '.join(line for (line,) in found)}")


def invalid_keys(database: Path) -> list[str]:
    """Values in the key columns of a database, of any version, that are not valid keys."""
    invalid: list[str] = []
    try:
        with contextlib.closing(sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True)) as rows:
            columns = rows.execute(
                "SELECT t.name, c.name FROM sqlite_master t, pragma_table_info(t.name) c "
                "WHERE t.type = 'table' AND c.name LIKE '%place'"
            ).fetchall()
            for table, column in columns:
                found = rows.execute(f'SELECT "{column}" FROM "{table}" WHERE "{column}" NOTNULL')
                invalid += [str(key) for (key,) in found if not is_key(str(key))]
    except sqlite3.Error as error:
        raise CopyFailed(str(error)) from error
    return invalid


def forget_keys(copy: Path) -> None:
    """Remove the keys of requests and usage from a copy: the numbers are of another server."""
    with contextlib.closing(sqlite3.connect(copy)) as connection:
        connection.executescript(f"BEGIN; {_FORGET_KEYS} COMMIT;")


def add_missing_rows(source: Path, target: Path, *, only: str | None = None) -> dict[str, int]:
    """
    Add the rows of `source` that `target` does not have; returns how many, by table.

    All in one transaction. `only` restricts it to one table.
    """
    with contextlib.closing(sqlite3.connect(target, isolation_level=None)) as connection:
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("ATTACH DATABASE ? AS source", (str(source),))
        connection.execute("BEGIN IMMEDIATE")
        added = {
            table.name: connection.execute(_statement(table)).rowcount
            for table in metadata.sorted_tables
            if table.name not in SKIPPED and only in (None, table.name)
        }
        connection.execute(_COUNT_EVENTS)
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
