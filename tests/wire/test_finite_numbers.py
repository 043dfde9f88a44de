"""
NaN and infinity: rejected by the types of requests, and by the decoder right after parsing.

The tests check every wire type, so a new float field without the rule fails here. Responses may
contain them.
"""

import dataclasses
import importlib
import json
import math
import pkgutil
import typing
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

import tinkex.wire
from tinkex.wire.base import LenientModel, Payload, StrictModel
from tinkex.wire.codec import (
    _STRICT_PARTS,
    decode_forward_json,
    decode_json,
    encode_json,
)
from tinkex.wire.custom_loss import CreateCustomLossRequest
from tinkex.wire.errors import WireError
from tinkex.wire.inputs import Datum, ModelInput
from tinkex.wire.protobuf import decode_forward_backward_request, encode_forward_backward_request
from tinkex.wire.sampling import SampleRequest, SamplingParams
from tinkex.wire.training import (
    AdamParams,
    CreateModelRequest,
    DimuonParams,
    ForwardBackwardInput,
    ForwardBackwardRequest,
    LoraConfig,
    OptimStepRequest,
)

BAD = [math.nan, math.inf, -math.inf]

#: Floats that may be NaN or infinite, because they are sent as protobuf, which has both.
MAY_BE_ANYTHING = {
    ("ForwardBackwardOutput", "metrics"): "the loss of a pass may be NaN; JSON is refused one",
    ("TopkLogprobs", "logprobs"): "a token may be impossible",
    ("SampledSequence", "logprobs_np"): "a token may be impossible",
    ("SampleResponse", "prompt_logprobs_np"): "NaN stands where there is none",
    ("SampledTokens", "logprobs"): "NaN where the service records none",
}


def wire_types() -> list[type]:
    for found in pkgutil.walk_packages(tinkex.wire.__path__, "tinkex.wire."):
        importlib.import_module(found.name)
    types: dict[str, type] = {}

    def gather(base: type) -> None:
        for one in base.__subclasses__():
            if one.__module__.startswith("tinkex.wire."):
                types[one.__qualname__] = one
            gather(one)

    for base in (StrictModel, LenientModel, Payload):
        gather(base)
    return [types[name] for name in sorted(types)]


def holds(annotation: Any, target: Any) -> bool:
    """Whether a value of this type may be, or directly contain, a `target`."""
    if annotation is target:
        return True
    return any(holds(part, target) for part in typing.get_args(annotation))


def around(annotation: Any, number: float) -> Any:
    """A value of this type with the number in it, or the number itself."""
    for part in (annotation, *typing.get_args(annotation)):
        origin = typing.get_origin(part)
        if isinstance(origin, type) and issubclass(origin, dict):
            return {"key": number}
        if isinstance(origin, type) and issubclass(origin, (list, tuple)):
            return [number]
    return number


def named_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in typing.get_args(annotation):
        yield from named_in(part)


def request_types() -> list[type[BaseModel]]:
    """All types that are sent: requests, and the types of their fields."""
    found: dict[type[BaseModel], None] = {}
    left: list[type[BaseModel]] = [one for one in wire_types() if issubclass(one, StrictModel)]
    while left:
        one = left.pop()
        if one not in found:
            found[one] = None
            left.extend(one.__subclasses__())
            for field in one.model_fields.values():
                left.extend(named_in(field.annotation))
    return sorted(found, key=lambda one: one.__name__)


def answer_types() -> list[type[BaseModel]]:
    sent = request_types()
    return [one for one in wire_types() if issubclass(one, LenientModel) and one not in sent]


def floats_of(models: list[type[BaseModel]]) -> list[tuple[type[BaseModel], str, Any]]:
    return [
        (one, name, field.annotation)
        for one in models
        for name, field in one.model_fields.items()
        if holds(field.annotation, float)
    ]


@pytest.mark.parametrize("number", BAD)
@pytest.mark.parametrize(
    ("model", "name", "annotation"),
    floats_of(answer_types()),
    ids=lambda p: getattr(p, "__name__", str(p)),
)
def test_a_float_of_a_response_may_be_anything(
    model: type[BaseModel], name: str, annotation: Any, number: float
) -> None:
    """A response reports something that happened: rejecting it for a NaN would hide that."""
    refused = []
    try:
        model.model_validate({name: around(annotation, number)})
    except ValidationError as error:  # other fields are missing
        refused = [each for each in error.errors() if each["loc"][0] == name]
    assert not refused


@pytest.mark.parametrize("number", BAD)
@pytest.mark.parametrize(
    ("model", "name", "annotation"),
    floats_of(request_types()),
    ids=lambda p: getattr(p, "__name__", str(p)),
)
def test_every_float_of_every_request_is_finite(
    model: type[BaseModel], name: str, annotation: Any, number: float
) -> None:
    with pytest.raises(ValidationError) as caught:
        model.model_validate({name: around(annotation, number)})

    found = [error for error in caught.value.errors() if error["loc"][0] == name]
    assert found
    assert {error["type"] for error in found} == {"finite_number"}


