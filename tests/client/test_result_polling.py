"""Polling for a result: the meaning of each response, and no busy loops."""

import math
import random
import threading
import time

import pytest

import tinkex
from tinkex.client.http.polling import PollDelays
from tinkex.testing import Answer, Lost
from tinkex.wire.content_digest import content_digest

PROTOBUF = {"content-type": "application/x-protobuf"}
PENDING = {"type": "try_again", "request_id": "r", "queue_state": "paused_capacity"}


@pytest.fixture
def training(service):
    return service.create_lora_training_client("fake/model", rank=4)


def polls(fake):
    return [seen for seen in fake.requests if seen.endpoint == "retrieve_future"]


@pytest.mark.parametrize(
    "answers",
    [
        [Answer(status=408, body=PENDING)],
        [Answer(status=408)],
        [Answer(status=200, body=PENDING)],
        [Answer(status=500), Answer(status=503, body=b"<html>")],
        [Answer(status=429, headers={"retry-after-ms": "5"})],
        [Answer(status=400, body={"detail": "?"})] * 3,  # from a proxy, at most three in a row
        [Answer(status=400)],  # empty: certainly from a proxy
        [Answer(status=200, body=b"<html>"), Answer(status=200, body=b'{"metr')],
        [Answer(status=200, body=b"\x0a\xff", headers=PROTOBUF)],
        # Cut between two fields it is still valid protobuf; only its digest shows it.
        [Answer(status=200, headers=PROTOBUF | {"content-digest": content_digest(b"whole")})],
        [Lost()],
        [Lost(after=True)],
        [Lost(slow=True)],
    ],
    ids=lambda answers: " ".join(str(getattr(a, "status", a)) for a in answers),
)
def test_a_poll_without_a_result_is_repeated(fake, training, datum, answers):
    fake.script("retrieve_future", *answers)
    result = training.forward_backward([datum], "cross_entropy").result(20)
    assert result.metrics["loss:sum"] > 0
    assert fake.ran == [(training.model_id, 1, "forward_backward")]


@pytest.mark.parametrize(
    ("answers", "kind"),
    [
        ([Answer(status=401)], tinkex.AuthenticationError),
        ([Answer(status=403)], tinkex.PermissionDeniedError),
        ([Answer(status=404)], tinkex.NotFoundError),
        ([Answer(status=410)], tinkex.APIStatusError),
        ([Answer(status=422)], tinkex.UnprocessableEntityError),
        ([Answer(status=400, body={"detail": "?"})] * 4, tinkex.BadRequestError),
        ([Answer(status=200, body=b"not json")] * 4, tinkex.APIResponseValidationError),
        ([Answer(status=200, body={"odd": 1})], tinkex.APIResponseValidationError),
        ([Answer(status=200, body=[1])], tinkex.APIResponseValidationError),
    ],
)
def test_a_final_error_has_its_class_and_names_the_request(fake, training, datum, answers, kind):
    fake.script("retrieve_future", *answers)
    with pytest.raises(kind, match=r"result of ForwardBackward request r-\d+") as caught:
        training.forward_backward([datum], "cross_entropy").result(20)
    assert type(caught.value) is kind


@pytest.mark.parametrize(
    ("word", "category"),
    [("user", "user"), ("SERVER", "server"), ("odd", "unknown"), (None, "unknown")],
)
def test_a_failed_request_has_its_category(fake, training, datum, word, category):
    body = {"error": "no luck"} | ({} if word is None else {"category": word})
    fake.script("retrieve_future", Answer(status=200, body=body))
    with pytest.raises(tinkex.RequestFailedError, match="no luck") as caught:
        training.forward_backward([datum], "cross_entropy").result(5)
    assert caught.value.category == category
    assert len(fake.ran) == 1  # a step is never run again by itself


def test_a_large_result_is_fetched_once_the_byte_budget_allows(fake, training, datum):
    fake.script(
        "retrieve_future",
        Answer(status=200, body={"status": "complete_metadata", "response_payload_size": 10}),
        # The server withholds the payload once more: polled again, not given up.
        Answer(status=200, body={"status": "complete_metadata", "response_payload_size": 10}),
    )
    before = len(polls(fake))
    training.forward_backward([datum], "cross_entropy").result(5)
    asked = [seen.json()["allow_metadata_only"] for seen in polls(fake)[before:]]
    assert asked == [True, False, False]


def test_json_results_are_decoded_as_well_as_protobuf(fake, training, datum):
    body = {"loss_fn_output_type": "X", "loss_fn_outputs": [{}], "metrics": {"loss:sum": 2.5}}
    fake.script("retrieve_future", Answer(status=200, body=body))
    result = training.forward_backward([datum], "cross_entropy").result(5)
    assert result.metrics == {"loss:sum": 2.5}


def test_a_step_with_nan_metrics_is_not_an_error(fake, training):
    body = b'{"metrics": {"grad_norm": NaN, "lr": 0.5}}'
    fake.script("retrieve_future", Answer(status=200, body=body))
    metrics = training.optim_step(tinkex.AdamParams()).result(5).metrics
    assert math.isnan(metrics["grad_norm"])
    assert metrics["lr"] == 0.5


def test_polls_name_the_request_type(fake, training, datum):
    training.forward_backward([datum], "cross_entropy").result(5)
    training.optim_step(tinkex.AdamParams()).result(5)
    headers = [seen.headers for seen in polls(fake)[-2:]]
    assert headers[0]["x-tinker-request-type"] == "ForwardBackward"
    assert headers[0]["accept"] == "application/x-protobuf"
    assert float(headers[0]["x-tinker-create-promise-roundtrip-time"]) > 0
    assert headers[1]["x-tinker-request-type"] == "OptimStep"
    assert headers[1]["accept"] == "application/json"


def test_a_server_that_responds_at_once_is_not_polled_in_a_busy_loop(fake, training, datum):
    fake.script("retrieve_future", *[Answer(status=408, body=PENDING)] * 10_000)
    before = len(polls(fake))
    future = training.forward_backward([datum], "cross_entropy")
    with pytest.raises(TimeoutError):
        future.result(1.0)
    assert len(polls(fake)) - before < 15
    fake._scripts["retrieve_future"].clear()
    future.result(10)


def test_the_delay_grows_for_quick_responses_and_is_zero_for_held_polls():
    pace = PollDelays(random.Random(0))
    delays = [pace.after_not_yet(0.0) for _ in range(8)]
    assert delays[0] < 0.05
    assert 0.75 <= delays[-1] <= 1.0
    assert pace.after_not_yet(30.0) == 0.0
    assert pace.after_not_yet(0.0) < 0.05
    failures = [pace.after_failure() for _ in range(12)]
    assert failures[0] <= 0.1
    assert 11 <= failures[-1] <= 15


def test_an_observer_that_fails_does_not_fail_the_request(fake, service, caplog):
    sampling = service.create_sampling_client(base_model="fake/model")
    seen = threading.Event()

    def broken(state, reason):
        seen.set()
        raise ZeroDivisionError

    sampling.on_queue_state_change = broken
    fake.script("retrieve_future", Answer(status=408, body=PENDING))
    prompt = tinkex.ModelInput.from_ints([1])
    started = time.monotonic()
    sampling.sample(prompt, 1, tinkex.SamplingParams(max_tokens=1)).result(5)
    assert seen.is_set()
    assert time.monotonic() - started < 4
    assert "observer failed" in caplog.text
