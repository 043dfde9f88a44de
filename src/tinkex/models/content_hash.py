"""
What a base model's folder holds, as one line of text: another line, other numbers.

Only what the numbers depend on counts: the settings in config.json, the end tokens, the tokenizer,
the weights. Weights take seconds for each gigabyte, so their hashes are cache_file in a small file and used
again for as long as path, inode, size and times of a file stay the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

#: Part of the hash, the version of this recipe: another recipe must not look like another model.
PARTS = ("config", "tokenizer", "weights")

#: Written by tools without any effect on the numbers.
IGNORED_KEYS = frozenset({"_name_or_path", "transformers_version"})
#: Of generation_config.json the end of an answer is used, and nothing else.
GENERATION_KEYS = frozenset({"eos_token_id", "bos_token_id"})

BUFFER_BYTES = 4 << 20
#: Hexadecimal digits of each part: 128 bits.
DIGITS = 32


class Stopped(Exception):
    """Somebody asked to stop before the folder was read."""


def content_hash(
    folder: Path, cache_file: Path, *, stopped: Callable[[], bool] = lambda: False
) -> str | None:
    """`config:... tokenizer:... weights:...`, or None for a folder without weights."""
    weights = weight_files(folder)
    if not weights:
        return None
    hashes = _FileHashes(cache_file, stopped)
    try:
        parts = {
            "config": _config_hash(folder),
            "tokenizer": _joined((file.name, hashes.of(file)) for file in _tokenizer_files(folder)),
            "weights": _joined((file.name, hashes.of(file)) for file in weights),
        }
    finally:
        # Also of a start that was stopped: the next one goes on where it was.
        hashes.save()
    return " ".join(f"{part}:{parts[part]}" for part in PARTS)


def changed_parts(before: str, now: str) -> list[str]:
    """Which parts of two hashes differ."""
    first, second = (dict(_pairs(text)) for text in (before, now))
    return [part for part in PARTS if first.get(part) != second.get(part)]


def weight_files(folder: Path) -> list[Path]:
    """The files that an engine reads its weights from."""
    found = [*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")]
    return sorted(found or folder.glob("*.gguf"))


def _tokenizer_files(folder: Path) -> list[Path]:
    return [file for file in [folder / "tokenizer.json"] if file.is_file()]


def _pairs(text: str) -> Iterable[tuple[str, str]]:
    for pair in text.split():
        part, _, digest = pair.partition(":")
        yield part, digest


def _config_hash(folder: Path) -> str:
    config = _read_json(folder / "config.json")
    settings = {key: value for key, value in config.items() if key not in IGNORED_KEYS}
    generation = _read_json(folder / "generation_config.json")
    ends = {key: value for key, value in generation.items() if key in GENERATION_KEYS}
    text = json.dumps([settings, ends], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        return {"unreadable": hashlib.sha256(file.read_bytes()).hexdigest()}
    return value if isinstance(value, dict) else {"value": value}


def _joined(named: Iterable[tuple[str, str]]) -> str:
    return hashlib.sha256(json.dumps(list(named)).encode()).hexdigest()[:DIGITS]


class _FileHashes:
    """Hashes of files, those from earlier starts included."""

    def __init__(self, cache_file: Path, stopped: Callable[[], bool]) -> None:
        self._cache_file = cache_file
        self._stopped = stopped
        self._known = _read_json(cache_file)
        self._is_new = False

    def of(self, file: Path) -> str:
        fingerprint = _fingerprint(file)
        known = self._known.get(str(file))
        if isinstance(known, list) and known[:-1] == fingerprint:
            return str(known[-1])
        digest = self._read(file)
        # A file that changed while it was read has a hash of nothing that ever was.
        if _fingerprint(file) == fingerprint:
            self._known[str(file)] = [*fingerprint, digest]
            self._is_new = True
        return digest

    def _read(self, file: Path) -> str:
        digest = hashlib.sha256()
        buffer = bytearray(BUFFER_BYTES)
        view = memoryview(buffer)
        with file.open("rb", buffering=0) as opened:
            while size := opened.readinto(buffer):
                if self._stopped():
                    raise Stopped
                digest.update(view[:size])
        return digest.hexdigest()

    def save(self) -> None:
        """For the next start; without it the files are read again."""
        if not self._is_new:
            return
        there = {path: known for path, known in self._known.items() if Path(path).exists()}
        with contextlib.suppress(OSError):
            self._cache_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            written = self._cache_file.with_name(f".{self._cache_file.name}.{os.getpid()}")
            written.write_text(json.dumps(there, indent=1))
            written.replace(self._cache_file)


def _fingerprint(file: Path) -> list[int]:
    """What differs once a file was written or replaced; links are followed."""
    found = file.stat()
    return [found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]