def test_the_search_finds_the_float_fields() -> None:
    found = {(model.__name__, name) for model, name, _ in floats_of(request_types())}

    assert {("AdamParams", field) for field in AdamParams.model_fields} <= found
    assert {("SamplingParams", "temperature"), ("SamplingParams", "top_p")} <= found
    assert {("DimuonParams", "learning_rate"), ("FuturesRetrieveRequest", "timeout")} <= found
    answers = {(model.__name__, name) for model, name, _ in floats_of(answer_types())}
    assert ("OptimStepResponse", "metrics") in answers


def test_optimizers_of_other_versions_are_requests_too() -> None:
    """They accept any field, like responses, but their floats are finite."""
    open_ended = [one for one in request_types() if one.model_config.get("extra") == "allow"]

    assert {one.__name__ for one in open_ended} >= {"OptimizerConfigBase", "OptimParamsBase"}
    assert all(one.model_config.get("allow_inf_nan") is False for one in open_ended)


def test_every_other_type_with_floats_is_known_here() -> None:
    found = set()
    for one in wire_types():
        if dataclasses.is_dataclass(one) and issubclass(one, Payload):
            for field in dataclasses.fields(one):
                text = str(field.type)
                if "float" in text and not field.name.startswith("_"):
                    found.add((one.__name__, field.name))
    found.discard(("TensorData", "dtype"))

    assert found - MAY_BE_ANYTHING.keys() == {("ForwardBackwardInput", "loss_fn_config")}


# -- what is sent --------------------------------------------------------------------------------


@pytest.mark.parametrize("number", BAD)
def test_a_number_that_bypassed_the_constructor_is_not_sent_as_null(number: float) -> None:
    params = SamplingParams().model_copy(update={"temperature": number})
    request = SampleRequest(prompt=ModelInput.from_ints([1]), sampling_params=SamplingParams())
    request = request.model_copy(update={"sampling_params": params})

    with pytest.raises(ValueError, match=r"SampleRequest .*sampling_params\.temperature"):
        encode_json(request)


@pytest.mark.parametrize("number", BAD)
def test_a_number_in_a_field_of_any_type_is_not_sent_as_null(number: float) -> None:
    request = CreateModelRequest(
        session_id="s",
        model_seq_id=0,
        base_model="b",
        lora_config=LoraConfig(rank=1),
        user_metadata={"deep": [{"x": number}]},
    )

    with pytest.raises(ValueError, match=r"user_metadata\.deep\[0\]\.x"):
        encode_json(request)


@pytest.mark.parametrize("number", BAD)
def test_a_setting_of_a_loss_is_finite(number: float) -> None:
    with pytest.raises(ValueError, match=r"loss_fn_config\.beta"):
        ForwardBackwardInput(data=[], loss_fn="dro", loss_fn_config={"beta": number})


# -- what is read --------------------------------------------------------------------------------


def optim_step(**params: Any) -> bytes:
    return json.dumps({"adam_params": params, "model_id": "m", "seq_id": 1}).encode()


def too_large(body: bytes) -> bytes:
    """A number that overflows to infinity, in JSON syntax."""
    return body.replace(b"-Infinity", b"-1e309").replace(b"Infinity", b"1E+400")


@pytest.mark.parametrize("name", AdamParams.model_fields)
@pytest.mark.parametrize("number", [math.inf, -math.inf])
def test_an_optimizer_setting_too_large_for_a_number_is_refused_by_name(
    name: str, number: float
) -> None:
    with pytest.raises(WireError, match=rf"adam_params\.{name}: -?inf is not a finite number"):
        decode_json(OptimStepRequest, too_large(optim_step(**{name: number})))


@pytest.mark.parametrize("name", AdamParams.model_fields)
def test_an_optimizer_setting_that_is_null_is_refused_by_name(name: str) -> None:
    """The official client writes null for a learning rate that is NaN."""
    with pytest.raises(WireError, match=rf"adam_params\.{name}: null is not a number"):
        decode_json(OptimStepRequest, optim_step(**{name: None}))


@pytest.mark.parametrize("name", ["learning_rate", "beta1", "grad_clip_norm"])
def test_a_setting_of_another_optimizer_that_is_null_is_refused_too(name: str) -> None:
    params = {"type": "dimuon", "learning_rate": 0.1, name: None}
    body = {"optimizer_params": params, "model_id": "m", "seq_id": 1}

    with pytest.raises(WireError, match=rf"optimizer_params\.{name}: null is not a number"):
        decode_json(OptimStepRequest, json.dumps(body).encode())


def sample(**params: Any) -> bytes:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
    return json.dumps({"prompt": prompt, "sampling_params": params, "base_model": "b"}).encode()


@pytest.mark.parametrize("name", ["temperature", "top_p"])
@pytest.mark.parametrize("number", [math.inf, -math.inf])
def test_a_sampling_setting_too_large_for_a_number_is_refused_by_name(
    name: str, number: float
) -> None:
    with pytest.raises(WireError, match=rf"sampling_params\.{name}: -?inf is not a finite number"):
        decode_json(SampleRequest, too_large(sample(**{name: number})))


