"""A model that a real engine rebuilds from a snapshot is the same to the last bit."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from server.echo import EchoExecutor
from server.hosting import Api, hosted, local_executor
from server.scheduler.test_pickup import TROUBLE
from serving import TINY
from tinkex.wire.errors import UserFailure
from tinkex.wire.proto.frames_pb2 import Done, Order

pytestmark = pytest.mark.anyio


def whole(folder: Path) -> list[Path]:
    return [*folder.glob("[!.]*")]


async def not_empty(folder: Path) -> None:
    """Wait until it has a complete entry."""
    for _ in range(2000):
        if whole(folder):
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{folder} stayed empty")


async def loss(api: Api, model: str, seq_id: int) -> float:
    passed = await api.passed(await api.forward_backward(model, seq_id, tokens=8))
    return passed.metrics["loss:sum"]


async def test_a_model_continues_from_its_snapshot_after_the_engine_is_killed(
    tiny_model: Path, tmp_path: Path
) -> None:
    executor = local_executor(tiny_model, TINY, deterministic=True)
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
                    # Written while the model can continue.
                    await not_empty(tmp_path / "snapshots" / model)
                    engine = executor.process_id(TINY)
                    assert engine
                    os.kill(engine, signal.SIGKILL)
                stepped = await api.optim_step(model, seq_id + 1, learning_rate=1e-2)
                assert "metrics" in await api.result(stepped)
            found.append(await loss(api, model, 7))
    assert losses[disturbed] == losses[twin]
    assert losses[twin][-1] < losses[twin][0]


class SlowDisk(EchoExecutor):
    """Copies a model immediately and writes the copy slowly."""

    def __init__(self) -> None:
        super().__init__()
        self.copied, self.write = asyncio.Event(), asyncio.Event()

    async def run(self, base_model: str, work: Order, *, incarnation: int | None = None) -> Done:
        outcome = await super().run(base_model, work, incarnation=incarnation)
        if work.HasField("snapshot"):
            self.copied.set()
            await self.write.wait()
        return outcome


async def test_a_model_continues_while_its_snapshot_is_written(tmp_path: Path) -> None:
    executor = SlowDisk()
    async with hosted(executor, tmp_path, snapshot_steps=3, janitor_s=0) as api:
        model = await api.model()
        await api.forward_backward(model, 1, tokens=3)
        first = await api.optim_step(model, 2)
        assert await api.value(first) == 3
        await executor.copied.wait()
        for seq_id in (3, 5, 7):
            await api.forward_backward(model, seq_id, tokens=1)
            last = await api.optim_step(model, seq_id + 1)
        assert await api.value(last) == 31
        # If the engine dies now, the model waits for its snapshot and starts from it.
        executor.die()
        executor.write.set()
        await api.forward_backward(model, 9, tokens=2)
        assert await api.value(await api.optim_step(model, 10)) == 64
        assert "restore" in executor.tasks()
        rebuilt = executor.ran[-1 - executor.tasks()[::-1].index("restore") :]
        # The steps after the snapshot and the new ones, none from before it.
        assert sum(work.HasField("optim_step") for work in rebuilt) in (1, 4)


async def test_a_snapshot_is_saved_when_nobody_waits_for_it_any_longer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A drain waits for snapshots only for a while."""
    executor = SlowDisk()
    async with hosted(executor, tmp_path, janitor_s=0) as api:
        model = await api.model()
        await api.forward_backward(model, 1, tokens=3)
        assert await api.value(await api.optim_step(model, 2)) == 3
        assert api.app
        context = api.app.state.context
        state = context.scheduler._models.get(model)
        waiting = asyncio.create_task(state.engine.snapshot_now(state))
        await executor.copied.wait()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        executor.write.set()
        await state.snapshots.written()
        assert await context.store.snapshots.newest(model) is not None
    assert "a background task failed" not in caplog.text


class DiesOnce(EchoExecutor):
    """Dies after its first optimizer step."""

    died = False

    async def run(self, base_model: str, work: Order, *, incarnation: int | None = None) -> Done:
        outcome = await super().run(base_model, work, incarnation=incarnation)
        if work.HasField("optim_step") and not self.died:
            self.died = True
            self.die()
        return outcome


@pytest.mark.parametrize("error", [TROUBLE, UserFailure("its checkpoint is gone")])
async def test_a_model_continues_when_the_rebuild_for_a_snapshot_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    executor, raised = DiesOnce(), asyncio.Event()
    async with (
        hosted(executor, tmp_path, snapshot_steps=3, janitor_s=0) as api,
        asyncio.timeout(20),
    ):
        assert api.app
        model = await api.model()
        models = api.app.state.context.store.models
        custom_losses = models.custom_losses

        async def fails_once(session_id: str) -> Any:
            if not raised.is_set():
                raised.set()
                raise error
            return await custom_losses(session_id)

        monkeypatch.setattr(models, "custom_losses", fails_once)
        executor.open.clear()
        for seq_id in (1, 3):
            await api.forward_backward(model, seq_id, tokens=3)
            last = await api.optim_step(model, seq_id + 1)
        executor.open.set()
        # All steps have arrived, so no arrival restarts the model's worker.
        assert await api.value(last) == 9
        assert raised.is_set()


async def test_a_snapshot_waits_a_while_for_an_optimizer_step(tmp_path: Path) -> None:
    executor = EchoExecutor()
    async with hosted(executor, tmp_path, snapshot_steps=20, janitor_s=0) as api:
        model = await api.model()
        # Making the model was the first request, so the twentieth is a pass.
        for seq_id in range(1, 31, 2):
            await api.passed(await api.forward_backward(model, seq_id, tokens=1))
            await api.value(await api.optim_step(model, seq_id + 1))
        assert before_snapshots(executor) == [(20, "optim_step")]
        # At most for a tenth of the interval.
        for seq_id in range(31, 45):
            await api.passed(await api.forward_backward(model, seq_id, tokens=1))
        assert before_snapshots(executor)[1:] == [(42, "run_pass")]


def before_snapshots(executor: EchoExecutor) -> list[tuple[int, str]]:
    """The number and the task of the step before each snapshot."""
    tasks = [task for task in executor.tasks() if task != "create"]
    indexes = [index for index, task in enumerate(tasks) if task == "snapshot"]
    return [(index - earlier, tasks[index - 1]) for earlier, index in enumerate(indexes)]
