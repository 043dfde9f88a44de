"""Streamed samples of a real model: tokens arrive early, and the result equals that of `sample`."""

import asyncio
import os
import signal

import numpy as np
import pytest

import tinkex
from processes import children
from serving import TINY, Server
from tinkex import SamplingParams, types
from tinkex.types import TensorData

PROMPT = types.ModelInput.from_ints([5, 6, 7])


@pytest.fixture(scope="module")
def service(server: Server):
    with tinkex.ServiceClient(base_url=server.url) as service:
        yield service


@pytest.fixture(scope="module")
def sampling(service):
    return service.create_sampling_client(base_model=TINY)


def gathered(events):
    tokens, logprobs = {}, {}
    for event in events:
        tokens.setdefault(event.sequence, []).extend(event.tokens)
        logprobs.setdefault(event.sequence, []).extend(event.logprobs)
    return tokens, logprobs


def test_streamed_tokens_are_those_of_the_same_seed_without_a_stream(sampling):
    params = SamplingParams(max_tokens=60, seed=11, stop=[])
    whole = sampling.sample(PROMPT, 3, params, topk_sample_logprobs=2).result(30)
    stream = sampling.sample_stream(PROMPT, 3, params, topk_sample_logprobs=2)
    tokens, logprobs = gathered(stream)
    answer = stream.response(30)
    for index, (ours, theirs) in enumerate(zip(answer.sequences, whole.sequences, strict=True)):
        assert ours.tokens == theirs.tokens == tokens[index]
        # Equal to the response bit by bit; another sample is equal up to rounding.
        assert logprobs[index] == ours.logprobs
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, rtol=1e-4, atol=1e-5)
        assert ours.stop_reason == theirs.stop_reason == "length"
        assert ours.topk_logprobs_np.token_ids.shape == (60, 2)
        assert ours.sequence_id


def test_the_first_tokens_arrive_before_the_last_are_sampled(sampling):
    params = SamplingParams(max_tokens=200, seed=1, stop=[])
    with sampling.sample_stream(PROMPT, 1, params) as stream:
        first = next(stream)
        assert len(first.tokens) < 100
        with pytest.raises(TimeoutError):
            stream.response(0)
        assert len(first.tokens) + sum(len(event.tokens) for event in stream) == 200


def test_a_stop_token_is_the_last_token_of_the_stream(sampling):
    free = sampling.sample(PROMPT, 1, SamplingParams(max_tokens=20, seed=4, stop=[])).result(30)
    stop = [free.sequences[0].tokens[9]]
    params = SamplingParams(max_tokens=20, seed=4, stop=stop)
    stream = sampling.sample_stream(PROMPT, 1, params)
    tokens, _ = gathered(stream)
    assert tokens[0][-1] == stop[0]
    assert tokens[0] == stream.response(5).sequences[0].tokens
    assert stream.response(5).sequences[0].stop_reason == "stop"


def test_prompt_logprobs_are_those_of_sample(sampling):
    params = SamplingParams(max_tokens=5, seed=2)
    targets = TensorData(data=[6, 8, 7, -1], dtype="int64", shape=[2, 2])
    options = {
        "include_prompt_logprobs": True,
        "topk_prompt_logprobs": 2,
        "target_prompt_logprobs": targets,
        "prompt_alt_tokens_k": 2,
    }
    whole = sampling.sample(PROMPT, 1, params, **options).result(30)
    answer = sampling.sample_stream(PROMPT, 1, params, **options).response(30)
    np.testing.assert_allclose(answer.prompt_logprobs_np, whole.prompt_logprobs_np, rtol=1e-4)
    assert answer.topk_prompt_logprobs is not None
    assert answer.target_prompt_logprobs.shape == whole.target_prompt_logprobs.shape
    assert answer.prompt_alt_tokens == whole.prompt_alt_tokens


def test_concurrent_streams_are_independent(sampling):
    async def read(seed):
        params = SamplingParams(max_tokens=12, seed=seed, stop=[])
        stream = sampling.sample_stream(PROMPT, 1, params)
        tokens = [token async for event in stream for token in event.tokens]
        assert tokens == (await stream.response_async()).sequences[0].tokens
        return tuple(tokens)

    async def all_of_them():
        return await asyncio.gather(*(read(seed) for seed in range(40)))

    assert len(set(asyncio.run(all_of_them()))) > 30


def test_an_engine_crash_during_a_stream_changes_no_token(server: Server, sampling):
    """The restarted engine samples the same tokens with the same seed; no token is sent twice."""
    params = SamplingParams(max_tokens=240, seed=7, stop=[])
    expected = sampling.sample(PROMPT, 1, params).result(30).sequences[0].tokens
    stream = sampling.sample_stream(PROMPT, 1, params)
    tokens = list(next(stream).tokens)
    (web,) = children(server.process.pid)
    (engine,) = children(web)
    os.kill(engine, signal.SIGKILL)
    tokens += [token for event in stream for token in event.tokens]
    assert tokens == stream.response(30).sequences[0].tokens == expected
