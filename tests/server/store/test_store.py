"""The store: durable commits, idempotent requests, and group commit."""

import asyncio
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy import event

from server.stored_requests import is_new, unfinished
from tinkex.server.queued_request import Kind, Outcome, QueuedRequest
from tinkex.server.store import Model, Store, open_store
from tinkex.server.store.database import Database
from tinkex.server.store.group_commit import Writer
from tinkex.server.store.schema import requests

pytestmark = pytest.mark.anyio


def opened(folder: Path) -> Store:
    return open_store(
        db_url=f"sqlite:///{folder / 'tinkex.db'}", storage_url=str(folder), folder=folder
    )


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    store = opened(tmp_path)
    yield store
    store.close()


async def a_model(store: Store) -> str:
    session = await store.sessions.create_session(
        owner="local",
        sdk_version=None,
        tags=[],
        user_metadata={},
        project_id=None,
        display_name=None,
        idempotency_key=None,
    )
    model = Model(
        model_id=f"{session.session_id}:train:0",
        owner="local",
        session_id=session.session_id,
        base_model="b",
        lora_config={},
        optimizer_config={},
        user_metadata=None,
        created_s=0.0,
    )
    await store.models.create_model(
        model=model, model_seq_id=0, request=step(model.model_id, 0, Kind.CREATE_MODEL)
    )
    return model.model_id


def step(
    model_id: str, seq_id: int, kind: Kind = Kind.OPTIM_STEP, payload: bytes = b"{}"
) -> QueuedRequest:
    return QueuedRequest(
        owner="local",
        kind=kind,
        base_model="b",
        payload=payload,
        model_id=model_id,
        seq_id=seq_id,
    )


async def test_accepted_requests_survive_a_restart(tmp_path: Path) -> None:
    store = opened(tmp_path)
    model = await a_model(store)
    large = b"x" * 100_000
    small = await store.requests.accept(step(model, 1))
    big = await store.requests.accept(step(model, 2, payload=large))
    store.close()
    store = opened(tmp_path)
    waiting = await unfinished(store)
    assert [row.request_id for row in waiting][1:] == [small.request_id, big.request_id]
    assert await store.requests.payload(small.request_id) == b"{}"
    file = await store.requests.payload(big.request_id)
    assert isinstance(file, Path)
    assert file.read_bytes() == large
    store.close()


async def test_a_single_write_is_one_statement_and_is_not_delayed(store: Store) -> None:
    model = await a_model(store)
    statements: list[str] = []

    def asks(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        statements.append(statement.split()[0])

    event.listen(store._database._writing, "before_cursor_execute", asks)
    accepted = await store.requests.accept(step(model, 1, Kind.SAVE_WEIGHTS))
    await store.requests.finish_one(accepted, Outcome(result=b"{}"))
    assert statements == ["BEGIN", "INSERT", "BEGIN", "UPDATE"]
    for number, kind in enumerate((Kind.FORWARD_BACKWARD, Kind.OPTIM_STEP) * 2, 2):
        statements.clear()
        accepted = await store.requests.accept(step(model, number, kind))
        await store.requests.finish_one(accepted, Outcome(result=b"{}"))
        # Its metrics are one more; the first one reads which step the run has come to.
        reads = ["SELECT"] if number == 2 else []
        assert statements == ["BEGIN", "INSERT", "BEGIN", "UPDATE", *reads, "INSERT"]


async def check_repeats_and_invalid_requests(store: Store) -> None:
    """In one group; on every database."""
    model = await a_model(store)
    known = await store.requests.accept(step(model, 1))
    new = [step(model, 1), step(model, 2), step(model, 2), step("nobody:train:0", 1)]
    again, first, second, orphan = await asyncio.gather(
        *(store.requests.accept(one) for one in new), return_exceptions=True
    )
    assert isinstance(again, QueuedRequest)
    assert again.request_id == known.request_id
    assert isinstance(second, QueuedRequest)
    assert first is new[1]
    assert first.request_id == second.request_id
    assert isinstance(orphan, sa.exc.IntegrityError)


async def test_repeats_and_invalid_requests_in_one_group(store: Store) -> None:
    await check_repeats_and_invalid_requests(store)


async def test_a_commit_flushes_to_disk(tmp_path: Path, store: Store) -> None:
    """The SQLite settings for durable commits."""
    database = Database(f"sqlite:///{tmp_path / 'tinkex.db'}")
    found = {}
    for name in ("journal_mode", "synchronous", "foreign_keys"):
        statement = sa.text(f"PRAGMA {name}")
        found[name] = await database.write(
            lambda connection, statement=statement: connection.scalar(statement)
        )
    database.close()
    assert found == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1}


