"""The model cache folder: its location, locks, atomic writes, and progress callbacks."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from tinkex import file_locks

#: Called as `progress(done, total, what)`: bytes so far, total bytes, and a description.
Progress = Callable[[int, int, str], None]


def no_progress(done: int, total: int, what: str) -> None:
    """A progress callback that does nothing."""


def line_progress(stream: TextIO) -> Progress:
    """A progress callback that prints a line for every quarter, for logs and pipes."""
    last: dict[str, int] = {}

    def progress(done: int, total: int, what: str) -> None:
        quarter = 4 * done // total if total else 4
        if quarter > last.get(what, -1):
            last[what] = quarter
            print(f"{what}: {done / 1e6:.0f} of {total / 1e6:.0f} MB", file=stream, flush=True)

    return progress


def cache_folder(env: Mapping[str, str] = os.environ) -> Path:
    """$TINKEX_CACHE, or `tinkex` in $XDG_CACHE_HOME, or ~/.cache/tinkex. Does not create it."""
    if chosen := env.get("TINKEX_CACHE"):
        return Path(chosen).expanduser()
    if shared := env.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "tinkex"
    return Path(env.get("HOME") or Path.home()) / ".cache" / "tinkex"


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds the lock file `path`. The system releases the lock if the process is killed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file_locks.lock(file)
        yield


@contextmanager
def staged(final: Path) -> Iterator[Path]:
    """
    A temporary folder that is renamed to `final` if the block succeeds, and deleted if it fails.

    It is next to `final`, so that publishing is one rename.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{final.name}-", dir=final.parent))
    try:
        yield staging
        staging.chmod(0o755)  # mkdtemp creates a private folder
        staging.replace(final)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
