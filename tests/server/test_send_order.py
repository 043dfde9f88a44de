"""What an engine gets of a model comes in the order of its steps, whatever is waited for on the way."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from server.echo import BASE, EchoExecutor
from server.hosting import hosted
from server.test_pickup import numbered_sample
from server.waiting import until
from tinkex.server.executor import Outcome, Task, Work
from tinkex.wire.protobuf import decode_forward_backward_request

pytestmark = pytest.mark.anyio


async def dawdle(dice: random.Random) -> None:
    for _ in range(dice.randrange(8)):
        await asyncio.sleep(0)


class Dawdling(EchoExecutor):
    """An engine that is far away: handing something to it takes now more time, now less."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.got: list[Work] = []
        self._dice = random.Random(seed)

    async def send(
        self, base_model: str, work: Work, *, incarnation: int | None = None
    ) -> asyncio.Future[Outcome]:
        await dawdle(self._dice)
        if work.task is Task.SNAPSHOT:
            # Long enough for a later step to overtake it.
            for _ in range(200):
                await asyncio.sleep(0)
        self.got.append(work)
        done = EchoExecutor.run(self, base_model, work, incarnation=incarnation)
        return asyncio.create_task(done)

    async def run(self, base_model: str, work: Work, *, incarnation: int | None = None) -> Outcome:
        return await (await self.send(base_model, work, incarnation=incarnation))

    def sizes(self) -> list[int]:
        """The tokens of each pass, as they came."""
        found = []
        for work in self.got:
            if work.task is Task.PASS:
                asked, _ = decode_forward_backward_request(work.payload)
                found.append(asked.forward_backward_input.data[0].model_input.length)
        return found


@pytest.mark.parametrize("seed", range(5))
async def test_steps_reach_an_engine_in_their_order(seed: int, tmp_path: Path) -> None:
    echo = Dawdling(seed)
    async with hosted(echo, tmp_path, janitor_s=0, snapshot_steps=0) as api, asyncio.timeout(30):
        model = await api.model()
        echo.open.clear()
        sizes = list(range(1, 13))
        for size in sizes:
            await api.forward_backward(model, size, tokens=size)
        stepped = await api.optim_step(model, 13)
        echo.open.set()
        assert await api.value(stepped) == sum(sizes)
        assert echo.sizes() == sizes
        # Built again from its log, too.
        echo.die()
        echo.got.clear()
        assert await api.value(await api.optim_step(model, 14)) == 2 * sum(sizes)
        assert echo.sizes() == sizes


@pytest.mark.parametrize("seed", range(5))
async def test_a_snapshot_is_of_the_step_that_it_says(seed: int, tmp_path: Path) -> None:
    echo = Dawdling(seed)
    async with hosted(echo, tmp_path, janitor_s=0, snapshot_steps=4) as api, asyncio.timeout(30):
        model = await api.model()
        value = 0
        for number in range(1, 13, 2):
            await api.forward_backward(model, number, tokens=number)
            value = 2 * value + number
            last = await api.optim_step(model, number + 1)
        assert await api.value(last) == value
        assert Task.SNAPSHOT in [work.task for work in echo.got]
        echo.die()
        assert await api.value(await api.optim_step(model, 13)) == 2 * value


@pytest.mark.parametrize("seed", range(3))
async def test_finished_samples_are_told_in_the_order_of_their_commits(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dice = random.Random(seed)
    async with hosted(EchoExecutor(), tmp_path, janitor_s=0) as api, asyncio.timeout(30):
        assert api.app
        context = api.app.state.context
        database, told = context.store._database, []
        submit_batched, add = database.submit_batched, context.futures.completions.add

        async def heard_late(promise: asyncio.Future[Any]) -> Any:
            answer = await promise
            await dawdle(dice)
            return answer

        def submit(many: Any, item: Any, *, required: bool = False) -> asyncio.Future[Any]:
            return asyncio.ensure_future(heard_late(submit_batched(many, item, required=required)))

        def adds(event: Any) -> None:
            told.append(event.position)
            add(event)

        session = await api.session()
        body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE}
        assert (await api.post("create_sampling_session", body)).status == 200
        monkeypatch.setattr(database, "submit_batched", submit)
        monkeypatch.setattr(context.futures.completions, "add", adds)
        asked = [{**numbered_sample(session), "seq_id": number} for number in range(1, 41)]
        answers = await asyncio.gather(*(api.post("asample", one) for one in asked))
        for answer in answers:
            await api.result(answer.json["request_id"])
        await until(lambda: len(told) == len(asked))
    assert told == sorted(told)
