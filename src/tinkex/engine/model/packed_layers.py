"""The layers of a model over packed tokens on a GPU, forward and backward, from fused kernels.

Training and prefill spend half of their time in passes over memory when every operation of
transformers' code is a kernel of its own. Here a layer is five large products, attention, and one
kernel for everything between two of them. The backward pass is written out: the base weights are
frozen, so it needs only the gradient by the input, and it computes norms, rotations and SwiGLU
again instead of keeping their results. It adds the gradients of adapters to their flat vectors.

Only for models of the usual form (`stacked_weights`) in bfloat16. Prefill has layers of its own
(`fused_decoder`), which write the paged cache and keep nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tinkex.engine.model import packed_kernels as kernels
from tinkex.engine.model.attention import (
    Packing,
    attend_packed,
    attend_packed_with_backward,
)
from tinkex.engine.model.lm_head import Head
from tinkex.engine.model.lora import AdapterSegment, Pair, addresses, make_pairs
from tinkex.engine.model.matmul import add_mm_float32
from tinkex.engine.model.stacked_weights import ATTENTION, MLP, StackedLayer, StackedWeights
from tinkex.engine.model.targets import Target, make_layout

# T packed tokens, H hidden size, I inputs, O outputs, R rank, P projections of one input

#: Targets of a layer, and the index of the first of each input among them.
TARGETS = len(ATTENTION) + len(MLP)
QKV, OUTPUT, GATE_UP, DOWN = 0, 3, 4, 6


@dataclass(slots=True)
class _Kept:
    """What the backward pass needs of a layer."""

    x: Tensor
    qkv: Tensor
    attended: Tensor
    #: From the gradient by its result to those by queries, keys and values.
    attention_backward: Callable[[Tensor], Sequence[Tensor]]
    middle: Tensor
    gate_up: Tensor
    #: x Aᵀ of the four inputs.
    shrunk: tuple[Tensor | None, ...]


class PackedLayers:
    def __init__(self, weights: StackedWeights) -> None:
        self.weights = weights

    def hidden(self, ids_T: Tensor, packing: Packing, segments: Sequence[AdapterSegment]) -> Tensor:
        """The last hidden states [T, H] of a pass without gradients."""
        with torch.no_grad():
            batch = self._batch(ids_T, packing, segments)
            x, y = F.embedding(ids_T, self.weights.embedding), None
            for index in range(len(self.weights.layers)):
                x, y, _ = self._forward(index, x, y, batch)
            return kernels.add_norm(x, y, self.weights.norm, self.weights.eps)[1]

    def hidden_with_backward(
        self,
        ids_T: Tensor,
        packing: Packing,
        segments: Sequence[AdapterSegment],
        *,
        checkpoint: bool = False,
    ) -> tuple[Tensor, Callable[[Tensor], None]]:
        """
        The last hidden states [T, H], and the backward pass, which takes their gradient.

        The backward pass adds to the gradients of the adapters. It runs at most once. With
        `checkpoint`, only the input of each layer is kept, and the backward pass computes the
        layers again.
        """
        weights = self.weights
        with torch.no_grad():
            batch = self._batch(ids_T, packing, segments)
            kept: list[_Kept | tuple[Tensor, Tensor | None]] = []
            x, y = F.embedding(ids_T, weights.embedding), None
            for index in range(len(weights.layers)):
                inputs = (x, y)
                x, y, activations = self._forward(index, x, y, batch, keep=not checkpoint)
                if activations is None:
                    # The sum is what counts, and it takes one tensor instead of two.
                    total = inputs[0] if inputs[1] is None else inputs[0] + inputs[1]
                    kept.append((total, None))
                else:
                    kept.append(activations)
            last, hidden_TH = kernels.add_norm(x, y, weights.norm, weights.eps)

        def backward(gradient_TH: Tensor) -> None:
            with torch.no_grad():
                g = gradient_TH.to(hidden_TH.dtype, copy=True)
                d, _ = kernels.norm_backward(last, weights.norm, weights.eps, g, None)
                for index in reversed(range(len(weights.layers))):
                    d = self._backward(index, self._computed(index, kept.pop(), batch), d, batch)

        return hidden_TH, backward

    def _batch(self, ids_T: Tensor, packing: Packing, segments: Sequence[AdapterSegment]) -> _Batch:
        weights = self.weights
        angles = packing.positions[0].float()[:, None] * weights.frequencies
        cos, sin = (
            (turn * weights.rope_scale).to(weights.embedding.dtype)
            for turn in (angles.cos(), angles.sin())
        )
        return _Batch(
            packing=packing, cos=cos, sin=sin, lora=adapters_of(segments, len(ids_T), weights)
        )

    def _head_shape(self, layer: StackedLayer, batch: _Batch) -> kernels.HeadShape:
        weights = self.weights
        return kernels.HeadShape(
            query_heads=weights.query_heads,
            key_heads=weights.key_heads,
            size=weights.head_size,
            norms=layer.head_norms,
            eps=weights.head_eps,
            cos=batch.cos,
            sin=batch.sin,
        )

    def _forward(
        self, index: int, x: Tensor, y: Tensor | None, batch: _Batch, *, keep: bool = False
    ) -> tuple[Tensor, Tensor, _Kept | None]:
        """
        One layer. Its input is x + y, and so is its output: the next kernel adds them.

        With `keep`, also returns what the backward pass needs.
        """
        weights, layer, lora = self.weights, self.weights.layers[index], batch.lora
        target, tokens = index * TARGETS, len(x)
        x, normed = kernels.add_norm(x, y, layer.input_norm, weights.eps)
        qkv = F.linear(normed, layer.qkv.weight, layer.qkv.bias)
        sizes = self._sizes(layer)
        of_qkv = lora.add(target + QKV, normed, qkv, sizes.qkv)
        q, k = kernels.rotate(qkv, self._head_shape(layer, batch))
        v = qkv[:, -sizes.qkv[2] :].view(tokens, weights.key_heads, weights.head_size)
        attention_backward = None
        if keep:
            attended, attention_backward = attend_packed_with_backward(
                index, q, k, v, scoring=layer.scoring, packing=batch.packing
            )
        else:
            attended = attend_packed(index, q, k, v, scoring=layer.scoring, packing=batch.packing)
        flat = attended.reshape(tokens, -1)
        y = F.linear(flat, layer.output.weight, layer.output.bias)
        of_output = lora.add(target + OUTPUT, flat, y, sizes.output)
        middle, normed = kernels.add_norm(x, y, layer.mlp_norm, weights.eps)
        gate_up = F.linear(normed, layer.dense.gate_up.weight, layer.dense.gate_up.bias)
        of_gate_up = lora.add(target + GATE_UP, normed, gate_up, sizes.gate_up)
        act = kernels.swiglu(gate_up)
        y = F.linear(act, layer.dense.down.weight, layer.dense.down.bias)
        of_down = lora.add(target + DOWN, act, y, sizes.output)
        if attention_backward is None:
            return middle, y, None
        shrunk = (of_qkv, of_output, of_gate_up, of_down)
        return middle, y, _Kept(x, qkv, flat, attention_backward, middle, gate_up, shrunk)

    def _computed(
        self, index: int, kept: _Kept | tuple[Tensor, Tensor | None], batch: _Batch
    ) -> _Kept:
        """What the backward pass needs; computed again if only the input of the layer was kept."""
        if isinstance(kept, _Kept):
            return kept
        again = self._forward(index, *kept, batch, keep=True)[2]
        assert again is not None
        return again

    def _backward(self, index: int, kept: _Kept, d: Tensor, batch: _Batch) -> Tensor:
        """The gradient by the input of a layer, from that by its output. Overwrites both."""
        weights, layer, lora = self.weights, self.weights.layers[index], batch.lora
        target, sizes = index * TARGETS, self._sizes(self.weights.layers[index])
        of_qkv, of_output, of_gate_up, of_down = kept.shrunk

        d_act = d @ layer.dense.down.weight
        step = lora.add_gradient(target + DOWN, d, d_act, sizes.output)
        d_gate_up, act = kernels.swiglu_backward(kept.gate_up, d_act)
        lora.add_weight_gradients(target + DOWN, act, of_down, d, step, sizes.output)

        g = d_gate_up @ layer.dense.gate_up.weight
        step = lora.add_gradient(target + GATE_UP, d_gate_up, g, sizes.gate_up)
        d, normed = kernels.norm_backward(kept.middle, layer.mlp_norm, weights.eps, g, d)
        lora.add_weight_gradients(
            target + GATE_UP, normed, of_gate_up, d_gate_up, step, sizes.gate_up
        )

        g = d @ layer.output.weight
        step = lora.add_gradient(target + OUTPUT, d, g, sizes.output)
        lora.add_weight_gradients(target + OUTPUT, kept.attended, of_output, d, step, sizes.output)
        dq, dk, dv = kept.attention_backward(g.view(len(g), weights.query_heads, -1))
        d_qkv = kernels.rotate_backward(kept.qkv, dq, dk, dv, self._head_shape(layer, batch))

        g = d_qkv @ layer.qkv.weight
        step = lora.add_gradient(target + QKV, d_qkv, g, sizes.qkv)
        d, normed = kernels.norm_backward(kept.x, layer.input_norm, weights.eps, g, d)
        lora.add_weight_gradients(target + QKV, normed, of_qkv, d_qkv, step, sizes.qkv)
        return d

    def _sizes(self, layer: StackedLayer) -> _Sizes:
        query, key = (
            heads * self.weights.head_size
            for heads in (self.weights.query_heads, self.weights.key_heads)
        )
        inner = len(layer.dense.gate_up.weight) // 2
        return _Sizes((query, key, key), (len(layer.dense.down.weight),), (inner, inner))


class _Sizes(NamedTuple):
    """Outputs of the projections of each input. The output and down projections have equal ones."""

    qkv: tuple[int, int, int]
    output: tuple[int]
    gate_up: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class _Batch:
    """What all layers of a pass share."""

    packing: Packing
    cos: Tensor
    sin: Tensor
    lora: Adapters


# -- adapters of a batch --------------------------------------------------------------------------


class Adapters:
    """
    The adapters of a batch; without any, the base model alone.

    `target` is the first of the projections that read x, and `sizes` are their outputs, which are
    adjacent columns of y.
    """

    def add(self, target: int, x: Tensor, y: Tensor, sizes: Sequence[int]) -> Tensor | None:
        """Adds the LoRA products to y. Returns x Aᵀ, which the gradients need."""
        return None

    def add_gradient(
        self, target: int, dy: Tensor, dx: Tensor, sizes: Sequence[int]
    ) -> Tensor | None:
        """Adds the gradient through the adapters to dx. Returns dy B."""
        return None

    def add_weight_gradients(
        self,
        target: int,
        x: Tensor,
        h: Tensor | None,
        dy: Tensor,
        dh: Tensor | None,
        sizes: Sequence[int],
    ) -> None:
        """Adds to the gradients of A and B. `h` and `dh` are what the other two returned."""


class _Product(NamedTuple):
    """The product of one projection with B: its views, made once for all passes over a layer."""

    #: Columns of the output, and of the products with A of all projections of the input.
    column: int
    size: int
    shrunk: int
    B_OR: Tensor
    B_RO: Tensor
    grad_B_OR: Tensor | None


class _InputAdapters(NamedTuple):
    """The adapters of the projections of one input."""

    rank: int
    #: A of all of them: they are adjacent in memory.
    A_PI: Tensor
    A_IP: Tensor
    grad_A_PI: Tensor | None
    products: Sequence[_Product]


class OneAdapter(Adapters):
    """
    One adapter for all tokens: ordinary matrix products.

    The scale is a factor of the products that add up; x Aᵀ and dy B are without it. For small
    models the processor is the limit, so views of weights are made once for each pass.
    """

    def __init__(self, pairs: Sequence[Pair | None], scale: float) -> None:
        """`pairs` has an entry for each target."""
        self._pairs, self._scale = pairs, scale
        self._inputs: dict[int, _InputAdapters | None] = {}

    def add(self, target: int, x: Tensor, y: Tensor, sizes: Sequence[int]) -> Tensor | None:
        adapters = self._of_input(target, sizes)
        if adapters is None:
            return None
        h = torch.mm(x, adapters.A_IP)
        for each in adapters.products:
            own = h.narrow(1, each.shrunk, adapters.rank)
            y.narrow(1, each.column, each.size).addmm_(own, each.B_RO, alpha=self._scale)
        return h

    def add_gradient(
        self, target: int, dy: Tensor, dx: Tensor, sizes: Sequence[int]
    ) -> Tensor | None:
        adapters = self._of_input(target, sizes)
        if adapters is None:
            return None
        dh = dy.new_empty(len(dy), len(adapters.A_PI))
        for each in adapters.products:
            columns = dy.narrow(1, each.column, each.size)
            torch.mm(columns, each.B_OR, out=dh.narrow(1, each.shrunk, adapters.rank))
        dx.addmm_(dh, adapters.A_PI, alpha=self._scale)
        return dh

    def add_weight_gradients(
        self,
        target: int,
        x: Tensor,
        h: Tensor | None,
        dy: Tensor,
        dh: Tensor | None,
        sizes: Sequence[int],
    ) -> None:
        adapters = self._of_input(target, sizes)
        if h is None or dh is None or adapters is None:
            return
        assert adapters.grad_A_PI is not None
        add_mm_float32(adapters.grad_A_PI, dh.t(), x, scale=self._scale)
        for each in adapters.products:
            assert each.grad_B_OR is not None
            columns = dy.narrow(1, each.column, each.size)
            own = h.narrow(1, each.shrunk, adapters.rank)
            add_mm_float32(each.grad_B_OR, columns.t(), own, scale=self._scale)

    def _of_input(self, target: int, sizes: Sequence[int]) -> _InputAdapters | None:
        if target not in self._inputs:
            self._inputs[target] = self._make(target, sizes)
        return self._inputs[target]

    def _make(self, target: int, sizes: Sequence[int]) -> _InputAdapters | None:
        pairs, products, column = list[Pair](), list[_Product](), 0
        for j, size in enumerate(sizes):
            if (pair := self._pairs[target + j]) is not None:
                shrunk = sum(len(each.A_RI) for each in pairs)
                products.append(
                    _Product(column, size, shrunk, pair.B_OR, pair.B_OR.t(), pair.grad_B_OR)
                )
                pairs.append(pair)
            column += size
        if not pairs:
            return None
        A_PI = _stacked([pair.A_RI for pair in pairs])
        grads = [pair.grad_A_RI for pair in pairs if pair.grad_A_RI is not None]
        grad_A_PI = _stacked(grads) if grads else None
        return _InputAdapters(len(pairs[0].A_RI), A_PI, A_PI.t(), grad_A_PI, products)


def _stacked(matrices: Sequence[Tensor]) -> Tensor:
    """Equal matrices that are adjacent in memory, as one."""
    first = matrices[0]
    return first.as_strided((len(matrices) * len(first), first.shape[1]), first.stride())


class ManyAdapters(Adapters):
    """
    Several adapters, each for its own tokens, in one kernel for all of them.

    x Aᵀ and dy B have the scale of their adapter as a factor already.
    """

    def __init__(self, tables: kernels.LoraTables) -> None:
        self._tables = tables

    def add(self, target: int, x: Tensor, y: Tensor, sizes: Sequence[int]) -> Tensor:
        h = kernels.shrink(x, self._tables, target, len(sizes))
        kernels.expand(y, h, self._tables, target, sizes)
        return h

    def add_gradient(self, target: int, dy: Tensor, dx: Tensor, sizes: Sequence[int]) -> Tensor:
        dh = kernels.shrink_gradient(dy, self._tables, target, sizes)
        kernels.expand_gradient(dx, dh, self._tables, target, len(sizes))
        return dh

    def add_weight_gradients(
        self,
        target: int,
        x: Tensor,
        h: Tensor | None,
        dy: Tensor,
        dh: Tensor | None,
        sizes: Sequence[int],
    ) -> None:
        assert h is not None
        assert dh is not None
        kernels.add_weight_gradients(x, h, dy, dh, self._tables, target, sizes)


def adapters_of(
    segments: Sequence[AdapterSegment], tokens: int, weights: StackedWeights
) -> Adapters:
    if not segments:
        return Adapters()
    only = segments[0]
    if len(segments) == 1 and (only.start, only.stop) == (0, tokens):
        scale = next(iter(only.pairs.values())).scale
        return OneAdapter([only.pairs.get(name) for name in weights.targets], scale)
    return ManyAdapters(_tables(segments, weights))


def _tables(segments: Sequence[AdapterSegment], weights: StackedWeights) -> kernels.LoraTables:
    device = weights.embedding.device
    # An adapter has one slot, also if its tokens are in several segments: two programs must not
    # add to one gradient.
    spans: dict[int, list[tuple[int, int]]] = {}
    adapters = {}
    for segment in segments:
        spans.setdefault(id(segment.pairs), []).append((segment.start, segment.stop))
        adapters[id(segment.pairs)] = segment.pairs
    most = max(map(len, spans.values()))
    slots = list(adapters.values())
    grads = [
        pair.grad_A_RI for pairs in slots for pair in pairs.values() if pair.grad_A_RI is not None
    ]
    grad_base = grads[0] if grads else torch.empty(1, device=device)
    rank = 16
    offsets, ranks = [], []
    for pairs in slots:
        own, sizes = addresses(weights.embedding, weights.targets, pairs)
        of_grads = [_grad_offsets(pairs.get(name), grad_base) for name in weights.targets]
        offsets.append([[*a, *b] for a, b in zip(own, of_grads, strict=True)])
        ranks.append(sizes)
        while rank < max(sizes):
            rank *= 2
    tiles = [
        (start, min(start + kernels.TOKENS, stop), slot)
        for slot, parts in enumerate(spans.values())
        for begin, stop in parts
        for start in range(begin, stop, kernels.TOKENS)
    ]
    padded = [parts + [(0, 0)] * (most - len(parts)) for parts in spans.values()]
    scales = [next(iter(pairs.values())).scale for pairs in slots]
    return kernels.LoraTables(
        base=weights.embedding,
        grad_base=grad_base,
        offsets=torch.tensor(offsets, device=device),
        ranks=torch.tensor(ranks, dtype=torch.int32, device=device),
        scales=torch.tensor(scales, device=device),
        spans=torch.tensor(padded, dtype=torch.int32, device=device),
        tiles=torch.tensor(tiles, dtype=torch.int32, device=device),
        rank=rank,
        rank_step=1 if any(size % 8 for sizes in ranks for size in sizes) else 8,
    )


def _grad_offsets(pair: Pair | None, base: Tensor) -> list[int]:
    if pair is None or pair.grad_A_RI is None or pair.grad_B_OR is None:
        return [0, 0]
    size = base.element_size()
    return [
        (grad.data_ptr() - base.data_ptr()) // size for grad in (pair.grad_A_RI, pair.grad_B_OR)
    ]


# -- compiling ------------------------------------------------------------------------------------

#: Kernels are compiled for each of these ranks; other ranks are rounded up.
COMPILED_RANKS = (32, 16, 64, 128)


def compile_kernels(layers: PackedLayers, head: Head, targets: Sequence[Target]) -> None:
    """
    Runs every kernel once, on a few tokens with adapters of zeros.

    The adapters change one layer: all layers have the same kernels, and memory may be short.
    """
    weights = layers.weights
    first = {*weights.targets[:TARGETS]}
    targets = [target for target in targets if target.name in first]
    device, dtype = weights.embedding.device, weights.embedding.dtype
    ids_T = torch.zeros(4, dtype=torch.long, device=device)
    packing = Packing.of([2, 2], device=device)
    for rank in COMPILED_RANKS:
        layout = make_layout(targets, rank)
        adapters = [
            make_pairs(
                layout,
                torch.zeros(layout.size, dtype=dtype, device=device),
                scale=1.0,
                grad=torch.zeros(layout.size, device=device),
            )
            for _ in range(2)
        ]
        segments = [AdapterSegment(2 * at, 2 * at + 2, pairs) for at, pairs in enumerate(adapters)]
        hidden_TH, backward = layers.hidden_with_backward(ids_T, packing, segments)
        backward(torch.zeros_like(hidden_TH))
    logits_TV = head.logits(hidden_TH)
    lse_T = kernels.log_sum_exp(logits_TV)
    g_TK = torch.zeros(4, 1, device=device)
    kernels.logits_gradient(logits_TV, ids_T, lse_T, ids_T.unsqueeze(1), g_TK, dtype)
