"""The layers of a decode step on a GPU, from few and fused kernels.

Prefill and training run the code of transformers. A decode step has one token for each sequence, so
its time is the reading of weights and cache plus the start of each kernel; transformers' code
starts about sixty kernels for a layer, this one sixteen.

Only for models of the usual form (`stacked_weights`) in bfloat16; others decode with transformers'
code. `probe_logits` shows whether the result is right.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tinkex.engine.model.attention import CacheLayer
from tinkex.engine.model.lm_head import Head
from tinkex.engine.model.stacked_weights import ATTENTION, MLP, StackedLinear, StackedWeights

if TYPE_CHECKING:
    from tinkex.engine.model.decode_kernels import LoraTables

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


class FusedDecoder:
    def __init__(self, weights: StackedWeights, head: Head) -> None:
        self._weights = weights
        self._head = head
        self._side: Any = None
        if weights.embedding.is_cuda:
            self._side = torch.cuda.Stream()  # type: ignore[no-untyped-call]

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

        weights = self._weights
        main = torch.cuda.current_stream() if weights.embedding.is_cuda else None

        def linear(
            x: Tensor, layer: StackedLinear, target: int, projections: int, *, parts: bool = False
        ) -> tuple[Tensor, kernels.Shrunk | None]:
            """The base layer, and beside it the products with A, which read the same input."""
            shrunk = None
            if lora is not None:
                with self._beside(main):
                    shrunk = kernels.shrink(x, lora, target, projections)
            y = kernels.linear(x, layer.weight, layer.bias, parts=parts)
            if lora is not None and main is not None:
                main.wait_stream(self._side)
            return y, shrunk

        x = F.embedding(inputs.ids_B, weights.embedding)
        y: Tensor | None = None
        places: Any = {
            "positions_B": inputs.positions_B,
            "last_B": inputs.last_B,
            "table": inputs.table,
            "page": page,
        }
        for index, (layer, (keys, values)) in enumerate(zip(weights.layers, cache, strict=True)):
            target = index * (len(ATTENTION) + len(MLP))
            normed = kernels.add_norm(x, y, layer.input_norm, weights.eps)
            qkv, shrunk = linear(normed, layer.qkv, target, 3)
            q = kernels.heads(
                qkv,
                keys=keys,
                values=values,
                query_heads=weights.query_heads,
                norms=layer.head_norms,
                eps=weights.head_eps,
                frequencies=weights.frequencies,
                rope_scale=weights.rope_scale,
                spare=spare,
                shrunk=shrunk,
                **places,
            )
            attended = kernels.attend(
                q, keys=keys, values=values, scaling=weights.scaling, **places
            )
            y, shrunk = linear(attended.flatten(1), layer.output, target + 3, 1, parts=True)
            if shrunk is not None:
                kernels.add_expanded(y, shrunk)
            normed = kernels.add_norm(x, y, layer.mlp_norm, weights.eps)
            act = kernels.swiglu(*linear(normed, layer.gate_up, target + 4, 2))
            y, shrunk = linear(act, layer.down, target + 6, 1, parts=True)
            if shrunk is not None:
                kernels.add_expanded(y, shrunk)
        hidden = kernels.add_norm(x, y, weights.norm, weights.eps)
        logits = self._head.logits(hidden)
        if lora is not None and lora_head:
            shrunk = kernels.shrink(hidden, lora, len(weights.targets) - 1, 1)
            kernels.add_expanded(logits, shrunk, exact=True)
        return logits

    @contextlib.contextmanager
    def _beside(self, main: torch.cuda.Stream | None) -> Iterator[None]:
        """
        Runs kernels beside those of the main stream, which must then wait for the side stream.

        Memory made here is used again only for later work beside, which waits for its readers.
        """
        if main is None:
            yield
            return
        self._side.wait_stream(main)
        with torch.cuda.stream(self._side):
            yield

    def probe_logits(self, ids: Tensor) -> Tensor:
        """Logits after the last of a few tokens, which are decoded one by one."""
        weights, page, device = self._weights, 64, ids.device
        shape = (2 * page, weights.key_heads, weights.head_size)
        nan = torch.full(shape, float("nan"), dtype=weights.embedding.dtype, device=device)
        # Filled with NaN, to show whether anything reads what was not written.
        cache = [CacheLayer(nan.clone(), nan.clone()) for _ in weights.layers]
        table = torch.zeros(1, 1, dtype=torch.int32, device=device)
        for position, token in enumerate(ids.tolist()):
            at = torch.full((1,), position, dtype=torch.int32, device=device)
            inputs = DecodeInputs(
                ids_B=torch.full_like(at, token), positions_B=at, last_B=at, table=table
            )
            logits = self.logits(inputs, cache, page=page, spare=1, lora=None)
        return logits[0]
