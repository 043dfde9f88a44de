"""The engine: one base model, its adapters in training, and its samplers. One thread calls it."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import torch

from tinkex.engine.adapters import checkpoints
from tinkex.engine.adapters.adapter_store import AdapterStore
from tinkex.engine.adapters.adapters import (
    SamplerAdapter,
    TrainingAdapter,
    adapter_bytes,
    check_lora,
    check_optimizer,
    chosen_targets,
    seed_of,
)
from tinkex.engine.adapters.memory_plan import FRACTIONS, MemoryPlan, Tier, memory_plan
from tinkex.engine.device import available_bytes, choose_device, choose_dtype, prepare_determinism
from tinkex.engine.model.base_model import BaseModel
from tinkex.engine.model.lora import make_layout
from tinkex.engine.sampling.sampler import Finished, PartialOutput, Sampler
from tinkex.engine.settings import EngineFacts, EngineSettings, EngineStats
from tinkex.engine.training.batch import count_fitting
from tinkex.engine.training.custom_loss_graph import Graph
from tinkex.engine.training.losses import CustomLoss
from tinkex.engine.training.optimizer import optimizer_step
from tinkex.engine.training.passes import Pass, PassSlice, run_micro_batch
from tinkex.engine.training.request_checks import Limits, check_request
from tinkex.wire.custom_loss import CustomLossGraph, CustomLossInput
from tinkex.wire.errors import UserFailure
from tinkex.wire.sampling import SampleRequest
from tinkex.wire.training import (
    ForwardBackwardInput,
    ForwardBackwardOutput,
    LoraConfig,
    OptimizerConfig,
    OptimParams,
    optimizer_config_from,
)

log = logging.getLogger(__name__)

#: LoraSlice of the memory that nobody plans with: fragments, libraries, other programs.
SLACK_FRACTION = 0.05

#: LoraSlice of what is free at start that is planned with when nobody says how much to take.
FREE_FRACTION = {"cpu": 0.5, "cuda": 1.0}

#: Most tokens in one pass when nobody says so: more do not gain speed.
BATCH_TOKENS = {"cpu": 1024, "cuda": 8192}
#: Where the cuts decide about the bits, they stay as they were in the first version.
DETERMINISTIC_BATCH_TOKENS = 8192


class NoSuchModel(UserFailure):
    """This engine does not have that model, though another one may have had it."""


class Engine:
    def __init__(self, settings: EngineSettings) -> None:
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        if settings.deterministic:
            prepare_determinism()
        device = choose_device(settings)
        dtype = choose_dtype(settings, device)
        self.settings = settings
        self.model = BaseModel(settings.folder, device=device, dtype=dtype)
        self.facts = EngineFacts(
            name=settings.name,
            arch=self.model.config.model_type,
            max_context_length=self.model.max_context_length,
            vocab_size=self.model.vocab_size,
            device=str(device),
            dtype=str(dtype).removeprefix("torch."),
        )
        self.limits = Limits(
            vocab_size=self.model.vocab_size, max_context_length=self.model.max_context_length
        )
        self.plan = plan_memory(self.model, settings)
        log.info("memory: %s", self.plan.describe())
        #: What one pass takes at most; a longer single sequence still goes alone.
        self.max_batch_tokens = self.plan.batch_tokens
        self._use_count = itertools.count(1)
        self._adapters = AdapterStore(
            plan=self.plan,
            device=device,
            base_model=settings.name,
            folder=settings.spill_folder,
            host_bytes=settings.host_bytes,
            limit_bytes=settings.memory_bytes,
            clock=self._use_count.__next__,
        )
        self._losses: dict[str, CustomLoss] = {}
        # Made with the first request: a server that only trains needs no cache.
        self._sampler: Sampler | None = None

    # -- models in training -----------------------------------------------------------------------

    def create(self, model_id: str, lora: LoraConfig, optimizer: OptimizerConfig) -> None:
        if model_id in self._adapters:
            raise ValueError(f"model {model_id} exists already.")
        check_lora(lora)
        family = check_optimizer(optimizer)
        targets = chosen_targets(self.model.targets, lora)
        self._adapters.add(
            model_id,
            adapter_bytes(make_layout(targets, lora.rank).size, self.model.dtype),
            f"an adapter of rank {lora.rank}",
            lambda: TrainingAdapter(
                lora=lora,
                targets=targets,
                seed=seed_of(lora, model_id),
                model_dtype=self.model.dtype,
                device=self.model.device,
                optimizer=family,
            ),
        )

    def has(self, model_id: str) -> bool:
        return model_id in self._adapters

    def drop(self, model_id: str) -> None:
        del self._adapters[model_id]

    def run_pass(
        self, model_id: str, work: ForwardBackwardInput, *, backward: bool
    ) -> ForwardBackwardOutput:
        """A pass over the data; `backward` adds to the model's gradient. Losses are sums."""
        training_pass = self.begin_pass(model_id, work, backward=backward)
        while waiting := training_pass.waiting:
            self.run_micro_batch([(training_pass, count_fitting(waiting, self.max_batch_tokens))])
        return training_pass.output()

    def begin_pass(self, model_id: str, work: ForwardBackwardInput, *, backward: bool) -> Pass:
        """The same pass for a caller that runs it step by step. All checks happen here."""
        self._adapter(model_id)
        loss, rows = check_request(work, self.limits, backward=backward, custom=self._losses)
        if backward:
            longest = max(len(row.tokens_N) for row in rows)
            self._adapters.make_pass_room(
                model_id,
                longest * self.model.bytes_per_token,
                f"training on a sequence of {longest} tokens",
                "Selection the sequence",
            )
        return Pass(model_id, loss, rows, backward=backward)

    def resident(self, model_id: str) -> bool:
        """Whether a model's adapter is in the device's memory: it can run without moving others."""
        return model_id in self._adapters and self._adapters.on_device(model_id)

    def run_micro_batch(self, cuts: Sequence[tuple[Pass, int]]) -> None:
        """
        One micro-batch: the next so many rows of each pass.

        All with gradients, or all without. A pass whose own loss fails has its `failure` set; the
        others go on. One whose adapter finds no room beside the others' keeps its rows.
        """
        parts: list[PassSlice] = []
        for training_pass, count in cuts:
            try:
                adapter = self._adapter(training_pass.model_id)
            except UserFailure:
                if not parts:
                    raise
                continue
            part = training_pass.take(count, adapter)
            # Adapters may leave the device between micro-batches, not during one.
            self._adapters.pin(training_pass.model_id, part)
            parts.append(part)
        run_micro_batch(self.model, parts, deterministic=self.settings.deterministic)

    def register_loss(
        self,
        loss_id: str,
        name: str,
        inputs: Sequence[CustomLossInput],
        graph: CustomLossGraph,
    ) -> None:
        """A loss that a user wrote, for passes that name it; `UserFailure` if it is not offered."""
        self._losses[loss_id] = CustomLoss(graph=Graph.rebuild(name, inputs, graph))

    def drop_loss(self, loss_id: str) -> None:
        """Passes that have begun keep theirs."""
        self._losses.pop(loss_id, None)

    def optim_step(self, model_id: str, params: OptimParams) -> dict[str, float]:
        return optimizer_step(self._adapter(model_id), params).metrics()

    def clear_gradients(self, model_id: str) -> None:
        self._adapter(model_id).grad.zero_()

    # -- checkpoints ------------------------------------------------------------------------------

    def save(self, model_id: str, folder: Path, *, optimizer: bool) -> int:
        """Writes an immutable checkpoint, whole or not at all; returns its bytes."""
        return checkpoints.save(
            self._adapter(model_id), folder, base_model=self.settings.name, optimizer=optimizer
        )

    def load(self, model_id: str, folder: Path, *, optimizer: bool) -> None:
        """
        Weights from a checkpoint; without `optimizer` its state starts afresh.

        Gradients that were not stepped are dropped: they belong to the old weights.
        """
        checkpoints.load(self._adapter(model_id), folder, optimizer=optimizer)

    def snapshot(self, model_id: str, folder: Path, meta: Mapping[str, Any]) -> int:
        """A checkpoint with everything, un-stepped gradients and the caller's notes included."""
        return checkpoints.snapshot(
            self._adapter(model_id), folder, base_model=self.settings.name, meta=meta
        )

    def copy_snapshot(self, model_id: str, meta: Mapping[str, Any]) -> checkpoints.Files:
        """The same for a caller that writes it later, in a thread of its own."""
        adapter = self._adapter(model_id)
        return checkpoints.copy_snapshot(adapter, base_model=self.settings.name, meta=meta)

    def restore(self, model_id: str, folder: Path) -> dict[str, Any]:
        """Back to a snapshot, creating the model if need be; returns the caller's notes."""
        if not self.has(model_id):
            notes = checkpoints.read_snapshot_info(folder)
            lora = LoraConfig.model_validate(notes["lora_config"])
            family = {"type": notes.get("optimizer", "adamw")}
            self.create(model_id, lora, optimizer_config_from(family))
        return checkpoints.restore(self._adapter(model_id), folder)

    # -- sampling ---------------------------------------------------------------------------------

    def submit(
        self,
        ticket: int,
        request: SampleRequest,
        *,
        adapter: Path | None,
        owner: str = "",
        streams: bool = False,
    ) -> None:
        """
        Puts a sample in line; `adapter` is an immutable checkpoint folder, None the base.

        The folder is read when the sample's turn comes: what is wrong with it is the outcome then.
        Owners share the sampler evenly, whoever sends more. With `streams` its tokens are in
        `grown` as they are drawn.
        """
        if self._sampler is None:
            self._sampler = Sampler(
                self.model,
                self.settings,
                max_batch_tokens=self.max_batch_tokens,
                kv_tokens=self.plan.kv_tokens,
                must_wait=self._adapters.must_wait,
                make_room=self._adapters.make_adapter_room,
                clock=self._use_count.__next__,
            )
            self._adapters.sampler = self._sampler
            self._adapters.cache_bytes = self.plan.cache
        self._sampler.submit(ticket, request, adapter, owner=owner, streams=streams)

    def cancel(self, ticket: int) -> None:
        if self._sampler is not None:
            self._sampler.cancel(ticket)

    def advance(self, *, wait_for_reads: bool = True) -> list[Finished]:
        """
        Admits what waits and draws a burst of tokens; returns what is answered.

        While nothing can be sampled before an adapter is read from its folder, it waits for that. A
        caller with other work sets `wait_for_reads` to False and looks at `awaited_read`.
        """
        if self._sampler is None:
            return []
        finished = self._sampler.advance()
        if wait_for_reads and not finished and (reading := self._sampler.awaited_read):
            wait([reading])
        return finished

    @property
    def awaited_read(self) -> Future[SamplerAdapter] | None:
        """The read of an adapter without which nothing can be sampled; None if something can."""
        return None if self._sampler is None else self._sampler.awaited_read

    def partial_outputs(self) -> list[PartialOutput]:
        """Tokens of streamed samples that were drawn since this was last asked."""
        return [] if self._sampler is None else self._sampler.partial_outputs()

    def stats(self) -> EngineStats:
        tiers = {tier: self._adapters.usage(tier) for tier in Tier}
        stats = EngineStats(
            memory_bytes=self.plan.total,
            base_bytes=self.plan.base,
            adapter_budget_bytes=self.plan.adapters,
            adapters_resident=tiers[Tier.DEVICE].count,
            adapters_resident_bytes=tiers[Tier.DEVICE].size,
            adapters_on_host=tiers[Tier.HOST].count,
            adapters_on_host_bytes=tiers[Tier.HOST].size,
            adapters_on_disk=tiers[Tier.DISK].count,
            adapters_on_disk_bytes=tiers[Tier.DISK].size,
            batch_tokens=self.max_batch_tokens,
            activation_bytes_per_token=self.model.bytes_per_token,
        )
        if self._sampler is None:
            return stats
        scheduler, adapters = self._sampler.scheduler, self._sampler.adapter_residents()
        pages = scheduler.pages
        return dataclasses.replace(
            stats,
            sampler_adapters=len(adapters),
            sampler_adapters_bytes=sum(adapter.size for adapter in adapters),
            kv_pages=pages.count,
            kv_pages_used=pages.count - pages.available,
            kv_pages_known=pages.idle,
            kv_bytes=self.plan.cache,
            samples_waiting=scheduler.waiting,
            sequences_running=scheduler.training_pass,
        )

    @property
    def sampling(self) -> bool:
        return self._sampler is not None and self._sampler.busy

    def _adapter(self, model_id: str) -> TrainingAdapter:
        try:
            return self._adapters[model_id]
        except KeyError:
            raise NoSuchModel(f"model {model_id!r} does not exist in this engine.") from None


