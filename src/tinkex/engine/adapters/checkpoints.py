"""The files of an adapter: a PEFT folder plus optimizer state.

A folder is written atomically and never changed afterwards, so readers need no lock and the weights
of a sampler cannot change.

    adapter_model.safetensors   base_model.model.<module>.lora_A.weight and lora_B.weight, float32
    adapter_config.json         the PEFT config, with rank and alpha
    optimizer.safetensors       m (and v) of every tensor, the step count, and the optimizer family
    gradients.safetensors       snapshots only: gradients accumulated since the last step, if any
    snapshot.json               snapshots only: how the model was created
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor

from tinkex.durable_files import atomic_folder
from tinkex.engine.adapters import expert_files
from tinkex.engine.adapters.adapter_files import read_json, read_tensors, shown
from tinkex.engine.adapters.adapters import TrainingAdapter
from tinkex.engine.model.lora import ALPHA, matrices
from tinkex.engine.model.targets import HEAD, Layout, Target, make_layout
from tinkex.wire.errors import UserFailure
from tinkex.wire.text_format import format_bytes

if TYPE_CHECKING:
    from tinkex.engine.ranks.shard import Shard

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
OPTIMIZER = "optimizer.safetensors"
GRADIENTS = "gradients.safetensors"
SNAPSHOT = "snapshot.json"

HOST = torch.device("cpu")

PREFIX = "base_model.model."
#: Characters of a tensor's name: more than any has. Errors show the name.
MAX_NAME = 500
#: Names of the output projection in files of other exporters. Read, never written.
HEAD_ALIASES = ("model.unembed_tokens", "unembed_tokens", "model.lm_head")
#: Parts of names that other exporters write in another way. Read, never written.
NAME_ALIASES = ((".attn.", ".self_attn."), ("language_model.", ""))

#: Number formats of matrices, and of the number of steps.
FORMATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
STEP_FORMATS = (torch.int64, torch.int32)


@dataclass(frozen=True, kw_only=True)
class SavedAdapter:
    """An adapter as read from its folder: base module name -> (A, B)."""

    rank: int
    scale: float
    pairs: Mapping[str, tuple[Tensor, Tensor]]


def save(
    adapter: TrainingAdapter, folder: Path, *, base_model: str, optimizer: bool, reserve: int = 0
) -> int:
    """Writes the folder and returns its size in bytes; see `write`."""
    files: Files = {WEIGHTS: _weights(adapter), CONFIG: _config(adapter, base_model)}
    if optimizer:
        files = {**files, OPTIMIZER: _optimizer(adapter)}
    return write_of(adapter, whole(adapter, files), folder, reserve=reserve)


def write_of(adapter: TrainingAdapter, files: Files, folder: Path, *, reserve: int = 0) -> int:
    """Writes an adapter's whole files, on one rank if there are several."""
    if adapter.shard is None:
        return write(files, folder, reserve=reserve)
    return adapter.shard.group.agree(lambda: write(files, folder, reserve=reserve))


def whole(adapter: TrainingAdapter, files: Files) -> Files:
    """The files with the vectors of the whole adapter, of which a rank has a part."""
    shard = adapter.shard
    if shard is None:
        return files
    return {
        name: replace(
            file,
            layout=adapter.whole_layout,
            flat={
                prefix: shard.gather(
                    flat, adapter.targets, adapter.layout.rank, sums=name == GRADIENTS
                )
                for prefix, flat in file.flat.items()
            },
        )
        for name, file in files.items()
    }


def copied(files: Files) -> Files:
    """A copy that is independent of the model, to be written while training continues."""
    return {name: file.copied() for name, file in files.items()}


class WriteFailed(Exception):
    """
    The operating system could not write a checkpoint; the message has its error.

    Not a bug: the caller retries and logs the failure once.
    """


def write(files: Files, folder: Path, *, reserve: int = 0) -> int:
    """
    Writes the folder and returns its size in bytes.

    Nothing is written if less than `reserve` bytes of the disk would stay free: other files need
    them, and a large checkpoint would take them for a moment before it fails.
    """
    try:
        _check_free(folder, memory_bytes(files), reserve)
        with atomic_folder(folder) as part:
            for name, file in files.items():
                file.write(part / name)
    except (OSError, SafetensorError) as error:
        # The safetensors library, written in Rust, has the system's error only in its message.
        if getattr(error, "errno", None) is None and "os error" not in str(error):
            raise
        raise WriteFailed(f"the checkpoint could not be written: {error}") from error
    return size_bytes(folder)


