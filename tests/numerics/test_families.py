"""Other model families: supported ones give the numbers of PEFT, the others are refused."""

import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from numerics.helpers import (
    VOCABULARY,
    model_from,
    random_adapter,
    request,
    sample,
    work,
)
from tinkex.engine import Engine, EngineSettings
from tinkex.engine.model.base_model import BaseModel
from tinkex.engine.model.stacked_weights import StackedWeights
from tinkex.engine.model.unsupported import UnsupportedModel
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


#: Supported families and their peculiarities; docs/reference/models.md has the same rows.
SERVED: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},  # biases in attention
    "Qwen3": {"head_dim": 16},  # norms of queries and keys
    "SmolLM3": {"num_hidden_layers": 4},  # the fourth without positions; tied
    "Mistral": {"sliding_window": 16},
    "Gemma": {"head_dim": 16},  # scaled embeddings, tied
    "Gemma2": {"head_dim": 16, "sliding_window": 16},  # soft caps of scores and logits, windows
    "Gemma3Text": {"head_dim": 16, "sliding_window": 16},  # every kind of norm, windows, tied
    "Phi": {},  # one norm for attention and MLP, rotates a part
    "Phi3": {},  # fused projections
    "GPTNeoX": {},  # as many key heads as heads, biases, other names
    "Olmo2": {},  # norms after the layers
    "Granite": {},  # additional scale factors
    "Glm4": {},  # rotates in pairs, fused projections
    "Starcoder2": {},  # an MLP without a gate
    "Youtu": {  # MLA: values narrower than keys, made by two products
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "num_key_value_heads": 4,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "head_dim": 8,
    },
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("family", "extra"), SERVED.items(), ids=list(SERVED))
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


#: Families whose layers the fused kernels of a GPU compute.
USUAL = {"Llama", "Qwen2", "Qwen3", "Mistral", "Granite"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("family", "extra"), SERVED.items(), ids=list(SERVED))
def test_the_form_of_a_family_is_recognized(
    family: str, extra: dict[str, Any], tmp_path: Path
) -> None:
    folder = write_model(tmp_path, family, **{"head_dim": 16, **extra})
    model = BaseModel(folder, device=torch.device("cpu"), dtype=torch.float32)
    stacked = StackedWeights.of(model._decoder, model._embed, model.head)
    assert (stacked is not None) == (family in USUAL)


def test_layers_with_another_form_of_residual_are_not_usual(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "Granite", residual_multiplier=0.22, head_dim=16)
    model = BaseModel(folder, device=torch.device("cpu"), dtype=torch.float32)
    assert StackedWeights.of(model._decoder, model._embed, model.head) is None


#: Refused families with their message. Those of the second table are refused by their config alone.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "Granite": (
        {"logits_scaling": 8.0},
        "does not compute .* models correctly: they do more than layers",
    ),
    "Cohere": ({}, "does not compute .* models correctly: they do more than layers"),
    "StableLm": ({}, "does not support custom attention"),
    "Mamba": ({}, "does not support custom attention"),
    "GPT2": ({}, "has no decoder attribute"),
    "Lfm2": (
        {"layer_types": ["conv", "full_attention"]},
        "1 of the 2 layers .* are neither attention nor the gated delta rule nor Mamba 2",
    ),
    "FalconH1": ({}, "does not compute .* models correctly: they do more than layers"),
    "Llama4Text": ({"num_local_experts": 2, "head_dim": 16}, "has no decoder attribute"),
}
REFUSED_BY_CONFIG: dict[str, tuple[dict[str, Any], str]] = {
    "Llava": ({}, "llava takes images"),
    "T5": ({}, "t5 is not a decoder-only language model"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", REFUSED)
def test_a_model_with_different_logits_is_refused(family: str, tmp_path: Path) -> None:
    extra, message = REFUSED[family]
    folder = write_model(tmp_path, family, **extra)
    with pytest.raises(UnsupportedModel, match=message):
        engine_on(folder)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", REFUSED_BY_CONFIG)
def test_an_unsupported_config_is_refused_before_weights_are_read(
    family: str, tmp_path: Path
) -> None:
    extra, message = REFUSED_BY_CONFIG[family]
    getattr(transformers, f"{family}Config")(**extra).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=message):
        engine_on(tmp_path)


@pytest.mark.filterwarnings("ignore")
def test_the_text_part_of_an_image_model_is_served(tmp_path: Path) -> None:
    """Gemma 3 with its image tower: transformers has a text form of it, with different names."""
    text = {**SHAPE, "head_dim": 16, "sliding_window": 64}
    tower = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    tower |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    config = transformers.Gemma3Config(text_config=text, vision_config=tower)
    torch.manual_seed(0)
    transformers.AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path / "m")
    engine = engine_on(tmp_path / "m")
    assert engine.facts.arch == "gemma3"
    assert not any("vision" in target.name for target in engine.model.targets)
    adapter = random_adapter(engine, tmp_path / "adapter")
    (answer,) = sample(engine, [request([5, 6, 7], max_tokens=5, seed=1, stop=[])], [adapter])
    model_from(engine, "m", adapter)
    tokens = [5, 6, 7, *answer.sequences[0].tokens]
    datum = Datum(
        model_input=ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": np.array(tokens[1:])},
    )
    output = engine.run_pass("m", work([datum]), backward=False).loss_fn_outputs[0]
    np.testing.assert_allclose(
        answer.sequences[0].logprobs_np, output["logprobs"].to_numpy()[2:], atol=1e-4
    )


def test_the_page_has_the_families_that_are_tested() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "models.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (served|refused)", page, re.MULTILINE)
    from numerics.hybrids import HYBRIDS
    from numerics.mixtures import MIXTURES
    from numerics.pictures import IMAGE_MODELS

    served = (*SERVED, *MIXTURES, *HYBRIDS, *IMAGE_MODELS)
    tested = [(family, "served") for family in served]
    tested += [
        (family, "refused") for family in (*REFUSED, *REFUSED_BY_CONFIG) if family not in SERVED
    ]
    assert sorted(rows) == sorted(tested)
