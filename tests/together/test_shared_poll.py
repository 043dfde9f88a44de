"""Many samples share one poll: of a client and its copy, failed, cancelled and low-level."""

import asyncio
import pickle

import pytest

import tinkex
from serving import TINY, Server
from tinkex import SamplingParams, types
from tinkex.client.http import shared_poll
from tinkex.client.sampling import draw

PROMPT = types.ModelInput.from_ints([5, 6, 7])


@pytest.fixture(autouse=True)
def _always_share_polls(monkeypatch):
    monkeypatch.setattr(shared_poll, "MAX_SELF_POLLING", 0)


@pytest.fixture
def sampling(server: Server):
    with tinkex.ServiceClient(base_url=server.url) as service:
        yield service.create_sampling_client(base_model=TINY)


def test_samples_of_a_client_and_its_copy_share_polls_and_get_their_own_results(sampling):
    copy = pickle.loads(pickle.dumps(sampling))
    params = [SamplingParams(max_tokens=6, seed=seed) for seed in range(30)]
    ours = [sampling.sample(PROMPT, 1, each) for each in params]
    theirs = [copy.sample(PROMPT, 1, each) for each in params]
    for one, two in zip(ours, theirs, strict=True):
        assert one.result(30).sequences[0].tokens == two.result(30).sequences[0].tokens
    assert sampling._sample_queue._shared_poll is not None
    assert copy._sample_queue._shared_poll._target.cloned_sampler_id >= 1
    copy.holder.close("success").result(5)


def test_a_failed_sample_has_its_reason(sampling):
    with pytest.raises(tinkex.RequestFailedError) as caught:
        sampling.sample(PROMPT, 1, SamplingParams(max_tokens=10**6)).result(30)
    assert caught.value.category == "user"


def test_cancelled_samples_free_capacity(sampling):
    long = SamplingParams(max_tokens=200, stop=[])

    async def main():
        tasks = [asyncio.create_task(sampling.sample_async(PROMPT, 1, long)) for _ in range(20)]
        await asyncio.sleep(0.3)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return await sampling.sample_async(PROMPT, 1, SamplingParams(max_tokens=2))

    assert asyncio.run(main()).sequences


def test_a_sample_by_the_name_of_the_base_model_needs_no_sampling_session(sampling):
    request = types.SampleRequest(
        prompt=PROMPT, sampling_params=SamplingParams(max_tokens=4, seed=1), base_model=TINY
    )
    low = draw(sampling.holder, request).result(30)
    high = sampling.sample(PROMPT, 1, SamplingParams(max_tokens=4, seed=1)).result(30)
    assert low.sequences[0].tokens == high.sequences[0].tokens
