"""Which layers of a model are adapted, and where their matrices are in the vector of an adapter.

Only names and sizes: the same rules count the memory of a model that is not loaded.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

TargetKind = Literal["attn", "mlp", "unembed"]

#: Matrices begin at multiples of this many elements: 16 bytes in bfloat16, which GPU kernels need.
ALIGNMENT = 8


@dataclass(frozen=True, kw_only=True)
class Target:
    """A linear layer of the base model that can be adapted."""

    #: The module's path in the model, such as `model.layers.0.self_attn.q_proj`.
    name: str
    kind: TargetKind
    inputs: int
    outputs: int
    #: For a projection of all experts of a layer: how many there are. One factor is then a matrix
    #: for each expert, and the other, `shared`, is one matrix for all of them.
    experts: int | None = None
    shared: Literal["A", "B"] | None = None
    #: Targets of one group read the same input. Their A matrices are adjacent, so that one product
    #: can project the input for all of them.
    group: str

    def shape_A(self, rank: int) -> tuple[int, ...]:
        return self._shape("A", rank, self.inputs)

    def shape_B(self, rank: int) -> tuple[int, ...]:
        return self._shape("B", self.outputs, rank)

    def _shape(self, letter: str, *shape: int) -> tuple[int, ...]:
        if self.experts is None or self.shared == letter:
            return shape
        return (self.experts, *shape)


class Placement(NamedTuple):
    """Offsets and shapes of the two matrices of a target in the flat vector."""

    offset_A: int
    shape_A: tuple[int, ...]
    offset_B: int
    shape_B: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Layout:
    rank: int
    size: int
    placements: Mapping[str, Placement]


def make_layout(targets: Iterable[Target], rank: int) -> Layout:
    groups: dict[str, list[Target]] = {}
    for target in targets:
        groups.setdefault(target.group, []).append(target)
    placements: dict[str, Placement] = {}
    end = 0
    for members in groups.values():
        starts_A: dict[str, int] = {}
        for target in members:
            starts_A[target.name] = end
            end += math.prod(target.shape_A(rank))
        end = aligned(end)
        for target in members:
            shape_A, shape_B = target.shape_A(rank), target.shape_B(rank)
            placements[target.name] = Placement(starts_A[target.name], shape_A, end, shape_B)
            end = aligned(end + math.prod(shape_B))
    return Layout(rank=rank, size=end, placements=placements)


def aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


# -- which layers ---------------------------------------------------------------------------------

#: Projections that read the same input, so that their A matrices are adjacent in the layout.
GROUPS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv"),
    **dict.fromkeys(("gate_proj", "up_proj", "x_proj"), "gate_up"),
    **dict.fromkeys(("in_proj_q", "in_proj_k", "in_proj_v", "in_proj_z"), "in"),
}

#: Linear layers without adapters, as on the hosted service: the one that weights shared experts, the
#: gates of the delta rule, and the second halves of factored attention projections.
NOT_ADAPTED = frozenset(
    {
        "shared_expert_gate",
        *("in_proj_a", "in_proj_b", "in_proj_ba"),
        *("q_b_proj", "kv_b_proj"),
    }
)


#: Parts of the paths of modules that choose experts, which have no adapters either. Dense models may
#: use these names for something else.
ROUTERS = frozenset({"gate", "router"})


def text_name(path: str) -> str:
    """
    The name of a part of the decoder: in models with images, that of the text model alone.

    The hosted service calls them so, and an adapter fits with and without a vision tower.
    """
    return path.replace("language_model.", "")


def is_attention(path: str, parts: Collection[str]) -> bool:
    """Whether the module with this path in its layer, and with these parts, is attention."""
    return "attn" in path or "attention" in path or "q_proj" in parts


def linear_target(name: str, *, kind: TargetKind, inputs: int, outputs: int) -> Target:
    """A linear layer of the decoder, by its path in the model."""
    parent, _, leaf = name.rpartition(".")
    group = f"{parent}.{GROUPS.get(leaf, leaf)}"
    return Target(name=name, kind=kind, inputs=inputs, outputs=outputs, group=group)


def experts_targets(
    name: str, parts: Iterable[str], *, count: int, hidden: int, inner: int
) -> list[Target]:
    """
    The projections of the experts of a layer; `name` is the path of the experts in the model.

    `parts` are w1 and, if the experts have a gate, w3.
    """
    targets = [
        Target(
            name=f"{name}.{part}",
            kind="mlp",
            inputs=hidden,
            outputs=inner,
            experts=count,
            shared="A",
            group=f"{name}.in",
        )
        for part in parts
    ]
    down = Target(
        name=f"{name}.w2",
        kind="mlp",
        inputs=inner,
        outputs=hidden,
        experts=count,
        shared="B",
        group=f"{name}.w2",
    )
    return [*targets, down]


#: The name of the output projection, and of its LoRA pair.
HEAD = "lm_head"


def head_target(*, hidden: int, vocabulary: int) -> Target:
    return Target(name=HEAD, kind="unembed", inputs=hidden, outputs=vocabulary, group=HEAD)
