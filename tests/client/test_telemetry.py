"""Telemetry is small, without secrets, bounded, and delays nothing."""

import json
import os
import subprocess
import sys
import time

import pytest

import tinkex
from tinkex import types
from tinkex.client.observe import telemetry
from tinkex.testing import Answer, Lost
from waiting import until


def sent(fake):
    return [seen for seen in fake.requests if seen.endpoint == "telemetry"]


def events(fake):
    return [event for seen in sent(fake) for event in json.loads(seen.body)["events"]]


def fail_once(fake, service):
    """One failure whose message and request contain secrets."""
    fake.script("create_model", Answer(status=403, body={"detail": "tml-secret of Alice"}))
    with pytest.raises(tinkex.PermissionDeniedError):
        service.create_lora_training_client("fake/model", user_metadata={"who": "Alice"})


def test_e2_a_session_reports_its_start_its_errors_and_its_end(fake):
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


def test_e2_nothing_secret_is_reported(fake):
    with fake.client(default_headers_overrides={"X-Other": "tml-header"}) as service:
        fail_once(fake, service)
    for seen in sent(fake):
        for word in (b"tml-", b"Alice", b"x-api-key", b"X-API-Key"):
            assert word not in seen.body


def test_e2_it_can_be_turned_off(fake, monkeypatch):
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    with fake.client() as service:
        service.create_lora_training_client("fake/model")
    assert sent(fake) == []


@pytest.mark.parametrize("fault", [Answer(status=500), Answer(status=404), Lost()], ids=str)
def test_a_service_that_rejects_telemetry_delays_neither_errors_nor_closing(fake, datum, fault):
    fake.script("telemetry", *[fault] * 1000)
    started = time.monotonic()
    with fake.client() as service:
        fail_once(fake, service)
        training = service.create_lora_training_client("fake/model")
        training.forward_backward([datum], "cross_entropy").result(5)
    assert time.monotonic() - started < 2
    assert len(sent(fake)) == 1


def test_a_service_that_never_responds_to_telemetry_delays_closing_only_briefly(fake, monkeypatch):
    monkeypatch.setattr(telemetry, "FINAL_SEND_TIMEOUT_S", 0.1)
    fake.hold("telemetry")
    started = time.monotonic()
    with fake.client() as service:
        service.create_sampling_client(base_model="fake/model")
    assert time.monotonic() - started < 2


def test_e2_the_queue_is_bounded_and_keeps_the_newest(fake, service):
    service.create_sampling_client(base_model="fake/model")
    queue = service.get_telemetry()
    for number in range(2 * telemetry.MAX_EVENTS):
        queue.log("mine", {"number": number})
    assert len(queue._events) == telemetry.MAX_EVENTS == 10_000
    assert queue._events[-1].index == 2 * telemetry.MAX_EVENTS


def test_batches_are_sent_periodically(fake, monkeypatch):
    monkeypatch.setattr(telemetry, "SEND_EVERY_S", 0.02)
    with fake.client() as service:
        sampling = service.create_sampling_client(base_model="fake/model")
        for _ in range(3):
            with pytest.raises(tinkex.RequestFailedError):
                sampling.sample(types.ModelInput.empty(), 1, types.SamplingParams()).result(5)
        until(lambda: len(events(fake)) >= 4, 5)
        batch = json.loads(sent(fake)[0].body)
    assert batch["session_id"] == "s-1"
    assert batch["sdk_version"] == "0.36.0"
    assert batch["process_uuid"]
    kinds = [event.get("event_data", {}).get("category") for event in events(fake)]
    assert kinds == [None, "user", "user", "user", None]


def test_e2_other_errors_are_unhandled_exceptions_without_their_message(fake, service):
    training = service.create_lora_training_client("fake/model")
    body = {"error": "tml-secret of Alice", "category": "server"}
    fake.script("retrieve_future", Answer(status=200, body=body))
    with pytest.raises(tinkex.RequestFailedError, match="Alice"):
        training.optim_step(tinkex.AdamParams()).result(5)
    service.close("success").result(5)
    found = next(each for each in events(fake) if each["event"] == "UNHANDLED_EXCEPTION")
    assert found["error_type"] == "RequestFailedError"
    assert found["error_message"] == "category server"
    assert found["severity"] == "ERROR"
    assert found["traceback"].splitlines()[-1].startswith("tinkex/client/http/polling.py:")
    for seen in sent(fake):
        assert b"Alice" not in seen.body
        assert __file__.encode() not in seen.body


def test_e2_events_have_the_shape_that_services_know(fake):
    with fake.client() as service:
        fail_once(fake, service)
    for event in events(fake):
        assert len(event["event_id"]) == 36
        assert event["timestamp"].startswith("20")
        assert event["severity"] in ("INFO", "WARNING")
    assert events(fake)[-1]["duration"].startswith("0:00:0")


