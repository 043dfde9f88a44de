"""A session starts late, ends cleanly, and blocks only callers that wait for it."""

import asyncio
import contextlib
import gc
import json
import logging
import threading
import time
import weakref

import pytest

import tinkex
from tinkex import SamplingParams, types
from tinkex.client import session as session_module
from tinkex.testing import Answer, Lost
from waiting import until


def endpoints(fake):
    return [seen.endpoint for seen in fake.requests]


def test_creating_a_client_sends_nothing(fake):
    service = fake.client()
    assert service.get_console_url().endswith("/sessions")
    service.close("success").result(5)
    assert endpoints(fake) == []


def test_the_console_of_the_hosted_service_is_its_own(fake):
    hosted = "https://tinker.thinkingmachines.dev/services/tinker-prod"
    service = fake.client(base_url=hosted)
    assert service.get_console_url() == "https://tinker.thinkingmachines.ai/sessions"
    training = service.create_lora_training_client("fake/model")
    run = f"https://tinker.thinkingmachines.ai/training_runs/{training.model_id}"
    assert training.get_console_url() == run
    saved = training.save_state("a").result(5)
    assert saved.get_console_url().startswith("https://tinker.thinkingmachines.ai/checkpoints/")
    service.close("success").result(5)


@pytest.mark.parametrize("host", ["thinkingmachines.dev.example.com", "evilthinkingmachines.ai"])
def test_the_console_of_another_server_is_never_that_of_the_hosted_service(fake, host):
    service = fake.client(base_url=f"https://{host}/tinker")
    assert service.get_console_url() == f"https://{host}/tinker/sessions"
    service.close("success").result(5)


def test_the_first_operation_starts_the_session_once(fake, service):
    service.create_lora_training_client("fake/model")
    service.create_lora_training_client("fake/model")
    assert endpoints(fake)[:4] == [
        "client/config",
        "client/dynamic_config",
        "create_session",
        "create_model",
    ]
    assert endpoints(fake).count("create_session") == 1
    bodies = [json.loads(s.body) for s in fake.requests if s.endpoint == "create_model"]
    assert [body["model_seq_id"] for body in bodies] == [0, 1]
    assert service.get_console_url().endswith(service.holder.session_id)


def test_capabilities_need_no_session(fake, service):
    assert service.get_server_capabilities().supported_models[0].model_name == "fake/model"
    assert "create_session" not in endpoints(fake)


def test_many_threads_may_start_the_same_session_at_once(fake, service):
    async def main():
        return await asyncio.gather(
            service.create_lora_training_client_async("fake/model"),
            service.get_server_capabilities_async(),
            service.create_sampling_client_async(base_model="fake/model"),
            service.create_lora_training_client_async("fake/model"),
        )

    asyncio.run(asyncio.wait_for(main(), 5))
    assert endpoints(fake).count("client/config") == 1
    assert endpoints(fake).count("create_session") == 1


def test_training_clients_and_capabilities_can_be_requested_together(service):
    """Defect 3: with a lock around the start, the two wait for each other."""

    async def main():
        async with asyncio.timeout(5):
            return await asyncio.gather(
                service.create_lora_training_client_async("fake/model"),
                service.get_server_capabilities_async(),
                service.create_sampling_client_async(base_model="fake/model"),
            )

    training, capabilities, sampling = asyncio.run(main())
    assert capabilities.supported_models[0].model_name == "fake/model"
    assert training.holder is sampling.holder


@pytest.mark.parametrize(
    "endpoint",
    ["client/config", "client/dynamic_config", "create_session", "create_model", "retrieve_future"],
)
def test_starting_does_not_block_the_callers_loop(fake, service, endpoint):
    """The response is released by this loop; if it were blocked, only the timer could."""
    hold = fake.hold(endpoint)
    blocked = threading.Event()

    def let_go():
        blocked.set()
        hold.release()

    async def main():
        task = asyncio.create_task(service.create_lora_training_client_async("fake/model"))
        assert await asyncio.to_thread(hold.arrived.wait, 30)
        for _ in range(50):
            await asyncio.sleep(0)
        assert not task.done()
        hold.release()
        return await task

    timer = threading.Timer(20, let_go)
    timer.start()
    try:
        assert asyncio.run(main()).model_id
    finally:
        timer.cancel()
    assert not blocked.is_set()


def test_a_server_without_dynamic_configuration_is_fine(fake, service):
    fake.script("client/dynamic_config", Answer(status=404))
    service.get_server_capabilities()


