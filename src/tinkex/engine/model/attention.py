"""Attention over packed tokens: whole segments, and segments that continue from the KV cache.

The model reads a batch as one row of tokens without padding. A segment is the part of the row that
belongs to one sequence; `Packing` has the start of every segment. On a CPU there is one attention
call for each segment; on a GPU one call handles all segments. A cache slot holds the keys and
values of one token.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from tinkex.engine.model.attention_scores import (
    Scoring,
    attend_blocks,
    capped,
    pad_values,
    with_sinks,
)
from tinkex.engine.model.flash_attention import (
    Segments,
    attend_flash,
    flash_backward,
    flash_forward,
    has_flash_kernels,
)

# T packed tokens, S sequences of a decode step, H query heads, K key heads, G = H / K, D width of
# keys, E width of values, L keys of one slot range

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


class DecodeReads(NamedTuple):
    """What a decode step reads, one token per segment: slot ranges in several rounds, or a table."""

    rounds: Sequence[ReadRound] | None = None
    table: GatheredTable | None = None


class PagedReads(NamedTuple):
    """
    What a decode step reads that a graph records: on the device, so that nothing waits for it.

    One row for each sequence; see `decode_ops.attend`.
    """

    positions_B: Tensor
    last_B: Tensor
    table: Tensor
    #: Tokens in a page.
    page: int


class CacheShapes(NamedTuple):
    """Heads and width of the keys and of the values of a layer."""

    keys: tuple[int, int]
    values: tuple[int, int]


class CacheLayer(NamedTuple):
    #: [slots, K, D]
    keys: Tensor
    #: [slots, K, E]
    values: Tensor


class StateShapes(NamedTuple):
    """The state that a recurrent layer keeps for each sequence, see `recurrent_layers`."""

    #: [C, W]: the last inputs of the convolution.
    conv: tuple[int, int]
    #: [H, D, E]
    matrix: tuple[int, int, int]


class StateLayer(NamedTuple):
    #: [slots, C, W]
    conv: Tensor
    #: [slots, H, D, E], in float32: it changes with every token, and rounding would add up.
    matrix: Tensor


class StateUse(NamedTuple):
    """Which states the segments of a pass read and write."""

    slots_S: Tensor
    #: Whether the segment begins its sequence: its slot has the state of another one. None if no
    #: segment does.
    is_new_S: Tensor | None
    #: Where the states go; None: where they were.
    written_S: Tensor | None = None

    def before(self, pool: Tensor) -> Tensor:
        """The states of the segments before this pass."""
        states = pool[self.slots_S]
        if self.is_new_S is None:
            return states
        return states.masked_fill(self.is_new_S.view(-1, *[1] * (states.dim() - 1)), 0.0)

    def write(self, pool: Tensor, states: Tensor, segments: Sequence[int] | None = None) -> None:
        """Writes the states of these segments, by default of all."""
        slots = self.slots_S if self.written_S is None else self.written_S
        pool.index_copy_(0, slots if segments is None else slots[segments], states.to(pool.dtype))


class SeenLayer(NamedTuple):
    """What transformers' code asks of the attention of a layer."""

    shapes: CacheShapes
    scoring: Scoring
    #: Of a recurrent layer, which has no keys and values.
    state: StateShapes | None = None


@dataclass(frozen=True, kw_only=True)
class CacheUse:
    """How a forward pass writes and reads the KV cache."""

    layers: Sequence[CacheLayer]
    #: The slot for the keys and values of each packed token.
    write_slots_T: Tensor
    #: Decode steps: what layers read, by their window; None for layers without one.
    reads: Mapping[int | None, DecodeReads] = field(default_factory=dict)
    #: The same for a step that a graph records.
    paged: PagedReads | None = None
    #: Prefill: the cached prefix of each segment; None for a segment that starts at position 0.
    prefixes: Sequence[CachedPrefix | None] = ()
    #: The states of recurrent layers, by layer, and which of them this pass uses.
    state_layers: Mapping[int, StateLayer] = field(default_factory=dict)
    states: StateUse | None = None


