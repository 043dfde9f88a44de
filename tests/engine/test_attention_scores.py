"""Windows, sinks and soft caps in every form of attention, against the formula in float64."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tinkex.engine.model import attention, attention_scores, flash_attention
from tinkex.engine.model.attention import (
    CachedPrefix,
    CacheLayer,
    CacheUse,
    Packing,
    UnsupportedAttention,
    attend,
    attend_packed_with_backward,
    attend_segments,
)
from tinkex.engine.model.attention_scores import Scoring
from tinkex.engine.model.flash_attention import Segments

HEADS, KEY_HEADS, SIZE, VALUE_SIZE = 4, 2, 8, 6
WINDOW = 5
CPU = torch.device("cpu")

SCORINGS = {
    "window": Scoring(0.3, window=WINDOW),
    "sinks": Scoring(0.3, sinks=torch.tensor([20.0, -20.0, 0.5, -1.0], dtype=torch.float64)),
    "soft cap": Scoring(0.3, softcap=1.5),
    "all": Scoring(0.3, WINDOW, 1.5, torch.tensor([20.0, -20.0, 0.5, -1.0], dtype=torch.float64)),
}


def dense(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, *, before: int = 0) -> Tensor:
    """[T, H, D] over [L, K, D], where `before` keys come before the first query."""
    k, v = (t.repeat_interleave(HEADS // KEY_HEADS, dim=1) for t in (k, v))
    scores = torch.einsum("thd,lhd->htl", q, k) * scoring.scaling
    if scoring.softcap is not None:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    gap = (torch.arange(len(q)) + before)[:, None] - torch.arange(len(k))
    hidden = gap < 0
    if scoring.window is not None:
        hidden |= gap >= scoring.window
    scores = scores.masked_fill(hidden, -math.inf)
    if scoring.sinks is not None:
        sink = scoring.sinks.to(scores)[:, None, None].expand(-1, len(q), 1)
        scores = torch.cat([scores, sink], dim=2)
    return torch.einsum("htl,lhe->the", scores.softmax(dim=-1)[:, :, : len(k)], v)


def random_qkv(tokens: int, values: int = VALUE_SIZE) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    shapes = ((tokens, HEADS, SIZE), (tokens, KEY_HEADS, SIZE), (tokens, KEY_HEADS, values))
    q, k, v = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    # Scores of the size of the cap, and larger.
    return q * 3, k, v


def layer() -> nn.Module:
    module = nn.Module()
    module.layer_idx = 0  # type: ignore[assignment]
    return module


def call(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing, scoring: Scoring, **more: Any
) -> Tensor:
    out, _ = attend(
        layer(),
        *(t.transpose(0, 1).unsqueeze(0) for t in (q, k, v)),
        None,
        scaling=scoring.scaling,
        sliding_window=scoring.window,
        softcap=scoring.softcap,
        s_aux=scoring.sinks,
        packing=packing,
        **more,
    )
    return out[0]


def with_gradients(
    attended: Callable[..., Tensor], tensors: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    leaves = [t.detach().requires_grad_() for t in tensors]
    out = attended(*leaves)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(out.shape, generator=generator, dtype=out.dtype)
    return out.detach(), *torch.autograd.grad(out, leaves, weight)


def check(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], bound: float = 1e-12) -> None:
    for one, other in zip(found, expected, strict=True):
        assert float((one - other).abs().max()) < bound


@pytest.mark.parametrize("blocks", [512, 4])
@pytest.mark.parametrize("name", SCORINGS)
@pytest.mark.parametrize(
    "lengths",
    [
        [1, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW],
        [3 * WINDOW] * 2,  # equal lengths are one batch
    ],
)
def test_packed_segments_and_their_gradients(
    lengths: list[int], name: str, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_scores, "BLOCK", blocks)
    scoring, tensors = SCORINGS[name], random_qkv(sum(lengths))
    packing = Packing.of(lengths, device=CPU)

    def reference(*qkv: Tensor) -> Tensor:
        parts = zip(*(t.split(lengths) for t in qkv), strict=True)
        return torch.cat([dense(*part, scoring) for part in parts])

    found = with_gradients(lambda *qkv: call(*qkv, packing, scoring), tensors)
    check(found, with_gradients(reference, tensors))


def test_few_scores_at_once_give_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = random_qkv(50)
    scoring, packing = SCORINGS["all"], Packing.of([50], device=CPU)
    whole = with_gradients(lambda *qkv: call(*qkv, packing, scoring), tensors)
    monkeypatch.setitem(attention_scores.MAX_SCORES, "cpu", 1)
    check(with_gradients(lambda *qkv: call(*qkv, packing, scoring), tensors), whole)


def test_16_bit_inputs_are_computed_in_float32() -> None:
    q, k, v = (t.bfloat16() for t in random_qkv(30))
    scoring = SCORINGS["all"]
    found = call(q, k, v, Packing.of([30], device=CPU), scoring)
    expected = dense(q.double(), k.double(), v.double(), scoring)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("name", [*SCORINGS, "plain"])
@pytest.mark.parametrize("cut", [1, 2, WINDOW, 11, 13])
def test_a_later_chunk_and_a_prefix_hit(name: str, cut: int) -> None:
    """14 tokens, of which `cut` are in the cache, together with a new segment of nine."""
    scoring = SCORINGS.get(name, Scoring(0.3))
    q, k, v = random_qkv(14)
    other = random_qkv(9)
    keys = torch.full((40, KEY_HEADS, SIZE), math.nan, dtype=torch.float64)
    values = torch.full((40, KEY_HEADS, VALUE_SIZE), math.nan, dtype=torch.float64)
    cached = CacheLayer(keys, values)
    slots = torch.tensor([20, 21, 22, 23, 3, 4, 5, 6, 7, 8, 9, 30, 31, 32])
    first = CacheUse(layers=[cached], write_slots_T=slots[:cut], prefixes=[None])
    call(q[:cut], k[:cut], v[:cut], Packing.of([cut], device=CPU, cache=first), scoring)
    second = CacheUse(
        layers=[cached],
        write_slots_T=torch.cat([slots[cut:], torch.arange(10, 19)]),
        prefixes=[CachedPrefix.of(slots, 14 - cut, q.dtype), None],
    )
    packing = Packing.of([14 - cut, 9], device=CPU, offsets=[cut, 0], cache=second)
    both = (torch.cat([mine[cut:], others]) for mine, others in zip((q, k, v), other, strict=True))
    found = call(*both, packing, scoring)
    check((found[: 14 - cut],), (dense(q, k, v, scoring)[cut:],))
    check((found[14 - cut :],), (dense(*other, scoring),))


# -- the kernels of a GPU, emulated -----------------------------------------------------------------


def emulated_scores(q: Tensor, k: Tensor, scale: float, window: int | None, before: int) -> Tensor:
    k = k.repeat_interleave(HEADS // KEY_HEADS, dim=1)
    scores = torch.einsum("thd,lhd->htl", q, k) * scale
    gap = (torch.arange(len(q)) + before)[:, None] - torch.arange(len(k))
    hidden = (gap < 0) if window is None else (gap < 0) | (gap > window)
    return scores.masked_fill(hidden, -math.inf)


def emulated_forward(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, key_starts: Tensor, *_: Any,
    scale: float, window_size_left: int | None = None, window_size_right: int | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Without sinks, as on a GPU. The log-sum-exp is [heads, tokens]."""
    assert (window_size_left is None) == (window_size_right is None)
    outs, lses = [], []
    for (a, b), (c, d) in zip(
        pairwise(starts.tolist()), pairwise(key_starts.tolist()), strict=True
    ):
        scores = emulated_scores(q[a:b], k[c:d], scale, window_size_left, d - c - (b - a))
        values = v[c:d].repeat_interleave(HEADS // KEY_HEADS, dim=1)
        outs.append(torch.einsum("htl,lhd->thd", scores.softmax(dim=-1), values))
        lses.append(scores.logsumexp(dim=-1))
    empty = torch.empty(0)
    return torch.cat(outs), torch.cat(lses, dim=1), empty, empty, empty


def emulated_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, starts: Tensor, *_: Any,
    scale: float, window_size_left: int | None = None, window_size_right: int | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """As on a GPU: probabilities come from the log-sum-exp, and no softmax is computed again."""
    groups = HEADS // KEY_HEADS
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for a, b in pairwise(starts.tolist()):
        scores = emulated_scores(q[a:b], k[a:b], scale, window_size_left, 0)
        powers = (scores - lse[:, a:b, None]).exp()
        keys, values = (t[a:b].repeat_interleave(groups, dim=1) for t in (k, v))
        products = torch.einsum("thd,lhd->htl", g[a:b], values)
        ds = powers * (products - (g[a:b] * out[a:b]).sum(-1).t()[:, :, None]) * scale
        dq[a:b] = torch.einsum("htl,lhd->thd", ds, keys)
        for into, left, right in ((dk, ds, q), (dv, powers, g)):
            whole = torch.einsum("htl,thd->lhd", left, right[a:b])
            into[a:b] = whole.unflatten(1, (KEY_HEADS, groups)).sum(2)
    return dq, dk, dv


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "has_varlen", lambda *_: True)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", emulated_forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", emulated_backward)
    for module in (attention, flash_attention):
        monkeypatch.setattr(module, "has_flash_kernels", lambda: True)


