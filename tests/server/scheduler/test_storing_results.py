"""A result that cannot be stored is retried, or its model is rewound; no poll waits forever."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from server.echo import EchoExecutor
from server.hosting import Api, hosted
from server.scheduler.test_pickup import sample
from tinkex.server.queued_request import Cause
from tinkex.server.retry import Backoff
from tinkex.server.scheduler import scheduler
from waiting import until_async

pytestmark = pytest.mark.anyio

#: Too many for a row: the result is a file.
LARGE = 40_000


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry a few times without long waits."""
    name = "tinkex.server.scheduler.results.STORE_BACKOFF"
    monkeypatch.setattr(name, Backoff.every(0.01, retries=3))


def refuse_results(
    api: Api, monkeypatch: pytest.MonkeyPatch, refuses: Callable[[bytes], bool]
) -> None:
    """The file store refuses such results with an error that a local disk does not raise."""
    assert api.app
    files = api.app.state.context.store.files
    put = files.put

    def refusing(room: str, data: bytes) -> Any:
        if room == "results" and refuses(data):
            raise RuntimeError("SlowDown: please reduce your request rate")
        return put(room, data)

    monkeypatch.setattr(files, "put", refusing)


async def rebuilt(api: Api, echo: EchoExecutor, model: str, seq_id: int) -> float:
    """The value after a step of a model that was rebuilt from its log."""
    echo.die()
    return await api.value(await api.optim_step(model, seq_id))


async def test_a_result_that_is_refused_once_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    echo, refusals = EchoExecutor(), [True]
    async with hosted(echo, tmp_path, janitor_s=0) as api, asyncio.timeout(20):
        refuse_results(api, monkeypatch, lambda _: bool(refusals and refusals.pop()))
        model = await api.model()
        first = await api.forward_backward(model, 1, tokens=LARGE)
        second = await api.optim_step(model, 2)
        await api.passed(first)
        assert await api.value(second) == LARGE
        assert await rebuilt(api, echo, model, 3) == 2 * LARGE


async def test_a_result_that_cannot_be_stored_fails_its_step_and_rewinds_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    echo, broken = EchoExecutor(), True
    async with hosted(echo, tmp_path, janitor_s=0) as api, asyncio.timeout(20):
        refuse_results(api, monkeypatch, lambda _: broken)
        model = await api.model()
        await api.passed(await api.forward_backward(model, 1, tokens=5))
        assert await api.value(await api.optim_step(model, 2)) == 5
        echo.open.clear()
        lost = await api.forward_backward(model, 3, tokens=LARGE)
        beside = await api.forward_backward(model, 4, tokens=7)
        refused = await api.optim_step(model, 5)
        later = [await api.forward_backward(model, 6, tokens=3), await api.optim_step(model, 7)]
        echo.open.set()
        failed = await api.result(lost)
        assert failed["category"] == "server"
        assert "could not be stored (RuntimeError)" in failed["error"]
        # Later steps were not published, and run again without the failed one.
        await api.passed(beside)
        assert "step 3 before this optim_step failed" in (await api.result(refused))["error"]
        await api.passed(later[0])
        assert await api.value(later[1]) == 2 * 5 + 3
        broken = False
        await api.passed(await api.forward_backward(model, 8, tokens=LARGE))
        assert await api.value(await api.optim_step(model, 9)) == 2 * 13 + LARGE
        assert await rebuilt(api, echo, model, 10) == 2 * (2 * 13 + LARGE)
    async with hosted(EchoExecutor(), tmp_path, janitor_s=0) as api, asyncio.timeout(20):
        assert await api.value(await api.optim_step(model, 11)) == 4 * (2 * 13 + LARGE)


