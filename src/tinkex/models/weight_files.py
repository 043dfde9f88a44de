"""
Which files hold the weights of a model folder, before anything opens one.

A folder may come from a stranger. An index names files, and transformers opens whatever it names: by
the ending of the name it decides between safetensors, which are numbers, and pickles, which are
programs. So every name has to be a plain `*.safetensors` in the folder itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

# As long as the safetensors library itself allows.
MAX_HEADER_BYTES = 100_000_000

_LAYER = re.compile(r"(?:^|\.)(\d+)\.")


class RefusedFolder(ValueError):
    """A folder whose weights are not opened; the text says why, and what to do."""


def check_weight_files(folder: Path, config: Mapping[str, Any]) -> None:
    """Raises RefusedFolder unless only plain safetensors files of this folder would be opened."""
    if (folder / "adapter_config.json").exists():
        raise RefusedFolder(
            f"{folder} has an adapter_config.json: it is an adapter, and its base model is "
            "elsewhere. Serve the base model; `tinkex merge` makes a full model of the two."
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
    """The files that an index names; raises RefusedFolder if one is no plain safetensors file."""
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RefusedFolder(
            f"{index} is no index of weights ({error!r:.200}). Fetch the model again."
        ) from error
    strange = [name for name in names if not _is_plain(name, (".safetensors",))]
    if strange:
        raise RefusedFolder(
            f"{index} names {str(strange[0])[:200]!r}. Weights must be *.safetensors files in the "
            "folder itself: other files may be programs. Save the model again with "
            "save_pretrained(folder), which writes such files."
        )
    return set(names)


def check_layers(layers: int, names: Collection[str], folder: Path) -> None:
    """Raises RefusedFolder if the settings ask for layers that have no weights."""
    found = {int(match[1]) for name in names if (match := _LAYER.search(name))}
    if found and layers > max(found) + 1:
        raise RefusedFolder(
            f"config.json of {folder} says {layers} layers, and the weights have {max(found) + 1}: "
            "the others would be made up. Fetch the model again, or mend num_hidden_layers."
        )


def tensor_names(folder: Path) -> Iterator[str]:
    """What the heads of the safetensors files of a folder list; the weights are not read."""
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            if size > min(MAX_HEADER_BYTES, file.stat().st_size):
                continue  # not such a file; who loads it says so
            try:
                head = json.loads(opened.read(size))
            except ValueError:
                continue
        if isinstance(head, dict):
            yield from head


def _is_plain(name: object, endings: tuple[str, ...]) -> bool:
    return isinstance(name, str) and name.endswith(endings) and not set(name) & set("/\\\0")
