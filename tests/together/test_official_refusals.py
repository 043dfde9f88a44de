"""The unmodified official SDK 0.36.0 and a step that is refused: the next ones do not wait for it."""

import asyncio
import json
import os
from pathlib import Path

import pytest

import sdk_envs
from server.echo import BASE, EchoExecutor
from server.hosting import hosted

PROGRAM = Path(__file__).with_name("refusal_program.py")

pytestmark = [pytest.mark.sdk, pytest.mark.anyio, pytest.mark.timeout(150)]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


async def test_training_goes_on_at_once_after_a_batch_that_was_too_large(
    anyio_backend: str, tmp_path: Path
) -> None:
    """Its number was taken by the client and never came: the gap would have stayed open for 360 s."""
    python = await asyncio.to_thread(sdk_envs.ensure, "0.36.0")
    async with hosted(EchoExecutor(), tmp_path, max_body_bytes=100_000) as api:
        url = str(api.http._base_url)
        process = await asyncio.create_subprocess_exec(
            *(str(python), str(PROGRAM), BASE, "10000"),
            env={**os.environ, "TINKER_BASE_URL": url, "TINKER_API_KEY": "tml-x"},
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            out, _ = await asyncio.wait_for(process.communicate(), 100)
        except TimeoutError:
            process.kill()
            raise
    refused, usual = json.loads(out.decode().splitlines()[-1])
    batch, step = refused["errors"]
    assert "413" in batch
    assert "forward_backward step 1 before this optim_step failed" in step
    assert "100000 are allowed" in step
    assert usual["errors"] == []
    assert refused["seconds"] + usual["seconds"] < 60


@pytest.mark.parametrize(
    ("version", "refused"),
    # SDK 0.4.1 refuses to send NaN itself, and never fills the number of that step.
    [("0.36.0", ["refused"]), ("0.4.1", [])],
)
async def test_a_setting_that_is_no_number_fails_by_its_name_and_training_goes_on(
    anyio_backend: str, tmp_path: Path, version: str, refused: list[str]
) -> None:
    """The official SDK sends null for NaN and for infinities; a null elsewhere is what it was."""
    python = await asyncio.to_thread(sdk_envs.ensure, version)
    program = PROGRAM.with_name("numbers_program.py")
    async with hosted(EchoExecutor(), tmp_path) as api:
        url = str(api.http._base_url)
        process = await asyncio.create_subprocess_exec(
            *(str(python), str(program), BASE, *refused),
            env={**os.environ, "TINKER_BASE_URL": url, "TINKER_API_KEY": "tml-x"},
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            out, _ = await asyncio.wait_for(process.communicate(), 100)
        except TimeoutError:
            process.kill()
            raise
    seen = json.loads(out.decode().splitlines()[-1])
    assert len(seen["refused"]) == (12 if refused else 0)
    for setting, error in seen["refused"].items():
        name = setting.partition("=")[0]
        assert f"'adam_params', '{name}'" in error, (setting, error)
        assert "null is not a number" in error
    assert seen["usual"] == ["", "", "", ""]
