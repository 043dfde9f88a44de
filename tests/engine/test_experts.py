"""Experts with adapters: values and gradients against autograd over merged weights, module alone."""

import importlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from tinkex.engine.model.expert_products import ROW_BYTES, ExpertProducts, Routing
from tinkex.engine.model.experts import ExpertSlice, ExpertWeights, expert_slices_of, run_experts
from tinkex.engine.model.lora import AdapterSegment, make_pairs, matrices
from tinkex.engine.model.targets import make_layout

TOKENS, EXPERTS, HIDDEN, INNER = 13, 5, 16, 8


class Family(NamedTuple):
    """How a family stores its experts, and how it gates."""

    gated: bool = True
    interleaved: bool = False
    biased: bool = False


FAMILIES = {
    "usual": Family(),
    "gpt_oss": Family(interleaved=True, biased=True),
    "nemotron_h": Family(gated=False),
}


def gate_of(family: Family) -> Any:
    def gate(gate_up: Tensor) -> Tensor:
        if not family.gated:
            return F.relu(gate_up).square()
        if family.interleaved:
            left, right = gate_up[..., ::2].clamp(max=7), gate_up[..., 1::2].clamp(-7, 7)
            return left * torch.sigmoid(1.702 * left) * (right + 1)
        left, right = gate_up.chunk(2, dim=-1)
        return F.silu(left) * right

    return gate


def random_weights(family: Family, dtype: torch.dtype) -> ExpertWeights:
    outputs = INNER * (2 if family.gated else 1)
    columns = {"w1": slice(None)}
    if family.gated:
        columns = {"w1": slice(0, INNER), "w3": slice(INNER, 2 * INNER)}
    if family.interleaved:
        columns = {"w1": slice(0, None, 2), "w3": slice(1, None, 2)}
    biases = [
        torch.randn(EXPERTS, size, dtype=dtype) if family.biased else None
        for size in (outputs, HIDDEN)
    ]
    return ExpertWeights(
        torch.randn(EXPERTS, HIDDEN, outputs, dtype=dtype) / 4,
        biases[0],
        torch.randn(EXPERTS, INNER, HIDDEN, dtype=dtype) / 4,
        biases[1],
        gate_of(family),
        columns,
    )


class Adapter(NamedTuple):
    slices: list[ExpertSlice]
    flat: Tensor
    grad: Tensor
    layout: Any


def random_adapter(
    weights: ExpertWeights, rank: int, start: int, stop: int, dtype: torch.dtype
) -> Adapter:
    layout = make_layout(weights.targets("e"), rank)
    flat, grad = (
        torch.randn(layout.size, dtype=dtype) / 3,
        torch.zeros(layout.size, dtype=dtype),
    )
    pairs = make_pairs(layout, flat, scale=32 / rank, grad=grad)
    slices = expert_slices_of([AdapterSegment(start, stop, pairs)], "e")
    return Adapter(slices, flat, grad, layout)


def reference(
    x: Tensor,
    index: Tensor,
    p: Tensor,
    weights: ExpertWeights,
    merged: Sequence[tuple[Tensor, Tensor] | None],
) -> Tensor:
    """Token by token, with the merged weights of each token's adapter."""
    rows = []
    for t in range(len(x)):
        own = merged[t]
        first, down = (weights.in_EHO, weights.down_EIH) if own is None else own
        total = torch.zeros_like(x[t])
        for k in range(index.shape[1]):
            e = int(index[t, k])
            h = x[t] @ first[e]
            if weights.in_bias_EO is not None:
                h = h + weights.in_bias_EO[e]
            out = weights.gate(h) @ down[e]
            if weights.down_bias_EH is not None:
                out = out + weights.down_bias_EH[e]
            total = total + p[t, k] * out
        rows.append(total)
    return torch.stack(rows)


