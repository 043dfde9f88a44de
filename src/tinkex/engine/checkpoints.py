"""The files of an adapter: a PEFT folder, with the optimizer's state beside it.

A folder appears whole or not at all, under a name that is never written again: readers need no
lock, and what a sampler was opened on cannot change under it.

    adapter_model.safetensors   base_model.model.<module>.lora_A.weight and lora_B.weight, float32
    adapter_config.json         what PEFT needs to know; rank and alpha above all
    optimizer.safetensors       m (and v) of every tensor, the number of steps, and whose they are
    gradients.safetensors       only in snapshots: what was accumulated since the last step
    snapshot.json               only in snapshots: how the model was created, and the caller's notes
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tinkex.engine.adapters import TrainingAdapter
from tinkex.engine.head import HEAD
from tinkex.engine.lora import ALPHA, Layout, matrices
from tinkex.wire.errors import UserFailure

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
OPTIMIZER = "optimizer.safetensors"
GRADIENTS = "gradients.safetensors"
SNAPSHOT = "snapshot.json"

PREFIX = "base_model.model."
#: Another exporter's name for the output projection; read, never written.
HEAD_ALIASES = ("model.unembed_tokens", "unembed_tokens")


@dataclass(frozen=True, kw_only=True)
class SavedAdapter:
    """An adapter as read from its folder: base module name -> (A, B)."""

    rank: int
    scale: float
    pairs: Mapping[str, tuple[Tensor, Tensor]]


def save(adapter: TrainingAdapter, folder: Path, *, base_model: str, optimizer: bool) -> int:
    """Writes the folder and returns its size in bytes."""
    with whole_folder(folder) as part:
        _weights(adapter).write(part / WEIGHTS)
        _config(adapter, base_model).write(part / CONFIG)
        if optimizer:
            _optimizer(adapter).write(part / OPTIMIZER)
    return size_bytes(folder)


def snapshot(
    adapter: TrainingAdapter, folder: Path, *, base_model: str, meta: Mapping[str, Any]
) -> int:
    """A checkpoint that also has the gradients, so that training goes on as if never stopped."""
    with whole_folder(folder) as part:
        for name, content in _everything(adapter, base_model, meta):
            content().write(part / name)
    return size_bytes(folder)


def copy(adapter: TrainingAdapter, *, base_model: str, meta: Mapping[str, Any]) -> Copied:
    """The same for a caller that writes it later, while the model goes on."""
    return Copied({name: content() for name, content in _everything(adapter, base_model, meta)})


@dataclass(frozen=True)
class Copied:
    """Everything a model is, apart from it: another thread may write it."""

    files: Mapping[str, _File]

    def write(self, folder: Path) -> int:
        """Writes the folder and returns its size in bytes."""
        with whole_folder(folder) as part:
            for name, file in self.files.items():
                file.write(part / name)
        return size_bytes(folder)


@dataclass(frozen=True, kw_only=True)
class _File:
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    metadata: Mapping[str, str] | None = None
    #: Instead of tensors.
    text: str | None = None

    def write(self, path: Path) -> None:
        if self.text is not None:
            path.write_text(self.text)
        else:
            metadata = None if self.metadata is None else dict(self.metadata)
            save_file(dict(self.tensors), path, metadata=metadata)


def _everything(
    adapter: TrainingAdapter, base_model: str, meta: Mapping[str, Any]
) -> Iterator[tuple[str, Callable[[], _File]]]:
    """What a snapshot is made of; each file is copied when it is asked for."""
    notes = {
        "lora_config": adapter.lora.model_dump(),
        "optimizer": adapter.optimizer,
        "meta": dict(meta),
    }
    yield WEIGHTS, lambda: _weights(adapter)
    yield CONFIG, lambda: _config(adapter, base_model)
    yield OPTIMIZER, lambda: _optimizer(adapter)
    yield GRADIENTS, lambda: _File(tensors=named(adapter.grad, adapter.layout))
    yield SNAPSHOT, lambda: _File(text=json.dumps(notes, indent=2))


def load(adapter: TrainingAdapter, folder: Path, *, optimizer: bool) -> None:
    """Puts a checkpoint's weights, and its optimizer state if asked, into a model in training."""
    saved = read_adapter(folder)
    weights = _fitting(adapter, saved, folder)
    moments = _read_optimizer(adapter, folder) if optimizer else None
    # Everything has been read and fits: from here on nothing can fail half-way.
    fill(adapter.master, adapter.layout, weights)
    adapter.grad.zero_()
    if moments is None:
        adapter.m.zero_()
        adapter.v.zero_()
        adapter.step = 0
    else:
        fill(adapter.m, adapter.layout, moments.m)
        if moments.v is not None:
            fill(adapter.v, adapter.layout, moments.v)
        adapter.step = moments.step
    adapter.refresh_live()


