"""The engine: one base model, its training adapters and its sampler.

Not thread-safe: one thread makes all calls.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import torch

from tinkex.engine.adapters import checkpoints
from tinkex.engine.adapters.adapter_store import AdapterStore, shared_bytes
from tinkex.engine.adapters.adapters import (
    TrainingAdapter,
    adapter_bytes,
    check_lora,
    check_optimizer,
    chosen_targets,
    seed_of,
)
from tinkex.engine.adapters.memory_plan import (
    MIN_TOKENS,
    Tier,
    idle_bytes,
    plan_memory,
)
from tinkex.engine.adapters.model_needs import ModelNeeds, predicted_needs, read_shape
from tinkex.engine.device import (
    available_bytes,
    choose_device,
    choose_dtype,
    prepare_determinism,
    total_bytes,
    used_bytes,
)
from tinkex.engine.images.image_reader import ImageReader
from tinkex.engine.input_checks import NONE_PREPARED, PreparedImages, limits_of
from tinkex.engine.model.base_model import BaseModel
from tinkex.engine.model.model_shape import UnknownShape
from tinkex.engine.model.step_memory import PLANNED_RANK
from tinkex.engine.model.targets import make_layout
from tinkex.engine.model_fit import refuse_too_large, smallest_division
from tinkex.engine.numerics import check_numerics, numerics
from tinkex.engine.ranks.divided_shape import Undivided
from tinkex.engine.ranks.process_group import ProcessGroup, agreed
from tinkex.engine.request_images import (
    NamedInput,
    RequestImages,
    inputs_of,
    most_tokens,
    reader_count,
)
from tinkex.engine.sampling.interface import Finished, PartialOutput, Sampler
from tinkex.engine.sampling.sampler import BatchingSampler
from tinkex.engine.training.batch import count_fitting
from tinkex.engine.training.custom_loss_graph import Graph
from tinkex.engine.training.losses import CustomLoss
from tinkex.engine.training.optimizer import optimizer_step
from tinkex.engine.training.passes import Pass, PassSlice, run_micro_batch
from tinkex.engine.training.request_checks import check_request
from tinkex.models.gguf import GgufError
from tinkex.models.weight_file_checks import RefusedFolder
from tinkex.wire.custom_loss import CustomLossGraph, CustomLossInput
from tinkex.wire.engine_settings import EngineSettings
from tinkex.wire.errors import UserFailure
from tinkex.wire.proto import frames_pb2
from tinkex.wire.sampling import SampleRequest
from tinkex.wire.text_format import format_bytes, memory_text
from tinkex.wire.training import (
    ForwardBackwardInput,
    ForwardBackwardOutput,
    LoraConfig,
    OptimizerConfig,
    OptimParams,
    optimizer_config_from,
)

log = logging.getLogger(__name__)


class NoSuchModel(UserFailure):
    """The model is not in this engine. The server rebuilds it from its log."""


class Engine:
    def __init__(
        self,
        settings: EngineSettings,
        *,
        make_sampler: Callable[..., Sampler] = BatchingSampler,
        group: ProcessGroup | None = None,
    ) -> None:
        """
        `make_sampler` has the parameters of `BatchingSampler`.

        With `group`, this is one rank of several, which all get the same calls (`ranks.engine`).
        """
        self._group = group
        self._make_sampler = make_sampler
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        if settings.deterministic:
            prepare_determinism()
        device = choose_device(settings)
        if device.index is not None:
            # Triton and CUDA graphs use the current device, whatever device their tensors are on.
            torch.cuda.set_device(device)
        dtype = choose_dtype(settings, device)
        self.settings = settings
        numerics_file = settings.numerics_file
        if settings.deterministic and numerics_file is not None:
            found = numerics(
                device, dtype, batch_tokens=settings.max_batch_tokens, ranks=settings.ranks
            )
            agreed(
                group,
                lambda: check_numerics(
                    numerics_file, found, accept=settings.accept_changed_numerics
                ),
            )
        check_size(settings, device, dtype, group)
        self.model = BaseModel(
            settings.folder,
            device=device,
            dtype=dtype,
            # With compiled kernels, the bits depend on when they are ready.
            kernels=settings.compiles and not settings.deterministic,
            group=group,
        )
        self.facts = frames_pb2.Ready(
            arch=self.model.config.model_type,
            max_context_length=self.model.max_context_length,
            vocab_size=self.model.vocab_size,
            device=str(device),
            dtype=str(dtype).removeprefix("torch."),
        )
        self.limits = limits_of(self.model)
        #: Decodes images; None if they are refused. For another thread.
        self.images: RequestImages | None = None
        if self.model.vision is not None and (group is None or not group.rank):
            count = reader_count(os.cpu_count() or 1)
            readers = [ImageReader(settings.folder) for _ in range(count)]
            most = most_tokens(readers[0].rules, available_bytes(checkpoints.HOST))
            self.images = RequestImages(readers, self.limits, max_tokens=most)
        elif self.model.made_for_images and self.model.vision is None:
            log.warning("images are refused: %s", self.model.no_images)
        needs, free = measured_needs(self.model), shared_bytes(device, group)
        # One plan, because what fits decides what runs together.
        self.plan = agreed(group, lambda: plan_memory(needs, settings, free=free))
        self.facts.memory_used_bytes = used_bytes(device)
        self.facts.memory_bytes = self.plan.total
        self.facts.device_bytes = total_bytes(device)
        memory = memory_text(
            used=self.facts.memory_used_bytes,
            limit=self.facts.memory_bytes,
            total=self.facts.device_bytes,
        )
        if group is None or not group.rank:
            each = "" if group is None else f" of each of {group.size} ranks"
            # A record is one line of the log.
            for line in (f"memory{each}: {memory}", *self.plan.table().splitlines()):
                log.info("%s", line)
            log.info("adapters: %s", self.plan.adapters_text())
        #: Maximum tokens of one forward pass. A longer sequence runs alone.
        self.max_batch_tokens = self.plan.batch_tokens
        self._use_count = itertools.count(1)
        self._adapters = AdapterStore(
            plan=self.plan,
            device=device,
            base_model=settings.name,
            folder=settings.spill_folder,
            host_bytes=settings.host_bytes,
            limit_bytes=settings.memory_bytes,
            disk_reserve=settings.disk_reserve_bytes,
            clock=self._use_count.__next__,
            group=group,
        )
        self._losses: dict[str, CustomLoss] = {}
        # Created with the first request: a server that only trains needs no KV cache.
        self._sampler: Sampler | None = None
        self._compiling = threading.Thread(
            target=self.model.prepare_packed_layers, name="tinkex-training-kernels", daemon=True
        )
        self._compiling.start()

    # -- training ---------------------------------------------------------------------------------

    def create(self, model_id: str, lora: LoraConfig, optimizer: OptimizerConfig) -> None:
        if model_id in self._adapters:
            raise ValueError(f"model {model_id} exists already.")
        check_lora(lora)
        family = check_optimizer(optimizer)
        targets = chosen_targets(self.model.targets, lora)
        shard = self.model.shard
        # Parts differ a little; what fits must not.
        counted = targets if shard is None else shard.own_targets(targets, 0)
        self._adapters.add(
            model_id,
            adapter_bytes(make_layout(counted, lora.rank).size, self.model.dtype),
            f"an adapter of rank {lora.rank}",
            lambda: TrainingAdapter(
                lora=lora,
                targets=targets,
                seed=seed_of(lora, model_id),
                model_dtype=self.model.dtype,
                device=self.model.device,
                optimizer=family,
                shard=shard,
            ),
        )

    def has(self, model_id: str) -> bool:
        return model_id in self._adapters

    def drop(self, model_id: str) -> None:
        del self._adapters[model_id]

    @property
    def pass_tokens(self) -> int:
        """Maximum tokens of a training pass now: fewer until fast kernels are compiled."""
        if self.settings.deterministic:
            return self.max_batch_tokens
        fitting = self.plan.activations // self.model.bytes_per_token
        return min(self.max_batch_tokens, max(MIN_TOKENS, fitting))

    def run_pass(
        self, model_id: str, work: ForwardBackwardInput, *, backward: bool
    ) -> ForwardBackwardOutput:
        """Runs a whole pass; `backward` adds to the gradient. Losses are sums over tokens."""
        training_pass = self.begin_pass(model_id, work, backward=backward)
        while waiting := training_pass.waiting:
            self.run_micro_batch([(training_pass, count_fitting(waiting, self.pass_tokens))])
        return training_pass.output()

    def begin_pass(
        self,
        model_id: str,
        work: ForwardBackwardInput,
        *,
        backward: bool,
        images: PreparedImages | None = None,
    ) -> Pass:
        """
        Checks a pass completely. The caller runs it in micro-batches.

        Without `images`, those of its data are decoded now.
        """
        self._adapter(model_id)
        loss, data = check_request(
            work,
            self.limits,
            backward=backward,
            custom=self._losses,
            images=self.prepared(inputs_of(work), images),
        )
        if backward:
            longest = max(len(datum.tokens_N) for datum in data)
            if longest * self.model.bytes_per_token > self.plan.activations:
                # With fused kernels a long sequence takes less memory. They are ready in seconds.
                self._compiling.join()
                self.model.use_packed_layers()
            self._adapters.make_pass_room(
                model_id,
                min(
                    max(longest * self.model.checkpoint_bytes_per_token, self.plan.activations),
                    longest * self.model.bytes_per_token,
                ),
                f"training on a sequence of {longest} tokens",
                "Shorten the sequence",
            )
        return Pass(model_id, loss, data, backward=backward, group=self._group)

    def resident(self, model_id: str) -> bool:
        """Whether the adapter is on the device, so that it can run without evicting others."""
        return model_id in self._adapters and self._adapters.on_device(model_id)

    def run_micro_batch(self, slices: Sequence[tuple[Pass, int]]) -> None:
        """
        Runs one micro-batch with the next `count` data of each pass.

        Either all passes have gradients or none has. If the loss of a pass fails, its `failure` is
        set and the other passes continue. A pass whose adapter does not fit beside the others is
        left out and keeps its data for a later micro-batch.
        """
        self.model.use_packed_layers()
        parts: list[PassSlice] = []
        for training_pass, count in slices:
            try:
                adapter = self._adapter(training_pass.model_id)
            except UserFailure:
                if not parts:
                    raise
                continue
            part = training_pass.take(count, adapter)
            # Adapters may be evicted between micro-batches, not during one.
            self._adapters.pin(training_pass.model_id, part)
            parts.append(part)
        tokens = sum(part.tokens for part in parts)
        run_micro_batch(
            self.model,
            parts,
            deterministic=self.settings.deterministic,
            checkpoint=tokens * self.model.bytes_per_token > self.plan.activations,
        )

    def wait(self) -> None:
        """Waits until the device has computed everything."""
        if self.model.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def register_loss(
        self,
        loss_id: str,
        name: str,
        inputs: Sequence[CustomLossInput],
        graph: CustomLossGraph,
    ) -> None:
        """Registers a user's loss by its id. Raises `UserFailure` if the graph is not allowed."""
        self._losses[loss_id] = CustomLoss(graph=Graph.parse(name, inputs, graph))

    def drop_loss(self, loss_id: str) -> None:
        """Removes a custom loss. Passes that have started keep it."""
        self._losses.pop(loss_id, None)

    def optim_step(self, model_id: str, params: OptimParams) -> dict[str, float]:
        return optimizer_step(self._adapter(model_id), params).metrics()

    def clear_gradients(self, model_id: str) -> None:
        self._adapter(model_id).grad.zero_()

    # -- checkpoints ------------------------------------------------------------------------------

    def save(self, model_id: str, folder: Path, *, optimizer: bool) -> int:
        """Writes an immutable checkpoint atomically and returns its size in bytes."""
        return checkpoints.save(
            self._adapter(model_id),
            folder,
            base_model=self.settings.name,
            optimizer=optimizer,
            reserve=self.settings.disk_reserve_bytes,
        )

    def load(self, model_id: str, folder: Path, *, optimizer: bool) -> None:
        """
        Loads weights from a checkpoint; without `optimizer` the optimizer state is reset.

        Accumulated gradients are dropped, because they belong to the old weights.
        """
        checkpoints.load(self._adapter(model_id), folder, optimizer=optimizer)

    def snapshot_files(self, model_id: str) -> checkpoints.Files:
        """The contents of a snapshot. They change with the model, unless they are copied."""
        return checkpoints.snapshot_files(self._adapter(model_id), self.settings.name)

    def snapshot_bytes(self, model_id: str) -> int:
        """What a snapshot takes on the disk, without gradients."""
        return self._adapter(model_id).snapshot_bytes

    def restore(self, model_id: str, folder: Path) -> None:
        """Restores a snapshot, creating the model if necessary. A failure leaves no new model."""
        is_new = not self.has(model_id)
        if is_new:
            info = checkpoints.read_snapshot_info(folder)
            lora = LoraConfig.model_validate(info["lora_config"])
            family = {"type": info.get("optimizer", "adamw")}
            self.create(model_id, lora, optimizer_config_from(family))
        try:
            checkpoints.restore(self._adapter(model_id), folder)
        except Exception:
            if is_new:
                self.drop(model_id)
            raise

    # -- sampling ---------------------------------------------------------------------------------

    def submit(
        self,
        ticket: int,
        request: SampleRequest,
        *,
        adapter: Path | None,
        owner: str = "",
        streams: bool = False,
        images: PreparedImages | None = None,
    ) -> None:
        """
        Queues a sample request. `adapter` is an immutable checkpoint folder; None is the base model.

        `ticket` is a number that the caller chooses; the results of the request have it. The
        folder is read when the request is admitted; if it is invalid, the request fails then.
        Owners get equal shares of the sampler, however many requests they send. With `streams` the
        tokens are available from `partial_outputs` as they are sampled. Without `images`, those of
        the prompt are decoded now.
        """
        prepared = self.prepared([NamedInput("prompt", request.prompt)], images)
        if self._sampler is None:
            self._sampler = self._make_sampler(
                self.model,
                self.settings,
                max_batch_tokens=self.max_batch_tokens,
                idle_bytes=idle_bytes(self.plan, self.settings),
                kv_tokens=self.plan.kv_tokens,
                states=self.plan.states,
                must_wait=self._adapters.must_wait,
                make_room=self._adapters.make_adapter_room,
                explain_full=self._adapters.explain_full,
                clock=self._use_count.__next__,
            )
            self._adapters.sampler = self._sampler
            self._adapters.cache_bytes = self.plan.cache
        self._sampler.submit(
            ticket, request, adapter, owner=owner, streams=streams, images=prepared
        )

    def cancel(self, ticket: int) -> None:
        if self._sampler is not None:
            self._sampler.cancel(ticket)

    def advance(self, *, wait_for_reads: bool = True) -> list[Finished]:
        """
        Admits waiting requests and samples a burst of tokens; returns the finished requests.

        If every request waits for an adapter to be read, this waits too. A caller with other work
        sets `wait_for_reads` to False and checks `awaited_read`.
        """
        if self._sampler is None:
            return []
        finished = self._sampler.advance()
        if wait_for_reads and not finished and (reading := self._sampler.awaited_read):
            wait([reading])
        return finished

    @property
    def awaited_read(self) -> Future[Any] | None:
        """The adapter read that all sample requests wait for; None if some request can proceed."""
        return None if self._sampler is None else self._sampler.awaited_read

    def partial_outputs(self) -> list[PartialOutput]:
        """Tokens of streamed requests sampled since the last call."""
        return [] if self._sampler is None else self._sampler.partial_outputs()

    def stats(self) -> frames_pb2.Stats:
        """Current sizes and counts."""
        tiers = {tier: self._adapters.usage(tier) for tier in Tier}
        stats = frames_pb2.Stats(
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
            activation_bytes_per_token=self.model.planned_bytes_per_token,
        )
        if self._sampler is not None:
            adapters = self._sampler.adapter_residents()
            stats.sampler_adapters = len(adapters)
            stats.sampler_adapters_bytes = sum(adapter.size for adapter in adapters)
            stats.kv_bytes = self.plan.cache
            for name, value in dataclasses.asdict(self._sampler.stats()).items():
                setattr(stats, name, value)
        return stats

    @property
    def sampling(self) -> bool:
        return self._sampler is not None and self._sampler.busy

    def prepared(
        self, inputs: Sequence[NamedInput], images: PreparedImages | None
    ) -> PreparedImages:
        if images is not None:
            return images
        return NONE_PREPARED if self.images is None else self.images.prepare(inputs)

    def _adapter(self, model_id: str) -> TrainingAdapter:
        try:
            return self._adapters[model_id]
        except KeyError:
            raise NoSuchModel(f"model {model_id!r} does not exist in this engine.") from None


