"""The sizes of a recurrent layer (`recurrent_layers`) of a model that is not loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tinkex.engine.model.step_memory import DELTA_CHUNK

Shape = tuple[int, ...]

#: The convolution of such a layer; its name in the layer says where the others are.
CONVOLUTION = "conv1d.weight"


@dataclass(frozen=True, kw_only=True)
class RecurrentShape:
    #: The outputs of the projections that have adapters, by the linear layer that makes them.
    projections: Mapping[str, Mapping[str, int]]
    #: Channels of the convolution, and how many of their inputs are kept.
    channels: int
    kept: int
    #: Numbers in the matrices of all heads.
    matrices: int
    #: What autograd keeps of the rule for each token, in float32: counted, roughly.
    saved: int

    @classmethod
    def of(cls, config: Mapping[str, Any], conv: Shape) -> RecurrentShape:
        """Raises an error for other recurrent layers: their configs have other keys."""
        if "mamba_num_heads" in config:
            return cls._mamba(config, conv)
        heads, size = int(config["linear_num_value_heads"]), int(config["linear_key_head_dim"])
        keys = size * int(config["linear_num_key_heads"])
        values = heads * int(config["linear_value_head_dim"])
        qkv = {"in_proj_q": keys, "in_proj_k": keys, "in_proj_v": values}
        return cls(
            projections={"in_proj_qkv": qkv, "in_proj_qkvz": {**qkv, "in_proj_z": values}},
            channels=conv[0],
            kept=conv[2] - 1,
            matrices=size * values,
            saved=5 * heads * DELTA_CHUNK + 12 * heads * size + 8 * values + 3 * conv[0],
        )

    @classmethod
    def _mamba(cls, config: Mapping[str, Any], conv: Shape) -> RecurrentShape:
        heads, width = int(config["mamba_num_heads"]), int(config["ssm_state_size"])
        inner = heads * int(config["mamba_head_dim"])
        chunk = int(config["chunk_size"])
        return cls(
            projections={"in_proj": {"gate_proj": inner, "x_proj": inner}},
            channels=conv[0],
            kept=conv[2] - 1,
            matrices=width * inner,
            saved=3 * heads * chunk + 4 * heads * width + 8 * inner + 3 * conv[0],
        )

    def state_bytes(self, element: int) -> int:
        """The state of one sequence. The matrices are kept in float32."""
        return element * self.channels * self.kept + 4 * self.matrices
