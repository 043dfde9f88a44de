"""Attention over packed tokens: segments of one pass, and segments that go on from a cache.

There is no padding and there are no masks: a pass is one row of tokens, and its packing says where
each sequence begins. On a CPU every segment is one call; on a GPU all of them are.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

# T packed tokens, S sequences of a decode pass, H query heads, K key heads, G = H / K, D head size,
# L keys of one run

log = logging.getLogger(__name__)

NAME = "tinkex_packed"

varlen_attn: Any = None
_causal: dict[str, Any] = {}
try:
    from torch.nn.attention import varlen

    varlen_attn = varlen.varlen_attn
    _parameters = inspect.signature(varlen_attn).parameters
    _causal = {"window_size": (-1, 0)} if "window_size" in _parameters else {"is_causal": True}
    if "enable_gqa" in _parameters:
        _causal["enable_gqa"] = True
except ImportError:
    pass  # older torch: segment by segment on the GPU too

_VARLEN_DTYPES = (torch.bfloat16, torch.float16)  # a float32 model goes segment by segment


class SlotRange(NamedTuple):
    """Sequences `first` to `last` read rows `start` to `stop` of the cache, which lie together."""

    start: int
    stop: int
    first: int
    last: int


class ReadPass(NamedTuple):
    """Runs that together touch each of their sequences once."""

    ranges: Sequence[SlotRange]
    #: The sequences touched, in the order of the runs; None for all of them in order.
    sequences: Tensor | None


class CachedPrefix(NamedTuple):
    """Cache rows that a segment reads beside its own tokens, its own included, in order."""

    slots: Tensor
    #: [tokens of the segment, rows]: what each of them may see. The same in every layer.
    mask: Tensor

    @classmethod
    def of(cls, slots: Tensor, tokens: int) -> CachedPrefix:
        """The last `tokens` of the rows are the segment's own."""
        mask = torch.ones(tokens, len(slots), dtype=torch.bool, device=slots.device)
        return cls(slots, mask.tril(len(slots) - tokens))


class GatheredTable(NamedTuple):
    """All cache rows of each sequence as one rectangle: one call, at the price of a copy."""

    #: [S * L], sequence by sequence.
    slots: Tensor
    #: [S, 1, 1, L]: 0 where a row is the sequence's, -inf where it is filling.
    bias: Tensor


class CacheLayer(NamedTuple):
    #: [cache rows, K, D]
    keys: Tensor
    values: Tensor


