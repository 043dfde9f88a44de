"""A shell on a real terminal of 80 columns, into which commands are pasted."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Mapping
from pathlib import Path

_ESCAPE = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07]*\x07|[@-Z\\^_])")


class Failed(Exception):
    """A command did not do what the page says."""


def as_read(raw: str) -> str:
    """What is on the screen at the end: without colors, and the last of lines that were redrawn."""
    plain = _ESCAPE.sub("", raw).replace("\r\n", "\n")
    return "\n".join(line.rpartition("\r")[2].rstrip() for line in plain.split("\n"))


class Terminal:
    """One shell. Its variables and its folder are kept between commands."""

    def __init__(self, name: str, folder: Path, env: Mapping[str, str], log: Path) -> None:
        self.name = name
        self._log = log
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        settings = termios.tcgetattr(theirs)
        settings[3] &= ~termios.ECHO
        termios.tcsetattr(theirs, termios.TCSANOW, settings)
        self._shell = subprocess.Popen(
            ["bash", "--norc", "--noprofile", "--noediting", "-i"],
            cwd=folder,
            env=dict(env),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            # Make it the terminal of the session, so that Ctrl-C is a signal.
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509
        )
        os.close(theirs)
        self._file = ours
        self._unread = ""
        self._numbers = itertools.count(1)
        self.run("PS1= PS2=", limit_s=30)  # output without prompts

    def run(self, command: str, *, limit_s: float) -> tuple[int, str]:
        """Paste a command and wait for its end: its exit status, and what it printed."""
        number = next(self._numbers)
        self._write(f"{command}\nprintf '\\n__ended {number} %d__\\n' $?\n")
        pattern = re.compile(rf"\n__ended {number} (\d+)__\r?\n")
        raw, ended = self._read_until(pattern, limit_s, command)
        return int(ended[1]), as_read(raw).strip("\n")

    def start(self, command: str, ready: str, *, limit_s: float) -> str:
        """Paste a command that goes on; wait until it prints `ready`. What it printed until then."""
        self._write(f"{command}\n")
        raw, found = self._read_until(re.compile(ready), limit_s, command)
        return as_read(raw + found[0])

    def interrupt(self, *, tries: int = 30) -> None:
        """Ctrl-C, and wait until the command has ended and the shell answers again."""
        self._write("\x03")
        for _ in range(tries):
            # A shell that is interrupted may drop what was pasted meanwhile, so it is repeated.
            with contextlib.suppress(Failed):
                self.run(":", limit_s=2)
                return
        raise Failed(f"{self.name}: did not stop after Ctrl-C")

    def close(self) -> None:
        os.killpg(self._shell.pid, signal.SIGHUP)
        try:
            self._shell.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self._shell.pid, signal.SIGKILL)
            self._shell.wait()
        os.close(self._file)

    def _write(self, text: str) -> None:
        os.write(self._file, text.encode())

    def _read_until(
        self, pattern: re.Pattern[str], limit_s: float, command: str
    ) -> tuple[str, re.Match[str]]:
        end = time.monotonic() + limit_s
        seen = self._unread
        while (found := pattern.search(seen)) is None:
            ready, _, _ = select.select([self._file], [], [], max(0.0, end - time.monotonic()))
            read = os.read(self._file, 65536).decode(errors="replace") if ready else ""
            if not read:
                raise Failed(f"{command}: not done after {limit_s:g} s\n{as_read(seen)[-2000:]}")
            with self._log.open("a") as log:
                log.write(read)
            seen += read
        self._unread = seen[found.end() :]
        return seen[: found.start()], found
