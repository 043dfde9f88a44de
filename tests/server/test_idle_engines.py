"""Of several base models, one that nobody uses leaves the memory and comes back when it is asked for."""

import asyncio
from pathlib import Path

import pytest

from server.hosting import Api, hosted
from serving import TINY
from tinkex.server.engine_process import LocalExecutor
from tinkex.server.executor import EngineOptions, ServedModel

pytestmark = pytest.mark.anyio

IDLE_S = 1.5


async def until_unloaded(executor: LocalExecutor) -> None:
    while executor.process_id(TINY) is not None:  # noqa: ASYNC110 (another process)
        await asyncio.sleep(0.02)


async def step(api: Api, model: str, first: int) -> float:
    """The loss before an optimizer step."""
    passed = await api.passed(await api.forward_backward(model, first, tokens=8))
    await api.result(await api.optim_step(model, first + 1, learning_rate=1e-2))
    return passed.metrics["loss:sum"]


async def test_an_idle_engine_is_unloaded_and_comes_back_with_its_models(
    tiny_model: Path, tmp_path: Path
) -> None:
    served = [ServedModel(name=name, folder=tiny_model) for name in (TINY, "test/other")]
    options = EngineOptions(threads=1, deterministic=True, idle_s=IDLE_S)
    executor = LocalExecutor(served, options)
    async with hosted(executor, tmp_path, janitor_s=0) as api:
        await executor.start()
        api.base_model = TINY
        model = await api.model()
        losses = [await step(api, model, 1)]
        await until_unloaded(executor)
        # Asked for at once by two: one engine starts.
        again = await asyncio.gather(step(api, model, 3), api.model())
        losses.append(again[0])
        assert losses[1] < losses[0]
        assert executor.process_id("test/other") is None


def test_the_only_engine_stays(tiny_model: Path) -> None:
    served = [ServedModel(name=TINY, folder=tiny_model)]
    assert LocalExecutor(served, EngineOptions(idle_s=IDLE_S)).unloads_after_s == 0
    twice = [*served, ServedModel(name="test/other", folder=tiny_model)]
    assert LocalExecutor(twice, EngineOptions(idle_s=IDLE_S)).unloads_after_s == IDLE_S
