"""The examples run from the command line."""

import subprocess
import sys
from pathlib import Path

import pytest

from serving import TINY

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_example_runs_and_is_short_enough_to_copy(example, server):
    assert len(example.read_text().splitlines()) < 100
    arguments = ["--base-url", server.url, "--model", TINY, "--steps", "3"]
    command = [sys.executable, "-W", "error", str(example), *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "saved as tinker://" in ran.stdout