@pytest.mark.parametrize("closed", [True, False], ids=["gap closed", "gap being closed"])
async def test_a_rewound_model_does_not_run_steps_behind_a_missing_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed: bool
) -> None:
    echo, fail = EchoExecutor(), asyncio.Event()
    async with hosted(echo, tmp_path, janitor_s=0, gap_s=0.1) as api, asyncio.timeout(20):
        assert api.app
        context = api.app.state.context
        model = await api.model()
        keep = context.store.requests.store_result

        async def fails(result: bytes) -> Any:
            if len(result) > LARGE:
                await fail.wait()
                raise RuntimeError("SlowDown")
            return await keep(result)

        monkeypatch.setattr(context.store.requests, "store_result", fails)
        first = await api.forward_backward(model, 1, tokens=LARGE)
        await until_async(lambda: "run_pass" in echo.tasks())
        state = context.scheduler._models.get(model)
        if not closed:
            echo.open.clear()
        behind = await api.forward_backward(model, 3, tokens=3)
        if closed:
            await until_async(lambda: len(state.unstored) == 2)
        else:
            await until_async(lambda: 3 in state.queue.running)
        fail.set()
        assert "could not be stored" in (await api.result(first))["error"]
        echo.open.set()
        assert "step 2 of this model never arrived" in (await api.result(behind))["error"]
        refused = await api.result(await api.optim_step(model, 4))
        assert "step 1 before this optim_step failed" in refused["error"]
        assert await api.value(await api.optim_step(model, 5)) == 0


async def test_a_failure_that_cannot_be_stored_rewinds_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with hosted(EchoExecutor(), tmp_path, janitor_s=0, gap_s=0.1) as api, asyncio.timeout(20):
        assert api.app
        requests = api.app.state.context.store.requests
        model = await api.model()
        await api.passed(await api.forward_backward(model, 1))
        assert "never arrived" in (await api.result(await api.optim_step(model, 3)))["error"]
        bad = await api.forward_backward(model, 4, loss="no such loss")
        assert "is not known" in (await api.result(bad))["error"]
        finish_all, times = requests.finish_all, 0

        async def fails(endings: Any) -> Any:
            nonlocal times
            times += 1
            if times <= 6:
                raise RuntimeError("a test says so")
            return await finish_all(endings)

        monkeypatch.setattr(requests, "finish_all", fails)
        late = await api.optim_step(model, 2)
        assert "could not be stored" in (await api.result(late))["error"]
        row = await requests.get(late)
        assert row.outcome.cause is Cause.LATE
        # It was never in the queue of its model, which is unchanged.
        refused = await api.result(await api.optim_step(model, 5))
        assert "step 4 before this optim_step failed" in refused["error"]


async def test_storing_the_result_of_a_sample_is_retried_or_fails_the_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with hosted(EchoExecutor(), tmp_path, janitor_s=0) as api, asyncio.timeout(20):
        assert api.app
        requests = api.app.state.context.store.requests
        keep, refusals = requests.store_result, [True]

        async def keeps(result: bytes) -> Any:
            if refusals and refusals.pop():
                raise RuntimeError("SlowDown")
            return await keep(result)

        async def never(result: bytes) -> Any:
            raise RuntimeError("SlowDown")

        session = await api.session()
        monkeypatch.setattr(requests, "store_result", keeps)
        first = (await api.post("asample", sample(session, 1))).json["request_id"]
        assert "sequences" in await api.result(first)
        monkeypatch.setattr(requests, "store_result", never)
        second = (await api.post("asample", sample(session, 2))).json["request_id"]
        assert "could not be stored" in (await api.result(second))["error"]


async def test_a_save_is_not_stored_without_the_steps_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    echo = EchoExecutor()
    async with hosted(echo, tmp_path, janitor_s=0) as api, asyncio.timeout(20):
        assert api.app
        requests = api.app.state.context.store.requests
        model, other = await api.model(), await api.model()

        async def waits(result: bytes) -> Any:
            await asyncio.Event().wait()

        monkeypatch.setattr(requests, "store_result", waits)
        # It never ends, so waiting longer at shutdown makes no difference.
        monkeypatch.setattr(scheduler, "STORE_TIMEOUT_S", 0.1)
        first = await api.forward_backward(model, 1)
        await until_async(lambda: "run_pass" in echo.tasks())
        saved = await api.step("save_weights", model_id=model, seq_id=2, path="x")
        # A save that does not wait is done before one that came later.
        later = await api.step("save_weights", model_id=other, seq_id=1, path="x")
        assert "path" in await api.result(later)
        row = await requests.get(saved)
        assert row.outcome is None
    async with hosted(EchoExecutor(), tmp_path, janitor_s=0) as api, asyncio.timeout(20):
        await api.passed(first)
        assert "path" in await api.result(saved)