def _check_free(folder: Path, size: int, reserve: int) -> None:
    """Raises `OSError` if files of this size do not fit on the disk."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder.parent).free
    if size + reserve > free:
        raise OSError(
            errno.ENOSPC,
            f"{os.strerror(errno.ENOSPC)}: it takes {format_bytes(size)}, and {format_bytes(free)} "
            f"are free, of which {format_bytes(reserve)} are reserved",
        )


@dataclass(frozen=True, kw_only=True)
class File:
    """Contents of one file: either flat vectors that are written as named matrices, or text."""

    #: Name prefix -> flat vector of an adapter.
    flat: Mapping[str, Tensor] = field(default_factory=dict)
    layout: Layout | None = None
    numbers: Mapping[str, int] = field(default_factory=dict)
    metadata: Mapping[str, str] | None = None
    #: Text contents; the other fields are then unused.
    text: str | None = None

    def copied(self) -> File:
        """A copy that is independent of the model. Copies whole vectors, which is fastest."""
        vectors = {prefix: flat.detach().to(HOST, copy=True) for prefix, flat in self.flat.items()}
        return replace(self, flat=vectors)

    def write(self, path: Path) -> None:
        if self.text is not None:
            path.write_text(self.text)
            return
        assert self.layout is not None
        arrays = {
            prefix + name: matrix.numpy()
            for prefix, flat in self.flat.items()
            for name, matrix in to_peft_names(flat.detach().to(HOST), self.layout).items()
        }
        arrays |= {name: np.array(number) for name, number in self.numbers.items()}
        # safetensors.numpy accepts views of one vector; safetensors.torch refuses them.
        save_file(arrays, path, metadata=None if self.metadata is None else dict(self.metadata))


Files = Mapping[str, File]


def memory_bytes(files: Files) -> int:
    """Memory of the vectors in files that wait to be written."""
    return sum(flat.nbytes for file in files.values() for flat in file.flat.values())


def snapshot_files(adapter: TrainingAdapter, base_model: str) -> Files:
    """A checkpoint that also has the gradients, so that training resumes exactly."""
    # Compare bytes, which is fastest. An optimizer step leaves +0.0, never -0.0.
    has_gradients = bool(adapter.grad.view(torch.uint8).any())
    if adapter.shard is not None:
        has_gradients = adapter.shard.group.largest(has_gradients) > 0
    info = {
        "lora_config": adapter.lora.model_dump(),
        "optimizer": adapter.optimizer,
        "gradients": has_gradients,
    }
    files = {
        WEIGHTS: _weights(adapter),
        CONFIG: _config(adapter, base_model),
        OPTIMIZER: _optimizer(adapter),
        SNAPSHOT: File(text=json.dumps(info, indent=2)),
    }
    if has_gradients:
        files[GRADIENTS] = File(flat={"": adapter.grad}, layout=adapter.layout)
    return whole(adapter, files)


def load(adapter: TrainingAdapter, folder: Path, *, optimizer: bool) -> None:
    """Loads the weights of a checkpoint, and with `optimizer` its optimizer state."""
    saved = read_adapter(folder, adapter.layout.placements)
    weights = _check_fits(adapter, saved, folder)
    moments = _read_optimizer(adapter, folder) if optimizer else None
    # Everything has been read and fits, so the load cannot fail halfway.
    copy_pairs(adapter.master, adapter.layout, weights, adapter.shard)
    adapter.grad.zero_()
    if moments is None:
        adapter.m.zero_()
        adapter.v.zero_()
        adapter.step = 0
    else:
        copy_pairs(adapter.m, adapter.layout, moments.m, adapter.shard)
        if moments.v is not None:
            copy_pairs(adapter.v, adapter.layout, moments.v, adapter.shard)
        adapter.step = moments.step
    adapter.refresh_live()


def restore(adapter: TrainingAdapter, folder: Path) -> None:
    """Loads a snapshot into a model of the same shape."""
    info = read_snapshot_info(folder)
    # Snapshots of older versions always have gradients and do not have this key.
    has_gradients = info.get("gradients", True)
    gradients = None
    if has_gradients:
        gradients = from_peft_names(read_tensors(folder, GRADIENTS), adapter.layout.placements)
        _check_shapes(adapter.whole_layout, gradients, f"{folder.name}: {GRADIENTS}")
    load(adapter, folder, optimizer=True)
    if gradients is not None:
        copy_pairs(adapter.grad, adapter.layout, gradients, adapter.shard)
        if adapter.shard is not None:
            adapter.shard.keep_once(adapter.grad, adapter.layout)


def read_snapshot_info(folder: Path) -> dict[str, Any]:
    return read_json(folder, SNAPSHOT)


def read_adapter(folder: Path, known: Iterable[str] = ()) -> SavedAdapter:
    """
    Reads a PEFT LoRA folder. Raises `UserFailure` for settings that are not supported.

    `known` are the names of the model's layers, to which names of other exporters are translated.
    """
    config = read_json(folder, CONFIG)
    if config.get("peft_type", "LORA") != "LORA":
        raise UserFailure(f"{folder.name}: peft_type {shown(config['peft_type'])} is not LORA.")
    for key, usual in (
        ("use_rslora", False),
        ("use_dora", False),
        ("bias", "none"),
        ("modules_to_save", None),
    ):
        if (found := config.get(key)) and found != usual:
            raise UserFailure(
                f"{folder.name}: adapter_config.json has {key} = {shown(found)}, which is not "
                f"supported; it must be {usual!r}."
            )
    rank: Any = config.get("r")
    alpha: Any = config.get("lora_alpha")
    if not _is_number(rank) or rank != int(rank) or rank < 1 or not _is_number(alpha):
        raise UserFailure(
            f"{folder.name}: adapter_config.json has r = {shown(rank)} and lora_alpha = "
            f"{shown(alpha)}; both must be numbers, and r at least 1."
        )
    _check_patterns(config, rank, alpha, folder)
    pairs = from_peft_names(read_tensors(folder, WEIGHTS), known, rank=int(rank))
    for name, (A, B) in pairs.items():
        if A.shape[-2] != rank or B.shape[-1] != rank:
            raise UserFailure(
                f"{folder.name}: {name} has matrices {list(A.shape)} and {list(B.shape)}, and "
                f"adapter_config.json says rank {rank}."
            )
    return SavedAdapter(rank=int(rank), scale=alpha / rank, pairs=pairs)


def _is_number(value: object) -> bool:
    """Whether it is a finite number; integers beyond the range of floats are none."""
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_NUMBER
    )


#: Of rank and alpha: more than any adapter has, and less than what overflows.
MAX_NUMBER = 1e15


def _check_patterns(config: Mapping[str, Any], rank: float, alpha: float, folder: Path) -> None:
    """Single layers may have another rank if their scale alpha / rank is that of the others."""
    ranks, alphas = config.get("rank_pattern") or {}, config.get("alpha_pattern") or {}
    if isinstance(ranks, dict) and isinstance(alphas, dict) and ranks.keys() == alphas.keys():
        both = [(ranks[name], alphas[name]) for name in ranks]
        if all(_is_number(r) and _is_number(a) and r * alpha == a * rank != 0 for r, a in both):
            return
    raise UserFailure(
        f"{folder.name}: adapter_config.json has rank_pattern = {shown(ranks)} and alpha_pattern "
        f"= {shown(alphas)}. All layers must have the same alpha / rank."
    )


# -- tensors and their names ----------------------------------------------------------------------


def to_peft_names(flat: Tensor, layout: Layout) -> dict[str, Tensor]:
    """
    The matrices of a flat vector by PEFT name, as views.

    A factor that experts share has a first dimension of 1, as in Tinker's files.
    """
    tensors = {}
    for name, placement in layout.placements.items():
        A, B = matrices(flat, placement)
        most = max(A.dim(), B.dim())
        for letter, matrix in (("A", A), ("B", B)):
            tensors[f"{PREFIX}{name}.lora_{letter}.weight"] = matrix[
                (None,) * (most - matrix.dim())
            ]
    return tensors


def from_peft_names(
    tensors: Mapping[str, Tensor], known: Iterable[str] = (), *, rank: int | None = None
) -> dict[str, tuple[Tensor, Tensor]]:
    """
    The (A, B) pairs by module name, from tensors by PEFT name.

    Names of other exporters are translated, to those of `known` if it has them. `rank` is needed
    for layouts of experts from whose shapes it cannot be told.
    """
    halves: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        module, _, letter = key.removesuffix(".weight").rpartition(".lora_")
        if not module or letter not in ("A", "B") or len(key) > MAX_NAME:
            raise UserFailure(
                f"the checkpoint has a tensor {shown(key)}; only lora_A and lora_B weights are "
                "supported."
            )
        if tensor.dtype not in FORMATS:
            raise UserFailure(f"the checkpoint's {key} has numbers of type {tensor.dtype}.")
        if tensor.numel():  # the hosted service writes an empty w3 for experts without a gate
            half = halves.setdefault(usual_name(module), {})
            if letter in half:
                raise UserFailure(
                    f"the checkpoint has lora_{letter} of {usual_name(module)} under two names."
                )
            half[letter] = tensor
    for module, half in halves.items():
        if len(half) != 2:
            raise UserFailure(f"the checkpoint has only one of lora_A and lora_B for {module}.")
    pairs = expert_files.shared_pairs(
        {name: (half["A"], half["B"]) for name, half in halves.items()}, rank
    )
    own = {usual_name(name): name for name in known}
    return {own.get(name, name): pair for name, pair in pairs.items()}


def usual_name(module: str) -> str:
    """One name for what exporters call in different ways: the module's path in most models."""
    module = module.removeprefix(PREFIX)
    for theirs, usual in NAME_ALIASES:
        module = module.replace(theirs, usual)
    return HEAD if module in HEAD_ALIASES else module


