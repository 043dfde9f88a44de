"""Samples: many at once, bounded and fair, retried where that is harmless, cancellable."""

import asyncio
import json
import math
import pickle
import time

import pytest

import tinkex
from tinkex import RetryConfig, SamplingClient, SamplingParams, types
from tinkex.client.session import Session
from tinkex.testing import Answer, FakeService, Lost
from tinkex.wire.codec import PROTOBUF_TYPE
from tinkex.wire.protobuf import encode_sample_response
from waiting import until

PROMPT = types.ModelInput.from_ints([5, 6, 7])
PARAMS = SamplingParams(max_tokens=4)
QUICK = RetryConfig(retry_delay_base=0.001, retry_delay_max=0.01)


@pytest.fixture
def sampling(service):
    return service.create_sampling_client(base_model="fake/model", retry_config=QUICK)


def numbers(fake):
    return [json.loads(s.body)["seq_id"] for s in fake.requests if s.endpoint == "asample"]


def test_a_sample_has_its_tokens_logprobs_and_ids(sampling):
    answer = sampling.sample(PROMPT, 2, PARAMS, include_prompt_logprobs=True).result(5)
    assert [sequence.tokens for sequence in answer.sequences] == [[5, 6, 7, 5]] * 2
    assert len({sequence.sequence_id for sequence in answer.sequences}) == 2
    assert answer.prompt_logprobs == [
        None,
        pytest.approx(-math.log(2)),
        pytest.approx(-math.log(2)),
    ]


def test_logprobs_of_a_prompt(fake, sampling):
    assert sampling.compute_logprobs(PROMPT).result(5) == [
        None,
        pytest.approx(-math.log(2)),
        pytest.approx(-math.log(2)),
    ]
    body = next(s.json() for s in fake.requests if s.endpoint == "asample")
    assert body["sampling_params"]["max_tokens"] == 1
    assert body["prompt_logprobs"] is True


def test_two_thousand_concurrent_samples_each_get_one_result(fake, sampling):
    futures = [sampling.sample(PROMPT, 1, PARAMS) for _ in range(2_000)]
    assert all(future.result(30).sequences for future in futures)
    assert sorted(numbers(fake)) == list(range(2_000))


def test_no_more_samples_run_than_the_servers_limit():
    fake = FakeService(config={"sample_max_concurrent_requests": 3})
    service = fake.client()
    sampling = service.create_sampling_client(base_model="fake/model")
    hold = fake.hold("asample")
    futures = [sampling.sample(PROMPT, 1, PARAMS) for _ in range(20)]
    until(lambda: len(numbers(fake)) >= 3)
    time.sleep(0.05)
    assert len(numbers(fake)) == 3
    hold.release()
    [future.result(5) for future in futures]
    service.close("success").result(5)


def test_the_users_own_limit_applies(fake, service):
    config = RetryConfig(max_connections=2)
    sampling = service.create_sampling_client(base_model="fake/model", retry_config=config)
    hold = fake.hold("asample")
    futures = [sampling.sample(PROMPT, 1, PARAMS) for _ in range(10)]
    until(lambda: len(numbers(fake)) >= 2)
    time.sleep(0.05)
    assert len(numbers(fake)) == 2
    hold.release()
    [future.result(5) for future in futures]


def test_a_429_is_waited_out_under_the_same_seq_id(fake, sampling):
    fake.script("asample", *[Answer(status=429, headers={"retry-after-ms": "2"})] * 5)
    sampling.sample(PROMPT, 1, PARAMS).result(10)
    assert numbers(fake) == [0] * 6


@pytest.mark.parametrize("fault", [Lost(), Lost(after=True), Answer(status=503)], ids=str)
def test_a_retried_submission_keeps_its_seq_id(fake, sampling, fault):
    fake.script("asample", fault)
    sampling.sample(PROMPT, 1, PARAMS).result(10)
    assert numbers(fake) == [0, 0]


@pytest.mark.parametrize(
    "fault",
    [
        Answer(status=410),
        Answer(status=200, body={"error": "crashed", "category": "server"}),
        Answer(status=200, body={"error": "crashed", "category": "unknown"}),
    ],
    ids=str,
)
def test_a_lost_result_is_sampled_again_under_a_new_seq_id(fake, sampling, fault):
    fake.script("retrieve_future", fault)
    sampling.sample(PROMPT, 1, PARAMS).result(10)
    assert numbers(fake) == [0, 1]


def test_an_invalid_request_is_not_retried(fake, sampling):
    with pytest.raises(tinkex.RequestFailedError, match="the prompt is empty"):
        sampling.sample(types.ModelInput.empty(), 1, PARAMS).result(5)
    assert numbers(fake) == [0]


def test_retries_can_be_turned_off(fake, service):
    config = RetryConfig(enable_retry_logic=False)
    sampling = service.create_sampling_client(base_model="fake/model", retry_config=config)
    fake.script("retrieve_future", Answer(status=410))
    with pytest.raises(tinkex.APIStatusError):
        sampling.sample(PROMPT, 1, PARAMS).result(5)


