"""Programs for the official SDK, run unmodified against a server of ours."""

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import sdk_envs
from serving import Server

#: 0.36.0 now and then aborts after the last line of a program, when its interpreter ends. What the
#: program printed before counts; one that aborts earlier has not printed its result.
FINE = (0, -signal.SIGABRT)


def run_program(
    version: str, program: Path, *arguments: str | Path, server: Server, timeout_s: float
) -> dict[str, Any]:
    """The JSON of the last line that the program printed in the environment of that version."""
    done = subprocess.run(
        [sdk_envs.ensure(version), program, *arguments],
        env={**os.environ, "TINKER_BASE_URL": server.url, "TINKER_API_KEY": "tml-any-key-will-do"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    told = f"{done.stderr[-4000:]}\nserver: {''.join(server.log[-40:])}"
    assert done.returncode in FINE, told
    assert done.stdout, told
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result
