"""The unmodified official SDK 0.36.0 with keys: tokens that expire under it, and limits it runs into."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

import sdk_envs
from server.echo import BASE, EchoExecutor
from server.hosting import Api, hosted
from server.tenants import new_key, revoke
from tinkex.server.scheduler import results
from together.official_sdk import FINE

PROGRAM = Path(__file__).with_name("keys_program.py")

pytestmark = [pytest.mark.sdk, pytest.mark.anyio, pytest.mark.timeout(150)]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


async def ran(api: Api, key: str, *, pause_s: float) -> tuple[int, dict[str, Any], str]:
    python = await asyncio.to_thread(sdk_envs.ensure, "0.36.0")
    process = await asyncio.create_subprocess_exec(
        str(python),
        str(PROGRAM),
        BASE,
        str(pause_s),
        env={**os.environ, "TINKER_BASE_URL": str(api.http._base_url), "TINKER_API_KEY": key},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 120)
    lines = out.decode().splitlines()
    told = json.loads(lines[-1]) if lines else {}
    status = process.returncode or 0
    return 0 if told and status in FINE else status, told, err.decode()


async def test_tokens_expire_and_are_fetched_again_without_a_word(
    anyio_backend: str, tmp_path: Path
) -> None:
    key = await new_key(tmp_path, "alice", project_id="vision")
    async with hosted(EchoExecutor(), tmp_path, jwt=True, jwt_s=2.0) as api:
        status, told, errors = await ran(api, key, pause_s=3.0)
    assert status == 0, f"{told}\n{errors[-4000:]}"
    assert (told["first"], told["second"]) == (12, 2)
    assert told["whoami"]["user_urn"] == "tml:user:alice"
    assert told["whoami"]["org_urn"] == "tml:organization:vision"


async def test_a_client_over_its_limit_slows_down_and_loses_nothing(
    anyio_backend: str, tmp_path: Path
) -> None:
    key = await new_key(tmp_path, "alice", limits={"max_samples": 5})
    echo = EchoExecutor()
    echo.open.clear()
    async with hosted(echo, tmp_path) as api:

        async def open_soon() -> None:
            for _ in range(5):
                await echo.entered.acquire()
            # All that are allowed are running: the others are being refused meanwhile.
            await asyncio.sleep(1.0)
            assert len(echo.ran) == 0
            echo.open.set()

        opening = asyncio.create_task(open_soon())
        status, told, errors = await ran(api, key, pause_s=0.0)
        assert status == 0, errors[-4000:]
        await opening
    assert (told["first"], told["second"]) == (12, 2)


async def test_a_long_log_of_samples_is_read_in_pieces(
    anyio_backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server tells so many at once; the client polls on from there by itself."""
    monkeypatch.setattr(results, "MOST_TOLD", 2)
    told_at_once: list[int] = []
    after = results.Completions.after

    async def counted(*args: Any, **options: Any) -> Any:
        events = await after(*args, **options)
        told_at_once.append(len(events))
        return events

    monkeypatch.setattr(results.Completions, "after", counted)
    key = await new_key(tmp_path, "alice")
    async with hosted(EchoExecutor(), tmp_path) as api:
        status, told, errors = await ran(api, key, pause_s=0.0)
    assert status == 0, errors[-4000:]
    assert (told["first"], told["second"]) == (12, 2)
    assert max(told_at_once) == 2
    assert sum(told_at_once) >= 12


async def test_a_revoked_key_is_told_so_at_once(anyio_backend: str, tmp_path: Path) -> None:
    key = await new_key(tmp_path, "alice", name="old laptop")
    await revoke(tmp_path, 1)
    async with hosted(EchoExecutor(), tmp_path) as api:
        status, _, errors = await ran(api, key, pause_s=0.0)
    assert status != 0
    assert "401" in errors
    assert "(old laptop) is revoked" in errors
