"""User code that must type-check; never run."""

import concurrent.futures
from typing import assert_type

import tinkex
from tinkex import types
from tinkex.client.futures import Promise


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
