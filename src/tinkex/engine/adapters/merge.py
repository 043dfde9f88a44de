"""Merges an adapter into its base model and writes a full model in Hugging Face layout."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig

from tinkex.durable_files import atomic_folder
from tinkex.engine.adapters.checkpoints import SavedAdapter, read_adapter, size_bytes
from tinkex.engine.model.base_model import load, quiet_transformers
from tinkex.engine.model.lm_head import HEAD
from tinkex.wire.errors import UserFailure

#: Maximum size of one weight file.
SHARD = "5GB"

#: Files of the base model that are not copied: the merge writes new weights.
WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "*.gguf", "*.bin", "*.bin.index.json")


@dataclass(frozen=True, kw_only=True)
class Merged:
    folder: Path
    size_bytes: int
    dtype: str
    #: The base model used one matrix for input and output embeddings. The adapter changed only the
    #: output, so the merged model has two matrices.
    untied: bool


def merge(
    base_folder: Path, adapter_folder: Path, out_folder: Path, dtype: torch.dtype | None = None
) -> Merged:
    """
    Writes base model + adapter atomically, by default in the number format of the base model.

    The sum is computed in float32 and rounded once.
    """
    if out_folder.exists():
        raise FileExistsError(f"{out_folder} already exists. Name a new folder.")
    dtype = dtype or own_dtype(base_folder)
    model, untied = merged_model(base_folder, adapter_folder, dtype)
    with atomic_folder(out_folder) as part:
        copy_other_files(base_folder, part)
        with quiet_transformers():
            model.save_pretrained(part, max_shard_size=SHARD)
        # Replace the file that save_pretrained derives from the config.
        generation = base_folder / "generation_config.json"
        if generation.exists():
            shutil.copyfile(generation, part / generation.name)
        equalize_modes(part)
    return Merged(
        folder=out_folder,
        size_bytes=size_bytes(out_folder),
        dtype=str(dtype).removeprefix("torch."),
        untied=untied,
    )


def merged_model(base_folder: Path, adapter_folder: Path, dtype: torch.dtype) -> tuple[Any, bool]:
    """The base model with the adapter added to its weights, and whether it had to be untied."""
    saved = read_adapter(adapter_folder)
    with torch.no_grad():
        model: Any = load(base_folder, dtype)
        untied = HEAD in saved.pairs and untie(model)
        add(model, saved, adapter_folder.name)
    return model, untied


def own_dtype(base_folder: Path) -> torch.dtype:
    found = AutoConfig.from_pretrained(base_folder).dtype
    return found if isinstance(found, torch.dtype) else torch.float32


def untie(model: Any) -> bool:
    """Gives the model a separate output projection. Returns False if it had one already."""
    output = model.get_output_embeddings()
    if output.weight is not model.get_input_embeddings().weight:
        return False
    output.weight = nn.Parameter(output.weight.clone(), requires_grad=False)
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = False
    return True


def add(model: Any, saved: SavedAdapter, adapter: str) -> None:
    modules = dict(model.named_modules())
    modules[HEAD] = model.get_output_embeddings()
    for name, (A, B) in saved.pairs.items():
        module = modules.get(name)
        if not isinstance(module, nn.Linear):
            raise UserFailure(
                f"{adapter}: has LoRA weights for {name}, but this base model has no such linear "
                "layer. Merge it with the base model it was trained on."
            )
        weight: Tensor = module.weight
        if (B.shape[0], A.shape[1]) != tuple(weight.shape):
            raise UserFailure(
                f"{adapter}: {name} maps {A.shape[1]} to {B.shape[0]} features, but in this base "
                f"model it maps {weight.shape[1]} to {weight.shape[0]}. Merge it with the base "
                "model it was trained on."
            )
        weight.copy_(weight.float().addmm_(B.float(), A.float(), alpha=saved.scale))


def equalize_modes(folder: Path) -> None:
    """Gives all files the mode that the umask allows; weights are written as private files."""
    mode = (folder / "config.json").stat().st_mode & 0o777
    for file in folder.iterdir():
        file.chmod(mode)


def copy_other_files(base_folder: Path, part: Path) -> None:
    """Copies tokenizer, chat template, license: all files except weights and hidden files."""
    for file in base_folder.iterdir():
        is_weights = any(file.match(pattern) for pattern in WEIGHT_FILES)
        if file.is_file() and not file.name.startswith(".") and not is_weights:
            shutil.copyfile(file, part / file.name)
