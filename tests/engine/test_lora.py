"""Layout and initial weights of adapters, and several adapters in one batch."""

import itertools

import pytest
import torch
from torch import nn

from tinkex.engine.adapters.adapters import chosen_targets, seed_of
from tinkex.engine.model.lora import (
    AdapterContext,
    AdapterSegment,
    LoraLinear,
    WrongRows,
    initial_weights,
    make_pairs,
    matrices,
)
from tinkex.engine.model.targets import ALIGNMENT, Layout, Target, make_layout
from tinkex.wire.training import LoraConfig


def target(name: str, kind: str = "attn", group: str | None = None, size: int = 6) -> Target:
    return Target(name=name, kind=kind, inputs=size, outputs=size + 1, group=group or name)  # type: ignore[arg-type]


TARGETS = [
    target("q", group="qkv"),
    target("k", group="qkv"),
    target("o"),
    target("up", "mlp", size=9),
    target("lm_head", "unembed", size=11),
]


def ranges(layout: Layout) -> list[tuple[int, int]]:
    return sorted(
        (offset, offset + rows * columns)
        for placement in layout.placements.values()
        for offset, (rows, columns) in (
            (placement.offset_A, placement.shape_A),
            (placement.offset_B, placement.shape_B),
        )
    )


@pytest.mark.parametrize("rank", [1, 3, 8])
def test_matrices_do_not_overlap_and_groups_share_one_tall_A(rank: int) -> None:
    layout = make_layout(TARGETS, rank)
    for (_, stop), (start, _) in itertools.pairwise(ranges(layout)):
        assert stop <= start
    assert ranges(layout)[-1][1] <= layout.size
    q, k = layout.placements["q"], layout.placements["k"]
    assert k.offset_A == q.offset_A + rank * 6
    assert all(placement.offset_B % ALIGNMENT == 0 for placement in layout.placements.values())


def test_a_new_adapter_changes_nothing_and_has_a_uniform_A() -> None:
    layout = make_layout(TARGETS, 64)
    flat = initial_weights(layout, seed=1)
    for name, placement in layout.placements.items():
        A, B = matrices(flat, placement)
        bound = placement.shape_A[1] ** -0.5
        assert not B.any()
        assert A.abs().max() <= bound, name
        assert float(A.std()) == pytest.approx(bound / 3**0.5, rel=0.15)


def test_the_same_seed_gives_the_same_weights_whatever_else_is_trained() -> None:
    everything, some = make_layout(TARGETS, 4), make_layout(TARGETS[2:4], 4)
    flats = [initial_weights(everything, 5), initial_weights(some, 5)]
    for name in ("o", "up"):
        left = matrices(flats[0], everything.placements[name])[0]
        assert torch.equal(left, matrices(flats[1], some.placements[name])[0])
    assert not torch.equal(flats[0], initial_weights(everything, 6))


def test_without_a_seed_the_model_s_id_decides() -> None:
    lora = LoraConfig(rank=4)
    assert seed_of(lora, "a:train:0") == seed_of(lora, "a:train:0") != seed_of(lora, "a:train:1")
    assert seed_of(LoraConfig(rank=4, seed=0), "a:train:0") == 0


@pytest.mark.parametrize(
    ("switches", "names"),
    [
        ({}, ["q", "k", "o", "up", "lm_head"]),
        ({"train_mlp": False}, ["q", "k", "o", "lm_head"]),
        ({"train_attn": False, "train_unembed": False}, ["up"]),
    ],
)
def test_switches_choose_the_layers(switches: dict[str, bool], names: list[str]) -> None:
    chosen = chosen_targets(TARGETS, LoraConfig(rank=4, **switches))
    assert [one.name for one in chosen] == names


@pytest.mark.parametrize("rows", [3, 40])
def test_every_token_uses_its_adapter_and_gradients_go_to_it(rows: int) -> None:
    """Two adapters of different rank and tokens without one, against plain autograd."""
    torch.manual_seed(0)
    base = nn.Linear(6, 7).requires_grad_(False)
    context = AdapterContext()
    layer = LoraLinear(base, "q", context)
    segments, leaves, grads = [], [], []
    cuts = [(0, rows // 3), (rows - rows // 3, rows)]
    for rank, (start, stop) in zip((2, 5), cuts, strict=True):
        layout = make_layout([TARGETS[0]], rank)
        flat, grad = torch.randn(layout.size), torch.zeros(layout.size)
        segments.append(AdapterSegment(start, stop, make_pairs(layout, flat, scale=0.7, grad=grad)))
        leaves.append([m.clone().requires_grad_() for m in matrices(flat, layout.placements["q"])])
        grads.append(matrices(grad, layout.placements["q"]))
    context.segments, context.tokens = segments, rows
    x, push = torch.randn(1, rows, 6), torch.randn(1, rows, 7)

    mine = x.clone().requires_grad_()
    y = layer(mine)
    y.backward(push)

    theirs = x.clone().requires_grad_()
    parts = base(theirs)[0]
    added = torch.zeros_like(parts)
    for (start, stop), (A, B) in zip(cuts, leaves, strict=True):
        added[start:stop] = 0.7 * (theirs[0, start:stop] @ A.t()) @ B.t()
    expected = parts + added
    expected.backward(push[0])

    torch.testing.assert_close(y[0], expected)
    torch.testing.assert_close(mine.grad, theirs.grad)
    for leaf, grad in zip(leaves, grads, strict=True):
        for weight, found in zip(leaf, grad, strict=True):
            torch.testing.assert_close(found, weight.grad)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), y.detach())


def test_gradients_of_several_passes_add_up() -> None:
    torch.manual_seed(1)
    context = AdapterContext()
    layer = LoraLinear(nn.Linear(6, 7, bias=False).requires_grad_(False), "q", context)
    layout = make_layout([TARGETS[0]], 3)
    grad = torch.zeros(layout.size)
    context.segments = [
        AdapterSegment(0, 4, make_pairs(layout, torch.randn(layout.size), scale=1.0, grad=grad))
    ]
    context.tokens = 4
    x = torch.randn(4, 6, requires_grad=True)
    layer(x).sum().backward()
    once = grad.clone()
    layer(x).sum().backward()
    torch.testing.assert_close(grad, 2 * once)


def test_a_layer_that_gets_other_rows_than_the_pass_has_refuses() -> None:
    context = AdapterContext()
    layer = LoraLinear(nn.Linear(6, 7), "mlp.up_proj", context)
    context.tokens = 5
    assert layer(torch.zeros(1, 5, 6)).shape == (1, 5, 7)
    with pytest.raises(WrongRows, match=r"mlp\.up_proj got 3 rows in a pass of 5 tokens"):
        layer(torch.zeros(3, 6))


def test_experts_share_one_factor_and_have_the_other_each() -> None:
    up = Target(name="w1", kind="mlp", inputs=6, outputs=9, experts=4, shared="A", group="in")
    down = Target(name="w2", kind="mlp", inputs=9, outputs=6, experts=4, shared="B", group="w2")
    layout = make_layout([up, down], 3)
    assert layout.placements["w1"][1::2] == ((3, 6), (4, 9, 3))
    assert layout.placements["w2"][1::2] == ((4, 3, 9), (6, 3))
    flat = initial_weights(layout, seed=0)
    A, B = matrices(flat, layout.placements["w2"])
    assert not B.any()
    assert 0 < float(A.abs().max()) <= 9**-0.5
    assert not torch.equal(A[0], A[1])
