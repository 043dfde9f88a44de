"""RetryConfig: every field applies, one layer retries, and a progress timeout fails all samples."""

import pickle
import random
import time

import pytest

import tinkex
from tinkex import RetryConfig, SamplingParams, types
from tinkex.client.errors import (
    APIConnectionError,
    APIStatusError,
    RequestFailedError,
    status_error,
)
from tinkex.client.http.transport import Request, Response
from tinkex.client.sample_queue import MAX_SERVER_FAILURES, should_restart
from tinkex.testing import Answer, FakeService, Lost
from tinkex.wire.errors import RequestErrorCategory
from waiting import until

PROMPT = types.ModelInput.from_ints([5, 6, 7])
PARAMS = SamplingParams(max_tokens=4)
QUICK = {"retry_delay_base": 0.001, "retry_delay_max": 0.01}
CRASHED = Answer(status=200, body={"error": "crashed", "category": "server"})


def numbers(fake):
    return [s.json()["seq_id"] for s in fake.requests if s.endpoint == "asample"]


def client(service, **fields):
    config = RetryConfig(**{**QUICK, **fields})
    return service.create_sampling_client(base_model="fake/model", retry_config=config)


def under_way(fake, sampling, least, count=20):
    """How many samples are sent before any has a response: at least so many."""
    hold = fake.hold("asample")
    futures = [sampling.sample(PROMPT, 1, PARAMS) for _ in range(count)]
    until(lambda: len(numbers(fake)) >= least)
    time.sleep(0.05)
    found = len(numbers(fake))
    hold.release()
    [future.result(5) for future in futures]
    return found


@pytest.mark.parametrize(("ours", "theirs", "most"), [(2, 5, 2), (5, 2, 2), (None, 3, 3)])
def test_the_smaller_of_the_client_and_server_limits_applies(ours, theirs, most):
    fake = FakeService(config={"sample_max_concurrent_requests": theirs})
    with fake.client() as service:
        assert under_way(fake, client(service, max_connections=ours), most) == most


def test_delays_double_up_to_the_longest_and_are_spread_by_the_jitter():
    config = RetryConfig(retry_delay_base=1.0, retry_delay_max=6.0, jitter_factor=0.5)
    rng = random.Random(0)
    for attempt, middle in ((1, 1.0), (2, 2.0), (3, 4.0), (9, 6.0)):
        delays = [config.delay_s(attempt, rng=rng) for _ in range(200)]
        assert min(delays) >= middle / 2
        assert max(delays) <= min(middle * 1.5, 6.0)
        assert max(delays) - min(delays) > middle / 4
    even = RetryConfig(retry_delay_base=1.0, jitter_factor=0.0)
    assert even.delay_s(2, rng=rng) == 2.0


def test_the_delay_between_attempts_is_the_configured_one(fake, service):
    sampling = client(service, retry_delay_base=0.2, retry_delay_max=0.2, jitter_factor=0.0)
    fake.script("retrieve_future", Answer(status=410))
    began = time.monotonic()
    sampling.sample(PROMPT, 1, PARAMS).result(5)
    assert time.monotonic() - began >= 0.2


def test_a_submission_is_retried_by_one_layer_only(fake, monkeypatch):
    monkeypatch.setenv("TINKEX_GIVE_UP_S", "0.15")
    with fake.client() as service:
        sampling = client(service)
        fake.script("asample", *[Answer(status=503)] * 1000)
        began = time.monotonic()
        with pytest.raises(tinkex.InternalServerError):
            sampling.sample(PROMPT, 1, PARAMS).result(10)
        assert time.monotonic() - began < 5
        assert set(numbers(fake)) == {0}  # a restarted sample would have another seq_id


def test_a_sample_that_the_server_fails_is_retried_a_few_times_and_then_raised(fake, service):
    sampling = client(service)
    fake.script("retrieve_future", *[CRASHED] * 50)
    with pytest.raises(tinkex.RequestFailedError, match="crashed"):
        sampling.sample(PROMPT, 1, PARAMS).result(5)
    assert numbers(fake) == list(range(MAX_SERVER_FAILURES + 1))


def test_exceptions_that_the_user_lists_are_retried(fake, service):
    sampling = client(service, retryable_exceptions=(tinkex.NotFoundError,))
    fake.script("asample", Answer(status=404))
    sampling.sample(PROMPT, 1, PARAMS).result(5)
    assert numbers(fake) == [0, 1]


def _status(code):
    request = Request(method="POST", url="http://x/api/v1/asample")
    return status_error(Response(status_code=code, request=request))