def plan_memory(model: BaseModel, settings: EngineSettings) -> MemoryPlan:
    """The plan from what was measured after loading, and from what somebody asked for."""
    base, kind, free = model.size_bytes, model.device.type, available_bytes(model.device)
    max_batch_tokens = settings.max_batch_tokens or (
        DETERMINISTIC_BATCH_TOKENS if settings.deterministic else BATCH_TOKENS[kind]
    )
    logit_rows = min(model.head.chunk_tokens, max_batch_tokens)
    if settings.memory_bytes is not None:
        total = min(base + free, settings.memory_bytes)
    else:
        total = base + int(FREE_FRACTION[kind] * free)
    return memory_plan(
        total=total,
        base=base,
        # A chunk of logits, its gradient and what is made on the way.
        reserved=int(SLACK_FRACTION * (total - base)) + 3 * 4 * model.vocab_size * logit_rows,
        activation_bytes_per_token=model.bytes_per_token,
        max_batch_tokens=max_batch_tokens,
        kv_bytes_per_token=model.cache_bytes_per_token,
        max_kv_tokens=settings.max_sequences * model.max_context_length,
        fractions=FRACTIONS[kind],
        # Cuts must be a function of the request alone.
        fixed_batch=settings.deterministic,
        kv_tokens=settings.kv_tokens,
        adapter_bytes=settings.adapter_bytes,
    )
