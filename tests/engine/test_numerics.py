"""Deterministic engines keep what their bits depend on, and refuse to continue with something else."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tinkex.engine import Engine, EngineSettings
from tinkex.engine.numerics import NumericsChanged


def start(folder: Path, file: Path, **options: Any) -> Engine:
    settings = {"device": "cpu", "deterministic": True, "numerics_file": file, **options}
    return Engine(EngineSettings(name="tiny", folder=folder, **settings))


def test_a_restart_that_computes_differently_is_refused_until_it_is_accepted(
    tiny_folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "numerics" / "tiny.json"
    start(tiny_folder, file)
    kept = json.loads(file.read_text())
    assert kept["torch"] == torch.__version__
    assert kept["dtype"] == "float32"
    assert kept["path"] == "transformers"
    start(tiny_folder, file)  # nothing has changed

    with pytest.raises(NumericsChanged, match="dtype was float32, now bfloat16") as refused:
        start(tiny_folder, file, dtype="bfloat16")
    assert "--accept-changed-numerics" in refused.value.hint
    file.write_text(json.dumps({**kept, "device": "NVIDIA H200", "torch": "2.11.0"}))
    with pytest.raises(NumericsChanged, match=r"device was NVIDIA H200, now .* torch was 2\.11\.0"):
        start(tiny_folder, file)

    # Without --deterministic, results differ by rounding anyway.
    start(tiny_folder, file, deterministic=False)
    start(tiny_folder, file, accept_changed_numerics=True)
    assert json.loads(file.read_text()) == kept
    start(tiny_folder, file)
