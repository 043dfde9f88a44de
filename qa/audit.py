"""
Checks the pins of constraints.txt for known vulnerabilities: python -m qa.audit [--strict]

Runs pip-audit for every pin. The exit status is 1 if a pin is vulnerable. A package index without data
on vulnerabilities makes pip-audit skip pins; this is printed and fails only with `--strict`, for
machines that must not release without an audit.
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
    """`name==version` of each line, without a local suffix such as `+cpu`, which no database has."""
    found = []
    for line in text.splitlines():
        line = line.partition("#")[0].partition(";")[0].strip()
        if line:
            match = PIN.match(line)
            assert match, f"{line!r} is not an exact pin"
            found.append(f"{match[1]}=={match[2]}")
    return found


def pip_audit(wanted: Sequence[str]) -> list[dict[str, Any]]:
    """The results of pip-audit for each pin."""
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
    """Lines about vulnerable pins, and the names of pins that were not audited."""
    flagged = []
    for one in found:
        for problem in one.get("vulns", ()):
            fixed = ", ".join(problem.get("fix_versions", ())) or "no version yet"
            flagged.append(f"{one['name']} {one['version']}: {problem['id']}, fixed in {fixed}")
    return flagged, [one["name"] for one in found if "skip_reason" in one]


def main(arguments: Sequence[str]) -> int:
    wanted = pins(CONSTRAINTS.read_text())
    flagged, unknown = verdict(pip_audit(wanted))
    for line in flagged:
        print(f"vulnerable: {line}. Change its pin in constraints.txt.")
    if unknown:
        print(
            f"audit: {len(unknown)} of {len(wanted)} pins could NOT be audited: the package index has "
            "no data on vulnerabilities or is not reachable. They may or may not be vulnerable."
        )
    if not flagged and len(unknown) < len(wanted):
        print(f"audit: {len(wanted) - len(unknown)} pins have no known vulnerability")
    return 1 if flagged or (unknown and "--strict" in arguments) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
