"""
Installs packages into a virtual environment, and shows how far it is.

    python qa/install.py VENV WHAT PIP_ARGUMENT...

pip is either silent or prints a line for each of a hundred packages. This prints one line: a live
one on a terminal, else one every ten seconds. Of a failure it prints what pip said last. It runs
before anything is installed, so it uses only the standard library.
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path

LIVE_EVERY_S = 0.5
LINES_EVERY_S = 10.0
LAST_LINES = 30

COLLECTED = re.compile(r"^Collecting ([\w.-]+)")
DOWNLOADED = re.compile(r"^\s*Downloading (\S+?)(?:-\d\S*)? \(([\d.]+ [kMG]?B)\)")
INSTALLS = re.compile(r"^Installing collected packages: (.*)")


class Progress:
    """What pip is doing, from the lines that it prints."""

    def __init__(self) -> None:
        self.packages = 0
        self.doing = ""

    def read(self, line: str) -> None:
        if COLLECTED.match(line):
            self.packages += 1
            self.doing = self.doing or "looking for packages"
        elif found := DOWNLOADED.match(line):
            self.doing = f"downloading {found[1]} ({found[2]})"
        elif found := INSTALLS.match(line):
            self.packages = len(found[1].split(","))
            self.doing = "installing"

    def __str__(self) -> str:
        if not self.packages:
            return ""
        return f": {self.packages} package{'s' if self.packages > 1 else ''}, {self.doing}"


def run(what: str, command: list[str]) -> None:
    """Run a command, and show `what` and its progress. Exits if it fails."""
    started = time.monotonic()
    progress, said = Progress(), deque[str](maxlen=LAST_LINES)
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line)
            progress.read(line)

    reader = threading.Thread(target=read)
    reader.start()
    live = sys.stdout.isatty()
    try:
        while reader.is_alive():
            reader.join(LIVE_EVERY_S if live else LINES_EVERY_S)
            if reader.is_alive():
                text = f"  {what}{progress} ({time.monotonic() - started:.0f} s)"
                print(
                    f"\r\x1b[K{text[:79]}" if live else text, end="" if live else "\n", flush=True
                )
        code = process.wait()
    except KeyboardInterrupt:  # pip gets it too
        code = process.wait() or 130
    clear = "\r\x1b[K" if live else ""
    if code:
        print(f"{clear}  {what}: failed", "".join(said), sep="\n", end="", flush=True)
        sys.exit(code)
    print(f"{clear}  {what}: done in {time.monotonic() - started:.0f} s", flush=True)


def main(venv: str, what: str, *arguments: str) -> None:
    pip = [str(Path(venv) / "bin" / "pip"), "install", "-c", "constraints.txt"]
    if not Path(pip[0]).exists():
        print(f"Setting up {venv} (one to three minutes; torch is large)", flush=True)
        run("a virtual environment", [sys.executable, "-m", "venv", venv])
    run("pip", [*pip, "--disable-pip-version-check", "--upgrade", "pip"])
    run(what, [*pip, *arguments])


if __name__ == "__main__":
    main(*sys.argv[1:])
