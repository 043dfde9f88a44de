"""Runs `tinkex ...` commands from tests that run a server in this process."""

import asyncio
import os
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from forked_shell import ForkedShell

#: `await tinkex("key", "list")` runs a command to its end.
Tinkex = Callable[..., Awaitable[subprocess.CompletedProcess[str]]]


@contextmanager
def commands(folder: Path) -> Iterator[Tinkex]:
    """Commands that run in a folder, with the environment that this process has at that time."""
    with ForkedShell({}, folder) as shell:

        async def run(*words: str) -> subprocess.CompletedProcess[str]:
            ran = await asyncio.to_thread(shell, *words, env=dict(os.environ))
            return subprocess.CompletedProcess(words, ran.code, ran.out, ran.err)

        yield run
