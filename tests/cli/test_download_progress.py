"""Progress of a model download: a bar on a terminal, plain lines in a log."""

import os
import pty
import subprocess
import sys

PROGRAM = """
import sys
from tinkex.cli.download_progress import fetch_progress
with fetch_progress() as progress:
    print("rich" in sys.modules)
    for done in range(0, 101, 5):
        progress(done * 1_000_000, 100_000_000, "fetching a/model")
"""


def run(stderr: int) -> str:
    """What the program prints, with this descriptor as its standard error."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        check=True,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "80"},
    )
    return done.stdout


def test_a_terminal_gets_a_bar() -> None:
    ours, theirs = pty.openpty()
    try:
        # Nothing was downloaded yet, so nothing was loaded for it.
        assert run(theirs) == "False\n"
        shown = os.read(ours, 65536).decode()
    finally:
        os.close(theirs)
        os.close(ours)
    assert "fetching a/model" in shown
    assert "━" in shown
    assert "100.0/100.0 MB" in shown


def test_a_log_gets_plain_lines() -> None:
    reading, writing = os.pipe()
    with open(reading) as log:
        try:
            run(writing)
        finally:
            os.close(writing)
        lines = log.read().splitlines()
    assert lines == [
        f"fetching a/model: {megabytes} of 100 MB" for megabytes in (0, 25, 50, 75, 100)
    ]
