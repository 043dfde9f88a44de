"""User code that must type-check; never run."""

import asyncio
import concurrent.futures
from typing import assert_type

import tinkex
from tinkex import types
from tinkex.client.futures import Promise
from tinkex.lib import public_interfaces, retry_handler


def datum(tokens: list[int]) -> types.Datum:
    made = types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
    )
    assert_type(made.loss_fn_inputs["weights"], types.TensorData)
    return made


def train(service: tinkex.ServiceClient, data: list[types.Datum]) -> float:
    training = service.create_lora_training_client("base", rank=8, seed=1, train_mlp=False)
    assert_type(training, tinkex.TrainingClient)
    passed = training.forward_backward(data, "cross_entropy")
    training.forward(data, "ppo", {"clip_low_threshold": 0.8})
    stepped = training.optim_step(types.AdamParams(learning_rate=1e-4))
    assert_type(stepped.result(timeout=3.0), types.OptimStepResponse)
    future: tinkex.APIFuture[types.ForwardBackwardOutput] = passed
    return future.result().metrics["loss:sum"]


async def train_async(service: tinkex.ServiceClient, data: list[types.Datum]) -> str:
    training = await service.create_lora_training_client_async("base", rank=8)
    assert_type(training, tinkex.TrainingClient)
    passed = await training.forward_backward_async(data, loss_fn="importance_sampling")
    assert_type(passed, Promise[types.ForwardBackwardOutput])
    assert_type(await passed, types.ForwardBackwardOutput)
    assert_type(await passed.result_async(timeout=1), types.ForwardBackwardOutput)
    saved = await (await training.save_state_async("name", overwrite=True))
    assert_type(saved, types.SaveWeightsResponse)
    info = await training.get_info_async()
    assert_type(info, types.GetInfoResponse)
    copy = await service.create_training_client_from_state_async(saved.path)
    sampling = await copy.save_weights_and_get_sampling_client_async()
    assert_type(sampling, tinkex.SamplingClient)
    return saved.path


def sample(service: tinkex.ServiceClient) -> list[int]:
    sampling = service.create_sampling_client(
        base_model="base", retry_config=tinkex.RetryConfig(max_connections=5)
    )
    prompt = types.ModelInput.from_ints([1, 2, 3])
    future = sampling.sample(prompt, num_samples=2, sampling_params=types.SamplingParams())
    plain: concurrent.futures.Future[types.SampleResponse] = future
    assert_type(sampling.compute_logprobs(prompt).result(), list[float | None])
    return plain.result().sequences[0].tokens


async def sample_async(sampling: tinkex.SamplingClient) -> types.SampleResponse:
    prompt = types.ModelInput.from_ints([1, 2, 3])
    answer = await sampling.sample_async(prompt, 1, types.SamplingParams(max_tokens=3))
    assert_type(answer, types.SampleResponse)
    assert_type(await sampling.get_base_model_async(), str)
    return answer


def errors() -> None:
    try:
        with tinkex.ServiceClient(base_url="local", user_metadata={"run": "1"}) as service:
            assert_type(service.get_server_capabilities(), types.GetServerCapabilitiesResponse)
            service.close("success", detail="done").result()
    except tinkex.RequestFailedError as error:
        assert_type(error.request_id, str)
        assert_type(error.category, types.RequestErrorCategory)
    except tinkex.APIStatusError as error:
        assert_type(error.status_code, int)


# What must not type-check.
def wrong(training: tinkex.TrainingClient, data: list[types.Datum]) -> None:
    training.forward_backward(data, "cross_entropi")  # type: ignore[arg-type]
    training.optim_step(1e-4)  # type: ignore[arg-type]
    training.save_state()  # type: ignore[call-arg]


def stream(sampling: tinkex.SamplingClient) -> list[float]:
    prompt = types.ModelInput.from_ints([1, 2, 3])
    with sampling.sample_stream(prompt, 1, types.SamplingParams(max_tokens=3)) as stream:
        assert_type(stream, tinkex.SampleStream)
        numbers = [number for event in stream for number in event.logprobs]
    assert_type(stream.response(timeout=1.0), types.SampleResponse)
    return numbers


