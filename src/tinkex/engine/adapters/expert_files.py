"""How adapters of experts are stored: Tinker's layout, and those of other programs.

Tinker's layout, which is also ours, has three pairs for the experts of a layer, with one dimension
for the experts, which is 1 for the factor that all experts share:

    ….experts.w1, w3    lora_A [1, R, H], lora_B [E, I, R]       gate and up
    ….experts.w2        lora_A [E, R, I], lora_B [1, H, R]       down

In memory the shared factor has two dimensions. Other programs have a pair for each expert:

    ….experts.0.gate_proj, up_proj, down_proj    lora_A [R, H], lora_B [I, R], …

or what PEFT makes of `target_parameters`: one pair for all experts, in which A is a stack of the
experts' matrices and the columns of B are ordered by rank first. Gate and up have one pair together,
of twice the rank: A has both A matrices, and B has zeros where gate meets the A of up.

    ….experts.base_layer    lora_A [E·2R, H], lora_B [2I, 2R·E]
    ….experts               lora_A [E·R, I], lora_B [H, R·E]

Neither says that experts share a factor, so a file is read if they do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from tinkex.wire.errors import UserFailure

# E experts, R rank, H hidden size, I inner size of an expert

Pair = tuple[Tensor, Tensor]
Pairs = Mapping[str, Pair]

#: The projection of an expert in a model -> its name in Tinker's files.
OWN_PARTS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
#: The factor that all experts share.
SHARED: dict[str, Literal[0, 1]] = {"w1": 0, "w3": 0, "w2": 1}

_ONE_EXPERT = re.compile(r"(.+\.experts)\.(0|[1-9][0-9]{0,5})\.(gate_proj|up_proj|down_proj)")
#: PEFT's names of the two pairs of all experts.
IN, DOWN = ".experts.base_layer", ".experts"


def shared_pairs(pairs: Pairs, rank: int | None = None) -> dict[str, Pair]:
    """
    The pairs of a file, with those of experts as in memory. Raises `UserFailure`.

    `rank` is that of the adapter, which the shapes of PEFT's layout do not show.
    """
    joined = join_experts(pairs)
    if rank is not None:
        joined = split_parameters(joined, rank)
    return {name: _without_ones(name, *pair) for name, pair in joined.items()}


def _without_ones(name: str, A: Tensor, B: Tensor) -> Pair:
    if A.dim() == B.dim() == 2:
        return A, B
    part = name.rpartition(".")[2]
    if A.dim() != 3 or B.dim() != 3 or part not in SHARED:
        raise UserFailure(
            f"the checkpoint's {name} has matrices of shape {list(A.shape)} and {list(B.shape)}; "
            "only experts' w1, w2 and w3 have three dimensions, both of them."
        )
    both = [A, B]
    shared = SHARED[part]
    if len(both[1 - shared]) == 1:
        raise UserFailure(
            f"the checkpoint's {name} has shapes {list(A.shape)} and {list(B.shape)}: both factors "
            "are shared by all experts. One of them must have a matrix for each expert."
        )
    if len(both[shared]) != 1:
        raise UserFailure(
            f"the checkpoint's {name} has shapes {list(A.shape)} and {list(B.shape)}: "
            f"lora_{'AB'[shared]} must be shared by all experts, with a first dimension of 1."
        )
    both[shared] = both[shared][0]
    return both[0], both[1]


def join_experts(pairs: Pairs) -> dict[str, Pair]:
    """
    Joins pairs of single experts to those of all experts, if one factor is equal in all of them.

    That is so in files that were exported from Tinker's layout. Others cannot be represented.
    """
    joined: dict[str, Pair] = {}
    single: dict[str, dict[int, Pair]] = {}
    for name, pair in pairs.items():
        if match := _ONE_EXPERT.fullmatch(name):
            path, expert, projection = match.groups()
            single.setdefault(f"{path}.{OWN_PARTS[projection]}", {})[int(expert)] = pair
        else:
            joined[name] = pair
    for name, experts in single.items():
        if sorted(experts) != list(range(len(experts))):
            missing = next(at for at in range(len(experts)) if at not in experts)
            raise UserFailure(
                f"the checkpoint has {len(experts)} experts for {name}, but none with number "
                f"{missing}."
            )
        if len({tuple((each.shape, each.dtype) for each in pair) for pair in experts.values()}) > 1:
            raise UserFailure(
                f"the checkpoint's experts of {name} have matrices of different shapes or formats."
            )
        shared = SHARED[name.rpartition(".")[2]]
        _add(joined, name, shared, *zip(*(experts[at] for at in range(len(experts))), strict=True))
    return joined


def split_parameters(pairs: Pairs, rank: int) -> dict[str, Pair]:
    """The pairs of a file with those of PEFT's `target_parameters` as Tinker has them."""
    stacks = {name: pair for name, pair in pairs.items() if name.endswith((IN, DOWN))}
    found = {name: pair for name, pair in pairs.items() if name not in stacks}
    for name, (A, B) in stacks.items():
        path = name.removesuffix(".base_layer")
        if not all(f"{path.removesuffix(DOWN)}{end}" in pairs for end in (IN, DOWN)):
            raise UserFailure(
                f"the checkpoint adapts only one of the parameters of {path}; only files with both "
                "are supported."
            )
        own = rank if name.endswith(DOWN) else 2 * rank
        if A.dim() != 2 or B.dim() != 2 or len(A) != B.shape[1] or len(A) % own:
            raise UserFailure(
                f"the checkpoint's {name} has matrices {list(A.shape)} and {list(B.shape)}, which "
                f"are no stacks of experts' matrices of rank {own}. Gate and up together need twice "
                "the rank of the other layers, with an A of their own each."
            )
        A_ERI = A.reshape(-1, own, A.shape[1])
        B_EOR = B.reshape(len(B), own, -1).permute(2, 0, 1)
        if name.endswith(DOWN):
            _add(found, f"{path}.w2", 1, A_ERI, B_EOR)
            continue
        for part, columns, rows in zip(
            ("w1", "w3"),
            (slice(0, rank), slice(rank, own)),
            _rows_of_gate_and_up(name, B_EOR, rank),
            strict=True,
        ):
            _add(found, f"{path}.{part}", 0, A_ERI[:, columns], B_EOR[:, rows, columns])
    return found


