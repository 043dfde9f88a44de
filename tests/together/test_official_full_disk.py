"""Official SDK 0.36.0 while the server's disk is full: the client waits and sees no error."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

import sdk_envs
from server.echo import BASE, EchoExecutor
from server.hosting import hosted
from server.storage.failing import FULL, FailingFileSystem
from together.official_sdk import ACCEPTED_STATUSES, environment

PROGRAM = Path(__file__).with_name("full_disk_program.py")
# Large enough that the payload is stored as a file and not in the database.
TOKENS = 20_000
STEPS = 8

pytestmark = [pytest.mark.sdk, pytest.mark.anyio, pytest.mark.timeout(150)]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def _repaired() -> Iterator[None]:
    yield
    FailingFileSystem.error = None


async def test_no_step_is_lost_or_duplicated_and_the_client_sees_no_error(
    anyio_backend: str, tmp_path: Path
) -> None:
    python = await asyncio.to_thread(sdk_envs.ensure, "0.36.0")
    async with hosted(EchoExecutor(), tmp_path, storage="failing://official") as api:
        process = await asyncio.create_subprocess_exec(
            *(str(python), str(PROGRAM), BASE, str(TOKENS), str(STEPS)),
            env=environment(str(api.http._base_url)),
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
                pytest.fail("healthz does not report the full disk")
            # Long enough for rejected requests that the client retries with backoff.
            await asyncio.sleep(2)
            FailingFileSystem.error = None
            out, _ = await asyncio.wait_for(process.communicate(), 60)
        finally:
            if process.returncode is None:
                process.kill()
    values += map(int, out.split())
    # Each optimizer step doubles the value and adds the number of tokens of its one pass.
    assert values == [TOKENS * (2**count - 1) for count in range(1, STEPS + 1)]
    assert process.returncode in ACCEPTED_STATUSES
