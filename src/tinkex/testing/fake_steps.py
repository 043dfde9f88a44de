"""Training steps of the fake: decodes a request into a function that runs the step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tinkex.testing.fake_store import FakeStore, Model
from tinkex.testing.toy_model import toy_pass
from tinkex.wire.checkpoints import (
    LoadWeightsRequest,
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
)
from tinkex.wire.codec import PROTOBUF_TYPE, decode_forward_json, decode_json
from tinkex.wire.errors import UserFailure
from tinkex.wire.protobuf import decode_forward_backward_request, encode_forward_backward_output
from tinkex.wire.training import OptimStepRequest

#: JSON form of a result, and its protobuf form if it has one.
Result = tuple[Any, bytes | None]
#: model_id, seq_id, kind, and the function that runs the step.
Step = tuple[str, int | None, str, Callable[[Model], Result]]


def _pass(store: FakeStore, headers: Mapping[str, str], body: bytes) -> Step:
    if headers.get("content-type") == PROTOBUF_TYPE:
        request, forward_only = decode_forward_backward_request(body)
    else:
        request, forward_only = decode_forward_json(body)

    def run(model: Model) -> Result:
        output = toy_pass(request.forward_backward_input, model.steps)
        if not forward_only:
            tokens = sum(len(each["logprobs"].data) for each in output.loss_fn_outputs)
            model.passes.append((output.metrics["loss:sum"], tokens))
        return output.model_dump(), encode_forward_backward_output(output)

    name = "forward" if forward_only else "forward_backward"
    return request.model_id, request.seq_id, name, run


def _optim_step(store: FakeStore, headers: Mapping[str, str], body: bytes) -> Step:
    request = decode_json(OptimStepRequest, body)

    def run(model: Model) -> Result:
        model.steps += 1
        model.finish_step(getattr(request.optim_params, "learning_rate", 0.0))
        return {"metrics": {"grad_norm:mean": 1.0}}, None

    return request.model_id, request.seq_id, "optim_step", run


def _save_weights(store: FakeStore, headers: Mapping[str, str], body: bytes) -> Step:
    request = decode_json(SaveWeightsRequest, body)

    def run(model: Model) -> Result:
        path = store.save(
            request.model_id,
            "weights",
            request.path,
            model,
            ttl_s=request.ttl_seconds,
            overwrite=request.overwrite,
        )
        return {"path": path}, None

    return request.model_id, request.seq_id, "save_weights", run


def _save_for_sampler(store: FakeStore, headers: Mapping[str, str], body: bytes) -> Step:
    request = decode_json(SaveWeightsForSamplerRequest, body)

    def run(model: Model) -> Result:
        kind, ttl_s = "sampler_weights", request.ttl_seconds
        path = store.save(request.model_id, kind, request.path, model, ttl_s=ttl_s)
        if request.path is not None:
            return {"path": path}, None
        session_id = request.model_id.partition(":")[0]
        sampler = f"{session_id}:sample:{request.sampling_session_seq_id}"
        return store.open_sampler(sampler, None, path), None

    return request.model_id, request.seq_id, "save_weights_for_sampler", run


def _save_external(store: FakeStore, headers: Mapping[str, str], body: bytes) -> Step:
    request = decode_json(SaveWeightsExternalRequest, body)

    def run(model: Model) -> Result:
        kind, ttl_s = "external_weights", request.ttl_seconds
        path = store.save(request.model_id, kind, request.path, model, ttl_s=ttl_s)
        return {"path": path}, None

    return request.model_id, request.seq_id, "save_weights_external", run


def _load_weights(store: FakeStore, headers: Mapping[str, str], body: bytes) -> Step:
    request = decode_json(LoadWeightsRequest, body)

    def run(model: Model) -> Result:
        if (saved := store.checkpoints.get(request.path)) is None:
            raise UserFailure(f"there is no checkpoint {request.path!r}")
        model.steps = saved.steps
        return {"path": request.path}, None

    return request.model_id or "", request.seq_id, "load_weights", run


#: Decoders of steps, by endpoint.
STEPS: dict[str, Callable[[FakeStore, Mapping[str, str], bytes], Step]] = {
    "forward_backward": _pass,
    "forward": _pass,
    "optim_step": _optim_step,
    "save_weights": _save_weights,
    "save_weights_for_sampler": _save_for_sampler,
    "save_weights_external": _save_external,
    "load_weights": _load_weights,
}
