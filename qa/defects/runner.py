"""Runs the programs of the cases with one client, and judges their output."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from qa.defects.case import KEY, Case, program, read
from qa.defects.cases import CASES
from tinkex.testing import Loopback

#: Runs the program of a case with these environment variables. What it wrote to stdout and stderr;
#: None if it took longer than its limit.
Run = Callable[[Case, str, dict[str, str]], tuple[str, str] | None]


def verdict(case: Case, *, package: str, run: Run) -> str | None:
    """None if the defect is absent, otherwise what happened."""
    fake = case.service()
    with Loopback(fake) as service, tempfile.TemporaryDirectory() as home:
        env = {
            "PATH": os.environ["PATH"],
            "HOME": home,
            "TINKER_BASE_URL": service.url,
            "TINKER_API_KEY": KEY,
            "PYTHONWARNINGS": "ignore",
            "HF_HUB_OFFLINE": "1",
            **case.env,
        }
        if (ran := run(case, program(case, package), env)) is None:
            return f"no result within {case.limit_s:.0f} s"
    out, err = ran
    if not out.strip():
        lines = err.strip().splitlines()
        return f"the program failed: {lines[-1] if lines else 'it printed nothing'}"
    return case.judge(read(out), fake)


def verdicts(package: str, run: Run, *, at_a_time: int = 4) -> dict[str, str | None]:
    """The verdicts of all cases, several at a time because most of them wait."""
    with ThreadPoolExecutor(at_a_time) as pool:
        found = pool.map(lambda case: verdict(case, package=package, run=run), CASES)
        return dict(zip((case.number for case in CASES), found, strict=True))


def in_new_processes(python: Path, torch: Path | None = None) -> Run:
    """Each program runs as `python -c PROGRAM`, with torch from another folder if it needs that."""

    def run(case: Case, text: str, env: dict[str, str]) -> tuple[str, str] | None:
        if case.needs_torch and torch is not None:
            env = {**env, "PYTHONPATH": str(torch)}
        try:
            done = subprocess.run(
                [python, "-c", text],
                capture_output=True,
                text=True,
                env=env,
                timeout=case.limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return None
        return done.stdout, done.stderr

    return run


def ours() -> dict[str, str | None]:
    return verdicts("tinkex", in_new_processes(Path(sys.executable)))
