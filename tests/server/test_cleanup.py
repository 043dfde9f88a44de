"""The cleanup deletes results, payloads, checkpoints and orphans, and nothing that is needed."""

import contextlib
import os
import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from server.echo import EchoExecutor
from server.hosting import Api, hosted
from tinkex.server.maintenance import cleanup as cleanup_module
from tinkex.server.maintenance.cleanup import Cleanup, over_keep_last
from tinkex.server.scheduler.scheduler import Scheduler
from tinkex.server.store import retention as retention_module
from tinkex.server.store.retention import CheckpointName

pytestmark = pytest.mark.anyio

HOUR_S = 3600.0


@asynccontextmanager
async def without_cleanup(echo: EchoExecutor, folder: Path, **settings: Any) -> AsyncIterator[Api]:
    """A server whose cleanup runs only when called."""
    async with hosted(echo, folder, janitor_s=0, **settings) as api:
        yield api


async def clean_up_in(api: Api, seconds: float) -> None:
    """One cleanup pass, as if this much time had passed."""
    assert api.app
    context = api.app.state.context
    cleanup = Cleanup(
        settings=context.settings,
        store=context.store,
        scheduler=context.scheduler,
        futures=context.futures,
        clock=lambda: time.time() + seconds,
    )
    # Fetched marks are written a little later than everything else.
    await context.store.sessions.session("none")
    await context.store._database.write(lambda connection: None)
    await cleanup.run_once()


def rows(folder: Path) -> int:
    with contextlib.closing(sqlite3.connect(folder / "tinkex.db")) as connection:
        return int(connection.execute("SELECT count(*) FROM requests").fetchone()[0])


async def sample(api: Api, session: str, seq_id: int) -> str:
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": api.base_model}
    sampler = (await api.post("create_sampling_session", body)).json["sampling_session_id"]
    sample = {
        "sampling_session_id": sampler,
        "seq_id": seq_id,
        "prompt": {"chunks": [{"tokens": [1]}]},
        "sampling_params": {},
        "num_samples": 1,
    }
    return str((await api.post("asample", sample)).json["request_id"])


async def test_results_are_deleted_an_hour_after_fetching_or_a_day_after_finishing(
    echo: EchoExecutor, tmp_path: Path
) -> None:
    async with without_cleanup(echo, tmp_path, result_kept_s=HOUR_S) as api:
        session = await api.session()
        fetched, waiting = await sample(api, session, 0), await sample(api, session, 1)
        first = await api.result(fetched)
        # The second comes after the first, and is finished once a third is.
        await api.result(await sample(api, session, 2))
        await clean_up_in(api, 0.9 * HOUR_S)
        assert await api.result(fetched) == first
        await clean_up_in(api, 1.1 * HOUR_S)
        assert rows(tmp_path) == 1
        await clean_up_in(api, 23 * HOUR_S)
        assert rows(tmp_path) == 1
        await clean_up_in(api, 25 * HOUR_S)
        assert rows(tmp_path) == 0
    async with hosted(echo, tmp_path, result_kept_s=0.0, janitor_s=0) as api:
        gone = await api.poll(waiting)
        assert gone.status == 410
        assert "has expired" in gone.json["detail"]
        assert (await api.poll("never-given")).status == 404


async def test_steps_stay_until_a_snapshot_contains_them(
    echo: EchoExecutor, tmp_path: Path
) -> None:
    async with without_cleanup(echo, tmp_path, snapshot_steps=4, session_grace_s=1e9) as api:
        model = await api.model()
        large = await api.forward_backward(model, 1, tokens=40_000)
        await api.passed(large)
        assert [*(tmp_path / "payloads").glob("*/*")]
        await clean_up_in(api, 25 * HOUR_S)
        # Its result is deleted, its row is not: recovery may need it.
        assert (await api.poll(large)).status == 410
        echo.die()
        value = await api.value(await api.optim_step(model, 2))
        assert value == 40_000
        await api.passed(await api.forward_backward(model, 3, tokens=5))
        assert await api.value(await api.optim_step(model, 4)) == 80_005
        assert echo.tasks("snapshot")
        # The fallback of the snapshot stays for a day.
        assert [*(tmp_path / "payloads").glob("*/*")]
        await clean_up_in(api, 25 * HOUR_S)
        assert not [*(tmp_path / "payloads").glob("*/*")]
        assert rows(tmp_path) <= 2
        # The model continues from the snapshot in a new engine.
        echo.die()
        await api.passed(await api.forward_backward(model, 5, tokens=1))
        assert "restore" in echo.tasks()
    async with without_cleanup(EchoExecutor(), tmp_path, snapshot_steps=4) as api:
        assert await api.value(await api.optim_step(model, 6)) == 160_011
        late = await api.result(await api.optim_step(model, 2))
        assert late["category"] == "user"


