"""All options of samples, and cancellation, with the official SDK 0.36.0."""

from pathlib import Path
from typing import Any

import pytest

from serving import TINY, Server
from together.official_sdk import run_program

PROGRAM = Path(__file__).with_name("sampling_program.py")
PROMPT = [20 + (37 * n) % 350 for n in range(40)]

pytestmark = [pytest.mark.sdk, pytest.mark.timeout(100)]


@pytest.fixture(scope="module")
def run(server: Server) -> dict[str, Any]:
    return run_program("0.36.0", PROGRAM, TINY, server=server, timeout_s=80)


def test_logprobs_of_the_last_positions_equal_those_of_the_whole_prompt(
    run: dict[str, Any],
) -> None:
    assert run["prompt_logprobs"][0] is None
    assert None not in run["prompt_logprobs"][1:]
    assert run["last_logprobs"][:35] == [None] * 35
    assert run["last_logprobs"][35:] == pytest.approx(run["prompt_logprobs"][35:], abs=1e-4)
    assert run["topk"][0] is None
    assert [len(row) for row in run["topk"][1:]] == [3] * 39
    assert run["last_topk"][:35] == [None] * 35
    assert [row[0][0] for row in run["last_topk"][35:]] == [row[0][0] for row in run["topk"][35:]]


def test_target_logprobs_have_the_form_of_the_targets(run: dict[str, Any]) -> None:
    shape, values = run["dense"]
    assert shape == [39, 2]
    assert values[1::2] == ["nan"] * 39
    assert [float(v) for v in values[::2]] == pytest.approx(run["prompt_logprobs"][1:], abs=1e-4)
    shape, values, crow = run["sparse"]
    assert shape == [39, 2]
    assert crow == [0] * 10 + [1] * 20 + [2] * 10
    expected = [run["prompt_logprobs"][10], run["prompt_logprobs"][30]]
    assert values == pytest.approx(expected, abs=1e-4)


def test_alternatives_exist_for_every_position_and_depend_on_the_seed(run: dict[str, Any]) -> None:
    shape, tokens, logprobs = run["alt"]
    assert shape == [39, 4]
    assert len(tokens) == len(logprobs) == 39 * 4
    assert all(0 <= token < 400 for token in tokens)
    assert all(logprob < 0 for logprob in logprobs)
    assert run["alt_again"] == tokens


def test_samples_report_top_tokens_and_cache_hits(run: dict[str, Any]) -> None:
    assert len(run["sample_tokens"]) == len(run["sample_topk"]) == 6
    assert all(len(row) == 2 for row in run["sample_topk"])
    assert run["hits"] == 32


def test_targets_of_a_wrong_shape_are_rejected_with_the_reason(run: dict[str, Any]) -> None:
    assert "for this prompt it must be int64 of shape [39, K]" in run["refusal"]


def test_a_cancelled_task_frees_the_engine(run: dict[str, Any]) -> None:
    cancelled = run["cancel"]
    assert cancelled["cancelled"]
    assert cancelled["finished"] == 0
    assert cancelled["pages_used"] == 0
    assert cancelled["freed_after_s"] < 15
