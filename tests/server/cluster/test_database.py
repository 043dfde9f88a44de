"""The database of a cluster restarts, or does not respond, and comes back: nothing is lost."""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from postgres import Postgres, binaries, postgres_server
from server.cluster.conftest import Parts
from server.cluster_parts import a_web, a_worker
from server.echo import BASE, EchoExecutor
from server.hosting import Api
from tinkex.server.cluster.worker import Worker
from waiting import until_async

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(binaries() is None, reason="PostgreSQL is not installed"),
]

TOKENS = 3
#: Longer than the take-over time of these workers.
AWAY_S = 3.0


@pytest.fixture(scope="module")
def own_postgres() -> Iterator[Postgres]:
    """Other tests use the shared one at the same time."""
    with postgres_server() as found:
        yield found


@pytest.fixture
async def own_parts(own_postgres: Postgres, tmp_path: Path) -> AsyncIterator[Parts]:
    db = own_postgres.database()
    async with contextlib.AsyncExitStack() as stack:
        found = Parts(db, tmp_path, [])
        for name in ("one", "two"):
            executor = found.executors[name] = EchoExecutor()
            found.workers[name] = await stack.enter_async_context(
                a_worker(db, tmp_path, name, executor)
            )
        for _ in range(2):
            found.webs.append(await stack.enter_async_context(a_web(db, tmp_path)))
        yield found


async def restarted(postgres: Postgres) -> None:
    await asyncio.to_thread(postgres.stop)
    await asyncio.sleep(AWAY_S)
    await asyncio.to_thread(postgres.start)


async def frozen(postgres: Postgres) -> None:
    with postgres.paused():
        await asyncio.sleep(AWAY_S)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("outage", [restarted, frozen])
async def test_nothing_is_lost_while_the_database_is_away(
    own_parts: Parts, own_postgres: Postgres, outage: Callable[[Postgres], Awaitable[None]]
) -> None:
    one, two = own_parts.webs
    models = [await one.model() for _ in range(2)]
    assert {own_parts.having(model) for model in models} == {"one", "two"}
    for executor in own_parts.executors.values():
        executor.open.clear()
    passed = [await one.forward_backward(model, 1, tokens=TOKENS) for model in models]
    stepped = [await two.optim_step(model, 2) for model in models]
    body = {
        "base_model": BASE,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]},
        "sampling_params": {},
    }
    sampled = (await one.post("asample", body)).json["request_id"]
    # These polls wait while the database is away.
    polls = [asyncio.create_task(two.value(step)) for step in stepped]
    away = asyncio.ensure_future(outage(own_postgres))
    await asyncio.sleep(AWAY_S / 2)
    # Results are computed meanwhile, and stored when the database is back.
    for executor in own_parts.executors.values():
        executor.open.set()
    await away
    assert await asyncio.gather(*polls) == [TOKENS, TOKENS]
    for request in passed:
        assert (await one.passed(request)).metrics
    assert (await two.result(sampled))["sequences"]
    # No worker took the models of the other one, which was silent too.
    assert {own_parts.having(model) for model in models} == {"one", "two"}
    await until_async(lambda: all(map(listens, own_parts.workers.values())))
    for model in models:
        assert await one.value(await new_step(two, model)) == 3 * TOKENS
    for executor in own_parts.executors.values():
        assert len(executor.tasks("optim_step")) == 2


def listens(worker: Worker) -> bool:
    return worker._notifier.listening_since_s < math.inf


async def new_step(web: Api, model: str) -> str:
    await web.forward_backward(model, 3, tokens=TOKENS)
    return await web.optim_step(model, 4)
