"""How the linear layers of a family are divided: the plan of transformers, and what it leaves out.

A plan has the styles of layers by their paths. Some plans of transformers name the experts only,
because its attention works on whole layers, or gather the outputs of layers; gpt-oss has none. What
is added here is what the plans of other families say of the same layers, the layers that make
several projections, and those that each rank has whole.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any

#: The style of a layer that each rank has whole.
WHOLE = "whole"
#: The style of a layer that makes queries, keys and values, in this order.
PACKED_HEADS = "packed_heads"
#: That of transformers for a layer that makes gate and up, in this order.
PACKED_GATE = "packed_colwise"


def _mlp(path: str) -> dict[str, str]:
    return {
        f"layers.*.{path}.gate_proj": "colwise",
        f"layers.*.{path}.up_proj": "colwise",
        f"layers.*.{path}.down_proj": "rowwise",
    }


_HEADS = {
    **{f"layers.*.self_attn.{part}_proj": "colwise" for part in "qkv"},
    "layers.*.self_attn.o_proj": "rowwise",
}
#: Latent attention: the first products have no heads, and are small.
_LATENT = {
    **dict.fromkeys(
        ("layers.*.self_attn.q_a_proj", "layers.*.self_attn.kv_a_proj_with_mqa"), WHOLE
    ),
    **{f"layers.*.self_attn.{part}_proj": "colwise" for part in ("q", "q_b", "kv_b")},
    "layers.*.self_attn.o_proj": "rowwise",
}

_PACKED_MLP = {
    "layers.*.mlp.gate_up_proj": PACKED_GATE,
    "layers.*.mlp.down_proj": "rowwise",
}

#: What weights the expert that all tokens share.
_SHARED_GATE = {"layers.*.mlp.shared_expert_gate": WHOLE}

_DENSE = {**_HEADS, **_mlp("mlp")}

#: By `model_type` of the text part.
ADDED: Mapping[str, Mapping[str, str]] = {
    "gpt_oss": {
        **_HEADS,
        "layers.*.mlp.experts.gate_up_proj": "packed_colwise",
        "layers.*.mlp.experts.down_proj": "rowwise",
    },
    "qwen3_vl_text": _DENSE,
    "qwen2_moe": {**_mlp("mlp.shared_expert"), **_SHARED_GATE},
    "granitemoe": _HEADS,
    "phi3": {
        "layers.*.self_attn.qkv_proj": PACKED_HEADS,
        "layers.*.self_attn.o_proj": "rowwise",
        **_PACKED_MLP,
    },
    "glm4": _PACKED_MLP,
    # Their norms over all heads are summed over the ranks.
    **dict.fromkeys(("olmo2", "olmoe", "minimax_m2"), _HEADS),
    "hunyuan_v1_moe": {**_HEADS, **_mlp("mlp.shared_mlp"), "layers.*.mlp.gate.wg": WHOLE},
    "deepseek_v3": _LATENT,
    # Recurrent layers are divided by `recurrent_parts`.
    "qwen3_next": _SHARED_GATE,
    "qwen3_5_moe_text": _SHARED_GATE,
    "nemotron_h": {
        **{f"layers.*.mixer.{part}_proj": "colwise" for part in "qkv"},
        "layers.*.mixer.o_proj": "rowwise",
        **_mlp("mixer"),
        **_mlp("mixer.shared_experts"),
    },
    "youtu": _LATENT,
}


class Plan:
    """The styles of a model's layers."""

    def __init__(self, text_config: Any) -> None:
        self._added = ADDED.get(text_config.model_type, {})
        self._theirs: Mapping[str, str] = getattr(text_config, "base_model_tp_plan", None) or {}

    def __bool__(self) -> bool:
        return bool(self._added or self._theirs)

    def style(self, path: str) -> str | None:
        """Of a path such as `0.mlp.down_proj`, in the decoder's layers; None if it is not named."""
        for plan in (self._added, self._theirs):
            for each, style in plan.items():
                if fnmatch.fnmatchcase(f"layers.{path}", each):
                    return style
        return None
