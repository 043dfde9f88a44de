"""The data of a server moves to PostgreSQL and an object store, and back."""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import sqlalchemy as sa

from object_store import BUCKET, ObjectStore, object_store
from postgres import Postgres
from server.echo import EchoExecutor
from server.hosting import hosted
from server.storage.commands import Tinkex
from server.storage.test_doctor import filled
from server.tenants import new_key, secrets_in, with_key
from tinkex.server.folder_lock import lock_folder
from tinkex.server.maintenance.backup import BackupFailed
from tinkex.server.maintenance.doctor import Level, examine
from tinkex.server.maintenance.move_data import move_data
from tinkex.server.settings import Settings, SettingsError
from tinkex.server.store import DatabaseRefused, Store, open_store, row_copy
from tinkex.server.store.blobs import Files

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def running() -> Iterator[ObjectStore]:
    with object_store() as store:
        yield store


@pytest.fixture
def away(
    running: ObjectStore, postgres: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, str]:
    """An empty database and an empty part of an object store."""
    for name, value in running.environment.items():
        monkeypatch.setenv(name, value)
    return {"db": postgres.database(), "storage": f"s3://{BUCKET}/{tmp_path.name}"}


def problems(folder: Path, **settings: str) -> list[str]:
    found = examine(Settings(data=str(folder), **settings))
    return [finding.text for finding in found if finding.level is Level.PROBLEM]


async def test_a_run_goes_on_after_each_move(
    tmp_path: Path, away: dict[str, str], tinkex: Tinkex
) -> None:
    data = tmp_path / "data"
    model = await filled(data)
    key = await new_key(data, "local")
    there = await tinkex(
        *("-f", "json", "move-data", "--data", str(data)),
        *("--db", away["db"], "--storage", away["storage"]),
    )
    assert there.returncode == 0, there.stderr
    moved = json.loads(there.stdout)
    # A payload, a result, two snapshots and a checkpoint; and nothing was there.
    assert moved["files"] >= 5
    assert (moved["present"], moved["missing"]) == (0, [])
    # Another machine has another data folder.
    elsewhere = tmp_path / "elsewhere"
    async with (
        hosted(EchoExecutor(), elsewhere, **away) as api,
        with_key(api, key) as mine,
    ):
        value = await mine.value(await mine.optim_step(model, 5))
        body = {"model_id": model, "seq_id": 6, "path": "more"}
        await mine.result((await mine.post("save_weights", body)).json["request_id"])
        assert (await api.get("/api/v1/sessions")).status == 401
    assert Files(away["storage"]).exists("keys.made")
    assert problems(elsewhere, **away) == []
    # And back, to the folder of that machine.
    source = Settings(data=str(elsewhere), **away)
    back = move_data(source, Settings(data=str(elsewhere)))
    assert back.missing == ()
    async with hosted(EchoExecutor(), elsewhere) as api, with_key(api, key) as mine:
        assert await mine.value(await mine.optim_step(model, 7)) == 2 * value
        body = {"model_id": model, "seq_id": 8, "path": f"tinker://{model}/weights/more"}
        await mine.result((await mine.post("load_weights", body)).json["request_id"])
        # New rows do not take the numbers of copied ones.
        assert await new_key(elsewhere, "bob")
    assert problems(elsewhere) == []


class Interrupted(Exception):
    pass


async def test_an_interrupted_move_goes_on_where_it_was(tmp_path: Path, postgres: Postgres) -> None:
    data, files = tmp_path / "data", tmp_path / "files"
    await filled(data)
    source = Settings(data=str(data))
    target = Settings(data=str(data), db=postgres.database(), storage=str(files))

    def interrupt(done: int, _all: int) -> None:
        if done == 3:
            raise Interrupted

    with pytest.raises(Interrupted):
        move_data(source, target, progress=interrupt)
    # One of the copies was damaged since.
    copied = sorted(file for file in files.rglob("*") if file.is_file())
    copied[0].write_bytes(b"something else")
    again = move_data(source, target)
    assert again.missing == ()
    assert 1 <= again.present <= 2
    assert move_data(source, target).present == again.files
    assert problems(data, db=target.db, storage=target.storage) == []


