"""The session fails with a reason, and is active again once a request of return succeeds."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from server.echo import BASE, EchoExecutor, task_of
from server.hosting import Api, hosted
from tinkex.server.executor import EngineRefused, WorkFailed
from tinkex.wire.proto.frames_pb2 import Done, Order

pytestmark = pytest.mark.anyio


class FailingExecutor(EchoExecutor):
    """An engine that fails some tasks."""

    def __init__(self) -> None:
        super().__init__()
        self.failing: dict[str, Exception] = {}
        self.refuses = False

    async def ready(self, base_model: str) -> int:
        if self.refuses:
            raise EngineRefused("the engine does not start")
        return await super().ready(base_model)

    async def run(self, base_model: str, work: Order, *, incarnation: int | None = None) -> Done:
        if task_of(work) in self.failing:
            raise self.failing[task_of(work)]
        return await super().run(base_model, work, incarnation=incarnation)


@pytest.fixture
async def echo(anyio_backend: str) -> FailingExecutor:
    return FailingExecutor()


@pytest.fixture
async def api(echo: FailingExecutor, tmp_path: Path) -> AsyncIterator[Api]:
    async with hosted(echo, tmp_path, gap_s=60.0, long_poll_s=5.0) as api:
        yield api


async def status(api: Api, session_id: str) -> dict[str, Any]:
    found = await api.post("sessions/search", {"session_id": session_id})
    (session,) = found.json["sessions"]
    reported: dict[str, Any] = session["status"]
    failed = await api.post(
        "sessions/search", {"session_id": session_id, "statuses": [{"type": "failed"}]}
    )
    assert len(failed.json["sessions"]) == (reported["type"] == "failed")
    return reported


async def test_a_failure_of_the_server_fails_the_session_until_work_succeeds(
    api: Api, echo: FailingExecutor
) -> None:
    session = await api.session()
    model = await api.model(session)
    assert await status(api, session) == {"type": "active"}
    echo.failing["run_pass"] = WorkFailed("server", "out of memory")
    request_id = await api.forward_backward(model, 1)
    assert (await api.result(request_id))["category"] == "server"
    assert await status(api, session) == {
        "type": "failed",
        "category": "internal",
        "message": "out of memory",
        "reason": {
            "type": "request",
            "request_id": request_id,
            "request_type": "forward_backward",
        },
    }
    echo.failing.clear()
    await api.passed(await api.forward_backward(model, 2))
    assert await status(api, session) == {"type": "active"}


async def test_an_error_that_the_user_can_fix_fails_only_the_request(api: Api) -> None:
    session = await api.session()
    model = await api.model(session)
    failed = await api.result(await api.forward_backward(model, 1, loss="dro"))
    assert failed["category"] == "user"
    assert await status(api, session) == {"type": "active"}


async def test_a_model_that_was_not_created_fails_its_session(api: Api) -> None:
    session = await api.session()
    body = {
        "session_id": session,
        "model_seq_id": 0,
        "base_model": BASE,
        "lora_config": {"rank": 2000},
    }
    made = (await api.post("create_model", body)).json
    await api.result(made["request_id"])
    reported = await status(api, session)
    assert reported["category"] == "user"
    assert reported["reason"] == {"type": "training_run", "training_run_id": made["model_id"]}
    assert "rank is too large" in reported["message"]


async def test_a_model_whose_engine_does_not_start_fails_its_session(
    api: Api, echo: FailingExecutor
) -> None:
    session = await api.session()
    model = await api.model(session)
    echo.refuses = True
    await api.result(await api.optim_step(model, 1))
    reported = await status(api, session)
    assert reported["category"] == "internal"
    assert reported["reason"] == {"type": "training_run", "training_run_id": model}


async def test_a_sampler_whose_engine_does_not_start_fails_its_session(
    api: Api, echo: FailingExecutor
) -> None:
    session = await api.session()
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE}
    sampler = (await api.post("create_sampling_session", body)).json["sampling_session_id"]
    echo.failing["sample"] = EngineRefused("the engine does not start")
    requested = {
        "sampling_session_id": sampler,
        "seq_id": 0,
        "prompt": {"chunks": [{"tokens": [1]}]},
        "sampling_params": {"max_tokens": 1},
    }
    await api.result((await api.post("asample", requested)).json["request_id"])
    reported = await status(api, session)
    assert reported["category"] == "internal"
    assert reported["reason"] == {"type": "sampling_session", "sampling_session_id": sampler}


async def test_the_finish_reason_of_the_client_has_priority(
    api: Api, echo: FailingExecutor
) -> None:
    session = await api.session()
    model = await api.model(session)
    echo.failing["run_pass"] = WorkFailed("server", "out of memory")
    await api.result(await api.forward_backward(model, 1))
    await api.post(f"sessions/{session}/finish", {"reason": {"type": "errored"}})
    assert (await status(api, session))["type"] == "client_finished"


async def test_a_failed_session_stays_failed_after_a_restart(tmp_path: Path) -> None:
    first = FailingExecutor()
    async with hosted(first, tmp_path, long_poll_s=5.0) as api:
        session = await api.session()
        model = await api.model(session)
        first.failing["run_pass"] = WorkFailed("server", "out of memory")
        await api.result(await api.forward_backward(model, 1))
    async with hosted(FailingExecutor(), tmp_path, long_poll_s=5.0) as api:
        assert (await status(api, session))["type"] == "failed"
        await api.passed(await api.forward_backward(model, 2))
        assert await status(api, session) == {"type": "active"}


async def test_an_engine_that_does_not_start_says_what_to_do(
    api: Api, echo: FailingExecutor
) -> None:
    model = await api.model()
    echo.failing["optim_step"] = EngineRefused("there is no GPU.", hint="Use --device cpu.")
    failed = await api.result(await api.optim_step(model, 1))
    assert failed["error"] == "there is no GPU. Use --device cpu."
