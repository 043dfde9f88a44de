"""A model's folder from a stranger: its code is not run, its pickles are not opened."""

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch

from tinkex.engine.model import load


class Marked:
    """A pickle that leaves a mark when it is opened."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self._mark,)


@pytest.fixture
def hostile(tiny_folder: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "hostile"
    shutil.copytree(tiny_folder, folder)
    return folder


def test_code_in_a_folder_is_not_run(hostile: Path, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    (hostile / "evil.py").write_text(f"open({str(mark)!r}, 'w')\nclass Evil: pass\n")
    file = hostile / "config.json"
    config = json.loads(file.read_text())
    config["auto_map"] = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}
    file.write_text(json.dumps(config))
    load(hostile, torch.float32)  # as the family that transformers itself knows
    config["model_type"] = "nobody-knows-this"
    file.write_text(json.dumps(config))
    with pytest.raises((ValueError, OSError)):
        load(hostile, torch.float32)
    assert not mark.exists()


def test_a_pickle_in_a_folder_is_not_opened(hostile: Path, tmp_path: Path) -> None:
    mark = tmp_path / "opened"
    for file in hostile.glob("*.safetensors"):
        file.unlink()
    (hostile / "pytorch_model.bin").write_bytes(pickle.dumps(Marked(mark)))
    with pytest.raises((ValueError, OSError)):
        load(hostile, torch.float32)
    assert not mark.exists()