@dataclass(frozen=True, kw_only=True)
class Packing:
    """The segments of a packed forward pass. The model hands it to attention as one argument."""

    lengths: Sequence[int]
    #: Segment i is starts[i] to starts[i + 1].
    starts: Sequence[int]
    #: [1, T], or [3, 1, T] if there are images, see `image_places`.
    positions: Tensor
    starts_int32: Tensor
    cache: CacheUse | None = None
    #: If given, attention records its layers here.
    layers_seen: dict[int, SeenLayer] | None = None

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        *,
        device: torch.device,
        offsets: Sequence[int] | None = None,
        positions: Tensor | None = None,
        cache: CacheUse | None = None,
        layers_seen: dict[int, SeenLayer] | None = None,
    ) -> Packing:
        """
        `offsets` are the first positions of the segments; the default is 0.

        `positions` [3, T] are those of all tokens, instead.
        """
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        if positions is not None:
            pass
        elif offsets is not None and starts[-1] == len(lengths):
            positions = torch.tensor(offsets)
        else:
            begin = offsets or [0] * len(lengths)
            positions = torch.cat(
                [torch.arange(b, b + n) for b, n in zip(begin, lengths, strict=True)]
            )
        return cls(
            lengths=lengths,
            starts=starts,
            positions=positions.to(device).unsqueeze(-2),
            starts_int32=torch.tensor(starts, dtype=torch.int32, device=device),
            cache=cache,
            layers_seen=layers_seen,
        )


class PackingLost(RuntimeError):
    """The model's code does not hand keyword arguments to attention, so it cannot run packed."""


class UnsupportedAttention(ValueError):
    """The model's code asks for attention that is not implemented here."""


#: Arguments of attention that do not change its result here: weights are frozen, nothing is dropped
#: out, and the packing has the positions.
HARMLESS = frozenset(
    {
        *("cache_position", "dropout", "output_attentions", "output_hidden_states"),
        *("position_ids", "return_dict", "training", "use_cache"),
    }
)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    packing: Packing | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Called by transformers in every layer: [1, H, T, D] in, [1, T, H, E] out."""
    if packing is None:
        raise PackingLost
    if packing.layers_seen is not None:
        refuse_unknown(module, others)
    layer_index: Any = module.layer_idx
    scoring = Scoring(scaling, sliding_window, softcap, s_aux)
    out_1THE = _attend(layer_index, query, key, value, scoring, packing)
    return out_1THE, None


def refuse_unknown(module: nn.Module, arguments: Mapping[str, Any]) -> None:
    """Nothing that transformers' code asks for may be ignored."""
    causal = arguments.get("is_causal")
    if not getattr(module, "is_causal", True) if causal is None else not causal:
        raise UnsupportedAttention("attention to later tokens")
    for name, value in arguments.items():
        if value is not None and name not in HARMLESS and name != "is_causal":
            raise UnsupportedAttention(f"the argument {name} of attention")


def attend_packed(
    layer_index: int,
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKE: Tensor,
    *,
    scoring: Scoring,
    packing: Packing,
) -> Tensor:
    """The same for tensors without a batch dimension: [T, H, D] in, [T, H, E] out."""
    if packing.cache is None and has_varlen(q_THD.device, q_THD.dtype):
        found = _varlen(q_THD, k_TKD, v_TKE, packed_segments(packing), scoring)
        if found is not None:
            return found
    query, key, value = (t.transpose(0, 1).unsqueeze(0) for t in (q_THD, k_TKD, v_TKE))
    return _attend(layer_index, query, key, value, scoring, packing)[0]


def attend_packed_with_backward(
    layer_index: int,
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    *,
    scoring: Scoring,
    packing: Packing,
) -> tuple[Tensor, Callable[[Tensor], Sequence[Tensor]]]:
    """
    The same, and the backward pass: from the gradient by the result to those by q, k and v.

    On a GPU without autograd, see `flash_attention`.
    """
    if (
        packing.cache is None
        and scoring.softcap is None
        and has_varlen(q_THD.device, q_THD.dtype)
        and has_flash_kernels()
    ):
        segments = packed_segments(packing)
        result = flash_forward(q_THD, k_TKD, v_TKD, segments, scoring)

        def backward(gradient_THD: Tensor) -> Sequence[Tensor]:
            return flash_backward(gradient_THD, q_THD, k_TKD, v_TKD, result, segments, scoring)

        return result.out_THD, backward
    leaves = [each.detach().requires_grad_() for each in (q_THD, k_TKD, v_TKD)]
    with torch.enable_grad():
        attended = attend_packed(layer_index, *leaves, scoring=scoring, packing=packing)
    return attended.detach(), lambda gradient: torch.autograd.grad(attended, leaves, gradient)


