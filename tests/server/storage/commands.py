"""Runs `tinkex ...` commands from tests that run a server in this process."""

import asyncio
import subprocess
import sys


async def tinkex(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    command = [sys.executable, "-m", "tinkex.cli.main", *words]
    return await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, check=False
    )
