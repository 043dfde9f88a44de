"""
Local copies of folders that are in an object store: checkpoints and snapshots.

Engines read and write local folders, so each machine has copies of those that it uses. The cleanup
deletes the copies that were not used for the longest time, once they take more than the limit.
"""

import contextlib
import os
import shutil
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tinkex.server.store.blobs import PREFIX_DEPTHS, Files

#: Prefixes of keys that have local copies.
PREFIXES = ("checkpoints", "snapshots")
#: A copy is not deleted so soon after its last use: an engine may be about to read it.
RECENT_S = 600.0
#: After this time, a copy that no row refers to is left over from a save that was interrupted.
ABANDONED_S = 24 * 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class CachedFolder:
    """One folder of the cache."""

    key: str
    size_bytes: int
    used_s: float


def to_delete(
    copies: Iterable[CachedFolder],
    *,
    stored: Collection[str],
    limit_bytes: int,
    now_s: float,
) -> list[str]:
    """
    The keys of copies to delete: the least recently used ones beyond the limit (0 is no limit).

    Only copies of `stored` folders: any other may be the only one, until it is uploaded.
    """
    by_age = sorted(copies, key=lambda copy: copy.used_s)
    left = sum(copy.size_bytes for copy in by_age)
    gone = []
    for copy in by_age:
        unused_s = now_s - copy.used_s
        beyond = 0 < limit_bytes < left and unused_s > RECENT_S and copy.key in stored
        if beyond or (copy.key not in stored and unused_s > ABANDONED_S):
            gone.append(copy.key)
            left -= copy.size_bytes
    return gone


class BlobCache:
    """The copies below one folder. Not `enabled` if the storage itself is local: it has none."""

    def __init__(self, files: Files, folder: Path) -> None:
        self._folder = str(folder)
        self.enabled = files.local is None
        self._held: Counter[str] = Counter()

    def touch(self, folder: str) -> None:
        """Note that a copy is used now, also for the next process."""
        with contextlib.suppress(OSError):
            os.utime(folder)

    @contextlib.contextmanager
    def held(self, name: str) -> Iterator[None]:
        """Copies whose keys end with this name are not deleted inside of the `with` block."""
        self._held[name] += 1
        try:
            yield
        finally:
            self._held[name] -= 1
            if not self._held[name]:
                del self._held[name]

    def copies(self) -> list[CachedFolder]:
        """Everything in the cache that may be deleted now."""
        local = Files(self._folder)
        found = []
        for prefix in PREFIXES:
            for key in local.list_older(prefix, PREFIX_DEPTHS[prefix], before_s=time.time()):
                path = f"{self._folder}/{key}"
                with contextlib.suppress(OSError):
                    if key.rpartition("/")[2] not in self._held:
                        size_bytes = sum(entry.stat().st_size for entry in os.scandir(path))
                        used_s = os.stat(path).st_mtime
                        found.append(CachedFolder(key=key, size_bytes=size_bytes, used_s=used_s))
        return found

    def delete(self, key: str) -> None:
        """Delete a copy; nobody sees a part of it."""
        path = f"{self._folder}/{key}"
        head, name = os.path.split(path)
        aside = f"{head}/.{name}.deleted"
        with contextlib.suppress(OSError):
            os.rename(path, aside)
        shutil.rmtree(aside, ignore_errors=True)
