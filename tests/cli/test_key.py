"""`tinkex key`: made, listed, revoked on a data folder; a key is seen once."""

import contextlib
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tinkex.cli.key import command
from tinkex.server.store import open_store


def key(folder: Path, *args: str) -> Result:
    return CliRunner().invoke(command, [*args, "--data", str(folder)])


def test_a_key_is_shown_once_and_never_again(tmp_path: Path) -> None:
    made = key(tmp_path, "create", "--owner", "alice", "--name", "laptop", "--expires", "30d")
    assert made.exit_code == 0
    secret = made.stdout.strip()
    assert secret.startswith("tml-")
    assert "not shown again" in made.stderr
    listed = key(tmp_path, "list").stdout
    assert secret not in listed
    assert f"{secret[:8]}…" in listed
    assert "alice" in listed
    assert "laptop" in listed
    assert "active" in listed


def test_a_revoked_key_stays_in_the_list(tmp_path: Path) -> None:
    key(tmp_path, "create")
    assert "is revoked" in key(tmp_path, "revoke", "1").stderr
    assert "revoked" in key(tmp_path, "list").stdout
    unknown = key(tmp_path, "revoke", "7")
    assert unknown.exit_code == 1
    assert "there is no key 7" in unknown.stderr


def test_an_empty_list_says_what_that_means(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'tinkex.db'}"
    open_store(db_url=url, storage_url=str(tmp_path), folder=tmp_path).close()
    assert "No keys" in key(tmp_path, "list").stderr


@pytest.mark.parametrize("asked", [("list",), ("revoke", "1")])
def test_looking_at_keys_makes_no_data_folder(tmp_path: Path, asked: tuple[str, ...]) -> None:
    folder = tmp_path / "typo"
    refused = key(folder, *asked)
    assert refused.exit_code == 1
    assert f"there is no data folder {folder}" in refused.stderr
    assert "tinkex key create" in refused.stderr
    assert not folder.exists()
    # Nor does it make one of a folder that is something else.
    assert "no server has worked in" in key(tmp_path, *asked).stderr
    assert [*tmp_path.iterdir()] == []
    assert key(folder, "create").exit_code == 0
    assert key(folder, *asked).exit_code == 0


def test_a_database_of_a_newer_version_is_said_to_be(tmp_path: Path) -> None:
    key(tmp_path, "create")
    with contextlib.closing(sqlite3.connect(tmp_path / "tinkex.db")) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
        connection.commit()
    refused = key(tmp_path, "list")
    assert refused.exit_code == 1
    assert "made by a newer tinkex" in refused.stderr


def test_a_file_that_is_no_database_is_said_to_be(tmp_path: Path) -> None:
    (tmp_path / "tinkex.db").write_bytes(b"not a database, but long enough to be looked at" * 99)
    refused = key(tmp_path, "list")
    assert refused.exit_code == 1
    assert "not a database" in refused.stderr
    assert "tinkex doctor" in refused.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--expires", "banana"), "is not a time"),
        (("--expires", "2020-01-01"), "is over already"),
        (("--owner", " "), "--owner is empty"),
        (("--name", "x" * 201), "longer than 200"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, options: tuple[str, ...], said: str) -> None:
    refused = key(tmp_path, "create", *options)
    assert refused.exit_code == 1
    assert said in refused.stderr


def test_the_command_loads_no_torch_and_no_web_server(tmp_path: Path) -> None:
    program = (
        "import sys; from click.testing import CliRunner; from tinkex.cli.key import command; "
        f"CliRunner().invoke(command, ['create', '--data', {str(tmp_path)!r}]); "
        "print([name for name in ('torch', 'fastapi', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_a_database_that_cannot_be_opened_is_said_to_be_and_does_not_mend_itself(
    tmp_path: Path,
) -> None:
    (tmp_path / "tinkex.db").mkdir()
    refused = key(tmp_path, "create")
    assert refused.exit_code == 1
    assert "unable to open database file" in refused.stderr
    assert "writable for the server's user, and start again" in refused.stderr
