"""Folders with quantized weights are served as the numbers that they mean, or refused by name."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from numerics.helpers import work
from numerics.mixtures import engine_of, logprobs_of, write_mixture
from numerics.test_mixtures import datum_of
from tinkex.engine.adapters.merge import merge
from tinkex.engine.adapters.model_needs import read_shape
from tinkex.engine.model.unsupported import UnsupportedModel
from tinkex.engine.model_fit import Candidate
from tinkex.models.tiny_model import write_tiny_model
from tinkex.models.weight_file_checks import RefusedFolder
from tinkex.wire.training import AdamOptimizerConfig, AdamParams, LoraConfig

pytestmark = pytest.mark.filterwarnings("ignore")

#: The largest number of e4m3.
LARGEST = 448
BLOCK = 16


def write_fp8(folder: Path, plain: Path, block: int = BLOCK) -> None:
    """The weights of `plain` in FP8; `plain` gets the numbers that they mean."""
    tensors = load_file(plain / "model.safetensors")
    packed = dict(tensors)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        weight = tensors[name]
        blocks = [-(-size // block) for size in weight.shape]
        scales = torch.empty(blocks)
        numbers = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
        for row, column in np.ndindex(*blocks):
            part = np.s_[row * block : (row + 1) * block, column * block : (column + 1) * block]
            scales[row, column] = scale = weight[part].abs().max() / LARGEST
            numbers[part] = (weight[part] / scale).to(torch.float8_e4m3fn)
            tensors[name][part] = numbers[part].float() * scale
        packed |= {name: numbers, f"{name}_scale_inv": scales}
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    shutil.copytree(plain, folder)
    save_file(packed, folder / "model.safetensors", metadata={"format": "pt"})
    quantized(
        folder, quant_method="fp8", activation_scheme="dynamic", weight_block_size=[block, block]
    )


def quantized(folder: Path, **quantization: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("family", ["dense", "experts"])
def test_a_folder_in_fp8_is_the_same_model_as_its_numbers(family: str, tmp_path: Path) -> None:
    if family == "dense":
        write_tiny_model(tmp_path / "plain", arch="qwen3")
    else:
        write_mixture(tmp_path / "plain", "Qwen3Moe")
    write_fp8(tmp_path / "fp8", tmp_path / "plain")
    tokens = list(range(5, 17))
    found = []
    for name in ("fp8", "plain"):
        engine = engine_of(tmp_path / name)
        engine.create("m", LoraConfig(rank=2, seed=1), AdamOptimizerConfig())
        engine.run_pass("m", work([datum_of(tokens)]), backward=True)
        engine.optim_step("m", AdamParams(learning_rate=1e-2))
        (output,) = engine.run_pass("m", work([datum_of(tokens)]), backward=False).loss_fn_outputs
        found.append(output["logprobs"].to_numpy())
    np.testing.assert_array_equal(found[0], found[1])
    # A merged model has plain numbers, and says so.
    engine.save("m", tmp_path / "adapter", optimizer=False)
    ours, theirs = (
        merge(tmp_path / name, tmp_path / "adapter", tmp_path / f"merged-{name}", torch.float32)
        for name in ("fp8", "plain")
    )
    assert "quantization_config" not in json.loads((ours.folder / "config.json").read_text())
    torch.testing.assert_close(
        logprobs_of(ours.folder, tokens), logprobs_of(theirs.folder, tokens), atol=2e-6, rtol=0
    )
    # It needs the memory of its numbers.
    shapes = [read_shape(tmp_path / name) for name in ("fp8", "plain")]
    assert shapes[0].parameters == shapes[1].parameters


@pytest.mark.parametrize("method", ["awq", "gptq", "bitsandbytes", "compressed-tensors"])
def test_other_quantized_weights_are_refused_by_name(method: str, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny", arch="qwen3")
    quantized(folder, quant_method=method, bits=4)
    said = rf"quantized \({method}\)"
    with pytest.raises(UnsupportedModel, match=said):
        engine_of(folder)
    candidate = Candidate.of_folder(folder)
    assert candidate.served is False
    assert method in candidate.reason


def test_a_matrix_that_ends_within_a_block_is_refused(tmp_path: Path) -> None:
    """transformers divides it evenly instead: other numbers, without a word."""
    write_tiny_model(tmp_path / "plain", arch="qwen3")
    write_fp8(tmp_path / "fp8", tmp_path / "plain", block=128)
    with pytest.raises(RefusedFolder, match="not a whole one"):
        engine_of(tmp_path / "fp8")