def test_a_process_killed_after_its_response_has_lost_nothing(tmp_path: Path) -> None:
    program = """
import asyncio, os, signal, sys
sys.path[:0] = ["tests", "tests"]
from pathlib import Path
from server.store.test_store import a_model, opened, step

async def main():
    store = opened(Path(sys.argv[1]))
    model = await a_model(store)
    for seq_id in range(1, 6):
        await store.requests.accept(step(model, seq_id))
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=root, check=False)
    assert done.returncode == -9
    with sqlite3.connect(tmp_path / "tinkex.db") as connection:
        rows = connection.execute("SELECT seq_id, status FROM requests ORDER BY seq_id").fetchall()
    connection.close()
    assert rows == [(seq_id, "waiting") for seq_id in range(6)]


async def test_many_writes_share_few_commits(store: Store) -> None:
    model = await a_model(store)
    before = store.commits
    accepted = await asyncio.gather(
        *(store.requests.accept(step(model, seq_id)) for seq_id in range(1, 201))
    )
    assert len({one.request_id for one in accepted}) == 200
    assert store.commits - before < 50


async def test_a_repeat_returns_the_first_request(store: Store) -> None:
    model = await a_model(store)
    new = [step(model, 1 + number % 5) for number in range(50)]
    accepted = await asyncio.gather(*(store.requests.accept(one) for one in new))
    assert len({one.request_id for one in accepted}) == 5
    assert sum(first is one for first, one in zip(accepted, new, strict=True)) == 5


async def test_the_database_itself_refuses_a_second_step_of_one_number(store: Store) -> None:
    model = await a_model(store)
    await store.requests.accept(step(model, 1))
    row = {
        "request_id": "another",
        "owner": "local",
        "kind": "optim_step",
        "status": "waiting",
        "base_model": "b",
        "sequences": 0,
        "created_s": 0.0,
        "model_id": model,
        "seq_id": 1,
    }
    with pytest.raises(sa.exc.IntegrityError):
        await store._database.write(lambda connection: connection.execute(requests.insert(), row))
    # The writer continues.
    assert await is_new(store, step(model, 2))


async def test_one_bad_write_undoes_only_itself(tmp_path: Path) -> None:
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'x.db'}")
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE t (n INTEGER)")
    writer = Writer(engine)

    def write(number: int) -> asyncio.Future[None]:
        def act(connection: sa.Connection) -> None:
            connection.exec_driver_sql("INSERT INTO t VALUES (?)", (number,))
            if number == 3:
                raise ValueError("three")

        return writer.submit(act)

    outcomes = await asyncio.gather(*(write(n) for n in range(6)), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes].count(ValueError) == 1
    writer.close()
    with engine.connect() as connection:
        rows = connection.exec_driver_sql("SELECT n FROM t ORDER BY n").scalars().all()
    engine.dispose()
    assert rows == [0, 1, 2, 4, 5]


async def test_deferred_writes_are_written_at_close(tmp_path: Path) -> None:
    store = opened(tmp_path)
    model = await a_model(store)
    first = await store.requests.accept(step(model, 1))
    await store.requests.finish_one(first, Outcome(result=b"{}"))
    store.requests.mark_fetched(first.request_id)
    store.close()
    with sqlite3.connect(tmp_path / "tinkex.db") as connection:
        rows = connection.execute("SELECT fetched_s FROM requests WHERE seq_id = 1").fetchall()
    connection.close()
    assert rows[0][0] is not None


async def test_a_finished_request_does_not_change(store: Store) -> None:
    model = await a_model(store)
    first = await store.requests.accept(step(model, 1))
    await store.requests.finish_one(first, Outcome(result=b"one"))
    await store.requests.finish_one(first, Outcome(result=b"two"))
    await store.requests.finish_one(first, Outcome(error="three", category="server"))
    row = await store.requests.get(first.request_id)
    assert row is not None
    assert row.outcome is not None
    assert row.outcome.error is None
    assert await store.requests.result(first.request_id) == b"one"
