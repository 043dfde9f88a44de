"""The layers of decoding and prefill on a GPU, from few and fused kernels.

A decode step has one token for each sequence, so its time is the reading of weights and cache plus
the start of each kernel; transformers' code starts about sixty kernels for a layer, this one ten.
With adapters there are twelve from five rows on and sixteen from seventeen rows on. Prefill runs
the same layers over packed tokens.

Experts instead of an MLP have their own kernels (`expert_decode`), and the family's own router
chooses them. Their prefill runs transformers' code, whose products suit many tokens.

Only for models of the usual form (`stacked_weights`) in bfloat16; others run transformers' code.
`probe_logits` shows whether the result is right.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tinkex.engine.model import attention
from tinkex.engine.model.attention import CacheLayer, StateLayer
from tinkex.engine.model.attention_scores import Scoring
from tinkex.engine.model.experts import RoutedTokens
from tinkex.engine.model.flash_attention import Segments
from tinkex.engine.model.lm_head import Head
from tinkex.engine.model.model_experts import MIN_AGREEMENT
from tinkex.engine.model.stacked_weights import (
    StackedExperts,
    StackedLinear,
    StackedMlp,
    StackedWeights,
)

if TYPE_CHECKING:
    from tinkex.engine.model.decode_ops import LoraTables, Shrunk

# B rows of a decode step, H hidden size, V vocabulary

#: Larger ranks decode with the code of transformers: their tiles do not fit the GPU's fast memory.
MAX_RANK = 128


@dataclass(frozen=True, kw_only=True)
class DecodeInputs:
    """The tensors of a decode step. All have the length of the batch bucket."""

    ids_B: Tensor
    positions_B: Tensor
    #: The last position that a row may write; -1 for rows that only fill the batch up.
    last_B: Tensor
    #: [B, pages]: the pages of each sequence.
    table: Tensor
    #: By how much the rotary position of a row is behind its place: images take few positions.
    shifts_B: Tensor | None = None
    #: Of models with recurrent layers.
    states: StateInputs | None = None


@dataclass(frozen=True, kw_only=True)
class StateInputs:
    """The states of recurrent layers, of which the last slot belongs to no sequence."""

    layers: Mapping[int, StateLayer]
    #: The slot of each row.
    slots_B: Tensor
    #: How many more steps of a burst compute the same token again; its state is written in the last.
    repeats_B: Tensor


@dataclass(frozen=True, kw_only=True)
class KeyReads:
    """The keys that some adjacent segments of a prefill read: one attention call."""

    #: The queries of these segments.
    queries: slice
    #: The cache slots of all their keys, segment by segment, those of their own tokens included.
    slots: Tensor
    #: int32 [segments + 1]: where the queries and the keys of each segment begin.
    query_starts: Tensor
    key_starts: Tensor
    max_queries: int
    max_keys: int


@dataclass(frozen=True, kw_only=True)
class PrefillInputs:
    """The tensors of a prefill: packed tokens, of which segments continue what the cache holds."""

    ids_T: Tensor
    positions_T: Tensor
    #: Where the keys and values of each token go.
    slots_T: Tensor
    reads: Sequence[KeyReads]


#: A linear layer, and beside it the products with A of the projections that read its input.
Linear = Callable[..., "tuple[Tensor, Shrunk | None]"]
#: From rows and their mixture to the numbers and the weights of the experts of each row.
Choose = Callable[[Tensor, StackedExperts], tuple[Tensor, Tensor]]


class FusedDecoder:
    def __init__(
        self,
        weights: StackedWeights,
        head: Head,
        routed: Mapping[str, RoutedTokens] | None = None,
    ) -> None:
        """`routed` are the experts that the original model chose for the probe."""
        self._weights, self._routed = weights, routed or {}
        self.embedding, self.targets = weights.embedding, weights.targets
        self._head = head
        #: Whether it has code for prefill.
        self.prefills = not weights.has_experts
        self._side: Any = None
        if weights.embedding.is_cuda:
            self._side = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def write_logits(
        self,
        inputs: DecodeInputs,
        cache: Sequence[CacheLayer],
        *,
        page: int,
        spare: int,
        lora: LoraTables | None,
        lora_head: bool = False,
        out_BV: Tensor,
    ) -> None:
        """
        Writes float32 logits of the next tokens, and keys and values of the input tokens.

        `spare` is a page of the cache that no sequence uses.
        """
        self._write_logits(
            inputs, cache, page, spare, lora, lora_head=lora_head, out_BV=out_BV, choose=_chosen
        )

    def _write_logits(
        self,
        inputs: DecodeInputs,
        cache: Sequence[CacheLayer],
        page: int,
        spare: int,
        lora: LoraTables | None,
        *,
        lora_head: bool,
        out_BV: Tensor,
        choose: Choose,
    ) -> None:
        from tinkex.engine.model import decode_ops as ops
        from tinkex.engine.model.early_start import FEW_ROWS, starts_early

        rows = len(inputs.ids_B)
        early = starts_early(rows, out_BV.device)
        places: Any = {
            "positions_B": inputs.positions_B,
            "last_B": inputs.last_B,
            "table": inputs.table,
            "page": page,
            "early": early,
        }

        def linear(
            x: Tensor, layer: StackedLinear, target: int, projections: int, *, parts: bool = False
        ) -> tuple[Tensor, Shrunk | None]:
            if lora is None:
                y = ops.linear(x, layer.weight, layer.bias, parts=parts, early=early)
                return y, None
            if rows <= FEW_ROWS:
                return ops.linear_and_shrink(
                    x, layer.weight, layer.bias, lora, target, projections, parts=parts, early=early
                )
            with self._beside():
                shrunk = ops.shrink(x, lora, target, projections)
            y = ops.linear(x, layer.weight, layer.bias, parts=parts)
            self._join()
            return y, shrunk

        def attend(q: Tensor, keys: Tensor, values: Tensor, scoring: Scoring) -> Tensor:
            return ops.attend(q, keys=keys, values=values, scoring=scoring, **places)

        def add_norm(x: Tensor, y: Tensor | None, weight: Tensor, shrunk: Shrunk | None) -> Tensor:
            return ops.add_norm(x, y, weight, self._weights.eps, shrunk=shrunk, early=early)

        hidden = self._run_layers(
            inputs.ids_B, cache, linear, attend, add_norm, {**places, "spare": spare}, lora, choose
        )
        self._head.write_logits(hidden, out_BV)
        if lora is not None and lora_head:
            shrunk = ops.shrink(hidden, lora, len(self._weights.targets) - 1, 1)
            ops.add_expanded(out_BV, shrunk, exact=True)

    def prefill(
        self, inputs: PrefillInputs, cache: Sequence[CacheLayer], *, lora: LoraTables | None
    ) -> Tensor:
        """The last hidden states [T, H] of packed tokens. Writes their keys and values."""
        from tinkex.engine.model import decode_ops as ops

        def linear(
            x: Tensor, layer: StackedLinear, target: int, projections: int, *, parts: bool = False
        ) -> tuple[Tensor, Shrunk | None]:
            y = F.linear(x, layer.weight, layer.bias)
            return y, None if lora is None else ops.shrink(x, lora, target, projections)

        def attend(q: Tensor, keys: Tensor, values: Tensor, scoring: Scoring) -> Tensor:
            return attend_from_cache(q, keys, values, inputs.reads, scoring)

        def add_norm(x: Tensor, y: Tensor | None, weight: Tensor, shrunk: Shrunk | None) -> Tensor:
            return ops.add_norm(x, y, weight, self._weights.eps, shrunk=shrunk)

        places = {"positions_B": inputs.positions_T, "slots_B": inputs.slots_T, "early": False}
        return self._run_layers(
            inputs.ids_T, cache, linear, attend, add_norm, places, lora, _chosen
        )

    def _run_layers(
        self,
        ids_B: Tensor,
        cache: Sequence[CacheLayer],
        linear: Linear,
        attend: Callable[[Tensor, Tensor, Tensor, Scoring], Tensor],
        add_norm: Callable[[Tensor, Tensor | None, Tensor, Shrunk | None], Tensor],
        places: dict[str, Any],
        lora: LoraTables | None,
        choose: Choose,
    ) -> Tensor:
        """The last hidden states. `places` says where `heads` writes keys and values."""
        from tinkex.engine.model import decode_ops as ops

        weights = self._weights
        x = F.embedding(ids_B, weights.embedding)
        y: Tensor | None = None
        shrunk: Shrunk | None = None
        for layer, (keys, values) in zip(weights.layers, cache, strict=True):
            normed = add_norm(x, y, layer.input_norm, shrunk)
            qkv, shrunk = linear(normed, layer.qkv, layer.target, 3)
            q = ops.heads(
                qkv,
                keys=keys,
                values=values,
                query_heads=weights.query_heads,
                norms=layer.head_norms,
                eps=weights.head_eps,
                frequencies=weights.frequencies,
                rope_scale=weights.rope_scale,
                shrunk=shrunk,
                **places,
            )
            attended = attend(q, keys, values, layer.scoring)
            y, shrunk = linear(attended.flatten(1), layer.output, layer.target + 3, 1, parts=True)
            normed = add_norm(x, y, layer.mlp_norm, shrunk)
            if isinstance(layer.mlp, StackedMlp):
                y, shrunk = _run_mlp(normed, layer.mlp, linear, parts=True, early=places["early"])
            else:
                index_BK, weights_BK = choose(normed, layer.mlp)
                y, shrunk = _run_mixture(
                    normed, index_BK, weights_BK, layer.mlp, linear, lora, early=places["early"]
                )
        return add_norm(x, y, weights.norm, shrunk)

    @contextlib.contextmanager
    def _beside(self) -> Iterator[None]:
        """
        Runs kernels beside those of the main stream until `_join`.

        Memory made here is used again only for later work beside, which waits for its readers.
        """
        if self._side is None:
            yield
            return
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            yield

    def _join(self) -> None:
        if self._side is not None:
            torch.cuda.current_stream().wait_stream(self._side)

    def probe_logits(self, ids: Tensor) -> Tensor:
        """
        Logits after the last of a few tokens: a prefill in two pieces, then decode steps.

        Without code for prefill all of them are decoded. Tokens go through the experts of the
        original model: an expert of a near tie may flip. Raises `ArithmeticError` if the routers
        would choose too many others.
        """
        page, device = 64, ids.device
        cache = self._poisoned_cache(2 * page)
        at = torch.arange(len(ids), dtype=torch.int32, device=device)
        second = 2 * len(ids) // 3 if self.prefills else 0
        for start, stop in ((0, second // 2), (second // 2, second)):
            if start < stop:
                self.prefill(_probe_prefill(ids, at, start, stop), cache, lora=None)
        table = torch.zeros(1, 1, dtype=torch.int32, device=device)
        logits_1V = torch.empty(1, self._head.vocab_size, device=device)
        replay = _Replay(self._routed)
        for position in range(second, len(ids)):
            replay.position = position
            here = at[position : position + 1]
            inputs = DecodeInputs(
                ids_B=ids[position : position + 1].int(),
                positions_B=here,
                last_B=here,
                table=table,
            )
            self._write_logits(
                inputs, cache, page, 1, None, lora_head=False, out_BV=logits_1V, choose=replay
            )
        replay.check()
        return logits_1V[0]

    def _poisoned_cache(self, slots: int) -> list[CacheLayer]:
        """Filled with NaN, to show whether anything reads what was not written."""
        weights = self._weights
        shape = (slots, weights.key_heads, weights.head_size)
        like = weights.embedding
        return [
            CacheLayer(*(like.new_full(shape, float("nan")) for _ in "kv")) for _ in weights.layers
        ]


def _chosen(x: Tensor, mixture: StackedExperts) -> tuple[Tensor, Tensor]:
    _, weights_BK, index_BK = mixture.router(x)
    return index_BK, weights_BK


class _Replay:
    """The choices of the original model for the tokens of the probe, one at a time."""

    def __init__(self, routed: Mapping[str, RoutedTokens]) -> None:
        self._routed = routed
        self.position = 0
        #: The shares of these choices that the routers make, too.
        self._shares: list[Tensor] = []

    def __call__(self, x: Tensor, mixture: StackedExperts) -> tuple[Tensor, Tensor]:
        own_1K, weights_1K = _chosen(x, mixture)
        routed = self._routed.get(mixture.name)
        if routed is None:
            return own_1K, weights_1K
        here = slice(self.position, self.position + 1)
        index_1K = routed.index_TK[here]
        self._shares.append(torch.isin(own_1K, index_1K).float().mean())
        return index_1K, routed.weights_TK[here]

    def check(self) -> None:
        share = float(torch.stack(self._shares).mean()) if self._shares else 1.0
        if share < MIN_AGREEMENT:
            raise ArithmeticError(f"routers choose {share:.0%} of the experts that they should")


def _run_mlp(
    x: Tensor, mlp: StackedMlp, linear: Linear, *, parts: bool, early: bool
) -> tuple[Tensor, Shrunk | None]:
    from tinkex.engine.model import decode_ops as ops

    gate_up, shrunk = linear(x, mlp.gate_up, mlp.target, 2)
    act = ops.swiglu(gate_up, shrunk, early=early)
    return linear(act, mlp.down, mlp.target + 2, 1, parts=parts)


def _run_mixture(
    x: Tensor,
    index_BK: Tensor,
    weights_BK: Tensor,
    mixture: StackedExperts,
    linear: Linear,
    lora: LoraTables | None,
    *,
    early: bool,
) -> tuple[Tensor, Shrunk | None]:
    """What the experts of each row give, as parts of a sum, and what B of w2 multiplies."""
    from tinkex.engine.model import decode_ops as ops
    from tinkex.engine.model import expert_decode

    y_KBH, shrunk = expert_decode.expert_parts(
        x, index_BK, weights_BK, mixture.weights, lora, mixture.targets, early=early
    )
    if mixture.shared is not None:
        shared, of_shared = _run_mlp(x, mixture.shared, linear, parts=False, early=early)
        if of_shared is not None:
            ops.add_expanded(shared, of_shared, early=early)
        if mixture.shared_gate is not None:
            shared *= F.linear(x, mixture.shared_gate).sigmoid()
        y_KBH[0] += shared
    return y_KBH, shrunk


def _probe_prefill(ids: Tensor, positions: Tensor, start: int, stop: int) -> PrefillInputs:
    """Tokens `start` to `stop` of a sequence in the first page."""
    ends = torch.tensor([[0, stop - start], [0, stop]], dtype=torch.int32, device=ids.device)
    read = KeyReads(
        queries=slice(0, stop - start),
        slots=positions[:stop],
        query_starts=ends[0],
        key_starts=ends[1],
        max_queries=stop - start,
        max_keys=stop,
    )
    return PrefillInputs(
        ids_T=ids[start:stop].int(),
        positions_T=positions[start:stop],
        slots_T=positions[start:stop],
        reads=[read],
    )


def attend_from_cache(
    q_THD: Tensor, keys: Tensor, values: Tensor, reads: Sequence[KeyReads], scoring: Scoring
) -> Tensor:
    """Causal attention of segments over their cached keys, which are gathered from their pages."""
    parts = []
    for read in reads:
        # As rows of one dimension: their copy is several times faster.
        k, v = (
            cached.flatten(1).index_select(0, read.slots).view(-1, *cached.shape[1:])
            for cached in (keys, values)
        )
        parts.append(
            attention.attend_segments(
                q_THD[read.queries],
                k,
                v,
                Segments(read.query_starts, read.key_starts, read.max_queries, read.max_keys),
                scoring,
            )
        )
    return parts[0] if len(parts) == 1 else torch.cat(parts)
