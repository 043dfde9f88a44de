"""All variants of attention against the formula."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tinkex.engine import Engine
from tinkex.engine.model import attention
from tinkex.engine.model.attention import (
    CachedPrefix,
    CacheLayer,
    CacheUse,
    DecodeReads,
    GatheredTable,
    Packing,
    ReadRound,
    SlotRange,
    attend,
)

HEADS, KEY_HEADS, SIZE = 6, 2, 8
SCALING = 0.3
CPU = torch.device("cpu")


def plain(q: Tensor, k: Tensor, v: Tensor, *, before: int = 0) -> Tensor:
    """[T, H, D] over [L, K, D], where `before` keys come before the first query."""
    k, v = (t.repeat_interleave(HEADS // KEY_HEADS, dim=1) for t in (k, v))
    scores = torch.einsum("thd,lhd->htl", q, k) * SCALING
    future = torch.ones(len(q), len(k), dtype=torch.bool).triu(before + 1)
    weights = scores.masked_fill(future, -math.inf).softmax(dim=-1)
    return torch.einsum("htl,lhd->thd", weights, v)


def random_qkv(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(tokens)
    return (
        torch.randn(tokens, HEADS, SIZE),
        torch.randn(tokens, KEY_HEADS, SIZE),
        torch.randn(tokens, KEY_HEADS, SIZE),
    )


def call(q: Tensor, k: Tensor, v: Tensor, packing: Packing) -> Tensor:
    layer = nn.Module()
    layer.layer_idx = 0  # type: ignore[assignment]
    out, _ = attend(
        layer,
        *(t.transpose(0, 1).unsqueeze(0) for t in (q, k, v)),
        None,
        scaling=SCALING,
        packing=packing,
    )
    assert out.shape == (1, len(q), HEADS, SIZE)
    return out[0]


@pytest.mark.parametrize("lengths", [[7], [4, 4, 4], [3, 1, 9], [1, 1]])
def test_tokens_attend_only_to_the_past_of_their_segment(lengths: list[int]) -> None:
    q, k, v = random_qkv(sum(lengths))
    found = call(q, k, v, Packing.of(lengths, device=CPU))
    parts = [plain(*part) for part in zip(*(t.split(lengths) for t in (q, k, v)), strict=True)]
    torch.testing.assert_close(found, torch.cat(parts))


def empty_cache(rows: int) -> CacheLayer:
    shape = (rows, KEY_HEADS, SIZE)
    return CacheLayer(torch.full(shape, math.nan), torch.full(shape, math.nan))


def emulated_varlen(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, key_starts: Tensor, *_: Any, **__: Any
) -> Tensor:
    """As on a GPU: the last query of a segment sees all its keys."""
    segments = zip(pairwise(starts.tolist()), pairwise(key_starts.tolist()), strict=True)
    return torch.cat(
        [plain(q[a:b], k[c:d], v[c:d], before=d - c - (b - a)) for (a, b), (c, d) in segments]
    )


@pytest.mark.parametrize("varlen", [False, True])
def test_a_later_chunk_attends_to_the_cached_prefix(
    varlen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nine tokens in chunks of four and five, together with a new segment of three."""
    monkeypatch.setattr(attention, "has_varlen", lambda *_: varlen)
    monkeypatch.setattr(attention, "varlen_attn", emulated_varlen)
    q, k, v = random_qkv(9)
    other_q, other_k, other_v = random_qkv(3)
    layer = empty_cache(30)
    rows = torch.tensor([20, 21, 22, 23, 3, 4, 5, 6, 7])
    first = CacheUse(layers=[layer], write_slots_T=rows[:4], prefixes=[None])
    call(q[:4], k[:4], v[:4], Packing.of([4], device=CPU, cache=first))
    second = CacheUse(
        layers=[layer],
        write_slots_T=torch.cat([rows[4:], torch.tensor([10, 11, 12])]),
        prefixes=[CachedPrefix.of(rows, 5, q.dtype), None],
    )
    found = call(
        torch.cat([q[4:], other_q]),
        torch.cat([k[4:], other_k]),
        torch.cat([v[4:], other_v]),
        Packing.of([5, 3], device=CPU, offsets=[4, 0], cache=second),
    )
    torch.testing.assert_close(found[:5], plain(q, k, v)[4:])
    torch.testing.assert_close(found[5:], plain(other_q, other_k, other_v))


