"""The unmodified official SDK, oldest and newest, trains and samples on our server."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

import sdk_envs
from serving import TINY, Server

PROGRAM = Path(__file__).with_name("sdk_program.py")


def run_program(version: str, server: Server, vocabulary: int) -> dict[str, Any]:
    """What the program printed, run in the environment of that SDK version."""
    done = subprocess.run(
        [sdk_envs.ensure(version), PROGRAM, TINY, str(vocabulary)],
        env={
            **os.environ,
            "TINKER_BASE_URL": server.url,
            "TINKER_API_KEY": "tml-any-key-will-do",
        },
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, f"{done.stderr[-4000:]}\nserver: {''.join(server.log[-40:])}"
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.fixture(scope="module", params=["0.36.0", "0.4.1"])
def run(request: pytest.FixtureRequest, server: Server, tiny_model: Path) -> dict[str, Any]:
    vocabulary = json.loads((tiny_model / "config.json").read_text())["vocab_size"]
    result = run_program(request.param, server, vocabulary)
    assert result["version"] == request.param
    return result


pytestmark = [pytest.mark.sdk, pytest.mark.timeout(150)]


def test_sixty_steps_memorise_the_data(run: dict[str, Any]) -> None:
    """The loss halves within 20 steps and is under 0.1 nat a token at the end."""
    losses = run["losses"]
    assert len(losses) == 60
    assert min(losses[:20]) < losses[0] / 2
    assert losses[-1] < 0.1


def test_greedy_samples_are_the_training_text(run: dict[str, Any]) -> None:
    for text, (first, second) in zip(run["texts"], run["sampled"], strict=True):
        assert text[:4] + first == text
        assert first == second


def test_sampled_logprobs_are_those_of_a_forward_pass(run: dict[str, Any]) -> None:
    """At temperature 0 the untempered logprobs are reported; they come from the same weights."""
    width = len(run["texts"][0]) - 1
    for n, sampled in enumerate(run["sampled_logprobs"]):
        forward = run["logprobs"][n * width : (n + 1) * width]
        assert sampled == pytest.approx(forward[3:], abs=1e-4)


def test_prompt_logprobs_start_with_nothing(run: dict[str, Any]) -> None:
    first, *rest = run["prompt_logprobs"]
    assert first is None
    assert rest == pytest.approx(run["logprobs"][: len(rest)], abs=1e-4)


def test_a_second_client_continues_from_the_saved_state(run: dict[str, Any]) -> None:
    assert run["path"].startswith("tinker://")
    assert run["path"].endswith("/weights/memorised")
    assert run["loaded_logprobs"] == pytest.approx(run["logprobs"], abs=1e-5)
    assert run["untrained_logprobs"] != pytest.approx(run["logprobs"], abs=1e-1)


def test_the_server_says_what_it_serves(run: dict[str, Any]) -> None:
    assert run["served"] == [TINY]
    assert run["model_name"] == TINY
    assert all(name.count(":") == 1 for name in run["step_metrics"])
