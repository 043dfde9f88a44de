"""A full, read-only or too small disk: new work is refused, accepted work is not lost."""

import asyncio
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from server.echo import EchoExecutor
from server.hosting import Api, hosted
from server.storage.failing import FULL, READ_ONLY, FailingFileSystem
from tinkex.server.executor import WorkFailed
from tinkex.server.retry import Backoff
from tinkex.server.scheduler import checkpoints
from tinkex.server.store.storage_health import storage_problem
from tinkex.wire.proto.frames_pb2 import Done, Order

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def _sound_again() -> Iterator[None]:
    yield
    FailingFileSystem.error = None


async def refused(api: Api, model: str, seq_id: int) -> Any:
    """Send a step that the server must refuse; returns the error."""
    body = {"model_id": model, "seq_id": seq_id, "adam_params": {}}
    async with api.http.post("/api/v1/optim_step", json=body) as got:
        assert got.status == 503
        assert int(got.headers["Retry-After"]) > 0
        return (await got.json())["detail"]


async def until_well(api: Api) -> None:
    for _ in range(200):
        if (await api.get("/api/v1/healthz")).status == 200:
            return
        await asyncio.sleep(0.05)
    pytest.fail("the server does not see that the disk is well again")


async def test_a_full_disk_delays_results_and_loses_none(
    echo: EchoExecutor, tmp_path: Path
) -> None:
    async with hosted(echo, tmp_path, storage="failing://full", long_poll_s=0.2) as api:
        model = await api.model()
        echo.open.clear()
        large = await api.forward_backward(model, 1, tokens=20_000)
        step = await api.optim_step(model, 2)
        FailingFileSystem.error = FULL
        echo.open.set()
        # Both are computed. The first result is a file and waits for the disk; the second must not
        # overtake it.
        while (answer := await api.poll(large)).json.get("queue_state") != "paused_capacity":
            assert answer.status == 408
        assert "disk of this server is full" in answer.json["queue_state_reason"]
        assert (await api.poll(step)).status == 408
        assert "disk of this server is full" in await refused(api, model, 3)
        health = await api.get("/api/v1/healthz")
        assert (health.status, health.json["trouble"]) == (503, "full")
        assert "Free some space" in health.json["detail"]
        metrics = (await api.get("/metrics")).body.decode()
        assert 'tinkex_storage_trouble{kind="full"} 1.0' in metrics
        # Existing data can be read.
        assert (await api.get("/api/v1/training_runs")).status == 200
        FailingFileSystem.error = None
        assert (await api.passed(large)).metrics["gradient:sum"] == 20_000
        assert await api.value(step) == 20_000
        await until_well(api)
        assert await api.value(await api.optim_step(model, 3)) == 40_000


async def test_new_work_is_refused_on_a_read_only_disk(echo: EchoExecutor, tmp_path: Path) -> None:
    async with hosted(echo, tmp_path, storage="failing://frozen") as api:
        model = await api.model()
        done = await api.optim_step(model, 1)
        await api.value(done)
        FailingFileSystem.error = READ_ONLY
        answer = await api.post("forward_backward", _large(model))
        assert answer.status == 503
        assert "cannot write" in answer.json["detail"]
        assert "cannot write" in await refused(api, model, 2)
        assert await api.value(done) == 0
        FailingFileSystem.error = None
        await until_well(api)
        assert await api.value(await api.optim_step(model, 2)) == 0


class Cramped(EchoExecutor):
    """An engine whose disk is too full for a save at first."""

    def __init__(self) -> None:
        super().__init__()
        self.refusals = 2

    async def run(self, base_model: str, work: Order, *, incarnation: int | None = None) -> Done:
        if work.HasField("save") and self.refusals:
            self.refusals -= 1
            raise WorkFailed("server", "the engine failed: No space left on device (os error 28)")
        return await super().run(base_model, work, incarnation=incarnation)


async def test_a_save_waits_for_free_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        checkpoints, "DISK_BACKOFF", Backoff(first_s=0.05, max_s=16.0, within_s=600.0)
    )
    echo = Cramped()
    async with hosted(echo, tmp_path) as api:
        model = await api.model()
        save = await api.step("save_weights", model_id=model, seq_id=1, path="kept")
        saved = await api.result(save)
        assert saved["path"] == f"tinker://{model}/weights/kept"
        assert echo.refusals == 0
        await until_well(api)


async def test_disk_space_is_reserved_for_results(echo: EchoExecutor, tmp_path: Path) -> None:
    async with hosted(echo, tmp_path) as api:
        model = await api.model()
        done = await api.optim_step(model, 1)
        await api.value(done)
    more_than_any_disk = 2.0**40
    async with hosted(echo, tmp_path, reserve_mb=more_than_any_disk) as api:
        assert "reserve_mb" in await refused(api, model, 2)
        # Results and lists are still available.
        assert await api.value(done) == 0
        assert (await api.get("/api/v1/training_runs")).json["cursor"]["total_count"] == 1
    async with hosted(echo, tmp_path) as api:
        assert await api.value(await api.optim_step(model, 2)) == 0


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, "full"),
        (errno.EDQUOT, "full"),
        (errno.EROFS, "read_only"),
        (errno.EIO, "failing"),
        (errno.ENOENT, None),
    ],
)
def test_errors_are_classified_by_errno(number: int, kind: str | None) -> None:
    found = storage_problem(OSError(number, os.strerror(number)))
    assert (None if found is None else found.kind) == kind


def _large(model: str) -> dict[str, Any]:
    tokens = 20_000
    return {
        "model_id": model,
        "seq_id": 2,
        "forward_backward_input": {
            "loss_fn": "cross_entropy",
            "data": [
                {
                    "model_input": {"chunks": [{"type": "encoded_text", "tokens": [5] * tokens}]},
                    "loss_fn_inputs": {
                        "target_tokens": {"data": [1] * tokens, "dtype": "int64"},
                        "weights": {"data": [1.0] * tokens, "dtype": "float32"},
                    },
                }
            ],
        },
    }
