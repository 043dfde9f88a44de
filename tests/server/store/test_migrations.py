"""Schema versions: what is upgraded, and what is refused."""

import contextlib
import sqlite3
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command

from tinkex.server.store import DatabaseRefused, open_store
from tinkex.server.store.database import Database
from tinkex.server.store.migrations import alembic_config, known_versions


def database_of(folder: Path, version: str) -> str:
    """A database that Alembic has upgraded to this version; its URL."""
    url = f"sqlite:///{folder / 'tinkex.db'}"
    engine = sa.create_engine(url)
    config = alembic_config()
    with engine.connect() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, version)
    engine.dispose()
    return url


def version_in(folder: Path) -> str:
    with contextlib.closing(sqlite3.connect(folder / "tinkex.db")) as connection:
        return str(connection.execute("SELECT version_num FROM alembic_version").fetchone()[0])


@pytest.mark.parametrize("version", ["0008", "0009"])
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
    url = database_of(tmp_path, "0009")
    with contextlib.closing(sqlite3.connect(tmp_path / "tinkex.db")) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
        connection.commit()
    with pytest.raises(DatabaseRefused, match="made by a newer tinkex"):
        Database(url, exclusive=exclusive)
    assert version_in(tmp_path) == "9999"
