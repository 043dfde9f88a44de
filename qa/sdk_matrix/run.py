"""
Runs thirteen releases of the official SDK, each in its own environment, against one server.

    python -m qa.sdk_matrix.run [VERSION ...]

The newest one also trains and samples a tiny model of every family that is served. Writes
docs/reference/sdk-matrix.md; the exit status is 1 if anything failed.
"""

import datetime
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from serving import TINY, Server, serving
from tinkex.testing import write_tiny_model
from together.capabilities import CAPABILITIES, run_capabilities
from together.families import FAMILIES, check_family, run_families

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = [
    *("0.4.1", "0.7.0", "0.10.0", "0.14.0", "0.16.1", "0.18.2", "0.19.0"),
    *("0.22.3", "0.24.1", "0.25.0", "0.27.2", "0.30.0", "0.36.0"),
]
PAGE = ROOT / "docs" / "reference" / "sdk-matrix.md"

INTRODUCTION = """\
# Official SDKs on this server

Each release is installed unmodified from PyPI into its own virtual environment and runs
`tests/together/capabilities_program.py` against one `tinkex serve` with a tiny model: 60 training steps,
greedy samples, prompt logprobs, save and load, lists, publishing and deleting of checkpoints, and a
custom loss. `make matrix` writes this page; `make test` runs the first and the last row.
"""

FAMILIES_INTRODUCTION = """\
## Families of models

With the newest SDK, a tiny model of each family on a server: sixteen training steps, a saved state that
is loaded and goes on with the same losses, greedy samples and prompt logprobs equal to those of a
forward pass, and the metrics of experts (`tests/together/families_program.py`). `make test` runs four
of them. The notes are in [models](models.md).
"""
#: Models that one server serves at once.
MODELS_OF_A_SERVER = 4


@dataclass(frozen=True, kw_only=True)
class Row:
    version: str
    #: Errors by capability; empty if all passed.
    failures: dict[str, str]
    seconds: float


def measured(version: str, server: Server, vocabulary: int) -> Row:
    began = time.monotonic()
    failures = {}
    try:
        run = run_capabilities(version, server, vocabulary)
    except AssertionError as error:
        failures = dict.fromkeys(CAPABILITIES, str(error))
    else:
        for name, check in CAPABILITIES.items():
            try:
                check(run)
            except AssertionError as error:
                failures[name] = str(error) or "failed"
    return Row(version=version, failures=failures, seconds=time.monotonic() - began)


def failures_of_families() -> dict[str, str]:
    """What went wrong with each family; an empty text if nothing did."""
    failures = {}
    for first in range(0, len(FAMILIES), MODELS_OF_A_SERVER):
        some = FAMILIES[first : first + MODELS_OF_A_SERVER]
        try:
            with tempfile.TemporaryDirectory() as folder:
                found = run_families(VERSIONS[-1], some, Path(folder), timeout_s=900)["families"]
        except AssertionError as error:
            failures |= dict.fromkeys(some, str(error) or "failed")
            continue
        for family in some:
            try:
                check_family(family, found[f"test/{family}"])
                failures[family] = ""
            except AssertionError as error:
                failures[family] = str(error) or "failed"
            print(f"{family}: {failures[family] or 'passed'}", flush=True)
    return failures


def page(rows: list[Row], families: dict[str, str]) -> str:
    def line(*cells: str) -> str:
        return f"| {' | '.join(cells)} |"

    table = [line("tinker", *CAPABILITIES, "seconds"), line(*["---"] * (len(CAPABILITIES) + 2))]
    for row in rows:
        marks = ["no" if name in row.failures else "yes" for name in CAPABILITIES]
        table.append(line(row.version, *marks, f"{row.seconds:.0f}"))
    date = datetime.date.today().isoformat()
    meanings = [f"- **{name}**: {check.__doc__}" for name, check in CAPABILITIES.items()]
    last = f"Last run: {date}."
    passed = [f"`{family}`" for family, failure in families.items() if not failure]
    failed = [f"`{family}`" for family, failure in families.items() if failure]
    outcome = [FAMILIES_INTRODUCTION, f"Passed: {', '.join(passed)}.", ""]
    if failed:
        outcome += [f"Failed: {', '.join(failed)}.", ""]
    parts = [INTRODUCTION, last, "", *table, "", "Columns:", "", *meanings, "", *outcome]
    return "\n".join(parts)


def main(versions: list[str]) -> int:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model(Path(folder) / "model", arch="llama")
        vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
        with serving(f"{TINY}={model}", data=Path(folder) / "data") as server:
            for version in versions:
                row = measured(version, server, vocabulary)
                rows.append(row)
                wrong = ", ".join(row.failures) or "passed"
                print(f"tinker {version}: {wrong} ({row.seconds:.0f} s)", flush=True)
                if row.failures:
                    print("\n".join({*row.failures.values()}), file=sys.stderr)
    families = {}
    if versions == VERSIONS:
        families = failures_of_families()
        PAGE.write_text(page(rows, families))
        print(f"wrote {PAGE.relative_to(ROOT)}")
    return 1 if any(row.failures for row in rows) or any(families.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or VERSIONS))
