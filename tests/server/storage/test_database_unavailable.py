"""PostgreSQL stopped, paused, or lost during a commit: requests wait, and results stay correct."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from postgres import Postgres, binaries, postgres_server
from server.echo import BASE, EchoExecutor
from server.hosting import Api, hosted
from server.store.test_store import a_model, step
from server.stored_requests import is_new, unfinished
from server.tenants import with_key
from tinkex.server.api import auth
from tinkex.server.queued_request import Kind, Outcome, QueuedRequest
from tinkex.server.store import StorageError, Store, group_commit, open_store
from tinkex.server.store.models import Sampler

pytestmark = pytest.mark.anyio

SOON_S = 20.0


@pytest.fixture(scope="module")
def own() -> Iterator[Postgres]:
    """A PostgreSQL of its own, which tests may stop."""
    if binaries() is None:
        pytest.skip("no PostgreSQL is installed (Debian: apt install postgresql)")
    with postgres_server() as running:
        yield running


@contextmanager
def stopped(own: Postgres) -> Iterator[None]:
    own.stop()
    try:
        yield
    finally:
        own.start()


@contextmanager
def paused(own: Postgres) -> Iterator[None]:
    with own.paused():
        yield


Outage = Callable[[Postgres], AbstractContextManager[None]]


@asynccontextmanager
async def out_of_reach(own: Postgres, outage: Outage) -> AsyncIterator[None]:
    """Without blocking the event loop: starting takes a while."""
    away = outage(own)
    await asyncio.to_thread(away.__enter__)
    try:
        yield
    finally:
        await asyncio.to_thread(away.__exit__, None, None, None)


async def health(api: Api, status: int) -> Any:
    """The health response, once it has this status."""
    async with asyncio.timeout(SOON_S):
        while (answer := await api.get("/api/v1/healthz")).status != status:
            pass
    return answer.json


@pytest.mark.parametrize("outage", [stopped, paused])
async def test_new_work_is_refused_and_accepted_work_continues_after_an_outage(
    own: Postgres,
    outage: Outage,
    echo: EchoExecutor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(group_commit, "RESPONSE_TIMEOUT_S", 0.3)
    async with hosted(echo, tmp_path, db=own.database(), long_poll_s=0.2, gap_s=0.2) as api:
        model = await api.model()
        kept = await api.optim_step(model, 1)
        assert await api.value(kept) == 0
        echo.open.clear()
        pending = await api.forward_backward(model, 2)
        async with out_of_reach(own, outage):
            echo.open.set()
            # Sent before the outage was detected: it waits, and is neither lost nor repeated.
            early = asyncio.create_task(api.optim_step(model, 3))
            problem = await health(api, 503)
            assert problem["trouble"] == "away"
            assert "Check that it runs" in problem["detail"]
            body = {"model_id": model, "seq_id": 4, "adam_params": {}}
            answer = await api.post("optim_step", body)
            assert answer.status == 503, answer
            assert "the database of this server cannot be reached" in answer.json["detail"]
            # Computed and not on disk: its client must wait, and gets the reason.
            polled = await api.poll(pending)
            assert (polled.status, polled.json["queue_state"]) == (408, "paused_capacity")
            assert "cannot be reached" in polled.json["queue_state_reason"]
            # Still in memory, so it is returned; results that are only in the database are not.
            assert await api.value(kept) == 0
            listed = await api.get("/api/v1/training_runs")
            assert listed.status == 503, listed
        async with asyncio.timeout(SOON_S):
            assert (await api.passed(pending)).metrics["gradient:sum"] == 3
            assert await api.value(await early) == 3
        await health(api, 200)
        repeated = await api.optim_step(model, 3)
        assert repeated == await early
        assert await api.value(await api.optim_step(model, 4)) == 6
        assert (await api.get("/api/v1/training_runs")).json["cursor"]["total_count"] == 1
    # Logged once for writes and once for reads, not for each request.
    said = [text for text in caplog.messages if "Check that it runs" in text]
    assert 1 <= len(said) <= 2, said


async def test_clients_with_a_valid_key_keep_polling_during_an_outage(
    own: Postgres, echo: EchoExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_commit, "RESPONSE_TIMEOUT_S", 0.3)
    monkeypatch.setattr(auth, "KEY_CACHE_TTL_S", 0.0)
    async with hosted(echo, tmp_path, db=own.database(), long_poll_s=0.2) as api:
        assert api.app is not None
        keys = api.app.state.context.store.keys
        _, secret = await keys.create(owner="local")
        _, other = await keys.create(owner="local")
        async with with_key(api, secret) as mine, with_key(api, other) as unseen:
            session = await mine.session()
            made = {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE}
            sampler = (await mine.post("create_sampling_session", made)).json["sampling_session_id"]
            asked = {
                "sampling_session_id": sampler,
                "seq_id": 0,
                "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]},
                "sampling_params": {"max_tokens": 1},
            }
            await mine.result((await mine.post("asample", asked)).json["request_id"])
            target = {"type": "sampling_session", "sampling_session_id": sampler}
            poll = {"target": {**target, "cloned_sampler_id": 0}, "prev_cursor": 0}
            finished = (await mine.post("retrieve_futures", poll)).json
            assert len(finished["completions"]) == 1
            # From here on this one is only in the database.
            seen = {**poll, "prev_cursor": finished["cursor"]}
            assert (await mine.post("retrieve_futures", seen)).json["completions"] == []
            async with out_of_reach(own, stopped):
                # Any status but 200 ends the polling of the official client.
                for _ in range(2):
                    answer = await mine.post("retrieve_futures", poll)
                    assert (answer.status, answer.json) == (200, {"completions": [], "cursor": 0})
                assert (await api.post("retrieve_futures", poll)).status == 401
                refused = await unseen.post("retrieve_futures", poll)
                assert refused.status == 503, refused
                monkeypatch.setattr(auth, "KEY_CACHE_OUTAGE_TTL_S", 0.0)
                assert (await mine.post("retrieve_futures", poll)).status == 503
            async with asyncio.timeout(SOON_S):
                while (answer := await unseen.post("retrieve_futures", poll)).status != 200:
                    pass
            assert answer.json == finished


@pytest.fixture
async def store(own: Postgres, tmp_path: Path) -> AsyncIterator[Store]:
    opened = open_store(
        db_url=own.database(), storage_url=str(tmp_path), folder=tmp_path, exclusive=True
    )
    yield opened
    opened.close()


async def test_a_result_survives_a_long_database_outage(
    own: Postgres, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_commit, "RECONNECT_S", 0.3)
    model = await a_model(store)
    steps = [await store.requests.accept(step(model, seq_id)) for seq_id in (1, 2)]
    async with out_of_reach(own, stopped):
        settling = [
            store.requests.finish_one(one, Outcome(result=one.request_id.encode())) for one in steps
        ]
        with pytest.raises(StorageError, match="cannot be reached"):
            await store.requests.accept(step(model, 3))
        with pytest.raises(StorageError, match="cannot be reached"):
            await store.requests.get(steps[0].request_id)
        assert store.health.problem is not None
        assert store.health.problem.kind == "away"
        assert not any(one.done() for one in settling)
    async with asyncio.timeout(SOON_S):
        await asyncio.gather(*settling)
    for one in steps:
        assert await store.requests.result(one.request_id) == one.request_id.encode()
    assert store.health.problem is None
    assert await is_new(store, step(model, 3))


@contextmanager
def answer_lost(store: Store, then: Callable[[], None] = lambda: None) -> Iterator[None]:
    """The next commit succeeds, and the connection breaks before its response."""
    engine = store._database._writing
    commit = engine.dialect.do_commit

    def committed(connection: Any) -> None:
        engine.dialect.do_commit = commit  # type: ignore[method-assign]
        commit(connection)
        connection.driver_connection.close()
        then()
        commit(connection)

    engine.dialect.do_commit = committed  # type: ignore[method-assign,assignment]
    try:
        yield
        assert engine.dialect.do_commit is not committed
    finally:
        engine.dialect.do_commit = commit  # type: ignore[method-assign]


async def a_sampler(store: Store, model: str) -> str:
    session = model.partition(":")[0]
    sampler = Sampler(
        sampling_session_id=f"{session}:sample:0",
        owner="local",
        session_id=session,
        base_model="b",
        version_id=None,
        model_path=None,
    )
    await store.models.create_sampler(sampler, 0)
    return sampler.sampling_session_id


def sample(sampler: str, seq_id: int) -> QueuedRequest:
    return QueuedRequest(
        owner="local",
        kind=Kind.SAMPLE,
        base_model="b",
        payload=b"p",
        sampling_session_id=sampler,
        seq_id=seq_id,
    )


async def test_a_commit_whose_response_was_lost_is_not_repeated(store: Store) -> None:
    model = await a_model(store)
    sampler = await a_sampler(store, model)
    new = [step(model, 1), sample(sampler, 1), sample(sampler, 2)]
    with answer_lost(store):
        # If they counted as repeats, they would never run.
        accepted = await asyncio.gather(*(store.requests.accept(one) for one in new))
    assert all(first is one for first, one in zip(accepted, new, strict=True))
    assert not any([await is_new(store, replace(one)) for one in new])
    assert len(await unfinished(store)) == len(new) + 1
    with answer_lost(store):
        first = store.requests.finish_one(accepted[1], Outcome(result=b"r"))
        again = store.requests.finish_one(accepted[1], Outcome(error="no", category="user"))
        other = store.requests.finish_one(accepted[2], Outcome(result=b"rr"))
        events = await asyncio.gather(first, again, other)
    # A lost event would make its client wait forever; a repeated one would make it stop.
    assert events[1] is None
    found, _ = await store.requests.completions(sampler, 0, after=0)
    assert [events[0], events[2]] == found
    with answer_lost(store):
        # A second insert would fail: the secret is unique.
        key, _ = await store.keys.create(owner="local")
    assert [one.key_id for one in await store.keys.all()] == [key.key_id]


def _until_trouble(store: Store) -> None:
    while store.health.problem is None:
        time.sleep(0.01)


async def test_a_write_that_may_be_committed_is_not_refused(
    own: Postgres, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_commit, "RECONNECT_S", 0.2)
    monkeypatch.setattr(group_commit, "RESPONSE_TIMEOUT_S", 0.5)
    model = await a_model(store)
    try:
        with answer_lost(store, then=own.stop):
            accepting = asyncio.create_task(is_new(store, step(model, 1)))
            async with asyncio.timeout(SOON_S):
                await asyncio.to_thread(_until_trouble, store)
        with pytest.raises(StorageError, match="cannot be reached"):
            await store.requests.accept(step(model, 2))
        assert not accepting.done()
    finally:
        await asyncio.to_thread(own.start)
    async with asyncio.timeout(SOON_S):
        assert await accepting
