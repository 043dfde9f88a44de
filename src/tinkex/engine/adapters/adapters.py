"""Adapters in memory: those that are trained, and those that samplers use."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tinkex.engine.model.lora import (
    ALPHA,
    Layout,
    Pair,
    Target,
    initial_weights,
    make_layout,
    make_pairs,
)
from tinkex.wire.errors import UserFailure
from tinkex.wire.training import LoraConfig, OptimizerConfig

#: A rank beyond this is a full fine-tune in all but name, and most likely a typing error.
MAX_RANK = 512

#: The float32 vectors of an adapter in training.
FLAT_VECTORS = ("master", "m", "v", "grad")


class SamplerAdapter:
    """Weights that never change, in the base model's number format."""

    def __init__(self, *, layout: Layout, scale: float, live: Tensor) -> None:
        self._layout, self._scale = layout, scale
        self.live = live
        self.pairs: Mapping[str, Pair] = make_pairs(layout, live, scale=scale)

    def to(self, device: torch.device) -> SamplerAdapter:
        """The same in another memory, or itself if it is there."""
        live = self.live.to(device)
        if live is self.live:
            return self
        return SamplerAdapter(layout=self._layout, scale=self._scale, live=live)


class TrainingAdapter:
    """
    One adapter as flat vectors: master weights, the optimizer's moments, gradient; all float32.

    `live` is what the layers read: the master itself when the base is float32, else a copy in the
    base's format that follows the master after each step.
    """

    def __init__(
        self,
        *,
        lora: LoraConfig,
        targets: Sequence[Target],
        seed: int,
        model_dtype: torch.dtype,
        device: torch.device,
        optimizer: str = "adamw",
    ) -> None:
        self.lora = lora
        #: The family of optimizers its state belongs to.
        self.optimizer = optimizer
        self.layout: Layout = make_layout(targets, lora.rank)
        self._model_dtype = model_dtype
        #: Optimizer steps taken.
        self.step = 0
        self.master = initial_weights(self.layout, seed).to(device)
        self.m = torch.zeros_like(self.master)
        self.v = torch.zeros(self._size_of("v"), device=device)
        self.grad = torch.zeros_like(self.master)
        self.live: Tensor
        self.pairs: Mapping[str, Pair]
        self._connect()

    def refresh_live(self) -> None:
        """After the master changed."""
        if self.live is not self.master:
            self.live.copy_(self.master)

    # -- giving up its memory and getting it back; what else it knows stays -----------------------

    def move(self, device: torch.device) -> None:
        """To another memory, as it is. Layers can only use it on the model's own device."""
        for name in FLAT_VECTORS:
            setattr(self, name, getattr(self, name).to(device))
        self._connect()

    def release(self) -> None:
        """Without any memory; unusable until it is allocated and filled again."""
        for name in FLAT_VECTORS:
            setattr(self, name, torch.empty(0))
        self.live, self.pairs = self.master, {}

    def allocate(self, device: torch.device) -> None:
        for name in FLAT_VECTORS:
            setattr(self, name, torch.zeros(self._size_of(name), device=device))
        self._connect()

    def _size_of(self, name: str) -> int:
        """Dimuon has one moment only."""
        return 0 if name == "v" and self.optimizer == "dimuon" else self.layout.size

    def _connect(self) -> None:
        """What the layers read, as views of the flat vectors."""
        self.live = self.master.to(self._model_dtype)  # the same tensor for float32
        self.pairs = make_pairs(
            self.layout, self.live, scale=ALPHA / self.lora.rank, grad=self.grad
        )


def adapter_bytes(size: int, model_dtype: torch.dtype) -> int:
    """Memory of an adapter in training: four float32 vectors, and the live copy if it is one."""
    live = 0 if model_dtype == torch.float32 else torch.finfo(model_dtype).bits // 8
    return size * (4 * 4 + live)


def check_lora(lora: LoraConfig) -> None:
    if not 1 <= lora.rank <= MAX_RANK:
        raise UserFailure(f"lora_config.rank is {lora.rank}; ranks go from 1 to {MAX_RANK}.")
    if not (lora.train_attn or lora.train_mlp or lora.train_unembed):
        raise UserFailure("lora_config trains nothing; set train_attn, train_mlp or train_unembed.")


def check_optimizer(optimizer: OptimizerConfig) -> str:
    """The family of an optimizer's configuration."""
    if optimizer.type not in ("adamw", "dimuon"):
        raise UserFailure(
            f"optimizer_config.type {optimizer.type!r} is not supported by this server; "
            "use 'adamw' or 'dimuon'."
        )
    return optimizer.type


def chosen_targets(targets: Sequence[Target], lora: LoraConfig) -> list[Target]:
    chosen = {"attn": lora.train_attn, "mlp": lora.train_mlp, "unembed": lora.train_unembed}
    return [target for target in targets if chosen[target.kind]]


def seed_of(lora: LoraConfig, model_id: str) -> int:
    """
    The given seed, else one that follows from the model's id.

    An adapter that is created again from the log after a crash must begin with the same numbers.
    """
    if lora.seed is not None:
        return lora.seed
    return int.from_bytes(hashlib.sha256(model_id.encode()).digest()[:8], "little")
