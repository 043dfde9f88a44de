"""The fuzzing corpus: one body for each kind of answer. `make fuzz` makes new ones."""

from pathlib import Path

import pytest

from qa.fuzz import custom_loss_graphs as graphs
from qa.fuzz import request_bodies as bodies

pytestmark = pytest.mark.anyio


async def test_the_corpus_gets_no_server_error_and_no_timeout(tmp_path: Path) -> None:
    found = bodies.Findings()
    async with bodies.app_client(tmp_path) as client:
        cases = bodies.corpus(await bodies.create_resources(client))
        for case in cases:
            await bodies.send_and_check(client, case, found)
    assert not found.wrong
    assert len(cases) > 200
    # With valid ids; otherwise every answer would be a 404.
    assert found.statuses[200] > 10, found.statuses
    assert found.statuses[422] > 100


async def test_new_bodies_get_no_server_error_either(tmp_path: Path) -> None:
    async with bodies.app_client(tmp_path) as client:
        found = await bodies.fuzz(client, bodies=400, seed=5)
    assert not found.wrong
    assert len(found.statuses) > 2


def test_hostile_graphs_are_refused_or_run() -> None:
    found = graphs.fuzz(60, seed=5)
    assert not found["wrong"]
    assert found["outcomes"]["refused"] > 20
