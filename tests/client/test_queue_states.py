"""Queue states reach the user: a log line, a callback, a progress display (O8)."""

import io
import json

import pytest

import tinkex
from tinkex import types
from tinkex.client.observe import instrumentation, queue_states
from tinkex.client.observe.progress import Row, summary_line
from tinkex.testing import Answer
from waiting import until


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    """Work left running by other tests is not shown here."""
    monkeypatch.setattr(instrumentation, "METRICS", instrumentation.Metrics())
    monkeypatch.setattr(queue_states, "_paused", {})


def paused(reason: str | None = "two jobs ahead", status: int = 408) -> Answer:
    body = {"type": "try_again", "request_id": "r", "queue_state": "paused_capacity"}
    return Answer(status=status, body={**body, "queue_state_reason": reason})


@pytest.mark.parametrize("status", [408, 200])  # older servers send it with a 200
def test_o8_a_callback_gets_what_waits_why_and_the_end_of_the_wait(
    fake, service, datum, caplog, status
):
    states: list[tinkex.QueueState] = []
    training = service.create_lora_training_client("fake/model")
    last = paused("one job ahead", status=status)
    fake.script("retrieve_future", paused(status=status), paused(status=status), last)
    with tinkex.on_queue_state(states.append):
        training.forward_backward([datum], "cross_entropy").result(5)
    subject = f"Training of {training.model_id}"
    assert [(each.subject, each.state, each.reason) for each in states] == [
        (subject, "paused_capacity", "two jobs ahead"),
        (subject, "paused_capacity", "one job ahead"),
        (subject, "active", None),
    ]
    assert not caplog.records  # it was short
    fake.script("retrieve_future", paused())
    training.optim_step(tinkex.AdamParams()).result(5)
    assert len(states) == 3  # the block has ended


def test_o8_samples_and_new_models_report_too_and_a_state_without_a_reason_gets_one(fake, service):
    states: list[tinkex.QueueState] = []
    watch = tinkex.on_queue_state(states.append)
    fake.script("retrieve_future", paused(None))
    service.create_lora_training_client("fake/model")
    sampling = service.create_sampling_client(base_model="fake/model")
    fake.script("retrieve_future", paused())
    prompt = types.ModelInput.from_ints([1])
    sampling.sample(prompt, 1, types.SamplingParams(max_tokens=1)).result(5)
    watch.stop()
    watch.stop()
    assert states[0].subject == "Creation of a model on fake/model"
    assert states[0].reason == "the service is short of capacity"
    assert states[2].subject.startswith("Sampling from ")


@pytest.mark.parametrize("status", [200, 408])
def test_t5_an_unknown_state_is_passed_on_unchanged(status, fake, service, datum):
    training = service.create_lora_training_client("fake/model")
    states: list[tinkex.QueueState] = []
    body = {"type": "try_again", "request_id": "r", "queue_state": "paused_maintenance"}
    fake.script("retrieve_future", Answer(status=status, body=body))
    with tinkex.on_queue_state(states.append):
        training.forward_backward([datum], "cross_entropy").result(5)
    assert [state.state for state in states] == ["paused_maintenance", "active"]
    assert states[0].reason == "queue state 'paused_maintenance', without a reason"


def test_o8_a_failing_callback_does_not_stop_the_request(fake, service, datum, caplog):
    def fails(state: tinkex.QueueState) -> None:
        raise ValueError("mine")

    training = service.create_lora_training_client("fake/model")
    fake.script("retrieve_future", paused())
    with tinkex.on_queue_state(fails):
        training.forward_backward([datum], "cross_entropy").result(5)
    assert "a queue-state callback failed" in caplog.text


def test_o8_nothing_is_paused_after_a_request_was_cancelled(fake, datum):
    service = fake.client()
    training = service.create_lora_training_client("fake/model")
    fake.script("retrieve_future", *[paused()] * 1000)
    training.forward_backward([datum], "cross_entropy")
    until(queue_states.paused)
    service.close("success").result(5)
    until(lambda: not queue_states.paused())


def test_e3_queue_states_and_backpressure_are_counted_in_telemetry(fake, datum):
    with fake.client(api_key="tml-busy") as service:
        training = service.create_lora_training_client("fake/model")
        fake.script("optim_step", *[Answer(status=429, headers={"retry-after-ms": "20"})] * 2)
        fake.script("retrieve_future", paused(), paused())
        training.forward_backward([datum], "cross_entropy").result(5)
        training.optim_step(tinkex.AdamParams()).result(5)
    sent = [seen for seen in fake.requests if seen.endpoint == "telemetry"]
    events = [event for seen in sent for event in json.loads(seen.body)["events"]]
    assert [
        (each["event_name"], each["event_data"]) for each in events if "event_name" in each
    ] == [  # each once, without repeats
        ("backpressure", {"rate_limited": 2, "longest_wait_s": 0.02}),
        ("queue_states", {"paused_capacity": 1, "active": 1}),
    ]


# -- the display -------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("out", [io.StringIO(), Terminal()], ids=["file", "terminal"])
def test_o8_progress_shows_what_is_under_way_and_why_it_waits(fake, service, out):
    sampling = service.create_sampling_client(base_model="fake/model")
    fake.script("retrieve_future", *[paused()] * 1000)
    prompt = types.ModelInput.from_ints([1])
    with tinkex.progress(out, every_s=0.01):
        futures = [sampling.sample(prompt, 1, types.SamplingParams(max_tokens=1)) for _ in range(3)]
        until(lambda: "two jobs ahead" in out.getvalue())
        fake._scripts["retrieve_future"].clear()
        for future in futures:
            future.result(5)
    text = out.getvalue()
    assert "sample" in text
    assert "3/3" in text
    if not out.isatty():
        assert "in flight" in text
        assert text.splitlines()[-1] == "tinkex: sample 3/3"
        assert len(text.splitlines()) == len(set(text.splitlines()))  # only what has changed


def test_progress_summary_line():
    row = Row(name="sample", done=12, failed=1, in_flight=5, waiting=22)
    assert summary_line([row], []) == "sample 12/40, 5 in flight, 22 waiting, 1 failed"


def test_progress_of_nothing_says_nothing():
    out = io.StringIO()
    with tinkex.progress(out):
        pass
    assert out.getvalue() == ""