@dataclass(frozen=True, kw_only=True)
class CacheUse:
    """What a pass does with the cache of keys and values."""

    layers: Sequence[CacheLayer]
    #: Where the keys and values of each packed token go.
    write_slots_T: Tensor
    #: For decoding, where every segment is one token: what is read, pass by pass ...
    passes: Sequence[ReadPass] | None = None
    #: ... or all at once.
    table: GatheredTable | None = None
    #: For each segment, what it reads when it goes on from cached tokens; None when it begins.
    prefixes: Sequence[CachedPrefix | None] = ()


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Where the segments of a packed pass lie. Travels through the model as one keyword."""

    lengths: Sequence[int]
    #: Segment i is starts[i] to starts[i + 1].
    starts: Sequence[int]
    positions_1T: Tensor
    starts_int32: Tensor
    cache: CacheUse | None = None
    #: Filled with (key heads, head size) by layer, where somebody wants to know.
    shapes_seen: dict[int, tuple[int, int]] | None = None

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        *,
        device: torch.device,
        offsets: Sequence[int] | None = None,
        cache: CacheUse | None = None,
        shapes_seen: dict[int, tuple[int, int]] | None = None,
    ) -> Packing:
        """`offsets` are the positions at which the segments begin, 0 when not given."""
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        if offsets is not None and starts[-1] == len(lengths):
            positions = torch.tensor(offsets)
        else:
            begin = offsets or [0] * len(lengths)
            positions = torch.cat(
                [torch.arange(b, b + n) for b, n in zip(begin, lengths, strict=True)]
            )
        return cls(
            lengths=lengths,
            starts=starts,
            positions_1T=positions.to(device).unsqueeze(0),
            starts_int32=torch.tensor(starts, dtype=torch.int32, device=device),
            cache=cache,
            shapes_seen=shapes_seen,
        )


class PackingLost(RuntimeError):
    """The model's code does not hand keywords on to attention, so it cannot run packed."""


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    packing: Packing | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in every layer: [1, H, T, D] in, [1, T, H, D] out."""
    if packing is None:
        raise PackingLost
    layer_index: Any = module.layer_idx
    if packing.shapes_seen is not None:
        packing.shapes_seen[layer_index] = (key.shape[1], key.shape[3])
    layer = None
    if packing.cache is not None:
        layer = packing.cache.layers[layer_index]
        layer.keys.index_copy_(0, packing.cache.write_slots_T, key[0].transpose(0, 1))
        layer.values.index_copy_(0, packing.cache.write_slots_T, value[0].transpose(0, 1))
    given = query.dtype
    if given != torch.float32 and not query.is_cuda:
        # On a CPU short formats gain nothing here, and rounded probabilities would make decoding
        # differ from a whole pass by more than everything else together.
        query, key, value = query.float(), key.float(), value.float()
    return _attended(query, key, value, layer, scaling, packing).to(given), None


def _attended(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layer: CacheLayer | None,
    scaling: float,
    packing: Packing,
) -> Tensor:
    cache = packing.cache
    if cache is None or layer is None:
        return within_segments(query, key, value, scaling, packing)
    if cache.passes is not None:
        return over_ranges(query, layer, scaling, cache.passes)
    if cache.table is not None:
        return over_gathered(query, layer, scaling, cache.table)
    if not any(cache.prefixes):
        return within_segments(query, key, value, scaling, packing)
    return over_prefixes(query, key, value, layer, scaling, packing)


AttentionInterface.register(NAME, attend)


def within_segments(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, packing: Packing
) -> Tensor:
    """Causal attention inside each segment."""
    if query.is_cuda and varlen_attn is not None and query.dtype in _VARLEN_DTYPES:
        q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
        starts, longest = packing.starts_int32, max(packing.lengths)
        out: Tensor = varlen_attn(
            q, k, v, starts, starts, longest, longest, scale=scaling, **_causal
        )
        return out.unsqueeze(0)
    grouped = query.shape[1] != key.shape[1]
    lengths = packing.lengths
    if len(lengths) > 1 and len(set(lengths)) == 1:
        # Equal lengths are a true batch: one call.
        q, k, v = (
            t[0].view(t.shape[1], len(lengths), lengths[0], -1).transpose(0, 1)
            for t in (query, key, value)
        )
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scaling, enable_gqa=grouped
        )
        return out.transpose(1, 2).flatten(0, 1).unsqueeze(0)
    # Split, not sliced: the gradient of a split is one concatenation, that of a slice a whole
    # tensor of zeros for every segment.
    segments = zip(
        *(torch.split(t, list(lengths), dim=2) for t in (query, key, value)), strict=True
    )
    parts = [
        F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=grouped)
        for q, k, v in segments
    ]
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)).transpose(1, 2)


def over_prefixes(
    query: Tensor, key: Tensor, value: Tensor, layer: CacheLayer, scaling: float, packing: Packing
) -> Tensor:
    """Segments of which some go on from cached tokens: the later chunks of long prompts."""
    assert packing.cache is not None
    grouped = query.shape[1] != key.shape[1]
    parts = []
    for i, prefix in enumerate(packing.cache.prefixes):
        start, stop = packing.starts[i], packing.starts[i + 1]
        q = query[:, :, start:stop]
        if prefix is None:
            k, v, mask = key[:, :, start:stop], value[:, :, start:stop], None
        else:
            k = layer.keys[prefix.slots].to(q.dtype).transpose(0, 1).unsqueeze(0)
            v = layer.values[prefix.slots].to(q.dtype).transpose(0, 1).unsqueeze(0)
            mask = prefix.mask
        parts.append(
            F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
            )
        )
    return torch.cat(parts, dim=2).transpose(1, 2)


def over_gathered(query: Tensor, layer: CacheLayer, scaling: float, table: GatheredTable) -> Tensor:
    """One token of each sequence over its cached keys, gathered side by side."""
    heads, sequences, size = query.shape[1:]
    key_heads = layer.keys.shape[1]
    q_SKGD = query[0].transpose(0, 1).reshape(sequences, key_heads, heads // key_heads, size)
    k_SKLD, v_SKLD = (
        # As rows of numbers, not of heads: a CPU copies those several times faster.
        cached.view(len(cached), -1)
        .index_select(0, table.slots)
        .to(query.dtype)
        .view(sequences, -1, key_heads, size)
        .transpose(1, 2)
        for cached in layer
    )
    bias_S1GL = table.bias.to(query.dtype).expand(-1, -1, heads // key_heads, -1)
    out_SKGD = F.scaled_dot_product_attention(
        q_SKGD, k_SKLD, v_SKLD, attn_mask=bias_S1GL, scale=scaling
    )
    return out_SKGD.reshape(1, sequences, heads, size)


def plain_attention_and_lse(
    q: Tensor, k: Tensor, v: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    """Attention without a mask, and the log-sum-exp of the scores, in public operations."""
    scores = (q * scaling) @ k.mT
    lse = torch.logsumexp(scores, dim=-1)
    return (scores - lse.unsqueeze(-1)).exp() @ v, lse


def flash_attention_and_lse(
    q: Tensor, k: Tensor, v: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    """The same by the CPU's flash kernel, called by its own name for the log-sum-exp."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, False, scale=scaling
    )
    return out, lse


