"""A few fuzzed requests; `make fuzz` sends thousands."""

import asyncio
from pathlib import Path

import pytest

from qa.fuzz import run as fuzzing
from server.echo import EchoExecutor
from server.hosting import hosted
from serving import Server


@pytest.mark.anyio
async def test_no_json_is_answered_with_a_server_error(tmp_path: Path) -> None:
    async with hosted(EchoExecutor(), tmp_path, gap_s=0.2, long_poll_s=0.1) as api:
        url = str(api.http._base_url).rstrip("/")
        output = await asyncio.to_thread(fuzzing.schemathesis, url, cases=3, timeout_s=50)
    assert "No issues found" in output


def test_no_protobuf_is_answered_with_a_server_error(server: Server) -> None:
    found = fuzzing.protobuf(server.url, bodies=150)
    assert not found.wrong
    assert found.statuses[422] > 10
    assert found.outcomes["user"] > 10


@pytest.mark.anyio
async def test_an_image_of_unknown_length_is_not_a_bug_of_the_server(tmp_path: Path) -> None:
    """Found by fuzzing: tokens were counted before the length of an image was known."""
    image = {"type": "image", "data": "", "format": "png"}
    async with hosted(EchoExecutor(), tmp_path) as api:
        body = {"prompt": {"chunks": [image]}, "base_model": api.base_model, "sampling_params": {}}
        answer = await api.post("asample", body)
    assert answer.status < 500, answer
