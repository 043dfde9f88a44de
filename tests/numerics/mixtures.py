"""Tiny mixtures of experts of each family, written and opened once."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from numerics.test_families import SHAPE
from tinkex.engine import Engine, EngineSettings
from tinkex.models.tiny_model import write_tiny_tokenizer

#: Served families and what is peculiar about them.
MIXTURES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"num_experts": 6, "moe_intermediate_size": 16, "head_dim": 16},
    "Mixtral": {"num_local_experts": 4, "head_dim": 8},
    "Olmoe": {"num_experts": 5, "num_key_value_heads": 4},  # weights of the router not normalized
    # An expert that all tokens share, with a gate of its own.
    "Qwen2Moe": {
        "num_experts": 6,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24,
    },
    # Groups of experts, a bias in the choice, a shared expert, a dense layer first.
    "Glm4Moe": {
        "n_routed_experts": 8,
        "moe_intermediate_size": 16,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "head_dim": 16,
    },
    "GraniteMoe": {"num_local_experts": 4},  # experts below another name
    "MiniMaxM2": {"num_local_experts": 4, "head_dim": 16},  # a norm over all heads
    # Experts with biases, transposed, gate and up in turns; sinks, windows, biases in attention.
    "GptOss": {
        "num_local_experts": 4,
        "head_dim": 16,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    # MLA; groups of experts, a bias in the choice, a shared expert, a dense layer first.
    "DeepseekV3": {
        "n_routed_experts": 8,
        "moe_intermediate_size": 16,
        "n_group": 2,
        "topk_group": 1,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "v_head_dim": 12,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
    },
    "HunYuanMoEV1": {"num_experts": 4, "moe_topk": 2, "head_dim": 8},  # a linear router
}


def write_mixture(folder: Path, family: str, **extra: Any) -> Path:
    settings = {**SHAPE, "num_experts_per_tok": 2, **MIXTURES.get(family, {}), **extra}
    config = getattr(transformers, f"{family}Config")(**settings)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.1)
    # Sinks, and biases in the choice of experts: as large as the scores.
    for name, weight in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith(("sinks", "e_score_correction_bias")):
            torch.nn.init.normal_(weight, std=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder)
    write_tiny_tokenizer(folder)
    return folder


def engine_of(folder: Path, **settings: Any) -> Engine:
    return Engine(
        EngineSettings(name="mixture", folder=folder, device="cpu", kv_tokens=1024, **settings)
    )


def logprobs_of(folder: Path, tokens: list[int]) -> torch.Tensor:
    """What transformers' own code gives for the tokens after the first."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="eager"
    )
    with torch.no_grad():
        logits = model(torch.tensor([tokens[:-1]])).logits[0]
    found: torch.Tensor = logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    return found


def merged_parameters(
    model: Any, pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]], scale: float
) -> dict[str, torch.Tensor]:
    """The weights of transformers' model with an adapter in them, for autograd."""
    merged: dict[str, torch.Tensor] = {}
    for name, (A, B) in pairs.items():
        if A.dim() == B.dim():
            weight = model.get_parameter(f"{name}.weight")
            merged[f"{name}.weight"] = weight.detach() + scale * B @ A
            continue
        path, _, part = name.rpartition(".")
        module = model.get_submodule(path)
        key = f"{path}.{'down_proj' if part == 'w2' else 'gate_up_proj'}"
        product = scale * B @ A
        if part != "w2":
            zeros = torch.zeros_like(product)
            both = [product, zeros] if part == "w1" else [zeros, product]
            if module.is_concatenated:
                product = torch.cat(both, dim=1)
            else:
                product = torch.stack(both, dim=2).flatten(1, 2)
        current = merged.get(key, model.get_parameter(key).detach())
        merged[key] = current + (product.mT if module.is_transposed else product)
    return merged
