"""A short run of random operations under kills, engine crashes and network faults."""

from pathlib import Path

import pytest

from qa.chaos.random_operations import run

pytestmark = [
    pytest.mark.timeout(150),
    # `load_state` is deprecated in the client, but supported.
    pytest.mark.filterwarnings("ignore:load_state:FutureWarning"),
]


def test_a_sequential_execution_explains_hundreds_of_concurrent_operations(tmp_path: Path) -> None:
    report = run(folder=tmp_path / "data", seed=3, operations=600, web_kills=2, engine_crashes=4)
    details = "\n".join([*report.lines(), *map(str, report.violations[:20])])
    assert not report.errors, details
    assert not report.violations, details
    assert report.operations > 500
    assert report.faults["engine crashes"] == 4
    assert report.faults["web kills"] == 2
    assert report.faults["network faults"] > 0
