"""Retries happen in one layer, for the time the settings allow, with a shared back-off."""

import asyncio
import collections
import logging
import threading
import time

import pytest

import tinkex
from tinkex import types
from tinkex.client.http.backpressure import Backoff
from tinkex.client.http.polling import PollDelays
from tinkex.testing import Answer, FakeService, Lost
from waiting import until


def counted(fake, endpoint):
    return [seen for seen in fake.requests if seen.endpoint == endpoint]


@pytest.mark.parametrize(
    "fault",
    [
        Answer(status=408),
        Answer(status=409, headers={"retry-after-ms": "1"}),
        Answer(status=429, headers={"retry-after": "0.01"}),
        Answer(status=500, headers={"retry-after-ms": "1"}),
        Answer(status=418, headers={"x-should-retry": "true", "retry-after-ms": "1"}),
        Answer(status=400),  # empty: a proxy lost it
        Lost(),
        Lost(after=True),
        Lost(slow=True),
        Answer(status=200, body=b'{"session_i'),  # damaged in transit
        Answer(status=200, body=b"<html>"),
    ],
    ids=str,
)
def test_retries_use_the_same_idempotency_key(fake, service, fault):
    fake.script("create_session", fault)
    service.create_lora_training_client("fake/model")
    sent = counted(fake, "create_session")
    assert len(sent) == 2
    assert len({seen.headers["x-idempotency-key"] for seen in sent}) == 1
    assert sent[0].body == sent[1].body


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (Answer(status=401, body={"detail": "who?"}), tinkex.AuthenticationError),
        (Answer(status=422, body={"detail": []}), tinkex.UnprocessableEntityError),
        (Answer(status=503, headers={"x-should-retry": "false"}), tinkex.InternalServerError),
        (Answer(status=307, headers={"location": "https://x"}), tinkex.APIStatusError),
        (Answer(status=200, body={"odd": 1}), tinkex.APIResponseValidationError),
    ],
    ids=str,
)
def test_errors_that_are_not_retryable_are_raised_at_once(fake, service, fault, kind):
    fake.script("create_session", fault)
    with pytest.raises(kind):
        service.create_lora_training_client("fake/model")
    assert len(counted(fake, "create_session")) == 1


def test_a_response_of_another_protocol_is_given_up_early(fake, service):
    fake.script("create_session", *[Answer(status=200, body=b"<html>")] * 9)
    with pytest.raises(tinkex.APIResponseValidationError, match="Is base_url the address"):
        service.create_lora_training_client("fake/model")
    assert len(counted(fake, "create_session")) == 4


def test_a_failed_connection_is_not_cached(fake, service):
    fake.script("create_session", Answer(status=401))
    with pytest.raises(tinkex.AuthenticationError):
        service.create_lora_training_client("fake/model")
    service.create_lora_training_client("fake/model")


def test_a_server_that_never_responded_is_given_up_early(monkeypatch):
    monkeypatch.setenv("TINKEX_FIRST_CONTACT_S", "0.3")
    fake = FakeService()
    fake.script("client/config", *[Lost()] * 1000)
    service = fake.client()
    started = time.monotonic()
    with pytest.raises(tinkex.APIConnectionError, match=r"gave up after .* attempts") as caught:
        service.get_server_capabilities()
    assert time.monotonic() - started < 3
    assert "base_url" in str(caught.value)
    service.close("errored").result(5)


def test_a_server_that_responded_before_is_retried_longer(monkeypatch):
    monkeypatch.setenv("TINKEX_FIRST_CONTACT_S", "0.1")
    fake = FakeService()
    service = fake.client()
    service.get_server_capabilities()
    fake.script("get_server_capabilities", *[Lost()] * 5)
    service.get_server_capabilities()  # about 0.6 s, longer than first_contact_s
    service.close("success").result(5)


def test_everything_with_the_same_service_and_key_backs_off_together():
    fake, another = FakeService(), FakeService()
    one, two, other = fake.client(), fake.client(), fake.client(api_key="tml-other")
    elsewhere = another.client(base_url="http://elsewhere.invalid")
    for client in (one, two, other, elsewhere):
        client.get_server_capabilities()
    fake.script("get_server_capabilities", Answer(status=429, headers={"retry-after-ms": "1500"}))
    waiting = one._get_server_capabilities()
    started = time.monotonic()
    until(lambda: not fake._scripts["get_server_capabilities"])
    other.get_server_capabilities()
    elsewhere.get_server_capabilities()
    assert not waiting.done()  # another key or another service is not delayed
    two.get_server_capabilities()
    assert time.monotonic() - started > 1.2  # the same key is
    waiting.result(5)
    for client in (one, two, other, elsewhere):
        client.close("success").result(5)