def test_e2_users_log_events_of_their_own_under_the_session(fake):
    with fake.client() as service:
        assert service.get_telemetry() is None  # no session yet
        training = service.create_lora_training_client("fake/model")
        telemetry = training.get_telemetry()
        data = {"loss": 0.5}
        assert telemetry.log("epoch", data, severity="DEBUG")
        data["loss"] = 7.0
        for bad in ({"x": object()}, {"x": float("nan")}, {"x": "y" * 100_000}, [1]):
            assert not telemetry.log("epoch", bad)
        assert not telemetry.log("epoch", {}, severity="LOUD")
    assert not telemetry.log("late")
    mine = [each for each in events(fake) if each.get("event_name") == "epoch"]
    assert [(each["event_data"], each["severity"]) for each in mine] == [({"loss": 0.5}, "DEBUG")]


def test_e2_a_batch_has_a_hundred_events_and_is_sent_three_times_at_most(fake, monkeypatch):
    monkeypatch.setattr(telemetry, "SEND_EVERY_S", 0.01)
    fake.script("telemetry", *[Answer(status=503)] * 4)
    with fake.client() as service:
        reporter = service.create_lora_training_client("fake/model").get_telemetry()
        for number in range(250):
            reporter.log("mine", {"number": number})
        until(lambda: len(sent(fake)) >= 6, 5)
    batches = [
        [each["event_session_index"] for each in seen.json()["events"]] for seen in sent(fake)
    ]
    assert all(len(batch) <= 100 for batch in batches)
    first = batches[0]
    assert batches[:3] == [first] * 3  # then it is dropped
    assert not set(first) & {index for batch in batches[3:] for index in batch}
    assert batches[3] == batches[4]  # the next one: refused once, then accepted
    kept = {index for batch in batches[3:] for index in batch}
    assert kept == set(range(len(first), 252))


def test_e2_no_error_waits_for_telemetry(fake, service):
    """The promise gets its error before anything is recorded."""
    training = service.create_lora_training_client("fake/model")
    order = []

    class Slow(telemetry.Telemetry):
        def record_error(self, error, frames):
            order.append("noted")

    service.holder._telemetry.__class__ = Slow
    fake.script("optim_step", Answer(status=422))
    hold = fake.hold("optim_step")
    future = training.optim_step(tinkex.AdamParams())
    future.add_done_callback(lambda _: order.append("told"))
    hold.release()
    with pytest.raises(tinkex.UnprocessableEntityError):
        future.result(5)
    until(lambda: len(order) >= 2, 5)
    assert order == ["told", "noted"]


def test_e2_closing_does_not_wait_for_a_slow_service(fake, monkeypatch):
    monkeypatch.setattr(telemetry, "FINAL_SEND_TIMEOUT_S", 0.05)
    monkeypatch.setattr(telemetry, "DEADLINE_S", 3600.0)
    service = fake.client()
    service.create_lora_training_client("fake/model")
    hold = fake.hold("telemetry")
    service.close("success").result(30)  # or `TimeoutError`: the request is still held
    hold.release()


PROGRAM = """
import os, sys
import tinkex
service = tinkex.ServiceClient(base_url=sys.argv[1])
sampling = service.create_sampling_client(base_model="fake/model")
sampling.get_telemetry().log("mine")
if sys.argv[2] == "fork" and os.fork() == 0:
    prompt = tinkex.ModelInput.from_ints([1])
    sampling.sample(prompt, 1, tinkex.SamplingParams(max_tokens=1)).result(10)
    service.close("success").result(10)
    os._exit(0)
if sys.argv[2] == "fork and leave" and os.fork() == 0:
    own = tinkex.ServiceClient(base_url=sys.argv[1])
    own.create_sampling_client(base_model="fake/model")
    sys.exit(0)
if sys.argv[2].startswith("fork"):
    os.wait()
"""


@pytest.mark.parametrize("how", ["leave", "fork", "fork and leave"])
def test_e2_remaining_events_are_sent_at_exit_and_a_fork_is_another_process(loopback, how):
    if how != "leave" and not hasattr(os, "fork"):
        pytest.skip("no fork here")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, loopback.url, how],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    batches = [seen.json() for seen in sent(loopback.fake)]
    kinds = [[event["event"] for event in batch["events"]] for batch in batches]
    assert ["SESSION_START", "GENERIC_EVENT", "SESSION_END"] in kinds
    names = [event.get("event_name") for batch in batches for event in batch["events"]]
    assert names.count("mine") == 1
    if how == "fork and leave":  # the child reports its own session, and nothing of its parent's
        assert len(batches) == len({batch["session_id"] for batch in batches}) == 2
        return
    processes = {batch["process_uuid"] for batch in batches}
    assert len(processes) == len(batches) == (2 if how == "fork" else 1)
    assert len({batch["session_id"] for batch in batches}) == 1
    for batch in batches:  # each process counts its own
        assert batch["events"][0]["event_session_index"] == 0