async def test_a_snapshot_remembers_that_gradients_are_incomplete(
    echo: EchoExecutor, tmp_path: Path
) -> None:
    async with without_cleanup(echo, tmp_path, snapshot_steps=2) as api:
        model = await api.model()
        failed = await api.result(await api.forward_backward(model, 1, loss="nonsense"))
        assert failed["category"] == "user"
        await api.passed(await api.forward_backward(model, 2, tokens=3))
        assert echo.tasks("snapshot")
        await clean_up_in(api, 25 * HOUR_S)
    async with without_cleanup(EchoExecutor(), tmp_path) as api:
        refused = await api.result(await api.optim_step(model, 3))
        assert "gradients are incomplete" in refused["error"]
        assert await api.value(await api.optim_step(model, 4)) == 0


async def test_models_of_inactive_sessions_get_a_snapshot_and_can_be_rebuilt(
    echo: EchoExecutor, tmp_path: Path
) -> None:
    async with without_cleanup(echo, tmp_path) as api:
        model = await api.model()
        await api.passed(await api.forward_backward(model, 1, tokens=7))
        await clean_up_in(api, 25 * HOUR_S)
        assert echo.tasks("snapshot") == ["snapshot"]
        await clean_up_in(api, 25 * HOUR_S)
        assert rows(tmp_path) == 0
        assert echo.tasks("snapshot") == ["snapshot"]
        echo.die()
        assert await api.value(await api.optim_step(model, 2)) == 7


async def test_only_checkpoints_of_a_finished_session_stay(
    echo: EchoExecutor, tmp_path: Path
) -> None:
    async with without_cleanup(echo, tmp_path, snapshot_steps=2) as api:
        session = await api.session()
        model = await api.model(session)
        for seq_id in (1, 2, 3):
            await api.value(await api.optim_step(model, seq_id))
        saved = await api.result(
            await api.step("save_weights", model_id=model, seq_id=4, path="kept")
        )
        await api.post(f"sessions/{session}/finish", {"reason": {"type": "success"}})
        await clean_up_in(api, 25 * HOUR_S)
        assert rows(tmp_path) == 0
        assert not [*(tmp_path / "snapshots").glob("*/*")]
        about = await api.post("weights_info", {"tinker_path": saved["path"]})
        assert about.status == 200
        run = (await api.get(f"/api/v1/training_runs/{model}")).json
        assert run["last_request_time"]


async def test_expired_checkpoints_are_deleted_from_the_disk(
    echo: EchoExecutor, tmp_path: Path
) -> None:
    async with without_cleanup(echo, tmp_path) as api:
        model = await api.model()
        for seq_id, ttl_s in ((1, 3600), (2, None)):
            asked = await api.step(
                "save_weights", model_id=model, seq_id=seq_id, path=f"n{seq_id}", ttl_seconds=ttl_s
            )
            await api.result(asked)
        await clean_up_in(api, 0.5 * HOUR_S)
        assert len([*(tmp_path / "checkpoints").glob("*/*/*/*")]) == 2
        await clean_up_in(api, 1.5 * HOUR_S)
        assert [path.parent.name for path in (tmp_path / "checkpoints").glob("*/*/*/*")] == ["n2"]


async def test_a_run_keeps_its_last_checkpoints_of_each_kind(
    echo: EchoExecutor, tmp_path: Path
) -> None:
    async with without_cleanup(echo, tmp_path, keep_last=2) as api:
        model = await api.model()
        for seq_id in range(1, 6):
            await api.result(
                await api.step("save_weights", model_id=model, seq_id=seq_id, path=f"n{seq_id}")
            )
        await api.call("POST", f"training_runs/{model}/checkpoints/weights/n1/publish")
        await clean_up_in(api, 0)
        listed = (await api.get("/api/v1/checkpoints")).json["checkpoints"]
        assert [each["checkpoint_id"][-2:] for each in listed] == ["n5", "n4", "n1"]
        assert len([*(tmp_path / "checkpoints").glob("*/*/*/*")]) == 3
        assert await deletions(api) == [("n2", "keep_last"), ("n3", "keep_last")]


