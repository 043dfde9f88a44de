"""Runs the programs of the cases with one client, and judges their output."""

import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from qa.defects.case import KEY, Case, program, read
from qa.defects.cases import CASES
from tinkex.testing import Loopback


def verdict(case: Case, *, package: str, python: Path, torch: Path | None = None) -> str | None:
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
        if case.needs_torch and torch is not None:
            env["PYTHONPATH"] = str(torch)
        process = subprocess.Popen(
            [python, "-c", program(case, package)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )
        try:
            out, err = process.communicate(timeout=case.limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return f"no result within {case.limit_s:.0f} s"
    if not out.strip():
        lines = err.strip().splitlines()
        return f"the program failed: {lines[-1] if lines else process.returncode}"
    return case.judge(read(out), fake)


def verdicts(package: str, python: Path, torch: Path | None = None) -> dict[str, str | None]:
    """The verdicts of all cases, four at a time because most of them wait."""

    def one(case: Case) -> str | None:
        return verdict(case, package=package, python=python, torch=torch)

    with ThreadPoolExecutor(4) as pool:
        return dict(zip((case.number for case in CASES), pool.map(one, CASES), strict=True))


def ours() -> dict[str, str | None]:
    return verdicts("tinkex", Path(sys.executable))
