"""
Whether a version that `make` installs has a known vulnerability: python -m qa.audit

Asks pip-audit about every pin of constraints.txt. It ends with 1 when one is vulnerable. An index that
only hands out packages knows nothing of vulnerabilities, and pip-audit then finds none: that is said
aloud, and is no failure, because no version is to blame. `--strict` makes it one, for machines that
must not release without an audit.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"

PIN = re.compile(r"([A-Za-z0-9][\w.-]*)==([\w.!-]+)(\+[\w.]+)?$")


def pins(text: str) -> list[str]:
    """`name==version` of each line, without a local suffix: no database knows `2.13.0+cpu`."""
    found = []
    for line in text.splitlines():
        line = line.partition("#")[0].partition(";")[0].strip()
        if line:
            match = PIN.match(line)
            assert match, f"{line!r} is no exact pin"
            found.append(f"{match[1]}=={match[2]}")
    return found


def asked(wanted: Sequence[str]) -> list[dict[str, Any]]:
    """What pip-audit says of each."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(wanted))
        file.flush()
        options = ["--no-deps", "--disable-pip", "--format", "json", "--progress-spinner", "off"]
        done = subprocess.run(
            [sys.executable, "-m", "pip_audit", "-r", file.name, *options],
            capture_output=True,
            text=True,
            check=False,
        )
    if not done.stdout.strip():
        return [{"name": pin, "skip_reason": done.stderr[-300:]} for pin in wanted]
    found: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    return found


def verdict(found: Sequence[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """Lines about what is vulnerable, and the names that nobody could say anything about."""
    flagged = []
    for one in found:
        for problem in one.get("vulns", ()):
            fixed = ", ".join(problem.get("fix_versions", ())) or "no version yet"
            flagged.append(f"{one['name']} {one['version']}: {problem['id']}, fixed in {fixed}")
    return flagged, [one["name"] for one in found if "skip_reason" in one]


def main(arguments: Sequence[str]) -> int:
    wanted = pins(CONSTRAINTS.read_text())
    flagged, unknown = verdict(asked(wanted))
    for line in flagged:
        print(f"vulnerable: {line}. Move its pin in constraints.txt.")
    if unknown:
        print(
            f"audit: {len(unknown)} of {len(wanted)} pins could NOT be audited: the package index "
            "here has no data on vulnerabilities, or is out of reach. This says nothing about them."
        )
    if not flagged and len(unknown) < len(wanted):
        print(f"audit: {len(wanted) - len(unknown)} pins have no known vulnerability")
    return 1 if flagged or (unknown and "--strict" in arguments) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
