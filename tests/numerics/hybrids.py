"""Tiny hybrids: models with recurrent layers, with random weights."""

import warnings
from pathlib import Path
from typing import Any

import torch
import transformers

from numerics.helpers import VOCABULARY

#: Three recurrent layers and one with attention; two value heads for each key head.
SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24} | {
    "shared_expert_intermediate_size": 24
}

#: docs/reference/models.md has the same rows.
HYBRIDS: dict[str, dict[str, Any]] = {
    "Qwen3_5Text": {},
    "Qwen3_5MoeText": EXPERTS,
    "Qwen3Next": EXPERTS,  # one projection makes q, k, v and z, head by head
    "NemotronH": {  # Mamba 2, and layers that are only an MLP or a mixture
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 12,
        "n_groups": 2,
        "ssm_state_size": 8,
        "chunk_size": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 24,
    },
}


#: States forget slowly, and norms divide by no tiny numbers, as those of random heads are. Without
#: this, gradients differ by 3e-5 of the largest if the embedding differs by 6e-8; with it, by 3e-6.
CALM: dict[str, Any] = {"rms_norm_eps": 1e-2, "decay": (-5, -3)}


def write_hybrid(
    folder: Path, family: str, *, decay: tuple[float, float] | None = None, **extra: Any
) -> Path:
    """`decay` is the range of the logarithms that say how fast states forget."""
    settings = {**SHAPE, **HYBRIDS[family], **extra}
    config = getattr(transformers, f"{family}Config")(**settings)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.4 if "conv1d" in name else 0.1)
        elif decay is not None and name.endswith("A_log"):
            torch.nn.init.uniform_(weight, *decay)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder)
    return folder
