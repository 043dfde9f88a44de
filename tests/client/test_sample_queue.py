"""Ten thousand concurrent samples: fair, in order, bounded; a waiting sample takes no task."""

import asyncio
import gc
import re
import time

import pytest

from tinkex import RetryConfig, SamplingParams, types
from tinkex.client import background_loop
from tinkex.client.http.backpressure import ClientQueue, FairLimiter
from tinkex.testing import Answer, FakeService
from tinkex.wire.protobuf import encode_sample_response
from waiting import until

PROMPT = types.ModelInput.from_ints(list(range(64)))
PARAMS = SamplingParams(max_tokens=4)
MANY = 10_000
NUMBER = re.compile(rb'"seq_id":(\d+)')
#: Maximum memory of one waiting call: the request, its future, its queue entry.
MOST_BYTES_EACH = 6_000


def rss_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


class Instant(FakeService):
    """Answers samples immediately, so that only the client is measured."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.numbers = []
        self._packed = encode_sample_response(
            types.SampleResponse([types.SampledSequence("stop", "", [1, 2], [-0.5, -0.5])])
        )

    async def answer(self, method, endpoint, headers, body):
        if endpoint == "asample":
            self.numbers.append(int(NUMBER.search(body)[1]))
            if hold := self._holds.get(endpoint):
                await hold.wait()
            promise = b'{"request_id": "r", "sample_sequence_ids": ["q"]}'
            return 200, {"content-type": "application/json"}, promise
        if endpoint == "retrieve_future":
            return 200, {"content-type": "application/x-protobuf"}, self._packed
        return await super().answer(method, endpoint, headers, body)


def asked_by(fake):
    return [s.json()["sampling_session_id"] for s in fake.requests if s.endpoint == "asample"]


def tasks_on_the_loop():
    async def count():
        return len(asyncio.all_tasks())

    return asyncio.run_coroutine_threadsafe(count(), background_loop.background()).result(5)


def test_ten_thousand_waiting_samples_are_bounded_in_memory_and_tasks_and_run_in_order():
    fake = Instant(config={"sample_max_concurrent_requests": 100})
    # Its own key: after a 429 in another test, samples would be in slow start.
    with fake.client(api_key="tml-ten-thousand") as service:
        sampling = service.create_sampling_client(base_model="fake/model")
        sampling.sample(PROMPT, 1, PARAMS).result(5)
        hold = fake.hold("asample")
        gc.collect()
        before = rss_bytes()
        futures = [sampling.sample(PROMPT, 1, PARAMS) for _ in range(MANY)]
        assert hold.arrived.wait(5)
        assert rss_bytes() - before < MANY * MOST_BYTES_EACH
        assert tasks_on_the_loop() < 200
        assert len(fake.numbers) <= 101
        hold.release()
        futures[0].result(5)
        done = sum(future.done() for future in futures)
        assert done < MANY / 2, "the first result came after half of all the others"
        assert all(future.result(30).sequences for future in futures)
        assert fake.numbers == list(range(MANY + 1))


def test_clients_of_one_service_take_turns():
    fake = FakeService(config={"sample_max_concurrent_requests": 4})
    with fake.client() as service:
        greedy = service.create_sampling_client(base_model="fake/model")
        modest = service.create_sampling_client(base_model="fake/model")
        hold = fake.hold("asample")
        first = [greedy.sample(PROMPT, 1, PARAMS) for _ in range(400)]
        assert hold.arrived.wait(5)
        second = [modest.sample(PROMPT, 1, PARAMS) for _ in range(10)]
        hold.release()
        [future.result(10) for future in first + second]
        order = asked_by(fake)
        last = max(i for i, name in enumerate(order) if name == modest._sampling_session_id)
        assert last < 60, f"the client with ten samples was served after {last} others"


def test_prompts_are_bounded_in_bytes_too():
    config = {"sample_dispatch_bytes_semaphore_size": 2_000}  # three prompts of 64 tokens
    fake = FakeService(config=config)
    with fake.client() as service:
        sampling = service.create_sampling_client(base_model="fake/model")
        hold = fake.hold("asample")
        futures = [sampling.sample(PROMPT, 1, PARAMS) for _ in range(50)]
        until(lambda: len(asked_by(fake)) >= 3)
        time.sleep(0.05)
        assert len(asked_by(fake)) == 3
        hold.release()
        assert all(future.result(10).sequences for future in futures)


def test_sampling_never_blocks_the_caller_or_its_loop():
    fake = FakeService()
    with fake.client() as service:
        sampling = service.create_sampling_client(base_model="fake/model")
        hold = fake.hold("asample")

        async def main():
            # Every call has returned, and the loop runs, before the server responds to any.
            work = [
                asyncio.create_task(sampling.sample_async(PROMPT, 1, PARAMS)) for _ in range(200)
            ]
            await asyncio.sleep(0)
            assert not any(task.done() for task in work)
            hold.release()
            return await asyncio.gather(*work)

        assert len(asyncio.run(main())) == 200


def test_waiting_samples_of_a_closed_client_fail_at_once():
    fake = FakeService(config={"sample_max_concurrent_requests": 1})
    other, service = fake.client(), fake.client()
    holding = other.create_sampling_client(base_model="fake/model")
    sampling = service.create_sampling_client(base_model="fake/model")
    hold = fake.hold("retrieve_future")
    first = holding.sample(PROMPT, 1, PARAMS)  # runs, within the limit of one
    assert hold.arrived.wait(5)
    futures = [sampling.sample(PROMPT, 1, PARAMS) for _ in range(100)]
    service.close("success").result(5)
    for future in futures:
        with pytest.raises(RuntimeError, match="closed"):
            future.result(5)
    assert sampling.retry_handler._timer is None  # nothing is watched
    hold.release()
    assert first.result(5).sequences  # its sibling continues
    other.close("success").result(5)


def test_a_sample_cancelled_while_it_waits_is_never_sent():
    fake = FakeService()
    with fake.client() as service:
        config = RetryConfig(max_connections=1)
        sampling = service.create_sampling_client(base_model="fake/model", retry_config=config)
        hold = fake.hold("asample")
        first, second, third = (sampling.sample(PROMPT, 1, PARAMS) for _ in range(3))
        assert hold.arrived.wait(5)
        assert second.cancel()
        hold.release()
        assert first.result(5).sequences
        assert third.result(5).sequences
        assert len(asked_by(fake)) == 2


def test_a_service_is_not_flooded_after_a_back_off():
    fake = FakeService()
    with fake.client() as service:
        sampling = service.create_sampling_client(base_model="fake/model")
        fake.script("asample", Answer(status=429, headers={"retry-after-ms": "5"}))
        sampling.sample(PROMPT, 1, PARAMS).result(5)
        sent = len(asked_by(fake))
        hold = fake.hold("asample")
        futures = [sampling.sample(PROMPT, 1, PARAMS) for _ in range(50)]
        until(lambda: len(asked_by(fake)) >= sent + 10)
        time.sleep(0.05)
        assert len(asked_by(fake)) == sent + 10
        hold.release()
        assert all(future.result(10).sequences for future in futures)


# -- who is let in -----------------------------------------------------------------------------------


def test_client_queues_take_turns_and_keep_to_their_own_limits():
    running = []

    def begin(entry):
        running.append(entry)
        return True

    limiter = FairLimiter(4)
    one, two = ClientQueue(begin, limit=None), ClientQueue(begin, limit=1)
    limiter.enqueue(one, ["a1", "a2"])
    limiter.enqueue(two, ["b1", "b2"])
    limiter.enqueue(one, ["a3", "a4", "a5"])
    assert running == ["a1", "a2", "b1", "a3"]
    limiter.release(one)
    assert running[-1] == "a4"  # b2 must wait for b1
    limiter.release(two)
    limiter.release(one)
    assert running[-2:] == ["b2", "a5"] or running[-2:] == ["a5", "b2"]
    assert limiter.used == 4
