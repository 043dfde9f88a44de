"""
An engine that loses its device recovers, and no result shows it.

The test raises the error in a real engine process on a CPU, where a GPU would raise it;
`benchmarks/check_gpu_recovery.py` tests real GPUs. tests/engine/test_worker.py shows which errors count
as a lost device, and that a full one ends the process in the same way.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from server.hosting import Api, hosted, local_executor
from serving import TINY

pytestmark = pytest.mark.anyio

#: Loaded by the engine's Python. It raises the error for one batch, if the file is there.
SITECUSTOMIZE = """
import os, sys
if any("tinkex.engine" in word for word in sys.orig_argv):
    import torch
    from tinkex.engine import engine

    plain = engine.run_micro_batch
    lost = torch.AcceleratorError("CUDA error: device-side assert triggered")

    def run_micro_batch(*args, **kwargs):
        if os.path.exists(os.environ["TEST_LOSS"]):
            os.remove(os.environ["TEST_LOSS"])
            raise lost
        return plain(*args, **kwargs)

    engine.run_micro_batch = run_micro_batch
"""


async def losses_of(api: Api, lose: Callable[[], object] = lambda: None) -> list[float]:
    """The losses of three steps; `lose` is called before the second."""
    session = await api.session()
    options = {"base_model": TINY, "lora_config": {"rank": 4, "seed": 7}}
    made = await api.step("create_model", session_id=session, model_seq_id=0, **options)
    model = (await api.result(made))["model_id"]
    found = []
    for step in range(3):
        if step == 1:
            lose()
        passed = await api.forward_backward(model, 2 * step + 1, tokens=8)
        stepped = await api.optim_step(model, 2 * step + 2, learning_rate=1e-2)
        found.append((await api.passed(passed)).metrics["loss:sum"])
        assert "metrics" in await api.result(stepped)
    return found


@pytest.mark.timeout(240)
async def test_a_lost_device_changes_no_result(
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    planned = tmp_path / "planned"
    (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE)
    monkeypatch.setenv("TEST_LOSS", str(planned))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    executor = local_executor(tiny_model, TINY, deterministic=True)
    async with hosted(executor, tmp_path / "data", janitor_s=0) as api:
        await executor.start()
        with_loss = await losses_of(api, planned.touch)
        assert not planned.exists()
        assert caplog.text.count("its device failed or ran out of memory") == 1
        assert await losses_of(api) == with_loss
