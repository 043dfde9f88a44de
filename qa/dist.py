"""
Builds the source distribution, and the wheel from it: python -m qa.dist [FOLDER] (`make dist`)

The wheel is built from the unpacked source distribution, as pip does it for somebody who has only
that. Nothing is downloaded: hatchling comes with `make dev`.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def build(folder: Path) -> tuple[Path, Path]:
    """Write both files into a folder; returns the source distribution and the wheel."""
    folder.mkdir(parents=True, exist_ok=True)
    sdist = _hatch("sdist", ROOT, folder)
    with tempfile.TemporaryDirectory() as unpacked:
        with tarfile.open(sdist) as packed:
            packed.extractall(unpacked, filter="data")
        (source,) = Path(unpacked).iterdir()
        wheel = _hatch("wheel", source, folder)
    return sdist, wheel


def _hatch(target: str, source: Path, folder: Path) -> Path:
    """Build one file of the project in `source`; returns its path in `folder`."""
    with tempfile.TemporaryDirectory() as built:
        command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", built]
        done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(done.stderr)
        (file,) = Path(built).iterdir()
        return Path(shutil.move(file, folder / file.name))


def main(folder: str = "dist") -> None:
    for built in build(Path(folder)):
        print(f"{built}  {built.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main(*sys.argv[1:])
