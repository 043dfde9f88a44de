"""A server that had API keys does not start without them after its database was lost."""

import asyncio
import contextlib
import logging
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from server.storage.commands import Tinkex
from server.tenants import is_private
from serving import TINY, serving, unloaded
from tinkex.server.folder_lock import open_shared_store
from tinkex.server.maintenance.backup import create, restore
from tinkex.server.maintenance.doctor import Level, examine
from tinkex.server.settings import Settings
from tinkex.server.store import DatabaseRefused, open_store
from tinkex.server.store.sql_dialects import is_wal_lost

pytestmark = pytest.mark.anyio

MARKER = "keys.made"


def start(folder: Path) -> None:
    """Open the store like a server."""
    url = f"sqlite:///{folder / 'tinkex.db'}"
    open_store(db_url=url, storage_url=str(folder), folder=folder, exclusive=True).close()


async def with_key(folder: Path) -> Path:
    """Create a key like `tinkex key create`."""
    store = open_shared_store(Settings(data=str(folder)))
    try:
        await store.keys.create(owner="local")
    finally:
        store.close()
    return folder


def deleted(folder: Path) -> None:
    for file in folder.glob("tinkex.db*"):
        file.unlink()


def cut_to_nothing(folder: Path) -> None:
    (folder / "tinkex.db").write_bytes(b"")


def of_another_server(folder: Path) -> None:
    deleted(folder)
    start(folder.with_name("other"))
    shutil.copy(folder.with_name("other") / "tinkex.db", folder / "tinkex.db")


async def test_a_stopped_server_has_no_wal(
    tiny_model: Path, tmp_path: Path, tinkex: Tinkex
) -> None:
    """Data in the WAL would be missing in a copy of the database file alone."""
    await with_key(tmp_path)
    with serving(*unloaded(tiny_model), data=tmp_path) as server:
        more = await tinkex("key", "create", "--owner", "alice", "--data", str(tmp_path))
        assert more.returncode == 0
        server.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(server.process.wait, 30) == 0
    assert not (tmp_path / "tinkex.db-wal").exists()
    copy = tmp_path / "copy.db"
    shutil.copy(tmp_path / "tinkex.db", copy)
    with contextlib.closing(sqlite3.connect(copy)) as connection:
        owners = [row[0] for row in connection.execute("SELECT owner FROM api_keys")]
    assert owners == ["local", "alice"]


async def test_the_wal_is_checkpointed_while_others_read(tmp_path: Path) -> None:
    start(tmp_path)
    with contextlib.closing(sqlite3.connect(tmp_path / "tinkex.db")) as reader:
        reader.execute("SELECT count(*) FROM api_keys").fetchall()
        start(tmp_path)
        log = tmp_path / "tinkex.db-wal"
        assert not log.exists() or log.stat().st_size == 0


@pytest.mark.parametrize("lose", [deleted, cut_to_nothing, of_another_server])
async def test_a_server_without_the_keys_it_had_does_not_start(
    tiny_model: Path, tmp_path: Path, lose: Callable[[Path], None], tinkex: Tinkex
) -> None:
    data = await with_key(tmp_path / "data")
    assert is_private(data / MARKER)
    lose(data)
    serve = ("serve", f"{TINY}={tiny_model}", "--port", "0", "--data", str(data))
    done = await tinkex(*serve)
    assert done.returncode == 1
    assert done.stdout == ""
    for words in (str(data / MARKER), "tinkex restore", "tinkex key create", "delete"):
        assert words in done.stderr
    found = examine(Settings(data=str(data)))
    (finding,) = [one for one in found if one.about == "keys"]
    assert finding.level is Level.PROBLEM
    assert MARKER in finding.text
    # With a new key it starts, and requires it.
    assert (await tinkex("key", "create", "--data", str(data))).returncode == 0
    start(data)
    lose(data)
    # Without the marker it starts without keys.
    (data / MARKER).unlink()
    start(data)


async def test_a_folder_from_before_there_was_a_marker_gets_one(tmp_path: Path) -> None:
    await with_key(tmp_path)
    (tmp_path / MARKER).unlink()
    start(tmp_path)
    assert is_private(tmp_path / MARKER)
    # A folder without keys gets none.
    start(tmp_path / "open")
    assert not (tmp_path / "open" / MARKER).exists()


async def test_a_revoked_last_key_is_a_key(tmp_path: Path, tinkex: Tinkex) -> None:
    await with_key(tmp_path)
    assert (await tinkex("key", "revoke", "1", "--data", str(tmp_path))).returncode == 0
    start(tmp_path)


async def test_a_backup_contains_the_keys_marker(tmp_path: Path) -> None:
    data, target, elsewhere = (tmp_path / name for name in ("data", "backup", "elsewhere"))
    await with_key(data)
    create(Settings(data=str(data)), target)
    restore(target, elsewhere)
    start(elsewhere)
    cut_to_nothing(elsewhere)
    with pytest.raises(DatabaseRefused, match="API keys were created for this server"):
        start(elsewhere)


def killed_in_the_midst(folder: Path) -> Path:
    """A database whose newest commits are in its WAL; returns the file."""
    start(folder)
    program = (
        "import os, sqlite3, sys; c = sqlite3.connect(sys.argv[1]); "
        "c.execute('PRAGMA journal_mode = WAL'); "
        '[(c.execute("INSERT INTO api_keys (hash, hint, owner, name, limits, created_s) '
        "VALUES (?, 'h', 'o', '', '{}', 1.0)\", (str(n),)), c.commit()) for n in range(20)]; "
        "os.kill(os.getpid(), 9)"
    )
    file = folder / "tinkex.db"
    subprocess.run([sys.executable, "-c", program, str(file)], check=False)
    assert (folder / "tinkex.db-wal").stat().st_size > 20_000
    return file


@pytest.mark.parametrize("left", [None, 0, 0.5])
def test_a_missing_or_truncated_wal_is_detected(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, left: float | None
) -> None:
    file = killed_in_the_midst(tmp_path)
    assert not is_wal_lost(file)
    log = tmp_path / "tinkex.db-wal"
    if left is None:
        log.unlink()
    else:
        log.write_bytes(log.read_bytes()[: int(log.stat().st_size * left)])
    assert is_wal_lost(file)
    caplog.set_level(logging.ERROR)
    start(tmp_path)
    assert "-wal is missing or truncated, and it contained the newest commits" in caplog.text


def test_a_complete_wal_is_not_reported_as_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    killed_in_the_midst(tmp_path)
    start(tmp_path)
    start(tmp_path)
    assert "truncated" not in caplog.text
