"""A real server on a real disk that is nearly full: the log says so once, and saves wait for room."""

import asyncio
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.hosting import Api, connected
from serving import TINY, serving

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
    """A file that leaves so many bytes of the disk."""
    stats = os.statvfs(folder)
    filler = folder / "filler"
    filler.write_bytes(bytes(stats.f_bavail * stats.f_frsize - left))
    return filler


async def large_model(api: Api, session: str, number: int) -> str:
    """A model whose checkpoint has several mebibytes."""
    model = {"session_id": session, "model_seq_id": number, "base_model": TINY}
    made = await api.post("create_model", {**model, "lora_config": {"rank": 512}})
    await api.result(made.json["request_id"])
    return str(made.json["model_id"])


async def test_saves_without_room_wait_and_the_log_says_so_once(
    small_disk: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKEX_RESERVE_MB", "1")
    with serving(f"{TINY}={tiny_model}", data=small_disk / "data") as server:
        async with connected(server.url, TINY) as api:
            session = await api.session()
            models = [await large_model(api, session, number) for number in range(2)]
            filler = fill(small_disk, left=LEFT)
            saves = [
                await api.step("save_weights", model_id=model, seq_id=1, path="kept")
                for model in models
            ]
            await asyncio.sleep(10)
            waiting = list(server.log)
            filler.unlink()
            for model, save in zip(models, saves, strict=True):
                path = (await api.result(save))["path"]
                assert path == f"tinker://{model}/weights/kept"
        text = "".join(waiting)
        assert "Traceback" not in text
        assert "engine bug" not in text
        assert text.count("waits up to 600 s") == len(models)
        assert "No space left on device" in text
        # Nothing is said twice.
        said = [line.split(" ", 2)[2] for line in waiting]
        assert len(set(said)) == len(said), said
        assert sum("was written after" in line for line in server.log) == len(models)


async def test_a_flood_of_sessions_leaves_most_of_the_reserve(
    small_disk: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve = 24 * 2**20
    monkeypatch.setenv("TINKEX_RESERVE_MB", str(reserve // 2**20))
    with serving(f"{TINY}={tiny_model}", data=small_disk / "data") as server:
        async with connected(server.url, TINY) as api:
            fill(small_disk, left=reserve + 2**20)
            metadata = dict.fromkeys("abc", "y" * 16_000)
            session = {"tags": [], "user_metadata": metadata, "sdk_version": "0.36.0"}
            statuses = [(await api.post("create_session", session)).status for _ in range(500)]
        stats = os.statvfs(small_disk)
    assert set(statuses) == {200, 503}
    # All but what was added between two looks, and the log of the database.
    assert stats.f_bavail * stats.f_frsize > reserve * 3 // 4
