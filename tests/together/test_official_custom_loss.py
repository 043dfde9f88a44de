"""Custom losses with the official SDK 0.36.0."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from serving import TINY, Server
from together.official_sdk import run_program

PROGRAM = Path(__file__).with_name("custom_loss_program.py")

pytestmark = [pytest.mark.sdk, pytest.mark.timeout(150)]


@pytest.fixture(scope="module")
def run(server: Server, tiny_model: Path) -> dict[str, Any]:
    vocabulary = json.loads((tiny_model / "config.json").read_text())["vocab_size"]
    torch = find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    packages = Path(torch.origin).parent.parent
    return run_program(
        "0.36.0", PROGRAM, TINY, str(vocabulary), packages, server=server, timeout_s=120
    )


def test_the_loss_runs_on_the_server(run: dict[str, Any]) -> None:
    assert run["loss_id"]
    assert run["server_metrics"]["custom/tokens:sum"] == 17 + 9 + 23
    assert run["server_metrics"]["custom/ratio:mean"] > 0


def test_server_and_client_give_the_same_loss_and_the_same_weights(run: dict[str, Any]) -> None:
    by_hand = run["client_metrics"]["by_hand"]
    assert run["server_metrics"]["loss:sum"] == pytest.approx(by_hand, rel=1e-4)
    assert run["server"] == pytest.approx(run["client"], abs=2e-4)


def test_a_custom_ppo_trains_like_the_built_in_one(run: dict[str, Any]) -> None:
    assert run["own_ppo"] == pytest.approx(run["built_in"], abs=2e-4)
