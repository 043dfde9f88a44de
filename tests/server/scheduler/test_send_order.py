"""An engine gets the work of a model in the order of its steps, whatever delays there are."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from server.echo import BASE, EchoExecutor
from server.hosting import hosted
from server.scheduler.test_pickup import numbered_sample
from tinkex.wire.proto.frames_pb2 import Done, Order
from tinkex.wire.protobuf import decode_forward_backward_request
from waiting import until_async

pytestmark = pytest.mark.anyio


async def random_delay(source: random.Random) -> None:
    for _ in range(source.randrange(8)):
        await asyncio.sleep(0)


class SlowToSend(EchoExecutor):
    """Sending work to this engine takes a random time."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.got: list[Order] = []
        self._random = random.Random(seed)

    async def send(self, base_model: str, work: Order, **options: Any) -> asyncio.Future[Done]:
        await random_delay(self._random)
        if work.HasField("snapshot"):
            # Long enough for a later step to overtake it.
            for _ in range(200):
                await asyncio.sleep(0)
        self.got.append(work)
        done = EchoExecutor.run(self, base_model, work, incarnation=options["incarnation"])
        return asyncio.create_task(done)

    async def run(self, base_model: str, work: Order, *, incarnation: int | None = None) -> Done:
        return await (await self.send(base_model, work, incarnation=incarnation))

    def sizes(self) -> list[int]:
        """The tokens of each pass, in order of arrival."""
        found = []
        for work in self.got:
            if work.HasField("run_pass"):
                asked, _ = decode_forward_backward_request(work.run_pass.payload.inline)
                found.append(asked.forward_backward_input.data[0].model_input.length)
        return found


@pytest.mark.parametrize("seed", range(5))
async def test_steps_reach_an_engine_in_order(seed: int, tmp_path: Path) -> None:
    echo = SlowToSend(seed)
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
        # The same for a rebuild from the log.
        echo.die()
        echo.got.clear()
        assert await api.value(await api.optim_step(model, 14)) == 2 * sum(sizes)
        assert echo.sizes() == sizes


@pytest.mark.parametrize("seed", range(5))
async def test_a_snapshot_has_the_state_of_its_step(seed: int, tmp_path: Path) -> None:
    echo = SlowToSend(seed)
    async with hosted(echo, tmp_path, janitor_s=0, snapshot_steps=4) as api, asyncio.timeout(30):
        model = await api.model()
        value = 0
        for number in range(1, 13, 2):
            await api.forward_backward(model, number, tokens=number)
            value = 2 * value + number
            last = await api.optim_step(model, number + 1)
        assert await api.value(last) == value
        assert any(work.HasField("snapshot") for work in echo.got)
        echo.die()
        assert await api.value(await api.optim_step(model, 13)) == 2 * value


@pytest.mark.parametrize("seed", range(3))
async def test_completions_are_published_in_commit_order(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = random.Random(seed)
    async with hosted(EchoExecutor(), tmp_path, janitor_s=0) as api, asyncio.timeout(30):
        assert api.app
        context = api.app.state.context
        database, published = context.store._database, []
        write_batched, add = database.write_batched, context.futures.completion_log.add

        async def delayed(promise: asyncio.Future[Any]) -> Any:
            answer = await promise
            await random_delay(source)
            return answer

        def submit(many: Any, item: Any, *, required: bool = False) -> asyncio.Future[Any]:
            return asyncio.ensure_future(delayed(write_batched(many, item, required=required)))

        def adds(event: Any) -> None:
            published.append(event.position)
            add(event)

        session = await api.session()
        body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE}
        assert (await api.post("create_sampling_session", body)).status == 200
        monkeypatch.setattr(database, "write_batched", submit)
        monkeypatch.setattr(context.futures.completion_log, "add", adds)
        asked = [{**numbered_sample(session), "seq_id": number} for number in range(1, 41)]
        answers = await asyncio.gather(*(api.post("asample", one) for one in asked))
        for answer in answers:
            await api.result(answer.json["request_id"])
        await until_async(lambda: len(published) == len(asked))
    assert published == sorted(published)
