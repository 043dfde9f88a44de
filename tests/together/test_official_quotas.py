"""The unmodified official SDK 0.36.0 over a quota: its user reads why at once, and training goes on."""

import asyncio
import json
import os
from pathlib import Path

import pytest

import sdk_envs
from server.echo import BASE, EchoExecutor
from server.hosting import hosted

PROGRAM = Path(__file__).with_name("quota_program.py")

pytestmark = [pytest.mark.sdk, pytest.mark.anyio, pytest.mark.timeout(150)]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


async def test_what_is_over_a_quota_fails_at_once_with_the_numbers(
    anyio_backend: str, tmp_path: Path
) -> None:
    python = await asyncio.to_thread(sdk_envs.ensure, "0.36.0")
    async with hosted(EchoExecutor(), tmp_path, max_checkpoints=2, max_runs=2) as api:
        # Of the same owner, in another session: a checkpoint and a run.
        model = await api.model()
        saved = await api.result(
            await api.step("save_weights", model_id=model, seq_id=1, path="kept")
        )
        url = str(api.http._base_url)
        process = await asyncio.create_subprocess_exec(
            *(str(python), str(PROGRAM), BASE, saved["path"]),
            env={**os.environ, "TINKER_BASE_URL": url, "TINKER_API_KEY": "tml-x"},
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            out, _ = await asyncio.wait_for(process.communicate(), 100)
        except TimeoutError:
            process.kill()
            raise
    seen = json.loads(out.decode().splitlines()[-1])
    assert seen.pop("step")["error"] == ""
    for what, found in seen.items():
        assert "over quota: you have 2" in found["error"], what
        assert "2 are allowed" in found["error"], what
        assert found["seconds"] < 15, what
