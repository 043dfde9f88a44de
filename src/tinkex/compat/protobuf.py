"""Encoding and decoding of protobuf bodies, under the names of the official client."""

from __future__ import annotations

from typing import Any

from tinkex.wire.inputs import PromptProvenanceSpan, SampledProvenanceSpan
from tinkex.wire.prompt_chunks import DmelChunk, EncodedTextChunk, ImageChunk
from tinkex.wire.proto import tinkex_wire_pb2 as _pb
from tinkex.wire.protobuf import (
    decode_forward_backward_output,
    decode_sample_response,
    encode_forward_backward_request,
)
from tinkex.wire.sampling import PromptAltTokens, SampledSequence, SampleResponse, TopkLogprobs
from tinkex.wire.tensors import TensorData
from tinkex.wire.training import ForwardBackwardOutput, ForwardBackwardRequest

__all__ = [
    "DmelChunk",
    "EncodedTextChunk",
    "ForwardBackwardOutput",
    "ForwardBackwardRequest",
    "ImageChunk",
    "PromptAltTokens",
    "PromptProvenanceSpan",
    "SampleResponse",
    "SampledProvenanceSpan",
    "SampledSequence",
    "TensorData",
    "TopkLogprobs",
    "deserialize_forward_backward_output",
    "deserialize_proto_response",
    "deserialize_sample_response",
    "forward_backward_request_to_proto",
]


def forward_backward_request_to_proto(
    request: ForwardBackwardRequest,
) -> _pb.ForwardBackwardRequest:
    return _pb.ForwardBackwardRequest.FromString(encode_forward_backward_request(request))


def deserialize_forward_backward_output(proto_bytes: bytes) -> ForwardBackwardOutput:
    return decode_forward_backward_output(proto_bytes)


def deserialize_sample_response(proto_bytes: bytes) -> SampleResponse:
    return decode_sample_response(proto_bytes)


def deserialize_proto_response(proto_bytes: bytes, model_cls: type) -> Any:
    readers: dict[type, Any] = {
        ForwardBackwardOutput: decode_forward_backward_output,
        SampleResponse: decode_sample_response,
    }
    if model_cls not in readers:
        names = " and ".join(known.__name__ for known in readers)
        raise TypeError(f"{model_cls.__name__} has no protobuf form; {names} have one.")
    return readers[model_cls](proto_bytes)
