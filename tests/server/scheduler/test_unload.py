"""A model that was unloaded, by request or not, is rebuilt for its next step."""

import asyncio
from pathlib import Path

import pytest

from server.echo import BASE, EchoExecutor
from server.hosting import Api, hosted, local_executor
from serving import TINY
from tinkex.server.executor import ModelNotLoaded
from tinkex.wire.proto.frames_pb2 import ClearGradients, Done, Drop, Order
from waiting import until_async

pytestmark = pytest.mark.anyio


class Forgetful(EchoExecutor):
    """Raises the same error as a real engine when it does not have a model."""

    async def run(self, base_model: str, work: Order, *, incarnation: int | None = None) -> Done:
        try:
            return await super().run(base_model, work, incarnation=incarnation)
        except KeyError:
            raise ModelNotLoaded("that model does not exist in this engine") from None


async def test_a_model_that_is_unloaded_during_its_rebuild_is_not_lost(
    tmp_path: Path,
) -> None:
    echo = EchoExecutor()
    async with hosted(echo, tmp_path, janitor_s=0) as api, asyncio.timeout(20):
        model = await api.model()
        await api.passed(await api.forward_backward(model, 1, tokens=3))
        assert await api.value(await api.optim_step(model, 2)) == 3
        echo.die()
        echo.open.clear()
        echo.ran.clear()
        step = await api.forward_backward(model, 3, tokens=4)
        await echo.entered.acquire()
        unloaded = await api.step("unload_model", model_id=model)
        stepped = await api.optim_step(model, 4)
        await asyncio.sleep(0.05)
        echo.open.set()
        await api.passed(step)
        assert await api.value(stepped) == 10
        assert (await api.result(unloaded))["model_id"] == model
        tasks = echo.tasks()
        # Nothing ran between the rebuild and the step.
        assert tasks.index("drop") > tasks.index("optim_step", 4)
        assert await api.value(await api.optim_step(model, 5)) == 20


async def test_a_model_that_its_engine_does_not_have_is_rebuilt(tmp_path: Path) -> None:
    echo = Forgetful()
    async with hosted(echo, tmp_path, janitor_s=0) as api, asyncio.timeout(20):
        model = await api.model()
        await api.passed(await api.forward_backward(model, 1, tokens=3))
        assert await api.value(await api.optim_step(model, 2)) == 3
        echo.models.clear()
        await api.passed(await api.forward_backward(model, 3, tokens=4))
        assert await api.value(await api.optim_step(model, 4)) == 10
        echo.models.clear()
        assert await api.value(await api.optim_step(model, 5)) == 20


async def test_an_engine_reports_that_it_does_not_have_a_model(
    tiny_model: Path, tmp_path: Path
) -> None:
    executor = local_executor(tiny_model, TINY, deterministic=True)
    async with hosted(executor, tmp_path, janitor_s=0) as api:
        api.base_model = TINY
        model = await api.model()
        await api.passed(await api.forward_backward(model, 1))
        drop = Order(drop=Drop(model_id=model))
        await (await executor.send(TINY, drop))
        with pytest.raises(ModelNotLoaded, match="does not exist in this engine"):
            await (await executor.send(TINY, Order(clear_gradients=ClearGradients(model_id=model))))
        await api.passed(await api.forward_backward(model, 2))
        assert "metrics" in await api.result(await api.optim_step(model, 3, learning_rate=1e-2))


async def unloading(api: Api, model: str) -> str:
    return await api.step("unload_model", model_id=model)


async def test_no_model_is_unloaded_beside_an_isolated_request(tmp_path: Path) -> None:
    echo = EchoExecutor()
    async with hosted(echo, tmp_path, janitor_s=0) as api, asyncio.timeout(20):
        assert api.app
        model = await api.model()
        isolation = api.app.state.context.scheduler.replicas(BASE).engines[0].client.isolation
        isolation.lost.restore({"isolated": 2}, None)
        async with isolation.attempt("isolated") as attempt:
            unloaded = await unloading(api, model)
            await until_async(lambda: bool(isolation._waiting))
            assert "drop" not in echo.tasks()
            assert attempt.alone
        assert (await api.result(unloaded))["model_id"] == model
        assert "drop" in echo.tasks()
