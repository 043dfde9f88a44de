"""Attention over packed tokens: whole segments, and segments that continue from the KV cache.

The model reads a batch as one row of tokens without padding. A segment is the part of the row that
belongs to one sequence; `Packing` has the start of every segment. On a CPU there is one attention
call for each segment; on a GPU one call handles all segments. A cache slot holds the keys and
values of one token.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

# T packed tokens, S sequences of a decode step, H query heads, K key heads, G = H / K, D head size,
# L keys of one slot range

log = logging.getLogger(__name__)

NAME = "tinkex_packed"

varlen_attn: Any = None
#: How `varlen_attn` is told that attention is causal, which differs between versions of torch.
causal_arguments: dict[str, Any] = {}
try:
    from torch.nn.attention import varlen

    varlen_attn = varlen.varlen_attn
    _parameters = inspect.signature(varlen_attn).parameters
    causal_arguments = (
        {"window_size": (-1, 0)} if "window_size" in _parameters else {"is_causal": True}
    )
    if "enable_gqa" in _parameters:
        causal_arguments["enable_gqa"] = True
except ImportError:
    pass  # older torch: one call per segment on the GPU too

_VARLEN_DTYPES = (torch.bfloat16, torch.float16)  # with float32: one call per segment


def has_varlen(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether one call handles segments of different lengths."""
    return device.type == "cuda" and varlen_attn is not None and dtype in _VARLEN_DTYPES


class SlotRange(NamedTuple):
    """Sequences `first` to `last` read the contiguous cache slots `start` to `stop`."""

    start: int
    stop: int
    first: int
    last: int


class ReadRound(NamedTuple):
    """
    Slot ranges that are read in one round. Each sequence of the round is in exactly one of them.

    A sequence whose slots are not contiguous takes part in several rounds.
    """

    ranges: Sequence[SlotRange]
    #: Indices of the sequences, in the order of the ranges. None for all sequences in order.
    sequences: Tensor | None


class CachedPrefix(NamedTuple):
    """The cache slots of a segment that continues cached tokens: the prefix and its own tokens."""

    slots: Tensor
    #: [tokens of the segment, slots]: the causal mask, shared by all layers. It takes much memory
    #: for long prompts, so there is none where attention does not need it.
    mask: Tensor | None

    @classmethod
    def of(cls, slots: Tensor, tokens: int, dtype: torch.dtype) -> CachedPrefix:
        """The last `tokens` slots belong to the segment's own tokens."""
        if has_varlen(slots.device, dtype):
            return cls(slots, None)
        mask = torch.ones(tokens, len(slots), dtype=torch.bool, device=slots.device)
        return cls(slots, mask.tril(len(slots) - tokens))


class GatheredTable(NamedTuple):
    """The cache slots of all sequences as one padded table: one attention call, but a copy."""

    #: [S * L], sequence by sequence.
    slots: Tensor
    #: [S, 1, 1, L]: 0 for slots of the sequence, -inf for padding.
    bias: Tensor


class CacheLayer(NamedTuple):
    #: [slots, K, D]
    keys: Tensor
    values: Tensor


@dataclass(frozen=True, kw_only=True)
class CacheUse:
    """How a forward pass writes and reads the KV cache."""

    layers: Sequence[CacheLayer]
    #: The slot for the keys and values of each packed token.
    write_slots_T: Tensor
    #: Decode steps (one token per segment) read slot ranges in several rounds, ...
    rounds: Sequence[ReadRound] | None = None
    #: ... or a gathered table at once.
    table: GatheredTable | None = None
    #: Prefill: the cached prefix of each segment; None for a segment that starts at position 0.
    prefixes: Sequence[CachedPrefix | None] = ()


@dataclass(frozen=True, kw_only=True)
class Packing:
    """The segments of a packed forward pass. The model hands it to attention as one argument."""

    lengths: Sequence[int]
    #: Segment i is starts[i] to starts[i + 1].
    starts: Sequence[int]
    positions_1T: Tensor
    starts_int32: Tensor
    cache: CacheUse | None = None
    #: If given, attention records (key heads, head size) of each layer here.
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
        """`offsets` are the first positions of the segments; the default is 0."""
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
    """The model's code does not hand keyword arguments to attention, so it cannot run packed."""


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
    """Called by transformers in every layer: [1, H, T, D] in, [1, T, H, D] out."""
    if packing is None:
        raise PackingLost
    layer_index: Any = module.layer_idx
    out_1THD = _attend(layer_index, query, key, value, scaling, packing)
    return out_1THD, None


def attend_packed(
    layer_index: int,
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    *,
    scaling: float,
    packing: Packing,
) -> Tensor:
    """The same for tensors without a batch dimension: [T, H, D] in and out."""
    if packing.cache is None and has_varlen(q_THD.device, q_THD.dtype):
        return _varlen(q_THD, k_TKD, v_TKD, scaling, packing)
    query, key, value = (t.transpose(0, 1).unsqueeze(0) for t in (q_THD, k_TKD, v_TKD))
    return _attend(layer_index, query, key, value, scaling, packing)[0]