LENGTHS = [1, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW]


@pytest.mark.usefixtures("flash")
@pytest.mark.parametrize("name", SCORINGS)
def test_flash_kernels_with_windows_and_sinks(name: str) -> None:
    """Soft caps are not computed by these kernels: with them, blocks are."""
    scoring, tensors = SCORINGS[name], random_qkv(sum(LENGTHS))
    packing = Packing.of(LENGTHS, device=CPU)

    def reference(*qkv: Tensor) -> Tensor:
        parts = zip(*(t.split(LENGTHS) for t in qkv), strict=True)
        return torch.cat([dense(*part, scoring) for part in parts])

    found = with_gradients(lambda *qkv: call(*qkv, packing, scoring), tensors)
    check(found, with_gradients(reference, tensors))


@pytest.mark.usefixtures("flash")
@pytest.mark.parametrize("name", [*SCORINGS, "plain"])
def test_the_backward_pass_without_autograd(name: str) -> None:
    scoring, tensors = SCORINGS.get(name, Scoring(0.3)), random_qkv(sum(LENGTHS), SIZE)
    packing = Packing.of(LENGTHS, device=CPU)
    out, backward = attend_packed_with_backward(0, *tensors, scoring=scoring, packing=packing)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(0), dtype=out.dtype)

    def reference(*qkv: Tensor) -> Tensor:
        parts = zip(*(t.split(LENGTHS) for t in qkv), strict=True)
        return torch.cat([dense(*part, scoring) for part in parts])

    check((out, *backward(weight)), with_gradients(reference, tensors))