def packed_segments(packing: Packing) -> Segments:
    longest = max(packing.lengths)
    return Segments(packing.starts_int32, packing.starts_int32, longest, longest)


def _attend(
    layer_index: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scoring: Scoring,
    packing: Packing,
) -> Tensor:
    if packing.layers_seen is not None:
        shapes = CacheShapes((key.shape[1], key.shape[3]), (value.shape[1], value.shape[3]))
        packing.layers_seen[layer_index] = SeenLayer(shapes, scoring)
    layer = None
    if packing.cache is not None:
        layer = packing.cache.layers[layer_index]
        layer.keys.index_copy_(0, packing.cache.write_slots_T, key[0].transpose(0, 1))
        layer.values.index_copy_(0, packing.cache.write_slots_T, value[0].transpose(0, 1))
        if packing.cache.paged is not None:
            return over_pages(query, layer, scoring, packing.cache.paged)
    given = query.dtype
    if given in _VARLEN_DTYPES and not query.is_cuda:
        # On a CPU 16-bit formats are not faster than float32 here. They would round the attention
        # probabilities, which would be the largest difference between the logprobs of decoding and
        # those of a forward pass over the whole sequence.
        query, key, value = query.float(), key.float(), value.float()
    return _dispatch(query, key, value, layer, scoring, packing).to(given)


def _dispatch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layer: CacheLayer | None,
    scoring: Scoring,
    packing: Packing,
) -> Tensor:
    cache = packing.cache
    if cache is None or layer is None:
        return within_segments(query, key, value, scoring, packing)
    if cache.reads:
        rounds, table = cache.reads[scoring.window]
        if rounds is not None:
            return over_ranges(query, layer, scoring, rounds)
        assert table is not None
        return over_gathered(query, layer, scoring, table)
    if not any(cache.prefixes):
        return within_segments(query, key, value, scoring, packing)
    return over_prefixes(query, key, value, layer, scoring, packing)


AttentionInterface.register(NAME, attend)


def within_segments(
    query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, packing: Packing
) -> Tensor:
    """Causal attention inside each segment."""
    if has_varlen(query.device, query.dtype):
        q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
        found = _varlen(q, k, v, packed_segments(packing), scoring)
        if found is not None:
            return found.unsqueeze(0)
    lengths = packing.lengths
    if len(lengths) > 1 and len(set(lengths)) == 1:
        # Segments of equal length form a regular batch: one call.
        q, k, v = (
            t[0].view(t.shape[1], len(lengths), lengths[0], -1).transpose(0, 1)
            for t in (query, key, value)
        )
        out = _causal(q, k, v, scoring)
        return out.transpose(1, 2).flatten(0, 1).unsqueeze(0)
    # Split instead of slicing: the gradient of a split is one concatenation, that of a slice is a
    # full-size tensor of zeros for every segment.
    segments = zip(
        *(torch.split(t, list(lengths), dim=2) for t in (query, key, value)), strict=True
    )
    parts = [_causal(q, k, v, scoring) for q, k, v in segments]
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)).transpose(1, 2)


