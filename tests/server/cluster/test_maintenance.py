"""`tinkex doctor`, `backup` and `key` on a cluster: they do what they can, or say what does."""

import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from server.cluster_parts import a_web, a_worker
from server.echo import EchoExecutor
from server.storage.commands import Tinkex, commands
from tinkex.server.store.blobs import Files

pytestmark = pytest.mark.anyio

LARGE = 20_000


class Tool:
    """`tinkex` on a machine that has no data folder, only the addresses of the cluster."""

    def __init__(self, db: str, folder: Path, tinkex: Tinkex) -> None:
        self._tinkex = tinkex
        self.shared = ("--db", db, "--storage", str(folder / "storage"))
        self.files = Files(str(folder / "storage"))
        self._home = ("--data", str(folder / "elsewhere"))

    async def run(self, *command: str, storage: bool = True) -> Any:
        shared = self.shared if storage else self.shared[:2]
        return await self._tinkex(*command, *shared, *self._home)


@pytest.fixture
def tool(db: str, tmp_path: Path) -> Iterator[Tool]:
    with commands(tmp_path) as tinkex:
        yield Tool(db, tmp_path, tinkex)


@contextlib.asynccontextmanager
async def running(db: str, folder: Path) -> AsyncIterator[Any]:
    async with a_worker(db, folder, "one", EchoExecutor()), a_web(db, folder) as web:
        yield web


async def test_the_doctor_repairs_only_what_nobody_uses(
    db: str, tmp_path: Path, tool: Tool
) -> None:
    async with running(db, tmp_path) as web:
        model = await web.model()
        await web.passed(await web.forward_backward(model, 1, tokens=LARGE))
        # The payload of a request whose row is not committed yet.
        early = tool.files.put("payloads", b"early")
        found = await tool.run("doctor")
        assert found.returncode == 0, found.stdout + found.stderr
        assert "tinkex w" in found.stdout
        assert "files and folders are intact" in found.stdout
        assert "orphans" not in found.stdout.replace("as orphans", "")
        refused = await tool.run("doctor", "--repair")
        assert refused.returncode != 0
        assert "nothing was repaired: another server (tinkex w" in refused.stderr
        assert tool.files.exists(early)
    repaired = await tool.run("doctor", "--repair")
    assert repaired.returncode == 0, repaired.stdout + repaired.stderr
    assert "deleted 1 orphaned" in repaired.stderr
    assert not tool.files.exists(early)


async def test_a_backup_is_made_with_the_tools_of_the_database(tool: Tool, tmp_path: Path) -> None:
    refused = await tool.run("backup", str(tmp_path / "copy"))
    assert refused.returncode != 0
    assert "pg_dump" in refused.stderr
    assert not (tmp_path / "copy").exists()


async def test_keys_are_made_and_revoked_while_the_cluster_runs(
    db: str, tmp_path: Path, tool: Tool
) -> None:
    async with running(db, tmp_path) as web:
        body = {"tags": [], "user_metadata": {}, "sdk_version": "0.36.0"}
        made = await tool.run("key", "create", "--owner", "alice", storage=False)
        secret = made.stdout.strip()
        assert secret, made.stderr

        async def status(**headers: str) -> int:
            answer = await web.post("create_session", body, headers=headers)
            return int(answer.status)

        async def until(wanted: int, **headers: str) -> None:
            end_s = time.monotonic() + 20
            while await status(**headers) != wanted:
                assert time.monotonic() < end_s

        await until(401)
        await until(200, **{"X-API-Key": secret})
        listed = await tool.run("key", "list", storage=False)
        assert "alice" in listed.stdout
        await tool.run("key", "revoke", "1", storage=False)
        await until(401, **{"X-API-Key": secret})
