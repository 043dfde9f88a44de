"""Locks: one server for each data folder and database."""

import asyncio
import contextlib
import os
import sqlite3
from pathlib import Path

import pytest
import sqlalchemy as sa

from server.storage.commands import Tinkex
from server.store.test_migrations import make_older
from server.tenants import is_private
from serving import TINY, Server, serving, unloaded
from tinkex.server.folder_lock import database_file, lock_database, lock_folder, lock_holder
from tinkex.server.settings import Settings, SettingsError

pytestmark = pytest.mark.anyio


async def test_a_second_server_is_refused_with_the_holder_of_the_folder(
    server: Server, tiny_model: Path, tinkex: Tinkex
) -> None:
    spec = f"{TINY}={tiny_model}"
    done = await tinkex("serve", spec, "--port", "0", "--data", str(server.data))
    assert done.returncode == 1
    assert done.stdout == ""
    holder = f"another server (process {server.process.pid}) holds the data folder {server.data}"
    assert holder in done.stderr
    assert "hint: Use that server, stop it, or choose another folder" in done.stderr
    repair = await tinkex("doctor", "--repair", "--data", str(server.data))
    assert repair.returncode == 1
    assert holder in repair.stderr


def test_the_folder_is_free_after_its_holder_ended(tmp_path: Path) -> None:
    assert lock_holder(tmp_path) is None
    with lock_folder(tmp_path):
        assert lock_holder(tmp_path) == str(os.getpid())
        with (
            pytest.raises(SettingsError, match=f"process {os.getpid()}"),
            lock_folder(tmp_path),
        ):
            pass
    assert lock_holder(tmp_path) is None


async def test_a_database_is_not_shared_by_servers_with_folders_of_their_own(
    server: Server, tiny_model: Path, tmp_path: Path, tinkex: Tinkex
) -> None:
    """Each would run requests that the other accepted."""
    file = server.data / "tinkex.db"
    link = tmp_path / "link.db"
    link.symlink_to(file)
    spec = f"{TINY}={tiny_model}"
    where = ("--data", str(tmp_path / "own"), "--db", f"sqlite:///{link}")
    done = await tinkex("serve", spec, "--port", "0", *where)
    assert done.returncode == 1
    assert done.stdout == ""
    holder = f"another server (process {server.process.pid}) holds the database {file}"
    assert holder in done.stderr
    assert "hint: Use that server, stop it, or choose another database with --db" in done.stderr


def test_a_database_is_free_after_its_server_ended(tmp_path: Path) -> None:
    def settings(name: str) -> Settings:
        return Settings(data=str(tmp_path / name), db=f"sqlite:///{tmp_path / 'shared.db'}")

    with lock_database(settings("one")), lock_database(Settings(data=str(tmp_path / "two"))):
        shared = lock_database(settings("two"))
        with pytest.raises(SettingsError, match=r"holds the database .*shared\.db"), shared:
            pass
    with lock_database(settings("two")):
        pass


@pytest.mark.parametrize(
    ("url", "file"),
    [
        ("sqlite:////data/a.db", "/data/a.db"),
        ("sqlite+pysqlite:////data/a.db?timeout=3", "/data/a.db"),
        ("sqlite:///file:/data/a.db?uri=true", "/data/a.db"),
        ("sqlite:///:memory:", None),
        ("sqlite://", None),
        ("postgresql+psycopg://me@localhost/tinkex", None),
    ],
)
def test_the_file_of_a_database_url(url: str, file: str | None) -> None:
    assert database_file(url) == (None if file is None else Path(file))


