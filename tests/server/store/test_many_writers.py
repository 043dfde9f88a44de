"""Several processes write to one database: nothing is lost, and nothing is stored twice."""

import asyncio
import contextlib
import sqlite3
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa

from postgres import Postgres
from server.store.old_schemas import make_older
from server.store.test_store import a_model, step
from tinkex.server.queued_request import Kind, Outcome, QueuedRequest
from tinkex.server.retry import retry_blocking
from tinkex.server.scheduler.result_waiters import CompletionLog
from tinkex.server.store import Completion, Sampler, Session, Store, connections, open_store
from tinkex.server.store.connections import connection_pools
from tinkex.server.store.migrations import known_versions, migrate, outdated
from tinkex.server.store.schema import server_secrets
from tinkex.server.store.usage import UsageRow
from tinkex.wire.protobuf import encode_sample_response
from tinkex.wire.sampling import SampledSequence, SampleResponse

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'tinkex.db'}"
    postgres: Postgres = request.getfixturevalue("postgres")
    return postgres.database()


Two = tuple[Store, Store]


@pytest.fixture
async def stores(url: str, tmp_path: Path) -> AsyncIterator[Two]:
    """Two processes that serve one database."""
    one, two = (
        open_store(db_url=url, storage_url=str(tmp_path), folder=tmp_path, writer=name)
        for name in ("one", "two")
    )
    yield one, two
    one.close()
    two.close()


async def a_sampler(store: Store) -> Sampler:
    session_id = (await a_model(store)).partition(":")[0]
    sampler = Sampler(
        sampling_session_id=f"{session_id}:sample:0",
        owner="local",
        session_id=session_id,
        base_model="b",
        version_id=None,
        model_path=None,
    )
    return await store.models.create_sampler(sampler, 0)


def sample(sampler: Sampler, seq_id: int) -> QueuedRequest:
    return QueuedRequest(
        owner="local",
        kind=Kind.SAMPLE,
        base_model="b",
        payload=b"{}",
        session_id=sampler.session_id,
        sampling_session_id=sampler.sampling_session_id,
        seq_id=seq_id,
        tokens=5,
    )


SAMPLED = encode_sample_response(
    SampleResponse(
        sequences=[
            SampledSequence("length", "", tokens_np=np.array([1, 2, 3]), logprobs_np=np.zeros(3))
        ]
    )
)


@contextlib.contextmanager
def uncommitted(store: Store) -> Iterator[Callable[[], None]]:
    """Transactions of this store reach their end and are not committed before the call."""
    writer, go = store._database.writer, threading.Event()
    plain = writer._before_commit
    assert plain is not None

    def hold(connection: sa.Connection) -> None:
        plain(connection)
        assert go.wait(30)

    writer._before_commit = hold
    try:
        yield go.set
    finally:
        writer._before_commit = plain
        go.set()


async def test_a_client_that_reads_in_order_misses_no_event(stores: Two) -> None:
    one, two = stores
    sampler = await a_sampler(one)
    accepted = [await one.requests.accept(sample(sampler, number)) for number in range(200)]
    log, found = CompletionLog(two), []

    async def finish(store: Store, some: list[QueuedRequest]) -> None:
        for start in range(0, len(some), 5):
            commits = [store.requests.finish_one(each, Outcome()) for each in some[start:][:5]]
            await asyncio.gather(*commits)

    async def read() -> None:
        cursor = 0
        while len(found) < len(accepted):
            events = await log.after(sampler.sampling_session_id, 0, cursor=cursor, within_s=0)
            found.extend(event.request_id for event in events)
            cursor = events[-1].position if events else cursor
            # Another process tells nobody here: read from the database each time.
            log._recent.clear()

    async with asyncio.timeout(60):
        await asyncio.gather(finish(one, accepted[::2]), finish(two, accepted[1::2]), read())
    assert sorted(found) == sorted(request.request_id for request in accepted)


