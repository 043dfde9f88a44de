"""Attention in all its forms against the formula."""

import math

import pytest
import torch
from torch import Tensor, nn

from tinkex.engine.attention import (
    CacheLayer,
    CacheUse,
    Level,
    Packing,
    Reach,
    Run,
    Table,
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
def test_segments_see_themselves_and_their_past_only(lengths: list[int]) -> None:
    q, k, v = random_qkv(sum(lengths))
    found = call(q, k, v, Packing.of(lengths, device=CPU))
    parts = [plain(*part) for part in zip(*(t.split(lengths) for t in (q, k, v)), strict=True)]
    torch.testing.assert_close(found, torch.cat(parts))


def empty_cache(rows: int) -> CacheLayer:
    shape = (rows, KEY_HEADS, SIZE)
    return CacheLayer(torch.full(shape, math.nan), torch.full(shape, math.nan))


def test_a_later_chunk_sees_what_was_cached_before_it() -> None:
    """Nine tokens in chunks of four and five, beside a new segment of three."""
    q, k, v = random_qkv(9)
    other_q, other_k, other_v = random_qkv(3)
    layer = empty_cache(30)
    rows = torch.tensor([20, 21, 22, 23, 3, 4, 5, 6, 7])
    first = CacheUse(layers=[layer], write_T=rows[:4], reaches=[None])
    call(q[:4], k[:4], v[:4], Packing.of([4], device=CPU, cache=first))
    second = CacheUse(
        layers=[layer],
        write_T=torch.cat([rows[4:], torch.tensor([10, 11, 12])]),
        reaches=[Reach(rows), None],
    )
    found = call(
        torch.cat([q[4:], other_q]),
        torch.cat([k[4:], other_k]),
        torch.cat([v[4:], other_v]),
        Packing.of([5, 3], device=CPU, offsets=[4, 0], cache=second),
    )
    torch.testing.assert_close(found[:5], plain(q, k, v)[4:])
    torch.testing.assert_close(found[5:], plain(other_q, other_k, other_v))


@pytest.mark.parametrize("form", ["runs", "table"])
def test_decoding_reads_the_cache_wherever_it_lies(form: str) -> None:
    """Two samples of a prompt of six, and a third sequence in two runs of its own."""
    torch.manual_seed(3)
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
    cache = CacheUse(layers=[layer], write_T=torch.tensor(own))
    if form == "runs":
        levels = [
            Level([Run(8, 14, 0, 2), Run(0, 3, 2, 3)], None),
            Level([Run(20, 21, 0, 1), Run(30, 32, 1, 2), Run(25, 27, 2, 3)], torch.arange(3)),
        ]
        cache = CacheUse(layers=[layer], write_T=torch.tensor(own), levels=levels)
    else:
        # Filling points at a row that somebody holds: unused rows hold NaN in this test.
        table = torch.full((3, 8), 8)
        for at, rows in enumerate(cached_rows):
            table[at, : len(rows)] = torch.tensor(rows)
        lengths = torch.tensor([len(rows) for rows in cached_rows])
        bias = torch.zeros(3, 8).masked_fill(torch.arange(8) >= lengths[:, None], -math.inf)
        cache = CacheUse(
            layers=[layer],
            write_T=torch.tensor(own),
            table=Table(table.flatten(), bias[:, None, None, :]),
        )
    found = call(q, k, v, Packing.of([1, 1, 1], device=CPU, offsets=[6, 7, 4], cache=cache))
    for at, rows in enumerate(cached_rows):
        expected = plain(q[at : at + 1], layer.keys[rows], layer.values[rows], before=len(rows) - 1)
        torch.testing.assert_close(found[at : at + 1], expected)
