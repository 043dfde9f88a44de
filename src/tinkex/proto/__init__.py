"""Encoding and decoding of protobuf bodies, under the import paths of the official client."""

from __future__ import annotations

from tinkex.compat.protobuf import (
    DmelChunk,
    EncodedTextChunk,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    ImageChunk,
    PromptAltTokens,
    PromptProvenanceSpan,
    SampledProvenanceSpan,
    SampledSequence,
    SampleResponse,
    TensorData,
    TopkLogprobs,
    deserialize_forward_backward_output,
    deserialize_proto_response,
    deserialize_sample_response,
    forward_backward_request_to_proto,
)
from tinkex.compat.submodule_aliases import aliases as _aliases

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

__path__.append(_aliases(__name__, "request_conv response_conv"))
