"""Closed and garbage-collected clients leave nothing behind."""

import asyncio
import gc
import os
import time
import weakref

import pytest

import tinkex
from tinkex import SamplingParams, types
from tinkex.client import background_loop
from tinkex.client.http import shared_poll
from tinkex.testing import FakeService

PROMPT = types.ModelInput.from_ints([5, 6, 7])
PARAMS = SamplingParams(max_tokens=4)

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts in /proc")


def sockets():
    names = []
    for name in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:
            continue  # the one that listed them
    return sum(name.startswith("socket:") for name in names)


def tasks():
    async def count():
        return len(asyncio.all_tasks())

    return asyncio.run_coroutine_threadsafe(count(), background_loop.background()).result(5)


def settled(count, most, seconds=10.0):
    """Closing a connection takes a few iterations of the loops."""
    deadline = time.monotonic() + seconds
    while (found := count()) > most and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def use(url):
    """A session with all kinds of connections; returns what must not outlive it."""
    service = tinkex.ServiceClient(base_url=url)
    training = service.create_lora_training_client("fake/model")
    training.optim_step(tinkex.AdamParams()).result(5)
    sampling = service.create_sampling_client(base_model="fake/model")
    futures = [sampling.sample(PROMPT, 1, PARAMS) for _ in range(30)]
    assert all(future.result(10).sequences for future in futures)
    connection = service.holder._connected.value
    assert connection is not None
    return service, [weakref.ref(each) for each in (service.holder, sampling, connection)]


@pytest.mark.parametrize("shared", [False, True])
def test_closed_sessions_free_their_sockets_tasks_and_objects(loopback, fake, shared, monkeypatch):
    monkeypatch.setattr(shared_poll, "MAX_SELF_POLLING", 4)
    fake._config["sample_use_retrieve_futures"] = shared
    service, _ = use(loopback.url)  # what the process keeps in any case
    service.close("success").result(5)
    del service
    gc.collect()
    before = settled(sockets, 0, seconds=0.1), settled(tasks, 0, seconds=0.1)
    alive, services = [], []
    for _ in range(3):
        service, made = use(loopback.url)
        service.close("success").result(5)
        alive += made
        services.append(service)
    # Closing frees them, not garbage collection of the clients.
    assert settled(sockets, before[0]) <= before[0]
    assert settled(tasks, before[1]) <= before[1]
    del service
    services.clear()

    def left():
        gc.collect()
        return sum(ref() is not None for ref in alive)

    assert settled(left, 0) == 0


def test_a_garbage_collected_client_leaves_nothing_behind(loopback):
    service, _ = use(loopback.url)
    service.close("success").result(5)
    before = settled(sockets, 0, seconds=0.1)
    service, made = use(loopback.url)
    del service
    gc.collect()
    assert settled(sockets, before) <= before
    gc.collect()
    assert not [ref() for ref in made if ref() is not None]


def test_abandoned_results_do_not_pile_up():
    fake = FakeService(config={"sample_use_retrieve_futures": True}, sample_s=0.005, hold_s=0.05)
    with fake.client() as service:
        sampling = service.create_sampling_client(base_model="fake/model")
        for _ in range(3):
            for future in [sampling.sample(PROMPT, 1, PARAMS) for _ in range(200)]:
                future.cancel()
        sampling.sample(PROMPT, 1, PARAMS).result(10)
        queue = sampling._sample_queue
        assert settled(lambda: len(queue._running) + len(queue._waiting_samples.waiting), 0) == 0
        assert (
            settled(
                lambda: len(queue._shared_poll._unclaimed) + len(queue._shared_poll._waiting), 0
            )
            == 0
        )
        assert settled(lambda: len(queue._shared_poll._fetched), 0) == 0
        assert not service.holder._tasks or settled(lambda: len(service.holder._tasks), 0) == 0
