"""Telemetry is small, scrubbed, bounded, and in nobody's way."""

import json
import time

import pytest

import tinkex
from tinkex import types
from tinkex.client import telemetry
from tinkex.testing import Answer, Lost


def sent(fake):
    return [seen for seen in fake.requests if seen.endpoint == "telemetry"]


def events(fake):
    return [event for seen in sent(fake) for event in json.loads(seen.body)["events"]]


def fail_once(fake, service):
    """One failure whose words and request hold what must not leave."""
    fake.script("create_model", Answer(status=403, body={"detail": "tml-secret of Alice"}))
    with pytest.raises(tinkex.PermissionDeniedError):
        service.create_lora_training_client("fake/model", user_metadata={"who": "Alice"})


def test_a_session_reports_its_start_its_errors_and_its_end(fake):
    with fake.client() as service:
        fail_once(fake, service)
    found = events(fake)
    assert [event["event"] for event in found] == ["SESSION_START", "GENERIC_EVENT", "SESSION_END"]
    assert [event["event_session_index"] for event in found] == [0, 1, 2]
    assert found[1]["event_name"] == "user_error"
    assert found[1]["event_data"] == {
        "error_type": "PermissionDeniedError",
        "status_code": 403,
        "category": None,
    }


def test_nothing_secret_is_reported(fake):
    with fake.client(default_headers_overrides={"X-Other": "tml-header"}) as service:
        fail_once(fake, service)
    for seen in sent(fake):
        for word in (b"tml-", b"Alice", b"x-api-key", b"X-API-Key"):
            assert word not in seen.body


def test_it_can_be_switched_off(fake, monkeypatch):
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    with fake.client() as service:
        service.create_lora_training_client("fake/model")
    assert sent(fake) == []


@pytest.mark.parametrize("fault", [Answer(status=500), Answer(status=404), Lost()], ids=str)
def test_a_service_that_does_not_take_it_delays_no_error_and_no_end(fake, datum, fault):
    fake.script("telemetry", *[fault] * 1000)
    started = time.monotonic()
    with fake.client() as service:
        fail_once(fake, service)
        training = service.create_lora_training_client("fake/model")
        training.forward_backward([datum], "cross_entropy").result(5)
    assert time.monotonic() - started < 2
    assert len(sent(fake)) == 1


def test_a_service_that_never_answers_it_delays_the_end_by_a_moment_at_most(fake, monkeypatch):
    monkeypatch.setattr(telemetry, "LAST_SEND_S", 0.1)
    fake.hold("telemetry")
    started = time.monotonic()
    with fake.client() as service:
        service.create_sampling_client(base_model="fake/model")
    assert time.monotonic() - started < 2


def test_e2_the_queue_is_bounded_and_keeps_the_newest(fake, service):
    service.create_sampling_client(base_model="fake/model")
    queue = service.get_telemetry()
    for number in range(2 * telemetry.MOST_EVENTS):
        queue.log("mine", {"number": number})
    assert len(queue._events) == telemetry.MOST_EVENTS == 10_000
    assert queue._events[-1].index == 2 * telemetry.MOST_EVENTS


def test_batches_are_sent_now_and_then(fake, monkeypatch):
    monkeypatch.setattr(telemetry, "SEND_EVERY_S", 0.02)
    with fake.client() as service:
        sampling = service.create_sampling_client(base_model="fake/model")
        for _ in range(3):
            with pytest.raises(tinkex.RequestFailedError):
                sampling.sample(types.ModelInput.empty(), 1, types.SamplingParams()).result(5)
        deadline = time.monotonic() + 5
        while len(events(fake)) < 4 and time.monotonic() < deadline:
            time.sleep(0.005)
        batch = json.loads(sent(fake)[0].body)
    assert batch["session_id"] == "s-1"
    assert batch["sdk_version"] == "0.36.0"
    assert batch["process_uuid"]
    kinds = [event.get("event_data", {}).get("category") for event in events(fake)]
    assert kinds == [None, "user", "user", "user", None]
