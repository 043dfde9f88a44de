"""`tinkex doctor` on real data folders, intact and with every kind of damage."""

import asyncio
import json
import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from postgres import Postgres
from server.echo import EchoExecutor
from server.hosting import Api, hosted
from server.storage.commands import Tinkex
from server.storage.test_damage import LARGE, overwrite_pages, snapshot, tear, trained
from server.store.old_schemas import make_older
from serving import TINY, serving, unloaded
from tinkex.server import web_process
from tinkex.server.executor import ServedModel
from tinkex.server.folder_lock import lock_database, lock_folder
from tinkex.server.maintenance.doctor import (
    PARTS,
    Finding,
    FolderState,
    Level,
    diagnose,
    examine,
    repair,
)
from tinkex.server.settings import Settings, SettingsError
from tinkex.server.store import DatabaseRefused, open_store
from tinkex.server.store.blobs import UNREADABLE, safetensors_problem
from tinkex.server.store.inspection import PAYLOAD, SNAPSHOT, DamagedItem, Inspection

pytestmark = pytest.mark.anyio


async def filled(folder: Path, **settings: Any) -> str:
    """Fill a data folder with data of every kind; returns the model."""
    async with hosted(EchoExecutor(), folder, janitor_s=0, **settings) as api:
        model = await api.model()
        await trained(api, model, 1)
        await snapshot(api, model)
        await api.passed(await api.forward_backward(model, 3, tokens=LARGE))
        await snapshot(api, model)
        await api.result(await api.step("save_weights", model_id=model, seq_id=4, path="kept"))
    return model


def problems(folder: Path, **settings: Any) -> list[Finding]:
    found = examine(Settings(data=str(folder), **settings))
    return [finding for finding in found if finding.level is Level.PROBLEM]


async def repaired(folder: Path) -> list[str]:
    """Run the repair; returns what it did."""
    return await asyncio.to_thread(repair, Settings(data=str(folder)))


def report(folder: Path) -> str:
    return "\n".join(f"{finding.about}: {finding.text}" for finding in problems(folder))


async def test_an_intact_folder_has_no_problems(tmp_path: Path) -> None:
    await filled(tmp_path)
    assert problems(tmp_path) == []
    about = {finding.about for finding in examine(Settings(data=str(tmp_path)))}
    assert about == {"folder", "disk", "database", "files", "logs"}
    assert await repaired(tmp_path) == []


async def test_all_damaged_files_are_named(tmp_path: Path) -> None:
    await filled(tmp_path)
    (payload,) = (tmp_path / "payloads").glob("*/*")
    payload.unlink()
    (result,) = (tmp_path / "results").glob("*/*")
    result.write_bytes(b"something else")
    (value,) = (tmp_path / "checkpoints").glob("*/weights/kept/*/value")
    value.write_text("9")
    (tmp_path / "tinkex.db").chmod(0o644)
    os.chmod(tmp_path, 0o755)
    said = report(tmp_path)
    assert "payload: the payload of request" in said
    assert "is missing" in said
    assert "result: the result of request" in said
    assert "checkpoint: the folder of tinker://" in said
    assert "keys: other users of this machine can read tinkex.db" in said
    assert "reserve_mb" in problems(tmp_path, reserve_mb=2.0**40)[0].advice


async def test_a_damaged_snapshot_is_repaired_and_the_model_continues(tmp_path: Path) -> None:
    model = await filled(tmp_path)
    with sqlite3.connect(tmp_path / "tinkex.db") as connection:
        (key,) = connection.execute("SELECT place FROM snapshots").fetchone()
    connection.close()
    tear(tmp_path / key)
    (finding,) = problems(tmp_path)
    assert finding.about == "snapshot"
    assert await repaired(tmp_path) == [f"moved the damaged snapshot of {model} to set-aside"]
    assert problems(tmp_path) == []
    async with hosted(EchoExecutor(), tmp_path) as api:
        assert await api.value(await api.optim_step(model, 5)) == 2 + LARGE


async def test_orphans_are_deleted_and_secrets_are_made_private(tmp_path: Path) -> None:
    model = await filled(tmp_path)
    left = [
        tmp_path / "payloads" / "ab" / ".part",
        tmp_path / "snapshots" / model / "folder" / "file",
        tmp_path / "checkpoints" / model / "weights" / "name" / "version" / "file",
    ]
    for file in left:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("left")
    (tmp_path / "tinkex.db").chmod(0o640)
    os.chmod(tmp_path, 0o750)
    assert await repaired(tmp_path) == [
        "made tinkex.db readable only by its owner",
        "deleted 3 orphaned files and folders",
    ]
    assert not any(file.exists() for file in left)
    assert (tmp_path / "tinkex.db").stat().st_mode & 0o777 == 0o600
    assert problems(tmp_path) == []


