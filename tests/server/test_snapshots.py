"""A model that is written down and built again by a real engine is the same to the last bit."""

import os
import signal
from pathlib import Path

import pytest

from server.hosting import Api, hosted
from serving import TINY
from tinkex.server.executor import EngineOptions, LocalExecutor, ServedModel

pytestmark = pytest.mark.anyio


async def loss(api: Api, model: str, seq_id: int) -> float:
    passed = await api.passed(await api.forward_backward(model, seq_id, tokens=8))
    return passed.metrics["loss:sum"]


async def test_an_engine_that_is_killed_goes_on_from_the_snapshot(
    tiny_model: Path, tmp_path: Path
) -> None:
    served = ServedModel(name=TINY, folder=tiny_model)
    executor = LocalExecutor([served], EngineOptions(threads=1, deterministic=True))
    async with hosted(executor, tmp_path, snapshot_steps=5, janitor_s=0) as api:
        api.base_model = TINY
        session = await api.session()
        body = {
            "session_id": session,
            "base_model": TINY,
            "lora_config": {"rank": 4, "seed": 5},
        }
        models = []
        for number in range(2):
            made = (await api.post("create_model", {**body, "model_seq_id": number})).json
            await api.result(made["request_id"])
            models.append(made["model_id"])
        disturbed, twin = models
        losses: dict[str, list[float]] = {disturbed: [], twin: []}
        for model, found in losses.items():
            for seq_id in (1, 3, 5):
                found.append(await loss(api, model, seq_id))
                # The fifth step leaves a gradient that the sixth uses.
                if seq_id == 5 and model == disturbed:
                    assert [*(tmp_path / "snapshots" / model).iterdir()]
                    engine = executor.process_id(TINY)
                    assert engine
                    os.kill(engine, signal.SIGKILL)
                stepped = await api.optim_step(model, seq_id + 1, learning_rate=1e-2)
                assert "metrics" in await api.result(stepped)
            found.append(await loss(api, model, 7))
    assert losses[disturbed] == losses[twin]
    assert losses[twin][-1] < losses[twin][0]
