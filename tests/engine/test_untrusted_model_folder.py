"""An untrusted model folder: its code is not run, its pickles are not opened."""

import json
import pickle
import shutil
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tinkex.engine.model.original_model import load
from tinkex.models.resolve import ModelNotFound, resolve
from tinkex.models.weight_file_checks import RefusedFolder


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
    load(hostile, torch.float32)  # loaded with transformers' own code for this family
    config["model_type"] = "unknown-family"
    file.write_text(json.dumps(config))
    with pytest.raises((ValueError, OSError)):
        load(hostile, torch.float32)
    assert not mark.exists()


def test_weights_are_read_straight_onto_a_device(tiny_folder: Path) -> None:
    """As for a GPU; here the device is a CPU, so that the weights can be compared."""
    straight = load(tiny_folder, torch.float32, device=torch.device("cpu")).state_dict()
    usual = load(tiny_folder, torch.float32).state_dict()
    assert straight.keys() == usual.keys()
    assert all(torch.equal(straight[name], usual[name]) for name in usual)


def test_a_pickle_in_a_folder_is_not_opened(hostile: Path, tmp_path: Path) -> None:
    mark = tmp_path / "opened"
    for file in hostile.glob("*.safetensors"):
        file.unlink()
    (hostile / "pytorch_model.bin").write_bytes(pickle.dumps(Marked(mark)))
    with pytest.raises((ValueError, OSError)):
        load(hostile, torch.float32)
    assert not mark.exists()


def with_index(folder: Path, name: str) -> Path:
    """Moves the weights to a file that the index names; returns its path."""
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    file.unlink()
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    target = folder / name
    target.parent.mkdir(exist_ok=True)
    torch.save(tensors, target)
    return target


@pytest.mark.parametrize("name", ["shard.bin", "../elsewhere/w.bin", "/absolute/w.bin"])
def test_an_index_cannot_name_pickles_or_files_outside_the_folder(
    hostile: Path, tmp_path: Path, name: str
) -> None:
    name = name.replace("/absolute", str(tmp_path / "absolute"))
    with_index(hostile, name)
    with pytest.raises(RefusedFolder, match=r"must be \*.safetensors files in the folder itself"):
        load(hostile, torch.float32)
    with pytest.raises(ModelNotFound, match="names"):  # a server refuses it earlier
        resolve(str(hostile))


def test_an_index_cannot_name_safetensors_outside_the_folder(hostile: Path, tmp_path: Path) -> None:
    (file,) = hostile.glob("*.safetensors")
    moved = file.rename(tmp_path / "outside.safetensors")
    index = {"weight_map": dict.fromkeys(load_file(moved), "../outside.safetensors")}
    (hostile / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(RefusedFolder, match="outside"):
        load(hostile, torch.float32)


def test_an_index_of_plain_files_is_loaded(hostile: Path) -> None:
    """Also if they are links, as in the cache of the hub."""
    (file,) = hostile.glob("*.safetensors")
    blob = file.rename(hostile.parent / "blob")
    (hostile / "model-00001-of-00001.safetensors").symlink_to(blob)
    shards = dict.fromkeys(load_file(blob), "model-00001-of-00001.safetensors")
    index = {"metadata": {}, "weight_map": shards}
    (hostile / "model.safetensors.index.json").write_text(json.dumps(index))
    load(hostile, torch.float32)


@pytest.mark.parametrize("weights", ["adapter_model.bin", "../w.safetensors", "pytorch_model.bin"])
def test_a_config_cannot_name_other_weight_files(hostile: Path, weights: str) -> None:
    file = hostile / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "transformers_weights": weights}))
    with pytest.raises(RefusedFolder, match="as its weights"):
        load(hostile, torch.float32)


def test_a_folder_with_only_pickles_is_refused(hostile: Path, tmp_path: Path) -> None:
    (file,) = hostile.glob("*.safetensors")
    tensors = load_file(file)
    file.unlink()
    torch.save(tensors, hostile / "pytorch_model-00001-of-00001.bin")
    index = {"weight_map": dict.fromkeys(tensors, "pytorch_model-00001-of-00001.bin")}
    (hostile / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with pytest.raises((ValueError, OSError)):
        load(hostile, torch.float32)


def test_an_adapter_config_does_not_load_another_folder(
    hostile: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    """With peft installed, transformers would load whatever base model the adapter names."""
    config = {"peft_type": "LORA", "base_model_name_or_path": str(tiny_folder)}
    (hostile / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(RefusedFolder, match="adapter"):
        load(hostile, torch.float32)


def test_layers_without_weights_are_refused_before_they_are_built(hostile: Path) -> None:
    file = hostile / "config.json"
    config = json.loads(file.read_text())
    config.pop("layer_types", None)
    file.write_text(json.dumps({**config, "num_hidden_layers": 100_000}))
    began_s = time.monotonic()
    with pytest.raises(RefusedFolder, match="has 100000 layers, but the weights have 2"):
        load(hostile, torch.float32)
    assert time.monotonic() - began_s < 20


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "lm_head.weight"])
def test_a_folder_that_lacks_weights_is_refused(hostile: Path, name: str) -> None:
    """transformers would make random ones, with a warning."""
    (file,) = hostile.glob("*.safetensors")
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(RefusedFolder, match=rf"lack 1 .* such as {name}: they would be random"):
        load(hostile, torch.float32)