LOST = APIConnectionError(Request(method="POST", url="http://x"), "reset")


@pytest.mark.parametrize(
    ("error", "sent", "listed", "expected"),
    [
        (LOST, True, (APIConnectionError,), True),
        (LOST, True, (), False),  # not listed by the user
        (LOST, False, (APIConnectionError,), False),  # the submission was already retried
        (_status(503), True, (), True),
        (_status(503), False, (APIStatusError,), False),
        (_status(410), True, (), True),
        (_status(410), False, (), False),
        (_status(404), True, (), False),
        (_status(404), False, (APIStatusError,), True),
        (RequestFailedError("x", "r", RequestErrorCategory.Server), True, (), True),
        (RequestFailedError("x", "r", RequestErrorCategory.Unknown), True, (), True),
        (RequestFailedError("x", "r", RequestErrorCategory.User), True, (Exception,), False),
        (ValueError("x"), True, (), False),
    ],
)
def test_which_errors_restart_a_sample(error, sent, listed, expected):
    config = RetryConfig(retryable_exceptions=listed)
    assert should_restart(error, config, 1, sent=sent) is expected


def test_a_progress_timeout_fails_all_samples_with_the_last_seen_state(fake, service):
    sampling = client(service, progress_timeout=0.3, max_connections=2)
    pending = {"type": "try_again", "request_id": "r", "queue_state": "paused_capacity"}
    reason = {"queue_state_reason": "the GPU is on holiday"}
    fake.script("retrieve_future", *[Answer(status=408, body=pending | reason)] * 1000)
    futures = [sampling.sample(PROMPT, 1, PARAMS) for _ in range(5)]  # three are never admitted
    began = time.monotonic()
    errors = [future.exception(10) for future in futures]
    assert time.monotonic() - began < 3
    for error in errors:
        assert isinstance(error, tinkex.APIConnectionError)
        assert "progress_timeout" in str(error)
        assert "paused_capacity, the GPU is on holiday" in str(error)
    assert len({id(error) for error in errors}) == 5
    fake._scripts["retrieve_future"].clear()
    assert sampling.sample(PROMPT, 1, PARAMS).result(5).sequences


def test_progress_of_any_sample_is_progress(fake, service):
    sampling = client(service, progress_timeout=0.5, max_connections=1)
    fake._sample_s = 0.1
    for future in [sampling.sample(PROMPT, 1, PARAMS) for _ in range(8)]:
        assert future.result(10).sequences  # 0.8 s and more, none longer than 0.5 s apart


@pytest.mark.parametrize("by", ["user", "server"])
def test_stuck_detection_can_be_turned_off(by):
    fake = FakeService(
        config={"sample_enable_stuck_detection": by != "server"}, sample_s=0.4, hold_s=1.0
    )
    with fake.client() as service:
        sampling = client(service, progress_timeout=0.1, enable_stuck_detection=by != "user")
        assert sampling.sample(PROMPT, 1, PARAMS).result(5).sequences


def test_every_field_survives_pickling(fake, service):
    sampling = client(
        service,
        max_connections=3,
        progress_timeout=9.0,
        jitter_factor=0.1,
        enable_stuck_detection=False,
        retryable_exceptions=(TimeoutError, tinkex.NotFoundError),
    )
    copy = pickle.loads(pickle.dumps(sampling))
    assert copy.retry_handler.config == sampling.retry_handler.config
    assert copy.retry_handler.config.retryable_exceptions == (TimeoutError, tinkex.NotFoundError)
    assert under_way(fake, copy, 3) == 3


def test_samples_are_not_retried_where_the_server_forbids_it_but_logprobs_are():
    fake = FakeService(config={"sample_no_retries": True})
    with fake.client() as service:
        sampling = client(service)
        fake.script("retrieve_future", Answer(status=410))
        with pytest.raises(tinkex.APIStatusError):
            sampling.sample(PROMPT, 1, PARAMS).result(5)
        fake.script("retrieve_future", Answer(status=410))
        assert len(sampling.compute_logprobs(PROMPT).result(5)) == 3


def test_the_round_trip_of_a_submission_is_measured(fake, service):
    """Defect 17: taken after the submission, it would be about zero."""
    sampling = client(service)
    fake.script("asample", Lost())  # a retry, so that it takes a while
    sampling.sample(PROMPT, 1, PARAMS).result(5)
    poll = next(s for s in fake.requests if s.endpoint == "retrieve_future")
    assert float(poll.headers["x-tinker-create-promise-roundtrip-time"]) > 0.005
