"""
Installs the Debian packages that tests need, if they are missing and this process may (root).

Otherwise it prints what is missing. Tests that need a missing package are skipped; with CI=true they fail.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable

from chromium import browser_path
from postgres import binaries


def program(name: str) -> Callable[[], str | None]:
    """Looks for a program, also where only root usually looks."""
    return lambda: shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin")


#: What a test needs, how it is found, and the package of Debian that has it.
NEEDED = (
    ("PostgreSQL", binaries, "postgresql"),
    ("Chromium", browser_path, "chromium"),
    ("nginx", program("nginx"), "nginx-light"),
    ("systemd-analyze", program("systemd-analyze"), "systemd"),
    ("OpenSSL", program("openssl"), "openssl"),
)


def main() -> int:
    missing = [(name, package) for name, find, package in NEEDED if find() is None]
    if not missing:
        return 0
    packages = [package for _, package in missing]
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        for name, package in missing:
            sys.stderr.write(
                f"{name} is not installed, and some tests need it. Debian: apt install {package}\n"
            )
        return 0
    sys.stderr.write(f"Installing Debian's {' and '.join(packages)} for the tests ...\n")
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    # Tests start their own servers; the packages need not start one.
    for arguments in (
        ["update", "-qq"],
        ["install", "-qq", "--no-install-recommends", *packages],
    ):
        done = subprocess.run(
            ["apt-get", *arguments], env=quiet, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            sys.stderr.write(f"apt-get {arguments[0]} failed:\n{done.stderr}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