async def deletions(api: Api) -> list[tuple[str, str]]:
    """The audit entries of checkpoints that were deleted automatically."""
    day = time.strftime("%Y-%m-%d", time.gmtime())
    entries = (await api.get(f"/api/v1/audit?date={day}")).json["entries"]
    deleted = [each["event_details"] for each in entries if each["event"] == "checkpoint.deleted"]
    return sorted((each["tinker_path"][-2:], each["reason"]) for each in deleted)


async def test_an_expired_checkpoint_is_in_no_list_and_its_end_in_the_audit_log(
    echo: EchoExecutor, tmp_path: Path
) -> None:
    async with without_cleanup(echo, tmp_path) as api:
        model = await api.model()
        for seq_id, more in ((1, {}), (2, {"ttl_seconds": 3600})):
            body = {"model_id": model, "seq_id": seq_id, "path": f"n{seq_id}", **more}
            await api.result(await api.step("save_weights", **body))
        run = (await api.get(f"/api/v1/training_runs/{model}")).json
        assert run["last_checkpoint"]["checkpoint_id"] == "weights/n2"
        with contextlib.closing(sqlite3.connect(tmp_path / "tinkex.db")) as connection:
            connection.execute("UPDATE checkpoint_names SET expires_s=1 WHERE name='n2'")
            connection.commit()
        run = (await api.get(f"/api/v1/training_runs/{model}")).json
        assert run["last_checkpoint"]["checkpoint_id"] == "weights/n1"
        assert await deletions(api) == []
        await clean_up_in(api, 0)
        assert await deletions(api) == [("n2", "expired")]
        await api.call("DELETE", f"training_runs/{model}/checkpoints/weights/n1")
        run = (await api.get(f"/api/v1/training_runs/{model}")).json
        assert run.get("last_checkpoint") is None


def test_keep_last_counts_by_run_and_kind() -> None:
    names = [
        CheckpointName(model_id=model, kind=kind, name=str(n), saved_s=float(n), public=n == 0)
        for model in "ab"
        for kind in ("weights", "sampler_weights")
        for n in range(4)
    ]
    gone = over_keep_last(names, keep_last=2)
    assert {(name.model_id, name.kind, name.name) for name in gone} == {
        (model, kind, "1") for model in "ab" for kind in ("weights", "sampler_weights")
    }
    assert over_keep_last(names, keep_last=4) == []


async def test_old_orphans_are_deleted(echo: EchoExecutor, tmp_path: Path) -> None:
    async with without_cleanup(echo, tmp_path) as api:
        model = await api.model()
        await api.result(await api.step("save_weights", model_id=model, seq_id=1, path="kept"))
        await api.forward_backward(model, 2, tokens=40_000)
        lost = [
            tmp_path / "payloads" / "ab" / "lost",
            tmp_path / "results" / "cd" / ".lost.part",
            tmp_path / "checkpoints" / model / "weights" / "kept" / ".lost.part" / "file",
            tmp_path / "snapshots" / model / "lost" / "file",
        ]
        old_s = time.time() - 2 * HOUR_S
        for path in lost:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("lost")
            os.utime(path, (old_s, old_s))
            if path.name == "file":
                os.utime(path.parent, (old_s, old_s))
        young = tmp_path / "payloads" / "ab" / "young"
        young.write_text("about to be referred to")
        needed = [path for path in found(tmp_path, "payloads") if path not in (lost[0], young)]
        assert len(needed) == 1
        await clean_up_in(api, 0)
        assert not any(path.exists() for path in lost)
        assert young.exists()
        assert needed[0].exists()
        assert len([*(tmp_path / "checkpoints").glob("*/*/*/*")]) == 1


async def test_an_object_store_is_cleaned_up_too(echo: EchoExecutor, tmp_path: Path) -> None:
    store = f"memory://{tmp_path.name}"
    async with without_cleanup(echo, tmp_path, storage=store, snapshot_steps=2) as api:
        model = await api.model()
        for seq_id in (1, 2):
            await api.passed(await api.forward_backward(model, seq_id, tokens=40_000))
        for seq_id in (3, 4):
            await api.result(
                await api.step("save_weights", model_id=model, seq_id=seq_id, path=f"n{seq_id}")
            )
        await api.call("DELETE", f"training_runs/{model}/checkpoints/weights/n3")
        assert api.app
        files = api.app.state.context.store.files
        lost = files.put("payloads", b"lost")
        await clean_up_in(api, 25 * HOUR_S)
        later_s = time.time() + HOUR_S
        assert files.list_older("payloads", 2, before_s=later_s) == []
        assert len(files.list_older("snapshots", 2, before_s=later_s)) == 1
        (key,) = files.list_older("checkpoints", 4, before_s=later_s)
        assert "/n4/" in key
        assert lost
        echo.die()
        assert await api.value(await api.optim_step(model, 5)) == 80_000


