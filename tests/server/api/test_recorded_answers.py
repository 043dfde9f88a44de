"""Status and body of the answers to thousands of good and bad requests are as recorded."""

from pathlib import Path

import pytest

from qa.fuzz import recorded_answers
from tinkex.server.api.bodies import MessageRoute
from tinkex.server.app import ROUTERS


def test_every_route_with_a_body_is_recorded() -> None:
    recorded = {route.replace(" ", "/").rpartition("/")[2] for route in recorded_answers.GOOD}
    for router in ROUTERS:
        for route in router.routes:
            if isinstance(route, MessageRoute) and route.body_field is not None:
                assert route.path.rpartition("/")[2] in recorded


@pytest.mark.anyio
async def test_every_route_answers_as_recorded(tmp_path: Path) -> None:
    recorded, found = recorded_answers.load(), await recorded_answers.record(tmp_path)
    assert found.keys() == recorded.keys()
    for route, answers in found.items():
        assert answers == recorded[route], route
    assert sum(map(len, recorded.values())) > 2_000
