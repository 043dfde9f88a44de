"""A merged model gives the results of the engine with the adapter, and those of PEFT."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from numerics.helpers import model_from, random_adapter, random_datum, work
from tinkex.engine import Engine, EngineSettings
from tinkex.engine.adapters.merge import merge
from tinkex.wire.errors import UserFailure

pytestmark = pytest.mark.filterwarnings("ignore")


def logits_of(folder: Path, tokens: list[int]) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


@pytest.mark.parametrize("arch", ["llama", "tied", "qwen3"])
def test_merged_is_what_peft_and_the_engine_give(
    arch: str, engine_on: Callable[[str], Engine], models: dict[str, Path], tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    engine = engine_on(arch)
    adapter = random_adapter(engine, tmp_path / "adapter", seed=3)
    datum = random_datum(np.random.default_rng(1), 20)
    tokens = datum.model_input.to_ints()
    merged = merge(models[arch], adapter, tmp_path / "merged", torch.float32)
    ours = logits_of(merged.folder, tokens)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = AutoModelForCausalLM.from_pretrained(models[arch])
        with torch.no_grad():
            theirs = PeftModel.from_pretrained(base, adapter)(torch.tensor([tokens])).logits[0]
    assert (ours - theirs).abs().max() < 1e-4

    model_from(engine, "m", adapter)
    found = engine.run_pass("m", work([datum]), backward=False).loss_fn_outputs[0]["logprobs"]
    engine.drop("m")
    targets = torch.from_numpy(datum.loss_fn_inputs["target_tokens"].to_numpy())
    expected = ours.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    np.testing.assert_allclose(found.to_numpy(), expected.numpy(), atol=1e-4)

    assert merged.untied == (arch == "tied")
    config = json.loads((merged.folder / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    names = {file.name for file in merged.folder.iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json", "generation_config.json"} <= names
    assert (merged.folder / "generation_config.json").read_text() == (
        models[arch] / "generation_config.json"
    ).read_text()
    assert merged.size_bytes == sum(file.stat().st_size for file in merged.folder.iterdir())
    # And it can be served like any other model.
    again = Engine(EngineSettings(name="merged", folder=merged.folder, device="cpu", kv_tokens=64))
    assert again.facts.vocab_size == engine.facts.vocab_size


def test_a_tied_base_stays_tied_when_the_output_is_not_adapted(
    engine_on: Callable[[str], Engine], models: dict[str, Path], tmp_path: Path
) -> None:
    from tinkex.wire.training import AdamOptimizerConfig, LoraConfig

    engine = engine_on("tied")
    engine.create("m", LoraConfig(rank=2, train_unembed=False), AdamOptimizerConfig())
    engine.save("m", tmp_path / "adapter", optimizer=False)
    engine.drop("m")
    merged = merge(models["tied"], tmp_path / "adapter", tmp_path / "merged")
    assert not merged.untied
    with safe_open(merged.folder / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118  it is no dict
    # B is zero, so the model is unchanged.
    tokens = list(range(12))
    assert torch.equal(logits_of(merged.folder, tokens), logits_of(models["tied"], tokens))


def test_a_number_format_can_be_chosen(
    engine: Engine, models: dict[str, Path], tmp_path: Path
) -> None:
    adapter = random_adapter(engine, tmp_path / "adapter")
    merged = merge(models["qwen3"], adapter, tmp_path / "merged", torch.bfloat16)
    assert merged.dtype == "bfloat16"
    with safe_open(merged.folder / "model.safetensors", "pt") as file:
        assert file.get_tensor("lm_head.weight").dtype == torch.bfloat16


def test_a_failed_merge_leaves_nothing(
    engine: Engine, models: dict[str, Path], tmp_path: Path
) -> None:
    adapter = random_adapter(engine, tmp_path / "adapter")
    file = adapter / "adapter_model.safetensors"
    from safetensors.torch import load_file, save_file

    tensors: dict[str, Any] = load_file(file)
    tensors["base_model.model.lm_head.lora_B.weight"] = torch.ones(7, 4)
    save_file(tensors, file)
    with pytest.raises(UserFailure, match=r"lm_head maps 64 to 7 features, but in this base model"):
        merge(models["qwen3"], adapter, tmp_path / "merged")
    tensors = {name: tensor for name, tensor in tensors.items() if "lm_head" not in name}
    renamed = {name.replace("q_proj", "query"): tensor for name, tensor in tensors.items()}
    save_file(renamed, file)
    with pytest.raises(UserFailure, match=r"no such linear layer"):
        merge(models["qwen3"], adapter, tmp_path / "merged")
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]
    (tmp_path / "merged").mkdir()
    with pytest.raises(FileExistsError, match="Name a new folder"):
        merge(models["qwen3"], adapter, tmp_path / "merged")
