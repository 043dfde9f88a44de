"""Sampling clients in other processes: pickles and handles, without secrets."""

import asyncio
import base64
import json
import multiprocessing
import pickle

import pytest

import tinkex
from tinkex import RetryConfig, SamplingClient, SamplingParams, types
from tinkex.client import session as session_module
from tinkex.client.sampling import draw
from tinkex.testing import FakeService
from waiting import until

PROMPT = types.ModelInput.from_ints([5, 6, 7])
PARAMS = SamplingParams(max_tokens=4)
SECRETS = (b"tml-secret", b"cf-secret", b"header-secret")


@pytest.fixture
def secretive(loopback, monkeypatch):
    """A client with secrets of every kind."""
    monkeypatch.setenv("CLOUDFLARE_ACCESS_CLIENT_SECRET", "cf-secret")
    service = tinkex.ServiceClient(
        base_url=loopback.url,
        api_key="tml-secret",
        default_headers_overrides={"X-Proxy-Key": "header-secret"},
    )
    yield service
    service.close("success").result(5)


def last(fake, endpoint):
    return [seen for seen in fake.requests if seen.endpoint == endpoint][-1]


def test_neither_a_pickle_nor_a_handle_contains_a_secret(secretive):
    config = RetryConfig(max_connections=3, progress_timeout=9.0)
    sampling = secretive.create_sampling_client(base_model="fake/model", retry_config=config)
    handle = sampling.get_sampler_handle()
    for blob in (pickle.dumps(sampling), base64.urlsafe_b64decode(handle)):
        assert not any(secret in blob for secret in SECRETS)


def test_a_copy_in_the_same_process_has_the_settings_of_the_original(fake, secretive, monkeypatch):
    sampling = secretive.create_sampling_client(base_model="fake/model")
    monkeypatch.delenv("CLOUDFLARE_ACCESS_CLIENT_SECRET")
    copy = pickle.loads(pickle.dumps(sampling))
    copy.sample(PROMPT, 1, PARAMS).result(5)
    headers = last(fake, "asample").headers
    assert headers["x-api-key"] == "tml-secret"
    assert headers["x-proxy-key"] == "header-secret"
    assert pickle.loads(pickle.dumps(copy)).holder is copy.holder  # one connection for all copies
    copy.holder.close("success").result(5)


def _in_another_process(blob):
    import tinkex.client.sampling  # noqa: F401 (what a worker has: the package, and no more)

    return pickle.loads(blob).sample(PROMPT, 1, PARAMS).result(20).sequences[0].tokens


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_a_copy_works_in_another_process(fake, loopback, how):
    with tinkex.ServiceClient(base_url=loopback.url) as service:
        sampling = service.create_sampling_client(base_model="fake/model")
        sampling.sample(PROMPT, 1, PARAMS).result(5)
        with multiprocessing.get_context(how).Pool(1) as pool:
            found = pool.apply(_in_another_process, (pickle.dumps(sampling),))
        assert found == [5, 6, 7, 5]
        numbers = [s.json()["seq_id"] for s in fake.requests if s.endpoint == "asample"]
        assert len(set(numbers)) == 2


def test_a_client_from_a_handle_uses_the_key_of_its_own_process(fake, secretive):
    config = RetryConfig(max_connections=3, progress_timeout=9.0)
    sampling = secretive.create_sampling_client(base_model="fake/model", retry_config=config)
    handle = sampling.get_sampler_handle()
    assert handle == handle.strip()
    copy = SamplingClient.from_sampler_handle(handle, api_key="tml-theirs")
    assert copy.sample(PROMPT, 1, PARAMS).result(5).sequences
    assert last(fake, "asample").headers["x-api-key"] == "tml-theirs"
    assert copy.retry_handler.config == config
    assert copy.get_base_model() == "fake/model"
    copy.holder.close("success").result(5)
    assert not [
        s for s in fake.requests if s.endpoint.endswith("/finish")
    ]  # a copy does not end the session


@pytest.mark.parametrize(
    "handle", ["", "no handle", "e30=", base64.urlsafe_b64encode(b'{"session_id": 3}').decode()]
)
def test_an_invalid_handle_is_refused_with_a_clear_message(handle):
    with pytest.raises(ValueError, match="get_sampler_handle"):
        SamplingClient.from_sampler_handle(handle)


