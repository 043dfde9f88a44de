"""Merges an adapter into its base model and writes a full model in Hugging Face layout."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig

from tinkex.durable_files import atomic_folder
from tinkex.engine.adapters.checkpoints import SavedAdapter, read_adapter, size_bytes, usual_name
from tinkex.engine.model import recurrent_layers
from tinkex.engine.model.experts import ExpertWeights, is_experts
from tinkex.engine.model.lora import Columns
from tinkex.engine.model.original_model import dequantization, load, quiet_transformers
from tinkex.engine.model.targets import HEAD
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
            # Weights that were quantized are plain numbers now, for which it had other names.
            plain = dequantization(AutoConfig.from_pretrained(base_folder)) is not None
            model.save_pretrained(part, max_shard_size=SHARD, save_original_format=not plain)
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
    """As config.json says; for models with images, its part for text may be the one that does."""
    config = AutoConfig.from_pretrained(base_folder)
    for found in (config.dtype, config.get_text_config().dtype):
        if isinstance(found, torch.dtype):
            return found
    return torch.float32


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
    modules = {usual_name(name): module for name, module in model.named_modules()}
    modules[HEAD] = model.get_output_embeddings()
    for name, (A, B) in saved.pairs.items():
        if A.dim() != B.dim():
            path, _, part = name.rpartition(".")
            add_to_experts(modules.get(path), part, A, B, saved.scale, f"{adapter}: {name}")
            continue
        module, columns = find_linear(modules, name)
        if not isinstance(module, nn.Linear):
            raise UserFailure(
                f"{adapter}: has LoRA weights for {name}, but this base model has no such linear "
                "layer. Merge it with the base model it was trained on."
            )
        weight: Tensor = module.weight
        outputs = weight.shape[0] if columns is None else columns.outputs
        if (B.shape[0], A.shape[1]) != (outputs, weight.shape[1]):
            raise UserFailure(
                f"{adapter}: {name} maps {A.shape[1]} to {B.shape[0]} features, but in this base "
                f"model it maps {weight.shape[1]} to {outputs}. Merge it with the base "
                "model it was trained on."
            )
        if columns is None:
            weight.copy_(weight.float().addmm_(B.float(), A.float(), alpha=saved.scale))
        else:
            own = columns.of(weight)
            own.copy_(own.float() + (B.float() @ A.float() * saved.scale).view_as(own))


def find_linear(modules: Mapping[str, Any], name: str) -> tuple[Any, Columns | None]:
    """The linear layer that makes a projection; with the columns if it makes others too."""
    path, _, leaf = name.rpartition(".")
    parent = modules.get(path)
    if parent is not None and name not in modules:
        for joint, layer in parent.named_children():
            columns = (recurrent_layers.joint_projections(parent, joint) or {}).get(leaf)
            if columns is not None:
                return layer, columns
    return modules.get(name), None


def add_to_experts(module: Any, part: str, A: Tensor, B: Tensor, scale: float, where: str) -> None:
    """Adds the product of each expert to its weights. `part` is w1, w2 or w3."""
    if module is None or not is_experts(module):
        raise UserFailure(
            f"{where}: this base model has no such experts. Merge it with the base model it was "
            "trained on."
        )
    weights = ExpertWeights.of(module)
    if part == "w2":
        merged_EIO = weights.down_EIH
    elif part in weights.columns:
        merged_EIO = weights.in_EHO[:, :, weights.columns[part]]
    else:
        raise UserFailure(f"{where}: the experts of this base model have no gate, so no {part}.")
    needed = tuple(merged_EIO.shape)
    if (max(len(each) for each in (A, B) if each.dim() == 3), A.shape[-1], B.shape[-2]) != needed:
        raise UserFailure(
            f"{where} has matrices {list(A.shape)} and {list(B.shape)}, but this base model has "
            f"{needed[0]} experts that map {needed[1]} to {needed[2]} features. Merge it with the "
            "base model it was trained on."
        )
    for expert, own_IO in enumerate(merged_EIO):
        A_RI, B_OR = (each[expert] if each.dim() == 3 else each for each in (A, B))
        own_IO.copy_(own_IO.float().addmm_(A_RI.float().t(), B_OR.float().t(), alpha=scale))


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
