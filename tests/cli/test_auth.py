"""`tinkex auth`, against a real server with keys (§17, §19.12, §19.21)."""

import asyncio
import json
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from server.echo import EchoExecutor
from server.hosting import hosted
from server.tenants import new_key
from tinkex.cli.command_group import command
from tinkex.client.auth.credentials import ApiKey
from tinkex.client.auth.key_store import StoredKey, StoredKeys, default_path, read, write

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


class Shell:
    """Runs `tinkex auth ...` with a separate home folder."""

    def __init__(self, url: str, home: Path) -> None:
        self.url = url
        self.home = home

    async def __call__(self, *args: str, stdin: str = "", **env: str) -> Result:
        return await asyncio.to_thread(self.run, *args, stdin=stdin, **env)

    def run(self, *args: str, stdin: str = "", **env: str) -> Result:
        blank = dict.fromkeys(("TINKER_API_KEY", "TINKEX_API_KEY", "TINKEX_BASE_URL"))
        mine = {"HOME": str(self.home), "TINKER_BASE_URL": self.url}
        return CliRunner().invoke(
            command, args, input=stdin, env={**blank, **mine, "TINKEX_FIRST_CONTACT_S": "1", **env}
        )

    @property
    def stored(self) -> StoredKeys:
        return read(default_path(self.home))


@pytest.fixture
async def shell(anyio_backend: str, tmp_path: Path) -> AsyncIterator[Shell]:
    async with hosted(EchoExecutor(), tmp_path / "data", jwt=True) as api:
        yield Shell(str(api.http._base_url).rstrip("/"), tmp_path / "home")


async def a_key(tmp_path: Path, **options: Any) -> str:
    return await new_key(tmp_path / "data", "alice", name="laptop", **options)


async def test_login_checks_stores_and_is_used_and_logout_forgets(
    shell: Shell, tmp_path: Path
) -> None:
    key = await a_key(tmp_path, project_id="vision")
    before = await shell("auth", "status")
    assert before.exit_code == 1
    assert "Service accessible: no" in before.stdout
    logged_in = await shell("auth", "login", stdin=f"{key}\n")
    assert logged_in.exit_code == 0, logged_in.output
    assert "Stored key laptop of alice" in logged_in.stdout
    assert stat.S_IMODE(default_path(shell.home).stat().st_mode) == 0o600
    status = await shell("auth", "status")
    assert status.stdout == "Credentials available: yes\nService accessible: yes\n"
    assert status.exit_code == 0
    who = json.loads((await shell("--format", "json", "auth", "whoami")).stdout)
    assert who == {
        "email": "alice",
        "user": "tml:user:alice",
        "organization": "vision",
        "organization_id": "vision",
    }
    again = await shell("auth", "login", stdin=f"{key}\n")
    assert again.exit_code == 1
    assert "already stored: laptop of alice" in again.stderr
    logged_out = await shell("--format", "json", "auth", "logout")
    assert json.loads(logged_out.stdout)["deleted_on_service"] is False
    assert "still works" in logged_out.stderr
    assert shell.stored == StoredKeys()
    assert (await shell("auth", "logout")).exit_code == 1
    for done in (before, logged_in, status, again, logged_out):
        assert key not in done.output + done.stderr


async def test_a_key_made_for_this_machine_is_deleted_on_the_service(
    shell: Shell, tmp_path: Path
) -> None:
    key = await a_key(tmp_path)

    def store() -> None:
        entry = StoredKey(key=ApiKey(key), type="generated", name="g", base_url=shell.url)
        write(default_path(shell.home), StoredKeys().with_key("1", entry).with_default("1"))

    shell.home.mkdir()
    store()
    out = await shell("-f", "json", "auth", "logout")
    assert json.loads(out.stdout) == {
        "base_url": shell.url,
        "removed": "g",
        "deleted_on_service": True,
    }
    assert out.exit_code == 0
    store()  # simulates a key that another machine has deleted on the service
    failed = await shell("auth", "logout")
    assert failed.exit_code == 1
    assert "could not be deleted on the service" in failed.stderr
    assert shell.stored == StoredKeys()


async def test_a_login_with_a_wrong_key_stores_nothing(shell: Shell, tmp_path: Path) -> None:
    await a_key(tmp_path)
    for key, words in (
        ("tml-of-another-server", "not known on this server"),
        ("sk-hidden", "must start with 'tml-'"),
        ("", "is empty"),
    ):
        refused = await shell("auth", "login", stdin=f"{key}\n")
        assert refused.exit_code == 1
        assert words in refused.stderr
        assert "hidden" not in refused.stderr
    assert not default_path(shell.home).exists()


async def test_another_services_default_stays_and_both_keys_are_used_where_they_belong(
    shell: Shell, tmp_path: Path
) -> None:
    key = await a_key(tmp_path)
    shell.home.mkdir()
    write(
        default_path(shell.home),
        StoredKeys().with_key("5", StoredKey(key=ApiKey("tml-hosted"), name="h")).with_default("5"),
    )
    assert (await shell("auth", "login", stdin=key)).exit_code == 0
    assert shell.stored.default == "5"
    assert (await shell("auth", "status")).exit_code == 0


async def test_a_server_without_keys_needs_no_login(shell: Shell) -> None:
    done = await shell("auth", "login", stdin="tml-anything\n")
    assert done.exit_code == 1
    assert "does not use keys" in done.stderr
    assert (await shell("auth", "status")).exit_code == 0
    assert "local" in (await shell("auth", "whoami")).stdout


def test_defect_12_a_missing_key_is_reported_as_that(tmp_path: Path) -> None:
    shell = Shell("https://service.invalid", tmp_path)
    for args in (("auth", "whoami"), ("run", "list")):
        done = shell.run(*args)
        assert done.exit_code == 1
        assert "No API key for https://service.invalid" in done.stderr
        assert "reached" not in done.stderr
    status = shell.run("auth", "status", "-f", "json")
    assert status.exit_code == 1
    shown = json.loads(status.stdout)
    assert (shown["credentials_available"], shown["service_accessible"]) == (False, False)
    assert "TINKER_API_KEY" in shown["problem"]


def test_an_unreachable_service_is_reported_soon(tmp_path: Path) -> None:
    done = Shell("http://127.0.0.1:9", tmp_path).run("auth", "status")
    assert done.exit_code == 1
    assert "Credentials available: yes" in done.stdout
    assert "Check that the server runs" in done.stderr
