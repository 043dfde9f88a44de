"""The layers of a decode step on a GPU, from few and fused kernels.

Prefill and training run the code of transformers. A decode step has one token for each sequence, so
its time is the reading of weights and cache plus the start of each kernel; transformers' code
starts about sixty kernels for a layer, this one sixteen. It shares the weights: projections of one
input are rows of one matrix, and the linear layers of the model are views of it.

Only for models of the usual form (Llama, Qwen, Mistral and their relatives) in bfloat16. `of`
returns None for others, which decode with transformers' code. The form is recognized by the parts
that a layer has; `probe_logits` shows whether the result is right.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tinkex.engine.model import attention
from tinkex.engine.model.attention import CacheLayer
from tinkex.engine.model.lm_head import HEAD, Head
from tinkex.engine.model.lora import LoraLinear, Pair
from tinkex.models.cache import cache_folder

if TYPE_CHECKING:
    from tinkex.engine.model.decode_kernels import LoraTables, Shrunk

# B rows of a decode step, H hidden size, V vocabulary

#: Larger ranks decode with the code of transformers: their tiles do not fit the GPU's fast memory.
MAX_RANK = 128

#: Kinds of rotary embeddings whose frequencies do not depend on the length of the sequence.
FIXED_ROPE = ("default", "linear", "llama3", "yarn")

#: Parts of a layer, in the order in which they are counted as targets.
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, kw_only=True)
class _Linear:
    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, kw_only=True)
class _Layer:
    input_norm: Tensor
    qkv: _Linear
    #: Weights of the norms of queries and keys, if the model has them.
    head_norms: tuple[Tensor, Tensor] | None
    output: _Linear
    mlp_norm: Tensor
    gate_up: _Linear
    down: _Linear


@dataclass(frozen=True, kw_only=True)
class DecodeInputs:
    """The tensors of a decode step. All have the length of the batch bucket."""

    ids_B: Tensor
    positions_B: Tensor
    #: The last position that a row may write; -1 for rows that only fill the batch up.
    last_B: Tensor
    #: [B, pages]: the pages of each sequence.
    table: Tensor


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


class FusedDecoder:
    def __init__(
        self, decoder: Any, embed: Any, head: Head, targets: Sequence[str], scaling: float
    ) -> None:
        attention = decoder.layers[0].self_attn
        self._embedding: Tensor = embed.weight
        self._head = head
        self._layers = [_stacked(layer) for layer in decoder.layers]
        self._norm: Tensor = decoder.norm.weight
        self._eps = float(decoder.norm.variance_epsilon)
        self._head_eps = float(getattr(attention, "q_norm", decoder.norm).variance_epsilon)
        self._frequencies: Tensor = decoder.rotary_emb.inv_freq.float()
        self._rope_scale = float(decoder.rotary_emb.attention_scaling)
        self._scaling = scaling
        self._query_heads = attention.q_proj.weight.shape[0] // attention.head_dim
        self._side: Any = None
        if self._embedding.is_cuda:
            self._side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        #: Names of the linear layers, in the order of the adapter tables.
        self.targets = targets
        #: For benchmarks: whether kernels start before the previous one ends, and whether products
        #: with A are part of the base products' launches, where there are few rows.
        self.chains = self.joins = True

    @classmethod
    def of(cls, decoder: Any, embed: Any, head: Head) -> FusedDecoder | None:
        """None if the model has another form than this class computes."""
        _use_private_cache()
        try:
            import triton  # noqa: F401
        except ImportError:
            return None
        names = {id(module): name for name, module in decoder.named_modules()}
        prefix = _prefix(decoder)
        targets: list[str] = []
        for layer in decoder.layers:
            if not _is_usual(layer, decoder.norm.variance_epsilon):
                return None
            for parent, parts in ((layer.self_attn, _ATTENTION), (layer.mlp, _MLP)):
                targets += [prefix + names[id(getattr(parent, part))] for part in parts]
        rotary = getattr(decoder, "rotary_emb", None)
        first = decoder.layers[0].self_attn
        if (
            rotary is None
            or getattr(rotary, "rope_type", "default") not in FIXED_ROPE
            or 2 * len(rotary.inv_freq) != first.head_dim
            or head.bias_V is not None
            or any(layer.self_attn.head_dim != first.head_dim for layer in decoder.layers)
            or first.head_dim % 16
            or embed.weight.shape[1] % 16
            or attention.varlen_attn is None
        ):
            return None
        return cls(decoder, embed, head, [*targets, HEAD], float(first.scaling))

    def logits(
        self,
        inputs: DecodeInputs,
        cache: Sequence[CacheLayer],
        *,
        page: int,
        spare: int,
        lora: LoraTables | None,
        lora_head: bool = False,
    ) -> Tensor:
        """
        Float32 logits [B, V] of the next tokens. Writes the keys and values of the input tokens.

        `spare` is a page of the cache that no sequence uses.
        """
        from tinkex.engine.model import decode_kernels as kernels

        few = len(inputs.ids_B) <= kernels.FEW_ROWS
        # Torch's own matrix products, which more rows use, do not take part in a chain.
        chained = few and self.chains and kernels.can_chain()
        places: Any = {
            "positions_B": inputs.positions_B,
            "last_B": inputs.last_B,
            "table": inputs.table,
            "page": page,
        }

        def linear(
            x: Tensor, weights: _Linear, target: int, projections: int, *, parts: bool = False
        ) -> tuple[Tensor, kernels.Shrunk | None]:
            """The base layer, and beside it the products with A, which read the same input."""
            plain = weights.weight, weights.bias
            if lora is None:
                return kernels.linear(x, *plain, parts=parts, chained=chained), None
            if few and self.joins:
                return kernels.linear_and_shrink(
                    x, *plain, lora, target, projections, parts=parts, chained=chained
                )
            with self._beside():
                shrunk = kernels.shrink(x, lora, target, projections)
            y = kernels.linear(x, *plain, parts=parts, chained=False)
            self._join()
            return y, shrunk

        def attend(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            return kernels.attend(
                q, keys=keys, values=values, scaling=self._scaling, chained=chained, **places
            )

        hidden = self._run_layers(
            inputs.ids_B, cache, linear, attend, {**places, "spare": spare}, chained=chained
        )
        logits = self._head.logits(hidden)
        if lora is not None and lora_head:
            shrunk = kernels.shrink(hidden, lora, len(self.targets) - 1, 1)
            kernels.add_expanded(logits, shrunk, exact=True)
        return logits

    def prefill(
        self, inputs: PrefillInputs, cache: Sequence[CacheLayer], *, lora: LoraTables | None
    ) -> Tensor:
        """The last hidden states [T, H] of packed tokens. Writes their keys and values."""
        from tinkex.engine.model import decode_kernels as kernels

        def linear(
            x: Tensor, weights: _Linear, target: int, projections: int, *, parts: bool = False
        ) -> tuple[Tensor, kernels.Shrunk | None]:
            y = F.linear(x, weights.weight, weights.bias)
            return y, None if lora is None else kernels.shrink(x, lora, target, projections)

        def attend(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            return attend_from_cache(q, keys, values, inputs.reads, self._scaling)

        places = {"positions_B": inputs.positions_T, "slots_B": inputs.slots_T}
        return self._run_layers(inputs.ids_T, cache, linear, attend, places, chained=False)

    def _run_layers(
        self,
        ids_B: Tensor,
        cache: Sequence[CacheLayer],
        linear: Callable[..., tuple[Tensor, Shrunk | None]],
        attend: Callable[[Tensor, Tensor, Tensor], Tensor],
        places: dict[str, Any],
        *,
        chained: bool,
    ) -> Tensor:
        """The last hidden states. `places` says where `heads` writes keys and values."""
        from tinkex.engine.model import decode_kernels as kernels

        x = F.embedding(ids_B, self._embedding)
        y: Tensor | None = None
        for index, (layer, (keys, values)) in enumerate(zip(self._layers, cache, strict=True)):
            target = index * (len(_ATTENTION) + len(_MLP))
            normed = kernels.add_norm(x, y, layer.input_norm, self._eps, chained=chained)
            qkv, shrunk = linear(normed, layer.qkv, target, 3)
            q = kernels.heads(
                qkv,
                keys=keys,
                values=values,
                query_heads=self._query_heads,
                norms=layer.head_norms,
                eps=self._head_eps,
                frequencies=self._frequencies,
                rope_scale=self._rope_scale,
                shrunk=shrunk,
                chained=chained,
                **places,
            )
            attended = attend(q, keys, values)
            y, shrunk = linear(attended.flatten(1), layer.output, target + 3, 1, parts=True)
            if shrunk is not None:
                kernels.add_expanded(y, shrunk, chained=chained)
            normed = kernels.add_norm(x, y, layer.mlp_norm, self._eps, chained=chained)
            act = kernels.swiglu(*linear(normed, layer.gate_up, target + 4, 2), chained=chained)
            y, shrunk = linear(act, layer.down, target + 6, 1, parts=True)
            if shrunk is not None:
                kernels.add_expanded(y, shrunk, chained=chained)
        return kernels.add_norm(x, y, self._norm, self._eps, chained=chained)

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

    def addresses(self, pairs: Mapping[str, Pair]) -> tuple[list[list[int]], list[int]]:
        """Rows of the adapter tables: (A, B) in elements from the embedding, and the ranks."""
        base, size = self.base.data_ptr(), self.base.element_size()
        offsets, ranks = [], []
        for name in self.targets:
            pair = pairs.get(name)
            if pair is None:
                offsets.append([0, 0])
                ranks.append(0)
            else:
                offsets.append([(m.data_ptr() - base) // size for m in (pair.A_RI, pair.B_OR)])
                ranks.append(pair.A_RI.shape[0])
        return offsets, ranks

    @property
    def base(self) -> Tensor:
        """The tensor from which the addresses of adapters are counted."""
        return self._embedding

    @property
    def vocab_size(self) -> int:
        return self._head.vocab_size

    def probe_logits(self, ids: Tensor) -> Tensor:
        """Logits after the last of a few tokens: a prefill in two pieces, then decode steps."""
        page, device = 64, ids.device
        cache = self._poisoned_cache(2 * page)
        at = torch.arange(len(ids), dtype=torch.int32, device=device)
        first, second = len(ids) // 3, 2 * len(ids) // 3
        for start, stop in ((0, first), (first, second)):
            self.prefill(_probe_prefill(ids, at, start, stop), cache, lora=None)
        table = torch.zeros(1, 1, dtype=torch.int32, device=device)
        for position in range(second, len(ids)):
            here = at[position : position + 1]
            inputs = DecodeInputs(
                ids_B=ids[position : position + 1].int(),
                positions_B=here,
                last_B=here,
                table=table,
            )
            logits = self.logits(inputs, cache, page=page, spare=1, lora=None)
        return logits[0]

    def _poisoned_cache(self, slots: int) -> list[CacheLayer]:
        """Filled with NaN, to show whether anything reads what was not written."""
        size = 2 * len(self._frequencies)
        widths = [layer.qkv.weight.shape[0] // size for layer in self._layers]
        nan = torch.tensor(float("nan"), dtype=self.base.dtype, device=self.base.device)
        return [
            CacheLayer(*(nan.repeat(slots, (width - self._query_heads) // 2, size) for _ in "kv"))
            for width in widths
        ]


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
    q_THD: Tensor, keys: Tensor, values: Tensor, reads: Sequence[KeyReads], scaling: float
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
            attend_packed(
                q_THD[read.queries],
                k,
                v,
                read.query_starts,
                read.key_starts,
                read.max_queries,
                read.max_keys,
                scaling,
            )
        )
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def attend_packed(
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
    if q.is_cuda:
        out: Tensor = attention.varlen_attn(
            q,
            k,
            v,
            query_starts,
            key_starts,
            max_queries,
            max_keys,
            scale=scaling,
            **attention.causal_arguments,
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


def _use_private_cache() -> None:
    """Compiled kernels are executable code: they are kept where only the user can write."""
    folder = cache_folder() / "kernels"
    if "TRITON_CACHE_DIR" not in os.environ:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o700)
            os.environ["TRITON_CACHE_DIR"] = str(folder)


def _prefix(decoder: Any) -> str:
    """The path of the decoder in the model, from the name of one of its linear layers."""
    linear = decoder.layers[0].self_attn.q_proj
    own = next(name for name, module in decoder.named_modules() if module is linear)
    return str(linear.name).removesuffix(own)


def _is_usual(layer: Any, eps: float) -> bool:
    parts = {name for name, _ in layer.named_children()}
    if parts != {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    norms = {name for name, _ in attention.named_children()} - {*_ATTENTION}
    linears: list[Any] = [getattr(attention, name, None) for name in _ATTENTION]
    linears += [getattr(mlp, name, None) for name in _MLP]
    others = {name for name, _ in mlp.named_children()} - {*_MLP}
    return (
        all(isinstance(linear, LoraLinear) for linear in linears)
        and norms in (set(), {"q_norm", "k_norm"})
        and others <= {"act_fn"}
        and type(mlp.act_fn).__name__ in ("SiLU", "SiLUActivation")
        and all(
            getattr(norm, "variance_epsilon", None) == eps
            for norm in (layer.input_layernorm, layer.post_attention_layernorm)
        )
        and all(getattr(attention, name).weight.dim() == 1 for name in norms)
        and all(len(getattr(attention, name).weight) == attention.head_dim for name in norms)
        and all(linear.weight.shape[1] % 16 == 0 for linear in linears)
    )


def _stacked(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    norms = None
    if hasattr(attention, "q_norm"):
        norms = (attention.q_norm.weight, attention.k_norm.weight)
    return _Layer(
        input_norm=layer.input_layernorm.weight,
        qkv=_stack(attention.q_proj, attention.k_proj, attention.v_proj),
        head_norms=norms,
        output=_Linear(weight=attention.o_proj.weight, bias=attention.o_proj.bias),
        mlp_norm=layer.post_attention_layernorm.weight,
        gate_up=_stack(mlp.gate_proj, mlp.up_proj),
        down=_Linear(weight=mlp.down_proj.weight, bias=mlp.down_proj.bias),
    )


def _stack(*linears: LoraLinear) -> _Linear:
    """Moves the weights into one matrix, of which the layers keep views."""
    weight = torch.cat([linear.weight.detach() for linear in linears])
    biases: list[Any] = [linear.bias for linear in linears]
    bias = None
    if any(each is not None for each in biases):
        bias = torch.cat(
            [
                weight.new_zeros(len(linear.weight)) if each is None else each.detach()
                for linear, each in zip(linears, biases, strict=True)
            ]
        )
    start = 0
    for linear in linears:
        stop = start + len(linear.weight)
        linear.weight = nn.Parameter(weight[start:stop], requires_grad=False)
        start = stop
    return _Linear(weight=weight, bias=bias)
