"""
Hashes the contents of a base model folder, to detect that a model has changed.

The hash covers everything that affects the results: config.json, the end tokens, the tokenizer and
the weights. Hashing weights takes seconds per gigabyte, so file hashes are cached and reused as
long as path, inode, size and times of a file stay the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

#: Parts of the hash. Changing how they are computed would make every model look changed.
PARTS = ("config", "tokenizer", "weights")

#: Keys of config.json that do not affect the results.
IGNORED_KEYS = frozenset({"_name_or_path", "transformers_version"})
#: The only keys of generation_config.json that the engine uses.
GENERATION_KEYS = frozenset({"eos_token_id", "bos_token_id"})

BUFFER_BYTES = 4 << 20
#: Hexadecimal digits of each part: 128 bits.
DIGITS = 32


class Stopped(Exception):
    """`stopped()` returned True before the folder was read."""


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
        # Also if stopped, so that the next start continues from there.
        hashes.save()
    return " ".join(f"{part}:{parts[part]}" for part in PARTS)


def changed_parts(before: str, now: str) -> list[str]:
    """The parts in which two hashes differ."""
    first, second = (dict(_pairs(text)) for text in (before, now))
    return [part for part in PARTS if first.get(part) != second.get(part)]


def weight_files(folder: Path) -> list[Path]:
    """The weight files that an engine reads."""
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
    """File hashes, with a cache from earlier starts."""

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
        # Do not cache the hash of a file that changed while it was read.
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
        """Writes the cache for the next start. If that fails, files are hashed again."""
        if not self._is_new:
            return
        there = {path: known for path, known in self._known.items() if Path(path).exists()}
        with contextlib.suppress(OSError):
            self._cache_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            written = self._cache_file.with_name(f".{self._cache_file.name}.{os.getpid()}")
            written.write_text(json.dumps(there, indent=1))
            written.replace(self._cache_file)


def _fingerprint(file: Path) -> list[int]:
    """Metadata that changes when a file is written or replaced. Follows links."""
    found = file.stat()
    return [found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]
