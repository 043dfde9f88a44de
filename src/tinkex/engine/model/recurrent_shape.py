"""The sizes of a recurrent layer (`recurrent_layers`) of a model that is not loaded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tinkex.engine.model.step_memory import DELTA_CHUNK

Shape = tuple[int, ...]

#: The convolution of such a layer; its name in the layer says where the others are.
CONVOLUTION = "conv1d.weight"


def head_counts(config: Mapping[str, Any]) -> dict[str, int]:
    """How many heads such layers of a model have, in words: a part of a layer has whole ones."""
    if "mamba_num_heads" in config:
        return {"Mamba heads": config["mamba_num_heads"], "groups of them": config["n_groups"]}
    if "linear_num_key_heads" in config:
        return {"key heads of recurrent layers": config["linear_num_key_heads"]}
    return {}


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
    #: Of which a part of the layer must have the same part.
    heads: Mapping[str, int]
    #: Numbers in weights that are divided with the heads and are in no linear layer of its own.
    others: int

    @classmethod
    def of(cls, config: Mapping[str, Any], tensors: Mapping[str, Shape]) -> RecurrentShape:
        """
        From its tensors, by their names in the layer.

        Raises an error for other recurrent layers: their configs have other keys.
        """
        conv = tensors[CONVOLUTION]
        if "mamba_num_heads" in config:
            return cls._mamba(config, conv, tensors)
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
            heads=head_counts(config),
            others=_numbers(tensors, "conv1d.weight", "A_log", "dt_bias"),
        )

    @classmethod
    def _mamba(
        cls, config: Mapping[str, Any], conv: Shape, tensors: Mapping[str, Shape]
    ) -> RecurrentShape:
        heads, width = int(config["mamba_num_heads"]), int(config["ssm_state_size"])
        inner = heads * int(config["mamba_head_dim"])
        chunk = int(config["chunk_size"])
        groups = (conv[0] - inner) // (2 * width)
        others = ("in_proj.weight", "conv1d.weight", "conv1d.bias", "norm.weight")
        return cls(
            projections={"in_proj": {"gate_proj": inner, "x_proj": inner}},
            channels=conv[0],
            kept=conv[2] - 1,
            matrices=width * inner,
            saved=3 * heads * chunk + 4 * heads * width + 8 * inner + 3 * conv[0],
            heads=head_counts({**config, "n_groups": groups}),
            others=_numbers(tensors, *others, "A_log", "D", "dt_bias")
            - 2 * inner * tensors["in_proj.weight"][1],
        )

    def divided(self, ranks: int) -> RecurrentShape:
        """The part of a rank."""
        return replace(
            self,
            channels=self.channels // ranks,
            matrices=self.matrices // ranks,
            saved=self.saved // ranks,
            others=self.others // ranks,
        )

    def state_bytes(self, element: int) -> int:
        """The state of one sequence. The matrices are kept in float32."""
        return element * self.channels * self.kept + 4 * self.matrices


def _numbers(tensors: Mapping[str, Shape], *names: str) -> int:
    return sum(math.prod(tensors[name]) for name in names if name in tensors)
