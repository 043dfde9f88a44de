"""Heads of benchmark reports, and the dated files that hold them."""

import datetime
import os
import platform
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def commit() -> str:
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout.strip() or "unknown"


def head(title: str, command: str, *details: str) -> str:
    """Title, date, commit, machine, further details such as versions, and the command of the run."""
    machine = [
        f"{today()}, commit {commit()}",
        f"{os.cpu_count()} CPU cores shared with other work (load {os.getloadavg()[0]:.1f})",
        f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        *details,
    ]
    return f"# {title}\n\n{', '.join(machine)}; `{command}`\n"


def write(name: str, text: str, path: Path | None = None) -> None:
    """Prints a report and writes it to `results/NAME_<cores>cpu_<date>.md`, or to another path."""
    print(text)
    target = path or RESULTS / f"{name}_{os.cpu_count()}cpu_{today()}.md"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)
