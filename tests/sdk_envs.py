"""Virtual environments with official `tinker` SDKs, made once and kept in the user's cache.

python tests/sdk_envs.py 0.36.0 0.4.1      makes what is missing, prints one interpreter per line
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Sequence
from pathlib import Path

CONSTRAINTS = Path(__file__).resolve().parent.parent / "constraints.txt"


def cache_folder() -> Path:
    """The same folder tinkex itself uses, so that one setting moves everything."""
    if own := os.environ.get("TINKEX_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tinkex"


def environment(version: str) -> Path:
    """Where the environment of one SDK version lives; new pins give a new one."""
    pins = hashlib.sha256(CONSTRAINTS.read_bytes()).hexdigest()[:8]
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    return cache_folder() / "sdk" / f"{version}-{python}-{pins}"


def interpreter(version: str) -> Path:
    return environment(version) / "bin" / "python"


def ensure(version: str) -> Path:
    """The interpreter of an environment that has `tinker` in this version."""
    home = environment(version)
    ready = home / ".ready"
    if ready.exists():
        return interpreter(version)
    home.parent.mkdir(parents=True, exist_ok=True)
    with (home.parent / f"{home.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two runs at once make it once
        if not ready.exists():
            print(f"Setting up the official tinker {version} ...", file=sys.stderr, flush=True)
            started = time.monotonic()
            shutil.rmtree(home, ignore_errors=True)
            venv.create(home, with_pip=True)
            subprocess.run([interpreter(version), *_install(version)], check=True)
            ready.touch()
            print(f"... {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    return interpreter(version)


def _install(version: str) -> list[str | Path]:
    quiet = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    wanted = [f"tinker=={version}"]
    if _as_numbers(version) < (0, 16):
        wanted.append("torch")  # older SDKs import it unconditionally; pinned by the constraints
    return [*quiet, "-c", CONSTRAINTS, *wanted]


def _as_numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def main(versions: Sequence[str]) -> None:
    for version in versions:
        print(ensure(version))


if __name__ == "__main__":
    main(sys.argv[1:])
