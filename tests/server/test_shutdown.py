"""A stopping server leaves accepted work on disk, and the next start continues it."""

import asyncio
from pathlib import Path

import pytest

from server.echo import BASE, EchoExecutor
from server.hosting import hosted
from tinkex.wire.codec import decode_json
from tinkex.wire.proto.frames_pb2 import Done, Order
from tinkex.wire.sampling import SampleRequest

pytestmark = pytest.mark.anyio


class Seen(EchoExecutor):
    """Records all work it receives, finished or not."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Order] = []

    async def run(self, base_model: str, work: Order, *, incarnation: int | None = None) -> Done:
        self.asked.append(work)
        return await super().run(base_model, work, incarnation=incarnation)

    def seeds(self) -> list[int | None]:
        return [
            decode_json(SampleRequest, work.sample.payload.inline).sampling_params.seed
            for work in self.asked
            if work.HasField("sample")
        ]


async def test_running_work_runs_again_after_a_restart_with_the_same_seed(
    tmp_path: Path,
) -> None:
    first = Seen()
    async with hosted(first, tmp_path) as api:
        session = await api.session()
        model = await api.model(session)
        first.open.clear()
        await api.forward_backward(model, 1, tokens=3)
        stepped = await api.optim_step(model, 2)
        body = {
            "session_id": session,
            "seq_id": 0,
            "base_model": BASE,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]},
            "sampling_params": {"max_tokens": 1},
            "num_samples": 1,
        }
        sample = (await api.post("asample", body)).json["request_id"]
        # The engine has the creation, the pass and the sample; the step waits for the pass.
        async with asyncio.timeout(20):
            for _ in range(3):
                await first.entered.acquire()
    assert first.tasks("run_pass", "sample") == []
    second = Seen()
    async with hosted(second, tmp_path) as api:
        assert await api.value(stepped) == 3
        assert "error" not in await api.result(sample)
        assert await api.value(await api.optim_step(model, 3)) == 6
    assert first.seeds() == second.seeds()
    assert first.seeds() != [None]