@pytest.mark.parametrize("name", ["temperature", "top_p", "top_k"])
def test_a_sampling_setting_that_is_null_is_refused_by_name(name: str) -> None:
    with pytest.raises(WireError, match=rf"sampling_params\.{name}: null is not a number"):
        decode_json(SampleRequest, sample(**{name: None}))


def test_null_means_absent_where_the_protocol_allows_it() -> None:
    """SDKs before 0.18 send null for fields that are None."""
    read = decode_json(SampleRequest, sample(max_tokens=None, seed=None, stop=None))

    assert read.sampling_params == SamplingParams()
    body = {"session_id": "s", "model_seq_id": 0, "base_model": "b", "user_metadata": None}
    body["lora_config"] = {"rank": 8, "seed": None, "train_mlp": None}
    made = decode_json(CreateModelRequest, json.dumps(body).encode())
    assert made.lora_config == LoraConfig(rank=8)


def test_every_part_with_settings_has_the_rule_for_null() -> None:
    """Covers every part in the table, so that new number fields reject null too."""
    for message, parts in _STRICT_PARTS.items():
        for key, kinds in parts.items():
            tagged = kinds if isinstance(kinds, dict) else {None: kinds}
            for tag, part in tagged.items():
                for name, field in part.model_fields.items():
                    if field.annotation not in (float, int):
                        continue
                    body = {key: {name: None} | ({} if tag is None else {"type": tag})}
                    with pytest.raises(WireError, match=rf"{key}\.{name}: null is not a number"):
                        decode_json(message, json.dumps(body).encode())


@pytest.mark.parametrize(
    "message",
    [one for one in wire_types() if issubclass(one, StrictModel)],
    ids=lambda t: t.__name__,
)
def test_a_number_too_large_is_refused_anywhere_in_any_request(message: type) -> None:
    """Also in fields of any type, such as metadata and the graph of a loss."""
    for name, field in message.model_fields.items():
        if holds(field.annotation, Any):
            body = too_large(json.dumps({name: {"deep": [math.inf]}}).encode())
            with pytest.raises(WireError, match=rf"{name}\.deep\[0\]: inf is not a finite number"):
                decode_json(message, body)


def test_a_number_too_large_in_the_graph_of_a_loss_is_refused() -> None:
    node = {"op": "call_function", "name": "x", "target": "operator.mul", "args": [math.inf]}
    body = {"graph": {"nodes": [node]}}

    with pytest.raises(WireError, match=r"graph\.nodes\[0\]\.args\[0\]: inf is not a finite"):
        decode_json(CreateCustomLossRequest, too_large(json.dumps(body).encode()))


@pytest.mark.parametrize("key", ["forward_input", "forward_backward_input"])
def test_a_number_too_large_in_a_tensor_of_json_is_refused(key: str) -> None:
    weights = {"data": [1.0, math.inf], "dtype": "float32"}
    datum = {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
        "loss_fn_inputs": {"weights": weights},
    }
    body = {"model_id": "m", "seq_id": 1, key: {"data": [datum], "loss_fn": "cross_entropy"}}

    with pytest.raises(WireError, match=rf"{key}\.data\[0\]\.loss_fn_inputs\.weights\.data\[1\]"):
        decode_forward_json(too_large(json.dumps(body).encode()))


def a_pass(weights: list[float], config: dict[str, float] | None) -> bytes:
    datum = Datum(
        model_input=ModelInput.from_ints([1, 2]),
        loss_fn_inputs={"target_tokens": [1, 2], "weights": weights},
    )
    work = ForwardBackwardInput._of([datum], "dro", config)
    return encode_forward_backward_request(ForwardBackwardRequest(work, "m", 1))


@pytest.mark.parametrize("number", BAD)
def test_a_setting_of_a_loss_in_protobuf_is_finite(number: float) -> None:
    with pytest.raises(WireError, match=r"loss_fn_config\.beta"):
        decode_forward_backward_request(a_pass([1.0, 1.0], {"beta": number}))


def test_tensors_in_protobuf_may_hold_nan_and_infinity() -> None:
    """The loss decides what NaN means; the losses of the server reject it by name."""
    read, _ = decode_forward_backward_request(a_pass([math.nan, -math.inf], None))

    [datum] = read.forward_backward_input.data
    assert str(datum.loss_fn_inputs["weights"].tolist()) == "[nan, -inf]"


def test_whole_numbers_too_large_for_a_float_are_refused() -> None:
    body = optim_step(learning_rate=0.5).replace(b"0.5", b"1" + b"0" * 400)

    with pytest.raises(WireError, match=r"adam_params\.learning_rate"):
        decode_json(OptimStepRequest, body)


def test_parameters_given_by_hand_are_refused_before_they_are_sent() -> None:
    for number in BAD:
        with pytest.raises(ValidationError, match="learning_rate"):
            AdamParams(learning_rate=number)
        with pytest.raises(ValidationError, match="learning_rate"):
            DimuonParams(learning_rate=number)
        with pytest.raises(ValidationError, match="temperature"):
            SamplingParams(temperature=number)
