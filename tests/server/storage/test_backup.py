"""Backups of a running server, restored elsewhere: models continue from that moment."""

import asyncio
import json
import os
import resource
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from server.echo import EchoExecutor
from server.hosting import Api, connected, hosted
from server.storage.commands import Tinkex
from server.storage.test_damage import LARGE, overwrite_pages, snapshot, trained
from server.tenants import is_private
from serving import TINY, Server, serving
from tinkex.server.maintenance.backup import BackupFailed, Manifest, create, restore
from tinkex.server.maintenance.doctor import Level, examine
from tinkex.server.settings import Settings

pytestmark = pytest.mark.anyio


def clean(folder: Path) -> bool:
    found = examine(Settings(data=str(folder)))
    return all(finding.level is Level.FINE for finding in found)


def list_of(folder: Path) -> list[Path]:
    return [*folder.iterdir()]


async def taken(data: Path, target: Path) -> Manifest:
    return await asyncio.to_thread(create, Settings(data=str(data)), target)


async def test_a_backup_of_a_busy_server_is_consistent(echo: EchoExecutor, tmp_path: Path) -> None:
    data, target, elsewhere = (tmp_path / name for name in ("data", "backup", "elsewhere"))
    done: dict[int, float] = {}
    async with hosted(echo, data) as api:
        model = await api.model()
        await api.passed(await api.forward_backward(model, 1, tokens=LARGE))
        await snapshot(api, model)

        async def train() -> None:
            for seq_id in range(2, 2000):
                # The value depends on the number of steps: each doubles it and adds.
                if seq_id % 2:
                    await api.forward_backward(model, seq_id, tokens=1)
                else:
                    done[seq_id] = await api.value(await api.optim_step(model, seq_id))
                if seq_id % 50 == 0:
                    await snapshot(api, model)
                if copying.done():
                    return

        copying = asyncio.create_task(taken(data, target))
        await train()
        manifest = await copying
        assert manifest.missing == ()
        # The original is unchanged.
        assert clean(data)
    assert clean(target)
    restore(target, elsewhere)
    assert clean(elsewhere)
    async with hosted(EchoExecutor(), elsewhere) as api:
        row = (await api.get(f"/api/v1/training_runs/{model}")).json
        assert row["training_run_id"] == model
        assert api.app
        requests = api.app.state.context.store.requests
        # The copy may have a step that was accepted and not finished; it runs now.
        for step in await requests.waiting_steps(model):
            await api.result(step.request_id)
        last = max(row.seq_id for row in await requests.log(model))
        # An even number is an optimizer step with a known value; an odd one left a gradient.
        finished = last - last % 2
        value = await api.value(await api.optim_step(model, last + 1))
        assert value == 2 * done.get(finished, 0) + last % 2 or finished not in done


@pytest.mark.timeout(120)
async def test_a_real_server_is_backed_up_while_it_trains(
    server: Server, tiny_model: Path, tmp_path: Path, tinkex: Tinkex
) -> None:
    target, elsewhere = tmp_path / "backup", tmp_path / "elsewhere"
    async with connected(server.url, TINY) as api:
        model = await api.model()
        await _step(api, model, 1)
        made = await tinkex("backup", str(target), "--data", str(server.data), "-f", "json")
        assert made.returncode == 0, made.stderr
        assert json.loads(made.stdout)["files"] > 0
        expected = [await _step(api, model, seq_id) for seq_id in (3, 5)]
    back = await tinkex("restore", str(target), "--data", str(elsewhere))
    assert back.returncode == 0, back.stderr
    assert clean(elsewhere)
    with serving(f"{TINY}={tiny_model}", data=elsewhere) as restored:
        async with connected(restored.url, TINY) as api:
            losses = [await _step(api, model, seq_id) for seq_id in (3, 5)]
    assert losses == pytest.approx(expected, rel=1e-4)
    assert losses[1] < losses[0]


async def _step(api: Api, model: str, seq_id: int) -> float:
    """One pass and one step; the loss before it."""
    passed = await api.passed(await api.forward_backward(model, seq_id, tokens=8))
    await api.result(await api.optim_step(model, seq_id + 1, learning_rate=1e-2))
    return passed.metrics["loss:sum"]


