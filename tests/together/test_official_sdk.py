"""
The oldest and the newest official SDK train and sample on the server.

`make matrix` runs the same with thirteen versions and writes docs/reference/sdk-matrix.md.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from serving import Server
from together.capabilities import CAPABILITIES, Run, run_capabilities


@pytest.fixture(scope="module", params=["0.36.0", "0.4.1"])
def run(request: pytest.FixtureRequest, server: Server, tiny_model: Path) -> Run:
    vocabulary = json.loads((tiny_model / "config.json").read_text())["vocab_size"]
    return run_capabilities(request.param, server, vocabulary)


pytestmark = [pytest.mark.sdk, pytest.mark.timeout(180)]


@pytest.mark.parametrize("check", CAPABILITIES.values(), ids=lambda check: check.__name__)
def test_capability_of_the_sdk(check: Callable[[Run], None], run: Run) -> None:
    check(run)