def restore(adapter: TrainingAdapter, folder: Path) -> dict[str, Any]:
    """Puts a snapshot into a model of the same shape; returns the caller's notes."""
    gradients = unnamed(_tensors(folder, GRADIENTS))
    load(adapter, folder, optimizer=True)
    fill(adapter.grad, adapter.layout, gradients)
    meta: dict[str, Any] = read_snapshot_notes(folder)["meta"]
    return meta


def read_snapshot_notes(folder: Path) -> dict[str, Any]:
    return _json(folder, SNAPSHOT)


def read_adapter(folder: Path) -> SavedAdapter:
    """Any PEFT LoRA folder whose settings mean what they mean here."""
    config = _json(folder, CONFIG)
    if config.get("peft_type", "LORA") != "LORA":
        raise UserFailure(f"{folder.name}: peft_type {config['peft_type']!r} is not LORA.")
    for key, usual in (
        ("use_rslora", False),
        ("use_dora", False),
        ("bias", "none"),
        ("rank_pattern", {}),
        ("alpha_pattern", {}),
        ("modules_to_save", None),
    ):
        if (found := config.get(key)) and found != usual:
            raise UserFailure(
                f"{folder.name}: adapter_config.json has {key} = {found!r}, which is not "
                f"supported; it must be {usual!r}."
            )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        raise UserFailure(
            f"{folder.name}: adapter_config.json has r = {rank!r} and lora_alpha = {alpha!r}; "
            "both must be numbers."
        )
    pairs = unnamed(_tensors(folder, WEIGHTS))
    for name, (A, B) in pairs.items():
        if A.shape[0] != rank or B.shape[1] != rank:
            raise UserFailure(
                f"{folder.name}: {name} has matrices {list(A.shape)} and {list(B.shape)}, and "
                f"adapter_config.json says rank {rank}."
            )
    return SavedAdapter(rank=rank, scale=alpha / rank, pairs=pairs)


# -- tensors and their names ----------------------------------------------------------------------


def named(flat: Tensor, layout: Layout) -> dict[str, Tensor]:
    """Every matrix of a flat vector under its PEFT name, as copies on the CPU."""
    tensors = {}
    for name, place in layout.places.items():
        A, B = matrices(flat, place)
        for letter, matrix in (("A", A), ("B", B)):
            key = f"{PREFIX}{name}.lora_{letter}.weight"
            # safetensors refuses views of one storage.
            tensors[key] = matrix.detach().to("cpu", copy=True).contiguous()
    return tensors