def fastest_attention_and_lse() -> Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]:
    """The kernel is private to torch: where it is missing or has changed, it is not used."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, 8, generator=generator) for n in (3, 5, 5))
    expected = plain_attention_and_lse(q, k, v, 0.3)
    try:
        found = flash_attention_and_lse(q, k, v, 0.3)
        alike = all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, expected, strict=True))
    except Exception:  # noqa: BLE001  whatever another torch says to this call
        alike = False
    if alike:
        return flash_attention_and_lse
    log.warning(
        "this torch has no flash attention for a CPU that tells its sums: decoding is slower"
    )
    return plain_attention_and_lse


attention_and_lse = fastest_attention_and_lse()


def over_ranges(
    query: Tensor, layer: CacheLayer, scaling: float, passes: Sequence[ReadPass]
) -> Tensor:
    """
    One token of each sequence over its cached keys, which lie in one or more runs.

    Query heads that share a key head are rows of one small product, and sequences that share a run
    read it together. Parts are joined by their log-sum-exp.
    """
    heads, sequences, size = query.shape[1:]
    key_heads = layer.keys.shape[1]
    q_SKGD = query[0].transpose(0, 1).reshape(sequences, key_heads, heads // key_heads, size)
    out_SKGD, lse_SKG = _one_pass(q_SKGD, layer, scaling, passes[0])
    for read_pass in passes[1:]:
        part, lse = _one_pass(q_SKGD, layer, scaling, read_pass)
        before, lse_before = out_SKGD[read_pass.sequences], lse_SKG[read_pass.sequences]
        both = torch.logaddexp(lse_before, lse)
        out_SKGD[read_pass.sequences] = (
            before.float() * (lse_before - both).exp().unsqueeze(-1)
            + part.float() * (lse - both).exp().unsqueeze(-1)
        ).to(before.dtype)
        lse_SKG[read_pass.sequences] = both
    return out_SKGD.reshape(1, sequences, heads, size)


def _one_pass(
    q_SKGD: Tensor, layer: CacheLayer, scaling: float, read_pass: ReadPass
) -> tuple[Tensor, Tensor]:
    outs, lses = [], []
    short = layer.keys.dtype != q_SKGD.dtype
    for start, stop, first, last in read_pass.ranges:
        k_1KLD = layer.keys[start:stop].transpose(0, 1).unsqueeze(0)
        v_1KLD = layer.values[start:stop].transpose(0, 1).unsqueeze(0)
        if short:
            k_1KLD, v_1KLD = k_1KLD.to(q_SKGD.dtype), v_1KLD.to(q_SKGD.dtype)
        shared = last - first
        if shared == 1:
            q = q_SKGD[first:last]
        else:
            q = q_SKGD[first:last].transpose(0, 1).flatten(1, 2).unsqueeze(0)
        out, lse = attention_and_lse(q, k_1KLD, v_1KLD, scaling)
        if shared > 1:
            out = out[0].reshape(out.shape[1], shared, -1, out.shape[3]).transpose(0, 1)
            lse = lse[0].reshape(lse.shape[1], shared, -1).transpose(0, 1)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)
