"""PostgreSQL: one server per database, durable commits, and recovery from lost connections."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy import event

from postgres import Postgres
from server.store.test_store import a_model, check_repeats_and_invalid_requests, step
from server.stored_requests import is_new, unfinished
from tinkex.server.queued_request import Kind, Outcome
from tinkex.server.store import (
    DatabaseRefused,
    StorageError,
    Store,
    group_commit,
    open_store,
    sql_dialects,
)
from tinkex.server.store.schema import usage

pytestmark = pytest.mark.anyio


@pytest.fixture
def url(postgres: Postgres) -> str:
    return postgres.database()


def opened(url: str, folder: Path) -> Store:
    return open_store(db_url=url, storage_url=str(folder), folder=folder, exclusive=True)


@pytest.fixture
async def store(url: str, tmp_path: Path) -> AsyncIterator[Store]:
    store = opened(url, tmp_path)
    yield store
    store.close()


async def cut(store: Store) -> None:
    """End every connection to the store's database, like a restart of PostgreSQL."""
    statement = sa.text(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    await store._database.read(lambda connection: connection.execute(statement).all())


async def test_a_database_that_a_server_holds_is_refused_until_it_is_closed(
    url: str, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sql_dialects, "LOCK_WAIT_S", 0.2)
    with pytest.raises(DatabaseRefused, match=r"another server \(tinkex serve, process \d+ on .*"):
        opened(url, tmp_path)
    # Programs that only read, or create a key, may open it.
    beside = open_store(db_url=url, storage_url=str(tmp_path), folder=tmp_path)
    await beside.keys.create(owner="local")
    beside.close()
    assert await store.keys.any()
    store.close()
    monkeypatch.undo()
    opened(url, tmp_path).close()


def test_a_missing_database_is_refused_without_its_password(url: str, tmp_path: Path) -> None:
    with pytest.raises(DatabaseRefused, match=r"postgres:\*\*\*@.*/nowhere cannot be used: ") as no:
        opened(f"{url.rpartition('/')[0]}/nowhere", tmp_path)
    assert sa.make_url(url).password not in str(no.value)


async def test_lost_connections_are_replaced_and_nothing_runs_twice(
    store: Store,
) -> None:
    model = await a_model(store)
    for seq_id in range(1, 4):
        new = step(model, seq_id, Kind.FORWARD_BACKWARD)
        first = await store.requests.accept(new)
        await cut(store)
        # The writing and the reading connections are lost.
        await store.requests.finish_one(first, Outcome(result=b"{}"))
        assert await store.requests.result(first.request_id) == b"{}"
        assert not await is_new(store, replace(new))
    assert [row.seq_id for row in await store.requests.log(model)] == [1, 2, 3]


async def test_a_server_that_lost_its_lock_writes_nothing(
    url: str, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = await a_model(store)
    monkeypatch.setattr(sql_dialects, "LOCK_WAIT_S", 2.0)
    waiting = asyncio.create_task(asyncio.to_thread(opened, url, tmp_path))
    while not await _waits_for_lock(store):
        assert not waiting.done()
        await asyncio.sleep(0.01)
    await cut_writer(store)
    other = await waiting
    monkeypatch.setattr(sql_dialects, "LOCK_WAIT_S", 0.2)
    monkeypatch.setattr(group_commit, "RECONNECT_S", 0.3)
    first = (await unfinished(store))[0]
    settling = store.requests.finish_one(first, Outcome(result=b"{}"))
    # Retryable: the other server may have stopped by then.
    with pytest.raises(StorageError, match="another server"):
        await store.requests.accept(step(model, 1))
    assert await is_new(other, step(model, 1))
    assert not settling.done()
    other.close()
    # The lock is free again.
    assert not await is_new(store, step(model, 1))
    assert await store.requests.result(first.request_id) == b"{}"


async def _waits_for_lock(store: Store) -> bool:
    """Whether a second server is connected: a connection has a server's application name."""
    statement = sa.text(
        "SELECT count(*) FROM pg_stat_activity"
        " WHERE datname = current_database() AND application_name LIKE 'tinkex serve%'"
    )
    return bool(await store._database.read(lambda connection: connection.scalar(statement)) > 1)


async def cut_writer(store: Store) -> None:
    statement = sa.text(
        "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND granted"
        " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    )
    await store._database.read(lambda connection: connection.execute(statement).all())


async def test_writes_fail_when_the_database_stays_unavailable(
    store: Store, postgres: Postgres, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_commit, "RECONNECT_S", 0.3)
    model = await a_model(store)
    name = sa.make_url(url).database
    with postgres.connect() as admin:
        admin.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false".encode())
        admin.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [name]
        )
        with pytest.raises(StorageError, match="not currently accepting connections"):
            await store.requests.accept(step(model, 1))
        admin.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true".encode())
    assert await is_new(store, step(model, 1))


async def test_commits_are_durable_whatever_the_default_of_the_database(
    postgres: Postgres, url: str, tmp_path: Path
) -> None:
    name = sa.make_url(url).database
    with postgres.connect() as admin:
        admin.execute(f"ALTER DATABASE {name} SET synchronous_commit = off".encode())
    store = opened(url, tmp_path)
    show = sa.text("SHOW synchronous_commit")
    assert await store._database.write(lambda connection: connection.scalar(show)) == "on"
    store.close()


async def test_many_writes_share_few_commits_and_few_statements(store: Store) -> None:
    model = await a_model(store)
    before = store.commits
    statements = 0

    def asks(*_: object) -> None:
        nonlocal statements
        statements += 1

    event.listen(store._database._writing, "before_cursor_execute", asks)
    accepted = await asyncio.gather(
        *(store.requests.accept(step(model, seq_id)) for seq_id in range(1, 201))
    )
    assert len({one.request_id for one in accepted}) == 200
    await asyncio.gather(
        *(store.requests.finish_one(one, Outcome(result=b"{}")) for one in accepted)
    )
    assert store.commits - before < 50
    # Each statement is a round trip, which costs more than its execution.
    assert statements < 100
    log = await store.requests.log(model)
    assert [row.seq_id for row in log] == list(range(1, 201))


async def test_one_bad_write_undoes_only_itself(store: Store) -> None:
    model = await a_model(store)

    def bad(connection: sa.Connection) -> None:
        connection.execute(sa.text("SELECT 1/0"))

    writes = [
        store.requests.accept(step(model, 1)),
        store._database.write(bad),
        store.requests.accept(step(model, 2)),
    ]
    one, refused, two = await asyncio.gather(*writes, return_exceptions=True)
    assert isinstance(refused, sa.exc.DBAPIError)
    assert {row.request_id for row in await unfinished(store)} >= {
        one.request_id,
        two.request_id,
    }


async def test_repeats_and_invalid_requests_in_one_group(store: Store) -> None:
    await check_repeats_and_invalid_requests(store)


async def test_a_text_that_is_too_long_is_refused_and_not_truncated(store: Store) -> None:
    model = await a_model(store)
    with pytest.raises(sa.exc.DataError):
        await store.requests.accept(replace(step(model, 1), base_model="b" * 501))
    nul = await store.requests.accept(replace(step(model, 1), base_model="b\0"))
    row = await store.requests.get(nul.request_id)
    assert row is not None
    assert row.base_model == "b\ufffd"


async def test_nul_characters_in_text_are_replaced(store: Store) -> None:
    session = await store.sessions.create_session(
        owner="local",
        sdk_version="1\0",
        tags=["t\0"],
        user_metadata={"k\0": "v\0"},
        project_id=None,
        display_name="a\0b",
        idempotency_key=None,
    )
    past = await store.sessions.details(session.session_id, reader="local")
    assert past is not None
    assert (past.display_name, past.tags) == ("a\ufffdb", ["t\0"])
    assert past.user_metadata == {"k\0": "v\0"}
    assert await store.sessions.session("no\0body") is None


async def test_error_messages_do_not_contain_parameters(store: Store) -> None:
    statement = sa.text("SELECT CAST(:secret AS INTEGER)")
    with pytest.raises(sa.exc.DBAPIError) as failed:
        await store._database.write(
            lambda connection: connection.execute(statement, {"secret": "[]"})
        )
    assert "parameters hidden" in str(failed.value)


async def test_the_reads_of_the_console_are_the_same_as_with_sqlite(store: Store) -> None:
    model_id = await a_model(store)
    reads, catalog = store.console_reads, store.checkpoint_catalog
    found, total = await reads.requests(model_id, limit=5, offset=0)
    assert (len(found), total) == (1, 1)
    assert await reads.samplers("local", limit=5, offset=0) == ([], 0)
    rows = [
        {
            "owner": "local",
            "hour": hour,
            "session_id": "",
            "base_model": "m",
            "what": "training",
            "amount": 5,
        }
        for hour in (47, 48, 71, 72)
    ]
    await store._database.write(lambda connection: connection.execute(usage.insert(), rows))
    used = await reads.usage_by_day(None, first_hour=48, limit=10)
    assert [(one.day, int(one.amount)) for one in used] == [(3, 5), (2, 10)]
    for text, count in ((model_id[-8:].upper(), 1), ("%", 0)):
        _, total = await catalog.runs(
            owner="local", project_id=None, limit=1, offset=0, search=text
        )
        assert total == count
    key, _ = await store.keys.create(owner="alice", is_admin=True)
    cookie = await store.keys.sign_in(key)
    assert await store.keys.by_cookie(cookie) == key
    await store.keys.sign_out(cookie)
    assert await store.keys.by_cookie(cookie) is None
