"""CONTRIBUTING.md names files and folders that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: In backticks, with a slash: paths below the root of the repository or below src/tinkex.
PATH = re.compile(r"`([a-z][\w.*-]*/[\w./*-]*)`")


def test_every_path_in_contributing_exists() -> None:
    paths = PATH.findall((ROOT / "CONTRIBUTING.md").read_text())
    assert len(paths) > 30
    folders = (ROOT, ROOT / "src" / "tinkex")
    missing = [
        path for path in paths if not any(list(one.glob(path.rstrip("/"))) for one in folders)
    ]
    assert not missing