async def test_what_the_source_does_not_have_is_named(tmp_path: Path) -> None:
    data = tmp_path / "data"
    await filled(data)
    (checkpoint,) = (data / "checkpoints").glob("*/weights/kept/*")
    shutil.rmtree(checkpoint)
    moved = move_data(
        Settings(data=str(data)), Settings(data=str(data), storage=str(tmp_path / "f"))
    )
    (missing,) = moved.missing
    assert "is missing" in missing
    assert "kept" in missing
    assert moved.rows == 0


async def test_a_move_that_makes_no_sense_is_refused(
    tmp_path: Path, postgres: Postgres, tinkex: Tinkex
) -> None:
    data, url = tmp_path / "data", postgres.database()
    await filled(data)
    source = Settings(data=str(data))
    with pytest.raises(BackupFailed, match="are the same"):
        move_data(source, source)
    with pytest.raises(BackupFailed, match="does not exist"):
        move_data(Settings(data=str(tmp_path / "typo")), Settings(data=str(data)))
    await filled(tmp_path / "other", db=url)
    with pytest.raises(BackupFailed, match=r"has rows in .*sessions.* source does not have"):
        move_data(source, Settings(data=str(data), db=url))
    async with hosted(EchoExecutor(), data):
        pass
    done = await tinkex("move-data", "--data", str(data))
    assert done.returncode == 1
    assert "Name another database with --db" in done.stderr


@dataclass(frozen=True)
class Pair:
    """A data folder, and the database to which it was moved."""

    source: Settings
    target: Settings
    model: str
    key_id: int

    def open_target(self) -> Store:
        settings = self.target
        return open_store(
            db_url=settings.db_url,
            storage_url=settings.storage_url,
            folder=settings.folder,
            exclusive=True,
        )

    def values(self, statement: str) -> list[object]:
        engine = sa.create_engine(self.target.db_url)
        with engine.connect() as connection:
            found = list(connection.exec_driver_sql(statement).scalars())
        engine.dispose()
        return found


@pytest.fixture
async def moved(tmp_path: Path, postgres: Postgres) -> Pair:
    data = tmp_path / "data"
    async with hosted(EchoExecutor(), data, janitor_s=0) as api:
        model = await api.model()
    await new_key(data, "local")
    store = open_store(db_url=f"sqlite:///{data}/tinkex.db", storage_url=str(data), folder=data)
    (key,) = await store.keys.all()
    store.close()
    source = Settings(data=str(data))
    target = Settings(data=str(data), db=postgres.database())
    move_data(source, target)
    return Pair(source, target, model, key.key_id)


async def test_a_target_that_was_used_since_keeps_its_newer_data(
    moved: Pair, tinkex: Tinkex
) -> None:
    store = moved.open_target()
    await store.keys.revoke(moved.key_id)
    key = await store.keys.create(owner="local")
    store.close()
    folder = moved.target.folder
    async with (
        hosted(EchoExecutor(), folder, db=moved.target.db) as api,
        with_key(api, key[1]) as mine,
    ):
        await mine.value(await mine.optim_step(moved.model, 1))
    rows = "SELECT request_id || status FROM requests ORDER BY 1"
    before = moved.values(rows)
    done = await tinkex("move-data", "--data", str(folder), "--db", moved.target.db)
    assert done.returncode == 1
    assert re.search("it has rows in .*requests.* that the source does not have", done.stderr)
    assert "use an empty database" in done.stderr
    assert moved.values(rows) == before
    assert moved.values(f"SELECT revoked_s FROM api_keys WHERE key_id = {moved.key_id}") != [None]
    # The way back into the original folder: the old database is in the way until it is renamed.
    with pytest.raises(BackupFailed, match="that the source does not have"):
        move_data(moved.target, moved.source)
    (folder / "tinkex.db").rename(folder / "tinkex.db.old")
    assert move_data(moved.target, moved.source).missing == ()
    async with hosted(EchoExecutor(), folder) as api, with_key(api, key[1]) as mine:
        await mine.value(await mine.optim_step(moved.model, 2))


