"""
An engine that loses its device, or whose device is full, recovers without an error for the client.

The test raises the errors in a real engine process on a CPU, where a GPU would raise them;
`benchmarks/check_gpu_recovery.py` tests real GPUs.
"""

from pathlib import Path

import pytest

import tinkex
from serving import TINY, serving
from tinkex import types

#: Loaded by the engine's Python. Each word in a file raises an error for one batch.
SITECUSTOMIZE = """
import os, sys
if any("tinkex.engine" in word for word in sys.orig_argv):
    import torch
    from tinkex.engine import engine

    plain = engine.run_micro_batch
    kinds = {
        "lost": torch.AcceleratorError("CUDA error: device-side assert triggered"),
        "full": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 98.00 MiB."),
    }

    def run_micro_batch(*args, **kwargs):
        first, *rest = open(os.environ["TEST_LOSSES"]).read().split() or [None]
        if first is not None:
            with open(os.environ["TEST_LOSSES"], "w") as file:
                file.write(" ".join(rest))
            raise kinds[first]
        return plain(*args, **kwargs)

    engine.run_micro_batch = run_micro_batch
"""
#: Which errors count as a lost device: tests/engine/test_worker.py.
KINDS = ("lost", "full")


def losses_of(url: str, planned: Path | None) -> list[float]:
    tokens = list(range(20, 28))
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * 7},
    )
    found = []
    with tinkex.ServiceClient(base_url=url) as service:
        training = service.create_lora_training_client(TINY, rank=4, seed=7)
        for kind in ("", *KINDS):
            if planned is not None:
                planned.write_text(kind)
            passed = training.forward_backward([datum], "cross_entropy")
            training.optim_step(types.AdamParams(learning_rate=1e-2)).result(120)
            found.append(float(passed.result(120).metrics["loss:sum"]))
    return found


@pytest.mark.timeout(240)
def test_a_lost_or_full_device_changes_no_result(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = tmp_path / "planned"
    (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE)
    monkeypatch.setenv("TEST_LOSSES", str(planned))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with serving(f"{TINY}={tiny_model}", data=tmp_path / "data", args=("--deterministic",)) as one:
        planned.write_text("")
        with_errors = losses_of(one.url, planned)
        planned.write_text("")
        told = [line for line in one.log if "its device failed or ran out of memory" in line]
        assert len(told) == len(KINDS), one.log[-40:]
        assert losses_of(one.url, None) == with_errors
