"""A command as a process of its own, on a terminal of 80 columns and 24 lines."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping
from pathlib import Path

ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|\][^\x07]*\x07)")


class OnTerminal:
    """`tinkex` with these arguments, and what it has shown so far, without escape sequences."""

    def __init__(self, *args: str, cwd: Path, env: Mapping[str, str] = os.environ) -> None:
        self.controller, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tinkex.cli", *args],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            cwd=cwd,
            env={**env, "TERM": "xterm-256color", "COLUMNS": "80"},
            start_new_session=True,
        )
        os.close(terminal)
        self.raw = self.seen = ""

    def read(self, until: Callable[[], bool], limit_s: float = 60) -> str:
        """What it shows, until something is true or it has ended."""
        deadline = time.monotonic() + limit_s
        while not until():
            assert time.monotonic() < deadline, self.seen
            if select.select([self.controller], [], [], 0.02)[0]:
                try:
                    piece = os.read(self.controller, 65536)
                except OSError:  # it has ended
                    break
                if not piece:
                    break
                self.raw += piece.decode(errors="replace")
                self.seen += ESCAPES.sub("", piece.decode(errors="replace"))
        return self.seen

    def end(self) -> tuple[int, str]:
        """Its exit status, and all it has shown."""
        self.read(lambda: False)
        os.close(self.controller)
        return self.process.wait(20), self.seen
