"""An adapter added into its base model: a full model in Hugging Face layout that needs no PEFT."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig

from tinkex.engine.adapters.checkpoints import SavedAdapter, atomic_folder, read_adapter, size_bytes
from tinkex.engine.model.base_model import load, quiet_transformers
from tinkex.engine.model.lm_head import HEAD
from tinkex.wire.errors import UserFailure

#: Larger models are written in several files.
SHARD = "5GB"

#: Written anew, or of no use to the new model.
WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "*.gguf", "*.bin", "*.bin.index.json")


@dataclass(frozen=True, kw_only=True)
class Merged:
    folder: Path
    size_bytes: int
    dtype: str
    #: The base used one matrix for input and output; the adapter changed the output only, so the
    #: new model has two.
    untied: bool


def merge(
    base_folder: Path, adapter_folder: Path, out_folder: Path, dtype: torch.dtype | None = None
) -> Merged:
    """
    Writes base + adapter, whole or not at all, in the base's number format unless told otherwise.

    The sum is made in float32 and rounded once.
    """
    if out_folder.exists():
        raise FileExistsError(f"{out_folder} exists. Name a new folder.")
    saved = read_adapter(adapter_folder)
    dtype = dtype or own_dtype(base_folder)
    with torch.no_grad():
        model: Any = load(base_folder, dtype)
        untied = HEAD in saved.pairs and untie(model)
        add(model, saved, adapter_folder.name)
        with atomic_folder(out_folder) as part:
            # Beside the weights, which may be large, these files are next to nothing.
            copy_other_files(base_folder, part)
            with quiet_transformers():
                model.save_pretrained(part, max_shard_size=SHARD)
            # Its own: transformers makes one up from the config when the model came without.
            generation = base_folder / "generation_config.json"
            if generation.exists():
                shutil.copyfile(generation, part / generation.name)
    return Merged(
        folder=out_folder,
        size_bytes=size_bytes(out_folder),
        dtype=str(dtype).removeprefix("torch."),
        untied=untied,
    )


def own_dtype(base_folder: Path) -> torch.dtype:
    found = AutoConfig.from_pretrained(base_folder).dtype
    return found if isinstance(found, torch.dtype) else torch.float32


def untie(model: Any) -> bool:
    """An output projection of its own; False when it had one."""
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
                f"{adapter}: adapts {name}, and this base model has no such linear layer. Merge it "
                "with the base model it was trained on."
            )
        weight: Tensor = module.weight
        if (B.shape[0], A.shape[1]) != tuple(weight.shape):
            raise UserFailure(
                f"{adapter}: {name} maps {A.shape[1]} to {B.shape[0]} features, and in this base "
                f"model {weight.shape[1]} to {weight.shape[0]}. Merge it with the base model it "
                "was trained on."
            )
        weight.copy_(weight.float().addmm_(B.float(), A.float(), alpha=saved.scale))


def copy_other_files(base_folder: Path, part: Path) -> None:
    """Tokenizer, chat template, license: whatever is neither weights nor hidden."""
    for file in base_folder.iterdir():
        is_weights = any(file.match(pattern) for pattern in WEIGHT_FILES)
        if file.is_file() and not file.name.startswith(".") and not is_weights:
            shutil.copyfile(file, part / file.name)
