"""
Checks which weight files a model folder refers to, before any of them is opened.

A folder may be untrusted. transformers opens every file that an index names, and by its extension
treats it as safetensors, which are data, or as a pickle, which can run code. So every name must be
a plain `*.safetensors` file in the folder itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

# Limit of the safetensors library.
MAX_HEADER_BYTES = 100_000_000
#: Of one dimension of a tensor; no model comes near.
MAX_SIZE = 2**40

_LAYER = re.compile(r"(?:^|\.)(\d+)\.")


class RefusedFolder(ValueError):
    """The weights of this folder are not opened. The message says why and what to do."""


def check_weight_files(folder: Path, config: Mapping[str, Any]) -> None:
    """Raises RefusedFolder unless only plain safetensors files of this folder would be opened."""
    if (folder / "adapter_config.json").exists():
        raise RefusedFolder(
            f"{folder} has an adapter_config.json: it is an adapter without its base model. Serve "
            "the base model, or make a full model of both with `tinkex merge`."
        )
    explicit = config.get("transformers_weights")
    if explicit is not None and not _is_plain(
        explicit, (".safetensors", ".safetensors.index.json")
    ):
        raise RefusedFolder(
            f"config.json of {folder} names {str(explicit)[:200]!r} as its weights. Weights must "
            "be *.safetensors files in the folder itself."
        )
    for index in sorted(folder.glob("*.safetensors.index.json")):
        check_index(index)


def check_index(index: Path) -> set[str]:
    """The files that an index names. Raises RefusedFolder unless all are plain safetensors."""
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RefusedFolder(
            f"{index} is not a valid weight index ({error!r:.200}). Download the model again."
        ) from error
    invalid = [name for name in names if not _is_plain(name, (".safetensors",))]
    if invalid:
        raise RefusedFolder(
            f"{index} names {str(invalid[0])[:200]!r}. Weights must be *.safetensors files in the "
            "folder itself, because other formats can run code. Save the model again with "
            "save_pretrained(folder)."
        )
    return set(names)


def check_layers(layers: int, names: Collection[str], folder: Path) -> None:
    """Raises RefusedFolder if the config has more layers than the weights."""
    found = {int(match[1]) for name in names if (match := _LAYER.search(name))}
    if found and layers > max(found) + 1:
        raise RefusedFolder(
            f"config.json of {folder} has {layers} layers, but the weights have {max(found) + 1}: "
            "the others would be random. Download the model again, or correct num_hidden_layers."
        )


def check_complete(missing: Collection[str], folder: Path) -> None:
    """Raises RefusedFolder if weights that the model needs are in no file."""
    if missing:
        raise RefusedFolder(
            f"the weights of {folder} lack {len(missing)} that its config.json needs, such as "
            f"{min(missing)}: they would be random. Download the model again, or correct "
            "config.json."
        )


def check_fp8_blocks(folder: Path, quantization: Mapping[str, Any]) -> None:
    """
    Raises RefusedFolder if a matrix in FP8 ends with a part of a block.

    transformers divides a matrix evenly by its number of scales, so it would read such a matrix
    with wrong scales.
    """
    block = quantization.get("weight_block_size")
    if not isinstance(block, list | tuple) or len(block) != 2:
        return
    shapes = tensor_shapes(folder)
    for name, scales in shapes.items():
        matrix = shapes.get(name.removesuffix("_scale_inv"), ())[-2:]
        if not name.endswith("_scale_inv") or len(matrix) != 2:
            continue
        for size, parts, whole in zip(matrix, scales[-2:], block, strict=False):
            if parts > 1 and size != parts * whole:
                raise RefusedFolder(
                    f"{name} of {folder} has {list(scales)} scales for a matrix of "
                    f"{list(matrix)} in blocks of {list(block)}: its last block is not a whole "
                    "one, and transformers reads such a matrix with wrong scales. Serve the "
                    "folder of the model in bfloat16."
                )


def tensor_names(folder: Path) -> Iterator[str]:
    """The tensor names in the headers of a folder's safetensors files, without reading weights."""
    for file in sorted(folder.glob("*.safetensors")):
        yield from read_header(file)


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """
    Names and shapes of the tensors that are loaded from a folder, without reading weights.

    Those of a GGUF file have the names of a Llama checkpoint.
    """
    if not any(folder.glob("*.safetensors")) and (ggufs := sorted(folder.glob("*.gguf"))):
        from tinkex.models.gguf import hf_name, read_gguf

        tensors = read_gguf(ggufs[0]).tensors
        return {
            new_name: tensors.info(name).shape
            for name in tensors
            if (new_name := hf_name(name)) is not None
        }
    found: dict[str, tuple[int, ...]] = {}
    for file in weight_files(folder):
        for name, entry in read_header(file).items():
            shape = entry.get("shape") if isinstance(entry, dict) else None
            if isinstance(shape, list) and all(
                type(n) is int and 0 <= n <= MAX_SIZE for n in shape
            ):
                found[name] = tuple(shape)
    return found


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that are loaded: some folders have the same weights again."""
    if index := next(folder.glob("*.safetensors.index.json"), None):
        return [folder / name for name in sorted(check_index(index))]
    files = sorted(folder.glob("*.safetensors"))
    single = folder / "model.safetensors"
    return [single] if single in files else files


def read_header(file: Path) -> dict[str, Any]:
    """The header of a safetensors file; empty if it is none, which loading it reports."""
    try:
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            if size > min(MAX_HEADER_BYTES, file.stat().st_size):
                return {}
            header = json.loads(opened.read(size))
    except (OSError, ValueError, RecursionError):
        return {}
    return header if isinstance(header, dict) else {}


def _is_plain(name: object, endings: tuple[str, ...]) -> bool:
    return isinstance(name, str) and name.endswith(endings) and not set(name) & set("/\\\0")
