"""The examples run, on the tiny model, and are short enough to copy."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from serving import TINY

FOLDER = Path(__file__).parents[2] / "examples"
EXAMPLES = sorted(FOLDER.glob("*.py"))
#: What each prints last, if it does not save weights.
ENDS = {"evaluate_many": "a wrong one: "}


@pytest.mark.parametrize("example", sorted(FOLDER.rglob("*.py")), ids=lambda path: path.stem)
def test_the_example_is_short_enough_to_copy(example):
    assert len(example.read_text().splitlines()) < 120


@pytest.mark.timeout(120)  # with the start of the server
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("error")
def test_the_example_runs(example, server, tiny_model, tmp_path, monkeypatch, capsys):
    arguments = ["--base-url", server.url, "--model", TINY, "--steps", "3"]
    if example.stem == "upcycle":
        arguments += ["--dense", str(tiny_model), "--out", str(tmp_path / "mixture")]
    # In this process: a new one would import transformers again, which takes longer than the rest.
    monkeypatch.setattr(sys, "argv", [str(example), *arguments])
    runpy.run_path(str(example), run_name="__main__")
    assert ENDS.get(example.stem, "saved as tinker://") in capsys.readouterr().out


def test_an_example_is_a_program(server):
    example = next(path for path in EXAMPLES if path.stem == "fine_tune")
    arguments = ["--base-url", server.url, "--model", TINY, "--steps", "1"]
    command = [sys.executable, "-W", "error", str(example), *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "saved as tinker://" in ran.stdout