def attend_packed_with_backward(
    layer_index: int,
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    *,
    scaling: float,
    packing: Packing,
) -> tuple[Tensor, Callable[[Tensor], Sequence[Tensor]]]:
    """
    The same, and the backward pass: from the gradient by the result to those by q, k and v.

    On a GPU it calls the kernels without autograd, which costs the processor more than the rest of
    a layer together.
    """
    if packing.cache is None and has_varlen(q_THD.device, q_THD.dtype) and has_flash_kernels():
        starts, longest = packing.starts_int32, max(packing.lengths)
        places = (starts, starts, longest, longest, 0.0, True)
        out_THD, lse, state, unused, _ = torch.ops.aten._flash_attention_forward(
            q_THD, k_TKD, v_TKD, *places, False, scale=scaling
        )

        def backward(gradient_THD: Tensor) -> Sequence[Tensor]:
            found: Sequence[Tensor] = torch.ops.aten._flash_attention_backward(
                *(gradient_THD, q_THD, k_TKD, v_TKD, out_THD, lse),
                *(*places, state, unused),
                scale=scaling,
            )
            return found

        return out_THD, backward
    leaves = [each.detach().requires_grad_() for each in (q_THD, k_TKD, v_TKD)]
    with torch.enable_grad():
        attended = attend_packed(layer_index, *leaves, scaling=scaling, packing=packing)
    return attended.detach(), lambda gradient: torch.autograd.grad(attended, leaves, gradient)


@functools.cache
def has_flash_kernels() -> bool:
    """Whether torch's private operations have the parameters that are used here."""
    try:
        schemas = [
            torch.ops.aten._flash_attention_forward.default._schema,
            torch.ops.aten._flash_attention_backward.default._schema,
        ]
    except AttributeError:
        return False
    positional = [
        [each.name for each in schema.arguments if not each.kwarg_only] for schema in schemas
    ]
    places = ["cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal"]
    heads = ["query", "key", "value"]
    return positional == [
        [*heads, *places, "return_debug_mask"],
        ["grad_out", *heads, "out", "logsumexp", *places, "rng_state", "unused"],
    ]


def _attend(
    layer_index: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, packing: Packing
) -> Tensor:
    if packing.shapes_seen is not None:
        packing.shapes_seen[layer_index] = (key.shape[1], key.shape[3])
    layer = None
    if packing.cache is not None:
        layer = packing.cache.layers[layer_index]
        layer.keys.index_copy_(0, packing.cache.write_slots_T, key[0].transpose(0, 1))
        layer.values.index_copy_(0, packing.cache.write_slots_T, value[0].transpose(0, 1))
    given = query.dtype
    if given != torch.float32 and not query.is_cuda:
        # On a CPU 16-bit formats are not faster than float32 here. They would round the attention
        # probabilities, which would be the largest difference between the logprobs of decoding and
        # those of a forward pass over the whole sequence.
        query, key, value = query.float(), key.float(), value.float()
    return _dispatch(query, key, value, layer, scaling, packing).to(given)


def _dispatch(
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
    if cache.rounds is not None:
        return over_ranges(query, layer, scaling, cache.rounds)
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
    if has_varlen(query.device, query.dtype):
        q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
        return _varlen(q, k, v, scaling, packing).unsqueeze(0)
    grouped = query.shape[1] != key.shape[1]
    lengths = packing.lengths
    if len(lengths) > 1 and len(set(lengths)) == 1:
        # Segments of equal length form a regular batch: one call.
        q, k, v = (
            t[0].view(t.shape[1], len(lengths), lengths[0], -1).transpose(0, 1)
            for t in (query, key, value)
        )
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scaling, enable_gqa=grouped
        )
        return out.transpose(1, 2).flatten(0, 1).unsqueeze(0)
    # Split instead of slicing: the gradient of a split is one concatenation, that of a slice is a
    # full-size tensor of zeros for every segment.
    segments = zip(
        *(torch.split(t, list(lengths), dim=2) for t in (query, key, value)), strict=True
    )
    parts = [
        F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=grouped)
        for q, k, v in segments
    ]
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)).transpose(1, 2)


def _varlen(
    q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, scaling: float, packing: Packing
) -> Tensor:
    starts, longest = packing.starts_int32, max(packing.lengths)
    out: Tensor = varlen_attn(
        q_THD, k_TKD, v_TKD, starts, starts, longest, longest, scale=scaling, **causal_arguments
    )
    return out


