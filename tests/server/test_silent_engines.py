"""An engine that has work and says nothing: whoever waits is told, and nothing is ended."""

import logging
import os
import signal
from pathlib import Path

import pytest

from server.hosting import hosted
from serving import TINY
from tinkex.server import engine_process
from tinkex.server.engine_process import LocalExecutor
from tinkex.server.executor import EngineOptions, ServedModel

pytestmark = pytest.mark.anyio


async def test_polls_say_that_the_engine_does_not_answer(
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(engine_process, "SILENT_S", 0.5, raising=False)
    caplog.set_level(logging.WARNING)
    served = [ServedModel(name=TINY, folder=tiny_model)]
    executor = LocalExecutor(served, EngineOptions(threads=1))
    async with hosted(executor, tmp_path, janitor_s=0, long_poll_s=1.0) as api:
        await executor.start()
        api.base_model = TINY
        model = await api.model()
        process = executor.process_id(TINY)
        assert process is not None
        os.kill(process, signal.SIGSTOP)
        try:
            passed = await api.forward_backward(model, 1)
            told = (await api.poll(passed)).json
        finally:
            os.kill(process, signal.SIGCONT)
        assert told["queue_state"] == "paused_capacity"
        assert f"the engine of {TINY} has not answered for" in told["queue_state_reason"]
        # It goes on where it was: the same process, and no step is lost or done twice.
        assert (await api.passed(passed)).metrics["loss:sum"] > 0
        assert executor.process_id(TINY) == process
    assert caplog.text.count("has not answered for") == 1
    assert "has answered" in caplog.text
