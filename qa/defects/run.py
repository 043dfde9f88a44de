"""
Runs the cases of all known defects with both clients; writes docs/reference/defects.md.

    python -m qa.defects.run
"""

import sys
from pathlib import Path

import sdk_envs
from qa.defects.cases import CASES
from qa.defects.runner import in_new_processes, ours, verdicts

ROOT = Path(__file__).resolve().parents[2]
OFFICIAL = "0.36.0"
PAGE = ROOT / "docs" / "reference" / "defects.md"


def main() -> None:
    print("tinkex ...", flush=True)
    own = ours()
    print(f"tinker {OFFICIAL} ... (some cases run into their time limit)", flush=True)
    official = in_new_processes(sdk_envs.ensure(OFFICIAL), sdk_envs.ensure_torch())
    theirs = verdicts("tinker", official)
    PAGE.write_text(page(theirs, own))
    for case in CASES:
        print(f"{case.number:>4} {case.title}: {theirs[case.number]} | {own[case.number]}")
    if any(own.values()):
        sys.exit(1)


def page(theirs: dict[str, str | None], own: dict[str, str | None]) -> str:
    rows = "\n".join(
        f"| {case.number} | {case.title} | {_cell(theirs[case.number])} | {_cell(own[case.number])} |"
        for case in CASES
    )
    return (
        "# Known defects of the official client, tested with both clients\n\n"
        "`make defects` writes this page: the same small program runs with the unmodified `tinker` "
        f"{OFFICIAL} in its own environment and with `tinkex`, against the fake service of "
        "`tinkex.testing` on a loopback socket. The programs are in `qa/defects/cases.py`; `make test` "
        "runs them with tinkex. `benchmarks/bench_client.py` measures size and CPU time (19, 20); "
        "`tests/cli/test_service_commands.py` covers the defects of the command line (21).\n\n"
        f"| | defect | tinker {OFFICIAL} | tinkex |\n|---|---|---|---|\n{rows}\n"
    )


def _cell(verdict: str | None) -> str:
    return "absent" if verdict is None else verdict.replace("|", "/").replace("\n", " ")[:160]


if __name__ == "__main__":
    main()
