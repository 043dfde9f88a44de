"""Decode steps that CUDA graphs record, for models of every kind, with plain torch as kernels."""

import sys
from pathlib import Path

import pytest
import torch

import plain_decode_ops
from recorded_steps import WRITERS, Steps, load
from tinkex.engine import model as package
from tinkex.engine.model.start_check import check_logits


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in plain_decode_ops.MODULES:
        monkeypatch.setitem(sys.modules, f"tinkex.engine.model.{name}", plain_decode_ops)
        monkeypatch.setattr(package, name, plain_decode_ops, raising=False)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", WRITERS)
def test_steps_equal_passes_over_whole_sequences(family: str, tmp_path: Path) -> None:
    model = load(tmp_path / "model", family)
    Steps(model, plain_decode_ops.LoraTables).check(1e-3)
    decoder = model.original_decoder({})
    assert decoder is not None
    ids, expected = model.probed
    with torch.inference_mode():
        check_logits(decoder.probe_logits(ids), expected, 1e-3)
