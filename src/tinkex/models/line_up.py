"""The models of the hosted service: their names and sizes, from `line_up.toml`.

`tensors_of` gives the names and shapes of the weights of a model from its config alone, so that its
memory is computed in the same way as that of a folder.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A speed in a report of benchmarks/results."""

    what: str
    tokens_per_s: int
    report: str


@dataclass(frozen=True, kw_only=True)
class LineUpModel:
    """One model of the hosted service."""

    name: str
    #: `model_type` of its config.
    type: str
    #: 10^9 bytes of all its weights in bfloat16; None if it is not known.
    gigabytes: float | None
    #: Why it is not served, if that is not its family.
    refused: str | None
    #: What its adapters change, if its sizes do not say it.
    trained: str | None
    #: The part of its config that sets sizes; None if it is not public.
    config: Mapping[str, Any] | None
    measured: tuple[Measured, ...]


@cache
def line_up() -> tuple[LineUpModel, ...]:
    entries = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return tuple(
        LineUpModel(
            name=name,
            type=entry["type"],
            gigabytes=entry.get("gigabytes"),
            refused=entry.get("refused"),
            trained=entry.get("trained"),
            config=_with_type(entry),
            measured=tuple(Measured(**each) for each in entry.get("measured", ())),
        )
        for entry in entries["model"]
        for name in entry["names"]
    )


#: The tower of models with images whose config is not public: that of transformers' Qwen3.5.
ASSUMED_TOWER: Mapping[str, Any] = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "in_channels": 3,
    "patch_size": 16,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "num_position_embeddings": 2304,
}


def _with_type(entry: Mapping[str, Any]) -> Mapping[str, Any] | None:
    config = entry.get("config")
    return None if config is None else {"model_type": entry["type"], **config}


