"""CONTRIBUTING.md names files and folders that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATH = re.compile(r"`((?:src|tests|qa|benchmarks|docs)/[\w./*-]*)`")


def test_every_path_in_contributing_exists() -> None:
    paths = PATH.findall((ROOT / "CONTRIBUTING.md").read_text())
    assert len(paths) > 30
    missing = [path for path in paths if not list(ROOT.glob(path.rstrip("/")))]
    assert not missing
