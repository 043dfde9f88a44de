"""A short history of several clients under deaths and a faulty network holds in every detail."""

from pathlib import Path

import pytest

from qa.chaos.random_operations import run

pytestmark = [
    pytest.mark.timeout(150),
    # Loading into a model that exists is deprecated in the client, and asked for here.
    pytest.mark.filterwarnings("ignore:load_state:FutureWarning"),
]


def test_hundreds_of_operations_are_as_if_done_one_by_one(tmp_path: Path) -> None:
    report = run(folder=tmp_path / "data", seed=3, operations=600, web_kills=2, engine_deaths=4)
    details = "\n".join([*report.lines(), *map(str, report.violations[:20])])
    assert not report.errors, details
    assert not report.violations, details
    assert report.operations > 500
    assert report.faults["engine deaths"] == 4
    assert report.faults["web kills"] == 2
    assert report.faults["network faults"] > 0