async def stream_async(stream: tinkex.SampleStream) -> list[int]:
    async for event in stream:
        assert_type(event, tinkex.SampledTokens)
    return (await stream.response_async()).sequences[0].tokens


# -- methods with a blocking and an `_async` form ------------------------------------------------


async def both_forms(
    service: tinkex.ServiceClient, training: tinkex.TrainingClient, sampling: tinkex.SamplingClient
) -> None:
    # `waits` and `awaits`: the value, with the parameters of the definition.
    assert_type(service.create_sampling_client(base_model="base"), tinkex.SamplingClient)
    assert_type(await service.create_sampling_client_async("tinker://a"), tinkex.SamplingClient)
    assert_type(sampling.get_base_model(), str)
    service.create_lora_training_client("base", rang=8)  # type: ignore[call-arg]
    await training.get_info_async("x")  # type: ignore[call-arg]
    # `submits`: a future, which is awaited separately.
    stepped = await training.optim_step_async(types.AdamParams())
    assert_type(stepped, Promise[types.OptimStepResponse])
    assert_type(await stepped, types.OptimStepResponse)
    loaded: tinkex.APIFuture[types.LoadWeightsResponse] = training.load_state("tinker://a")
    assert_type(await loaded, types.LoadWeightsResponse)
    # Futures work with `concurrent.futures` and with `asyncio`.
    concurrent.futures.wait([training.forward([], "cross_entropy")])
    assert_type(
        await asyncio.gather(stepped, loaded),
        tuple[types.OptimStepResponse, types.LoadWeightsResponse],
    )


async def rest(client: tinkex.RestClient, admin: tinkex.AdminClient) -> None:
    assert_type(client.get_training_run("run").result(), types.TrainingRun)
    assert_type(await client.get_training_run_async("run"), types.TrainingRun)
    assert_type(await client.list_checkpoints_async("run"), types.CheckpointsListResponse)
    assert_type(await client.delete_checkpoint("run", "weights/a"), None)
    assert_type(await client.copy_weights_async("tinker://a"), str)
    assert_type(admin.get_audit_log().result(), types.AuditLogResponse)
    client.list_sessions(access_scope="mine")  # type: ignore[arg-type]


async def streams(sampling: tinkex.SamplingClient, prompt: types.ModelInput) -> None:
    stream = sampling.sample_stream(prompt, 1, types.SamplingParams())
    async for event in stream:
        assert_type(event, tinkex.SampledTokens)
    assert_type(stream.response(), types.SampleResponse)


async def single_endpoints(service: tinkex.ServiceClient, request: types.SampleRequest) -> None:
    accepted = await tinkex.resources.AsyncSamplingResource(service).asample(request=request)
    assert_type(accepted, types.UntypedAPIFuture)
    poll = types.FutureRetrieveRequest(request_id=accepted.request_id)
    futures = tinkex.resources.AsyncFuturesResource(service)
    raw = await futures.with_raw_response.retrieve(request=poll)
    assert_type(raw, tinkex.AsyncAPIResponse)
    assert_type(await raw.parse(to=types.SampleResponse), types.SampleResponse)


def options() -> None:
    assert_type(tinkex.Timeout(60, connect=5).connect, float | None)
    made: tinkex.RequestOptions = {"timeout": tinkex.Timeout(5), "max_retries": 3}
    assert_type(made["max_retries"], int)
    wrong: tinkex.RequestOptions = {"retries": 3}  # type: ignore[typeddict-unknown-key]
    del wrong
    tinkex.Timeout("5")  # type: ignore[arg-type]


def official_import_paths() -> None:
    assert_type(public_interfaces.ServiceClient(), tinkex.ServiceClient)
    assert_type(retry_handler.RetryConfig(), tinkex.RetryConfig)
    plain: concurrent.futures.Future[int] = concurrent.futures.Future()
    wrapped = public_interfaces.AwaitableConcurrentFuture(plain)
    assert_type(wrapped.result(), int)


def built() -> None:
    assert_type(types.SampledSequence("stop", "q-1").tokens, list[int])
    tensor = types.TensorData(data=[1], dtype="int64")
    assert_type(tensor, types.TensorData)
    types.TensorData(data=[1], dtype="int32")  # type: ignore[arg-type]
    types.Datum(model_inputs=1)  # type: ignore[call-arg]