def test_when_nothing_finishes_for_too_long_all_waiting_samples_fail(fake, service):
    config = RetryConfig(progress_timeout=0.2)
    sampling = service.create_sampling_client(base_model="fake/model", retry_config=config)
    hold = fake.hold("asample")
    futures = [sampling.sample(PROMPT, 1, PARAMS) for _ in range(3)]
    for future in futures:
        with pytest.raises(tinkex.APIConnectionError, match="progress_timeout"):
            future.result(5)
    hold.release()
    sampling.sample(PROMPT, 1, PARAMS).result(5)


@pytest.mark.parametrize("how", ["future", "task"])
def test_cancelling_a_sample_reaches_the_server(how):
    fake = FakeService(dynamic_config={"sample_cancel_enabled": True})
    service = fake.client()
    sampling = service.create_sampling_client(base_model="fake/model")
    hold = fake.hold("retrieve_future")

    async def cancel_the_task():
        task = asyncio.create_task(sampling.sample_async(PROMPT, 1, PARAMS))
        await asyncio.to_thread(hold.arrived.wait, 5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    if how == "task":
        asyncio.run(cancel_the_task())
    else:
        future = sampling.sample(PROMPT, 1, PARAMS)
        assert hold.arrived.wait(5)
        assert future.cancel()
    until(lambda: fake.cancelled, 5)
    assert len(fake.cancelled) == 1
    hold.release()
    service.close("success").result(5)


def test_a_timeout_does_not_cancel_a_sample(fake, sampling):
    hold = fake.hold("asample")
    future = sampling.sample(PROMPT, 1, PARAMS)

    async def main():
        with pytest.raises(TimeoutError):
            await future.result_async(0.02)

    asyncio.run(main())
    hold.release()
    assert future.result(5).sequences


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt_alt_tokens_k": -1}, "must be 0 or more"),
        ({"prompt_logprobs_last_n": 2}, "needs include_prompt_logprobs"),
        ({"prompt_logprobs_last_n": 0, "include_prompt_logprobs": True}, "must be 1 or more"),
        (
            {"target_prompt_logprobs": types.TensorData(data=[1], dtype="int64")},
            "int64 of shape",
        ),
    ],
)
def test_invalid_arguments_are_refused_before_anything_is_sent(fake, sampling, arguments, message):
    with pytest.raises(ValueError, match=message):
        sampling.sample(PROMPT, 1, PARAMS, **arguments)
    assert not numbers(fake)


def test_a_server_that_ignores_an_option_is_detected(fake, sampling):
    sequence = types.SampledSequence("length", "", [1], [-1.0])
    ignorant = Answer(
        status=200,
        body=encode_sample_response(types.SampleResponse([sequence], [-1.0] * PROMPT.length)),
        headers={"content-type": PROTOBUF_TYPE},
    )
    fake.script("retrieve_future", ignorant, ignorant)
    with pytest.raises(RuntimeError, match="prompt_alt_tokens"):
        sampling.sample(PROMPT, 1, PARAMS, prompt_alt_tokens_k=2).result(5)
    with pytest.raises(RuntimeError, match="last_n"):
        sampling.sample(
            PROMPT, 1, PARAMS, include_prompt_logprobs=True, prompt_logprobs_last_n=1
        ).result(5)


def test_a_pickle_contains_no_key_and_keeps_the_retry_config(service):
    config = RetryConfig(max_connections=3, progress_timeout=9.0)
    sampling = service.create_sampling_client(base_model="fake/model", retry_config=config)
    blob = pickle.dumps(sampling)
    assert b"tml-fake" not in blob
    assert "tml-fake" not in repr(sampling)
    assert "tml-fake" not in repr(service)


def test_a_copy_samples_under_its_own_seq_ids(fake, loopback, monkeypatch):
    service = tinkex.ServiceClient(base_url=loopback.url, api_key="tml-one")
    sampling = service.create_sampling_client(base_model="fake/model", retry_config=QUICK)
    sampling.sample(PROMPT, 1, PARAMS).result(5)
    blob = pickle.dumps(sampling)
    monkeypatch.setenv("TINKER_API_KEY", "tml-two")
    copy = pickle.loads(blob)
    assert isinstance(copy, SamplingClient)
    assert isinstance(copy.holder, Session)
    assert copy.holder.session_id == service.holder.session_id
    copy.sample(PROMPT, 1, PARAMS).result(5)
    first, second = numbers(fake)
    assert first == 0
    assert second >= 1_000_000_000
    with pytest.raises(RuntimeError, match="only joined session"):
        copy.holder.next_sampler_number()
    copy.holder.close("success").result(5)
    assert not [
        s for s in fake.requests if s.endpoint.endswith("/finish")
    ]  # a copy does not end the session
    service.close("success").result(5)


def test_a_sampler_needs_something_to_sample_from(service):
    with pytest.raises(ValueError, match="Pass what to sample from"):
        service.create_sampling_client()
    with pytest.raises(ValueError, match="tinker://"):
        service.create_sampling_client(model_path="weights/a")
    assert service.create_sampling_client(base_model="fake/model").get_base_model() == "fake/model"