def _causal(
    q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, mask: Tensor | None = None
) -> Tensor:
    """
    [N, H, t, D] over [N, K, L, D] to [N, H, t, E]: the last query sees all keys.

    `mask` says so for fewer queries than keys. Without it, there are as many.
    """
    if not scoring.is_plain(k.shape[2]):
        read = scoring.keys_read(q.shape[2], k.shape[2])
        return attend_blocks(q, k[:, :, -read:], v[:, :, -read:], scoring)
    # Values of another width would make torch write all scores to memory.
    out = F.scaled_dot_product_attention(
        q,
        k,
        pad_values(v, k.shape[3]),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scoring.scaling,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out[..., : v.shape[3]]


def _varlen(
    q_THD: Tensor, k_TKD: Tensor, v_TKE: Tensor, segments: Segments, scoring: Scoring
) -> Tensor | None:
    """One call for all segments; None if no kernel of torch computes this."""
    if scoring.is_plain(segments.max_keys) and k_TKD.shape[2] == v_TKE.shape[2]:
        out: Tensor = varlen_attn(
            q_THD, k_TKD, v_TKE, *segments, scale=scoring.scaling, **causal_arguments
        )
        return out
    if scoring.softcap is not None or not has_flash_kernels():
        return None
    return attend_flash(q_THD, k_TKD, v_TKE, segments, scoring)


def over_prefixes(
    query: Tensor, key: Tensor, value: Tensor, layer: CacheLayer, scoring: Scoring, packing: Packing
) -> Tensor:
    """Segments of which some continue a cached prefix, such as later chunks of long prompts."""
    assert packing.cache is not None
    parts = []
    for i, prefix in enumerate(packing.cache.prefixes):
        start, stop = packing.starts[i], packing.starts[i + 1]
        q = query[:, :, start:stop]
        if prefix is None:
            k, v, mask = key[:, :, start:stop], value[:, :, start:stop], None
        else:
            mask, slots = prefix.mask, prefix.slots
            if scoring.slides(len(slots)):
                read = scoring.keys_read(stop - start, len(slots))
                slots, mask = slots[-read:], None if mask is None else mask[:, -read:]
            k = layer.keys[slots].to(q.dtype).transpose(0, 1).unsqueeze(0)
            v = layer.values[slots].to(q.dtype).transpose(0, 1).unsqueeze(0)
        if has_varlen(q.device, q.dtype):
            # A mask would make torch repeat the key heads, or even write all scores to memory.
            starts = torch.tensor(
                [[0, q.shape[2]], [0, k.shape[2]]], dtype=torch.int32, device=q.device
            )
            segments = Segments(starts[0], starts[1], q.shape[2], k.shape[2])
            q, k, v = (t[0].transpose(0, 1) for t in (q, k, v))
            parts.append(attend_segments(q, k, v, segments, scoring).transpose(0, 1).unsqueeze(0))
            continue
        parts.append(_causal(q, k, v, scoring, mask))
    return torch.cat(parts, dim=2).transpose(1, 2)


def attend_segments(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, scoring: Scoring
) -> Tensor:
    """Attention inside packed segments: the last query of a segment sees all its keys."""
    if has_varlen(q.device, q.dtype):
        found = _varlen(q, k, v, segments, scoring)
        if found is not None:
            return found
    parts = []
    queries, keys = segments.query_starts.tolist(), segments.key_starts.tolist()
    for (a, b), (c, d) in zip(pairwise(queries), pairwise(keys), strict=True):
        query, key, value = (t.transpose(0, 1).unsqueeze(0) for t in (q[a:b], k[c:d], v[c:d]))
        mask = None
        if scoring.is_plain(d - c):
            mask = torch.ones(b - a, d - c, dtype=torch.bool, device=q.device)
            mask = mask.tril(d - c - (b - a))
        parts.append(_causal(query, key, value, scoring, mask)[0].transpose(0, 1))
    return torch.cat(parts)


def over_pages(query: Tensor, layer: CacheLayer, scoring: Scoring, reads: PagedReads) -> Tensor:
    """One token of each sequence over its cached keys, by a kernel that finds their pages."""
    from tinkex.engine.model import decode_ops as ops

    # The kernel needs queries and keys of one format.
    q_BHD = query[0].transpose(0, 1).to(layer.keys.dtype).contiguous()
    attended: Tensor = ops.attend(
        q_BHD, keys=layer.keys, values=layer.values, scoring=scoring, **reads._asdict()
    )
    return attended.unsqueeze(0).to(query.dtype)


def over_gathered(
    query: Tensor, layer: CacheLayer, scoring: Scoring, table: GatheredTable
) -> Tensor:
    """One token of each sequence over its cached keys, gathered into one table."""
    heads, sequences, size = query.shape[1:]
    key_heads = layer.keys.shape[1]
    q_SKGD = query[0].transpose(0, 1).reshape(sequences, key_heads, heads // key_heads, size)
    k_SKLD, v_SKLE = (
        # Viewed as two-dimensional: a CPU copies this several times faster.
        cached.view(len(cached), -1)
        .index_select(0, table.slots)
        .to(query.dtype)
        .view(sequences, -1, *cached.shape[1:])
        .transpose(1, 2)
        for cached in layer
    )
    if scoring.softcap is not None or scoring.sinks is not None:
        q, k, v = (each.float() for each in (q_SKGD, k_SKLD, v_SKLE))
        out, lse = plain_attention_and_lse(q, k, v, scoring, table.bias.float())
        out_SKGE, _ = with_sinks(out, lse, sinks_KG(scoring, key_heads))
    else:
        bias_S1GL = table.bias.to(query.dtype).expand(-1, -1, heads // key_heads, -1)
        out_SKGE = F.scaled_dot_product_attention(
            q_SKGD, k_SKLD, v_SKLE, attn_mask=bias_S1GL, scale=scoring.scaling
        )
    return out_SKGE.reshape(1, sequences, heads, -1).to(query.dtype)


def sinks_KG(scoring: Scoring, key_heads: int) -> Tensor | None:
    return None if scoring.sinks is None else scoring.sinks.view(key_heads, -1)


def plain_attention_and_lse(
    q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """
    Attention to all keys, and the log-sum-exp of the scores, with public operations.

    `bias` is added to the scores. Sinks are not in the result.
    """
    scores = capped((q * scoring.scaling) @ k.mT, scoring.softcap)
    if bias is not None:
        scores = scores + bias
    lse = torch.logsumexp(scores, dim=-1)
    return (scores - lse.unsqueeze(-1)).exp() @ v, lse


def flash_attention_and_lse(
    q: Tensor, k: Tensor, v: Tensor, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """The same with the CPU flash kernel, called directly because only then it returns the lse."""
    if scoring.softcap is not None or k.shape[-1] != v.shape[-1]:
        return plain_attention_and_lse(q, k, v, scoring)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, False, scale=scoring.scaling
    )
    return out, lse


def fastest_attention_and_lse() -> Callable[
    [Tensor, Tensor, Tensor, Scoring], tuple[Tensor, Tensor]
]:
    """The flash kernel is private to torch: use it only if it exists and gives the right result."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, 8, generator=generator) for n in (3, 5, 5))
    expected = plain_attention_and_lse(q, k, v, Scoring(0.3))
    try:
        found = flash_attention_and_lse(q, k, v, Scoring(0.3))
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
    query: Tensor, layer: CacheLayer, scoring: Scoring, rounds: Sequence[ReadRound]
) -> Tensor:
    """
    One token of each sequence over its cached keys, which are in one or more slot ranges.

    Query heads that share a key head are combined in one small product, and sequences that share a
    range read it together. Partial results are combined by their log-sum-exp.
    """
    heads, sequences, size = query.shape[1:]
    key_heads = layer.keys.shape[1]
    q_SKGD = query[0].transpose(0, 1).reshape(sequences, key_heads, heads // key_heads, size)
    out_SKGE, lse_SKG = _one_round(q_SKGD, layer, scoring, rounds[0])
    for read_round in rounds[1:]:
        partial, lse = _one_round(q_SKGD, layer, scoring, read_round)
        before, lse_before = out_SKGE[read_round.sequences], lse_SKG[read_round.sequences]
        both = torch.logaddexp(lse_before, lse)
        out_SKGE[read_round.sequences] = (
            before.float() * (lse_before - both).exp().unsqueeze(-1)
            + partial.float() * (lse - both).exp().unsqueeze(-1)
        ).to(before.dtype)
        lse_SKG[read_round.sequences] = both
    out_SKGE, _ = with_sinks(out_SKGE, lse_SKG, sinks_KG(scoring, key_heads))
    return out_SKGE.reshape(1, sequences, heads, -1)


def _one_round(
    q_SKGD: Tensor, layer: CacheLayer, scoring: Scoring, read_round: ReadRound
) -> tuple[Tensor, Tensor]:
    outs, lses = [], []
    needs_cast = layer.keys.dtype != q_SKGD.dtype
    for start, stop, first, last in read_round.ranges:
        k_1KLD = layer.keys[start:stop].transpose(0, 1).unsqueeze(0)
        v_1KLE = layer.values[start:stop].transpose(0, 1).unsqueeze(0)
        if needs_cast:
            k_1KLD, v_1KLE = k_1KLD.to(q_SKGD.dtype), v_1KLE.to(q_SKGD.dtype)
        shared = last - first
        if shared == 1:
            q = q_SKGD[first:last]
        else:
            q = q_SKGD[first:last].transpose(0, 1).flatten(1, 2).unsqueeze(0)
        out, lse = attention_and_lse(q, k_1KLD, v_1KLE, scoring)
        if shared > 1:
            out = out[0].reshape(out.shape[1], shared, -1, out.shape[3]).transpose(0, 1)
            lse = lse[0].reshape(lse.shape[1], shared, -1).transpose(0, 1)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)
