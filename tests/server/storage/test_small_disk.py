"""A nearly full real disk: it is logged once, and saves wait for free space."""

import asyncio
import logging
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ports import free_port
from server.echo import EchoExecutor, content
from server.hosting import Api, connected, hosted
from serving import TINY, unloaded
from tinkex.cli.command_group import command as tinkex_command
from tinkex.local import registry
from tinkex.server.engine_process import LocalExecutor
from tinkex.server.executor import ServedModel
from tinkex.server.folder_lock import lock_folder
from tinkex.server.maintenance import disk_monitor
from tinkex.server.retry import Backoff
from tinkex.server.scheduler import checkpoints
from tinkex.server.settings import SettingsError
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
    """How often a save of each model was tried. Saves begin when they may."""

    def __init__(self, model: Path) -> None:
        settings = EngineSettings(name=TINY, folder=model, threads=1, disk_reserve_bytes=1 << 20)
        super().__init__([ServedModel(name=TINY, folder=model)], [settings])
        self.saves: Counter[str | None] = Counter()
        self.saves_may_begin = asyncio.Event()

    async def send(self, base_model: str, work: Order, **options: Any) -> asyncio.Future[Done]:
        if work.HasField("save"):
            await self.saves_may_begin.wait()
            self.saves[content(work).model_id] += 1
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
    # A check that finds space after the first save failed would let the second failure be logged.
    monkeypatch.setattr(disk_monitor, "CHECK_EVERY_S", 3600.0)
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
        executor.saves_may_begin.set()
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


def test_a_disk_without_any_space_is_one_error(small_disk: Path) -> None:
    (small_disk / "data").mkdir()
    fill(small_disk, left=0)
    with (
        pytest.raises(SettingsError, match="cannot be written: No space left") as refused,
        lock_folder(small_disk / "data"),
    ):
        pytest.fail("the folder was locked")
    assert refused.value.hint == "Free some space, or choose another one with --data."


@contextmanager
def starting(data: Path, model: Path) -> Iterator[tuple[int, list[str], list[str]]]:
    """A `tinkex serve` that may not get ready: its port, and the lines of its output and log."""
    port = free_port()
    serve = ["serve", *unloaded(model), "--port", str(port), "--data", str(data)]
    process = subprocess.Popen(
        [sys.executable, "-m", "tinkex.cli.main", *serve, "--threads", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    lines: tuple[list[str], list[str]] = ([], [])
    pipes = [pipe for pipe in (process.stdout, process.stderr) if pipe is not None]
    threads = [
        threading.Thread(target=into.extend, args=(pipe,), daemon=True)
        for into, pipe in zip(lines, pipes, strict=True)
    ]
    for thread in threads:
        thread.start()
    try:
        yield port, *lines
    finally:
        process.terminate()
        process.wait(20)
        for thread, pipe in zip(threads, pipes, strict=True):
            thread.join(5)
            pipe.close()


async def test_a_server_with_a_full_disk_is_not_ready(small_disk: Path, tiny_model: Path) -> None:
    data = small_disk / "data"
    data.mkdir()
    (data / "tinkex.toml").write_text("reserve_mb = 8\n")
    filler = fill(small_disk, left=6 * 2**20)
    with starting(data, tiny_model) as (port, out, log):
        await until_async(lambda: any(" not ready: " in line for line in log), within_s=60)
        (said,) = (line for line in log if " not ready: " in line)
        for part in (" MiB are free", "8 MiB are reserved", f"data folder {data}", "Free some"):
            assert part in said
        async with connected(f"http://127.0.0.1:{port}") as api:
            waiting = await api.get("/readyz")
            assert (waiting.status, waiting.json["status"]) == (503, "not ready")
            assert "the disk of this server is full" in waiting.json["reason"]
            assert (await api.get("/api/v1/healthz")).status == 503
            assert "Not ready:" in (await api.get("/")).body.decode()
            assert not out
            (found,) = (one for one in registry.running() if one.data == str(data))
            assert (found.url, found.ready) == (f"http://127.0.0.1:{port}", False)
            shown = CliRunner().invoke(tinkex_command, ["status", found.url])
            assert shown.exit_code == 1
            assert "Ready        no: the disk of this server is full" in shown.output
            filler.unlink()
            await until_async(lambda: out)
            assert out == [f"tinkex ready at http://127.0.0.1:{port}\n"]
            assert (await api.get("/readyz")).json == {"status": "ready"}
            assert (one := registry.of_data(data)) is not None
            assert one.ready
            # Later, too.
            at = len(log)
            filler = fill(small_disk, left=6 * 2**20)
            await until_async(
                lambda: any("the disk of this server is full" in line for line in log[at:])
            )
            assert (await api.get("/readyz")).status == 503


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
