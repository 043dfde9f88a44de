"""Decode steps that CUDA graphs record, for models of every kind, with the kernels.

With TRITON_INTERPRET=1 they run on a CPU, in float32.
"""

from pathlib import Path

import pytest
import torch

from recorded_steps import Steps, load

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]


#: In the interpreter a step takes seconds, so these stand for the kinds of layers.
FAMILIES = [
    *("Qwen3Moe", "GptOss", "DeepseekV3", "Qwen3_5MoeText", "Qwen3Next", "NemotronH"),
    *("Gemma2", "Gemma3Text", "Granite", "Qwen3VL"),
]


@pytest.mark.timeout(600)
@pytest.mark.skipif(torch.cuda.is_available(), reason="compares with the CPU, in float32")
@pytest.mark.parametrize("family", FAMILIES)
def test_steps_equal_passes_over_whole_sequences(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tinkex.engine.model import decode_ops

    # As many parts as fill a GPU would take minutes.
    monkeypatch.setattr(decode_ops, "attention_splits", lambda *_: 2)
    Steps(load(tmp_path / "model", family), decode_ops.LoraTables).check(1e-3)
