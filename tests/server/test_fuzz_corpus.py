"""The fuzzing corpus: one body for each kind of answer. `make fuzz` makes new ones."""

from pathlib import Path

import pytest

from fuzz import bodies, graphs

pytestmark = pytest.mark.anyio


async def test_the_corpus_gets_no_server_error_and_no_timeout(tmp_path: Path) -> None:
    found = bodies.Found()
    async with bodies.line(tmp_path) as line:
        cases = bodies.corpus(await bodies.things(line))
        for case in cases:
            await bodies.checked(line, case, found)
    assert not found.wrong
    assert len(cases) > 200
    # With valid ids; otherwise every answer would be a 404.
    assert found.statuses[200] > 10, found.statuses
    assert found.statuses[422] > 100


async def test_new_bodies_get_no_server_error_either(tmp_path: Path) -> None:
    async with bodies.line(tmp_path) as line:
        found = await bodies.fuzzed(line, bodies=400, seed=5)
    assert not found.wrong
    assert len(found.statuses) > 2


def test_hostile_graphs_are_refused_or_run() -> None:
    found = graphs.fuzzed(60, seed=5)
    assert not found["wrong"]
    assert found["outcomes"]["refused"] > 20
