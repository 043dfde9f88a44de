"""After a base model has changed, its old runs are refused; everything else continues."""

import asyncio
import shutil
import sqlite3
import threading
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest

from models.test_content_hash import flip
from server.echo import BASE, EchoExecutor
from server.hosting import Api, hosted
from tinkex.server.executor import ServedModel
from tinkex.server.scheduler import base_model_check
from waiting import until_async

pytestmark = pytest.mark.anyio

PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
OTHER = "test/other"


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def executor(model: Path, *names: str) -> EchoExecutor:
    made = EchoExecutor()
    made.served = tuple(ServedModel(name=name, folder=model) for name in names or (BASE,))
    return made


async def sampled(api: Api, path: str) -> Any:
    body = {"prompt": PROMPT, "sampling_params": {"max_tokens": 1}, "model_path": path}
    return await api.result(await api.step("asample", **body))


async def a_run(api: Api) -> tuple[str, str, str]:
    """A run of value 5, a checkpoint of it, and a sampler's."""
    model = await api.model()
    await api.forward_backward(model, 1, tokens=5)
    assert await api.value(await api.optim_step(model, 2)) == 5
    kept = await api.result(await api.step("save_weights", model_id=model, seq_id=3, path="kept"))
    shown = await api.result(
        await api.step("save_weights_for_sampler", model_id=model, seq_id=4, path="shown")
    )
    return model, kept["path"], shown["path"]


def is_refused(result: Any, *words: str) -> None:
    assert result.get("category") == "user", result
    for word in (BASE, "has changed", "--accept-changed-base", *words):
        assert word in result["error"]


def hashes(folder: Path) -> dict[str, str | None]:
    with sqlite3.connect(folder / "tinkex.db") as database:
        return dict(database.execute("SELECT model_id, base_hash FROM models"))


