"""`tinkex.resources`: single endpoints with the names of the official client; `Timeout`."""

import asyncio
import concurrent.futures

import pytest

import tinkex
import tinkex.testing
from tinkex import types
from tinkex.lib.public_interfaces import AwaitableConcurrentFuture
from tinkex.resources import (
    AsyncFuturesResource,
    AsyncModelsResource,
    AsyncSamplingResource,
    AsyncServiceResource,
    AsyncTelemetryResource,
    AsyncTrainingResource,
    AsyncWeightsResource,
)

PROMPT = types.ModelInput.from_ints([1, 2])


async def finished(service, promised):
    return await AsyncFuturesResource(service).retrieve(
        request=types.FutureRetrieveRequest(request_id=promised.request_id)
    )


def test_a_model_is_created_trained_and_saved_request_by_request(fake, service, datum):
    async def program():
        session = await AsyncServiceResource(service).create_session(
            request=types.CreateSessionRequest(tags=[], user_metadata={}, sdk_version="0.36.0")
        )
        created = await AsyncModelsResource(service).create(
            request=types.CreateModelRequest(
                session_id=session.session_id,
                model_seq_id=0,
                base_model="fake/model",
                lora_config=types.LoraConfig(rank=8),
            )
        )
        work = types.ForwardBackwardInput(data=[datum], loss_fn="cross_entropy")
        training = AsyncTrainingResource(service)
        model_id = created.model_id
        passed = await training.forward_backward(
            request=types.ForwardBackwardRequest(
                forward_backward_input=work, model_id=model_id, seq_id=1
            )
        )
        await training.optim_step(
            request=types.OptimStepRequest(
                optim_params=types.AdamParams(), model_id=model_id, seq_id=2
            )
        )
        saved = await AsyncWeightsResource(service).save(
            request=types.SaveWeightsRequest(model_id=model_id, path="end", seq_id=3)
        )
        info = await AsyncModelsResource(service).get_info(
            request=types.GetInfoRequest(model_id=model_id)
        )
        return await finished(service, passed), await finished(service, saved), info

    passed, saved, info = asyncio.run(program())

    assert passed.metrics["loss:sum"] > 0
    assert saved.path.endswith("/weights/end")
    assert info.model_data.model_name == "fake/model"
    assert [kind for _, _, kind in fake.ran] == ["forward_backward", "optim_step", "save_weights"]


def test_t6_a_low_level_sample_takes_any_of_the_three_modes(fake, service):
    training = service.create_lora_training_client("fake/model")
    path = training.save_weights_for_sampler("named").result(5).path
    sampler = service.create_sampling_client(base_model="fake/model")
    modes = [
        {"sampling_session_id": sampler._sampling_session_id, "seq_id": 0},
        {"base_model": "fake/model"},
        {"model_path": path},
    ]

    async def sample(mode):
        request = types.SampleRequest(
            prompt=PROMPT, sampling_params=types.SamplingParams(max_tokens=3), **mode
        )
        promised = await AsyncSamplingResource(service).asample(request=request)
        answer = await AsyncFuturesResource(service).with_raw_response.retrieve(
            request=types.FutureRetrieveRequest(request_id=promised.request_id)
        )
        return promised, await answer.parse(to=types.SampleResponse)

    for mode in modes:
        promised, answer = asyncio.run(sample(mode))
        assert len(promised.sample_sequence_ids) == 1
        assert answer.sequences[0].tokens == [1, 2, 1]
        assert mode.items() <= fake_body(fake).items()


def fake_body(fake):
    return next(seen.json() for seen in reversed(fake.requests) if seen.endpoint == "asample")


def test_a_pending_result_is_try_again_and_a_raw_response_shows_the_status(fake, service):
    async def program():
        futures = AsyncFuturesResource(service)
        request = types.FutureRetrieveRequest(request_id="r-1")
        waiting = {"type": "try_again", "request_id": "r-1", "queue_state": "active"}
        fake.script("retrieve_future", tinkex.testing.Answer(status=408, body=waiting))
        first = await futures.retrieve(request=request)
        fake.script(
            "retrieve_future", tinkex.testing.Answer(status=200, body={"path": "tinker://a"})
        )
        raw = await futures.with_raw_response.retrieve(request=request)
        return first, raw.status_code, await raw.json()

    first, status, body = asyncio.run(program())

    assert first.type == "try_again"
    assert (status, body) == (200, {"path": "tinker://a"})


def test_an_error_status_raises_the_clients_error_and_max_retries_0_sends_once(fake, service):
    fake.script("telemetry", tinkex.testing.Answer(status=403, body={"detail": "no"}))
    fake.script("session_heartbeat", tinkex.testing.Answer(status=503))
    batch = types.TelemetrySendRequest(
        events=[], platform="test", sdk_version="0.36.0", session_id="s-1", process_uuid="u"
    )
    with pytest.raises(tinkex.PermissionDeniedError):
        asyncio.run(AsyncTelemetryResource(service).send(request=batch))
    with pytest.raises(tinkex.InternalServerError):
        asyncio.run(
            AsyncServiceResource(service).session_heartbeat(session_id="s-1", max_retries=0)
        )


def test_a_timeout_is_what_it_is_in_httpx():
    whole = tinkex.Timeout(60, connect=5)
    assert whole == tinkex.Timeout(connect=5, read=60, write=60, pool=60)
    assert whole == tinkex.Timeout((5, 60, 60, 60)) == tinkex.Timeout(whole)
    assert (whole.connect, whole.read) == (5, 60)
    assert repr(whole) == "Timeout(connect=5, read=60, write=60, pool=60)"
    assert repr(tinkex.Timeout(None)) == "Timeout(timeout=None)"
    assert len({whole, tinkex.Timeout(60, connect=5)}) == 1
    with pytest.raises(ValueError, match="lacks read, write, pool"):
        tinkex.Timeout(connect=1)


def test_a_plain_future_is_made_awaitable_and_promises_count_as_one(service):
    plain: concurrent.futures.Future[int] = concurrent.futures.Future()
    wrapped = AwaitableConcurrentFuture(plain)

    async def impatient():
        with pytest.raises(TimeoutError):
            await wrapped.result_async(timeout=0.01)
        plain.set_result(3)
        return await wrapped, await wrapped.result_async()

    assert asyncio.run(impatient()) == (3, 3)
    assert wrapped.result() == wrapped.future().result() == 3
    assert isinstance(wrapped, tinkex.APIFuture)
    assert isinstance(service.close("success"), AwaitableConcurrentFuture)