@pytest.mark.parametrize("name", [*SCORINGS, "plain"])
def test_segments_that_end_with_their_queries(name: str) -> None:
    """As prefill on a GPU calls it: the keys of each segment are gathered from the cache."""
    check_segments(SCORINGS.get(name, Scoring(0.3)))


@pytest.mark.usefixtures("flash")
@pytest.mark.parametrize("name", SCORINGS)
def test_segments_that_end_with_their_queries_by_flash_kernels(name: str) -> None:
    check_segments(SCORINGS[name])


def check_segments(scoring: Scoring) -> None:
    q, k, v = random_qkv(20, SIZE)
    starts = torch.tensor([[0, 3, 4], [0, 12, 20]], dtype=torch.int32)
    found = attend_segments(q[:4], k, v, Segments(starts[0], starts[1], 3, 12), scoring)
    check((found[:3],), (dense(q[:3], k[:12], v[:12], scoring, before=9),))
    check((found[3:],), (dense(q[3:4], k[12:], v[12:], scoring, before=7),))


@pytest.mark.usefixtures("flash")
def test_a_log_sum_exp_of_another_form_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def turned(*arguments: Any, **options: Any) -> tuple[Tensor, ...]:
        out, lse, *rest = emulated_forward(*arguments, **options)
        return out, lse.t(), *rest

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", turned)
    with pytest.raises(RuntimeError, match="sinks cannot be added"):
        call(*random_qkv(9), Packing.of([9], device=CPU), SCORINGS["sinks"])


# -- what transformers asks for ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"position_bias": torch.zeros(1)}, "the argument position_bias of attention"),
        ({"is_causal": False}, "attention to later tokens"),
    ],
)
def test_an_argument_that_attention_does_not_know_is_refused(
    arguments: dict[str, Any], message: str
) -> None:
    packing = Packing.of([3], device=CPU, layers_seen={})
    with pytest.raises(UnsupportedAttention, match=message):
        call(*random_qkv(3), packing, Scoring(0.3), **arguments)
    call(*random_qkv(3), packing, Scoring(0.3), position_bias=None, is_causal=True, dropout=0.0)
