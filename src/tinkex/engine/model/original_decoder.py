"""Decode steps with the code of transformers, in a form that a CUDA graph can record.

The layers are the model's own, with the parts that this engine replaces. Their inputs are tensors
that stay where they are, and nothing waits for the device: attention finds keys by a table of pages,
adapters are found by tables of addresses, and recurrent layers by slots of states. So a step of any
family is one launch, where Python would start some thousand kernels.

`probe_logits` shows whether the result is right. A family whose code waits for the device cannot be
recorded, and decodes as before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from tinkex.engine.model.attention import (
    CacheLayer,
    CacheShapes,
    CacheUse,
    Packing,
    PagedReads,
    StateLayer,
    StateShapes,
    StateUse,
)
from tinkex.engine.model.device_waits import NothingWaits
from tinkex.engine.model.experts import RoutedTokens
from tinkex.engine.model.fused_decoder import DecodeInputs, StateInputs
from tinkex.engine.model.lm_head import Head
from tinkex.engine.model.lora import RecordedAdapters
from tinkex.engine.model.targets import HEAD, Target

if TYPE_CHECKING:
    from tinkex.engine.model.decode_ops import LoraTables

# B rows of a decode step, V vocabulary

#: Kinds of rotary embeddings whose frequencies the model's code changes while it runs.
CHANGING_ROPE = {"dynamic", "longrope"}


#: Tokens go through the experts that routers choose.
NOT_ROUTED: Mapping[str, RoutedTokens] = MappingProxyType({})

#: Kernels read rows of A in pieces of this many numbers.
MULTIPLE = 8


class StepDecoder(Protocol):
    """What computes the decode steps that a CUDA graph records."""

    @property
    def embedding(self) -> Tensor:
        """The addresses of adapters are counted from here."""

    @property
    def targets(self) -> Sequence[str]:
        """What adapters change, in the order of their tables."""

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
    ) -> None: ...

    def probe_logits(self, ids: Tensor) -> Tensor: ...


def why_not_recorded(model: nn.Module, targets: Sequence[Target]) -> str | None:
    """Why decode steps of this model cannot be CUDA graphs; None if they may be."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        found = set(kinds.values()) if isinstance(kinds, dict) else {kinds}
        # The model's code replaces tensors that a graph would have recorded.
        if found & CHANGING_ROPE:
            return "its rotary embedding changes while it runs"
    for target in targets:
        if target.inputs % MULTIPLE:
            return f"{target.name} has {target.inputs} inputs, not a multiple of {MULTIPLE}"
    return None


class OriginalDecoder:
    def __init__(
        self,
        hidden: Callable[[Tensor, Packing, RecordedAdapters], Tensor],
        *,
        embedding: Tensor,
        head: Head,
        targets: Sequence[str],
        cache_shapes: Sequence[CacheShapes],
        state_shapes: Mapping[int, StateShapes],
        routed: Mapping[str, RoutedTokens],
    ) -> None:
        """
        `hidden` runs the layers without gradients.

        `routed` are the experts that the original model chose for the probe.
        """
        self._hidden, self._head = hidden, head
        self.embedding, self.targets = embedding, targets
        self._places = {name: at for at, name in enumerate(targets)}
        self._cache_shapes, self._state_shapes = cache_shapes, state_shapes
        self._routed = routed

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
        routed: Mapping[str, RoutedTokens] = NOT_ROUTED,
    ) -> None:
        """
        The same as `FusedDecoder.write_logits`; also writes the states of recurrent layers.

        `routed` are experts to use instead of what routers choose.
        """
        packing = step_packing(inputs, cache, page=page, spare=spare)
        adapters = RecordedAdapters(lora, self._places, routed)
        hidden_BH = self._hidden(inputs.ids_B, packing, adapters).contiguous()
        self._head.write_logits(hidden_BH, out_BV)
        if lora is not None and lora_head:
            from tinkex.engine.model import decode_ops as ops

            shrunk = ops.shrink(hidden_BH, lora, self._places[HEAD], 1)
            ops.add_expanded(out_BV, shrunk, exact=True)
        if (softcap := self._head.softcap) is not None:
            out_BV.div_(softcap).tanh_().mul_(softcap)

    def probe_logits(self, ids: Tensor) -> Tensor:
        """
        Logits after the last of a few tokens, which are decoded one by one.

        Tokens go through the experts of the original model: an expert of a near tie may flip.
        Raises `WaitsForDevice` if a graph could not record the steps.
        """
        page, device, like = 64, ids.device, self.embedding
        at = torch.arange(len(ids), dtype=torch.int32, device=device)
        cache = [
            CacheLayer(*(like.new_full((2 * page, *shape), float("nan")) for shape in shapes))
            for shapes in self._cache_shapes
        ]
        states = {
            layer: StateLayer(
                like.new_zeros(2, *shapes.conv),
                torch.zeros(2, *shapes.matrix, device=device),
            )
            for layer, shapes in self._state_shapes.items()
        }
        zeros = torch.zeros(1, dtype=torch.int32, device=device)
        logits_1V = torch.empty(1, self._head.vocab_size, device=device)
        for position in range(len(ids)):
            here = slice(position, position + 1)
            routed = {
                name: RoutedTokens(0, each.index_TK[here], each.weights_TK[here])
                for name, each in self._routed.items()
            }
            inputs = DecodeInputs(
                ids_B=ids[here].int(),
                positions_B=at[here],
                last_B=at[here],
                table=zeros.unsqueeze(0),
                states=StateInputs(layers=states, slots_B=zeros, repeats_B=zeros),
            )
            with NothingWaits(device):
                self.write_logits(
                    inputs, cache, page=page, spare=1, lora=None, out_BV=logits_1V, routed=routed
                )
        return logits_1V[0]


def step_packing(
    inputs: DecodeInputs, cache: Sequence[CacheLayer], *, page: int, spare: int
) -> Packing:
    """
    A decode step as a packed pass of one token for each row, with all numbers on the device.

    Rows past their last token write to the spare page and to the spare state.
    """
    rows, positions_B = len(inputs.ids_B), inputs.positions_B.long()
    in_use_B = inputs.positions_B <= inputs.last_B
    # A row past its last token may be behind its pages.
    column_B = (positions_B // page).clamp_(max=inputs.table.shape[1] - 1)
    pages_B = inputs.table[:rows].gather(1, column_B.unsqueeze(1))[:, 0].long()
    slots_B = pages_B.where(in_use_B, spare) * page + positions_B % page
    states = inputs.states
    use: dict[str, Any] = {}
    if states is not None and states.layers:
        own_B = states.slots_B.long()
        last = len(next(iter(states.layers.values())).matrix) - 1
        written_B = own_B.where(in_use_B & (states.repeats_B == 0), last)
        use = {"state_layers": states.layers, "states": StateUse(own_B, None, written_B)}
    if inputs.shifts_B is not None:
        positions_B = positions_B + inputs.shifts_B
    return Packing(
        lengths=[1] * rows,
        starts=range(rows + 1),
        positions=positions_B.unsqueeze(0),
        starts_int32=torch.arange(rows + 1, dtype=torch.int32, device=positions_B.device),
        cache=CacheUse(
            layers=cache,
            write_slots_T=slots_B,
            paged=PagedReads(inputs.positions_B, inputs.last_B, inputs.table, page),
            **use,
        ),
    )
