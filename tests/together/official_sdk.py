"""Runs programs with an unmodified official SDK, each release in its own virtual environment."""

import asyncio
import json
import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sdk_envs
from server.hosting import Api
from serving import Server

#: SDK 0.36.0 sometimes aborts while its interpreter exits, after the program's last line. The printed
#: result still counts; a program that aborts earlier has not printed one.
ACCEPTED_STATUSES = (0, -signal.SIGABRT)
ANY_KEY = "tml-any-key-will-do"


@dataclass(frozen=True)
class Finished:
    """A program that has ended."""

    status: int
    #: The JSON of the last printed line; None if nothing was printed.
    result: Any
    stderr: str

    @property
    def succeeded(self) -> bool:
        return self.result is not None and self.status in ACCEPTED_STATUSES


def environment(url: str, key: str = ANY_KEY) -> dict[str, str]:
    return {**os.environ, "TINKER_BASE_URL": url, "TINKER_API_KEY": key}


def finish(
    version: str,
    program: Path,
    *arguments: str | Path,
    url: str,
    key: str = ANY_KEY,
    timeout_s: float = 100.0,
) -> Finished:
    """Runs a program with one SDK version until it ends, successfully or not."""
    done = subprocess.run(
        [sdk_envs.ensure(version), program, *arguments],
        env=environment(url, key),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    lines = done.stdout.splitlines()
    return Finished(done.returncode, json.loads(lines[-1]) if lines else None, done.stderr)


def run_program(
    version: str, program: Path, *arguments: str | Path, server: Server, timeout_s: float
) -> dict[str, Any]:
    """The JSON that a program prints, run against a server process."""
    done = finish(version, program, *arguments, url=server.url, timeout_s=timeout_s)
    assert done.succeeded, f"{done.stderr[-4000:]}\nserver: {''.join(server.log[-40:])}"
    result: dict[str, Any] = done.result
    return result


async def run_program_async(version: str, program: Path, *arguments: str | Path, api: Api) -> Any:
    """The JSON that a program prints, run against an application hosted on this event loop."""
    url = str(api.http._base_url)
    done = await asyncio.to_thread(finish, version, program, *arguments, url=url)
    assert done.succeeded, done.stderr[-4000:]
    return done.result