async def test_targets_of_links_are_not_orphans(tmp_path: Path) -> None:
    """The server never creates links, so it must not delete their targets."""
    data, others = tmp_path / "data", tmp_path / "others"
    await filled(data)
    (others / "deep").mkdir(parents=True)
    (others / "deep" / "file").write_text("theirs")
    (data / "payloads" / "zz").symlink_to(others)
    (data / "checkpoints" / "zz").symlink_to(others)
    (data / "snapshots" / "zz").mkdir()
    (data / "snapshots" / "zz" / "link").symlink_to(others)
    await repaired(data)
    async with hosted(EchoExecutor(), data, orphan_s=0) as api:
        await api.clean_up()
    assert (others / "deep" / "file").read_text() == "theirs"


HEADS = [
    b"[" * 100_000,
    b'{"a": {"data_offsets": [0, "x"]}}',
    b'{"a": {"data_offsets": [0]}}',
    b'{"a": {"data_offsets": [0, [1]]}}',
    b"[1]",
    b'"x"',
    b"\xff",
]


@pytest.mark.parametrize("head", HEADS, ids=[head[:30].decode(errors="replace") for head in HEADS])
def test_any_bytes_may_be_the_header_of_a_checkpoint(tmp_path: Path, head: bytes) -> None:
    file = tmp_path / "adapter_model.safetensors"
    file.write_bytes(len(head).to_bytes(8, "little") + head)
    assert "cannot be read" in str(safetensors_problem(file))


async def test_a_missing_step_of_a_log_is_found(tmp_path: Path) -> None:
    async with hosted(EchoExecutor(), tmp_path) as api:
        model = await api.model()
        await trained(api, model, 1, 3)
    with sqlite3.connect(tmp_path / "tinkex.db") as connection:
        connection.execute("DELETE FROM requests WHERE seq_id = 2")
        connection.execute("UPDATE requests SET payload = NULL WHERE seq_id = 3")
    connection.close()
    assert f"steps 2, 3 of {model} are missing" in report(tmp_path)


async def test_a_damaged_database_is_reported_and_not_changed(tmp_path: Path) -> None:
    await filled(tmp_path)
    overwrite_pages(tmp_path / "tinkex.db", "models")
    before = (tmp_path / "tinkex.db").read_bytes()
    (finding,) = problems(tmp_path)
    assert finding.about == "database"
    assert "damaged" in finding.text
    assert "tinkex restore" in finding.advice
    assert finding.repair is None
    await repaired(tmp_path)
    assert (tmp_path / "tinkex.db").read_bytes() == before


async def test_indexes_are_rebuilt(tmp_path: Path) -> None:
    await filled(tmp_path)
    # An index that misses a row, as a lost write leaves it: it is removed from the schema while the
    # row is deleted, and put back.
    name = ("ix_requests_session_id",)
    with schema(tmp_path) as connection:
        entry = connection.execute("SELECT * FROM sqlite_master WHERE name = ?", name).fetchone()
        connection.execute("DELETE FROM sqlite_master WHERE name = ?", name)
    with schema(tmp_path) as connection:
        connection.execute("DELETE FROM requests WHERE seq_id = 0")
        connection.execute("INSERT INTO sqlite_master VALUES (?, ?, ?, ?, ?)", entry)
    (finding,) = problems(tmp_path)
    assert "ix_requests_session_id" in finding.text
    assert "rebuilt the indexes of the database" in await repaired(tmp_path)
    assert problems(tmp_path) == []


@contextmanager
def schema(folder: Path) -> Iterator[sqlite3.Connection]:
    """The database, with a writable schema."""
    with closing(sqlite3.connect(folder / "tinkex.db")) as connection, connection:
        connection.execute("PRAGMA writable_schema = ON")
        yield connection


async def test_an_old_database_is_upgraded(tmp_path: Path) -> None:
    await filled(tmp_path)
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'tinkex.db'}")
    make_older(engine)
    engine.dispose()
    (finding,) = problems(tmp_path)
    assert "0008" in finding.text
    assert (await repaired(tmp_path))[0] == "upgraded the database"
    with sqlite3.connect(tmp_path / "tinkex.db") as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.close()
    (finding,) = problems(tmp_path)
    assert "newer tinkex" in finding.advice