def over_prefixes(
    query: Tensor, key: Tensor, value: Tensor, layer: CacheLayer, scaling: float, packing: Packing
) -> Tensor:
    """Segments of which some continue a cached prefix, such as later chunks of long prompts."""
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
        if has_varlen(q.device, q.dtype):
            # A mask would make torch repeat the key heads, or even write all scores to memory.
            queries, keys = q.shape[2], k.shape[2]
            starts = torch.tensor([[0, queries], [0, keys]], dtype=torch.int32, device=q.device)
            q, k, v = (t[0].transpose(0, 1) for t in (q, k, v))
            out = attend_segments(q, k, v, starts[0], starts[1], queries, keys, scaling)
            parts.append(out.transpose(0, 1).unsqueeze(0))
            continue
        parts.append(
            F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
            )
        )
    return torch.cat(parts, dim=2).transpose(1, 2)


def attend_segments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    max_queries: int,
    max_keys: int,
    scaling: float,
) -> Tensor:
    """Attention inside packed segments: the last query of a segment sees all its keys."""
    if has_varlen(q.device, q.dtype):
        out: Tensor = varlen_attn(
            q,
            k,
            v,
            query_starts,
            key_starts,
            max_queries,
            max_keys,
            scale=scaling,
            **causal_arguments,
        )
        return out
    parts = []
    queries, keys = query_starts.tolist(), key_starts.tolist()
    for (a, b), (c, d) in zip(pairwise(queries), pairwise(keys), strict=True):
        mask = torch.ones(b - a, d - c, dtype=torch.bool).tril(d - c - (b - a))
        query, key, value = (t.transpose(0, 1).unsqueeze(0) for t in (q[a:b], k[c:d], v[c:d]))
        grouped = q.shape[1] != k.shape[1]
        one = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scaling, enable_gqa=grouped
        )
        parts.append(one[0].transpose(0, 1))
    return torch.cat(parts)


def over_gathered(query: Tensor, layer: CacheLayer, scaling: float, table: GatheredTable) -> Tensor:
    """One token of each sequence over its cached keys, gathered into one table."""
    heads, sequences, size = query.shape[1:]
    key_heads = layer.keys.shape[1]
    q_SKGD = query[0].transpose(0, 1).reshape(sequences, key_heads, heads // key_heads, size)
    k_SKLD, v_SKLD = (
        # Viewed as two-dimensional: a CPU copies this several times faster.
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
    """Attention without a mask, and the log-sum-exp of the scores, with public operations."""
    scores = (q * scaling) @ k.mT
    lse = torch.logsumexp(scores, dim=-1)
    return (scores - lse.unsqueeze(-1)).exp() @ v, lse


def flash_attention_and_lse(
    q: Tensor, k: Tensor, v: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    """The same with the CPU flash kernel, called directly because only then it returns the lse."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, False, scale=scaling
    )
    return out, lse


def fastest_attention_and_lse() -> Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]:
    """The flash kernel is private to torch: use it only if it exists and gives the right result."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, 8, generator=generator) for n in (3, 5, 5))
    expected = plain_attention_and_lse(q, k, v, 0.3)
    try:
        found = flash_attention_and_lse(q, k, v, 0.3)
        matches = all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, expected, strict=True))
    except Exception:  # noqa: BLE001  another torch version may raise anything
        matches = False
    if matches:
        return flash_attention_and_lse
    log.warning(
        "this torch version has no CPU flash attention that returns the log-sum-exp; "
        "decoding is slower"
    )
    return plain_attention_and_lse


attention_and_lse = fastest_attention_and_lse()


def over_ranges(
    query: Tensor, layer: CacheLayer, scaling: float, rounds: Sequence[ReadRound]
) -> Tensor:
    """
    One token of each sequence over its cached keys, which are in one or more slot ranges.

    Query heads that share a key head are combined in one small product, and sequences that share a
    range read it together. Partial results are combined by their log-sum-exp.
    """
    heads, sequences, size = query.shape[1:]
    key_heads = layer.keys.shape[1]
    q_SKGD = query[0].transpose(0, 1).reshape(sequences, key_heads, heads // key_heads, size)
    out_SKGD, lse_SKG = _one_round(q_SKGD, layer, scaling, rounds[0])
    for read_round in rounds[1:]:
        partial, lse = _one_round(q_SKGD, layer, scaling, read_round)
        before, lse_before = out_SKGD[read_round.sequences], lse_SKG[read_round.sequences]
        both = torch.logaddexp(lse_before, lse)
        out_SKGD[read_round.sequences] = (
            before.float() * (lse_before - both).exp().unsqueeze(-1)
            + partial.float() * (lse - both).exp().unsqueeze(-1)
        ).to(before.dtype)
        lse_SKG[read_round.sequences] = both
    return out_SKGD.reshape(1, sequences, heads, size)


def _one_round(
    q_SKGD: Tensor, layer: CacheLayer, scaling: float, read_round: ReadRound
) -> tuple[Tensor, Tensor]:
    outs, lses = [], []
    needs_cast = layer.keys.dtype != q_SKGD.dtype
    for start, stop, first, last in read_round.ranges:
        k_1KLD = layer.keys[start:stop].transpose(0, 1).unsqueeze(0)
        v_1KLD = layer.values[start:stop].transpose(0, 1).unsqueeze(0)
        if needs_cast:
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
