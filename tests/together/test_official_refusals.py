"""Official SDKs and a rejected training step: later steps do not wait for its number."""

from pathlib import Path

import pytest

from server.echo import BASE, EchoExecutor
from server.hosting import hosted
from together.official_sdk import run_program_async

PROGRAM = Path(__file__).with_name("refusal_program.py")

pytestmark = [pytest.mark.sdk, pytest.mark.anyio, pytest.mark.timeout(150)]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


async def test_training_continues_at_once_after_a_batch_that_is_too_large(
    anyio_backend: str, tmp_path: Path
) -> None:
    """The client uses up the number of a rejected step; the server must not wait 360 s for it."""
    async with hosted(EchoExecutor(), tmp_path, max_body_bytes=100_000) as api:
        refused, usual = await run_program_async("0.36.0", PROGRAM, BASE, "10000", api=api)
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
async def test_a_setting_that_is_not_a_number_fails_by_name_and_training_continues(
    anyio_backend: str, tmp_path: Path, version: str, refused: list[str]
) -> None:
    """The official SDK sends null for NaN and infinity; null keeps its meaning in other fields."""
    program = PROGRAM.with_name("numbers_program.py")
    async with hosted(EchoExecutor(), tmp_path) as api:
        seen = await run_program_async(version, program, BASE, *refused, api=api)
    assert len(seen["refused"]) == (12 if refused else 0)
    for setting, error in seen["refused"].items():
        name = setting.partition("=")[0]
        assert f"'adam_params', '{name}'" in error, (setting, error)
        assert "null is not a number" in error
    assert seen["usual"] == ["", "", "", ""]
