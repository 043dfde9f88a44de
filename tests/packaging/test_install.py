"""`make setup` is light, and `qa/install.py` shows what pip does."""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from qa.install import Progress

ROOT = Path(__file__).parents[2]
#: The lines of pip that matter, and one that does not.
SAID = """\
Looking in indexes: https://example.org/simple
Collecting torch==2.9.1 (from -c constraints.txt (line 9))
  Downloading torch-2.9.1-cp311-cp311-linux_x86_64.whl (181.1 MB)
Collecting filelock
  Using cached filelock-3.20.0-py3-none-any.whl (16 kB)
Installing collected packages: mpmath, sympy, filelock, torch
"""


def planned(target: str) -> str:
    """The commands that `make target` would run in a clone without `.venv`."""
    command = ["make", "--dry-run", "VENV=nothing-here", target]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("target", ["setup", "demo"])
def test_the_demo_needs_no_linters_and_no_test_tools(target):
    plan = planned(target)
    assert "--editable '.[server,engine,cli]'" in plan
    assert "--group" not in plan
    assert ".[all]" not in plan


@pytest.mark.parametrize("target", ["test", "check", "format"])
def test_tests_and_checks_add_theirs_to_the_same_environment(target):
    plan = planned(target)
    assert "--group dev --editable '.[all]'" in plan
    assert plan.index(".[server,engine,cli]") < plan.index("--group dev")


def test_progress_is_read_from_the_lines_of_pip():
    progress, shown = Progress(), []
    for line in SAID.splitlines():
        progress.read(line)
        shown.append(str(progress))
    assert shown == [
        "",
        ": 1 package, looking for packages",
        ": 1 package, downloading torch (181.1 MB)",
        ": 2 packages, downloading torch (181.1 MB)",
        ": 2 packages, downloading torch (181.1 MB)",
        ": 4 packages, installing",
    ]


def program(code: int) -> list[str]:
    """A program that runs `qa.install.run` with a stand-in for pip."""
    pip = f"import sys, time; print({SAID!r}, flush=True); time.sleep(0.6); sys.exit({code})"
    run = f"from qa import install; install.LINES_EVERY_S = 0.2; install.run('torch', {[sys.executable, '-c', pip]!r})"
    return [sys.executable, "-c", run]


def test_a_pipe_gets_lines_and_a_failure_says_what_pip_said():
    done = subprocess.run(program(0), cwd=ROOT, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert re.fullmatch(r"  torch: 4 packages, installing \(\d s\)", lines[-2])
    assert re.fullmatch(r"  torch: done in \d s", lines[-1])
    failed = subprocess.run(program(3), cwd=ROOT, capture_output=True, text=True, check=False)
    assert failed.returncode == 3
    assert "torch: failed" in failed.stdout
    assert "Collecting filelock" in failed.stdout


def test_a_terminal_gets_one_live_line():
    ours, theirs = pty.openpty()
    with subprocess.Popen(program(0), cwd=ROOT, stdout=theirs) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                shown += (read := os.read(ours, 4096))
            except OSError:  # the other end is closed
                break
            if not read:
                break
        assert process.wait() == 0
    os.close(ours)
    text = shown.decode()
    assert text.count("\n") == 1
    assert "\r\x1b[K  torch: 4 packages, installing (" in text
