"""Decode steps on a GPU as CUDA graphs: one launch for a whole step, several steps for one look.

A graph is recorded for a number of rows (a bucket; spare rows compute nothing that anyone reads)
and for the largest rank of the adapters. Its inputs are tensors that stay where they are. After
each step the graph itself writes the next ids, positions and so on, so several steps run without
the host, which then reads their tokens from a ring. Rows whose tokens the host must sample stay at
their position: each step computes them again, and the host reads their logits after the last step.

Models of the usual form have layers of few kernels for this (`fused_decoder`), others run their own
(`original_decoder`). Kernels are compiled in the background; until they are ready, and for whatever
graphs cannot do, the caller decodes step by step.

A recurrent state must not take in a token twice. A row that is computed again writes its state in the
last step of the burst only, and a row past its last token never does.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tinkex.engine.adapters.adapters import SamplerAdapter
from tinkex.engine.model.attention import CacheLayer, StateLayer
from tinkex.engine.model.base_model import BaseModel
from tinkex.engine.model.fused_decoder import MAX_RANK, DecodeInputs, StateInputs
from tinkex.engine.model.lora import addresses
from tinkex.engine.model.original_decoder import StepDecoder
from tinkex.engine.model.targets import HEAD
from tinkex.engine.sampling.decode_rows import (
    FIELDS,
    IDS,
    KEY_HIGH,
    KEY_LOW,
    LAST,
    POSITION,
    REPEATS,
    SHIFT,
    SLOT,
    STATE,
    STEP,
    TEMPERATURE,
    TICK,
    DecodeRows,
    pad_biases,
)
from tinkex.engine.sampling.kernel_compiler import COMPARISON, KernelCompiler
from tinkex.engine.sampling.kv_pages import Pages
from tinkex.engine.sampling.sequences import DEVICE_BIASES, SampleSequence

# B rows of a graph, S sequences, V vocabulary

#: The row counts of graphs: doubling, then steps that add at most a quarter.
BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 128, 160, 192, 224, 256)


class DecodedTokens(NamedTuple):
    """Tokens after the end of a sequence, and those of rows of the host, have no meaning."""

    #: [steps, S]
    tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]


class Burst:
    """Steps that the device may still be computing."""

    def __init__(self, logits_SV: Tensor, ring: Tensor) -> None:
        #: Of the last step. Valid until the next burst.
        self.logits_SV = logits_SV
        self._ring = ring

    def read(self) -> DecodedTokens:
        """Waits for the device."""
        ring = self._ring.cpu().numpy()
        return DecodedTokens(ring[0], ring[1].view(np.float32))


class Ranks(NamedTuple):
    """What kernels must know of the ranks of the adapters in a step."""

    #: The largest, rounded up; 0 without adapters.
    largest: int = 0
    #: A divisor of all of them.
    step: int = 8

    @classmethod
    def of(cls, adapters: Sequence[SamplerAdapter]) -> Ranks | None:
        """None if a rank is too large for the kernels."""
        if not adapters:
            return cls()
        ranks = [adapter.rank for adapter in adapters]
        if max(ranks) > MAX_RANK:
            return None
        largest = 16
        while largest < max(ranks):
            largest *= 2
        return cls(largest, 1 if any(each % 8 for each in ranks) else 8)


@dataclass(frozen=True)
class Recipe:
    """What a graph is recorded for."""

    rows: int
    ranks: Ranks
    #: Whether an adapter changes the output projection.
    head: bool
    #: Whether biases are added to the logits of some rows.
    biased: bool


class _State:
    """The tensors that a graph reads and writes. The background thread has its own."""

    def __init__(
        self,
        device: torch.device,
        *,
        rows: int,
        pages: int,
        slots: int,
        targets: int,
        steps: int,
        vocabulary: int,
        spare_state: int,
    ) -> None:
        # A multiple of 16, so that every field is aligned.
        rows = -(-rows // 16) * 16
        self.fields = torch.zeros(FIELDS, rows, dtype=torch.int32, device=device)
        self.fields[[LAST, SLOT]] = -1
        self.fields[STATE] = spare_state
        self.table = torch.zeros(rows, pages, dtype=torch.int32, device=device)
        self.offsets = torch.zeros(slots, targets, 2, dtype=torch.int64, device=device)
        self.ranks = torch.zeros(slots, targets, dtype=torch.int32, device=device)
        self.scales = torch.zeros(slots, dtype=torch.float32, device=device)
        self.counter = torch.zeros(1, dtype=torch.int32, device=device)
        #: Tokens and logprobs of each step.
        self.ring = torch.zeros(2, steps, rows, dtype=torch.int32, device=device)
        #: Token ids and what is added to their logits; unused places add 0 to token 0.
        self.bias_tokens = torch.zeros(rows, DEVICE_BIASES, dtype=torch.int64, device=device)
        self.biases = torch.zeros(rows, DEVICE_BIASES, dtype=torch.float32, device=device)
        self.logits = torch.empty(rows, vocabulary, dtype=torch.float32, device=device)


class CannotRecord(Exception):
    """The code of the model waits for the device, so it would with every number of rows."""


class DecodeGraphs:
    def __init__(
        self,
        model: BaseModel,
        decoder: StepDecoder,
        cache: Sequence[CacheLayer],
        states: Mapping[int, StateLayer],
        pages: Pages,
        compiler: KernelCompiler,
        *,
        max_sequences: int,
        max_steps: int,
    ) -> None:
        """The last page of `cache` and the last slot of `states` are spare."""
        self._compiler = compiler
        self._model, self._decoder = model, decoder
        self._cache, self._states, self._pages = cache, states, pages
        self._buckets = [size for size in BUCKETS if size < max_sequences] + [max_sequences]
        self._sizes = {
            "rows": max_sequences,
            "pages": min(pages.needed(model.max_context_length), pages.count),
            "slots": max_sequences,
            "targets": len(decoder.targets),
            "steps": max_steps,
            "vocabulary": model.vocab_size,
            "spare_state": 0 if pages.states is None else pages.states.count,
        }
        self._state = _State(model.device, **self._sizes)
        # Pinned, so that a copy to the device does not wait.
        self._host_fields = torch.zeros_like(self._state.fields, device="cpu").pin_memory()
        self._host_table = torch.zeros_like(self._state.table, device="cpu").pin_memory()
        self._rows = DecodeRows(
            self._host_fields.numpy(),
            self._host_table.numpy(),
            spare_state=self._sizes["spare_state"],
        )
        #: The adapters in the tables on the device, as long as they are in memory.
        self._slots: list[weakref.ref[SamplerAdapter]] = []
        self._graphs: dict[Recipe, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None

    @property
    def usable(self) -> bool:
        return self._compiler.usable

    def start(
        self,
        sequences: Sequence[SampleSequence],
        adapters: Mapping[str, SamplerAdapter],
        steps: int,
    ) -> Burst | None:
        """
        Starts `steps` decode steps; None if there is no graph for them yet.

        The previous burst must have been read.
        """
        rows, state, count = self._rows, self._state, len(sequences)
        rows.choose(sequences)
        used = [adapters[key] for key in rows.adapters]
        recipe = self._recipe(count, used, rows.biased)
        graph = None if recipe is None else self._find(recipe)
        if graph is None:
            return None
        self._upload_adapters(used)
        if rows.update(sequences, steps):
            state.table[:count].copy_(self._host_table[:count], non_blocking=True)
        state.fields.copy_(self._host_fields, non_blocking=True)
        if rows.biased:
            self._upload_biases(sequences)
        for _ in range(steps):
            graph.replay()
        return Burst(state.logits[:count], state.ring[:, :steps, :count])

    # -- inputs -----------------------------------------------------------------------------------

    def _recipe(
        self, count: int, adapters: Sequence[SamplerAdapter], biased: bool
    ) -> Recipe | None:
        rows = next((size for size in self._buckets if size >= count), None)
        if rows is None:
            return None
        ranks = Ranks.of(adapters)
        if ranks is None:
            return None
        head = any(HEAD in adapter.pairs for adapter in adapters)
        return Recipe(rows, ranks, head, biased)

    def _upload_adapters(self, adapters: list[SamplerAdapter]) -> None:
        state = self._state
        for slot, adapter in enumerate(adapters):
            if slot < len(self._slots) and self._slots[slot]() is adapter:
                continue
            # Known again only after all copies: one of them may fail.
            del self._slots[slot:]
            decoder = self._decoder
            offsets, ranks = addresses(decoder.embedding, decoder.targets, adapter.pairs)
            state.offsets[slot] = torch.tensor(offsets)
            state.ranks[slot] = torch.tensor(ranks, dtype=torch.int32)
            state.scales[slot] = adapter.scale
            self._slots.append(weakref.ref(adapter))

    def _upload_biases(self, sequences: Sequence[SampleSequence]) -> None:
        tokens, biases = pad_biases(sequences)
        self._state.bias_tokens[: len(sequences)] = torch.from_numpy(tokens)
        self._state.biases[: len(sequences)] = torch.from_numpy(biases)

    # -- graphs -----------------------------------------------------------------------------------

    def _find(self, recipe: Recipe) -> torch.cuda.CUDAGraph | None:
        """The graph of a recipe, or meanwhile one with more rows."""
        if not self._compiler.usable:
            return None
        compiler = self._compiler
        if (
            recipe not in self._graphs
            and compiler.ready(recipe, lambda: self._dry(recipe))
            and not compiler.busy
        ):
            try:
                self._graphs[recipe] = self._record(recipe)
            except CannotRecord as error:
                self._compiler.refuse(COMPARISON, error)
            except Exception as error:  # noqa: BLE001  the other path still works
                self._compiler.refuse(recipe, error)
        for rows in self._buckets:
            if rows >= recipe.rows and (found := self._graphs.get(replace(recipe, rows=rows))):
                return found
        return None

    def _dry(self, recipe: Recipe) -> None:
        """Runs in the background: a step of rows that nobody reads compiles every kernel."""
        sizes = {**self._sizes, "rows": recipe.rows, "pages": 1}
        self._step(recipe, _State(self._model.device, **sizes))

    def _record(self, recipe: Recipe) -> torch.cuda.CUDAGraph:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        torch.cuda.synchronize()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                self._step(recipe, self._state)
        except Exception as error:
            # A recording that fails leaves its stream as the current one.
            torch.cuda.set_stream(stream)
            end_allocations(self._pool)
            if not self._graphs:
                # A pool that no graph uses cannot be used again.
                self._pool = None
            if isinstance(error, RuntimeError) and "captur" in str(error):
                raise CannotRecord(f"a step cannot be recorded: {error}") from error
            raise
        return graph

    def _step(self, recipe: Recipe, state: _State) -> None:
        from tinkex.engine.model.decode_ops import LoraTables
        from tinkex.engine.model.sampling_kernels import sample

        fields = state.fields[:, : recipe.rows]
        lora = None
        if recipe.ranks.largest:
            lora = LoraTables(
                base=self._decoder.embedding,
                offsets=state.offsets,
                ranks=state.ranks,
                scales=state.scales,
                slots_B=fields[SLOT],
                rank=recipe.ranks.largest,
                rank_step=recipe.ranks.step,
                counter=state.counter,
            )
        states = None
        if self._states:
            states = StateInputs(
                layers=self._states, slots_B=fields[STATE], repeats_B=fields[REPEATS]
            )
        logits_BV = state.logits[: recipe.rows]
        self._decoder.write_logits(
            DecodeInputs(
                ids_B=fields[IDS],
                positions_B=fields[POSITION],
                last_B=fields[LAST],
                table=state.table,
                shifts_B=fields[SHIFT],
                states=states,
            ),
            self._cache,
            page=self._pages.size,
            spare=self._pages.count,
            lora=lora,
            lora_head=recipe.head,
            out_BV=logits_BV,
        )
        if recipe.biased:
            rows = slice(recipe.rows)
            logits_BV.scatter_add_(1, state.bias_tokens[rows], state.biases[rows])
        sample(
            logits_BV,
            temperatures_B=fields[TEMPERATURE].view(torch.float32),
            keys_2B=fields[KEY_LOW : KEY_HIGH + 1],
            steps_B=fields[STEP],
            ids_B=fields[IDS],
            positions_B=fields[POSITION],
            ticks_B=fields[TICK],
            ring_tokens=state.ring[0],
            ring_logprobs=state.ring[1].view(torch.float32),
        )
        if self._states:
            fields[REPEATS].sub_(1).clamp_(min=0)


def end_allocations(pool: tuple[int, int]) -> None:
    """
    Ends the allocations of a recording on the current device that failed.

    torch does not, if the recording cannot be ended. As long as it takes a recording for underway,
    it returns no cached memory to the device when memory runs out, and starts no other recording.
    """
    device = torch.cuda.current_device()
    try:
        torch._C._cuda_endAllocateToPool(device, pool)
    except RuntimeError:
        return  # torch did
    torch._C._cuda_releasePool(device, pool)
