"""The folder where fetched models are kept, and how they get there whole or not at all."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

#: Called as `progress(done, total, what)`: bytes so far, bytes in all, and a phrase for people.
Progress = Callable[[int, int, str], None]


def no_progress(done: int, total: int, what: str) -> None:
    """Progress for those who did not ask."""


def line_progress(stream: TextIO) -> Progress:
    """Progress as a line for each quarter of each phrase, for logs and pipes."""
    last: dict[str, int] = {}

    def progress(done: int, total: int, what: str) -> None:
        quarter = 4 * done // total if total else 4
        if quarter > last.get(what, -1):
            last[what] = quarter
            print(f"{what}: {done / 1e6:.0f} of {total / 1e6:.0f} MB", file=stream, flush=True)

    return progress


def cache_folder(env: Mapping[str, str] = os.environ) -> Path:
    """$TINKEX_CACHE, or `tinkex` in $XDG_CACHE_HOME, or ~/.cache/tinkex. Not made here."""
    if chosen := env.get("TINKEX_CACHE"):
        return Path(chosen).expanduser()
    if shared := env.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "tinkex"
    return Path(env.get("HOME") or Path.home()) / ".cache" / "tinkex"


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file `path`: one process at a time, let go even by a killed one."""
    import fcntl  # not on Windows, where only the client half is promised

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def staged(final: Path) -> Iterator[Path]:
    """
    An empty folder that becomes `final` when the block ends well, and vanishes when it does not.

    It lies beside `final`, so that publishing is one rename.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{final.name}-", dir=final.parent))
    try:
        yield staging
        staging.chmod(0o755)  # mkdtemp made it private
        staging.replace(final)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
