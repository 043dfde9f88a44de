"""T1, T2, T13, T15: passes, losses, steps."""

from typing import get_args

import pytest
from pydantic import ValidationError

from tinkex.types import (
    AdamParams,
    CreateModelRequest,
    Datum,
    DimuonOptimizerConfig,
    DimuonParams,
    ForwardBackwardInput,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    LoraConfig,
    LossFnType,
    ModelInput,
    OptimParamsBase,
    OptimStepRequest,
    SaveWeightsRequest,
    TensorData,
)
from tinkex.wire.codec import decode_json, encode_json

DATUM = Datum(ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3], "weights": [1.0, 1.0]})


def test_t1_the_loss_is_a_metric_and_there_is_no_field_for_it():
    output = ForwardBackwardOutput(
        loss_fn_output_type="ArrayRecord",
        loss_fn_outputs=[{"logprobs": TensorData(data=[-0.5], dtype="float32")}],
        metrics={"loss:sum": 0.5},
    )

    assert list(output.model_dump()) == ["loss_fn_output_type", "loss_fn_outputs", "metrics"]
    assert not hasattr(output, "loss")
    with pytest.raises(TypeError, match="unknown field `loss`"):
        ForwardBackwardOutput("ArrayRecord", [], {}, loss=0.5)


def test_t2_all_losses_of_the_newest_client_and_the_three_oldest_are_known():
    assert get_args(LossFnType) == (
        "cross_entropy",
        "importance_sampling",
        "ppo",
        "cispo",
        "dro",
        "gspo",
        "stable_reinforce",
        "custom",
    )
    for loss in get_args(LossFnType):
        assert ForwardBackwardInput([DATUM], loss).loss_fn == loss


@pytest.mark.parametrize("loss", ["cross_entrop", "my.module:loss", "", None, len])
def test_t2_a_loss_is_a_name_from_a_closed_set(loss):
    with pytest.raises(ValueError, match="unknown loss"):
        ForwardBackwardInput([DATUM], loss)


def test_t2_the_nearest_loss_is_named():
    with pytest.raises(ValueError, match="did you mean `cross_entropy`"):
        ForwardBackwardInput([DATUM], "cross_entrpy")


def test_another_loss_is_not_suggested_for_one_that_does_not_exist():
    with pytest.raises(ValueError, match="unknown loss `dpo`") as caught:
        ForwardBackwardInput([DATUM], "dpo")
    text = str(caught.value)
    assert "did you mean" not in text
    assert "cross_entropy, importance_sampling, ppo, cispo, dro, gspo, stable_reinforce" in text
    assert "forward_backward_custom" in text


@pytest.mark.parametrize(
    "request_type", [ForwardBackwardRequest, OptimStepRequest, SaveWeightsRequest]
)
def test_t13_the_step_number_is_optional_in_the_schema(request_type):
    arguments = {
        ForwardBackwardRequest: {
            "forward_backward_input": ForwardBackwardInput([DATUM], "cross_entropy")
        },
        OptimStepRequest: {"optim_params": AdamParams()},
        SaveWeightsRequest: {},
    }[request_type]

    request = request_type(model_id="m", **arguments)

    assert request.seq_id is None
    assert b"seq_id" not in encode_json(request)
    assert b'"seq_id":7' in encode_json(request.model_copy(update={"seq_id": 7}))


def test_t15_adam_defaults_are_the_services():
    assert AdamParams().model_dump() == {
        "learning_rate": 1e-4,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-12,
        "weight_decay": 0.0,
        "grad_clip_norm": 0.0,
    }


def test_t15_what_an_old_client_leaves_out_gets_the_same_defaults():
    body = b'{"adam_params":{"learning_rate":0.5},"model_id":"m","seq_id":2}'

    request = decode_json(OptimStepRequest, body)

    assert request.optim_params == AdamParams(learning_rate=0.5)


def test_an_adam_step_is_sent_as_adam_params_and_any_other_as_optimizer_params():
    adam = OptimStepRequest(adam_params=AdamParams(), model_id="m")
    dimuon = OptimStepRequest(optim_params=DimuonParams(learning_rate=0.1), model_id="m")

    assert adam.optim_params == AdamParams()
    assert "adam_params" in adam.model_dump()
    assert dimuon.model_dump()["optimizer_params"]["type"] == "dimuon"
    for request in (adam, dimuon):
        assert decode_json(OptimStepRequest, encode_json(request)) == request


def test_an_unknown_optimizer_is_passed_on_with_its_fields():
    body = b'{"optimizer_params":{"type":"lion","gamma":2},"model_id":"m"}'

    params = decode_json(OptimStepRequest, body).optim_params

    assert isinstance(params, OptimParamsBase)
    assert params.model_dump() == {"type": "lion", "gamma": 2}


@pytest.mark.parametrize("rate", [-1.0, float("nan"), float("inf")])
def test_a_dimuon_learning_rate_is_finite_and_not_negative(rate):
    with pytest.raises(ValidationError):
        DimuonParams(learning_rate=rate)


def test_optimizer_configs_are_selected_by_their_tag():
    fields = {"session_id": "s", "model_seq_id": 0, "base_model": "b", "lora_config": {"rank": 8}}

    default = CreateModelRequest(**fields)
    dimuon = CreateModelRequest(**fields, optimizer_config={"type": "dimuon", "version": 1})
    other = CreateModelRequest(**fields, optimizer_config={"type": "lion", "gamma": 2})

    assert default.optimizer_config.type == "adamw"
    assert dimuon.optimizer_config == DimuonOptimizerConfig()
    assert other.model_dump()["optimizer_config"] == {"type": "lion", "gamma": 2}
    assert default.lora_config == LoraConfig(
        rank=8, seed=None, train_unembed=True, train_mlp=True, train_attn=True
    )


def test_examples_given_as_dicts_say_where_they_are_wrong():
    with pytest.raises(ValueError, match=r"data\[1\]\.model_input\.chunks\[0\]\.tokens"):
        ForwardBackwardInput(
            [DATUM, {"model_input": {"chunks": [{"tokens": ["x"]}]}}], "cross_entropy"
        )
