"""The unmodified official SDK, oldest and newest, trains and samples on our server.

`make matrix` does the same with thirteen versions and writes docs/reference/sdk-matrix.md.
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
def test_the_sdk(check: Callable[[Run], None], run: Run) -> None:
    check(run)
