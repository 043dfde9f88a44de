"""After an engine died, owners take turns: one's flood does not hold up another's small work."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from server.echo import EchoExecutor
from server.hosting import Api, hosted
from server.tenants import new_key, with_key
from server.test_pickup import sample
from tinkex.engine.settings import EngineSettings
from tinkex.server.executor import Outcome, Task, Work
from tinkex.server.scheduler.fairness import MAX_SEQUENCES, Admission
from waiting import until_async

pytestmark = pytest.mark.anyio

FLOOD = 40


class Starting(EchoExecutor):
    """An engine that takes a while to come up again; it says for whom it samples."""

    def __init__(self) -> None:
        super().__init__()
        self.up = asyncio.Event()
        self.up.set()
        #: How many wait until it is up.
        self.waiting = 0
        #: Owners of samples, models of everything else, in the order in which the engine did it.
        self.did: list[str] = []

    async def ready(self, base_model: str) -> int:
        self.waiting += 1
        await self.up.wait()
        self.waiting -= 1
        return await super().ready(base_model)

    async def run(self, base_model: str, work: Work, *, incarnation: int | None = None) -> Outcome:
        outcome = await super().run(base_model, work, incarnation=incarnation)
        self.did.append(work.owner if work.task is Task.SAMPLE else work.model_id)
        return outcome

    def die(self) -> None:
        """Until somebody says that it is up."""
        self.up.clear()
        super().die()
        self.did.clear()


@pytest.fixture
def arrived(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Owners of what has come to an engine, and waits for it if it is not up."""
    owners: list[str] = []
    enter = Admission.enter

    async def noted(self: Admission, owner: str) -> None:
        owners.append(owner)
        await enter(self, owner)

    monkeypatch.setattr(Admission, "enter", noted)
    return owners


@asynccontextmanager
async def alice_and_bob(executor: EchoExecutor, folder: Path) -> AsyncIterator[tuple[Api, Api]]:
    async with hosted(executor, folder, janitor_s=0, snapshot_steps=0) as api:
        keys = [await new_key(folder, owner) for owner in ("alice", "bob")]
        async with with_key(api, keys[0]) as alice, with_key(api, keys[1]) as bob:
            yield alice, bob


async def test_samples_go_to_a_new_engine_by_turns_of_owners(
    tmp_path: Path, arrived: list[str]
) -> None:
    executor = Starting()
    async with alice_and_bob(executor, tmp_path) as (alice, bob), asyncio.timeout(30):
        ours, theirs = await alice.session(), await bob.session()
        executor.open.clear()
        flood = [
            (await alice.post("asample", sample(ours, number))).json["request_id"]
            for number in range(1, FLOOD + 1)
        ]
        for _ in range(FLOOD):
            await executor.entered.acquire()
        arrived.clear()
        executor.die()
        executor.open.set()
        small = (await bob.post("asample", sample(theirs, 1))).json["request_id"]
        # Everybody who was with it waits for the next one.
        await until_async(lambda: len(arrived) == FLOOD + 1)
        executor.up.set()
        assert "sequences" in await bob.result(small)
        for request_id in flood:
            assert "sequences" in await alice.result(request_id)
    assert executor.did.index("bob") <= 1
    assert len(executor.did) == FLOOD + 1


def count_of(did: list[str], model: str, *, until: str) -> int:
    """How often a model was worked on before another was for the last time."""
    return did[: len(did) - did[::-1].index(until)].count(model)


async def test_models_are_built_again_by_turns_of_owners(tmp_path: Path) -> None:
    executor = Starting()
    async with alice_and_bob(executor, tmp_path) as (alice, bob), asyncio.timeout(60):
        session = await alice.session()
        models = [await alice.model(session, number=number) for number in range(3)]
        small = await bob.model()
        # Alice's models have long logs, Bob's has a short one.
        for seq_id in range(1, 21):
            steps = [await alice.optim_step(model, seq_id) for model in models]
        for step in steps:
            await alice.value(step)
        await bob.value(await bob.optim_step(small, 1))
        executor.die()
        later = [await alice.optim_step(model, 21) for model in models]
        step = await bob.optim_step(small, 2)
        await until_async(lambda: executor.waiting == len(models) + 1)
        executor.up.set()
        await bob.value(step)
        before = set(executor.did[: len(executor.did) - executor.did[::-1].index(small)])
        for one in later:
            await alice.value(one)
    # While Bob's was built again, of Alice's only one was, and not beyond its beginning.
    assert small in before
    assert len(before & set(models)) <= 1
    assert sum(count_of(executor.did, model, until=small) for model in models) < 10


async def test_a_large_turn_gives_way_to_a_model_that_is_soon_there(tmp_path: Path) -> None:
    executor = Starting()
    async with alice_and_bob(executor, tmp_path) as (alice, bob), asyncio.timeout(60):
        large, small = await alice.model(), await bob.model()
        for seq_id in range(1, 6):
            stepped = await bob.optim_step(small, seq_id)
        await bob.value(stepped)
        executor.die()
        # Alice's has next to nothing to be built from, and a large pass waiting.
        passed = await alice.forward_backward(large, 1, tokens=2_000)
        step = await bob.optim_step(small, 6)
        await until_async(lambda: executor.waiting == 2)
        executor.up.set()
        await bob.value(step)
        await alice.passed(passed)
    passes = [place for place, model in enumerate(executor.did) if model == large]
    # Made again, and then the pass: behind the six steps of Bob's log.
    assert executor.did[: passes[-1]].count(small) >= 6


async def test_an_owner_with_many_requests_has_some_of_them_with_an_engine() -> None:
    admission = Admission(lambda: asyncio.sleep(0), max_sequences=1)
    inside: list[str] = []
    go = asyncio.Event()

    async def come(owner: str) -> None:
        await admission.enter(owner)
        inside.append(owner)
        try:
            await go.wait()
        finally:
            admission.leave(owner)

    flood = [asyncio.create_task(come("a")) for _ in range(6)]
    await until_async(lambda: len(inside) == 2)
    other = asyncio.create_task(come("b"))
    await until_async(lambda: "b" in inside)
    # One that gives up waiting takes nobody's place.
    flood[-1].cancel()
    go.set()
    await asyncio.gather(*flood, other, return_exceptions=True)
    assert inside == ["a", "a", "b", "a", "a", "a"]
    assert not admission._inside
    assert not admission._waiting


async def test_an_owner_has_twice_as_many_requests_with_an_engine_as_it_samples_at_once(
    tmp_path: Path,
) -> None:
    executor = EchoExecutor()
    executor.open.clear()
    async with hosted(executor, tmp_path, max_sequences=2) as api, asyncio.timeout(20):
        session = await api.session()
        sent = [
            (await api.post("asample", sample(session, number))).json["request_id"]
            for number in range(6)
        ]
        for _ in range(4):
            await executor.entered.acquire()
        # Long enough for a fifth.
        await asyncio.sleep(0.1)
        assert executor.entered.locked()
        executor.open.set()
        for request_id in sent:
            assert "sequences" in await api.result(request_id)
    # The server does not import the engine, so it repeats this number.
    assert EngineSettings.max_sequences == MAX_SEQUENCES