def copy_pairs(
    flat: Tensor,
    layout: Layout,
    pairs: Mapping[str, tuple[Tensor, Tensor]],
    shard: Shard | None = None,
) -> None:
    """Copies whole matrices into a flat vector; with `shard`, the part of this rank."""
    if shard is not None:
        pairs = shard.own_pairs(pairs)
    for name, placement in layout.placements.items():
        for matrix, saved in zip(matrices(flat, placement), pairs[name], strict=True):
            matrix.copy_(saved)


def _check_fits(
    adapter: TrainingAdapter, saved: SavedAdapter, folder: Path
) -> Mapping[str, tuple[Tensor, Tensor]]:
    layout = adapter.whole_layout
    if saved.rank != layout.rank:
        raise UserFailure(
            f"{folder.name}: was saved with rank {saved.rank}, but this model has rank "
            f"{layout.rank}. Create the model with rank {saved.rank}."
        )
    if saved.scale != ALPHA / layout.rank:
        raise UserFailure(
            f"{folder.name}: has lora_alpha {saved.scale * saved.rank:g}; this server trains with "
            f"lora_alpha {ALPHA:g}."
        )
    missing, extra = (
        layout.placements.keys() - saved.pairs.keys(),
        saved.pairs.keys() - layout.placements,
    )
    if missing or extra:
        raise UserFailure(
            f"{folder.name}: adapts different layers than this model: "
            f"{describe_difference(missing, extra)}. Create the model with the same base model "
            "and the same train_attn, train_mlp and train_unembed."
        )
    _check_shapes(layout, saved.pairs, folder.name)
    return saved.pairs


