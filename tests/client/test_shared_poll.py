"""One poll for all samples of a client: its events, its state, and its end."""

import asyncio
import collections
import json
import threading
import time

import pytest

import tinkex
from tinkex import RetryConfig, SamplingParams, types
from tinkex.client.http import shared_poll
from tinkex.client.http.shared_poll import SharedPoll
from tinkex.testing import Answer, FakeService, Lost
from waiting import until

PROMPT = types.ModelInput.from_ints([5, 6, 7])
PARAMS = SamplingParams(max_tokens=4)
BATCHED = {"sample_use_retrieve_futures": True}


@pytest.fixture(autouse=True)
def _all_wait_together(monkeypatch):
    """No sample polls for itself, unless a test enables it."""
    monkeypatch.setattr(shared_poll, "MAX_SELF_POLLING", 0)


@pytest.fixture
def fake():
    return FakeService(config=BATCHED, sample_s=0.02, hold_s=0.05)


@pytest.fixture
def sampling(service):
    config = RetryConfig(retry_delay_base=0.001, retry_delay_max=0.01)
    return service.create_sampling_client(base_model="fake/model", retry_config=config)


def draw(sampling, count):
    return [sampling.sample(PROMPT, 1, PARAMS) for _ in range(count)]


def seen(fake, endpoint):
    return [each for each in fake.requests if each.endpoint == endpoint]


def test_samples_share_one_poll_and_each_result_is_fetched_once(fake, sampling):
    for future in draw(sampling, 100):
        assert future.result(10).sequences[0].tokens == [5, 6, 7, 5]
    fetched = collections.Counter(s.json()["request_id"] for s in seen(fake, "retrieve_future"))
    assert set(fetched.values()) == {1}
    assert len(fetched) == 100
    assert len(seen(fake, "retrieve_futures")) < 30
    # The size was known, so the server withheld nothing.
    assert not any(s.json()["allow_metadata_only"] for s in seen(fake, "retrieve_future"))


def test_fetched_results_are_reported_until_a_poll_that_named_them_succeeded(fake, sampling):
    def reports():
        polls = [each.json() for each in seen(fake, "retrieve_futures")]
        return [set(poll.get("retrieved_request_ids", [])) for poll in polls]

    fake._hold_s = 5.0  # the poll that reports them also serves the next sample
    [future.result(10) for future in draw(sampling, 3)]
    ids = {each.json()["request_id"] for each in seen(fake, "retrieve_future")}
    until(lambda: set().union(*reports()) == ids)
    fake.script("retrieve_futures", *[Answer(status=503)] * 3)
    draw(sampling, 1)[0].result(10)
    last = {seen(fake, "retrieve_future")[-1].json()["request_id"]}
    until(lambda: sum(last <= report for report in reports()) == 4)  # refused, and then accepted
    assert not any(ids & report for report in reports()[-4:])
    cursors = [each.json()["prev_cursor"] for each in seen(fake, "retrieve_futures")]
    assert cursors == sorted(cursors)


def test_a_client_that_waits_for_nothing_does_not_poll(fake, sampling):
    [future.result(10) for future in draw(sampling, 3)]
    until(lambda: sampling._sample_queue._shared_poll._task is None)
    polls = len(seen(fake, "retrieve_futures"))
    time.sleep(0.1)
    assert len(seen(fake, "retrieve_futures")) == polls
    assert not sampling._sample_queue._shared_poll._waiting
    assert not sampling._sample_queue._shared_poll._fetched


@pytest.mark.parametrize(
    "answers",
    [
        [Answer(status=500), Answer(status=503)],
        [Answer(status=429, headers={"retry-after-ms": "5"})],
        [Answer(status=400, body={"detail": "?"})] * 3,
        [Lost(), Lost(after=True), Lost(slow=True)],
    ],
    ids=lambda answers: " ".join(str(getattr(a, "status", a)) for a in answers),
)
def test_a_shared_poll_that_fails_is_repeated(fake, sampling, answers):
    fake.script("retrieve_futures", *answers)
    assert all(future.result(20).sequences for future in draw(sampling, 5))


@pytest.mark.parametrize(
    ("answers", "kind"),
    [
        ([Answer(status=404)], tinkex.NotFoundError),
        ([Answer(status=401)], tinkex.AuthenticationError),
        ([Answer(status=400, body={"detail": "?"})] * 4, tinkex.BadRequestError),
        ([Answer(status=200, body={"odd": 1})], tinkex.APIResponseValidationError),
        ([Answer(status=200, body=b"<html>")] * 4, tinkex.APIResponseValidationError),
    ],
)
def test_a_final_error_reaches_every_waiting_sample_as_a_tinker_error(
    fake, sampling, answers, kind
):
    fake.script("retrieve_futures", *answers)
    hold = fake.hold("retrieve_futures")
    futures = draw(sampling, 3)
    until(
        lambda: (
            len(
                sampling._sample_queue._shared_poll._waiting
                if sampling._sample_queue._shared_poll
                else ()
            )
            == 3
        )
    )
    hold.release()
    errors = [future.exception(10) for future in futures]
    assert {type(error) for error in errors} == {kind}
    assert not any(isinstance(error, ValueError) for error in errors)
    assert len({id(error) for error in errors}) == 3
    # The client still works: the next sample polls again.
    assert draw(sampling, 1)[0].result(10).sequences


