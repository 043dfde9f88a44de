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


def tensor_names(folder: Path) -> Iterator[str]:
    """The tensor names in the headers of a folder's safetensors files, without reading weights."""
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            if size > min(MAX_HEADER_BYTES, file.stat().st_size):
                continue  # not a safetensors file; loading it reports the error
            try:
                header = json.loads(opened.read(size))
            except ValueError:
                continue
        if isinstance(header, dict):
            yield from header


def _is_plain(name: object, endings: tuple[str, ...]) -> bool:
    return isinstance(name, str) and name.endswith(endings) and not set(name) & set("/\\\0")
