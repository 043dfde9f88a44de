"""`tinkex ...` as a user runs it, from tests that have a server of their own to keep going."""

import asyncio
import subprocess
import sys


async def tinkex(*words: str) -> subprocess.CompletedProcess[str]:
    """The command to its end."""
    command = [sys.executable, "-m", "tinkex.cli.main", *words]
    return await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, check=False
    )
