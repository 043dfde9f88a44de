"""The part of a recurrent layer that one rank has: some of its heads.

The projections into such a layer, its convolution and its decay have their rows head by head, in
one block or in several that follow each other: all queries, all keys, all values. A rank has its
part of every block, so its layer is a smaller one of the same form, with the states of its heads;
`out_proj` is divided by its inputs and summed, like that of attention.

The plans of transformers do not divide these layers, so this file says how.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tinkex.engine.model.recurrent_layers import is_mamba, is_recurrent, joint_projections
from tinkex.engine.model.targets import NOT_ADAPTED
from tinkex.engine.ranks.process_group import ProcessGroup, own_range
from tinkex.engine.ranks.shard import Division

#: What a layer has of its sizes that a rank has a part of.
_SIZES = ("num_k_heads", "num_v_heads", "key_dim", "value_dim", "conv_dim")
_MAMBA_SIZES = ("num_heads", "n_groups", "intermediate_size", "conv_dim")
#: The same of its modules.
_MODULE_SIZES = ("out_features", "in_channels", "out_channels", "groups")

#: A part of a layer, from the name of its weight or bias in a file or a model.
_PART = re.compile(r"(?:^|\.)(layers\.\d+\..+?)(?:\.weight|\.bias)?$")

Blocks = Mapping[str, Sequence[int]]


def row_blocks(layer: Any) -> dict[str, tuple[int, ...]]:
    """The parts of a whole layer of which a rank has some rows, with the rows of their blocks."""
    if is_mamba(layer):
        inner, heads = layer.intermediate_size, (layer.num_heads,)
        keys = layer.n_groups * layer.ssm_state_size
        mixed = (inner, keys, keys)
        # A group of the norm belongs to the heads of one group.
        found = {"in_proj": (inner, *mixed, *heads), "conv1d": mixed, "norm": (inner,)}
        return found | dict.fromkeys(("A_log", "D", "dt_bias"), heads)
    keys, values, heads = layer.key_dim, layer.value_dim, (layer.num_v_heads,)
    mixed = (keys, keys, values)
    found = {"conv1d": mixed, "A_log": heads, "dt_bias": heads}
    if hasattr(layer, "in_proj_qkvz"):
        # Key head by key head, each with all that belongs to it.
        return found | {"in_proj_qkvz": (2 * keys + 2 * values,), "in_proj_ba": (2 * heads[0],)}
    found |= {"in_proj_qkv": mixed, "in_proj_z": (values,)}
    return found | dict.fromkeys(("in_proj_a", "in_proj_b"), heads)


def blocks_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Those of all recurrent layers of a whole model, by the names of the parts in a file."""
    return {
        part_of_layer(f"{name}.{part}"): sizes
        for name, module in model.named_modules()
        if is_recurrent(module)
        for part, sizes in row_blocks(module).items()
    }


def part_of_layer(name: str) -> str:
    """Such as `layers.0.linear_attn.A_log`; empty for what is in no layer."""
    match = _PART.search(name)
    return "" if match is None else match[1]


def own_rows(whole: Any, sizes: Sequence[int], group: ProcessGroup) -> Tensor:
    """The rows of this rank, of every block. `whole` is a tensor in its file."""
    parts, start = [], 0
    for size in sizes:
        first, stop = own_range(size, group.rank, group.size)
        parts.append(whole[start + first : start + stop])
        start += size
    return torch.cat(parts)


def divide(layer: Any, name: str, ranks: int) -> dict[str, Division]:
    """Makes a layer that of a rank, without weights. Returns how its adapters are divided."""
    blocks = row_blocks(layer)
    divisions: dict[str, Division] = {}
    for part in blocks:
        linear = getattr(layer, part)
        if isinstance(linear, nn.Linear) and part not in NOT_ADAPTED:
            joint = joint_projections(layer, part)
            outputs = {part: linear.out_features}
            if joint is not None:
                outputs = {each: columns.outputs for each, columns in joint.items()}
            # Also the projections of joint layers have their outputs head by head.
            divisions |= {
                f"{name}.{each}": Division.of("B", size) for each, size in outputs.items()
            }
    out: nn.Linear = layer.out_proj
    divisions[f"{name}.out_proj"] = Division.of("A", out.in_features)
    out.in_features //= ranks
    out.weight = nn.Parameter(out.weight.new_empty(out.out_features, out.in_features))
    for part, sizes in blocks.items():
        rows, found = sum(sizes) // ranks, getattr(layer, part)
        if isinstance(found, nn.Parameter):
            setattr(layer, part, nn.Parameter(found.new_empty(rows)))
            continue
        for kind, weight in list(found.named_parameters()):
            setattr(found, kind, nn.Parameter(weight.new_empty(rows, *weight.shape[1:])))
        for size in _MODULE_SIZES:
            if hasattr(found, size):
                setattr(found, size, rows)
    for size in _MAMBA_SIZES if is_mamba(layer) else _SIZES:
        setattr(layer, size, getattr(layer, size) // ranks)
    return divisions
