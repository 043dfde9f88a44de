"""A database that is deleted, moved or replaced under a running server is detected."""

import asyncio
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from server.echo import EchoExecutor
from server.hosting import Answer, Api, hosted
from server.storage.test_full_disk import until_well
from tinkex.server.maintenance import disk_monitor
from tinkex.server.scheduler import scheduler

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def checks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry per disk check; checks are frequent. A stop does not wait for lost results."""
    monkeypatch.setattr(disk_monitor, "CHECK_EVERY_S", 0.05)
    monkeypatch.setattr(scheduler, "SETTLE_S", 0.1)
    real, counted = disk_monitor.DiskMonitor.check, []

    async def check(self: disk_monitor.DiskMonitor) -> None:
        await real(self)
        counted.append(1)

    monkeypatch.setattr(disk_monitor.DiskMonitor, "check", check)
    return counted


async def until_detected(api: Api) -> Answer:
    for _ in range(100):
        if (health := await api.get("/api/v1/healthz")).status == 503:
            return health
        await asyncio.sleep(0.05)
    pytest.fail("the server has not detected it")


def replaced(file: Path) -> None:
    """Replace it by a copy: the same content in another file."""
    shutil.copy(file, file.with_name("copy"))
    file.with_name("copy").rename(file)


@pytest.mark.parametrize(
    ("name", "act", "word"),
    [
        ("tinkex.db", Path.unlink, "does not exist any more"),
        ("tinkex.db-wal", Path.unlink, "does not exist any more"),
        ("tinkex.db", replaced, "is not the file that was opened"),
    ],
)
async def test_nothing_is_acknowledged_without_the_database(
    echo: EchoExecutor,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    checks: list[int],
    name: str,
    act: Callable[[Path], None],
    word: str,
) -> None:
    async with hosted(echo, tmp_path, long_poll_s=0.2) as api:
        model = await api.model()
        echo.open.clear()
        running = await api.optim_step(model, 1)
        act(tmp_path / name)
        health = await until_detected(api)
        assert health.json["trouble"] == "gone"
        assert word in health.json["detail"]
        assert "tinkex restore" in health.json["detail"]
        echo.open.set()
        # Its result would be lost with the process: it is not returned.
        for _ in range(3):
            assert (await api.poll(running)).status in (408, 503)
        step = {"model_id": model, "seq_id": 2, "adam_params": {}}
        session = {"tags": [], "user_metadata": {}, "sdk_version": "0.36.0"}
        for path, body in (("optim_step", step), ("create_session", session)):
            answer = await api.post(path, body)
            assert answer.status == 503
            assert word in answer.json["detail"]
        # The same problem is not logged again.
        seen = len(checks)
        while len(checks) < seen + 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert (await api.get("/api/v1/healthz")).json["trouble"] == "gone"
    said = [one for one in caplog.records if "was deleted, moved or replaced" in one.getMessage()]
    assert [one.levelno for one in said] == [logging.ERROR]


async def test_the_server_continues_after_the_database_is_moved_back(
    echo: EchoExecutor, tmp_path: Path
) -> None:
    async with hosted(echo, tmp_path, long_poll_s=0.2) as api:
        model = await api.model()
        echo.open.clear()
        passed = await api.forward_backward(model, 1)
        step = await api.optim_step(model, 2)
        (tmp_path / "tinkex.db").rename(tmp_path / "aside")
        await until_detected(api)
        echo.open.set()
        assert (await api.poll(step)).status in (408, 503)
        (tmp_path / "aside").rename(tmp_path / "tinkex.db")
        await until_well(api)
        assert (await api.passed(passed)).metrics["gradient:sum"] == 3
        assert await api.value(step) == 3
        assert await api.value(await api.optim_step(model, 3)) == 6
    async with hosted(echo, tmp_path) as api:
        assert await api.value(step) == 3
