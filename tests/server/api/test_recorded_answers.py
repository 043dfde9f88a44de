"""Status and body of the answers to thousands of good and bad requests are as recorded."""

from pathlib import Path

import pytest

from qa.fuzz import recorded_answers


@pytest.mark.anyio
async def test_every_route_answers_as_recorded(tmp_path: Path) -> None:
    recorded, found = recorded_answers.load(), await recorded_answers.record(tmp_path)
    assert found.keys() == recorded.keys()
    for route, answers in found.items():
        assert answers == recorded[route], route
    assert sum(map(len, recorded.values())) > 2_000
