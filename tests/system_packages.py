"""
Installs the Debian packages that tests need, if they are missing and this process may (root).

Otherwise it prints what is missing. Tests that need a missing package are skipped; with CI=true they fail.
"""

import os
import shutil
import subprocess
import sys

from postgres import binaries


def missing() -> list[str]:
    """Debian's names of what tests need and this machine does not have."""
    programs = {"nginx-light": "nginx", "systemd": "systemd-analyze", "openssl": "openssl"}
    path = f"{os.environ.get('PATH', '')}:/usr/sbin"
    found = [] if binaries() is not None else ["postgresql"]
    return found + [
        package for package, program in programs.items() if not shutil.which(program, path=path)
    ]


def main() -> int:
    wanted = missing()
    if not wanted:
        return 0
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        sys.stderr.write(
            f"Some tests need programs that are missing. Debian: apt install {' '.join(wanted)}\n"
        )
        return 0
    sys.stderr.write(f"Installing Debian's {', '.join(wanted)} for the tests ...\n")
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    # Tests start their own servers; the packages need not start any.
    for arguments in (
        ["update", "-qq"],
        ["install", "-qq", "--no-install-recommends", *wanted],
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
