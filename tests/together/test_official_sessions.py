"""Many samples, a copied client, and queries of sessions with the official SDK 0.36.0."""

import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from serving import TINY, Server
from together.official_sdk import run_program

PROGRAM = Path(__file__).with_name("rest_program.py")
PROMPT_TOKENS = 4
SAMPLES = 60 + 15 + 15

pytestmark = [pytest.mark.sdk, pytest.mark.timeout(150)]


@pytest.fixture(scope="module")
def run(server: Server) -> dict[str, Any]:
    return run_program("0.36.0", PROGRAM, TINY, server=server, timeout_s=120)


def test_the_completion_log_of_each_copy_has_every_sample_once(
    run: dict[str, Any], server: Server
) -> None:
    """The copy requests its own number, which is 1."""
    with sqlite3.connect(server.data / "tinkex.db") as connection:
        rows = connection.execute(
            "SELECT clone_id, count(*), count(DISTINCT request_id) FROM completions "
            "WHERE sampling_session_id = ? GROUP BY clone_id ORDER BY clone_id",
            run["samplers"],
        ).fetchall()
    connection.close()
    assert rows == [(0, 75, 75), (1, 15, 15)]


def test_the_session_is_found_by_every_query(run: dict[str, Any]) -> None:
    assert run["listed"][0] == run["session_id"]
    assert run["runs"] == []
    assert run["samplers"] == [f"{run['session_id']}:sample:0"]
    assert run["search"] == [run["session_id"]]
    assert run["status"] == "active"
    assert {"session_id": run["session_id"], "project_id": "a-project"} in run["audit"]


def test_the_trace_has_start_and_end_of_each_sample(run: dict[str, Any]) -> None:
    assert run["trace"] == 1 + 2 * SAMPLES


def test_usage_counts_exactly_the_sampled_tokens(run: dict[str, Any]) -> None:
    used: Counter[str] = Counter()
    for event in run["usage"]:
        used[event["type"]] += event["token_count"]
    assert used == {
        "sampling_prefill": PROMPT_TOKENS * SAMPLES,
        "sampling_sample": run["tokens"],
    }
