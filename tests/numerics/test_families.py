"""Other families through the same path: what works gives PEFT's numbers, what would not is refused."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from numerics.parts import (
    VOCABULARY,
    model_from,
    random_adapter,
    request,
    sample,
    work,
)
from tinkex.engine import Engine, EngineSettings
from tinkex.engine.model import UnsupportedModel
from tinkex.wire.inputs import Datum, ModelInput

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def write_model(folder: Path, family: str, **extra: Any) -> Path:
    config = getattr(transformers, f"{family}Config")(**{**SHAPE, **extra})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.1)
    model.save_pretrained(folder)
    return folder


def engine_on(folder: Path) -> Engine:
    return Engine(EngineSettings(name="family", folder=folder, device="cpu", kv_tokens=512))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("family", "extra"),
    [
        ("Qwen2", {}),  # biases in attention
        ("Mistral", {"sliding_window": 64}),
        ("Gemma", {"head_dim": 16}),  # scaled embeddings, tied
        ("Phi3", {}),  # fused projections
        ("GPTNeoX", {}),  # as many key heads as heads, biases, other names
    ],
)
def test_a_family_trains_and_samples_as_peft_would(
    family: str, extra: dict[str, Any], tmp_path: Path
) -> None:
    engine = engine_on(write_model(tmp_path / "model", family, **extra))
    adapter = random_adapter(engine, tmp_path / "adapter")
    prompt = np.random.default_rng(0).integers(0, VOCABULARY, 20).tolist()
    (answer,) = sample(
        engine, [request(prompt, samples=2, max_tokens=20, seed=1, stop=[])], [adapter]
    )
    tokens = prompt + answer.sequences[1].tokens
    datum = Datum(
        model_input=ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": np.array(tokens[1:]),
            "weights": np.ones(len(tokens) - 1, np.float32),
        },
    )
    model_from(engine, "m", adapter)
    output = engine.run_pass("m", work([datum]), backward=True).loss_fn_outputs[0]
    found = output["logprobs"].to_numpy()
    np.testing.assert_allclose(answer.sequences[1].logprobs_np, found[19:], atol=1e-4)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from peft import PeftModel

        base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        model = PeftModel.from_pretrained(base, adapter)
    with torch.no_grad():
        logprobs = model(torch.tensor([tokens[:-1]])).logits[0].log_softmax(dim=-1)
    expected = logprobs.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-4)


def test_a_sliding_window_cuts_the_context(tmp_path: Path) -> None:
    engine = engine_on(write_model(tmp_path, "Mistral", sliding_window=64))
    assert engine.facts.max_context_length == 64


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("family", "extra", "message"),
    [
        ("Granite", {"logits_scaling": 8.0}, "computes something beside layers"),
        ("Gemma2", {"head_dim": 16}, "caps its attention scores"),
        ("StableLm", {}, "does not take another attention"),
        ("GPT2", {}, "keeps its layers elsewhere"),
        ("Qwen3Moe", {}, "mixture of experts"),
    ],
)
def test_a_model_that_would_come_out_wrong_is_refused(
    family: str, extra: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = write_model(tmp_path, family, **extra)
    with pytest.raises(UnsupportedModel, match=message):
        engine_on(folder)
