"""The unmodified official SDK 0.36.0 on a disk that is full for a while: a pause, and no error."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import sdk_envs
from server.echo import BASE, EchoExecutor
from server.hosting import hosted
from server.storage.failing import FULL, FailingFileSystem
from together.official_sdk import FINE

PROGRAM = Path(__file__).with_name("full_disk_program.py")
# Too many for a row of the database.
TOKENS = 20_000
STEPS = 8

pytestmark = [pytest.mark.sdk, pytest.mark.anyio, pytest.mark.timeout(150)]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def _sound_again() -> Iterator[None]:
    yield
    FailingFileSystem.error = None


async def test_no_step_is_lost_or_doubled_and_the_client_sees_no_error(
    anyio_backend: str, tmp_path: Path
) -> None:
    python = await asyncio.to_thread(sdk_envs.ensure, "0.36.0")
    async with hosted(EchoExecutor(), tmp_path, storage="failing://official") as api:
        process = await asyncio.create_subprocess_exec(
            *(str(python), str(PROGRAM), BASE, str(TOKENS), str(STEPS)),
            env={
                **os.environ,
                "TINKER_BASE_URL": str(api.http._base_url),
                "TINKER_API_KEY": "tml-x",
            },
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout
        try:
            values = [int(await asyncio.wait_for(process.stdout.readline(), 60))]
            FailingFileSystem.error = FULL
            for _ in range(1000):
                if (await api.get("/api/v1/healthz")).status == 503:
                    break
                await asyncio.sleep(0.01)
            else:
                pytest.fail("the server has not noticed that its disk is full")
            # Long enough for refusals that the client waits after.
            await asyncio.sleep(2)
            FailingFileSystem.error = None
            out, _ = await asyncio.wait_for(process.communicate(), 60)
        finally:
            if process.returncode is None:
                process.kill()
    values += map(int, out.split())
    # Each step makes the number twice itself and the tokens of its one pass.
    assert values == [TOKENS * (2**count - 1) for count in range(1, STEPS + 1)]
    assert process.returncode in FINE