def test_messages_of_the_server_are_logged_at_their_level(fake, service, caplog):
    body = {"session_id": "s-x", "info_message": "i", "warning_message": "w", "error_message": "e"}
    fake.script("create_session", Answer(status=200, body=body))
    with caplog.at_level(logging.INFO, logger="tinkex"):
        service.create_sampling_client(base_model="fake/model")
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("INFO", "i"),
        ("WARNING", "w"),
        ("ERROR", "e"),
    ]


@pytest.mark.parametrize(
    ("raised", "status"),
    [(None, "success"), (ValueError("tml-x"), "errored"), (KeyboardInterrupt(), "interrupted")],
    ids=["success", "errored", "interrupted"],
)
def test_leaving_the_block_ends_the_session_with_its_reason(fake, raised, status):
    expected = contextlib.nullcontext() if raised is None else pytest.raises(type(raised))
    with expected, fake.client() as service:
        service.create_sampling_client(base_model="fake/model")
        if raised is not None:
            raise raised
    finish = fake.requests[-1]
    assert finish.endpoint == "sessions/s-1/finish"
    assert finish.json()["reason"] == {"type": status}
    assert b"tml-x" not in finish.body


def test_using_a_closed_client_is_an_error_at_once(fake, datum):
    service = fake.client()
    training = service.create_lora_training_client("fake/model")
    sampling = service.create_sampling_client(base_model="fake/model")
    service.close("success").result(5)
    service.close("errored").result(5)  # the first wins, the second is harmless
    started = time.monotonic()
    for use in (
        service.get_server_capabilities,
        lambda: service.create_lora_training_client("fake/model"),
        lambda: training.forward_backward([datum], "cross_entropy"),
        lambda: sampling.sample(types.ModelInput.from_ints([1]), 1, SamplingParams()),
        service.__enter__,
        lambda: service.holder,
    ):
        with pytest.raises(RuntimeError, match="ServiceClient is closed"):
            use()
    assert time.monotonic() - started < 10
    assert endpoints(fake).count("sessions/s-1/finish") == 1


def test_running_work_ends_with_an_error_when_the_client_closes(fake, datum):
    service = fake.client()
    training = service.create_lora_training_client("fake/model")
    hold = fake.hold("forward_backward")
    futures = [training.forward_backward([datum], "cross_entropy") for _ in range(3)]
    assert hold.arrived.wait(5)
    service.close("interrupted").result(5)
    for future in futures:
        with pytest.raises(RuntimeError, match="closed"):
            future.result(5)


def test_closing_one_client_leaves_its_siblings_alone(fake, datum):
    one, two = fake.client(), fake.client()
    a, b = (client.create_lora_training_client("fake/model") for client in (one, two))
    a.forward_backward([datum], "cross_entropy").result(5)
    one.close("success").result(5)
    b.forward_backward([datum], "cross_entropy").result(5)
    two.close("success").result(5)


def test_an_unreachable_server_does_not_delay_closing(fake, monkeypatch):
    monkeypatch.setattr(session_module, "FINISH_TIMEOUT_S", 0.2)
    service = fake.client()
    service.create_sampling_client(base_model="fake/model")
    fake.script("sessions/s-1/finish", *[Lost()] * 100)
    started = time.monotonic()
    service.close("success").result(10)
    assert time.monotonic() - started < 3


def test_heartbeats_are_sent_until_the_session_ends(fake, monkeypatch):
    monkeypatch.setattr(session_module, "HEARTBEAT_EVERY_S", 0.02)
    service = fake.client()
    service.create_sampling_client(base_model="fake/model")
    until(lambda: endpoints(fake).count("session_heartbeat") >= 3, 5)
    fake.script("session_heartbeat", Lost(), Answer(status=503), Answer(status=410))
    until(lambda: not fake._scripts["session_heartbeat"], 5)
    beats = endpoints(fake).count("session_heartbeat")
    time.sleep(0.1)
    assert endpoints(fake).count("session_heartbeat") == beats  # 410: the session has ended
    service.close("success").result(5)


def test_a_garbage_collected_session_closes_its_connection(fake):
    transports = []

    def make(url, settings):
        transports.append(fake.transport(url, settings))
        return transports[0]

    service = tinkex.ServiceClient(
        base_url="http://fake.invalid", api_key="tml-x", _make_transport=make
    )
    service.create_sampling_client(base_model="fake/model")
    session = weakref.ref(service.holder)
    del service
    deadline = time.monotonic() + 5
    while not transports[0]._closed and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert session() is None
    assert transports[0]._closed


def test_unknown_arguments_are_named(fake):
    with pytest.warns(FutureWarning, match="ignores colour"):
        fake.client(colour="red")
