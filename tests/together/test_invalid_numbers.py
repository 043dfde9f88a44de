"""Invalid numbers in requests give clear errors and do not affect the model."""

import json
import math
import urllib.error
import urllib.request
from typing import Any

import pytest

import tinkex
from serving import TINY, Server
from tinkex import types


def datum() -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints([1, 2, 3]),
        loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [1.0] * 3},
    )


def test_a_learning_rate_beyond_float32_is_a_user_error(server: Server) -> None:
    with tinkex.ServiceClient(base_url=server.url) as service:
        training = service.create_lora_training_client(TINY, rank=4, seed=1)
        before = training.forward([datum()], "cross_entropy").result().loss_fn_outputs
        for rate in (1e308, 1e38):
            training.forward_backward([datum()], "cross_entropy").result()
            with pytest.raises(tinkex.RequestFailedError, match="learning_rate") as caught:
                training.optim_step(types.AdamParams(learning_rate=rate)).result()
            assert caught.value.category == types.RequestErrorCategory.User
        after = training.forward([datum()], "cross_entropy").result().loss_fn_outputs
        assert after == before


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_a_number_is_not_sent(server: Server, number: float) -> None:
    with tinkex.ServiceClient(base_url=server.url) as service:
        training = service.create_lora_training_client(TINY, rank=4, seed=1)
        with pytest.raises(ValueError, match=r"loss_fn_config\.beta"):
            training.forward_backward([datum()], "dro", {"beta": number})
        params = types.AdamParams().model_copy(update={"learning_rate": number})
        with pytest.raises(ValueError, match=r"adam_params\.learning_rate"):
            training.optim_step(params).result()
        # The step number is reused, so the next step does not wait for it.
        training.forward_backward([datum()], "cross_entropy").result()
        training.optim_step(types.AdamParams()).result()


@pytest.mark.parametrize("temperature", [1e-300, 5e-324])
def test_a_tiny_temperature_is_greedy(server: Server, temperature: float) -> None:
    with tinkex.ServiceClient(base_url=server.url) as service:
        sampling = service.create_sampling_client(base_model=TINY)
        found = []
        for one in (temperature, 0.0):
            params = types.SamplingParams(max_tokens=3, temperature=one, stop=[])
            answer = sampling.sample(types.ModelInput.from_ints([1, 2, 3]), 1, params).result()
            found.append((answer.sequences[0].tokens, answer.sequences[0].logprobs))
        assert found[0] == found[1]
        assert all(math.isfinite(number) for number in found[0][1])


def post(server: Server, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    data = json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{server.url}/api/v1/{path}", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as got:
            return got.status, json.load(got)
    except urllib.error.HTTPError as refused:
        return refused.code, json.load(refused)


@pytest.mark.parametrize("shape", [[0, 2147483647, 2147483647], [2147483647, 0, 2147483647]])
def test_a_tensor_with_an_impossible_shape_is_rejected_by_name(
    server: Server, shape: list[int]
) -> None:
    with tinkex.ServiceClient(base_url=server.url) as service:
        training = service.create_lora_training_client(TINY, rank=4, seed=1)
        weights = {"data": [], "dtype": "float32", "shape": shape}
        example = {
            "model_input": {"chunks": [{"type": "encoded_text", "tokens": [1]}]},
            "loss_fn_inputs": {
                "target_tokens": {"data": [1], "dtype": "int64"},
                "weights": weights,
            },
        }
        work = {"data": [example], "loss_fn": "cross_entropy"}
        body = {"forward_backward_input": work, "model_id": training.model_id, "seq_id": 1}
        status, answer = post(server, "forward_backward", body)
        assert status == 422
        assert answer["detail"][0]["loc"][-3:] == ["loss_fn_inputs", "weights", "shape"]
        training.forward_backward([datum()], "cross_entropy").result()