async def test_a_second_server_is_refused_after_lock_files_were_deleted(
    tiny_model: Path, tmp_path: Path, tinkex: Tinkex
) -> None:
    """
    The folder and the database are locked, not these files.

    When the folder itself is moved, the server stops, and another one can start in its place.
    """
    data, own = tmp_path / "data", tmp_path / "own"
    spec = f"{TINY}={tiny_model}"
    with serving(*unloaded(tiny_model), data=data) as server:
        for file in ("server.lock", "tinkex.db.lock"):
            (data / file).unlink()
        done = await tinkex("serve", spec, "--port", "0", "--data", str(data))
        assert done.returncode == 1
        assert f"holds the data folder {data}" in done.stderr
        # Nor by another path to the database.
        link = tmp_path / "hard.db"
        os.link(data / "tinkex.db", link)
        for file in (data / "tinkex.db", link):
            where = ("--data", str(own), "--db", f"sqlite:///{file}")
            done = await tinkex("serve", spec, "--port", "0", *where)
            assert done.returncode == 1, file
            assert "holds the database" in done.stderr
        data.rename(tmp_path / "moved")
        assert await asyncio.to_thread(server.process.wait, 30) == 1
    assert any(f"{data} was moved, deleted or replaced" in line for line in server.log)


async def test_a_deleted_lock_file_is_created_again(
    tmp_path: Path,
) -> None:
    settings = Settings(data=str(tmp_path))
    with lock_folder(tmp_path) as folder, lock_database(settings) as database:
        for held, name in ((folder, "server.lock"), (database, "tinkex.db.lock")):
            assert held is not None
            assert held.problem() is None
            (tmp_path / name).unlink()
            assert held.problem() is None
            assert (tmp_path / name).read_text() == f"{os.getpid()}\n"
        assert lock_holder(tmp_path) == str(os.getpid())
    assert lock_holder(tmp_path) is None


def test_a_lock_file_names_one_process(tmp_path: Path) -> None:
    """Also the second time, and readable by its owner only."""
    before = os.umask(0)
    try:
        for _ in range(2):
            with lock_folder(tmp_path), lock_database(Settings(data=str(tmp_path))):
                for name in ("server.lock", "tinkex.db.lock"):
                    assert (tmp_path / name).read_text() == f"{os.getpid()}\n"
                    assert is_private(tmp_path / name)
    finally:
        os.umask(before)


# -- only the holder of a database upgrades its schema -------------------------------------------


def old_database(folder: Path) -> None:
    """A database of an earlier version of tinkex, with an API key."""
    folder.mkdir(parents=True, exist_ok=True)
    engine = sa.create_engine(f"sqlite:///{folder / 'tinkex.db'}")
    make_older(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "INSERT INTO api_keys (hash, hint, owner, name, limits, created_s) "
            "VALUES ('h', 'tml-1234', 'local', '', '{}', 1.0)"
        )
    engine.dispose()


def version(folder: Path) -> str:
    with contextlib.closing(sqlite3.connect(folder / "tinkex.db")) as connection:
        return str(connection.execute("SELECT version_num FROM alembic_version").fetchone()[0])


@pytest.mark.parametrize(
    "words",
    [
        ("serve", "--port", "0"),
        ("serve", "--port", "0", "--host", "0.0.0.0"),
        ("key", "list"),
        ("key", "create"),
        ("key", "revoke", "1"),
        ("merge", "tinker://x:train:0/weights/a", "out"),
    ],
)
async def test_a_database_that_a_server_holds_is_not_upgraded(
    tmp_path: Path, words: tuple[str, ...], tinkex: Tinkex
) -> None:
    data = tmp_path / "data"
    old_database(data)
    with lock_folder(data), lock_database(Settings(data=str(data))):
        done = await tinkex(*words, "--data", str(data))
        assert done.returncode == 1
        assert str(os.getpid()) in done.stderr
        assert version(data) == "0008"
    if words[0] == "key":
        assert "has schema version 0008, and this tinkex needs" in done.stderr
        # Once it is free, the command upgrades it.
        done = await tinkex(*words, "--data", str(data))
        assert done.returncode == 0, done.stderr
        assert version(data) > "0008"


async def test_a_server_that_does_not_start_does_not_upgrade_the_database(
    tmp_path: Path, tinkex: Tinkex
) -> None:
    """The database is free; the server does not start for another reason."""
    data = tmp_path / "data"
    old_database(data)
    done = await tinkex("serve", "x=/", "--port", "0", "--host", "0.0.0.0", "--data", str(data))
    assert done.returncode == 1
    assert "has no keys" not in done.stderr
    assert version(data) == "0008"