@pytest.mark.parametrize("form", ["ranges", "table", "ranges without the flash kernel"])
def test_decoding_reads_contiguous_and_scattered_slots(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two samples of a prompt of six, and a third sequence with two slot ranges of its own."""
    torch.manual_seed(3)
    if "without" in form:
        monkeypatch.setattr(attention, "attention_and_lse", attention.plain_attention_and_lse)
    layer = empty_cache(40)
    cached_rows = [
        [*range(8, 14), 20],
        [*range(8, 14), 30, 31],
        [0, 1, 2, 25, 26],
    ]
    own = [rows[-1] for rows in cached_rows]
    for row in {row for rows in cached_rows for row in rows} - set(own):
        layer.keys[row], layer.values[row] = torch.randn(2, KEY_HEADS, SIZE)
    q, k, v = random_qkv(3)
    cache = CacheUse(layers=[layer], write_slots_T=torch.tensor(own))
    if form != "table":
        rounds = [
            ReadRound([SlotRange(8, 14, 0, 2), SlotRange(0, 3, 2, 3)], None),
            ReadRound(
                [SlotRange(20, 21, 0, 1), SlotRange(30, 32, 1, 2), SlotRange(25, 27, 2, 3)],
                torch.arange(3),
            ),
        ]
        cache = CacheUse(
            layers=[layer],
            write_slots_T=torch.tensor(own),
            reads={None: DecodeReads(rounds=rounds)},
        )
    else:
        # Padding must name an initialized slot: unused slots hold NaN in this test.
        table = torch.full((3, 8), 8)
        for at, rows in enumerate(cached_rows):
            table[at, : len(rows)] = torch.tensor(rows)
        lengths = torch.tensor([len(rows) for rows in cached_rows])
        bias = torch.zeros(3, 8).masked_fill(torch.arange(8) >= lengths[:, None], -math.inf)
        cache = CacheUse(
            layers=[layer],
            write_slots_T=torch.tensor(own),
            reads={None: DecodeReads(table=GatheredTable(table.flatten(), bias[:, None, None, :]))},
        )
    found = call(q, k, v, Packing.of([1, 1, 1], device=CPU, offsets=[6, 7, 4], cache=cache))
    for at, rows in enumerate(cached_rows):
        expected = plain(q[at : at + 1], layer.keys[rows], layer.values[rows], before=len(rows) - 1)
        torch.testing.assert_close(found[at : at + 1], expected)


def test_this_torch_has_the_flash_kernel() -> None:
    assert attention.attention_and_lse is attention.flash_attention_and_lse


def gone(*_: object, **__: object) -> None:
    raise AttributeError("no such operator")


def changed(q: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
    return torch.zeros_like(q), torch.zeros(q.shape[:-1])


@pytest.mark.parametrize("kernel", [gone, changed])
def test_without_a_working_flash_kernel_public_operations_are_used(
    kernel: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "_scaled_dot_product_flash_attention_for_cpu"
    monkeypatch.setattr(torch.ops.aten, name, kernel)
    assert attention.fastest_attention_and_lse() is attention.plain_attention_and_lse


def test_the_mask_of_a_later_chunk_is_made_once_for_all_layers(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    masks: list[Tensor] = []
    real = torch.nn.functional.scaled_dot_product_attention

    def watched(*args: Any, attn_mask: Tensor | None = None, **options: Any) -> Tensor:
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            masks.append(attn_mask)
        return real(*args, attn_mask=attn_mask, **options)

    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", watched)
    layers = [
        CacheLayer(*(torch.zeros(16, *shape) for shape in shapes))
        for shapes in engine.model.cache_shapes
    ]
    assert len(layers) > 1
    cache = CacheUse(
        layers=layers,
        write_slots_T=torch.arange(4, 9),
        prefixes=[CachedPrefix.of(torch.arange(9), 5, torch.float32)],
    )
    packing = Packing.of([5], device=CPU, offsets=[4], cache=cache)
    with torch.inference_mode():
        engine.model.hidden(torch.arange(5), packing)
    assert len(masks) == len(layers)
    assert len({id(mask) for mask in masks}) == 1
