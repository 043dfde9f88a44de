"""The engine: one base model, its adapters in training, and its samplers. One thread calls it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tinkex.engine import checkpoints
from tinkex.engine.adapters import (
    TrainingAdapter,
    adapter_bytes,
    check_lora,
    check_optimizer,
    chosen_targets,
    seed_of,
)
from tinkex.engine.devices import available_bytes, choose_device, choose_dtype
from tinkex.engine.lora import make_layout
from tinkex.engine.model import BaseModel
from tinkex.engine.optimizer import adamw_step, check_params
from tinkex.engine.pack import Limits, check
from tinkex.engine.sampling import Finished, Sampler
from tinkex.engine.settings import EngineFacts, EngineSettings
from tinkex.engine.training import Pass
from tinkex.wire.errors import UserFailure
from tinkex.wire.sampling import SampleRequest
from tinkex.wire.training import (
    AdamOptimizerConfig,
    ForwardBackwardInput,
    ForwardBackwardOutput,
    LoraConfig,
    OptimizerConfig,
    OptimParams,
)

#: Share of the free memory that one training pass may take for what it keeps of its tokens.
TRAINING_SHARE = 0.3


class Engine:
    def __init__(self, settings: EngineSettings) -> None:
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
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
        #: What one pass takes at most; a longer single sequence still goes alone.
        self.max_batch_tokens = settings.max_batch_tokens
        if not settings.deterministic:
            fitting = int(available_bytes(device) * TRAINING_SHARE) // self.model.bytes_per_token
            self.max_batch_tokens = max(1, min(settings.max_batch_tokens, fitting))
        self._adapters: dict[str, TrainingAdapter] = {}
        # Made with the first request: a server that only trains needs no cache.
        self._sampler: Sampler | None = None

    # -- models in training -----------------------------------------------------------------------

    def create(self, model_id: str, lora: LoraConfig, optimizer: OptimizerConfig) -> None:
        if model_id in self._adapters:
            raise ValueError(f"model {model_id} exists already.")
        check_lora(lora)
        check_optimizer(optimizer)
        targets = chosen_targets(self.model.targets, lora)
        self._check_memory(
            adapter_bytes(make_layout(targets, lora.rank).size, self.model.dtype),
            f"an adapter of rank {lora.rank}",
            "Use a smaller rank, or train fewer kinds of layers",
        )
        self._adapters[model_id] = TrainingAdapter(
            lora=lora,
            targets=targets,
            seed=seed_of(lora, model_id),
            model_dtype=self.model.dtype,
            device=self.model.device,
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
        while training_pass.step():
            pass
        return training_pass.output()

    def begin_pass(self, model_id: str, work: ForwardBackwardInput, *, backward: bool) -> Pass:
        """The same pass for a caller that runs it step by step. All checks happen here."""
        adapter = self._adapter(model_id)
        loss, rows = check(work, self.limits, backward=backward)
        if backward:
            longest = max(len(row.tokens_N) for row in rows)
            self._check_memory(
                longest * self.model.bytes_per_token,
                f"training on a sequence of {longest} tokens",
                "Cut the sequence",
            )
        return Pass(
            self.model,
            adapter,
            loss,
            rows,
            backward=backward,
            max_tokens=self.max_batch_tokens,
        )

    def optim_step(self, model_id: str, params: OptimParams) -> dict[str, float]:
        return adamw_step(self._adapter(model_id), check_params(params)).metrics()

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

    def restore(self, model_id: str, folder: Path) -> dict[str, Any]:
        """Back to a snapshot, creating the model if need be; returns the caller's notes."""
        if not self.has(model_id):
            notes = checkpoints.read_snapshot_notes(folder)
            lora = LoraConfig.model_validate(notes["lora_config"])
            self.create(model_id, lora, AdamOptimizerConfig())
        return checkpoints.restore(self._adapter(model_id), folder)

    # -- sampling ---------------------------------------------------------------------------------

    def submit(self, ticket: int, request: SampleRequest, *, adapter: Path | None) -> None:
        """Puts a sample in line; `adapter` is an immutable checkpoint folder, None the base."""
        if self._sampler is None:
            self._sampler = Sampler(
                self.model, self.settings, max_batch_tokens=self.max_batch_tokens
            )
        self._sampler.submit(ticket, request, adapter)

    def cancel(self, ticket: int) -> None:
        if self._sampler is not None:
            self._sampler.cancel(ticket)

    def advance(self) -> list[Finished]:
        """Admits what waits and draws a burst of tokens; returns what is answered."""
        return [] if self._sampler is None else self._sampler.advance()

    @property
    def sampling(self) -> bool:
        return self._sampler is not None and self._sampler.busy

    def _check_memory(self, needed: int, what: str, advice: str) -> None:
        available = available_bytes(self.model.device)
        if needed > available:
            raise UserFailure(
                f"{what} needs about {needed / 1e9:.1f} GB, and {available / 1e9:.1f} GB are free on "
                f"the server. {advice}, or free memory by dropping other models."
            )

    def _adapter(self, model_id: str) -> TrainingAdapter:
        try:
            return self._adapters[model_id]
        except KeyError:
            raise UserFailure(f"model {model_id!r} does not exist in this engine.") from None
