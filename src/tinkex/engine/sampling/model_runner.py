"""The model runner: lays out the tensors of each step, runs the model, and owns the KV cache.

On a GPU there are fast paths: `decode_graphs`, and for models of the usual form `fused_prefill`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tinkex.engine.adapters.adapters import SamplerAdapter
from tinkex.engine.model.attention import (
    CachedPrefix,
    CacheLayer,
    CacheUse,
    Packing,
    StateLayer,
    StateUse,
)
from tinkex.engine.model.base_model import BaseModel
from tinkex.engine.model.image_places import NO_IMAGES, packed_positions
from tinkex.engine.model.lora import AdapterSegment
from tinkex.engine.model.step_memory import GATHERED_BYTES
from tinkex.engine.model.vision_tower import SequencePart
from tinkex.engine.sampling.cache_reads import plan_decode_reads, rectangles, slots_of
from tinkex.engine.sampling.decode_graphs import Burst, DecodeGraphs
from tinkex.engine.sampling.fused_prefill import FusedPrefill
from tinkex.engine.sampling.kernel_compiler import KernelCompiler
from tinkex.engine.sampling.kv_pages import Pages
from tinkex.engine.sampling.scheduler import CopySlots, PrefillChunk, adapter_ranges
from tinkex.engine.sampling.sequences import AdapterKey, SampleSequence
from tinkex.engine.sampling.state_slots import CopyState

# T packed tokens, H hidden size, S sequences, V vocabulary

#: Tokens that a GPU samples before the host looks at them.
GRAPH_STEPS = 8


class PrefillOutput(NamedTuple):
    hidden_TH: Tensor
    #: Chunk i is starts[i] to starts[i + 1].
    starts: Sequence[int]


class ModelRunner:
    def __init__(
        self,
        model: BaseModel,
        pages: Pages,
        adapters: Mapping[str, SamplerAdapter],
        *,
        max_sequences: int,
    ) -> None:
        """`adapters` are those in memory; the caller adds and removes them."""
        self._model, self._pages, self._adapters = model, pages, adapters
        # Not initialized: on a CPU pages take physical memory only once they are written. Graphs need
        # a spare page and a spare state, for rows that only fill a batch up.
        spare = model.decoder is not None
        slots = (pages.count + spare) * pages.size
        self._layers = [
            CacheLayer(
                *(
                    torch.empty(slots, *shape, dtype=model.dtype, device=model.device)
                    for shape in shapes
                )
            )
            for shapes in model.cache_shapes
        ]
        self._layer_bytes_per_token = sum(
            cached[0].nbytes for cached in max(self._layers, key=lambda layer: layer.keys[0].nbytes)
        )
        states = 0 if pages.states is None else pages.states.count + spare
        self._states = {
            at: StateLayer(
                torch.zeros(states, *shapes.conv, dtype=model.dtype, device=model.device),
                torch.zeros(states, *shapes.matrix, device=model.device),
            )
            for at, shapes in model.state_shapes.items()
        }
        self.compiler: KernelCompiler | None = None
        self._graphs: DecodeGraphs | None = None
        self._fused_prefill: FusedPrefill | None = None
        if model.decoder is not None:
            self.compiler = KernelCompiler(model, model.decoder)
            if model.fused is not None:
                self._fused_prefill = FusedPrefill(model, self._layers, pages, self.compiler)
            self._graphs = DecodeGraphs(
                model,
                model.decoder,
                self._layers,
                self._states,
                pages,
                self.compiler,
                max_sequences=max_sequences,
                max_steps=GRAPH_STEPS,
            )

    @property
    def decode_steps(self) -> int:
        """How many tokens of each sequence a decode step should have."""
        return GRAPH_STEPS if self._graphs is not None and self._graphs.usable else 1

    def prefill(self, chunks: Sequence[PrefillChunk]) -> PrefillOutput:
        if self._fused_prefill is not None:
            found_TH = self._fused_prefill.run(chunks, self._adapters)
            if found_TH is not None:
                ends = itertools.accumulate(chunk.stop - chunk.start for chunk in chunks)
                return PrefillOutput(found_TH, [0, *ends])
        device, pages = self._model.device, self._pages
        lengths = [chunk.stop - chunk.start for chunk in chunks]
        slots = [slots_of(pages, chunk) for chunk in chunks]
        cache = CacheUse(
            layers=self._layers,
            write_slots_T=torch.cat([s[c.start :] for s, c in zip(slots, chunks, strict=True)]).to(
                device
            ),
            prefixes=[
                CachedPrefix.of(s.to(device), c.stop - c.start, self._model.dtype)
                if c.start
                else None
                for s, c in zip(slots, chunks, strict=True)
            ],
            **self._state_use(
                [chunk.prefill.states[0] for chunk in chunks if chunk.prefill.states],
                [chunk.start == 0 for chunk in chunks],
            ),
        )
        parts = [
            SequencePart(request.images or NO_IMAGES, chunk.start, chunk.stop, request.owner)
            for chunk in chunks
            for request in [chunk.prefill.request]
        ]
        packing = Packing.of(
            lengths,
            device=device,
            offsets=[chunk.start for chunk in chunks],
            positions=packed_positions([part[:3] for part in parts]),
            cache=cache,
        )
        images = [] if self._model.vision is None else self._model.vision.rows(parts)
        ids = [
            token for chunk in chunks for token in chunk.prefill.tokens[chunk.start : chunk.stop]
        ]
        starts = packing.starts
        segments = self.adapter_segments(
            [
                (start, stop, chunk.prefill.request.adapter)
                for start, stop, chunk in zip(starts, starts[1:], chunks, strict=False)
            ]
        )
        ids_T = torch.tensor(ids, device=device)
        hidden_TH = self._model.hidden(ids_T, packing, segments, images)
        return PrefillOutput(hidden_TH, starts)

    def start_burst(self, sequences: Sequence[SampleSequence], steps: int) -> Burst | None:
        """
        Starts up to `steps` decode steps of each sequence, one for those that need the host.

        None if the device cannot sample by itself.
        """
        if self._graphs is None:
            return None
        return self._graphs.start(sequences, self._adapters, steps)

    def decode(self, sequences: Sequence[SampleSequence]) -> Tensor:
        """The last hidden states [S, H] of one decode step, with the code of transformers."""
        if self._model.device.type == "cpu":
            return self._decode(sequences)
        # All keys of a layer are gathered: not those of too many sequences at once.
        max_slots = GATHERED_BYTES // self._layer_bytes_per_token
        lengths = [sequence.length for sequence in sequences]
        parts = [self._decode(sequences[a:b]) for a, b in rectangles(lengths, max_slots)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _decode(self, sequences: Sequence[SampleSequence]) -> Tensor:
        device, pages = self._model.device, self._pages
        write = [pages.slot(sequence.page_table, sequence.length - 1) for sequence in sequences]
        cache = CacheUse(
            layers=self._layers,
            write_slots_T=torch.tensor(write, device=device),
            reads=plan_decode_reads(pages, sequences, self._model, self._model.windows),
            **self._state_use(
                [sequence.state for sequence in sequences if sequence.state is not None],
                [False] * len(sequences),
            ),
        )
        positions = [sequence.position for sequence in sequences]
        packing = Packing.of([1] * len(sequences), device=device, offsets=positions, cache=cache)
        segments = self.adapter_segments(adapter_ranges(sequences))
        ids = torch.tensor([sequence.tokens[-1] for sequence in sequences], device=device)
        return self._model.hidden(ids, packing, segments)

    def _state_use(self, slots: Sequence[int], are_new: Sequence[bool]) -> dict[str, Any]:
        if not self._states:
            return {}
        device = self._model.device
        use = StateUse(torch.tensor(slots, device=device), torch.tensor(are_new, device=device))
        return {"state_layers": self._states, "states": use}

    def copy_states(self, copies: Sequence[CopyState]) -> None:
        """Makes the copies in their order; those that do not depend on each other together."""
        together: dict[int, int] = {}
        for source, target in copies:
            if source in together:
                self._copy_states(together)
                together = {}
            together[target] = source
        self._copy_states(together)

    def _copy_states(self, sources: Mapping[int, int]) -> None:
        """`sources` are those of each target."""
        if not sources:
            return
        device = self._model.device
        targets, found = (
            torch.tensor([*each], device=device) for each in (sources, sources.values())
        )
        for layer in self._states.values():
            for states in layer:
                states.index_copy_(0, targets, states.index_select(0, found))

    def copy_slots(self, copies: Sequence[CopySlots]) -> None:
        if not copies:
            return
        device = self._model.device
        sources, targets = (
            torch.cat([torch.arange(each[at], each[at] + each.length) for each in copies]).to(
                device
            )
            for at in (0, 1)
        )
        for layer in self._layers:
            for cached in layer:
                cached.index_copy_(0, targets, cached.index_select(0, sources))

    def adapter_segments(
        self, ranges: Sequence[tuple[int, int, AdapterKey]]
    ) -> list[AdapterSegment]:
        return [
            AdapterSegment(start, stop, self._adapters[key].pairs)
            for start, stop, key in ranges
            if key is not None
        ]
