"""Official SDK 0.36.0 with API keys: JWTs that expire, limits of a key, and a revoked key."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from server.echo import BASE, EchoExecutor
from server.hosting import Api, hosted
from server.tenants import new_key, revoke
from tinkex.server.scheduler import result_waiters
from together.official_sdk import Finished, finish

PROGRAM = Path(__file__).with_name("keys_program.py")

pytestmark = [pytest.mark.sdk, pytest.mark.anyio, pytest.mark.timeout(150)]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


async def run(api: Api, key: str, *, pause_s: float) -> Finished:
    url = str(api.http._base_url)
    arguments = ("0.36.0", PROGRAM, BASE, str(pause_s))
    return await asyncio.to_thread(finish, *arguments, url=url, key=key, timeout_s=120)


async def test_expired_jwts_are_renewed_without_an_error(
    anyio_backend: str, tmp_path: Path
) -> None:
    key = await new_key(tmp_path, "alice", project_id="vision")
    async with hosted(EchoExecutor(), tmp_path, jwt=True, jwt_s=2.0) as api:
        done = await run(api, key, pause_s=3.0)
    assert done.succeeded, f"{done.result}\n{done.stderr[-4000:]}"
    assert (done.result["first"], done.result["second"]) == (12, 2)
    assert done.result["whoami"]["user_urn"] == "tml:user:alice"
    assert done.result["whoami"]["org_urn"] == "tml:organization:vision"


async def test_a_client_over_its_sample_limit_backs_off_and_loses_no_sample(
    anyio_backend: str, tmp_path: Path
) -> None:
    key = await new_key(tmp_path, "alice", limits={"max_samples": 5})
    echo = EchoExecutor()
    echo.open.clear()
    async with hosted(echo, tmp_path) as api:

        async def open_soon() -> None:
            for _ in range(5):
                await echo.entered.acquire()
            # The allowed samples are running; the server rejects the others meanwhile.
            await asyncio.sleep(1.0)
            assert len(echo.ran) == 0
            echo.open.set()

        opening = asyncio.create_task(open_soon())
        done = await run(api, key, pause_s=0.0)
        assert done.succeeded, done.stderr[-4000:]
        await opening
    assert (done.result["first"], done.result["second"]) == (12, 2)


async def test_a_long_completion_log_is_read_in_batches(
    anyio_backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server limits the events in one response; the client continues from the last cursor."""
    monkeypatch.setattr(result_waiters, "MAX_EVENTS_PER_POLL", 2)
    batch_sizes: list[int] = []
    after = result_waiters.CompletionLog.after

    async def counted(*args: Any, **options: Any) -> Any:
        events = await after(*args, **options)
        batch_sizes.append(len(events))
        return events

    monkeypatch.setattr(result_waiters.CompletionLog, "after", counted)
    key = await new_key(tmp_path, "alice")
    async with hosted(EchoExecutor(), tmp_path) as api:
        done = await run(api, key, pause_s=0.0)
    assert done.succeeded, done.stderr[-4000:]
    assert (done.result["first"], done.result["second"]) == (12, 2)
    assert max(batch_sizes) == 2
    assert sum(batch_sizes) >= 12


async def test_a_revoked_key_fails_at_once_with_the_reason(
    anyio_backend: str, tmp_path: Path
) -> None:
    key = await new_key(tmp_path, "alice", name="old laptop")
    await revoke(tmp_path, 1)
    async with hosted(EchoExecutor(), tmp_path) as api:
        done = await run(api, key, pause_s=0.0)
    assert not done.succeeded
    assert done.status != 0
    assert "401" in done.stderr
    assert "(old laptop) is revoked" in done.stderr
