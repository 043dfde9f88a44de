"""Local copies of folders that are in an object store."""

import os
import time
from pathlib import Path

from tinkex.server.store.blob_cache import BlobCache, CachedFolder, to_delete
from tinkex.server.store.blobs import Files

NOW_S = 1_000_000.0


def copy(key: str, age_s: float, size_bytes: int = 10) -> CachedFolder:
    return CachedFolder(key=key, size_bytes=size_bytes, used_s=NOW_S - age_s)


def chosen(*copies: CachedFolder, limit_bytes: int, unstored: str = "") -> list[str]:
    stored = {copy.key for copy in copies} - {unstored}
    return to_delete(copies, stored=stored, limit_bytes=limit_bytes, now_s=NOW_S)


def test_the_least_recently_used_copies_beyond_the_limit_go() -> None:
    copies = (copy("a", 5000), copy("b", 7000), copy("c", 6000), copy("d", 4000))
    assert chosen(*copies, limit_bytes=20) == ["b", "c"]
    assert chosen(*copies, limit_bytes=40) == []
    assert chosen(*copies, limit_bytes=0) == []  # no limit


def test_a_copy_in_use_or_the_only_one_stays() -> None:
    assert chosen(copy("a", 30), copy("b", 40), limit_bytes=1) == []
    # It may be waiting for the object store.
    assert chosen(copy("a", 7000), limit_bytes=1, unstored="a") == []
    assert chosen(copy("a", 200_000), limit_bytes=0, unstored="a") == ["a"]


def test_copies_are_found_held_and_deleted(tmp_path: Path) -> None:
    cache = BlobCache(Files("memory://store"), tmp_path)
    version = tmp_path / "checkpoints" / "s:train:0" / "weights" / "n" / "v1"
    snapshot = tmp_path / "snapshots" / "s:train:0" / "one"
    for folder in (version, snapshot):
        folder.mkdir(parents=True)
        (folder / "file").write_bytes(b"1234")
        os.utime(folder, (1.0, 1.0))
    cache.touch(str(snapshot))
    found = {one.key: one for one in cache.copies()}
    keys = {str(folder.relative_to(tmp_path)) for folder in (version, snapshot)}
    assert set(found) == keys
    assert all(one.size_bytes == 4 for one in found.values())
    assert sorted(one.used_s > time.time() - 60 for one in found.values()) == [False, True]
    with cache.held("v1"):
        assert [one.key.partition("/")[0] for one in cache.copies()] == ["snapshots"]
    for key in keys:
        cache.delete(key)
    assert cache.copies() == []


def test_local_storage_has_no_copies(tmp_path: Path) -> None:
    assert not BlobCache(Files(str(tmp_path)), tmp_path).enabled