async def test_old_runs_are_refused_until_the_change_is_accepted(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = tmp_path / "data"
    async with hosted(executor(model), data) as api:
        run, kept, shown = await a_run(api)
        before = await sampled(api, shown)
        copied = (
            await api.post("copy_weights", {"source_path": kept, "destination_project_id": "p"})
        ).json["tinker_path"]
    assert None not in hashes(data).values()
    assert len(set(hashes(data).values())) == 1

    async with hosted(executor(model), data) as api:  # unchanged: everything continues
        assert await sampled(api, shown) == before
        await api.forward_backward(run, 5, tokens=1)
        assert await api.value(await api.optim_step(run, 6)) == 11
    assert "has changed" not in caplog.text

    flip(model / "model.safetensors")
    async with hosted(executor(model), data) as api:
        is_refused(await sampled(api, shown), "its weights differ")
        is_refused(await api.result(await api.forward_backward(run, 7)), "its weights differ")
        is_refused(await api.result(await api.optim_step(run, 8)))
        new = await api.model()  # not affected, but must not load an affected checkpoint
        for number, path in enumerate((kept, copied), 1):
            load = {"model_id": new, "seq_id": number, "path": path, "optimizer": True}
            is_refused(await api.result(await api.step("load_weights", **load)))
        await api.forward_backward(new, 3, tokens=2)
        assert await api.value(await api.optim_step(new, 4)) == 2
        # Old files can still be fetched.
        assert (await api.post("weights_info", {"tinker_path": kept})).status == 200
    assert (
        "steps and samples of 2 runs that were trained on the earlier files are refused"
        in caplog.text
    )

    async with hosted(executor(model), data, accept_changed_base=True) as api:
        assert await sampled(api, shown) == before  # the echo executor does not use weights
        await api.forward_backward(run, 9, tokens=1)
        assert await api.value(await api.optim_step(run, 10)) == 23
    assert (
        "2 runs that were trained on the earlier files continue with the new files" in caplog.text
    )

    async with hosted(executor(model), data) as api:  # accepted once is accepted
        await api.forward_backward(run, 11, tokens=1)
        assert await api.value(await api.optim_step(run, 12)) == 47


async def test_a_run_continues_when_the_earlier_files_are_back(model: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    async with hosted(executor(model), data) as api:
        run, _, shown = await a_run(api)
    flip(model / "model.safetensors")
    async with hosted(executor(model), data) as api:
        is_refused(await api.result(await api.forward_backward(run, 5, tokens=9)))
    flip(model / "model.safetensors")
    async with hosted(executor(model), data) as api:
        # The refused pass has failed, so the next optimizer step fails too.
        failed = await api.result(await api.optim_step(run, 6))
        assert "has changed" in failed["error"]
        await api.forward_backward(run, 7, tokens=1)
        assert await api.value(await api.optim_step(run, 8)) == 11
        await sampled(api, shown)


async def test_changed_files_are_noticed_when_the_engine_restarts(
    model: Path, tmp_path: Path
) -> None:
    echo = executor(model)
    async with hosted(echo, tmp_path / "data") as api:
        run, _, shown = await a_run(api)
        flip(model / "model.safetensors")
        # The engine has its weights in memory.
        assert "category" not in await sampled(api, shown)
        assert "category" not in await api.result(await api.optim_step(run, 5))
        echo.die()
        is_refused(await sampled(api, shown))
        is_refused(await api.result(await api.optim_step(run, 6)))
        await api.model()


async def test_runs_of_other_base_models_are_not_affected(
    model: Path, tiny_model: Path, tmp_path: Path
) -> None:
    both = executor(model)
    both.served = (*both.served, ServedModel(name=OTHER, folder=tiny_model))
    data = tmp_path / "data"
    async with hosted(both, data) as api:
        api.base_model = OTHER
        run = await api.model()
    flip(model / "model.safetensors")
    both = executor(model)
    both.served = (*both.served, ServedModel(name=OTHER, folder=tiny_model))
    async with hosted(both, data) as api:
        await api.forward_backward(run, 1, tokens=3)
        assert await api.value(await api.optim_step(run, 2)) == 3


async def test_runs_without_a_hash_get_one_at_their_first_start(
    model: Path, tmp_path: Path
) -> None:
    """Rows as 0.1 wrote them."""
    data = tmp_path / "data"
    async with hosted(executor(model), data) as api:
        run, _, shown = await a_run(api)
    known = hashes(data)
    with sqlite3.connect(data / "tinkex.db") as database:
        database.execute("UPDATE models SET base_hash = NULL")

    async with hosted(executor(model), data) as api:
        await api.forward_backward(run, 5, tokens=1)
        assert await api.value(await api.optim_step(run, 6)) == 11
        await sampled(api, shown)
    assert hashes(data) == known


async def test_only_requests_that_need_the_hash_wait_for_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hashing gigabytes takes a while; the server is ready before, and new runs do not wait."""
    data = tmp_path / "data"
    async with hosted(executor(model), data) as api:
        run, _, shown = await a_run(api)
    hashing, go = base_model_check.content_hash, threading.Event()

    def slow(*args: Any, **options: Any) -> str | None:
        assert go.wait(60)
        return hashing(*args, **options)

    monkeypatch.setattr(base_model_check, "content_hash", slow)
    reached = set()
    for name in ("wait_if_needed", "check_version"):

        def recorded(self: Any, *args: Any, name: str = name, check: Any = None) -> Any:
            reached.add(name)
            return check(self, *args)

        check = getattr(base_model_check.BaseModelCheck, name)
        monkeypatch.setattr(
            base_model_check.BaseModelCheck, name, partialmethod(recorded, check=check)
        )
    try:
        async with hosted(executor(model), data, max_training=1) as api:
            old = [
                await api.optim_step(run, 5),
                await api.step(
                    "asample", prompt=PROMPT, sampling_params={"max_tokens": 1}, model_path=shown
                ),
            ]
            waiting = [asyncio.create_task(api.result(request_id)) for request_id in old]
            await until_async(lambda: len(reached) == 2)
            # Later requests are done, and these are not.
            new = await api.model()
            await api.forward_backward(new, 1, tokens=2)
            assert await api.value(await api.optim_step(new, 2)) == 2
            assert not any(task.done() for task in waiting)
            go.set()
            for result in await asyncio.gather(*waiting):
                assert "category" not in result
        assert None not in hashes(data).values()
    finally:
        go.set()


async def test_a_server_that_stops_does_not_wait_for_the_hash(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = threading.Event()

    def endless(*_: Any, stopped: Any) -> None:
        began.set()
        while not stopped():
            pass
        raise base_model_check.Stopped

    monkeypatch.setattr(base_model_check, "content_hash", endless)
    async with asyncio.timeout(20):
        async with hosted(executor(model), tmp_path / "data") as api:
            await api.model()
            await asyncio.to_thread(began.wait, 10)