class _NotYet:
    """A scheduler whose engine restarts while it should save a snapshot."""

    def __init__(self, scheduler: Scheduler, fails: int) -> None:
        self._scheduler = scheduler
        self.fails = fails
        self.calls = 0

    async def snapshot(self, model_id: str) -> bool:
        self.calls += 1
        if self.calls <= self.fails:
            return False
        return await self._scheduler.snapshot(model_id)


async def test_a_failed_snapshot_is_retried_with_backoff(
    echo: EchoExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with without_cleanup(echo, tmp_path, snapshot_steps=50) as api:
        model = await api.model()
        await api.value(await api.optim_step(model, 1))
        assert api.app
        context = api.app.state.context
        scheduler = _NotYet(context.scheduler, fails=2)
        cleanup = Cleanup(
            settings=context.settings,
            store=context.store,
            scheduler=scheduler,  # type: ignore[arg-type]
            futures=context.futures,
            clock=lambda: time.time() + HOUR_S,
        )
        await cleanup.run_once()
        await cleanup.run_once()
        assert scheduler.calls == 1  # not due yet
        moved_s = 0.0
        monotonic = time.monotonic
        monkeypatch.setattr(cleanup_module.time, "monotonic", lambda: monotonic() + moved_s)
        moved_s += cleanup_module.SNAPSHOT_BACKOFF.first_s + 1
        await cleanup.run_once()
        assert scheduler.calls == 2
        moved_s += cleanup_module.SNAPSHOT_BACKOFF.first_s + 1
        await cleanup.run_once()
        assert scheduler.calls == 2  # twice as long
        moved_s += cleanup_module.SNAPSHOT_BACKOFF.first_s + 1
        await cleanup.run_once()
        assert scheduler.calls == 3
        assert found(tmp_path, "snapshots")
        await cleanup.run_once()
        assert cleanup._retry_at == {}


async def test_the_disk_is_bounded(echo: EchoExecutor, tmp_path: Path) -> None:
    """`benchmarks/bench_disk.py` in small: five times the work, the same disk space."""
    async with without_cleanup(echo, tmp_path, snapshot_steps=50) as api:
        model = await api.model()
        sizes = []
        for start in range(1, 1001, 2):
            passed = await api.forward_backward(model, start, tokens=200)
            stepped = await api.optim_step(model, start + 1)
            await api.passed(passed)
            await api.value(stepped)
            if (start + 1) % 200 == 0:
                await clean_up_in(api, 2 * HOUR_S)
                sizes.append(folder_bytes(tmp_path))
        assert rows(tmp_path) < 200
        assert sizes[-1] < 1.2 * sizes[0], sizes


def found(folder: Path, prefix: str) -> list[Path]:
    return [*(folder / prefix).glob("*/*")]


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


async def test_the_steps_of_an_ended_run_are_deleted_but_for_the_last(
    echo: EchoExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention_module, "BATCH_ROWS", 2)
    settings = {"metrics_kept_s": HOUR_S, "abandoned_s": 48 * HOUR_S}
    async with without_cleanup(echo, tmp_path, **settings) as api:
        ended, going_on = await api.session(), await api.session()
        models = [await api.model(ended), await api.model(going_on)]
        for model in models:
            for seq_id in (1, 3, 5, 7, 9, 11):
                await api.passed(await api.forward_backward(model, seq_id))
                await api.result(await api.optim_step(model, seq_id + 1))

        async def steps() -> list[list[int]]:
            answers = [(await api.get(f"/api/v1/training_runs/{one}/metrics")) for one in models]
            return [[point["step"] for point in answer.json["points"]] for answer in answers]

        await clean_up_in(api, 2 * HOUR_S)
        every = [1, 2, 3, 4, 5, 6]
        assert await steps() == [every, every]
        done = {"reason": {"type": "success"}, "detail": None}
        assert (await api.post(f"sessions/{ended}/finish", done)).status == 200
        await clean_up_in(api, 0.5 * HOUR_S)
        assert await steps() == [every, every]
        await clean_up_in(api, 2 * HOUR_S)
        assert await steps() == [[6], every]
        # Lists of runs still say how far it came.
        assert (await api.get(f"/api/v1/training_runs/{models[0]}")).json["steps"] == 6
        await clean_up_in(api, 50 * HOUR_S)
        assert await steps() == [[6], [6]]