async def test_a_poll_that_reads_later_than_another_gets_each_event_once(
    stores: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The quick poll decides from which event on they are cached; the slow one reads some of these."""
    store, _ = stores
    sampler = await a_sampler(store)
    requests = [await store.requests.accept(sample(sampler, number)) for number in range(2)]
    log, go = CompletionLog(store), asyncio.Event()
    read = store.requests.completions

    async def read_later(*args: Any, **kwargs: Any) -> Any:
        await go.wait()
        return await read(*args, **kwargs)

    def poll() -> Awaitable[Sequence[Completion]]:
        return log.after(sampler.sampling_session_id, 0, cursor=0, within_s=0)

    await store.requests.finish_one(requests[0], Outcome())
    with monkeypatch.context() as patch:
        patch.setattr(store.requests, "completions", read_later)
        slow = asyncio.ensure_future(poll())
        await asyncio.sleep(0)
    assert [event.position for event in await poll()] == [1]
    event = await store.requests.finish_one(requests[1], Outcome())
    assert event is not None
    log.add(event)
    go.set()
    assert [event.position for event in await slow] == [1, 2]


# In SQLite, one transaction writes at a time.
@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
async def test_an_event_that_is_not_committed_has_no_later_one_before_it(stores: Two) -> None:
    one, two = stores
    sampler = await a_sampler(one)
    first, second = [await one.requests.accept(sample(sampler, number)) for number in (0, 1)]
    with uncommitted(one) as commit:
        early = one.requests.finish_one(first, Outcome())
        await asyncio.sleep(0.2)
        late = two.requests.finish_one(second, Outcome())
        await asyncio.sleep(0.2)
        assert not late.done()
        assert (await two.requests.completions(sampler.sampling_session_id, 0, after=0))[0] == []
        commit()
        events = await asyncio.gather(early, late)
    assert [event.position for event in events if event is not None] == [1, 2]


async def test_a_request_that_two_processes_finish_is_counted_once(stores: Two) -> None:
    one, two = stores
    sampler = await a_sampler(one)
    accepted = [await one.requests.accept(sample(sampler, number)) for number in range(60)]
    outcome = Outcome(result=SAMPLED)
    async with asyncio.timeout(60):
        events = await asyncio.gather(
            *(store.requests.finish_one(each, outcome) for each in accepted for store in stores)
        )
    assert sum(event is not None for event in events) == len(accepted)
    assert await amounts(two) == {"prefill": 5 * 60, "sampled": 3 * 60}


async def amounts(store: Store) -> dict[str, int]:
    found: list[UsageRow] = await store.usage.between(
        owner="local", first_hour=0, end_hour=10**9, limit=100
    )
    # One row for each hour, whoever wrote it.
    assert len({(row.hour, row.what) for row in found}) == len(found)
    return {what: sum(row.amount for row in found if row.what == what) for what in names(found)}


def names(rows: list[UsageRow]) -> set[str]:
    return {row.what for row in rows}


async def test_each_process_has_its_own_usage_rows(stores: Two) -> None:
    one, two = stores
    sampler = await a_sampler(one)
    for number, store in enumerate((one, two, one)):
        accepted = await store.requests.accept(sample(sampler, number))
        await store.requests.finish_one(accepted, Outcome(result=SAMPLED))
    rows = await one._database.read(
        lambda connection: connection.exec_driver_sql(
            "SELECT writer, sum(amount) FROM usage WHERE what = 'sampled' GROUP BY writer"
        ).all()
    )
    assert sorted((writer, int(amount)) for writer, amount in rows) == [("one", 6), ("two", 3)]
    assert await amounts(two) == {"prefill": 15, "sampled": 9}


@pytest.mark.parametrize("what", ["session", "model", "sampler", "loss", "step"])
async def test_a_repeat_that_meets_its_first_try_returns_it(stores: Two, what: str) -> None:
    """Both look for the row before either has committed it."""
    one, two = stores
    model_id = await a_model(one)
    session_id = model_id.partition(":")[0]
    looked = threading.Barrier(2)

    def wait_for_the_other(store: Store) -> None:
        """Before its first INSERT. In SQLite the other cannot look before this one has committed."""
        waited: list[bool] = []

        def insert(_c: object, _cursor: object, statement: str, *_: object) -> None:
            if statement.startswith("INSERT") and not waited:
                waited.append(True)
                with contextlib.suppress(threading.BrokenBarrierError):
                    looked.wait(0.3)

        sa.event.listen(store._database._writing, "before_cursor_execute", insert)

    async def attempt(store: Store) -> object:
        match what:
            case "session":
                return await new_session(store)
            case "model":
                first = await store.models.model(model_id)
                assert first is not None
                model = replace(first, model_id=f"{session_id}:train:1")
                request = await store.models.create_model(
                    model=model,
                    model_seq_id=1,
                    request=step(model.model_id, 0, Kind.CREATE_MODEL),
                )
                return request.request_id
            case "sampler":
                sampler = Sampler(
                    sampling_session_id=f"{session_id}:sample:1",
                    owner="local",
                    session_id=session_id,
                    base_model="b",
                    version_id=None,
                    model_path=None,
                )
                return await store.models.create_sampler(sampler, 1)
            case "loss":
                new = QueuedRequest(
                    owner="local",
                    kind=Kind.CREATE_CUSTOM_LOSS,
                    base_model="b",
                    payload=b"{}",
                    session_id=session_id,
                )
                request = await store.models.create_custom_loss(custom_loss_seq_id=1, request=new)
                return request.request_id
            case _:
                return (await store.requests.accept(step(model_id, 1))).request_id

    for store in stores:
        wait_for_the_other(store)
    async with asyncio.timeout(30):
        found = await asyncio.gather(attempt(one), attempt(two))
    assert found[0] == found[1]


async def new_session(store: Store) -> Session:
    return await store.sessions.create_session(
        owner="local",
        sdk_version=None,
        tags=[],
        user_metadata={},
        project_id=None,
        display_name=None,
        idempotency_key="the same",
    )


@pytest.mark.parametrize("is_old", [False, True])
def test_processes_that_start_together_upgrade_the_database_once(url: str, is_old: bool) -> None:
    if is_old:
        engine = sa.create_engine(url)
        make_older(engine)
        engine.dispose()
    started = threading.Barrier(4)

    def start(_: int) -> None:
        writing, reading = connection_pools(url, exclusive=False)
        started.wait(30)
        migrate(writing)
        writing.dispose()
        reading.dispose()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(start, range(4)))
    engine = sa.create_engine(url)
    assert outdated(engine) is None
    with engine.connect() as connection:
        versions = connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalars()
        assert versions.all() == known_versions()[:1]
    engine.dispose()


def test_a_process_that_starts_waits_for_a_writer_of_a_restored_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restored file has no write-ahead log, and SQLite waits for no writer to begin one."""
    file = tmp_path / "tinkex.db"
    other = sqlite3.connect(file, isolation_level=None)
    other.execute("CREATE TABLE older (x)")
    other.execute("BEGIN IMMEDIATE")
    # The other process commits when this one was refused once.
    retried = partial(retry_blocking, on_retry=lambda *_: other.execute("COMMIT"))
    monkeypatch.setattr(connections, "retry_blocking", retried)
    writing, reading = connection_pools(f"sqlite:///{file}", exclusive=False)
    with reading.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
    assert not other.in_transaction
    other.close()
    writing.dispose()
    reading.dispose()


async def test_all_processes_have_the_same_secrets(stores: Two, url: str, tmp_path: Path) -> None:
    one, two = stores
    assert one.secrets == two.secrets
    assert set(one.secrets) == {"links", "notifications", "tokens"}
    # With an empty secret, anyone could sign.
    await one._database.write(
        lambda connection: connection.execute(server_secrets.update().values(value=b""))
    )
    for _ in range(2):
        again = open_store(db_url=url, storage_url=str(tmp_path), folder=tmp_path)
        again.close()
        assert all(len(secret) == 32 for secret in again.secrets.values())