async def test_what_cannot_be_backed_up_or_restored_is_refused(
    echo: EchoExecutor, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    async with hosted(echo, data) as api:
        await trained(api, await api.model(), 1)
    target = tmp_path / "target"
    with pytest.raises(BackupFailed, match="there is no database"):
        create(Settings(data=str(tmp_path / "nothing")), target)
    with pytest.raises(BackupFailed, match="only a SQLite database"):
        create(Settings(data=str(data), db="postgresql+psycopg://h/d"), target)
    with pytest.raises(BackupFailed, match="is not a backup"):
        restore(data, tmp_path / "new")
    create(Settings(data=str(data)), target)
    with pytest.raises(BackupFailed, match="is not empty"):
        restore(target, data)
    with pytest.raises(BackupFailed, match="exists already"):
        create(Settings(data=str(data)), target)
    assert (target.stat().st_mode & 0o777) == 0o700
    overwrite_pages(data / "tinkex.db", "requests")
    with pytest.raises(BackupFailed, match=r"damaged|malformed"):
        create(Settings(data=str(data)), tmp_path / "another")
    # No incomplete folder remains.
    assert {path.name for path in list_of(tmp_path)} == {"data", "target"}


async def test_an_incomplete_backup_is_refused(
    echo: EchoExecutor, tmp_path: Path, tinkex: Tinkex
) -> None:
    data, target = tmp_path / "data", tmp_path / "target"
    async with hosted(echo, data) as api:
        model = await api.model()
        await api.passed(await api.forward_backward(model, 1, tokens=LARGE))
    await taken(data, target)
    # Checking a backup does not change it.
    assert (await tinkex("doctor", "--data", str(target))).returncode == 0
    restore(target, tmp_path / "first")
    (payload,) = (target / "payloads").glob("*/*")
    payload.unlink()
    with pytest.raises(BackupFailed, match="incomplete") as refused:
        restore(target, tmp_path / "second")
    assert f"tinkex doctor --data {target}" in refused.value.hint
    assert {path.name for path in list_of(tmp_path)} == {"data", "target", "first"}


@contextmanager
def files_up_to(most: int) -> Iterator[None]:
    """Limits file sizes, like a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


async def test_a_backup_to_a_full_disk_fails_and_leaves_nothing(
    echo: EchoExecutor, tmp_path: Path
) -> None:
    data, target = tmp_path / "data", tmp_path / "target"
    async with hosted(echo, data) as api:
        model = await api.model()
        saved = api.step("save_weights", model_id=model, seq_id=1, path="large")
        await api.result(await saved)
    # A file in a folder: its error must not be taken for a deletion by the server.
    (folder,) = (data / "checkpoints").glob("*/weights/large/*")
    (folder / "value").write_bytes(bytes(3_000_000))
    with (
        files_up_to(2_000_000),
        pytest.raises(BackupFailed, match="value cannot be copied") as full,
    ):
        create(Settings(data=str(data)), target)
    assert f"Free some space on the disk of {tmp_path}" in full.value.hint
    create(Settings(data=str(data)), target)
    with (
        files_up_to(2_000_000),
        pytest.raises(BackupFailed, match="value cannot be copied") as full,
    ):
        restore(target, tmp_path / "new")
    assert "The incomplete copy was deleted" in full.value.hint
    assert {path.name for path in list_of(tmp_path)} == {"data", "target"}


@pytest.mark.parametrize("way_out", ["a link", "a linked folder", "a key", "a pipe"])
async def test_a_backup_with_links_or_paths_out_of_it_is_refused(
    echo: EchoExecutor, tmp_path: Path, way_out: str
) -> None:
    """Such a backup could read or delete files of the user who restores it."""
    data, target, elsewhere = (tmp_path / name for name in ("data", "backup", "elsewhere"))
    async with hosted(echo, data) as api:
        model = await api.model()
        await api.passed(await api.forward_backward(model, 1, tokens=LARGE))
    await taken(data, target)
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "file").write_text("private")
    if way_out == "a key":
        with closing(sqlite3.connect(target / "tinkex.db")) as database, database:
            changed = database.execute(
                "UPDATE requests SET payload_place = 'payloads/../../private/file' "
                "WHERE payload_place IS NOT NULL"
            )
            assert changed.rowcount == 1
    elif way_out == "a pipe":
        os.mkfifo(target / "payloads" / "pipe")
    else:
        there = tmp_path / "private"
        (target / "payloads" / "out").symlink_to(there / "file" if way_out == "a link" else there)
    with pytest.raises(BackupFailed, match="lead out of it"):
        restore(target, elsewhere)
    assert not elsewhere.exists()


async def test_a_restored_folder_is_private_whatever_the_mode_of_the_backup(
    echo: EchoExecutor, tmp_path: Path
) -> None:
    data, target, elsewhere = (tmp_path / name for name in ("data", "backup", "elsewhere"))
    async with hosted(echo, data) as api:
        await api.model()
    await taken(data, target)
    for path in (target, *target.rglob("*")):
        path.chmod(0o755)
    restore(target, elsewhere)
    assert is_private(elsewhere)
    assert is_private(elsewhere / "tinkex.db")
