"""Adapters in memory: training adapters with optimizer state, and sampler adapters."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tinkex.engine.adapters.model_needs import training_bytes
from tinkex.engine.model.lora import ALPHA, Pair, initial_weights, make_pairs
from tinkex.engine.model.targets import Layout, Target, make_layout
from tinkex.wire.errors import UserFailure
from tinkex.wire.training import LoraConfig, OptimizerConfig

if TYPE_CHECKING:
    from tinkex.engine.ranks.shard import Shard

#: A larger rank is most likely a typing error.
MAX_RANK = 512

#: The float32 vectors of a training adapter.
FLAT_VECTORS = ("master", "m", "v", "grad")


class SamplerAdapter:
    """Immutable weights in the number format of the base model."""

    def __init__(
        self, *, layout: Layout, scale: float, live: Tensor, size: int | None = None
    ) -> None:
        self._layout = layout
        #: Bytes that count for the memory plan: the same on all ranks, whose parts differ a little.
        self.size = live.nbytes if size is None else size
        self.scale = scale
        self.live = live
        self.pairs: Mapping[str, Pair] = make_pairs(layout, live, scale=scale)

    def to(self, device: torch.device) -> SamplerAdapter:
        """The adapter on another device; itself if it is there already."""
        live = self.live.to(device)
        if live is self.live:
            return self
        return SamplerAdapter(layout=self._layout, scale=self.scale, live=live, size=self.size)

    @property
    def rank(self) -> int:
        return self._layout.rank


class TrainingAdapter:
    """
    An adapter as flat float32 vectors: master weights, optimizer moments and gradient.

    The layers read `live`: the master weights if the base model is float32, otherwise a copy in the
    format of the base model that is refreshed after each step.
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
        shard: Shard | None = None,
    ) -> None:
        """With `shard`, this process has a part of the adapter, and `targets` have its sizes."""
        self.lora = lora
        #: The optimizer family of its state.
        self.optimizer = optimizer
        self.layout: Layout = make_layout(targets, lora.rank)
        self.targets, self.shard = targets, shard
        #: Of the whole adapter, as in its files.
        self.whole_layout = self.layout
        if shard is not None:
            self.whole_layout = make_layout(shard.whole_targets(targets), lora.rank)
        self._model_dtype = model_dtype
        #: Optimizer steps taken.
        self.step = 0
        if shard is None:
            self.master = initial_weights(self.layout, seed).to(device)
        else:
            self.master = shard.initial_weights(targets, self.layout, seed).to(device)
        self.m = torch.zeros_like(self.master)
        self.v = torch.zeros(self._size_of("v"), device=device)
        self.grad = torch.zeros_like(self.master)
        self.live: Tensor
        self.pairs: Mapping[str, Pair]
        self._connect()

    @property
    def snapshot_bytes(self) -> int:
        """What a snapshot takes on the disk, without gradients."""
        vectors = 2 if self.optimizer == "dimuon" else 3
        return 4 * vectors * self.whole_layout.size

    def refresh_live(self) -> None:
        """Call after the master weights changed."""
        if self.live is not self.master:
            self.live.copy_(self.master)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Within this, files have the part of this rank only, and only this rank can read them."""
        shard, whole = self.shard, self.whole_layout
        self.shard, self.whole_layout = None, self.layout
        try:
            yield
        finally:
            self.shard, self.whole_layout = shard, whole

    # -- moving between memories ------------------------------------------------------------------

    def move(self, device: torch.device) -> None:
        """Moves all vectors. Layers can use the adapter only on the device of the model."""
        for name in FLAT_VECTORS:
            setattr(self, name, getattr(self, name).to(device))
        self._connect()

    def release(self) -> None:
        """Frees all vectors; the adapter is unusable until `allocate` and a restore."""
        for name in FLAT_VECTORS:
            setattr(self, name, torch.empty(0))
        self.live, self.pairs = self.master, {}

    def allocate(self, device: torch.device) -> None:
        for name in FLAT_VECTORS:
            setattr(self, name, torch.zeros(self._size_of(name), device=device))
        self._connect()

    def _size_of(self, name: str) -> int:
        """Elements of a vector. Dimuon has only one moment."""
        return 0 if name == "v" and self.optimizer == "dimuon" else self.layout.size

    def _connect(self) -> None:
        """Makes the views of the flat vectors that the layers read."""
        self.live = self.master.to(self._model_dtype)  # the same tensor for float32
        self.pairs = make_pairs(
            self.layout, self.live, scale=ALPHA / self.lora.rank, grad=self.grad
        )


def adapter_bytes(size: int, model_dtype: torch.dtype) -> int:
    """Memory of a training adapter of this many numbers."""
    return training_bytes(size, model_dtype.itemsize)


def check_lora(lora: LoraConfig) -> None:
    if not 1 <= lora.rank <= MAX_RANK:
        raise UserFailure(f"lora_config.rank is {lora.rank}; ranks go from 1 to {MAX_RANK}.")
    if not (lora.train_attn or lora.train_mlp or lora.train_unembed):
        raise UserFailure("lora_config trains nothing; set train_attn, train_mlp or train_unembed.")


def check_optimizer(optimizer: OptimizerConfig) -> str:
    """The optimizer family. Raises `UserFailure` if it is not supported."""
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
    The given seed, or one derived from the model's id.

    An adapter that is rebuilt from the log after a crash must start with the same numbers.
    """
    if lora.seed is not None:
        return lora.seed
    return int.from_bytes(hashlib.sha256(model_id.encode()).digest()[:8], "little")
