"""The official SDK 0.36.0 waits for many samples at once, copies a client, and finds its sessions."""

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


def test_each_copy_has_a_log_with_every_sample_once(run: dict[str, Any], server: Server) -> None:
    """The copy asked for a number of its own: 1, the first that was not given."""
    with sqlite3.connect(server.data / "tinkex.db") as connection:
        rows = connection.execute(
            "SELECT clone_id, count(*), count(DISTINCT request_id) FROM completions "
            "WHERE sampling_session_id = ? GROUP BY clone_id ORDER BY clone_id",
            run["samplers"],
        ).fetchall()
    connection.close()
    assert rows == [(0, 75, 75), (1, 15, 15)]


def test_the_session_is_found_by_every_way(run: dict[str, Any]) -> None:
    assert run["listed"][0] == run["session_id"]
    assert run["runs"] == []
    assert run["samplers"] == [f"{run['session_id']}:sample:0"]
    assert run["search"] == [run["session_id"]]
    assert run["status"] == "active"
    assert {"session_id": run["session_id"], "project_id": "a-project"} in run["audit"]


def test_the_trace_has_a_beginning_and_an_end_of_each_sample(run: dict[str, Any]) -> None:
    assert run["trace"] == 1 + 2 * SAMPLES


def test_usage_is_exactly_what_was_drawn(run: dict[str, Any]) -> None:
    used: Counter[str] = Counter()
    for event in run["usage"]:
        used[event["type"]] += event["token_count"]
    assert used == {
        "sampling_prefill": PROMPT_TOKENS * SAMPLES,
        "sampling_sample": run["tokens"],
    }
