"""The circuit breaker: off by default; fails immediately while a service keeps failing."""

import pickle
import time

import pytest

import tinkex
from tinkex import BreakerPolicy
from tinkex.client.errors import status_error
from tinkex.client.http.circuit_breaker import Breaker
from tinkex.client.http.transport import Request, Response
from tinkex.client.settings import Settings
from tinkex.compat.raw_responses import Raw
from tinkex.testing import Answer, Lost

REQUEST = Request(method="POST", url="http://h/api/v1/optim_step")
LOST = tinkex.APIConnectionError(REQUEST)


def answered(status: int) -> tinkex.APIStatusError:
    return status_error(Response(status_code=status, request=REQUEST))


def test_it_opens_after_consecutive_failures_and_closes_after_one_successful_attempt():
    now = [0.0]
    breaker = Breaker(BreakerPolicy(failures=3, open_s=10), clock=lambda: now[0])
    for error in (LOST, answered(500), answered(400), LOST, LOST):
        assert breaker.blocked_s() is None
        breaker.failed(error)  # 400 is not a failure: not three in a row
    assert breaker.state == "closed"
    breaker.failed(LOST)
    assert breaker.state == "open"
    now[0] = 4.0
    assert breaker.blocked_s() == pytest.approx(6.0)
    now[0] = 10.0
    assert breaker.state == "half-open"
    assert breaker.blocked_s() is None
    assert breaker.blocked_s() == pytest.approx(10.0)  # one at a time
    breaker.failed(LOST)
    assert breaker.state == "open"
    now[0] = 20.0
    assert breaker.blocked_s() is None
    breaker.succeeded()
    assert breaker.state == "closed"
    assert breaker.blocked_s() is None


def test_an_attempt_without_an_outcome_does_not_keep_it_open():
    now = [0.0]
    breaker = Breaker(BreakerPolicy(failures=1, open_s=10), clock=lambda: now[0])
    breaker.failed(LOST)
    now[0] = 10.0
    assert breaker.blocked_s() is None
    now[0] = 20.0
    assert breaker.blocked_s() is None


@pytest.mark.parametrize("status", [429, 408, 409, 404])
def test_rate_limits_and_client_errors_are_not_failures(status):
    breaker = Breaker(BreakerPolicy(failures=1))
    breaker.failed(answered(status))
    assert breaker.state == "closed"


def test_an_open_circuit_fails_at_once_and_says_when_it_will_retry(fake, datum):
    settings = Settings(
        base_url="http://127.0.0.1:9",
        breaker=BreakerPolicy(failures=3, open_s=0.3),
    )
    service = tinkex.ServiceClient(settings=settings, _make_transport=fake.transport)
    training = service.create_lora_training_client("fake/model")
    fake.script("optim_step", *[Lost()] * 3)
    with pytest.raises(tinkex.CircuitOpenError, match=r"sent again in \d+ s") as caught:
        training.optim_step(tinkex.AdamParams()).result(5)
    assert 0 < caught.value.retry_in_s <= 0.3
    assert isinstance(caught.value, tinkex.APIConnectionError)
    assert pickle.loads(pickle.dumps(caught.value)).retry_in_s == caught.value.retry_in_s
    seen = len(fake.requests)
    with pytest.raises(tinkex.CircuitOpenError):
        training.forward_backward([datum], "cross_entropy").result(5)
    assert len(fake.requests) == seen  # nothing was sent
    assert service.get_server_capabilities()  # another kind of request
    deadline = time.monotonic() + 5
    while True:  # half-open, then closed
        try:
            training.optim_step(tinkex.AdamParams()).result(5)
            break
        except tinkex.CircuitOpenError as error:
            assert time.monotonic() < deadline
            time.sleep(error.retry_in_s)
    service.close("success").result(5)


def test_failed_raw_requests_stop_raw_requests_only(fake):
    settings = Settings(base_url="http://127.0.0.1:9", breaker=BreakerPolicy(failures=2, open_s=60))
    service = tinkex.ServiceClient(settings=settings, _make_transport=fake.transport)
    fake.script("healthz", *[Answer(status=503)] * 2)
    for _ in range(2):
        with pytest.raises(tinkex.InternalServerError):
            Raw(service).request("GET", "healthz", max_retries=0)
    with pytest.raises(tinkex.CircuitOpenError, match="retrieve"):
        Raw(service).request("GET", "healthz", max_retries=0)
    assert service.get_server_capabilities()
    service.close("success").result(5)


def test_without_it_the_same_failures_are_retried(fake, service):
    training = service.create_lora_training_client("fake/model")
    fake.script("optim_step", *[Answer(status=500)] * 6)
    training.optim_step(tinkex.AdamParams()).result(10)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("off", None),
        ("0", None),
        ("on", BreakerPolicy()),
        ("3/7.5", BreakerPolicy(failures=3, open_s=7.5)),
    ],
)
def test_the_environment_turns_it_on(text, expected, tmp_path):
    env = {"TINKEX_BREAKER": text}
    assert Settings.resolve(base_url="local", env=env, home=tmp_path).breaker == expected


@pytest.mark.parametrize("text", ["x", "3", "0/5", "3/0", "3/x"])
def test_an_invalid_setting_is_refused(text, tmp_path):
    with pytest.raises(tinkex.TinkerError, match=r"breaker|BREAKER"):
        Settings.resolve(base_url="local", env={"TINKEX_BREAKER": text}, home=tmp_path)


def test_it_is_off_by_default(tmp_path):
    assert Settings.resolve(base_url="local", env={}, home=tmp_path).breaker is None
