"""Checks `docs/reference/differences.md` with one program that runs with both clients."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import sdk_envs
from http_stub import Received, Reply, StubServer, reply_json, stub_server

PROGRAM = Path(__file__).with_name("differences_program.py")
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "differences.md"
COOKIE = "AWSALB=ab+/c=="

#: Output of the program: equal for both clients, or the official client's and ours.
SAME: dict[str, Any] = {
    "equal prompts": True,
    "schema of a chunk": ["tokens", "type"],
    "bools as weights": [1.0, 0.0],
    "first call": 0,
    "redirect to the same origin": 0,
    "header of an error": "3",
    "url of an error": True,
    "a 404 is no success": [404, False, True],
    "message of an error": "Error code: 404 - {'detail': 'not here'}",
    "raise_for_status raises": True,
    "time of an error": True,
    "logger": True,  # each client has its own name
}
DIFFERENT: dict[str, tuple[Any, Any]] = {
    "tensor after its array changed": ([7, 2], [1, 2]),
    "chunks after append_int": (2, 1),
    "equal tensors": (False, True),
    "equal examples": (False, True),
    "prompts have a hash": ("TypeError", True),
    "prompt is a pydantic model": (True, False),
    "chunk is a pydantic model": (True, False),
    "half a token": ("taken", "ValueError"),
    "token of 2**31": ([2**31], "ValueError"),
    "token as text": ([1], "ValueError"),
    "list under another name": ("KeyError", "int64"),
    "bools as tokens": ([1, 0], "ValueError"),
    "client without a key": ("made", "TinkerError"),
    "request of an error holds the key": (True, False),
    "first line of an error": ("Error code: 404 - {'detail': 'not here'}", "not here"),
    "redirect to another origin": (0, "APIStatusError"),
}


@contextmanager
def service() -> Iterator[tuple[StubServer, StubServer]]:
    """Responds once, then redirects to itself, then to another service."""
    capabilities = reply_json({"supported_models": []})

    def elsewhere(request: Received) -> Reply:
        return capabilities

    with stub_server(elsewhere) as other:
        times = 0

        def answer(request: Received) -> Reply:
            nonlocal times
            if "training_runs" in request.path:
                headers = {"Retry-After": "3", "Content-Type": "application/json"}
                return Reply(status=404, body=b'{"detail": "not here"}', headers=headers)
            if request.path.startswith("/moved") or not request.path.endswith("capabilities"):
                body = {"session_id": "s", "type": "create_session", "supported_models": []}
                return reply_json(body)
            times += 1
            to = {2: "/moved", 3: f"{other.url}/moved"}.get(times)
            if to is not None:
                return Reply(status=307, headers={"Location": to})
            headers = {**capabilities.headers, "Set-Cookie": f"{COOKIE}; Path=/"}
            return Reply(body=capabilities.body, headers=headers)

        with stub_server(answer) as here:
            yield here, other


def seen(python: str | Path, package: str) -> tuple[dict[str, Any], StubServer, StubServer]:
    with service() as (here, other):
        done = subprocess.run(
            [python, PROGRAM, package, here.url, other.url],
            env={**os.environ, "TINKER_TELEMETRY": "0"},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
    assert done.stdout, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]), here, other


def cookies(here: StubServer) -> set[str | None]:
    return {each.headers.get("cookie") for each in here.requests if each.path == "/moved"}


@pytest.mark.timeout(120)
def test_the_column_of_tinkex_on_the_page() -> None:
    facts, here, other = seen(sys.executable, "tinkex")
    assert facts == {**SAME, **{name: ours for name, (_, ours) in DIFFERENT.items()}}
    assert cookies(here) == {COOKIE}
    assert other.requests == []  # the key was not sent to another origin


@pytest.mark.sdk
@pytest.mark.timeout(300)
def test_the_column_of_the_official_client_on_the_page() -> None:
    facts, here, other = seen(sdk_envs.ensure("0.36.0"), "tinker")
    assert facts == {**SAME, **{name: theirs for name, (theirs, _) in DIFFERENT.items()}}
    assert cookies(here) == {COOKIE}
    assert [each.headers["x-api-key"] for each in other.requests] == ["tml-secret"]


#: The beginning of the row on the page for each fact.
ROWS = {
    "tensor after its array changed": "| `TensorData` ✓",
    "chunks after append_int": "| `ModelInput.append_int` ✓",
    "equal prompts": "| `==` of tensors",
    "equal tensors": "| `==` of tensors",
    "equal examples": "| `==` of tensors",
    "prompts have a hash": "| hash of `ModelInput` ✓",
    "prompt is a pydantic model": "| `isinstance(x, pydantic",
    "chunk is a pydantic model": "| `isinstance(x, pydantic",
    "schema of a chunk": "| `isinstance(x, pydantic",
    "half a token": "| `target_tokens=[1.5]`",
    "token of 2**31": "| `target_tokens=[1.5]`",
    "token as text": "| `target_tokens=[1.5]`",
    "list under another name": "| lists under unknown names",
    "bools as weights": "| lists of True and False ✓",
    "bools as tokens": "| lists of True and False ✓",
    "client without a key": "| `ServiceClient()` with no key",
    "first call": "| cookies ✓",
    "redirect to the same origin": "| redirects ✓",
    "redirect to another origin": "| redirects ✓",
    "header of an error": "| `error.response`",
    "url of an error": "| `error.response`",
    "a 404 is no success": "| `error.response`",
    "raise_for_status raises": "| `error.response`",
    "time of an error": "| `error.response`",
    "request of an error holds the key": "| `error.response`",
    "message of an error": "| the text of a status error ✓",
    "first line of an error": "| the text of a status error ✓",
    "logger": "- The logger is `tinkex` ✓",
}


def test_the_marked_rows_are_those_that_the_program_checks() -> None:
    assert set(ROWS) == {*SAME, *DIFFERENT}
    marked = [line for line in PAGE.read_text().splitlines() if "✓" in line and "rows" not in line]
    seen_rows = [[line for line in marked if line.startswith(row)] for row in ROWS.values()]
    assert all(len(lines) == 1 for lines in seen_rows)
    assert {line for lines in seen_rows for line in lines} == set(marked)
