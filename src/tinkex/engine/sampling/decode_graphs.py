"""Decode steps on a GPU as CUDA graphs: one launch for a whole step, several steps for one look.

A graph is recorded for a number of rows (a bucket; spare rows compute nothing that anyone reads)
and for the largest rank of the adapters. Its inputs are tensors that stay where they are. After
each step the graph itself writes the next ids, positions and so on, so several steps run without
the host, which then reads their tokens from a ring.

Kernels are compiled by a thread in the background; until they are ready, and for whatever graphs
cannot do, the caller decodes with the code of transformers. The first use compares the logits of
this path with those of the original model.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tinkex.engine.adapters.adapters import SamplerAdapter
from tinkex.engine.device import is_device_lost
from tinkex.engine.model.attention import CacheLayer
from tinkex.engine.model.base_model import TOLERANCE, BaseModel
from tinkex.engine.model.fused_decoder import MAX_RANK, DecodeInputs
from tinkex.engine.model.lm_head import HEAD
from tinkex.engine.sampling.kv_pages import Pages, PageTable
from tinkex.engine.sampling.sequences import SampleSequence
from tinkex.engine.sampling.token_sampling import sample_key

log = logging.getLogger(__name__)

# B rows of a graph, S sequences, V vocabulary

#: The row counts of graphs: doubling, then steps that add at most a quarter.
BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 128, 160, 192, 224, 256)

#: Fields of a row, all of 32 bits, in the order of the state tensor.
IDS, POSITION, LAST, SLOT, STEP, TICK, TEMPERATURE, KEY_LOW, KEY_HIGH = range(9)


class DecodedTokens(NamedTuple):
    #: [steps, S]
    tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]


@dataclass(frozen=True)
class Recipe:
    """What a graph is recorded for."""

    rows: int
    #: Whether it samples, or ends with the logits.
    samples: bool
    #: The largest rank, rounded up; 0 without adapters.
    rank: int = 0
    #: A divisor of all ranks.
    rank_step: int = 8
    #: Whether an adapter changes the output projection.
    head: bool = False


@dataclass(frozen=True, kw_only=True)
class _Recorded:
    graph: torch.cuda.CUDAGraph
    logits_BV: Tensor | None


class _State:
    """The tensors that a graph reads and writes. The background thread has its own."""

    def __init__(
        self, device: torch.device, *, rows: int, pages: int, slots: int, targets: int, steps: int
    ) -> None:
        # A multiple of 16, so that every field is aligned.
        rows = -(-rows // 16) * 16
        self.fields = torch.zeros(9, rows, dtype=torch.int32, device=device)
        self.fields[[LAST, SLOT]] = -1
        self.table = torch.zeros(rows, pages, dtype=torch.int32, device=device)
        self.offsets = torch.zeros(slots, targets, 2, dtype=torch.int64, device=device)
        self.ranks = torch.zeros(slots, targets, dtype=torch.int32, device=device)
        self.scales = torch.zeros(slots, dtype=torch.float32, device=device)
        #: Tokens and logprobs of each step.
        self.ring = torch.zeros(2, steps, rows, dtype=torch.int32, device=device)


class DecodeGraphs:
    def __init__(
        self,
        model: BaseModel,
        cache: Sequence[CacheLayer],
        pages: Pages,
        *,
        max_sequences: int,
        max_steps: int,
    ) -> None:
        assert model.fused is not None
        assert model.stacked is not None
        self._fused, self._weights = model.fused, model.stacked
        self._model, self._cache, self._pages = model, cache, pages
        self._max_steps = max_steps
        self._buckets = [size for size in BUCKETS if size < max_sequences] + [max_sequences]
        self._sizes = {
            "rows": max_sequences,
            "pages": min(pages.needed(model.max_context_length), pages.count),
            "slots": max_sequences,
            "targets": len(self._weights.targets),
            "steps": max_steps,
        }
        self._state = _State(model.device, **self._sizes)
        # Pinned, so that a copy to the device does not wait.
        self._host = torch.zeros_like(self._state.fields, device="cpu").pin_memory()
        self._host_table = torch.zeros_like(self._state.table, device="cpu").pin_memory()
        #: What the rows of the host's table hold.
        self._tabled: list[tuple[PageTable, int] | None] = [None] * len(self._host_table)
        #: The adapters in the tables on the device, as long as they are in memory.
        self._slots: list[weakref.ref[SamplerAdapter]] = []
        self._graphs: dict[Recipe, _Recorded] = {}
        self._pool: Any = None
        self._compiled: set[Recipe] = set()
        self._refused: set[Recipe] = set()
        self._compiler = ThreadPoolExecutor(1, "tinkex-kernels")
        self._compiling: tuple[Recipe | None, Future[None]] | None = None
        #: For tests and benchmarks: wait for the compiler.
        self.waits = False
        #: Whether the first comparison has succeeded; None before it.
        self._correct: bool | None = None

    @property
    def active(self) -> bool:
        """Whether graphs can be used at all. Starts the first comparison."""
        if self._correct is None:
            self._advance(None)
        return bool(self._correct)

    def sample(
        self,
        sequences: Sequence[SampleSequence],
        adapters: Mapping[str, SamplerAdapter],
        steps: int,
    ) -> DecodedTokens | None:
        """Samples `steps` tokens of each sequence; None if there is no graph for them yet."""
        if any(sequence.request.sampling.needs_host for sequence in sequences):
            return None
        recorded = self._prepare(sequences, adapters, steps=steps, samples=True)
        if recorded is None:
            return None
        for _ in range(steps):
            recorded.graph.replay()
        ring = self._state.ring[:, :steps, : len(sequences)].cpu().numpy()
        return DecodedTokens(ring[0], ring[1].view(np.float32))

    def logits(
        self, sequences: Sequence[SampleSequence], adapters: Mapping[str, SamplerAdapter]
    ) -> Tensor | None:
        """Logits [S, V] of the next token of each sequence; None if there is no graph yet."""
        if not self.active:
            return None
        recorded = self._prepare(sequences, adapters, steps=1, samples=False)
        if recorded is None:
            return None
        recorded.graph.replay()
        assert recorded.logits_BV is not None
        return recorded.logits_BV[: len(sequences)]

    # -- inputs -----------------------------------------------------------------------------------

    def _prepare(
        self,
        sequences: Sequence[SampleSequence],
        adapters: Mapping[str, SamplerAdapter],
        *,
        steps: int,
        samples: bool,
    ) -> _Recorded | None:
        """Finds the graph and copies the inputs to the device."""
        used: dict[str, SamplerAdapter] = {}
        for sequence in sequences:
            if (key := sequence.request.adapter) is not None:
                used[key] = adapters[key]
        recipe = self._recipe(len(sequences), samples, list(used.values()))
        recorded = None if recipe is None else self._find(recipe)
        if recorded is None:
            return None
        self._upload_adapters(list(used.values()))
        self._upload_rows(sequences, {key: at for at, key in enumerate(used)}, steps)
        return recorded

    def _recipe(
        self, count: int, samples: bool, adapters: Sequence[SamplerAdapter]
    ) -> Recipe | None:
        rows = next((size for size in self._buckets if size >= count), None)
        if rows is None:
            return None
        if not adapters:
            return Recipe(rows, samples)
        ranks = [adapter.rank for adapter in adapters]
        if max(ranks) > MAX_RANK:
            return None
        rank = 16
        while rank < max(ranks):
            rank *= 2
        return Recipe(
            rows,
            samples,
            rank,
            1 if any(each % 8 for each in ranks) else 8,
            any(HEAD in adapter.pairs for adapter in adapters),
        )

    def _upload_adapters(self, adapters: list[SamplerAdapter]) -> None:
        state = self._state
        for slot, adapter in enumerate(adapters):
            if slot < len(self._slots) and self._slots[slot]() is adapter:
                continue
            offsets, ranks = self._weights.addresses(adapter.pairs)
            state.offsets[slot] = torch.tensor(offsets)
            state.ranks[slot] = torch.tensor(ranks, dtype=torch.int32)
            state.scales[slot] = adapter.scale
        self._slots[: len(adapters)] = map(weakref.ref, adapters)

    def _upload_rows(
        self, sequences: Sequence[SampleSequence], slots: Mapping[str, int], steps: int
    ) -> None:
        count, fields = len(sequences), self._host.numpy()
        fields[:] = 0
        fields[[LAST, SLOT]] = -1
        positions = [sequence.length - 1 for sequence in sequences]
        fields[IDS, :count] = [sequence.tokens[-1] for sequence in sequences]
        fields[POSITION, :count] = positions
        fields[LAST, :count] = [
            position + min(steps, sequence.tokens_left) - 1
            for position, sequence in zip(positions, sequences, strict=True)
        ]
        if slots:
            fields[SLOT, :count] = [
                -1 if sequence.request.adapter is None else slots[sequence.request.adapter]
                for sequence in sequences
            ]
        fields[STEP, :count] = [len(sequence.tokens) for sequence in sequences]
        fields[TEMPERATURE, :count] = np.array(
            [sequence.request.sampling.temperature for sequence in sequences], np.float32
        ).view(np.int32)
        keys = np.array(
            [sample_key(each.request.sampling.seed, each.index) for each in sequences], np.uint64
        )
        fields[KEY_LOW, :count] = keys.astype(np.uint32).view(np.int32)
        fields[KEY_HIGH, :count] = (keys >> np.uint64(32)).astype(np.uint32).view(np.int32)
        self._state.fields.copy_(self._host, non_blocking=True)
        table, changed = self._host_table.numpy(), False
        for row, sequence in enumerate(sequences):
            pages = sequence.page_table
            known, size = self._tabled[row], pages.page_count
            if known is not None and known[0] is pages and known[1] == size:
                continue
            self._tabled[row], changed, begin = (pages, size), True, 0
            for extent in pages.extents:
                table[row, begin : begin + extent.count] = np.arange(
                    extent.first, extent.first + extent.count
                )
                begin += extent.count
        if changed:
            self._state.table[:count].copy_(self._host_table[:count], non_blocking=True)

    # -- graphs -----------------------------------------------------------------------------------

    def _find(self, recipe: Recipe) -> _Recorded | None:
        """The graph of a recipe, or meanwhile one with more rows."""
        if not self.active:
            return None
        if recipe not in self._graphs and recipe not in self._refused:
            self._advance(recipe)
        for rows in self._buckets:
            if rows >= recipe.rows and (found := self._graphs.get(replace(recipe, rows=rows))):
                return found
        return None

    def _advance(self, recipe: Recipe | None) -> None:
        """Makes progress: compiles in the background, records what was compiled. None: compares."""
        if self._compiling is not None:
            wanted, future = self._compiling
            if self.waits:
                wait([future])
            if not future.done():
                return
            self._compiling = None
            try:
                future.result()
            except Exception as error:  # noqa: BLE001  a compiler may raise anything
                self._refuse(wanted, error)
                return
            if wanted is None:
                self._correct = True
                log.info("decode steps run as CUDA graphs from now on")
            else:
                self._compiled.add(wanted)
        if recipe is not None and recipe in self._compiled:
            try:
                self._graphs[recipe] = self._record(recipe)
            except Exception as error:  # noqa: BLE001  the other path still works
                self._refuse(recipe, error)
        elif recipe is not None or self._correct is None:
            self._compiling = (recipe, self._compiler.submit(self._compile, recipe))
            if self.waits:
                self._advance(recipe)

    def _refuse(self, recipe: Recipe | None, error: Exception) -> None:
        if is_device_lost(error):
            raise error
        if recipe is None:
            self._correct = False
            log.warning("decode steps run without CUDA graphs, which is slower", exc_info=error)
        else:
            self._refused.add(recipe)
            log.warning("no CUDA graph for %s; decoding is slower", recipe, exc_info=error)

    def _compile(self, recipe: Recipe | None) -> None:
        """Runs in the background: a step of rows that nobody reads compiles every kernel."""
        stream = torch.cuda.Stream(self._model.device)  # type: ignore[no-untyped-call]
        with torch.inference_mode(), torch.cuda.stream(stream):
            if recipe is None:
                self._compare()
            else:
                state = _State(self._model.device, **{**self._sizes, "pages": 1})
                self._step(recipe, state)
            stream.synchronize()

    def _compare(self) -> None:
        ids, expected_V = self._model.probed
        found_V = self._fused.probe_logits(ids)
        gap = (found_V - expected_V).abs().max() / expected_V.abs().max().clamp(min=1e-6)
        if not gap < TOLERANCE[self._model.dtype]:
            raise ArithmeticError(f"its logits differ from the original model's by {gap:.1e}")

    def _record(self, recipe: Recipe) -> _Recorded:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits_BV = self._step(recipe, self._state)
        # Memory of the logits is used again by other graphs, unless the caller reads them.
        return _Recorded(graph=graph, logits_BV=None if recipe.samples else logits_BV)

    def _step(self, recipe: Recipe, state: _State) -> Tensor:
        from tinkex.engine.model import decode_kernels as kernels

        fields = state.fields[:, : recipe.rows]
        lora = None
        if recipe.rank:
            lora = kernels.LoraTables(
                base=self._weights.embedding,
                offsets=state.offsets,
                ranks=state.ranks,
                scales=state.scales,
                slots_B=fields[SLOT],
                rank=recipe.rank,
                rank_step=recipe.rank_step,
            )
        logits_BV = self._fused.logits(
            DecodeInputs(
                ids_B=fields[IDS],
                positions_B=fields[POSITION],
                last_B=fields[LAST],
                table=state.table,
            ),
            self._cache,
            page=self._pages.size,
            spare=self._pages.count,
            lora=lora,
            lora_head=recipe.head,
        )
        if recipe.samples:
            kernels.sample(
                logits_BV,
                temperatures_B=fields[TEMPERATURE].view(torch.float32),
                keys_2B=fields[KEY_LOW:],
                steps_B=fields[STEP],
                ids_B=fields[IDS],
                positions_B=fields[POSITION],
                ticks_B=fields[TICK],
                ring_tokens=state.ring[0],
                ring_logprobs=state.ring[1].view(torch.float32),
            )
        return logits_BV
