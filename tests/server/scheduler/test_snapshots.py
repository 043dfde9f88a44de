"""A model that is written down and built again by a real engine is the same to the last bit."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from server.echo import EchoExecutor
from server.hosting import Api, hosted
from server.scheduler.test_pickup import TROUBLE
from serving import TINY
from tinkex.server.executor import (
    EngineOptions,
    LocalExecutor,
    Outcome,
    ServedModel,
    Task,
    Work,
)
from tinkex.wire.errors import UserFailure

pytestmark = pytest.mark.anyio


def whole(folder: Path) -> list[Path]:
    return [*folder.glob("[!.]*")]


async def not_empty(folder: Path) -> None:
    """Until it has something in it that is whole."""
    for _ in range(2000):
        if whole(folder):
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{folder} stayed empty")


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
                    # Written while the model could go on.
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
    """Copies a model at once, and takes its time to write the copy."""

    def __init__(self) -> None:
        super().__init__()
        self.copied, self.write = asyncio.Event(), asyncio.Event()

    async def run(self, base_model: str, work: Work, *, incarnation: int | None = None) -> Outcome:
        outcome = await super().run(base_model, work, incarnation=incarnation)
        if work.task is Task.SNAPSHOT:
            self.copied.set()
            await self.write.wait()
        return outcome


async def test_a_model_goes_on_while_its_snapshot_is_written(tmp_path: Path) -> None:
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
        # An engine that dies now: the model waits for its snapshot, and begins with it.
        executor.die()
        executor.write.set()
        await api.forward_backward(model, 9, tokens=2)
        assert await api.value(await api.optim_step(model, 10)) == 64
        assert Task.RESTORE in executor.tasks()
        built_again = executor.ran[-1 - executor.tasks()[::-1].index(Task.RESTORE) :]
        # The steps behind the snapshot and the new ones, none of those before it.
        assert [work.task for work in built_again].count(Task.OPTIM_STEP) in (1, 4)


class DiesOnce(EchoExecutor):
    """As soon as it has answered its first optimizer step."""

    died = False

    async def run(self, base_model: str, work: Work, *, incarnation: int | None = None) -> Outcome:
        outcome = await super().run(base_model, work, incarnation=incarnation)
        if work.task is Task.OPTIM_STEP and not self.died:
            self.died = True
            self.die()
        return outcome


@pytest.mark.parametrize("error", [TROUBLE, UserFailure("its checkpoint is gone")])
async def test_a_model_goes_on_when_it_cannot_be_built_again_for_a_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    executor, raised = DiesOnce(), asyncio.Event()
    async with (
        hosted(executor, tmp_path, snapshot_steps=3, janitor_s=0) as api,
        asyncio.timeout(20),
    ):
        assert api.app
        model = await api.model()
        runs = api.app.state.context.store.runs
        custom_losses = runs.custom_losses

        async def fails_once(session_id: str) -> Any:
            if not raised.is_set():
                raised.set()
                raise error
            return await custom_losses(session_id)

        monkeypatch.setattr(runs, "custom_losses", fails_once)
        executor.open.clear()
        for seq_id in (1, 3):
            await api.forward_backward(model, seq_id, tokens=3)
            last = await api.optim_step(model, seq_id + 1)
        executor.open.set()
        # All of them are here, so no arrival starts the model's work again.
        assert await api.value(last) == 9
        assert raised.is_set()


async def test_a_snapshot_waits_a_while_for_gradients_to_be_used(tmp_path: Path) -> None:
    executor = EchoExecutor()
    async with hosted(executor, tmp_path, snapshot_steps=20, janitor_s=0) as api:
        model = await api.model()
        # Making the model was the first request, so the twentieth is a pass.
        for seq_id in range(1, 31, 2):
            await api.passed(await api.forward_backward(model, seq_id, tokens=1))
            await api.value(await api.optim_step(model, seq_id + 1))
        assert before_snapshots(executor) == [(20, Task.OPTIM_STEP)]
        # But not for ever: for a tenth of the usual time.
        for seq_id in range(31, 45):
            await api.passed(await api.forward_backward(model, seq_id, tokens=1))
        assert before_snapshots(executor)[1:] == [(42, Task.PASS)]


def before_snapshots(executor: EchoExecutor) -> list[tuple[int, Task]]:
    """The number of the step before each, and what it was."""
    tasks = [task for task in executor.tasks() if task is not Task.CREATE]
    places = [place for place, task in enumerate(tasks) if task is Task.SNAPSHOT]
    return [(place - earlier, tasks[place - 1]) for earlier, place in enumerate(places)]