def measured_needs(model: BaseModel) -> ModelNeeds:
    """What a loaded model takes."""
    return ModelNeeds(
        device=model.device.type,
        element=model.dtype.itemsize,
        weights=model.size_bytes,
        vocabulary=model.vocab_size,
        context=model.max_context_length,
        kv_bytes_per_token=model.cache_bytes_per_token,
        activation_bytes_per_token=model.planned_bytes_per_token,
        rank=PLANNED_RANK,
        adapter_numbers=make_layout(model.targets, PLANNED_RANK).size,
        image_bytes_per_token=(
            0 if model.vision is None else model.vision.shape.image_bytes(model.dtype.itemsize)
        ),
        state_bytes=model.state_bytes,
        graphs=model.decoder is not None,
    )


def check_size(
    settings: EngineSettings,
    device: torch.device,
    dtype: torch.dtype,
    group: ProcessGroup | None = None,
) -> None:
    """
    Logs what a model needs, before it is loaded. Raises `DoesNotFit` if it is too large.

    With several ranks, these are the numbers of each.
    """
    try:
        shape = read_shape(settings.folder)
        needs = predicted_needs(
            shape,
            device=device.type,
            element=dtype.itemsize,
            kernels=settings.compiles and not settings.deterministic,
            gpus=settings.ranks,
        )
    except (UnknownShape, Undivided, RefusedFolder, GgufError) as unknown:
        # If the folder is damaged or its family unknown, loading it says so.
        log.info("needs: not known before loading: %s", unknown)
        return
    free = shared_bytes(device, group)
    if group is not None and group.rank:
        return  # rank 0 says it
    form = str(dtype).removeprefix("torch.")
    each = f", on each of {settings.ranks} ranks" if settings.ranks > 1 else ""
    log.info("needs of %s in %s%s, with %s free:", settings.name, form, each, format_bytes(free))
    for line in needs.table().splitlines():
        log.info("%s", line)
    refuse_too_large(
        *(needs, settings),
        free=free,
        division=lambda: (
            smallest_division(shape, settings, element=dtype.itemsize, free=free)
            if device.type == "cuda"
            else None
        ),
    )
