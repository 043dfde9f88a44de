"""An abandoned sample is cancelled on the server; a timeout cancels nothing."""

import asyncio
import concurrent.futures
import logging
import os
import threading
import time

import pytest

from tinkex import SamplingParams, types
from tinkex.testing import FakeService
from waiting import until

PROMPT = types.ModelInput.from_ints([5, 6, 7])
PARAMS = SamplingParams(max_tokens=4)
ALLOWED = {"sample_cancel_enabled": True, "sample_cancel_max_batch_size": 3}
FOR_EVER_S = 60.0


@pytest.fixture
def fake():
    return FakeService(dynamic_config=ALLOWED, sample_s=0.1, hold_s=1.0)


@pytest.fixture
def sampling(service):
    return service.create_sampling_client(base_model="fake/model")


@pytest.fixture(autouse=True)
def _nothing_is_logged_as_an_error(caplog):
    yield
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def count(fake, endpoint):
    return sum(1 for each in fake.requests if each.endpoint == endpoint)


def test_cancels_are_sent_in_limited_batches(fake, sampling):
    fake._sample_s = FOR_EVER_S
    futures = [sampling.sample(PROMPT, 1, PARAMS) for _ in range(10)]
    until(lambda: count(fake, "retrieve_future") == 10)
    hold = fake.hold("cancel_future")
    assert all(future.cancel() for future in futures)
    until(lambda: count(fake, "cancel_future") >= 3, 40.0)
    time.sleep(0.05)
    assert count(fake, "cancel_future") == 3
    hold.release()
    until(lambda: len(set(fake.cancelled)) == 10)


def test_a_server_without_cancellation_gets_no_cancels():
    fake = FakeService(sample_s=FOR_EVER_S)
    with fake.client() as service:
        sampling = service.create_sampling_client(base_model="fake/model")
        future = sampling.sample(PROMPT, 1, PARAMS)
        until(lambda: count(fake, "retrieve_future"))
        assert future.cancel()
        fake._sample_s = 0.0
        sampling.sample(PROMPT, 1, PARAMS).result(5)
    assert not fake.cancelled


def test_a_sample_cancelled_while_it_is_sent_is_cancelled_there_too(fake, sampling):
    hold = fake.hold("asample")
    future = sampling.sample(PROMPT, 1, PARAMS)
    assert hold.arrived.wait(5)
    assert future.cancel()
    hold.release()
    until(lambda: len(fake.cancelled) == 1)
    numbers = [s.json()["seq_id"] for s in fake.requests if s.endpoint == "asample"]
    assert numbers == [0, 0]  # sent again under its seq_id, to get its request id


def test_timeouts_cancel_nothing(fake, sampling):
    hold = fake.hold("asample")
    future = sampling.sample(PROMPT, 1, PARAMS)
    with pytest.raises(TimeoutError):
        future.result(0.01)

    async def main():
        with pytest.raises(TimeoutError):
            await future.result_async(0.01)

    asyncio.run(main())
    hold.release()
    assert future.result(5).sequences
    assert future.result(5) is future.result(0)
    assert not fake.cancelled


def test_one_of_two_waiters_does_not_cancel_for_the_other(fake, sampling):
    hold = fake.hold("retrieve_future")

    async def main():
        future = sampling.sample(PROMPT, 1, PARAMS)
        one, two = (asyncio.create_task(future.result_async()) for _ in range(2))
        await asyncio.to_thread(hold.arrived.wait, 5)
        one.cancel()
        with pytest.raises(asyncio.CancelledError):
            await one
        hold.release()
        return await two

    assert asyncio.run(main()).sequences
    assert not fake.cancelled


WAITS = {
    "result": lambda future: future.result(5),
    "exception": lambda future: future.exception(5) or future.result(5),
    "block": lambda future: future.block(),
    "wait": lambda future: concurrent.futures.wait([future], 5).done.pop().result(),
}


@pytest.mark.parametrize("how", WAITS)
def test_a_task_that_is_cancelled_does_not_cancel_for_a_thread_that_blocks(fake, sampling, how):
    hold = fake.hold("retrieve_future")
    future = sampling.sample(PROMPT, 1, PARAMS)
    blocking = threading.Event()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:

        def wait():
            blocking.set()
            return WAITS[how](future)

        thread = pool.submit(wait)
        assert blocking.wait(5)
        until(lambda: future._blocked or future._waiters)

        async def main():
            awaiting = asyncio.create_task(future.result_async())
            assert await asyncio.to_thread(hold.arrived.wait, 5)
            awaiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await awaiting

        asyncio.run(main())
        hold.release()
        assert thread.result(5).sequences
    assert not fake.cancelled
    assert not future._blocked


def test_a_thread_that_stopped_waiting_does_not_keep_a_sample_alive(fake, sampling):
    fake._sample_s = FOR_EVER_S
    future = sampling.sample(PROMPT, 1, PARAMS)
    with pytest.raises(TimeoutError):
        future.result(0.05)
    until(lambda: count(fake, "retrieve_future") == 1)

    async def main():
        awaiting = asyncio.create_task(future.result_async())
        await asyncio.sleep(0.01)
        awaiting.cancel()
        await asyncio.gather(awaiting, return_exceptions=True)

    asyncio.run(main())
    until(lambda: len(fake.cancelled) == 1)


def test_a_program_whose_loop_ends_cancels_its_samples(fake, sampling):
    fake._sample_s = FOR_EVER_S

    async def main():
        tasks = [asyncio.create_task(sampling.sample_async(PROMPT, 1, PARAMS)) for _ in range(5)]
        await asyncio.to_thread(until, lambda: count(fake, "retrieve_future") == 5)
        assert tasks

    asyncio.run(main())  # ends while the tasks run
    until(lambda: len(fake.cancelled) == 5)
    fake._sample_s = 0.0
    assert sampling.sample(PROMPT, 1, PARAMS).result(5).sequences


def test_a_thread_that_dies_with_running_samples_does_not_affect_others(fake, sampling):
    futures = []

    def die():
        futures.extend(sampling.sample(PROMPT, 1, PARAMS) for _ in range(3))

    thread = threading.Thread(target=die)
    thread.start()
    thread.join()
    assert all(future.result(5).sequences for future in futures)


def test_a_fork_during_sampling_loses_no_sample_and_the_child_can_sample(fake, loopback):
    import tinkex

    with tinkex.ServiceClient(base_url=loopback.url) as service:
        sampling = service.create_sampling_client(base_model="fake/model")
        futures = [sampling.sample(PROMPT, 1, PARAMS) for _ in range(5)]
        until(lambda: count(fake, "retrieve_future") == 5)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = 0 if sampling.sample(PROMPT, 1, PARAMS).result(10).sequences else 2
            finally:
                os._exit(code)
        assert all(future.result(5).sequences for future in futures)
        assert os.waitpid(child, 0)[1] == 0
        numbers = [s.json()["seq_id"] for s in fake.requests if s.endpoint == "asample"]
        assert sum(number >= 10**9 for number in numbers) == 1
