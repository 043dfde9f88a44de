"""A worker that lost a model publishes nothing of it, however late it notices."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from postgres import Postgres
from server.store.test_many_writers import uncommitted
from server.store.test_store import a_model, step
from server.stored_requests import unfinished
from tinkex.server.queued_request import Kind, Outcome, QueuedRequest
from tinkex.server.store import NotOwner, Store, open_store
from tinkex.server.store.checkpoints import Naming
from tinkex.server.store.workers import NewHomes

pytestmark = pytest.mark.anyio

Two = tuple[Store, Store]


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'tinkex.db'}"
    postgres: Postgres = request.getfixturevalue("postgres")
    return postgres.database()


@pytest.fixture
async def stores(url: str, tmp_path: Path) -> AsyncIterator[Two]:
    one, two = (
        open_store(db_url=url, storage_url=str(tmp_path), folder=tmp_path) for _ in range(2)
    )
    yield one, two
    one.close()
    two.close()


async def accepted(store: Store, model_id: str, seq_id: int, term: int) -> QueuedRequest:
    request = await store.requests.accept(step(model_id, seq_id, Kind.SAVE_WEIGHTS))
    request.term = term
    return request


async def finish(store: Store, request: QueuedRequest) -> None:
    await store.requests.finish_one(request, Outcome(result=b"{}"))


async def save(store: Store, request: QueuedRequest) -> None:
    version = store.checkpoints.new_version(
        owner="local", model_id=request.model_id or "", kind="weights", name="n"
    )
    naming = Naming(overwrite=False, expires_s=None, user_metadata=None)
    outcome = Outcome(result=b"{}", version_id=version.version_id)
    await store.checkpoints.save(
        version, fingerprint="f", request=request, outcome=outcome, naming=naming
    )


async def refuse(store: Store, request: QueuedRequest) -> None:
    refused = QueuedRequest(
        owner="local",
        kind=Kind.OPTIM_STEP,
        base_model="b",
        model_id=request.model_id,
        seq_id=99,
        term=request.term,
    )
    await store.requests.store_refused(refused, Outcome(error="no", category="user"))


async def snapshot(store: Store, request: QueuedRequest) -> None:
    place, folder = store.snapshots.new_key(request.model_id or "")
    os.makedirs(folder)
    await store.snapshots.save(
        model_id=request.model_id or "",
        seq_id=0,
        place=place,
        size_bytes=1,
        spoiled=None,
        term=request.term,
    )


PUBLISH = (finish, save, refuse, snapshot)
Publish = Callable[[Store, QueuedRequest], Awaitable[None]]


async def give(store: Store, model_id: str, term: int, to: str) -> None:
    """What a worker does that sees another one dead."""
    await store.workers.rehome(NewHomes(models={model_id: (term, to)}))


async def everything(store: Store) -> list[int]:
    tables = ("checkpoint_versions", "checkpoint_names", "snapshots", "requests", "audit", "usage")

    def count(connection: object) -> list[int]:
        return [
            connection.exec_driver_sql(f"SELECT count(*) FROM {name}").scalar_one()  # type: ignore[attr-defined]
            for name in tables
        ]

    return await store._database.read(count)


@pytest.mark.parametrize("publish", PUBLISH, ids=lambda publish: publish.__name__)
async def test_nothing_is_published_under_an_old_term(stores: Two, publish: Publish) -> None:
    one, two = stores
    model_id = await a_model(one)
    first = await one.ownership("one").take(model_id)
    request = await accepted(one, model_id, 1, first)
    await give(two, model_id, first, "two")
    assert await one.ownership("one").home(model_id) == ("two", first + 1)
    before = await everything(two)
    with pytest.raises(NotOwner, match=model_id):
        await publish(one, request)
    assert await everything(two) == before
    assert request.request_id in [waiting.request_id for waiting in await unfinished(two)]
    # Under the new term it is.
    request.term = first + 1
    creation = await one.requests.find_repeat(step(model_id, 0))
    assert creation is not None
    await finish(two, creation)
    await publish(two, request)


async def test_of_several_that_take_a_model_one_gets_it(stores: Two) -> None:
    model_id = await a_model(stores[0])
    await asyncio.gather(*(give(one, model_id, 0, str(at)) for at, one in enumerate(stores)))
    home, term = await stores[0].ownership("").home(model_id)
    assert (home in ("0", "1"), term) == (True, 1)
    other = "1" if home == "0" else "0"
    with pytest.raises(NotOwner, match=model_id):
        await stores[0].ownership(other).take(model_id)
    assert await stores[0].ownership(home or "").take(model_id) == 2


# In SQLite, one transaction writes at a time.
@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
async def test_a_take_over_waits_for_a_transaction_that_publishes(
    stores: Two, url: str, tmp_path: Path
) -> None:
    """Otherwise the new owner would read `waiting`, and the old one would then write `done`."""
    one, two = stores
    model_id = await a_model(one)
    term = await one.ownership("one").take(model_id)
    request = await accepted(one, model_id, 1, term)
    with uncommitted(one) as commit:
        finishing = asyncio.create_task(finish(one, request))
        await asyncio.sleep(0.2)
        taking = asyncio.create_task(give(two, model_id, term, "two"))
        # Accepting requests of the model does not wait.
        three = open_store(db_url=url, storage_url=str(tmp_path), folder=tmp_path)
        await asyncio.wait_for(three.requests.accept(step(model_id, 2)), 5)
        three.close()
        assert not taking.done()
        commit()
        await finishing
        await taking
    assert [waiting.seq_id for waiting in await unfinished(two)] == [0, 2]


async def test_one_lost_model_of_a_group_does_not_undo_the_others(stores: Two) -> None:
    one, two = stores
    models = [await a_model(one) for _ in range(3)]
    requests = [
        await accepted(one, model_id, 1, await one.ownership("one").take(model_id))
        for model_id in models
    ]
    await give(two, models[1], 1, "two")
    results = await asyncio.gather(
        *(finish(one, request) for request in requests), return_exceptions=True
    )
    assert [type(result) for result in results] == [type(None), NotOwner, type(None)]
