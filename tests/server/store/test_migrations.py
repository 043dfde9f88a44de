"""Schema versions: what is upgraded, and what is refused."""

import contextlib
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from postgres import Postgres
from server.store.old_schemas import (
    make_0009,
    make_0010,
    make_0011,
    make_0012,
    make_0013,
    make_0014,
    make_older,
)
from tinkex.server.store import DatabaseRefused, open_store
from tinkex.server.store.database import Database
from tinkex.server.store.migrations import current_version, known_versions, migrate
from tinkex.server.store.schema import metadata

FOLDER_0_1 = Path(__file__).resolve().parents[2] / "data" / "folder-0.1" / "data"


def database_of(folder: Path, version: str) -> str:
    """A database with this version; its URL."""
    url = f"sqlite:///{folder / 'tinkex.db'}"
    engine = sa.create_engine(url)
    {
        "0008": make_older,
        "0009": make_0009,
        "0010": make_0010,
        "0011": make_0011,
        "0012": make_0012,
        "0013": make_0013,
        "0014": make_0014,
    }[version](engine)
    engine.dispose()
    return url


def version_in(folder: Path) -> str:
    with contextlib.closing(sqlite3.connect(folder / "tinkex.db")) as connection:
        return str(connection.execute("SELECT version_num FROM alembic_version").fetchone()[0])


def tables_in(folder: Path) -> dict[str, list[str]]:
    """
    The columns and constraints of each table and index, in any order, as SQL.

    Alembic does not compare checks and names of constraints.
    """
    with contextlib.closing(sqlite3.connect(folder / "tinkex.db")) as connection:
        rows = connection.execute(
            "SELECT name, sql FROM sqlite_master WHERE name NOT LIKE '%alembic%'"
        ).fetchall()
    return {
        # A column that was added later is on the line of the one before it.
        name: sorted(
            part
            for line in (sql or "").replace(", ", "\n").splitlines()
            if (part := line.strip(" ,\n\t"))
        )
        for name, sql in rows
    }


def test_a_database_of_0_1_gets_the_tables_of_a_new_one(tmp_path: Path) -> None:
    new, old = tmp_path / "new", tmp_path / "old"
    new.mkdir()
    shutil.copytree(FOLDER_0_1, old)
    assert version_in(old) == "0008"
    for folder in (new, old):
        Database(f"sqlite:///{folder / 'tinkex.db'}", exclusive=True).close()
    assert version_in(old) == version_in(new) == known_versions()[0]
    assert len(tables_in(new)) > 20
    assert tables_in(old) == tables_in(new)


@pytest.mark.parametrize(
    "prepare", [migrate, make_older, make_0009, make_0010, make_0011, make_0012, make_0014]
)
def test_a_postgresql_database_has_the_tables_of_the_schema(
    postgres: Postgres, prepare: Callable[[sa.Engine], None]
) -> None:
    engine = sa.create_engine(postgres.database())
    prepare(engine)
    migrate(engine)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, metadata) == []
        # Alembic does not compare these.
        checks = {one["name"] for one in sa.inspect(connection).get_check_constraints("requests")}
        assert current_version(connection) == known_versions()[0]
    engine.dispose()
    assert checks == {"ck_requests_error", "ck_requests_finished", "ck_requests_status"}


@pytest.mark.parametrize("version", ["0008", "0009", "0010", "0011", "0012", "0013", "0014"])
def test_a_database_of_a_released_version_is_upgraded(tmp_path: Path, version: str) -> None:
    url = database_of(tmp_path, version)
    store = open_store(db_url=url, storage_url=str(tmp_path), folder=tmp_path, exclusive=True)
    store.close()
    assert version_in(tmp_path) == known_versions()[0]


@pytest.mark.parametrize("exclusive", [True, False])
@pytest.mark.parametrize("version", ["0001", "0002", "0003", "0004", "0005", "0006", "0007"])
def test_a_database_from_before_0_1_is_refused_with_advice(
    tmp_path: Path, version: str, exclusive: bool
) -> None:
    url = database_of(tmp_path, "0008")
    with contextlib.closing(sqlite3.connect(tmp_path / "tinkex.db")) as connection:
        connection.execute("UPDATE alembic_version SET version_num = ?", (version,))
        connection.commit()
    with pytest.raises(DatabaseRefused) as refused:
        Database(url, exclusive=exclusive)
    assert f"has schema version {version}" in str(refused.value)
    assert "Start a server of tinkex 0.1 on it once" in str(refused.value)
    assert version_in(tmp_path) == version


@pytest.mark.parametrize("exclusive", [True, False])
def test_a_database_of_a_newer_version_is_refused_with_advice(
    tmp_path: Path, exclusive: bool
) -> None:
    url = database_of(tmp_path, "0010")
    with contextlib.closing(sqlite3.connect(tmp_path / "tinkex.db")) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
        connection.commit()
    with pytest.raises(DatabaseRefused, match="made by a newer tinkex"):
        Database(url, exclusive=exclusive)
    assert version_in(tmp_path) == "9999"
