"""
Installs the Debian packages that tests need, if they are missing and this process may (root).

Otherwise it prints what is missing. Tests that need a missing package are skipped; with CI=true they fail.
"""

import os
import shutil
import subprocess
import sys

from postgres import binaries


def main() -> int:
    if binaries() is not None:
        return 0
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        sys.stderr.write(
            "PostgreSQL is not installed, and some tests need it. Debian: apt install postgresql\n"
        )
        return 0
    sys.stderr.write("Installing Debian's postgresql for the tests ...\n")
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    # Tests start their own servers; the package need not start one.
    for arguments in (
        ["update", "-qq"],
        ["install", "-qq", "--no-install-recommends", "postgresql"],
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