def unnamed(tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """PEFT names back to pairs by module."""
    halves: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        module, _, letter = key.removesuffix(".weight").rpartition(".lora_")
        if not module or letter not in ("A", "B"):
            raise UserFailure(
                f"the checkpoint has a tensor {key!r}; only lora_A and lora_B weights are "
                "supported."
            )
        module = module.removeprefix(PREFIX)
        halves.setdefault(HEAD if module in HEAD_ALIASES else module, {})[letter] = tensor
    for module, half in halves.items():
        if len(half) != 2:
            raise UserFailure(f"the checkpoint has only one half of the pair for {module}.")
    return {module: (half["A"], half["B"]) for module, half in halves.items()}


def fill(flat: Tensor, layout: Layout, pairs: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    for name, place in layout.places.items():
        for matrix, saved in zip(matrices(flat, place), pairs[name], strict=True):
            matrix.copy_(saved)


def _fitting(
    adapter: TrainingAdapter, saved: SavedAdapter, folder: Path
) -> Mapping[str, tuple[Tensor, Tensor]]:
    layout = adapter.layout
    if saved.rank != layout.rank:
        raise UserFailure(
            f"{folder.name}: was saved with rank {saved.rank}, and this model has rank "
            f"{layout.rank}. Create the model with rank {saved.rank}."
        )
    if saved.scale != ALPHA / layout.rank:
        raise UserFailure(
            f"{folder.name}: has lora_alpha {saved.scale * saved.rank:g}; models here are trained "
            f"with {ALPHA:g}."
        )
    missing, extra = layout.places.keys() - saved.pairs.keys(), saved.pairs.keys() - layout.places
    if missing or extra:
        raise UserFailure(
            f"{folder.name}: adapts other layers than this model: "
            f"{describe_difference(missing, extra)}. Create the model with the same base model "
            "and the same train_attn, train_mlp and train_unembed."
        )
    for name, place in layout.places.items():
        A, B = saved.pairs[name]
        if tuple(A.shape) != place.shape_A or tuple(B.shape) != place.shape_B:
            raise UserFailure(
                f"{folder.name}: {name} has matrices {list(A.shape)} and {list(B.shape)}, and "
                f"this model {list(place.shape_A)} and {list(place.shape_B)}: it belongs to "
                "another base model."
            )
    return saved.pairs


def describe_difference(missing: set[str], extra: set[str]) -> str:
    parts = []
    if missing:
        parts.append(f"it lacks {len(missing)}, such as {min(missing)}")
    if extra:
        parts.append(f"it has {len(extra)} more, such as {min(extra)}")
    return " and ".join(parts)


# -- files ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `folder` on success and vanishes on failure."""
    if folder.exists():
        raise FileExistsError(f"{folder} exists, and a checkpoint is never written twice.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.part")
    part.mkdir()
    try:
        yield part
        for file in part.iterdir():
            sync(file)
        sync(part)
        part.rename(folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    sync(folder.parent)  # makes the new name itself durable


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def size_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def _weights(adapter: TrainingAdapter) -> _File:
    return _File(tensors=named(adapter.master, adapter.layout), metadata={"format": "pt"})


def _config(adapter: TrainingAdapter, base_model: str) -> _File:
    return _File(text=json.dumps(peft_config(adapter, base_model), indent=2) + "\n")


def peft_config(adapter: TrainingAdapter, base_model: str) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": adapter.layout.rank,
        "lora_alpha": int(ALPHA),
        "target_modules": sorted({name.rpartition(".")[2] for name in adapter.layout.places}),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
    }


@dataclass(frozen=True, kw_only=True)
class Moments:
    m: Mapping[str, tuple[Tensor, Tensor]]
    #: None for optimizers with one moment.
    v: Mapping[str, tuple[Tensor, Tensor]] | None
    step: int


def _optimizer(adapter: TrainingAdapter) -> _File:
    tensors = {f"m:{key}": t for key, t in named(adapter.m, adapter.layout).items()}
    if len(adapter.v):
        tensors |= {f"v:{key}": t for key, t in named(adapter.v, adapter.layout).items()}
    tensors["step"] = torch.tensor(adapter.step)
    return _File(tensors=tensors, metadata={"optimizer": adapter.optimizer})


def _read_optimizer(adapter: TrainingAdapter, folder: Path) -> Moments:
    if not (folder / OPTIMIZER).exists():
        raise UserFailure(
            f"{folder.name}: has no optimizer state (it was saved for sampling). Load it without "
            "the optimizer, or save with save_state."
        )
    tensors = _tensors(folder, OPTIMIZER)
    family = _family(folder / OPTIMIZER)
    if family != adapter.optimizer:
        raise UserFailure(
            f"{folder.name}: its optimizer state is of {family}, and this model was created with "
            f"{adapter.optimizer}. Load it without the optimizer, or create the model with "
            f"optimizer_config type {family!r}."
        )
    step = int(tensors.pop("step"))
    by_kind: dict[str, dict[str, Tensor]] = {"m": {}, "v": {}}
    for key, tensor in tensors.items():
        kind, _, name = key.partition(":")
        by_kind[kind][name] = tensor
    m = unnamed(by_kind["m"])
    v = unnamed(by_kind["v"]) if len(adapter.v) else None
    for moments in (m, v):
        if moments is not None and moments.keys() != adapter.layout.places.keys():
            raise UserFailure(f"{folder.name}: its optimizer state is of other layers.")
    return Moments(m=m, v=v, step=step)


def _family(file: Path) -> str:
    with safe_open(file, framework="pt") as opened:
        return str((opened.metadata() or {}).get("optimizer", "adamw"))


def _tensors(folder: Path, name: str) -> dict[str, Tensor]:
    try:
        return load_file(folder / name)
    except FileNotFoundError:
        raise UserFailure(f"{folder.name}: has no {name}; it is not a checkpoint.") from None
    except SafetensorError as error:
        raise UserFailure(f"{folder.name}: {name} cannot be read: {error}") from None


def _json(folder: Path, name: str) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads((folder / name).read_text())
    except FileNotFoundError:
        raise UserFailure(f"{folder.name}: has no {name}; it is not a checkpoint.") from None
    except ValueError as error:
        raise UserFailure(f"{folder.name}: {name} cannot be read: {error}") from None
    return value
