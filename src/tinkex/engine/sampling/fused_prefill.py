"""Prefill on a GPU with the fused layers: all chunks of a step in one packed pass.

The keys of a chunk are read from the cache, where its own keys have just been written, so a chunk
that continues a cached prefix is computed like any other.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tinkex.engine.adapters.adapters import SamplerAdapter
from tinkex.engine.model.attention import CacheLayer
from tinkex.engine.model.base_model import BaseModel
from tinkex.engine.model.fused_decoder import KeyReads, PrefillInputs
from tinkex.engine.model.lora import addresses
from tinkex.engine.sampling.decode_graphs import Ranks
from tinkex.engine.sampling.kernel_compiler import KernelCompiler
from tinkex.engine.sampling.kv_pages import Pages
from tinkex.engine.sampling.scheduler import PrefillChunk

if TYPE_CHECKING:
    from tinkex.engine.model.decode_ops import LoraTables

# T packed tokens, H hidden size

#: Keys that are gathered for one attention call. More would need too much memory.
MAX_GATHERED = 1 << 17

#: Up to this many tokens, products with adapters have small tiles and more parts.
FEW_TOKENS = 512
TILES, PARTS = (16, 64), (8, 2)


class PrefillRecipe(NamedTuple):
    """What kernels are compiled for."""

    ranks: Ranks
    many: bool


class FusedPrefill:
    def __init__(
        self, model: BaseModel, cache: Sequence[CacheLayer], pages: Pages, compiler: KernelCompiler
    ) -> None:
        assert model.fused is not None
        assert model.stacked is not None
        self._model, self._fused, self._weights = model, model.fused, model.stacked
        self._cache, self._pages, self._compiler = cache, pages, compiler
        #: Rows of the adapter tables, as long as the adapter is in memory.
        self._rows: weakref.WeakKeyDictionary[SamplerAdapter, tuple[Tensor, Tensor]] = (
            weakref.WeakKeyDictionary()
        )

    def run(
        self, chunks: Sequence[PrefillChunk], adapters: Mapping[str, SamplerAdapter]
    ) -> Tensor | None:
        """The last hidden states [T, H] of all chunks; None if there are no kernels for them."""
        if not self._fused.prefills:
            return None
        keys = dict.fromkeys(chunk.prefill.request.adapter for chunk in chunks)
        used = {key: adapters[key] for key in keys if key is not None}
        ranks = Ranks.of(list(used.values()))
        if ranks is None or not self._compiler.usable:
            return None
        tokens = sum(chunk.stop - chunk.start for chunk in chunks)
        recipe = PrefillRecipe(ranks, tokens > FEW_TOKENS)
        if not self._compiler.ready(recipe, lambda: self._dry(recipe)):
            return None
        order = {key: at for at, key in enumerate(used)}
        slots = [-1 if (key := c.prefill.request.adapter) is None else order[key] for c in chunks]
        inputs, slots_T = self._upload(lay_out(self._pages, chunks, slots, MAX_GATHERED))
        lora = self._tables(recipe, list(used.values()), slots_T) if used else None
        return self._fused.prefill(inputs, self._cache, lora=lora)

    def _upload(self, layout: PrefillLayout) -> tuple[PrefillInputs, Tensor]:
        """One copy to the device. Also returns the adapter slot of each token."""
        pieces = [layout.ids, layout.positions, layout.slots, layout.adapters]
        for read in layout.reads:
            pieces += [read.slots, read.query_starts, read.key_starts]
        # Kernels are compiled for the alignment of their inputs: every piece begins at 64 bytes.
        begins = [0]
        for piece in pieces:
            begins.append(begins[-1] + -(-len(piece) // 16) * 16)
        host = torch.empty(
            begins[-1], dtype=torch.int32, pin_memory=self._model.device.type == "cuda"
        )
        for piece, begin in zip(pieces, begins, strict=False):
            host.numpy()[begin : begin + len(piece)] = piece
        device = host.to(self._model.device, non_blocking=True)
        tensors = [
            device[begin : begin + len(piece)] for piece, begin in zip(pieces, begins, strict=False)
        ]
        ids, positions, slots, adapters, *rest = tensors
        reads = [
            KeyReads(
                queries=read.queries,
                slots=rest[3 * at],
                query_starts=rest[3 * at + 1],
                key_starts=rest[3 * at + 2],
                max_queries=int(np.diff(read.query_starts).max()),
                max_keys=int(np.diff(read.key_starts).max()),
            )
            for at, read in enumerate(layout.reads)
        ]
        inputs = PrefillInputs(ids_T=ids, positions_T=positions, slots_T=slots, reads=reads)
        return inputs, adapters

    def _tables(
        self, recipe: PrefillRecipe, adapters: Sequence[SamplerAdapter], slots_T: Tensor
    ) -> LoraTables:
        device = self._model.device
        for adapter in adapters:
            if adapter not in self._rows:
                found, sizes = addresses(
                    self._weights.embedding, self._weights.targets, adapter.pairs
                )
                self._rows[adapter] = (
                    torch.tensor(found, dtype=torch.int64, device=device),
                    torch.tensor(sizes, dtype=torch.int32, device=device),
                )
        scales = torch.tensor([adapter.scale for adapter in adapters], device=device)
        offsets, ranks = (torch.stack([self._rows[a][at] for a in adapters]) for at in (0, 1))
        return self._lora_tables(recipe, offsets, ranks, scales, slots_T)

    def _lora_tables(
        self,
        recipe: PrefillRecipe,
        offsets: Tensor,
        ranks: Tensor,
        scales: Tensor,
        slots_T: Tensor,
    ) -> LoraTables:
        from tinkex.engine.model.decode_ops import LoraTables

        return LoraTables(
            base=self._weights.embedding,
            offsets=offsets,
            ranks=ranks,
            scales=scales,
            slots_B=slots_T,
            rank=recipe.ranks.largest,
            rank_step=recipe.ranks.step,
            tile=TILES[recipe.many],
            parts=PARTS[recipe.many],
        )

    def _dry(self, recipe: PrefillRecipe) -> None:
        """Runs in the background: tokens of the spare page, which compiles every kernel."""
        count, device = self._pages.size, self._model.device
        first = self._pages.count * count
        starts = np.array([0, count], np.int32)
        own = np.arange(first, first + count, dtype=np.int32)
        layout = PrefillLayout(
            ids=np.zeros(count, np.int32),
            positions=np.arange(count, dtype=np.int32),
            slots=own,
            adapters=np.full(count, -1, np.int32),
            reads=[HostReads(slice(0, count), own, starts, starts)],
        )
        inputs, slots_T = self._upload(layout)
        lora = None
        if recipe.ranks.largest:
            targets = len(self._weights.targets)
            lora = self._lora_tables(
                recipe,
                torch.zeros(1, targets, 2, dtype=torch.int64, device=device),
                torch.zeros(1, targets, dtype=torch.int32, device=device),
                torch.zeros(1, device=device),
                slots_T,
            )
        self._fused.prefill(inputs, self._cache, lora=lora)


Ints = npt.NDArray[np.int32]


class HostReads(NamedTuple):
    """The keys that some adjacent chunks read in one attention call; see `KeyReads`."""

    queries: slice
    slots: Ints
    query_starts: Ints
    key_starts: Ints


class PrefillLayout(NamedTuple):
    """A prefill step on the host: fields of each token, then what attention reads."""

    ids: Ints
    positions: Ints
    slots: Ints
    adapters: Ints
    reads: list[HostReads]


def lay_out(
    pages: Pages,
    chunks: Sequence[PrefillChunk],
    adapters: Sequence[int],
    max_gathered: int,
) -> PrefillLayout:
    """`adapters` are the adapter slots of the chunks."""
    lengths = [chunk.stop - chunk.start for chunk in chunks]
    keys = [
        np.concatenate(
            [
                np.arange(start, stop, dtype=np.int32)
                for start, stop in pages.slot_ranges(chunk.prefill.page_table, chunk.stop)
            ]
        )
        for chunk in chunks
    ]
    reads, begin = [], 0
    for first, last in _groups([len(each) for each in keys], max_gathered):
        ends = np.cumsum([0, *lengths[first:last]], dtype=np.int32)
        reads.append(
            HostReads(
                slice(begin, begin + int(ends[-1])),
                np.concatenate(keys[first:last]),
                ends,
                np.cumsum([0, *map(len, keys[first:last])], dtype=np.int32),
            )
        )
        begin += int(ends[-1])
    return PrefillLayout(
        ids=np.concatenate(
            [np.array(c.prefill.tokens[c.start : c.stop], dtype=np.int32) for c in chunks]
        ),
        positions=np.concatenate([np.arange(c.start, c.stop, dtype=np.int32) for c in chunks]),
        slots=np.concatenate([k[c.start :] for k, c in zip(keys, chunks, strict=True)]),
        adapters=np.repeat(np.array(adapters, np.int32), lengths),
        reads=reads,
    )


def _groups(sizes: Sequence[int], limit: int) -> Iterator[tuple[int, int]]:
    """Ranges of adjacent items, each within the limit or of one item."""
    first, total = 0, 0
    for at, size in enumerate(sizes):
        if at > first and total + size > limit:
            yield first, at
            first, total = at, 0
        total += size
    yield first, len(sizes)