@pytest.mark.parametrize("shared", [False, True], ids=["a poll for each", "one poll for all"])
def test_polls_wait_for_the_shared_back_off(monkeypatch, shared):
    monkeypatch.setattr("tinkex.client.http.shared_poll.MAX_SELF_POLLING", 0)
    fake = FakeService(config={"sample_use_retrieve_futures": shared}, sample_s=3.0, hold_s=0.01)
    endpoints = {"retrieve_future", "retrieve_futures"} if shared else {"retrieve_future"}
    waiting, over = set(), threading.Event()

    async def wait_once(self, at_most_s):
        if self.left_s > 0:
            waiting.add(asyncio.current_task())
            await asyncio.to_thread(over.wait)

    monkeypatch.setattr(Backoff, "wait_once", wait_once)

    def polls():
        return [len(counted(fake, endpoint)) for endpoint in endpoints]

    with fake.client() as service:
        sampling = service.create_sampling_client(base_model="fake/model")
        prompt, params = types.ModelInput.from_ints([1]), types.SamplingParams(max_tokens=1)
        samples = [sampling.sample(prompt, 1, params) for _ in range(3)]
        until(lambda: min(polls()) >= 3)
        busy = Answer(status=429, headers={"retry-after": "2"})
        fake.script("get_server_capabilities", busy)
        asking = service._get_server_capabilities()
        # Each sample polls, or all share a poll and the oldest polls for itself.
        until(lambda: len(waiting) == (2 if shared else 3))
        before = polls()
        time.sleep(0.1)
        assert polls() == before
        over.set()
        asking.result(10)
        assert all(sample.result(10).sequences for sample in samples)
        assert all(now > then for now, then in zip(polls(), before, strict=True))


def test_h3_a_long_wait_is_logged_once_and_limited_to_the_time_that_is_left(caplog, monkeypatch):
    monkeypatch.setenv("TINKEX_GIVE_UP_S", "0.3")
    monkeypatch.setenv("TINKEX_WAIT_NOTICE_S", "0.1")
    fake = FakeService()
    with fake.client(api_key="tml-asked-to-wait") as service:
        service.get_server_capabilities()
        later = Answer(status=503, headers={"retry-after": "120"})
        fake.script("get_server_capabilities", later, later, later, later)
        for _ in range(2):
            started = time.monotonic()
            with pytest.raises(tinkex.InternalServerError):
                service.get_server_capabilities()
            assert 0.2 < time.monotonic() - started < 5
    assert not fake._scripts["get_server_capabilities"]  # sent again at its deadline
    shown = [record.getMessage() for record in caplog.records if "Retry-After" in record.message]
    assert len(shown) == 1
    assert "It asks to wait 120 s (Retry-After). Trying for 0 s more (TINKEX_GIVE_UP_S)" in shown[0]


def test_h3_others_wait_for_the_back_off_only_within_their_own_time_limit(monkeypatch):
    for place in ("typed_requests", "retried_call", "polling", "shared_poll"):
        monkeypatch.setattr(f"tinkex.client.http.{place}.LONG_WAIT_S", 0.2)
    monkeypatch.setenv("TINKEX_GIVE_UP_S", "0.4")
    monkeypatch.setattr("tinkex.client.session.FINISH_RETRY_S", 0.1)
    fake = FakeService()
    with fake.client(api_key="tml-of-this-test") as service:  # no other test may wait for an hour
        training = service.create_lora_training_client("fake/model")
        fake.script("get_server_capabilities", Answer(status=429, headers={"retry-after": "3600"}))
        asking = service._get_server_capabilities()
        until(lambda: not fake._scripts["get_server_capabilities"])
        started = time.monotonic()
        training.optim_step(types.AdamParams()).result(10)
        assert time.monotonic() - started > 0.5  # 0.4 s to be sent, 0.2 s to be polled
        assert asking.result(5).supported_models


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("endpoint", ["retrieve_future", "retrieve_futures"])
def test_a_poll_with_a_retry_after_of_a_day_polls_again_after_a_minute(
    monkeypatch, endpoint, status
):
    monkeypatch.setattr("tinkex.client.http.shared_poll.MAX_SELF_POLLING", 0)
    for place in ("typed_requests", "retried_call", "polling", "shared_poll"):
        monkeypatch.setattr(f"tinkex.client.http.{place}.LONG_WAIT_S", 0.05)
    monkeypatch.setenv("TINKEX_GIVE_UP_S", "0.1")
    monkeypatch.setattr("tinkex.client.session.FINISH_RETRY_S", 0.1)
    fake = FakeService(config={"sample_use_retrieve_futures": endpoint == "retrieve_futures"})
    fake.script(endpoint, Answer(status=status, headers={"retry-after": "86400"}))
    with fake.client(api_key=f"tml-{status}-{endpoint}") as service:  # no other test may wait
        sampling = service.create_sampling_client(base_model="fake/model")
        prompt, params = types.ModelInput.from_ints([1]), types.SamplingParams(max_tokens=1)
        assert sampling.sample(prompt, 1, params).result(20).sequences


