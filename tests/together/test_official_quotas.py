"""Official SDK 0.36.0 over a quota: requests fail at once with the reason, and training continues."""

from pathlib import Path

import pytest

from server.echo import BASE, EchoExecutor
from server.hosting import hosted
from together.official_sdk import run_program_async

PROGRAM = Path(__file__).with_name("quota_program.py")

pytestmark = [pytest.mark.sdk, pytest.mark.anyio, pytest.mark.timeout(150)]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


async def test_requests_over_a_quota_fail_at_once_and_state_the_quota(
    anyio_backend: str, tmp_path: Path
) -> None:
    async with hosted(EchoExecutor(), tmp_path, max_checkpoints=2, max_runs=2) as api:
        # Another session of the same owner keeps one checkpoint and one run.
        model = await api.model()
        saved = await api.result(
            await api.step("save_weights", model_id=model, seq_id=1, path="kept")
        )
        seen = await run_program_async("0.36.0", PROGRAM, BASE, saved["path"], api=api)
    assert seen.pop("step")["error"] == ""
    for what, found in seen.items():
        assert "over quota: you have 2" in found["error"], what
        assert "2 are allowed" in found["error"], what
        assert found["seconds"] < 15, what
