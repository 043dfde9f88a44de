"""Blob storage in a local folder: listing, fingerprints, and no interned names."""

import math
import os
import sys
from pathlib import Path

import pytest

from tinkex.durable_files import fingerprint
from tinkex.server.store.blobs import Files, folder_problem


def test_keys_below_a_prefix_are_found_by_depth(tmp_path: Path) -> None:
    for key in ("results/aa/one", "results/bb/two", "results/loose", "payloads/aa/other"):
        (tmp_path / key).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / key).write_text("x")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "three").write_text("x")
    (tmp_path / "results" / "cc").symlink_to(elsewhere)
    (tmp_path / "results" / "aa" / "four").symlink_to(elsewhere / "three")
    os.utime(tmp_path / "results/bb/two", (1000, 1000))
    files = Files(str(tmp_path))

    found = files.list_older("results", 2, before_s=math.inf)
    assert sorted(found) == ["results/aa/one", "results/bb/two"]
    assert files.list_older("results", 2, before_s=2000) == ["results/bb/two"]
    assert files.list_older("snapshots", 2, before_s=math.inf) == []


def test_a_fingerprint_covers_names_and_bytes(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    (tmp_path / "b").write_text("2")
    # As stored by earlier versions: it must not change.
    written = "57f1c6adc33e438820f6b69491c937c04bc497f5e40ebc9ca09ef3e08899022c"
    assert fingerprint(str(tmp_path)) == written
    assert folder_problem(str(tmp_path), "snapshots/x", written) is None
    (tmp_path / "b").rename(tmp_path / "c")
    assert "not what was written" in str(folder_problem(str(tmp_path), "snapshots/x", written))


def test_used_names_are_not_interned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A `Path` interns every component of its name, and those are never freed."""
    files, interned = Files(str(tmp_path)), []
    monkeypatch.setattr(sys, "intern", lambda text: interned.append(text) or text)
    for number in range(3):
        key = files.put("results", b"%d" % number)
        assert files.exists(key)
        assert files.get(key) == b"%d" % number
        assert files.list_older("results", 2, before_s=math.inf) == [key]
        files.remove(key)
        assert not files.exists(key)
    assert interned == []