def test_a_failed_sample_has_its_reason(fake, sampling):
    with pytest.raises(tinkex.RequestFailedError, match="the prompt is empty"):
        sampling.sample(types.ModelInput.empty(), 1, PARAMS).result(10)


def test_a_server_that_does_not_hold_polls_is_not_polled_in_a_busy_loop():
    fake = FakeService(config=BATCHED, sample_s=0.5, hold_s=0.0)
    with fake.client() as service:
        sampling = service.create_sampling_client(base_model="fake/model")
        [future.result(10) for future in draw(sampling, 20)]
        assert len(seen(fake, "retrieve_futures")) + len(seen(fake, "retrieve_future")) < 60


def test_when_nothing_finishes_the_oldest_sample_starts_a_fallback_poll(fake):
    fake = FakeService(config=BATCHED, sample_s=0.3, hold_s=0.02)
    states = []
    with fake.client() as service:
        sampling = service.create_sampling_client(base_model="fake/model")
        sampling.on_queue_state_change = lambda state, reason: states.append(state)
        [future.result(10) for future in draw(sampling, 10)]
    assert "active" in states
    asked = collections.Counter(s.json()["request_id"] for s in seen(fake, "retrieve_future"))
    assert sum(1 for count in asked.values() if count > 1) <= 2


def test_an_event_that_the_server_lost_does_not_block_a_sample(fake, sampling):
    empty = Answer(status=200, body={"completions": [], "cursor": 10**6})
    fake.script("retrieve_futures", empty)
    assert all(future.result(20).sequences for future in draw(sampling, 4))


def test_an_event_before_the_response_to_the_submission_is_not_lost(fake, sampling):
    [future.result(10) for future in draw(sampling, 1)]
    first = draw(sampling, 1)[0]  # keeps the poll running
    fake._sample_s = 0.0
    # The sample has finished; the response with its request id comes later.
    fake.script("asample", Lost(after=True))
    late = draw(sampling, 1)[0]
    assert late.result(10).sequences
    assert first.result(10).sequences


def test_unclaimed_events_are_dropped():
    class Calls:
        pass

    async def main():
        from tinkex.wire.futures import FutureFinished, SamplingSessionFuturesTarget

        target = SamplingSessionFuturesTarget(sampling_session_id="s")
        here = SharedPoll(Calls(), target, keep=lambda task: None)
        with here.submitting():
            with here.submitting():
                for number in range(1_000):
                    here._deliver(FutureFinished(request_id=f"stray-{number}"))
            assert len(here._unclaimed) == 1_000  # one may belong to the first submission
        assert not here._unclaimed
        assert not here._unclaimed_order
        here._deliver(FutureFinished(request_id="stray"))
        assert not here._unclaimed

    asyncio.run(main())


def test_a_few_samples_poll_for_themselves(fake, service, monkeypatch):
    monkeypatch.setattr(shared_poll, "MAX_SELF_POLLING", 8)
    sampling = service.create_sampling_client(base_model="fake/model")
    [future.result(10) for future in draw(sampling, 5)]
    assert not seen(fake, "retrieve_futures")
    [future.result(10) for future in draw(sampling, 50)]
    assert seen(fake, "retrieve_futures")


def test_large_results_wait_for_the_byte_budget(service, fake):
    sampling = service.create_sampling_client(base_model="fake/model")
    connection = service.holder._connected.value
    until(lambda: connection is not None)
    connection.limits.result_bytes.size = 1  # one at a time
    arrived, most = [0], [0]
    lock = threading.Lock()
    original = fake._retrieve

    async def counted(headers, body):
        with lock:
            arrived[0] += 1
            most[0] = max(most[0], arrived[0])
        try:
            await asyncio.sleep(0.002)
            return await original(headers, body)
        finally:
            arrived[0] -= 1

    fake._retrieve = counted
    [future.result(10) for future in draw(sampling, 20)]
    assert most[0] == 1


def test_cancelled_and_closed_clients_leave_no_poll_running():
    fake = FakeService(
        config=BATCHED, sample_s=30.0, dynamic_config={"sample_cancel_enabled": True}
    )
    service = fake.client()
    sampling = service.create_sampling_client(base_model="fake/model")
    futures = draw(sampling, 5)
    until(lambda: seen(fake, "retrieve_futures"))
    futures[0].cancel()
    until(lambda: len(fake.cancelled) == 1)
    task = sampling._sample_queue._shared_poll._task
    service.close("success").result(5)
    until(lambda: task.done())
    for future in futures[1:]:
        with pytest.raises(RuntimeError, match="closed"):
            future.result(5)


def test_copies_poll_for_their_own_samples(fake, loopback, monkeypatch):
    monkeypatch.setitem(fake._config, "sample_join_sampling_session", True)
    import pickle

    with tinkex.ServiceClient(base_url=loopback.url) as service:
        sampling = service.create_sampling_client(base_model="fake/model")
        copy = pickle.loads(pickle.dumps(sampling))
        [future.result(10) for future in draw(sampling, 3) + draw(copy, 3)]
        assert len(seen(fake, "join_sampling_session")) == 1
        targets = {s.json()["target"]["cloned_sampler_id"] for s in seen(fake, "retrieve_futures")}
        assert targets == {0, 1}
        numbers = {json.loads(s.body)["seq_id"] // 10**9 for s in seen(fake, "asample")}
        assert numbers == {0, 1}
        copy.holder.close("success").result(5)
