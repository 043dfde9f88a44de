"""Decode steps that CUDA graphs record, for models of every kind, with plain torch as kernels."""

import sys
from pathlib import Path

import pytest
import torch

import plain_decode_ops
from numerics.test_families import write_model
from recorded_steps import WRITERS, Steps, check_that_nothing_waits, load
from tinkex.engine import model as package
from tinkex.engine.model.base_model import BaseModel
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
    check_that_nothing_waits(model)


@pytest.mark.filterwarnings("ignore")
def test_a_rotary_embedding_that_changes_is_not_recorded(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    folder = write_model(tmp_path / "model", "Llama", rope_parameters=rope)
    model = BaseModel(folder, device=torch.device("cpu"), dtype=torch.float32)
    assert model.original_decoder({}) is None
