"""tinkex has none of the known defects of the official client; `make defects` runs both clients."""

import queue
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from forked_shell import ForkedShell
from qa.defects.case import Case
from qa.defects.cases import CASES
from qa.defects.runner import verdicts

#: What the programs use. A fork of a process that has it takes a fifth of the time of an import.
MODULES = (
    *("aiohttp", "numpy", "tinkex.client.rest", "tinkex.client.sampling"),
    *("tinkex.client.service", "tinkex.client.training"),
)
SHELLS = 3


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    """The verdicts, with each program in a fork."""
    folder = tmp_path_factory.mktemp("defects")
    free: queue.SimpleQueue[ForkedShell] = queue.SimpleQueue()

    def run(case: Case, text: str, env: dict[str, str]) -> tuple[str, str] | None:
        limit = f"import signal; signal.setitimer(signal.ITIMER_REAL, {case.limit_s})\n"
        shell = free.get()
        try:
            ran = shell.run_program(limit + text, Path(env["HOME"]), env=env)
        finally:
            free.put(shell)
        return None if ran.code == -signal.SIGALRM else (ran.out, ran.err)

    with ExitStack() as stack:
        for _ in range(SHELLS):
            free.put(stack.enter_context(ForkedShell({}, folder, MODULES)))
        return verdicts("tinkex", run, at_a_time=SHELLS)


@pytest.mark.timeout(240)  # the first test runs all cases
@pytest.mark.parametrize(
    "number", [case.number for case in CASES], ids=[f"{c.number} {c.title}" for c in CASES]
)
def test_tinkex_does_not_have_the_defect(number: str, found: dict[str, str | None]) -> None:
    assert found[number] is None
