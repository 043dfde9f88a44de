"""Reads the files of an adapter, which other programs and other people may have written.

Everything that a file says is checked before memory is taken for it. What no adapter has is refused
in one sentence, however large the file is.
"""

from __future__ import annotations

import json
import reprlib
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from tinkex.models.weight_file_checks import MAX_SIZE, read_header
from tinkex.wire.errors import UserFailure
from tinkex.wire.text_format import format_bytes

#: Of a JSON file: a hundred times as much as the largest that is known.
MAX_JSON_BYTES = 4 << 20
#: Of a file with a pair for every expert of the largest mixtures, twice.
MAX_TENSORS = 500_000
#: Experts' factors have the most.
MAX_DIMENSIONS = 3

_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 3, 80, 80


def shown(value: object) -> str:
    """A value of a file, shortened: it may be anything."""
    return _SHORT.repr(value)


def read_json(folder: Path, name: str) -> dict[str, Any]:
    path = folder / name
    try:
        if (size := path.stat().st_size) > MAX_JSON_BYTES:
            raise UserFailure(
                f"{folder.name}: {name} has {format_bytes(size)}; at most "
                f"{format_bytes(MAX_JSON_BYTES)} are read."
            )
        value: Any = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise _missing(folder, name) from None
    except (ValueError, RecursionError, IsADirectoryError) as error:
        raise _unreadable(folder, name, error) from None
    if not isinstance(value, dict):
        raise UserFailure(f"{folder.name}: {name} is not a JSON object.")
    return cast(dict[str, Any], value)


def read_tensors(folder: Path, name: str) -> dict[str, Tensor]:
    try:
        if (folder / name).is_dir():
            raise IsADirectoryError("it is a folder")
        _check_header(folder, name)
        return load_file(folder / name)
    except (FileNotFoundError, NotADirectoryError):
        raise _missing(folder, name) from None
    except (SafetensorError, IsADirectoryError) as error:
        raise _unreadable(folder, name, error) from None


def _check_header(folder: Path, name: str) -> None:
    """Without a header that can be read, reading the tensors fails too, and says why."""
    entries = read_header(folder / name)
    if len(entries) > MAX_TENSORS:
        raise UserFailure(
            f"{folder.name}: {name} has {len(entries):,} tensors; at most {MAX_TENSORS:,} are read."
        )
    for key, entry in entries.items():
        # The library also takes a list of the three values, which nobody writes.
        shape = entry.get("shape") if isinstance(entry, dict) else entry
        if key != "__metadata__" and (
            not isinstance(shape, list)
            or len(shape) > MAX_DIMENSIONS
            or not all(type(size) is int and size <= MAX_SIZE for size in shape)
        ):
            raise UserFailure(
                f"{folder.name}: {name} cannot be read: {shown(key)} has the shape {shown(shape)}, "
                "which no matrix of an adapter has."
            )


def _missing(folder: Path, name: str) -> UserFailure:
    return UserFailure(f"{folder.name}: has no {name}; it is not a checkpoint.")


def _unreadable(folder: Path, name: str, error: Exception) -> UserFailure:
    return UserFailure(f"{folder.name}: {name} cannot be read: {str(error)[:300]}")