async def test_a_database_older_than_0_1_is_left_as_it_is(tmp_path: Path) -> None:
    await filled(tmp_path)
    with sqlite3.connect(tmp_path / "tinkex.db") as connection:
        connection.execute("UPDATE alembic_version SET version_num = '0007'")
    connection.close()
    (finding,) = problems(tmp_path)
    assert "has schema version 0007" in finding.text
    assert "tinkex 0.1" in finding.advice
    assert finding.repair is None
    assert await repaired(tmp_path) == []


async def test_a_postgresql_database_is_checked_too(postgres: Postgres, tmp_path: Path) -> None:
    url = postgres.database()
    await filled(tmp_path, db=url)
    assert problems(tmp_path, db=url) == []
    (result,) = (tmp_path / "results").glob("*/*")
    result.unlink()
    (finding,) = problems(tmp_path, db=url)
    assert finding.about == "result"


async def test_it_checks_but_does_not_repair_while_a_server_runs(api: Api, tmp_path: Path) -> None:
    await api.model()
    with lock_folder(tmp_path):
        said = [finding.text for finding in examine(Settings(data=str(tmp_path)))]
        assert f"a server (process {os.getpid()}) is using it" in said
        with pytest.raises(SettingsError, match=f"process {os.getpid()}"):
            await repaired(tmp_path)
    # Nor while a server with another folder uses the database.
    (tmp_path / "payloads" / "ab").mkdir(parents=True)
    (tmp_path / "payloads" / "ab" / "left").write_text("behind")
    with (
        lock_database(Settings(data=str(tmp_path))),
        pytest.raises(SettingsError, match="holds the database"),
    ):
        await repaired(tmp_path)


