"""
tinkex sends what the official client sends: the same calls, compared field by field.

`all_calls_program.py` and `basic_program.py` of `qa/recordings` were run under the official client
0.36.0 and recorded (`record.py`). Here they run on tinkex, through `tinkex.as_tinker`, against the same recorder.
"""

import base64
import json
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from qa.recordings import record
from tinkex import types
from tinkex.wire.codec import encode_json
from tinkex.wire.proto import tinkex_wire_pb2 as pb

DATA = Path(__file__).parents[1] / "data" / "wire"
PROGRAMS = Path(record.__file__).parent
SOURCE = Path(__file__).parents[2] / "src"

#: Requests that the two clients send at different times and in different numbers.
HANDSHAKE = {"/api/v1/client/config", "/api/v1/client/dynamic_config"}


def run(program: str, *, calls: bool) -> dict[str, Any]:
    """What tinkex sends for a program."""
    recorder = record.Recorder(calls=calls)
    command = [sys.executable, "-W", "ignore", "-m", "tinkex.as_tinker", str(PROGRAMS / program)]
    record.run([*command, recorder.url], recorder, PYTHONPATH=str(SOURCE), RECORDING_WAITS_S="0")
    return record.comparable(recorder.requests)


@pytest.fixture(scope="module")
def ours() -> dict[str, Any]:
    return run("all_calls_program.py", calls=True)


@cache
def theirs() -> dict[str, Any]:
    return json.loads((DATA / "calls.json").read_text())


def by_call(requests: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Method and path -> headers and decoded bodies, in the order of the calls."""
    groups: dict[str, list[Any]] = defaultdict(list)
    for request in requests:
        path = request["path"].removeprefix("/plain")
        name = f"{request['method']} {request['path']}"
        if path in HANDSHAKE:
            groups[name] = [meaning(request)]
        else:
            groups[name].append(meaning(request))
    # The parts of a batch are sent together and arrive in any order.
    passes = groups.get("POST /api/v1/forward_backward", [])
    passes.sort(key=lambda sent: (sent[1].model_id, sent[1].seq_id))
    return dict(groups)


def meaning(request: dict[str, Any]) -> Any:
    """A request in canonical form: JSON as values, protobuf as a message."""
    headers = {
        name: value for name, value in request["headers"].items() if name != "content-encoding"
    }
    if "body_base64" in request:
        body = base64.b64decode(request["body_base64"])
        return headers, pb.ForwardBackwardRequest.FromString(body)
    return headers, json.loads(request["body"]) if request.get("body") else None


def test_the_same_calls_are_sent(ours):
    assert sorted(by_call(ours["requests"])) == sorted(by_call(theirs()["requests"]))


@pytest.mark.parametrize("call", sorted(by_call(theirs()["requests"])))
def test_a_call_sends_what_the_official_client_sends(call, ours):
    assert by_call(ours["requests"])[call] == by_call(theirs()["requests"])[call]


def test_the_shared_poll_has_the_fields_of_the_official_client():
    """tinkex starts it when many samples wait; the program has one at a time."""
    target = types.SamplingSessionFuturesTarget(sampling_session_id="s:1", cloned_sampler_id=0)
    request = types.FuturesRetrieveRequest(
        target=target, prev_cursor=0, retrieved_request_ids=["r-1"]
    )

    kind = record.shape(json.loads(encode_json(request)))

    assert kind in theirs()["by the clock"]["retrieve_futures"]


def test_polls_have_the_fields_of_the_official_client(ours):
    assert ours["by the clock"]["retrieve_future"]
    for kind in ours["by the clock"]["retrieve_future"]:
        assert kind in theirs()["by the clock"]["retrieve_future"]


def test_telemetry_has_the_fields_of_the_official_client(ours):
    """
    The recording has the first event of each batch, and on a slow machine there are more batches.

    So every batch must have their fields, and each of their events must be among ours.
    """

    def parts(kinds):
        batches = [{**kind, "events": None} for kind in kinds]
        return batches, [event for kind in kinds for event in kind["events"]]

    batches, events = parts(ours["by the clock"]["telemetry"])
    their_batches, their_events = parts(theirs()["by the clock"]["telemetry"])
    assert batches
    assert all(batch in their_batches for batch in batches)
    assert all(event in events for event in their_events)


def test_the_recorded_program_sends_the_same_under_our_client():
    """Batches in parts, pictures, CSR tensors, provenance, every kind of sampler."""
    recorded = [
        request
        for path in sorted((DATA / "0.36.0").glob("*.json"))
        if path.stem not in record.TIMER_DRIVEN
        for request in json.loads(path.read_text())
    ]

    assert by_call(run("basic_program.py", calls=False)["requests"]) == by_call(recorded)
