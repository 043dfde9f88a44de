"""
Virtual environments with official `tinker` SDKs, created once and kept in the user's cache folder.

    python tests/sdk_envs.py 0.36.0 0.4.1      creates missing ones, prints one interpreter per line

Each SDK has its own environment. The large common packages (transformers, and torch for old SDKs) are
installed once and shared through a .pth file; pip counts them as installed, so thirteen environments
take little more space than two.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
INSTALL = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")


def cache_folder() -> Path:
    """The cache folder of tinkex itself, so that one setting moves everything."""
    if own := os.environ.get("TINKEX_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tinkex"


def environment(name: str) -> Path:
    """The folder of an environment, for an SDK version or shared packages; new pins give a new folder."""
    pins = hashlib.sha256(CONSTRAINTS.read_bytes()).hexdigest()[:8]
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    return cache_folder() / "sdk" / f"{name}-{python}-{pins}"


def interpreter(name: str) -> Path:
    return environment(name) / "bin" / "python"


def site_packages(name: str) -> Path:
    return next((environment(name) / "lib").glob("python*/site-packages"))


def ensure(version: str) -> Path:
    """The interpreter of an environment that has `tinker` in this version."""
    # SDKs before 0.16 import torch always; later ones only on demand.
    shared = ["transformers"] if _as_numbers(version) >= (0, 16) else ["transformers", "torch"]
    return _made(version, [f"tinker=={version}"], shared)


def ensure_torch() -> Path:
    """A folder to add to the import path of a program that needs torch with a newer SDK."""
    _made("torch", ["torch"], [])
    return site_packages("torch")


def ensure_cookbook(version: str) -> Path:
    """The interpreter of an environment with the official cookbook and the newest SDK."""
    # Its tutorials are marimo notebooks.
    wanted = [f"tinker-cookbook[math-rl,multiplayer-rl]=={version}", "tinker==0.36.0", "marimo"]
    # The cookbook needs an older transformers than our pins, so only torch is shared.
    return _made(f"cookbook-{version}", wanted, ["torch"], pinned=False)


def ensure_cookbook_without_sdk(version: str) -> Path:
    """The same packages with this tree's client instead of the official SDK."""
    listed = [str(ensure_cookbook(version)), "-m", "pip", "freeze", "--local"]
    frozen = subprocess.run(listed, capture_output=True, text=True, check=True).stdout
    wanted = [line for line in frozen.splitlines() if not line.startswith("tinker==")]
    python = _made(
        f"cookbook-{version}-without-sdk",
        ["--no-deps", *wanted],
        ["torch"],
        pinned=False,
    )
    return _with_this_tree(python)


def cookbook_tutorials(version: str) -> Path:
    """The folder of the tutorials, which only the source distribution contains."""
    home = cache_folder() / "sdk" / f"tinker_cookbook-{version}"
    tutorials = home / f"tinker_cookbook-{version}" / "tutorials"
    if not tutorials.exists():
        source = ["--no-deps", "--no-binary", ":all:", f"tinker-cookbook=={version}"]
        quiet = ["--quiet", "--disable-pip-version-check"]
        with tempfile.TemporaryDirectory(dir=home.parent) as folder:
            command = [sys.executable, "-m", "pip", "download", *quiet, "-d", folder, *source]
            subprocess.run(command, check=True)
            with tarfile.open(next(Path(folder).glob("*.tar.gz"))) as archive:
                archive.extractall(Path(folder) / "all", filter="data")
            (Path(folder) / "all").rename(home)
    return tutorials


def ensure_frameworks(packages: Sequence[str]) -> Path:
    """The interpreter of an environment with frameworks written for OpenAI's API."""
    return _made("frameworks", packages, [], pinned=False)


def ensure_alone(name: str, wanted: str) -> Path:
    """The interpreter of an environment with one package and its dependencies only."""
    return _made(f"alone-{name}", [wanted], [])


def ensure_this_client() -> Path:
    """The interpreter of an environment with this tree as `pip install tinkex` installs it."""
    return _with_this_tree(ensure_alone("tinkex", str(ROOT)))


def _with_this_tree(python: Path) -> Path:
    """Reinstalls each time, because the tree may have changed."""
    again = ["--force-reinstall", "--no-deps", str(ROOT)]
    subprocess.run([python, *INSTALL, *again], check=True)
    return python


def _made(name: str, wanted: Sequence[str], shared: Sequence[str], *, pinned: bool = True) -> Path:
    home = environment(name)
    ready = home / ".ready"
    if ready.exists():
        return interpreter(name)
    for other in shared:
        _made(other, [other], [])
    home.parent.mkdir(parents=True, exist_ok=True)
    with (home.parent / f"{home.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # concurrent runs create it once
        if not ready.exists():
            print(f"Setting up {name} ...", file=sys.stderr, flush=True)
            started = time.monotonic()
            shutil.rmtree(home, ignore_errors=True)
            venv.create(home, with_pip=True)
            folders = "".join(f"{site_packages(other)}\n" for other in shared)
            (site_packages(name) / "shared.pth").write_text(folders)
            pins = ["-c", str(CONSTRAINTS)] if pinned else []
            subprocess.run([interpreter(name), *INSTALL, *pins, *wanted], check=True)
            ready.touch()
            print(f"... {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    return interpreter(name)


def _as_numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def main(versions: Sequence[str]) -> None:
    for version in versions:
        print(ensure(version))


if __name__ == "__main__":
    main(sys.argv[1:])
