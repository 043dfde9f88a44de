"""Adapters have as many weights as those of the hosted service, by the official cookbook's count."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tinkex.engine.model.base_model import adapted
from tinkex.engine.model.lora import AdapterContext

FILE = Path(__file__).parents[1] / "data" / "adapter_sizes.json"
RECORDED = json.loads(FILE.read_text())


def llama(hidden: int, inner: int, layers: int, heads: int) -> tuple[str, dict[str, Any]]:
    shape = {"vocab_size": 128256, "num_key_value_heads": 8, "num_attention_heads": heads}
    shape |= {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    return "Llama", shape


def qwen3(hidden: int, inner: int, layers: int, heads: int) -> tuple[str, dict[str, Any]]:
    return "Qwen3", {
        **llama(hidden, inner, layers, heads)[1],
        "vocab_size": 151936,
        "head_dim": 128,
    }


def qwen3_moe(hidden: int, inner: int, layers: int, heads: int) -> tuple[str, dict[str, Any]]:
    shape = {**qwen3(hidden, inner, layers, heads)[1], "num_key_value_heads": 4}
    return "Qwen3Moe", {**shape, "moe_intermediate_size": inner, "num_experts": 128}


#: The published shapes of models: their family and what differs from the defaults of its config.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "meta-llama/Llama-3.2-1B": llama(2048, 8192, 16, 32),
    "meta-llama/Llama-3.2-3B": llama(3072, 8192, 28, 24),
    "meta-llama/Llama-3.1-8B": llama(4096, 14336, 32, 32),
    "meta-llama/Llama-3.1-70B": llama(8192, 28672, 80, 64),
    "meta-llama/Llama-3.3-70B": llama(8192, 28672, 80, 64),
    "Qwen/Qwen3-4B": qwen3(2560, 9728, 36, 32),
    "Qwen/Qwen3-8B": qwen3(4096, 12288, 36, 32),
    "Qwen/Qwen3-32B": qwen3(5120, 25600, 64, 64),
    "Qwen/Qwen3-30B-A3B": qwen3_moe(2048, 768, 48, 32),
    "Qwen/Qwen3-235B-A22B": qwen3_moe(4096, 1536, 94, 64),
    "openai/gpt-oss-20b": ("GptOss", {"num_hidden_layers": 24, "num_local_experts": 32}),
    "openai/gpt-oss-120b": ("GptOss", {"num_hidden_layers": 36, "num_local_experts": 128}),
    "Qwen/Qwen3.5-4B": ("Qwen3_5Text", {"hidden_size": 2560, "intermediate_size": 9216}),
    "Qwen/Qwen3.5-9B": ("Qwen3_5Text", {}),
    "Qwen/Qwen3.5-27B": (
        "Qwen3_5Text",
        {
            "hidden_size": 5120,
            "intermediate_size": 17408,
            "num_hidden_layers": 64,
            "num_attention_heads": 24,
            "linear_num_value_heads": 48,
        },
    ),
    "Qwen/Qwen3.5-35B-A3B": ("Qwen3_5MoeText", {}),
    "deepseek-ai/DeepSeek-V3.1": ("DeepseekV3", {}),
    "moonshotai/Kimi-K2": (
        "DeepseekV3",
        {
            "vocab_size": 163840,
            "n_routed_experts": 384,
            "first_k_dense_replace": 1,
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
        },
    ),
}
SHAPES |= {name.replace("3.5", "3.6"): SHAPES[name] for name in SHAPES if "Qwen3.5" in name}


def shape_of(model: str) -> tuple[str, dict[str, Any]]:
    """Variants of a model have a longer name."""
    return SHAPES[max((name for name in SHAPES if model.startswith(name)), key=len)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model", RECORDED["weights"])
def test_an_adapter_has_the_weights_that_the_cookbook_counts(model: str) -> None:
    family, settings = shape_of(model)
    config = getattr(transformers, f"{family}Config")(**settings)
    with torch.device("meta"):
        empty = transformers.AutoModelForCausalLM.from_config(config)
    targets, _ = adapted(empty, AdapterContext())
    rank = RECORDED["rank"]
    found = {
        kind: sum(
            math.prod(target.shape_A(rank)) + math.prod(target.shape_B(rank))
            for target in targets
            if target.kind == kind
        )
        for kind in ("attn", "mlp", "unembed")
    }
    assert found == RECORDED["weights"][model]