@pytest.mark.parametrize("shared", [False, True], ids=["a poll for each", "one poll for all"])
def test_time_in_the_back_off_does_not_count_as_held_by_the_server(monkeypatch, shared):
    """Otherwise a server that responds at once would be polled without a delay."""
    held: list[tuple[float, float]] = []
    sent_at = collections.defaultdict(time.monotonic)

    async def wait_once(self: Backoff, at_most_s: float) -> None:
        await asyncio.sleep(0.1)
        sent_at[asyncio.current_task()] = time.monotonic()

    def after_not_yet(self: PollDelays, held_s: float) -> float:
        held.append((held_s, time.monotonic() - sent_at[asyncio.current_task()]))
        return 0.0

    monkeypatch.setattr(Backoff, "wait_once", wait_once)
    monkeypatch.setattr(PollDelays, "after_not_yet", after_not_yet)
    monkeypatch.setattr("tinkex.client.http.shared_poll.MAX_SELF_POLLING", 0)
    fake = FakeService(config={"sample_use_retrieve_futures": shared}, sample_s=0.3, hold_s=0.0)
    with fake.client() as service:
        sampling = service.create_sampling_client(base_model="fake/model")
        prompt, params = types.ModelInput.from_ints([1]), types.SamplingParams(max_tokens=1)
        assert sampling.sample(prompt, 1, params).result(20).sequences
    assert held
    assert all(held_s <= since_sent_s for held_s, since_sent_s in held)


def test_402_is_a_pause_and_then_an_error(monkeypatch):
    monkeypatch.setattr("tinkex.client.http.backpressure.BILLING_PAUSE_S", 0.01)
    fake = FakeService(config={"billing_exception_max_pause_duration_sec": 3600})
    service = fake.client()
    fake.script("client/config", Answer(status=402))  # during start-up too
    fake.script("get_server_capabilities", Answer(status=402), Answer(status=402))
    assert service.get_server_capabilities().supported_models
    service.close("success").result(5)

    fake = FakeService(config={"billing_exception_max_pause_duration_sec": 0})
    service = fake.client(api_key="tml-poor")
    fake.script("get_server_capabilities", Answer(status=402, body={"detail": "no funds"}))
    with pytest.raises(tinkex.BillingError, match="no funds"):
        service.get_server_capabilities()
    service.close("errored").result(5)


def test_requests_identify_the_client(fake, service):
    service.get_server_capabilities()
    first, last = fake.requests[0].headers, fake.requests[-1].headers
    assert first["x-api-key"] == "tml-fake"
    assert first["x-stainless-package-version"] == "0.36.0"
    assert first["user-agent"].startswith("tinkex/")
    assert first["content-type"] == "application/json"
    assert "content-type" not in last  # a GET
    assert "x-idempotency-key" not in last


def test_user_headers_win(fake):
    service = fake.client(default_headers_overrides={"X-Team": "blue", "Accept": "x/y"})
    service.get_server_capabilities()
    assert fake.requests[-1].headers["x-team"] == "blue"
    assert fake.requests[-1].headers["accept"] == "x/y"
    service.close("success").result(5)


def test_a_deprecation_note_reaches_the_log(fake, service, caplog):
    body = {"supported_models": []}
    for level in ("warn", "error"):
        fake.script(
            "get_server_capabilities",
            Answer(
                status=200,
                body=body,
                headers={"x-deprecation-note": "update soon", "x-deprecation-level": level},
            ),
        )
        service.get_server_capabilities()
    assert [record.levelno for record in caplog.records] == [logging.WARNING, logging.ERROR]
