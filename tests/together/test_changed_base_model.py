"""
A real engine on a base model whose weights have changed: existing runs are refused, new ones are not.

That earlier files, or `--accept-changed-base`, let the old runs continue:
tests/server/scheduler/test_base_model_check.py.
"""

import asyncio
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from models.test_content_hash import flip
from server.hosting import Api, hosted, local_executor
from serving import TINY

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(240)]

SAMPLE = {
    "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
    "sampling_params": {"max_tokens": 4, "temperature": 0.0, "stop": []},
}


async def saved(api: Api) -> str:
    """The path of a new run's weights."""
    model = await api.model()
    body = {"model_id": model, "seq_id": 1, "path": "kept"}
    path: str = (await api.result(await api.step("save_weights_for_sampler", **body)))["path"]
    return path


async def sampled(api: Api, path: str) -> Any:
    return await api.result(await api.step("asample", model_path=path, **SAMPLE))


async def test_a_run_on_changed_base_weights_is_refused(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    executor = local_executor(model, TINY)
    async with hosted(executor, tmp_path / "data", janitor_s=0) as api:
        api.base_model = TINY
        await executor.start()
        path = await saved(api)
        assert len((await sampled(api, path))["sequences"][0]["tokens"]) == 4

        flip(model / "model.safetensors", -2)
        killed = executor.process_id(TINY)
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        while executor.process_id(TINY) in (killed, None):  # noqa: ASYNC110 (another process)
            await asyncio.sleep(0.02)
        refused = await sampled(api, path)
        assert refused["category"] == "user"
        assert "its weights differ" in refused["error"]
        again = await sampled(api, await saved(api))
        assert len(again["sequences"][0]["tokens"]) == 4
    assert "are refused. New runs are served" in caplog.text