def test_copies_keep_the_session_alive(fake, loopback, monkeypatch):
    service = tinkex.ServiceClient(base_url=loopback.url)
    sampling = service.create_sampling_client(base_model="fake/model")
    monkeypatch.setattr(session_module, "HEARTBEAT_EVERY_S", 0.05)
    copy = SamplingClient.from_sampler_handle(sampling.get_sampler_handle(), api_key="tml-copy")
    copy.sample(PROMPT, 1, PARAMS).result(5)

    def beats():
        return [
            s
            for s in fake.requests
            if s.endpoint == "session_heartbeat" and s.headers.get("x-api-key") == "tml-copy"
        ]

    until(lambda: len(beats()) >= 2, 5)
    assert beats()[0].json()["session_id"] == service.holder.session_id
    copy.holder.close("success").result(5)
    service.close("success").result(5)


def test_copies_get_their_number_from_servers_that_assign_them():
    fake = FakeService(config={"sample_join_sampling_session": True})
    with fake.client() as service:
        sampling = service.create_sampling_client(base_model="fake/model")
        copies = [pickle.loads(pickle.dumps(sampling)) for _ in range(3)]
        for each in (sampling, *copies):
            each.sample(PROMPT, 1, PARAMS).result(5)
        numbers = [s.json()["seq_id"] for s in fake.requests if s.endpoint == "asample"]
        assert numbers == [0, 10**9, 2 * 10**9, 3 * 10**9]
        for copy in copies:
            copy.holder.close("success").result(5)


# -- the ways to a client, and past it ---------------------------------------------------------------


def test_a_client_is_created_from_weights_a_base_model_or_a_session(fake, service):
    holder = service.holder
    one = SamplingClient.create(holder, base_model="fake/model").result(5)
    two = SamplingClient.create(holder, sampling_session_id=one._sampling_session_id).result(5)
    training = service.create_lora_training_client("fake/model")
    path = training.save_weights_for_sampler("a").result(5).path
    three = asyncio.run(_awaited(SamplingClient.create(holder, model_path=path)))
    for client in (one, two, three):
        assert client.sample(PROMPT, 1, PARAMS).result(5).sequences
    with pytest.raises(ValueError, match="Pass what to sample from"):
        SamplingClient.create(holder)
    with pytest.raises(ValueError, match="tinker://"):
        SamplingClient.create(holder, model_path="weights/a")


async def _awaited(future):
    return await future


def test_a_sample_may_name_its_model_in_any_of_three_ways(fake, service):
    sampler = service.create_sampling_client(base_model="fake/model")._sampling_session_id
    training = service.create_lora_training_client("fake/model")
    path = training.save_weights_for_sampler("a").result(5).path
    for name in (
        {"sampling_session_id": sampler},
        {"base_model": "fake/model"},
        {"model_path": path},
    ):
        request = types.SampleRequest(prompt=PROMPT, sampling_params=PARAMS, **name)
        assert draw(service.holder, request).result(5).sequences[0].tokens == [5, 6, 7, 5]
        sent = json.loads(last(fake, "asample").body)
        assert name.items() <= sent.items()
        assert ("seq_id" in sent) is ("sampling_session_id" in name)
    with pytest.raises(ValueError, match="names no model"):
        draw(service.holder, types.SampleRequest(prompt=PROMPT, sampling_params=PARAMS))


def test_attributes_that_programs_read_exist(fake, service, monkeypatch):
    sampling = service.create_sampling_client(base_model="fake/model")
    assert sampling.feature_gates == {"async_sampling"}
    assert sampling.retry_handler.config == RetryConfig(max_connections=None)
    assert sampling.holder is service.holder
    monkeypatch.setenv("TINKER_FEATURE_GATES", "one, two")
    with fake.client() as other:
        sampling = other.create_sampling_client(base_model="fake/model")
        assert sampling.feature_gates == {"one", "two"}


def test_stability_is_recorded_if_the_client_enables_it(fake, service):
    sampling = service.create_sampling_client(base_model="fake/model", record_stability_info=True)
    copy = pickle.loads(pickle.dumps(sampling))
    for client in (sampling, copy):
        client.sample(PROMPT, 1, PARAMS).result(5)
        assert last(fake, "asample").json()["record_stability_info"] is True
    copy.holder.close("success").result(5)


def test_an_overridden_observer_gets_queue_states(service, fake):
    states = []

    class Watching(SamplingClient):
        def on_queue_state_change(self, queue_state, queue_state_reason):
            states.append((queue_state, queue_state_reason))

    plain = service.create_sampling_client(base_model="fake/model")
    sampling = Watching(service.holder, sampling_session_id=plain._sampling_session_id)
    body = {"type": "try_again", "request_id": "r", "queue_state": "paused_capacity"}
    fake.script(
        "retrieve_future",
        tinkex.testing.Answer(status=408, body=body | {"queue_state_reason": "full"}),
    )
    sampling.sample(PROMPT, 1, PARAMS).result(5)
    assert states[0] == ("paused_capacity", "full")
