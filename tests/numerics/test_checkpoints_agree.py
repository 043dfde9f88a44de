"""A saved adapter gives the same results after loading, in the engine and in PEFT."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from numerics.helpers import model_from, random_adapter, random_datum, weighted, work
from tinkex.engine import Engine
from tinkex.engine.adapters.checkpoints import copied, write
from tinkex.wire.errors import UserFailure
from tinkex.wire.inputs import Datum
from tinkex.wire.training import AdamOptimizerConfig, AdamParams, LoraConfig


def step(engine: Engine, model_id: str, data: list[Datum]) -> float:
    loss = engine.run_pass(model_id, work(data), backward=True).metrics["loss:sum"]
    engine.optim_step(model_id, AdamParams(learning_rate=3e-3, weight_decay=0.01))
    return loss


@pytest.fixture
def data() -> list[Datum]:
    rng = np.random.default_rng(11)
    return [weighted(rng, length) for length in (14, 6)]


def test_a_resumed_run_repeats_the_uninterrupted_one_exactly(
    engine: Engine, data: list[Datum], tmp_path: Path
) -> None:
    lora = LoraConfig(rank=4, seed=1)
    engine.create("a", lora, AdamOptimizerConfig())
    for _ in range(3):
        step(engine, "a", data)
    engine.save("a", tmp_path / "state", optimizer=True)
    uninterrupted = [step(engine, "a", data) for _ in range(4)]
    engine.create("b", LoraConfig(rank=4, seed=2), AdamOptimizerConfig())
    engine.load("b", tmp_path / "state", optimizer=True)
    resumed = [step(engine, "b", data) for _ in range(4)]
    engine.load("b", tmp_path / "state", optimizer=False)
    afresh = [step(engine, "b", data) for _ in range(4)]
    engine.drop("a")
    engine.drop("b")
    assert resumed == uninterrupted
    assert afresh[0] == uninterrupted[0]  # the same weights ...
    assert afresh[1:] != uninterrupted[1:]  # ... but a reset optimizer


def test_a_snapshot_restores_gradients_that_were_not_stepped_yet(
    engine: Engine, data: list[Datum], tmp_path: Path
) -> None:
    engine.create("a", LoraConfig(rank=4, seed=1), AdamOptimizerConfig())
    step(engine, "a", data)
    engine.run_pass("a", work(data), backward=True)
    write(engine.snapshot_files("a"), tmp_path / "snapshot")
    engine.optim_step("a", AdamParams(learning_rate=3e-3))
    expected = [step(engine, "a", data) for _ in range(3)]
    engine.drop("a")
    engine.restore("a", tmp_path / "snapshot")
    engine.optim_step("a", AdamParams(learning_rate=3e-3))
    assert [step(engine, "a", data) for _ in range(3)] == expected
    engine.drop("a")


def test_a_snapshot_just_after_a_step_has_no_gradient_file_and_restores_exactly(
    engine: Engine, data: list[Datum], tmp_path: Path
) -> None:
    engine.create("a", LoraConfig(rank=4, seed=1), AdamOptimizerConfig())
    step(engine, "a", data)
    write(engine.snapshot_files("a"), tmp_path / "snapshot")
    expected = [step(engine, "a", data) for _ in range(3)]
    engine.run_pass("a", work(data), backward=True)
    write(engine.snapshot_files("a"), tmp_path / "half")
    assert not (tmp_path / "snapshot" / "gradients.safetensors").exists()
    # A restore drops the current gradients.
    engine.restore("a", tmp_path / "snapshot")
    assert [step(engine, "a", data) for _ in range(3)] == expected
    # A snapshot whose gradient file is missing is refused.
    (tmp_path / "half" / "gradients.safetensors").unlink()
    with pytest.raises(UserFailure, match="has no gradients"):
        engine.restore("a", tmp_path / "half")
    engine.drop("a")


def test_a_snapshot_copy_does_not_change_with_the_model(
    engine: Engine, data: list[Datum], tmp_path: Path
) -> None:
    engine.create("a", LoraConfig(rank=4, seed=1), AdamOptimizerConfig())
    step(engine, "a", data)
    engine.run_pass("a", work(data), backward=True)
    copy = copied(engine.snapshot_files("a"))
    write(engine.snapshot_files("a"), tmp_path / "then")
    engine.optim_step("a", AdamParams(learning_rate=3e-3))
    engine.run_pass("a", work(data), backward=True)
    write(copy, tmp_path / "later")
    engine.drop("a")
    then, later = (
        {file.name: file.read_bytes() for file in (tmp_path / name).iterdir()}
        for name in ("then", "later")
    )
    assert then == later
    assert "gradients.safetensors" in then


@pytest.mark.parametrize("arch", ["llama", "tied", "qwen3"])
def test_peft_loads_a_checkpoint_and_gives_the_same_logprobs(
    arch: str, engine_on: Callable[[str], Engine], models: dict[str, Path], tmp_path: Path
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of PEFT, for example about tied weights
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        engine = engine_on(arch)
        model_id = model_from(engine, "m", random_adapter(engine, tmp_path / "random"))
        engine.save(model_id, tmp_path / "saved", optimizer=True)
        datum = random_datum(np.random.default_rng(1), 20)
        output = engine.run_pass(model_id, work([datum]), backward=False)
        engine.drop(model_id)
        base = AutoModelForCausalLM.from_pretrained(models[arch])
        ids = torch.tensor([datum.model_input.to_ints()])
        plain = base(ids).logits[0]
        model = PeftModel.from_pretrained(base, tmp_path / "saved")
        with torch.no_grad():
            logits = model(ids).logits[0]
    targets = torch.from_numpy(datum.loss_fn_inputs["target_tokens"].to_numpy())
    theirs = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    np.testing.assert_allclose(
        output.loss_fn_outputs[0]["logprobs"].to_numpy(), theirs.numpy(), atol=1e-4
    )
    assert (logits - plain).abs().max() > 0.1  # the adapter has an effect


def test_the_other_name_of_the_output_projection_is_read(
    engine: Engine, data: list[Datum], tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    folder = random_adapter(engine, tmp_path / "adapter")
    model_from(engine, "m", folder)
    expected = engine.run_pass("m", work(data), backward=False).metrics
    engine.drop("m")
    file = folder / "adapter_model.safetensors"
    tensors = {
        name.replace("base_model.model.lm_head", "base_model.model.model.unembed_tokens"): tensor
        for name, tensor in load_file(file).items()
    }
    assert any("unembed_tokens" in name for name in tensors)
    save_file(tensors, file)
    model_from(engine, "m", folder)
    assert engine.run_pass("m", work(data), backward=False).metrics == expected
    engine.drop("m")


def test_the_peft_config_says_what_was_trained(engine: Engine, tmp_path: Path) -> None:
    engine.create("m", LoraConfig(rank=5, train_mlp=False), AdamOptimizerConfig())
    engine.save("m", tmp_path / "saved", optimizer=False)
    engine.drop("m")
    config = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (5, 32)
    assert config["target_modules"] == ["k_proj", "lm_head", "o_proj", "q_proj", "v_proj"]
    assert config["base_model_name_or_path"] == "qwen3"
