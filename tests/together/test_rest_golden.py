"""REST requests equal those of the official SDK 0.36.0, field by field."""

import subprocess
import sys
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import pytest

import sdk_envs
from http_stub import Received, Reply, reply_json, stub_server
from together.official_sdk import ACCEPTED_STATUSES

PROGRAM = Path(__file__).with_name("rest_calls_program.py")
#: Headers that must be equal.
SAME = [
    "accept",
    "content-type",
    "x-api-key",
    "x-sdk-method",
    "x-sdk-version",
    "x-stainless-package-version",
    "x-tinker-weights-access-token",
]

pytestmark = [pytest.mark.sdk, pytest.mark.timeout(120)]


def answer(request: Received) -> Reply:
    if "/client/" in request.path or request.path.endswith("/telemetry"):
        return reply_json({"status": "accepted"} if "telemetry" in request.path else {})
    return reply_json({"detail": "no"}, 422)


def sent(python: str | Path, package: str) -> list[dict[str, object]]:
    with stub_server(answer) as service:
        done = subprocess.run([python, PROGRAM, package, service.url], check=False, timeout=100)
    assert done.returncode in ACCEPTED_STATUSES
    calls = [
        each
        for each in service.requests
        if "/client/" not in each.path and not each.path.endswith("/telemetry")
    ]
    return [
        {
            "method": each.method,
            "path": urlsplit(each.path).path,
            "query": parse_qsl(urlsplit(each.path).query),
            "body": each.json() if each.body else None,
            "repeatable": "x-idempotency-key" in each.headers,
            **{name: each.headers.get(name) for name in SAME},
        }
        for each in calls
    ]


def test_every_rest_call_equals_that_of_the_official_client() -> None:
    theirs = sent(sdk_envs.ensure("0.36.0"), "tinker")
    ours = sent(sys.executable, "tinkex")
    assert len(theirs) == 27
    assert ours == theirs
