"""One server for each data folder: a second one says who has it."""

import os
from pathlib import Path

import pytest

from server.storage.commands import tinkex
from serving import TINY, Server
from tinkex.server.run import database_file, hold_database, hold_folder, holder_of
from tinkex.server.settings import Settings, SettingsError

pytestmark = pytest.mark.anyio


async def test_a_second_server_is_refused_and_told_who_has_the_folder(
    server: Server, tiny_model: Path
) -> None:
    spec = f"{TINY}={tiny_model}"
    done = await tinkex("serve", spec, "--port", "0", "--data", str(server.data))
    assert done.returncode == 1
    assert done.stdout == ""
    holder = f"another server (process {server.process.pid}) holds the data folder {server.data}"
    assert holder in done.stderr
    assert "hint: Use that one, stop it, or choose another folder" in done.stderr
    repair = await tinkex("doctor", "--repair", "--data", str(server.data))
    assert repair.returncode == 1
    assert holder in repair.stderr


def test_the_folder_is_free_again_however_its_holder_ended(tmp_path: Path) -> None:
    assert holder_of(tmp_path) is None
    with hold_folder(tmp_path):
        assert holder_of(tmp_path) == str(os.getpid())
        with (
            pytest.raises(SettingsError, match=f"process {os.getpid()}"),
            hold_folder(tmp_path),
        ):
            pass
    assert holder_of(tmp_path) is None


async def test_a_database_is_not_shared_by_servers_with_folders_of_their_own(
    server: Server, tiny_model: Path, tmp_path: Path
) -> None:
    """Each would run what the other accepted."""
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


def test_a_database_is_free_again_when_its_server_ended(tmp_path: Path) -> None:
    def settings(name: str) -> Settings:
        return Settings(data=str(tmp_path / name), db=f"sqlite:///{tmp_path / 'shared.db'}")

    with hold_database(settings("one")), hold_database(Settings(data=str(tmp_path / "two"))):
        shared = hold_database(settings("two"))
        with pytest.raises(SettingsError, match=r"holds the database .*shared\.db"), shared:
            pass
    with hold_database(settings("two")):
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
def test_the_file_of_a_database_is_known_by_its_url(url: str, file: str | None) -> None:
    assert database_file(url) == (None if file is None else Path(file))
