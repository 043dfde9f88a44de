"""After an engine crash owners are served in turn: much work of one does not delay another's."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from server.echo import EchoExecutor, content
from server.hosting import Api, hosted
from server.scheduler.test_pickup import sample
from server.tenants import new_key, with_key
from tinkex.server.executor import EngineKilled
from tinkex.server.scheduler.engine_client import RunElsewhere
from tinkex.server.scheduler.fairness import Admission
from tinkex.wire.proto.frames_pb2 import Done, Order
from waiting import until_async

pytestmark = pytest.mark.anyio

FLOOD = 40


class Starting(EchoExecutor):
    """An engine that takes a while to restart, and records the owners of its samples."""

    def __init__(self) -> None:
        super().__init__()
        self.up = asyncio.Event()
        self.up.set()
        #: Calls that wait until it is up.
        self.waiting = 0
        #: In order: the owner of each sample, and the model of all other work.
        self.done: list[str] = []

    async def ready(self, base_model: str) -> int:
        self.waiting += 1
        await self.up.wait()
        self.waiting -= 1
        return await super().ready(base_model)

    async def run(self, base_model: str, work: Order, *, incarnation: int | None = None) -> Done:
        outcome = await super().run(base_model, work, incarnation=incarnation)
        self.done.append(work.sample.owner if work.HasField("sample") else content(work).model_id)
        return outcome

    def die(self) -> None:
        """Stays down until `up` is set."""
        self.up.clear()
        super().die()
        self.done.clear()


@pytest.fixture
def arrived(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The owners of requests that reached the admission of an engine, in order."""
    owners: list[str] = []
    enter = Admission._enter

    async def recorded(self: Admission, owner: str) -> None:
        owners.append(owner)
        await enter(self, owner)

    monkeypatch.setattr(Admission, "_enter", recorded)
    return owners


@asynccontextmanager
async def alice_and_bob(executor: EchoExecutor, folder: Path) -> AsyncIterator[tuple[Api, Api]]:
    async with hosted(executor, folder, janitor_s=0, snapshot_steps=0) as api:
        keys = [await new_key(folder, owner) for owner in ("alice", "bob")]
        async with with_key(api, keys[0]) as alice, with_key(api, keys[1]) as bob:
            yield alice, bob


async def test_a_new_engine_gets_samples_of_owners_in_turn(
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
        # All its requests wait for the next engine.
        await until_async(lambda: len(arrived) == FLOOD + 1)
        executor.up.set()
        assert "sequences" in await bob.result(small)
        for request_id in flood:
            assert "sequences" in await alice.result(request_id)
    assert executor.done.index("bob") <= 1
    assert len(executor.done) == FLOOD + 1


def count_of(done: list[str], model: str, *, until: str) -> int:
    """How often the engine worked on a model before its last work on another."""
    return done[: len(done) - done[::-1].index(until)].count(model)


async def test_models_of_owners_are_rebuilt_in_turn(tmp_path: Path) -> None:
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
        before = set(executor.done[: len(executor.done) - executor.done[::-1].index(small)])
        for one in later:
            await alice.value(one)
    # While Bob's model was rebuilt, only the beginning of one of Alice's was.
    assert small in before
    assert len(before & set(models)) <= 1
    assert sum(count_of(executor.done, model, until=small) for model in models) < 10


async def test_a_large_batch_waits_for_a_short_rebuild_of_another_owner(tmp_path: Path) -> None:
    executor = Starting()
    async with alice_and_bob(executor, tmp_path) as (alice, bob), asyncio.timeout(60):
        large, small = await alice.model(), await bob.model()
        for seq_id in range(1, 6):
            stepped = await bob.optim_step(small, seq_id)
        await bob.value(stepped)
        executor.die()
        # Alice's model has almost no log, and a large pass that waits.
        passed = await alice.forward_backward(large, 1, tokens=2_000)
        step = await bob.optim_step(small, 6)
        await until_async(lambda: executor.waiting == 2)
        executor.up.set()
        await bob.value(step)
        await alice.passed(passed)
    passes = [index for index, model in enumerate(executor.done) if model == large]
    # Created, and then the pass: after the six steps of Bob's log.
    assert executor.done[: passes[-1]].count(small) >= 6


async def test_admission_limits_the_requests_of_one_owner() -> None:
    admission = Admission(lambda: asyncio.sleep(0), max_sequences=1)
    admitted: list[str] = []
    go = asyncio.Event()

    async def enter(owner: str) -> None:
        async with admission.turn(owner):
            admitted.append(owner)
            await go.wait()

    flood = [asyncio.create_task(enter("a")) for _ in range(6)]
    await until_async(lambda: len(admitted) == 2)
    other = asyncio.create_task(enter("b"))
    await until_async(lambda: "b" in admitted)
    # A cancelled wait takes no slot.
    flood[-1].cancel()
    go.set()
    await asyncio.gather(*flood, other, return_exceptions=True)
    assert admitted == ["a", "a", "b", "a", "a", "a"]
    assert not admission._admitted
    assert not admission._waiting


async def test_nothing_is_admitted_to_an_engine_that_was_given_up() -> None:
    starts: list[asyncio.Future[None]] = []

    def ready() -> asyncio.Future[None]:
        starts.append(asyncio.get_running_loop().create_future())
        return starts[-1]

    admission = Admission(ready)
    admitted: list[str] = []

    async def enter(owner: str) -> None:
        async with admission.turn(owner):
            admitted.append(owner)

    early = asyncio.create_task(enter("early"))
    await until_async(lambda: starts)
    admission.send_elsewhere(RunElsewhere)
    late = asyncio.create_task(enter("late"))
    with pytest.raises(RunElsewhere):
        await early
    starts[0].set_exception(EngineKilled("the engine is down"))
    # The one that came since then waits for the next start.
    await until_async(lambda: len(starts) == 2 or admitted)
    assert admitted == []
    starts[1].set_result(None)
    await late
    assert admitted == ["late"]


async def test_an_engine_gets_twice_as_many_samples_of_an_owner_as_it_runs_at_once(
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
