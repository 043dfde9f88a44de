"""A nearly full real disk: it is logged once, and saves wait for free space."""

import asyncio
import logging
import os
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from server.echo import EchoExecutor, content
from server.hosting import Api, hosted
from serving import TINY
from tinkex.server.engine_process import LocalExecutor
from tinkex.server.executor import ServedModel
from tinkex.server.maintenance import disk_monitor
from tinkex.server.retry import Backoff
from tinkex.server.scheduler import checkpoints
from tinkex.wire.engine_settings import EngineSettings
from tinkex.wire.proto.frames_pb2 import Done, Order
from waiting import until_async

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

DISK = 48 * 2**20
#: Room for the database and for what shows that files can be written, and for no save.
LEFT = 3 * 2**20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path, *, left: int) -> Path:
    """A file that leaves this many bytes free."""
    stats = os.statvfs(folder)
    filler = folder / "filler"
    filler.write_bytes(bytes(stats.f_bavail * stats.f_frsize - left))
    return filler


async def large_model(api: Api, session: str, number: int) -> str:
    """A model with a checkpoint of several mebibytes."""
    model = {"session_id": session, "model_seq_id": number, "base_model": TINY}
    made = await api.post("create_model", {**model, "lora_config": {"rank": 512}})
    await api.result(made.json["request_id"])
    return str(made.json["model_id"])


class Counting(LocalExecutor):
    """How often a save of each model was tried."""

    def __init__(self, model: Path) -> None:
        settings = EngineSettings(name=TINY, folder=model, threads=1)
        super().__init__([ServedModel(name=TINY, folder=model)], [settings])
        self.saves: Counter[str | None] = Counter()

    async def send(self, base_model: str, work: Order, **options: Any) -> asyncio.Future[Done]:
        self.saves[content(work).model_id] += work.HasField("save")
        return await super().send(base_model, work, **options)


async def test_saves_wait_for_free_space_and_log_it_once(
    small_disk: Path,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(
        checkpoints, "DISK_BACKOFF", Backoff(first_s=0.1, max_s=16.0, within_s=600.0)
    )
    monkeypatch.setattr(disk_monitor, "CHECK_EVERY_S", 0.05)
    caplog.set_level(logging.INFO)
    executor = Counting(tiny_model)
    async with hosted(executor, small_disk / "data", reserve_mb=1) as api:
        api.base_model = TINY
        session = await api.session()
        models = [await large_model(api, session, number) for number in range(2)]
        filler = fill(small_disk, left=LEFT)
        caplog.clear()
        saves = [
            await api.step("save_weights", model_id=model, seq_id=1, path="kept")
            for model in models
        ]
        # A fourth try comes after three have failed.
        await until_async(lambda: all(executor.saves[model] >= 4 for model in models))
        waiting = [record.getMessage() for record in caplog.records]
        of_engine = capfd.readouterr().err
        filler.unlink()
        for model, save in zip(models, saves, strict=True):
            path = (await api.result(save))["path"]
            assert path == f"tinker://{model}/weights/kept"
    text = "".join(waiting)
    for said in (text, of_engine, caplog.text):
        assert "Traceback" not in said
        assert "engine bug" not in said
    assert text.count("waits up to 600 s") == len(models)
    assert "No space left on device" in text
    # Nothing is logged twice.
    assert len(set(waiting)) == len(waiting), waiting
    lines = [line.split(" ", 2)[-1] for line in of_engine.splitlines()]
    assert len(set(lines)) == len(lines), lines
    assert caplog.text.count("was written after") == len(models)


async def test_a_burst_of_sessions_leaves_most_of_the_reserve(small_disk: Path) -> None:
    reserve = 24 * 2**20
    settings = {"reserve_mb": reserve // 2**20}
    async with hosted(EchoExecutor(), small_disk / "data", **settings) as api:
        fill(small_disk, left=reserve + 2**20)
        metadata = dict.fromkeys("abc", "y" * 16_000)
        session = {"tags": [], "user_metadata": metadata, "sdk_version": "0.36.0"}
        statuses = [(await api.post("create_session", session)).status for _ in range(500)]
        stats = os.statvfs(small_disk)
    assert set(statuses) == {200, 503}
    # Except what was added between two checks, and the WAL of the database.
    assert stats.f_bavail * stats.f_frsize > reserve * 3 // 4
