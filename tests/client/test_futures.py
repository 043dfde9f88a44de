"""Futures can be waited for from any thread or loop, many times; timeouts lose nothing."""

import asyncio
import concurrent.futures
import inspect
import threading
import warnings

import pytest

from tinkex import AdamParams, APIFuture, SamplingClient, SamplingParams, types
from tinkex.client import background_loop
from tinkex.client.futures import Promise

PROMPT = types.ModelInput.from_ints([1, 2, 3])


@pytest.fixture
def training(service):
    return service.create_lora_training_client("fake/model", rank=4)


def test_a_result_can_be_read_by_many_threads_and_again(training, datum):
    future = training.forward_backward([datum], "cross_entropy")
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: future.result(10), range(32)))
    assert len({id(result) for result in results}) == 1
    assert future.result() is results[0]


def test_a_result_can_be_awaited_from_several_loops_and_again(training, datum):
    future = training.forward_backward([datum], "cross_entropy")

    async def twice():
        first = await future
        assert await future.result_async(5) is first
        return first

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        results = list(pool.map(lambda _: asyncio.run(twice()), range(3)))
    assert {id(result) for result in results} == {id(future.result())}


def test_a_timeout_cancels_nothing_and_loses_nothing(fake, training, datum):
    hold = fake.hold("forward_backward")
    future = training.forward_backward([datum], "cross_entropy")
    with pytest.raises(TimeoutError):
        future.result(timeout=0.01)

    async def main():
        with pytest.raises(TimeoutError, match="the work continues"):
            await future.result_async(timeout=0.01)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(future.result_async(), 0.01)
        hold.release()
        return await future

    assert asyncio.run(main()).metrics["loss:sum"] > 0


def test_cancelling_the_task_that_awaits_a_training_step_does_not_cancel_the_step(
    fake, training, datum
):
    hold = fake.hold("forward_backward")
    future = training.forward_backward([datum], "cross_entropy")

    async def main():
        task = asyncio.ensure_future(future.result_async())
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    hold.release()
    assert future.result(5).metrics["loss:sum"] > 0
    assert not future.cancelled()


def test_o5_cancelling_the_awaiting_task_does_not_cancel_a_queued_step_either(
    fake, training, datum
):
    hold = fake.hold("forward_backward")
    first = training.forward_backward([datum], "cross_entropy")
    behind = training.optim_step(AdamParams())

    async def main():
        task = asyncio.ensure_future(behind.result_async())
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    hold.release()
    first.result(5)
    assert behind.result(5).metrics
    assert [kind for _, _, kind in fake.ran] == ["forward_backward", "optim_step"]


def test_futures_of_samples_are_concurrent_futures_that_can_be_awaited(service):
    sampling = service.create_sampling_client(base_model="fake/model")
    params = SamplingParams(max_tokens=2)
    futures = [sampling.sample(PROMPT, 1, params) for _ in range(5)]
    assert all(isinstance(future, concurrent.futures.Future) for future in futures)
    assert all(isinstance(future, APIFuture) for future in futures)
    done, _ = concurrent.futures.wait(futures, timeout=5)
    assert len(done) == 5

    async def main():
        return await asyncio.gather(*(sampling.sample(PROMPT, 1, params) for _ in range(5)))

    assert len(asyncio.run(main())) == 5


def test_blocking_on_a_running_loop_warns_and_still_returns(fake, training, datum):
    async def main():
        with pytest.warns(RuntimeWarning, match="await get_info_async"):
            training.get_info()
        hold = fake.hold("forward_backward")
        future = training.forward_backward([datum], "cross_entropy")
        threading.Timer(0.05, hold.release).start()
        with pytest.warns(RuntimeWarning, match="await result_async"):
            future.result()
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # nothing to warn of: the result is available
            future = training.forward_backward([datum], "cross_entropy")
            await future
            future.result()

    asyncio.run(main())


def test_blocking_on_the_background_thread_is_refused_instead_of_a_deadlock():
    errors = []

    def block():
        try:
            Promise().result()
        except RuntimeError as error:
            errors.append(error)
        done.set()

    done = threading.Event()
    background_loop.background().call_soon_threadsafe(block)
    assert done.wait(5)
    assert "blocks the thread that must complete it" in str(errors[0])


def test_a_loop_that_is_closed_while_it_waits_does_not_affect_others():
    promise = Promise()

    async def give_up():
        waiting = asyncio.ensure_future(promise.result_async())
        await asyncio.sleep(0)
        return waiting

    loop = asyncio.new_event_loop()
    waiting = loop.run_until_complete(give_up())
    waiting.cancel()
    loop.run_until_complete(asyncio.gather(waiting, return_exceptions=True))
    loop.close()
    promise.finish(1)
    assert promise.result() == 1


def test_async_variants_are_coroutines_with_the_same_parameters_and_docstrings():
    from tinkex import SamplingClient, ServiceClient, TrainingClient

    for kind in (ServiceClient, TrainingClient, SamplingClient):
        names = [name for name in vars(kind) if name.endswith("_async")]
        assert names
        for name in names:
            twin, plain = getattr(kind, name), getattr(kind, name.removesuffix("_async"))
            assert inspect.iscoroutinefunction(twin)
            assert not inspect.iscoroutinefunction(plain)
            assert list(inspect.signature(twin).parameters) == list(
                inspect.signature(plain).parameters
            )
            assert twin.__name__ == name
            text, _, note = twin.__doc__.rpartition("\n\n")
            assert text == inspect.cleandoc(plain.__doc__)
            assert note.startswith("A coroutine")


def test_an_overridden_method_is_called_by_its_async_variant(service):
    class Canned(SamplingClient):
        def sample(self, *args, **kwargs):
            answer = concurrent.futures.Future()  # a plain one, as test doubles make them
            answer.set_result("canned")
            return answer

    sampling = service.create_sampling_client(base_model="fake/model")
    sampling.__class__ = Canned

    assert asyncio.run(sampling.sample_async("prompt", 1, None)) == "canned"
