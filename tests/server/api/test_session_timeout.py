"""Sessions that time out, return, and are finished."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from server.echo import EchoExecutor
from server.hosting import Api, hosted
from tinkex.server.scheduler.session_status import SessionTimeouts, session_status
from tinkex.server.store import open_store

pytestmark = pytest.mark.anyio


@dataclass(frozen=True)
class Times:
    seen_s: float = 0.0
    finished_s: float | None = None
    finish_reason: str | None = None
    finish_detail: str | None = None
    lapsed_s: float | None = None
    failure: Mapping[str, Any] | None = None


@pytest.mark.parametrize(
    ("row", "status"),
    [
        (Times(), {"type": "active"}),
        (
            Times(finished_s=1.0, finish_reason="success", lapsed_s=0.5),
            {"type": "client_finished", "reason": {"type": "success"}, "detail": None},
        ),
        (
            Times(finished_s=1.0, finish_reason="errored", finish_detail="boom"),
            {"type": "client_finished", "reason": {"type": "errored"}, "detail": "boom"},
        ),
    ],
)
def test_session_status(row: Times, status: dict[str, object]) -> None:
    assert session_status(row).model_dump() == status


def test_a_silent_session_reports_its_last_contact() -> None:
    status = session_status(Times(lapsed_s=9.0))
    assert status.type == "cancelled"
    assert "since 1970-01-01 00:00:00 UTC" in str(status)


async def dropped(echo: EchoExecutor) -> None:
    """Wait until a model was unloaded from the engine."""
    async with asyncio.timeout(20):
        while "drop" not in echo.tasks():  # noqa: ASYNC110  the echo executor has no event for this
            await asyncio.sleep(0.02)


async def test_a_client_that_returns_after_an_hour_finds_its_model(
    echo: EchoExecutor, tmp_path: Path
) -> None:
    async with hosted(echo, tmp_path, session_grace_s=0.4) as api:
        model = await api.model()
        await api.forward_backward(model, 1, tokens=4)
        assert await api.value(await api.optim_step(model, 2)) == 4
        # Pending gradients are kept as well.
        await api.passed(await api.forward_backward(model, 3, tokens=5))
        await dropped(echo)
        assert model not in echo.models
        session = model.partition(":")[0]
        assert (await api.post("session_heartbeat", {"session_id": session})).status == 200
        assert await api.value(await api.optim_step(model, 4)) == 2 * 4 + 5


async def test_a_finished_session_frees_its_models_at_once(api: Api, echo: EchoExecutor) -> None:
    model = await api.model()
    other = await api.model()
    session = model.partition(":")[0]
    reason = {"reason": {"type": "success"}, "detail": None}
    assert (await api.post(f"sessions/{session}/finish", reason)).status == 200
    await dropped(echo)
    assert list(echo.models) == [other]


async def test_heartbeats_requests_and_waiting_work_keep_a_session_alive(tmp_path: Path) -> None:
    store = open_store(
        db_url=f"sqlite:///{tmp_path / 'tinkex.db'}", storage_url=str(tmp_path), folder=tmp_path
    )
    freed: list[str] = []

    class Unloads:
        def unload_session(self, session_id: str) -> None:
            freed.append(session_id)

    try:
        sessions = [
            await store.sessions.create_session(
                owner="a",
                sdk_version=None,
                tags=[],
                user_metadata={},
                project_id=None,
                display_name=None,
                idempotency_key=None,
            )
            for _ in range(2)
        ]
        silent, asking = (session.session_id for session in sessions)
        now_s = time.time()
        session_timeouts = SessionTimeouts(
            store,
            Unloads(),  # type: ignore[arg-type]
            grace_s=1800.0,
            clock=lambda: now_s,
        )
        await session_timeouts.check()
        assert freed == []
        now_s += 3600
        session_timeouts.last_request_s[asking] = time.monotonic()
        await session_timeouts.check()
        assert freed == [silent]
        assert await store.sessions.timed_out_sessions() == [silent]
        # The state survives a restart, and ends when the client sends a request.
        again = SessionTimeouts(store, Unloads(), grace_s=1800.0)  # type: ignore[arg-type]
        await again.start()
        assert silent in again.timed_out
        again.revive(silent)
        await again.close()
        await store.sessions.finish_session(asking, "success", None)
        assert await store.sessions.timed_out_sessions() == []
    finally:
        store.close()