async def test_a_row_that_was_changed_in_the_target_stays(moved: Pair) -> None:
    engine = sa.create_engine(moved.target.db_url)
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE api_keys SET revoked_s = 1")
    engine.dispose()
    with pytest.raises(BackupFailed, match="it has rows in api_keys that the source"):
        move_data(moved.source, moved.target)
    assert moved.values("SELECT revoked_s FROM api_keys") == [1]


async def test_a_copy_of_some_rows_is_completed(
    tmp_path: Path, postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    await filled(data)
    source = Settings(data=str(data))
    target = Settings(data=str(data), db=postgres.database())
    # A server that only started on the target made secrets of its own.
    elsewhere = tmp_path / "elsewhere"
    open_store(
        db_url=target.db, storage_url=str(elsewhere), folder=elsewhere, exclusive=True
    ).close()
    numbered = row_copy._set_sequence

    def fail(connection: sa.Connection, table: sa.Table) -> None:
        if table.name == "requests":
            raise Interrupted
        numbered(connection, table)

    monkeypatch.setattr(row_copy, "_set_sequence", fail)
    with pytest.raises(Interrupted):
        move_data(source, target)
    monkeypatch.setattr(row_copy, "_set_sequence", numbered)
    assert move_data(source, target).rows > 0
    store = open_store(db_url=target.db, storage_url=str(data), folder=data, exclusive=True)
    store.close()
    assert store.secrets == secrets_in(data)


async def test_data_that_a_server_uses_is_not_moved(tmp_path: Path, postgres: Postgres) -> None:
    data, url = tmp_path / "data", postgres.database()
    await filled(data)
    source, target = Settings(data=str(data)), Settings(data=str(data), db=url)
    with lock_folder(data), pytest.raises(SettingsError, match="data folder"):
        move_data(source, target)
    other = tmp_path / "other"
    held = open_store(db_url=url, storage_url=str(other), folder=other, exclusive=True)
    with pytest.raises(DatabaseRefused, match="another server"):
        move_data(source, target)
    held.close()


@pytest.mark.parametrize("name", ["./data/", "link", "file://{}/data"])
async def test_another_name_of_the_same_storage_deletes_nothing(
    tmp_path: Path, postgres: Postgres, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    data = tmp_path / "data"
    await filled(data)
    (tmp_path / "link").symlink_to(data)
    (value,) = (data / "checkpoints").glob("*/weights/kept/*/value")
    value.write_text("9")  # damaged, and the only copy
    monkeypatch.chdir(tmp_path)
    source, storage = Settings(data=str(data)), name.format(tmp_path)
    moved = move_data(source, Settings(data=str(data), db=postgres.database(), storage=storage))
    assert (moved.files, moved.rows > 0) == (0, True)
    assert value.read_text() == "9"
    with pytest.raises(BackupFailed, match="are the same"):
        move_data(source, Settings(data=str(data), db="sqlite:///data/tinkex.db", storage=storage))


async def test_what_is_damaged_on_both_sides_stays_in_the_target(tmp_path: Path) -> None:
    data, files = tmp_path / "data", tmp_path / "files"
    await filled(data)
    source, target = Settings(data=str(data)), Settings(data=str(data), storage=str(files))
    move_data(source, target)
    for root in (data, files):
        (value,) = (root / "checkpoints").glob("*/weights/kept/*/value")
        value.write_text("9")
    assert len(move_data(source, target).missing) == 1
    assert value.read_text() == "9"
