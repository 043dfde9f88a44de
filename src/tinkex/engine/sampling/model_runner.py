"""The model runner: lays out the tensors of each step, runs the model, and owns the KV cache.

On a GPU decode steps run as CUDA graphs where they can; see `decode_graphs`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tinkex.engine.adapters.adapters import SamplerAdapter
from tinkex.engine.model.attention import CachedPrefix, CacheLayer, CacheUse, Packing
from tinkex.engine.model.base_model import BaseModel
from tinkex.engine.model.lora import AdapterSegment
from tinkex.engine.sampling.cache_reads import (
    gather_is_cheaper,
    gathered_table,
    plan_range_reads,
    slots_of,
)
from tinkex.engine.sampling.decode_graphs import DecodedTokens, DecodeGraphs
from tinkex.engine.sampling.kv_pages import Pages
from tinkex.engine.sampling.scheduler import CopySlots, PrefillChunk, adapter_ranges
from tinkex.engine.sampling.sequences import AdapterKey, SampleSequence

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
        graphs: bool,
    ) -> None:
        """`adapters` are those in memory; the caller adds and removes them."""
        self._model, self._pages, self._adapters = model, pages, adapters
        with_graphs = graphs and model.fused is not None
        # Not initialized: on a CPU pages take physical memory only once they are written. Graphs
        # need a spare page, for rows that only fill a batch up.
        slots = (pages.count + with_graphs) * pages.size
        self._layers = [
            CacheLayer(
                torch.empty(slots, *shape, dtype=model.dtype, device=model.device),
                torch.empty(slots, *shape, dtype=model.dtype, device=model.device),
            )
            for shape in model.cache_shapes
        ]
        self._graphs: DecodeGraphs | None = None
        if with_graphs:
            self._graphs = DecodeGraphs(
                model, self._layers, pages, max_sequences=max_sequences, max_steps=GRAPH_STEPS
            )

    @property
    def decode_steps(self) -> int:
        """How many tokens of each sequence a decode step should have."""
        return GRAPH_STEPS if self._graphs is not None and self._graphs.active else 1

    def prefill(self, chunks: Sequence[PrefillChunk]) -> PrefillOutput:
        device, pages = self._model.device, self._pages
        lengths = [chunk.stop - chunk.start for chunk in chunks]
        slots = [slots_of(pages, chunk) for chunk in chunks]
        cache = CacheUse(
            layers=self._layers,
            write_slots_T=torch.cat([s[c.start :] for s, c in zip(slots, chunks, strict=True)]).to(
                device
            ),
            prefixes=[
                CachedPrefix.of(s.to(device), c.stop - c.start) if c.start else None
                for s, c in zip(slots, chunks, strict=True)
            ],
        )
        packing = Packing.of(
            lengths, device=device, offsets=[chunk.start for chunk in chunks], cache=cache
        )
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
        hidden_TH = self._model.hidden(torch.tensor(ids, device=device), packing, segments)
        return PrefillOutput(hidden_TH, starts)

    def decode(self, sequences: Sequence[SampleSequence]) -> Tensor:
        """Logits [S, V] of the next token of each sequence. The caller may overwrite them."""
        if self._graphs is not None:
            logits_SV = self._graphs.logits(sequences, self._adapters)
            if logits_SV is not None:
                return logits_SV
        device, pages = self._model.device, self._pages
        positions = [sequence.length - 1 for sequence in sequences]
        write = [
            pages.slot(sequence.page_table, position)
            for sequence, position in zip(sequences, positions, strict=True)
        ]
        rounds = plan_range_reads(pages, sequences) if device.type == "cpu" else None
        if rounds and gather_is_cheaper(rounds, [sequence.length for sequence in sequences]):
            rounds = None
        cache = CacheUse(
            layers=self._layers,
            write_slots_T=torch.tensor(write, device=device),
            rounds=rounds,
            table=None if rounds else gathered_table(pages, sequences, self._model),
        )
        packing = Packing.of([1] * len(sequences), device=device, offsets=positions, cache=cache)
        segments = self.adapter_segments(adapter_ranges(sequences))
        ids = torch.tensor([sequence.tokens[-1] for sequence in sequences], device=device)
        hidden_SH = self._model.hidden(ids, packing, segments)
        return self._model.head.logits(hidden_SH, segments)

    def decode_and_sample(
        self, sequences: Sequence[SampleSequence], steps: int
    ) -> DecodedTokens | None:
        """
        Samples up to `steps` tokens of each sequence on the device; None if it cannot.

        Tokens after the end of a sequence have no meaning.
        """
        if self._graphs is None:
            return None
        return self._graphs.sample(sequences, self._adapters, steps)

    def copy_slots(self, copies: Sequence[CopySlots]) -> None:
        for source, target, length in copies:
            for layer in self._layers:
                for cached in layer:
                    cached[target : target + length] = cached[source : source + length]

    def adapter_segments(
        self, ranges: Sequence[tuple[int, int, AdapterKey]]
    ) -> list[AdapterSegment]:
        return [
            AdapterSegment(start, stop, self._adapters[key].pairs)
            for start, stop, key in ranges
            if key is not None
        ]