def tensors_of(config: Mapping[str, Any]) -> Shapes:
    """Names and shapes of the weights of a model of the line-up."""
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    found: Shapes = {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.get("tie_word_embeddings"):
        found["lm_head.weight"] = (vocabulary, hidden)
    for index in range(config["num_hidden_layers"]):
        recurs = "linear_num_key_heads" in config and (index + 1) % 4 != 0
        if recurs:
            layer = _delta_net(config)
        elif "kv_lora_rank" in config:
            layer = _latent_attention(config)
        else:
            layer = _attention(config)
        layer |= _mlp(config, dense=index < config.get("first_k_dense_replace", 0))
        for norm in ("input_layernorm", "post_attention_layernorm"):
            layer[f"{norm}.weight"] = (hidden,)
        found |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    if (vision := config.get("vision_config")) is not None:
        found |= {f"model.visual.{name}": shape for name, shape in _tower(vision, hidden).items()}
    return found


def _attention(config: Mapping[str, Any]) -> Shapes:
    hidden, size = config["hidden_size"], config["head_dim"]
    queries, keys = (config[f"num_{kind}_heads"] * size for kind in ("attention", "key_value"))
    kind = config["model_type"]
    # Qwen3.5 makes a gate of the output beside each query.
    doubled = 2 if kind.startswith("qwen3_5") else 1
    outputs = {"q": doubled * queries, "k": keys, "v": keys}
    found: Shapes = {
        f"self_attn.{letter}_proj.weight": (size, hidden) for letter, size in outputs.items()
    }
    found["self_attn.o_proj.weight"] = (hidden, queries)
    if config.get("attention_bias"):
        found |= {f"self_attn.{letter}_proj.bias": (size,) for letter, size in outputs.items()}
        found["self_attn.o_proj.bias"] = (hidden,)
    if kind == "gpt_oss":
        found["self_attn.sinks"] = (config["num_attention_heads"],)
    if kind.startswith("qwen3"):
        found |= {f"self_attn.{letter}_norm.weight": (size,) for letter in "qk"}
    return found


def _latent_attention(config: Mapping[str, Any]) -> Shapes:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    queries, keys = config["q_lora_rank"], config["kv_lora_rank"]
    plain, rotated, values = (
        config[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    shapes: Shapes = {
        "q_a_proj": (queries, hidden),
        "q_a_layernorm": (queries,),
        "q_b_proj": (heads * (plain + rotated), queries),
        "kv_a_proj_with_mqa": (keys + rotated, hidden),
        "kv_a_layernorm": (keys,),
        "kv_b_proj": (heads * (plain + values), keys),
        "o_proj": (hidden, heads * values),
    }
    return {f"self_attn.{name}.weight": shape for name, shape in shapes.items()}


def _delta_net(config: Mapping[str, Any]) -> Shapes:
    hidden, heads = config["hidden_size"], config["linear_num_value_heads"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    size = config["linear_value_head_dim"]
    mixed = 2 * keys + heads * size
    return {
        "linear_attn.in_proj_qkv.weight": (mixed, hidden),
        "linear_attn.in_proj_z.weight": (heads * size, hidden),
        "linear_attn.in_proj_a.weight": (heads, hidden),
        "linear_attn.in_proj_b.weight": (heads, hidden),
        "linear_attn.conv1d.weight": (mixed, 1, config["linear_conv_kernel_dim"]),
        "linear_attn.A_log": (heads,),
        "linear_attn.dt_bias": (heads,),
        "linear_attn.norm.weight": (size,),
        "linear_attn.out_proj.weight": (hidden, heads * size),
    }


def _mlp(config: Mapping[str, Any], *, dense: bool) -> Shapes:
    hidden = config["hidden_size"]
    counts = ("num_experts", "num_local_experts", "n_routed_experts")
    count = next((config[key] for key in counts if key in config), None)
    if count is None or dense:
        return _gated("mlp", hidden, config["intermediate_size"])
    inner = config.get("moe_intermediate_size") or config["intermediate_size"]
    if config["model_type"] == "gpt_oss":
        return {
            "mlp.router.weight": (count, hidden),
            "mlp.router.bias": (count,),
            "mlp.experts.gate_up_proj": (count, hidden, 2 * inner),
            "mlp.experts.gate_up_proj_bias": (count, 2 * inner),
            "mlp.experts.down_proj": (count, inner, hidden),
            "mlp.experts.down_proj_bias": (count, hidden),
        }
    found: Shapes = {
        "mlp.gate.weight": (count, hidden),
        "mlp.experts.gate_up_proj": (count, 2 * inner, hidden),
        "mlp.experts.down_proj": (count, hidden, inner),
    }
    if (own := config.get("shared_expert_intermediate_size")) is not None:
        found |= _gated("mlp.shared_expert", hidden, own)
        found["mlp.shared_expert_gate.weight"] = (1, hidden)
    if (shared := config.get("n_shared_experts")) is not None:
        found |= _gated("mlp.shared_experts", hidden, shared * inner)
        found["mlp.gate.e_score_correction_bias"] = (count,)
    return found


def _gated(path: str, hidden: int, inner: int) -> Shapes:
    return {
        f"{path}.gate_proj.weight": (inner, hidden),
        f"{path}.up_proj.weight": (inner, hidden),
        f"{path}.down_proj.weight": (hidden, inner),
    }


def _tower(vision: Mapping[str, Any], decoder: int) -> Shapes:
    """The vision tower of Qwen3-VL, and of Qwen3.5, which has no features for single layers."""
    hidden, inner = vision["hidden_size"], vision["intermediate_size"]
    merged = hidden * vision["spatial_merge_size"] ** 2
    size = vision["patch_size"]
    found: Shapes = {
        "patch_embed.proj.weight": (
            *(hidden, vision["in_channels"], vision["temporal_patch_size"]),
            *(size, size),
        ),
        "patch_embed.proj.bias": (hidden,),
        "pos_embed.weight": (vision["num_position_embeddings"], hidden),
    }
    linears = {
        "attn.qkv": (3 * hidden, hidden),
        "attn.proj": (hidden, hidden),
        "mlp.linear_fc1": (inner, hidden),
        "mlp.linear_fc2": (hidden, inner),
    }
    norms = {"norm1": hidden, "norm2": hidden}
    for index in range(vision["depth"]):
        found |= _with_biases(f"blocks.{index}", linears, norms)
    linears = {"linear_fc1": (merged, merged), "linear_fc2": (decoder, merged)}
    found |= _with_biases("merger", linears, {"norm": hidden})
    for index in range(len(vision.get("deepstack_visual_indexes") or ())):
        found |= _with_biases(f"deepstack_merger_list.{index}", linears, {"norm": merged})
    return found


def _with_biases(
    path: str, linears: Mapping[str, tuple[int, int]], norms: Mapping[str, int]
) -> Shapes:
    found: Shapes = {f"{path}.{name}.weight": shape for name, shape in linears.items()}
    found |= {f"{path}.{name}.bias": (shape[0],) for name, shape in linears.items()}
    for name, size in norms.items():
        found |= {f"{path}.{name}.weight": (size,), f"{path}.{name}.bias": (size,)}
    return found