def fitted_layout(targets: Sequence[Target], saved: SavedAdapter, folder: Path) -> Layout:
    """The layout of a saved adapter. Raises `UserFailure` if it does not fit the base model."""
    known = {target.name: target for target in targets}
    if extra := saved.pairs.keys() - known.keys():
        raise UserFailure(
            f"{folder.name}: does not fit the base model: {describe_difference(set(), extra)}."
        )
    for name, (A, B) in saved.pairs.items():
        target = known[name]
        needed = target.shape_A(saved.rank), target.shape_B(saved.rank)
        if (tuple(A.shape), tuple(B.shape)) == needed:
            continue
        if target.experts is None and A.dim() == B.dim() == 2:
            raise UserFailure(
                f"{folder.name}: {name} maps {A.shape[1]} to {B.shape[0]} features, but in this "
                f"base model it maps {target.inputs} to {target.outputs}."
            )
        raise UserFailure(
            f"{folder.name}: {name} has matrices {list(A.shape)} and {list(B.shape)}, but in this "
            f"base model they are {list(needed[0])} and {list(needed[1])}."
        )
    return make_layout([known[name] for name in known if name in saved.pairs], saved.rank)


def _check_shapes(layout: Layout, pairs: Mapping[str, tuple[Tensor, Tensor]], where: str) -> None:
    """Raises `UserFailure` unless `copy_pairs` can copy every matrix."""
    if pairs.keys() != layout.placements.keys():
        raise UserFailure(
            f"{where} is for other layers than this model's. Create the model with the train_attn, "
            "train_mlp and train_unembed with which it was saved."
        )
    for name, placement in layout.placements.items():
        A, B = pairs[name]
        if tuple(A.shape) != placement.shape_A or tuple(B.shape) != placement.shape_B:
            raise UserFailure(
                f"{where}: {name} has matrices {list(A.shape)} and {list(B.shape)}, but this "
                f"model has {list(placement.shape_A)} and {list(placement.shape_B)}. The "
                "checkpoint belongs to another base model."
            )