def _rows_of_gate_and_up(name: str, B_EOR: Tensor, rank: int) -> tuple[slice, slice]:
    """Which outputs are those of gate and of up: halves in most models, every other in gpt-oss."""
    half = B_EOR.shape[1] // 2
    for gate, up in (
        (slice(0, half), slice(half, None)),
        (slice(0, None, 2), slice(1, None, 2)),
    ):
        if not B_EOR[:, gate, rank:].any() and not B_EOR[:, up, :rank].any():
            return gate, up
    raise UserFailure(
        f"the checkpoint's {name} has one lora_A for gate and up. This server has adapters with one "
        "for each, as Tinker does."
    )


def _add(
    found: dict[str, Pair],
    name: str,
    shared: int,
    A: Tensor | Sequence[Tensor],
    B: Tensor | Sequence[Tensor],
) -> None:
    """Adds the pair of all experts, of matrices of each."""
    common, others = (A, B) if shared == 0 else (B, A)
    if any(not torch.equal(each, common[0]) for each in common):
        raise UserFailure(
            f"the checkpoint has another lora_{'AB'[shared]} for each expert of {name}. This "
            "server has adapters with one for all experts, as Tinker does."
        )
    if name in found:
        raise UserFailure(f"the checkpoint has {name} in two layouts.")
    stacked = others if isinstance(others, Tensor) else torch.stack([*others])
    one = common[0].unsqueeze(0)
    found[name] = (one, stacked) if shared == 0 else (stacked, one)