async def test_the_command_prints_a_table_or_json(tmp_path: Path, tinkex: Tinkex) -> None:
    await filled(tmp_path)
    done = await tinkex("doctor", "--data", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "no step of any model is missing" in done.stdout
    (result,) = (tmp_path / "results").glob("*/*")
    result.unlink()
    done = await tinkex("doctor", "--data", str(tmp_path), "--format", "json")
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert found["sound"] is False
    (problem,) = [one for one in found["findings"] if one["level"] == "problem"]
    assert problem["about"] == "result"


def below(folder: Path) -> list[Path]:
    """The files of a folder, except those of the database."""
    return sorted(
        file
        for file in folder.rglob("*")
        if file.is_file() and file.name[:9] not in ("tinkex.db", "server.lo")
    )


async def test_files_of_another_database_are_not_orphans(tmp_path: Path) -> None:
    await filled(tmp_path)
    before = below(tmp_path)
    # The database is lost, and the next command creates a new one.
    (tmp_path / "tinkex.db").unlink()
    (tmp_path / "tinkex.db").touch()
    assert "it is empty" in report(tmp_path)
    assert "restore" in problems(tmp_path)[0].advice
    assert await repaired(tmp_path) == []
    url = f"sqlite:///{tmp_path / 'tinkex.db'}"
    stores = {"db_url": url, "storage_url": str(tmp_path), "folder": tmp_path}
    store = open_store(**stores)
    await store.retention.delete_orphans(before_s=float("inf"))
    store.close()
    assert "it has none of their sessions" in report(tmp_path)
    assert await repaired(tmp_path) == []
    # A server would tell its clients that their models do not exist.
    with pytest.raises(DatabaseRefused, match=r"another database, or .* lost.*--db"):
        open_store(**stores, exclusive=True)
    assert below(tmp_path) == before


async def test_files_newer_than_the_database_stay(tmp_path: Path) -> None:
    data = tmp_path / "data"
    await filled(data)
    (data / "tinkex.db").rename(tmp_path / "older.db")
    shutil.rmtree(data / "payloads")
    later = tmp_path / "later"
    model = await filled(later)
    shutil.copytree(later / "checkpoints", data / "checkpoints", dirs_exist_ok=True)
    (tmp_path / "older.db").rename(data / "tinkex.db")
    lost = data / "checkpoints" / model / "weights" / "kept"
    assert (
        f"1 sessions have checkpoints or snapshots here and are not in the database: {model[:22]}"
        in report(data)
    )
    async with hosted(EchoExecutor(), data, orphan_s=0) as api:
        await api.clean_up()
    assert [*lost.glob("*/value")]


async def test_a_folder_in_place_of_a_file_is_reported(tmp_path: Path) -> None:
    await filled(tmp_path)
    (payload,) = (tmp_path / "payloads").glob("*/*")
    payload.unlink()
    payload.mkdir()
    (folder,) = (tmp_path / "checkpoints").glob("*/weights/kept/*")
    (folder / "more").mkdir()
    said = report(tmp_path)
    assert "payload: the payload of request" in said
    assert "is not a file (Is a directory)" in said
    assert f"{folder.name}/more is not a file" in said


async def test_a_folder_that_is_not_a_data_folder_is_not_changed(tmp_path: Path) -> None:
    assert await repaired(tmp_path / "typo") == []
    assert await repaired(tmp_path) == []
    assert below(tmp_path) == []


@pytest.fixture
def weak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes permission bits count, also when root runs the tests."""
    plain = os.access

    def access(path: Any, mode: int) -> bool:
        bits = os.stat(path).st_mode >> 6
        return plain(path, mode) and mode & bits == mode

    monkeypatch.setattr(os, "access", access)


async def test_every_part_of_a_data_folder_is_known(tiny_model: Path, tmp_path: Path) -> None:
    await filled(tmp_path)
    with serving(*unloaded(tiny_model), data=tmp_path):
        found = set(os.listdir(tmp_path))
    served = ServedModel(name=TINY, folder=tiny_model)
    settings = Settings(data=str(tmp_path))
    engine = web_process.engine_settings(settings, served, shares_device=True)
    for path in (engine.spill_folder, engine.compute_lock):
        assert path is not None
        found.add(path.relative_to(tmp_path).parts[0])
    assert found >= {"tinkex.db", "server.lock", "running", "isolated"}
    assert found <= set(PARTS)


@pytest.mark.usefixtures("weak")
async def test_inaccessible_parts_are_named(tmp_path: Path) -> None:
    await filled(tmp_path)
    (tmp_path / "payloads").chmod(0o500)
    (tmp_path / "tinkex.db").chmod(0o400)
    found = {finding.about: finding for finding in problems(tmp_path)}
    assert "tinkex.db (owned by " in found["permissions"].text
    assert "payloads (owned by " in found["permissions"].text
    assert "results" not in found["permissions"].text
    assert "user that runs the server" in found["permissions"].advice
    os.chmod(tmp_path, 0o500)
    (finding,) = [one for one in problems(tmp_path) if one.about == "folder"]
    assert "cannot be read and written by this user" in finding.text


def test_an_unreadable_file_may_be_intact() -> None:
    """Only reading failed: nothing is set aside, and no backup is needed."""
    state = FolderState(
        folder=Path("/data"),
        exists=True,
        writable=True,
        free_bytes=2**40,
        holder=None,
        open_secrets=(),
    )
    damaged = [
        DamagedItem(what=what, name="x", key="p", problem=f"{UNREADABLE}: Permission denied (p)")
        for what in (PAYLOAD, SNAPSHOT)
    ]
    facts = Inspection(
        version="1",
        newest_version="1",
        damaged=tuple(damaged),
        has_fallback=frozenset({"x"}),
    )
    said = [one for one in diagnose(state, facts, reserve_mb=1) if one.about in (PAYLOAD, SNAPSHOT)]
    assert len(said) == 2
    for finding in said:
        assert "make it readable" in finding.advice
        assert finding.repair is None


async def test_a_lost_wal_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    await filled(tmp_path)
    # A killed server leaves a WAL index; the WAL is lost.
    (tmp_path / "tinkex.db-shm").write_bytes(bytes(32768))
    assert "the file with its newest commits is missing" in report(tmp_path)
    (tmp_path / "tinkex.db-shm").write_bytes(bytes(32768))
    url = f"sqlite:///{tmp_path / 'tinkex.db'}"
    stores = {"db_url": url, "storage_url": str(tmp_path), "folder": tmp_path}
    open_store(**stores, exclusive=True).close()
    assert "tinkex.db-wal is missing" in caplog.text
    # A store that was closed leaves neither.
    assert problems(tmp_path) == []
    caplog.clear()
    open_store(**stores, exclusive=True).close()
    assert caplog.text == ""


def test_disk_problems_are_not_reported_as_database_problems() -> None:
    state = FolderState(
        folder=Path("/data"),
        exists=True,
        writable=False,
        read_only=True,
        free_bytes=0,
        holder=None,
        open_secrets=(),
    )
    found = [*diagnose(state, Inspection(refused="disk I/O error"), reserve_mb=64)]
    assert [one.about for one in found] == ["folder", "disk", "database"]
    assert "mounted read-only" in found[0].text
    assert "on a full disk" in found[2].text
    assert "Free some space first" in found[2].advice