def merged_weights(
    weights: ExpertWeights, layout: Any, flat: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    first = weights.in_EHO.clone()
    for part, columns in weights.columns.items():
        A, B = matrices(flat, layout.placements[f"e.{part}"])
        first[:, :, columns] = first[:, :, columns] + scale * A.t() @ B.mT
    A, B = matrices(flat, layout.placements["e.w2"])
    return first, weights.down_EIH + scale * A.mT @ B.t()


def chosen(kind: str) -> Tensor:
    if kind == "one":
        return torch.randint(0, EXPERTS, (TOKENS, 1))
    if kind == "skewed":  # all tokens choose expert 3, none chooses expert 1
        others = torch.tensor([0, 2, 4])[torch.randint(0, 3, (TOKENS, 1))]
        return torch.cat([others, torch.full((TOKENS, 1), 3)], dim=1)
    return torch.stack([torch.randperm(EXPERTS)[:3] for _ in range(TOKENS)])


def check(
    family: str,
    routing: str,
    ranks: Sequence[int],
    dtype: torch.dtype,
    *,
    grouped: bool,
    atol: float,
) -> None:
    torch.manual_seed(0)
    weights = random_weights(FAMILIES[family], dtype)
    x = torch.randn(TOKENS, HIDDEN, dtype=dtype)
    index = chosen(routing)
    p = torch.rand(index.shape, dtype=dtype)
    push = torch.randn(TOKENS, HIDDEN, dtype=dtype)
    # Base tokens before, between and after.
    spans = [(1, 5), (7, 8), (8, 12)][: len(ranks)]
    adapters = [
        random_adapter(weights, rank, *span, dtype) for rank, span in zip(ranks, spans, strict=True)
    ]

    mine = x.clone().requires_grad_(), p.clone().requires_grad_()
    slices = [each for adapter in adapters for each in adapter.slices]
    y = run_experts(mine[0], index, mine[1], weights, slices, grouped=grouped)
    y.backward(push)

    theirs = x.clone().requires_grad_(), p.clone().requires_grad_()
    leaves = [adapter.flat.clone().requires_grad_() for adapter in adapters]
    merged: list[tuple[Tensor, Tensor] | None] = [None] * TOKENS
    for adapter, leaf, rank, (start, stop) in zip(adapters, leaves, ranks, spans, strict=True):
        own = merged_weights(weights, adapter.layout, leaf, 32 / rank)
        merged[start:stop] = [own] * (stop - start)
    expected = reference(theirs[0], index, theirs[1], weights, merged)
    expected.backward(push)

    def close(found: Tensor | None, wanted: Tensor | None) -> None:
        assert found is not None
        assert wanted is not None
        scale = max(1.0, float(wanted.detach().abs().max()))
        assert float((found - wanted).detach().abs().max()) <= atol * scale

    close(y, expected)
    close(mine[0].grad, theirs[0].grad)
    close(mine[1].grad, theirs[1].grad)
    for adapter, leaf in zip(adapters, leaves, strict=True):
        close(adapter.grad, leaf.grad)
    with torch.no_grad():
        assert torch.equal(run_experts(x, index, p, weights, slices, grouped=grouped), y)


@pytest.fixture
def poisoned() -> Iterator[None]:
    """New memory is NaN, so a product that leaves a row out shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("routing", ["one", "skewed", "usual"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_autograd_over_merged_weights(family: str, routing: str) -> None:
    check(family, routing, (1, 4, 8), torch.float64, grouped=False, atol=1e-12)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("ranks", [(8,), (3, 8, 1), (12,)])
@pytest.mark.parametrize("family", FAMILIES)
def test_grouped_products_are_those_of_the_loop(family: str, ranks: Sequence[int]) -> None:
    check(family, "usual", ranks, torch.float32, grouped=True, atol=1e-5)


@pytest.mark.parametrize("most", [4 * EXPERTS, 2 * EXPERTS])
def test_many_groups_take_several_grouped_calls(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of the adapters in each call or, if a layer has many experts, some of the experts."""
    from tinkex.engine.model import expert_products

    counts = []
    multiply = expert_products.grouped_mm

    def counting(left: Tensor, right: Tensor, ends_N: Tensor) -> Tensor:
        counts.append(len(ends_N))
        return multiply(left, right, ends_N)

    monkeypatch.setattr(expert_products, "MAX_GROUPS", most)
    monkeypatch.setattr(expert_products, "grouped_mm", counting)
    check("usual", "skewed", (4, 4, 4), torch.float32, grouped=True, atol=1e-5)
    assert max(counts) <= most


@pytest.mark.parametrize("grouped", [False, True])
def test_tokens_of_a_broken_adapter_do_not_disturb_others(*, grouped: bool) -> None:
    """An adapter beyond the range of its format: its own tokens are NaN, all others unchanged."""
    torch.manual_seed(1)
    weights = random_weights(FAMILIES["usual"], torch.float32)
    x, index = torch.randn(TOKENS, HIDDEN), chosen("usual")
    p, push = torch.rand(index.shape), torch.randn(TOKENS, HIDDEN)
    broken = random_adapter(weights, 4, 3, 6, torch.float32)
    healthy = random_adapter(weights, 2, 6, 10, torch.float32)
    broken.flat.fill_(float("inf"))
    others = [t for t in range(TOKENS) if not 3 <= t < 6]

    def run(slices: list[ExpertSlice]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        healthy.grad.zero_()
        given = x.clone().requires_grad_(), p.clone().requires_grad_()
        y = run_experts(given[0], index, given[1], weights, slices, grouped=grouped)
        y.backward(push)
        assert given[0].grad is not None
        assert given[1].grad is not None
        return y.detach(), given[0].grad, given[1].grad, healthy.grad.clone()

    *alone, gradient_alone = run(healthy.slices)
    *both, gradient = run([*broken.slices, *healthy.slices])
    for ours, theirs in zip(both, alone, strict=True):
        torch.testing.assert_close(ours[others], theirs[others])
    torch.testing.assert_close(gradient, gradient_alone)
    assert not both[0][3:6].isfinite().any()


def test_a_new_adapter_changes_no_bit() -> None:
    torch.manual_seed(2)
    weights = random_weights(FAMILIES["usual"], torch.float32)
    x, index = torch.randn(TOKENS, HIDDEN), chosen("usual")
    p = torch.rand(index.shape)
    adapter = random_adapter(weights, 4, 2, 11, torch.float32)
    for part in ("w1", "w3", "w2"):
        matrices(adapter.flat, adapter.layout.placements[f"e.{part}"])[1].zero_()
    with torch.no_grad():
        base = run_experts(x, index, p, weights, [])
        assert torch.equal(run_experts(x, index, p, weights, adapter.slices), base)


def test_slots_are_grouped_by_expert_and_token_range() -> None:
    index = torch.tensor([[2, 0], [0, 1], [2, 1]])
    routing = Routing.of(index, 4)
    assert routing.experts_S.tolist() == [0, 0, 1, 1, 2, 2]
    assert routing.tokens_S.tolist() == [0, 1, 1, 2, 0, 2]
    assert routing.ends([3]).tolist() == [2, 4, 6, 6]
    assert routing.ends([1, 3]).tolist() == [1, 2, 2, 4, 5, 6, 6, 6]
    assert routing.summed(torch.arange(6.0)[:, None]).flatten().tolist() == [4.0, 3.0, 8.0]


def test_a_gpu_gets_rows_that_its_kernels_can_read() -> None:
    like = torch.empty(1, dtype=torch.bfloat16)
    from tinkex.engine.model.expert_products import _padded

    assert [_padded(rank, like) for rank in (1, 7, 8, 9)] == [8, 8, 8, 16]
    assert ROW_BYTES == 16
    assert type(
        ExpertProducts.of(Routing.of(torch.zeros(1, 1, dtype=torch.long), 1), [], like)
    ) is (ExpertProducts)


#: Families whose experts differ in how they are stored or gated, and the sizes of their configs.
REAL = {
    "Qwen3Moe": {"num_experts": EXPERTS, "moe_intermediate_size": INNER},
    "GptOss": {"num_local_experts": EXPERTS, "intermediate_size": INNER},
    "DeepseekV3": {"n_routed_experts": EXPERTS, "moe_intermediate_size": INNER},
    "GraniteMoe": {"num_local_experts": EXPERTS, "intermediate_size": INNER},
    # Without a gate.
    "NemotronH": {"n_routed_experts": EXPERTS, "moe_intermediate_size": INNER},
}


@pytest.mark.parametrize("family", REAL)
def test_experts_of_transformers_give_the_numbers_of_its_own_code(family: str) -> None:
    config = getattr(transformers, f"{family}Config")(hidden_size=HIDDEN, **REAL[family])
    config._experts_implementation = "eager"
    name = config.model_type
    code = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    module = getattr(code, f"{family}Experts")(config).double()
    torch.manual_seed(3)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    x, index = torch.randn(TOKENS, HIDDEN, dtype=torch.float64), chosen("usual")
    p = torch.rand(index.shape, dtype=torch.float64)
    with torch.no_grad():
        expected = module(x, index, p)
        found = run_experts(x, index, p, ExpertWeights.of(module), [])
    assert float((found - expected).abs().max()) < 1e-12 * float(expected.abs().max())
    targets = {target.name for target in ExpertWeights.of(module).targets("e")}
    assert targets == ({"e.w1", "e.w2"} if family == "NemotronH" else {"e.w1", "e.w2", "e.w3"})