def describe_difference(missing: set[str], extra: set[str]) -> str:
    parts = []
    if missing:
        parts.append(f"it lacks {len(missing)}, such as {min(missing)}")
    if extra:
        parts.append(f"it has {len(extra)} more, such as {min(extra)}")
    return " and ".join(parts)


# -- files ----------------------------------------------------------------------------------------


def size_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def _weights(adapter: TrainingAdapter) -> File:
    return File(flat={"": adapter.master}, layout=adapter.layout, metadata={"format": "pt"})


def _config(adapter: TrainingAdapter, base_model: str) -> File:
    return File(text=json.dumps(peft_config(adapter, base_model), indent=2) + "\n")


def peft_config(adapter: TrainingAdapter, base_model: str) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": adapter.layout.rank,
        "lora_alpha": int(ALPHA),
        "target_modules": sorted({name.rpartition(".")[2] for name in adapter.layout.placements}),
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


def _optimizer(adapter: TrainingAdapter) -> File:
    return File(
        flat={"m:": adapter.m} | ({"v:": adapter.v} if len(adapter.v) else {}),
        layout=adapter.layout,
        numbers={"step": adapter.step},
        metadata={"optimizer": adapter.optimizer},
    )


def _read_optimizer(adapter: TrainingAdapter, folder: Path) -> Moments:
    if not (folder / OPTIMIZER).exists():
        raise UserFailure(
            f"{folder.name}: has no optimizer state (it was saved for sampling). Load it without "
            "the optimizer, or save with save_state."
        )
    tensors = read_tensors(folder, OPTIMIZER)
    family = _family(folder / OPTIMIZER)
    if family != adapter.optimizer:
        raise UserFailure(
            f"{folder.name}: its optimizer state is of {family}, but this model was created with "
            f"{adapter.optimizer}. Load it without the optimizer, or create the model with "
            f"optimizer_config type {family!r}."
        )
    step = tensors.pop("step", None)
    if step is None or step.numel() != 1 or step.dtype not in STEP_FORMATS or int(step) < 0:
        raise UserFailure(f"{folder.name}: {OPTIMIZER} has no number of steps.")
    by_kind: dict[str, dict[str, Tensor]] = {"m": {}, "v": {}}
    for key, tensor in tensors.items():
        kind, _, name = key.partition(":")
        if kind not in by_kind:
            raise UserFailure(f"{folder.name}: {OPTIMIZER} has a tensor {shown(key)}.")
        by_kind[kind][name] = tensor
    names = adapter.layout.placements
    m = from_peft_names(by_kind["m"], names)
    v = from_peft_names(by_kind["v"], names) if len(adapter.v) else None
    for moments in (m, v):
        if moments is not None:
            _check_shapes(adapter.whole_layout, moments, f"{folder.name}: its optimizer state")
    return Moments(m=m, v=v, step=int(step))


def _family(file: Path) -> str:
    with safe_open(file, framework="pt") as opened:
        return str((opened.metadata() or {}).get("optimizer", "adamw"))[:40]
