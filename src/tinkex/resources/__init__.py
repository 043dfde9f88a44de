"""The single-endpoint classes of the official client, under its import paths."""

from __future__ import annotations

from tinkex.compat.resources import (
    AsyncFuturesResource,
    AsyncFuturesResourceWithRawResponse,
    AsyncModelsResource,
    AsyncSamplingResource,
    AsyncServiceResource,
    AsyncTelemetryResource,
    AsyncTelemetryResourceWithRawResponse,
    AsyncTrainingResource,
    AsyncWeightsResource,
)
from tinkex.compat.submodule_aliases import aliases as _aliases

__all__ = [
    "AsyncFuturesResource",
    "AsyncFuturesResourceWithRawResponse",
    "AsyncModelsResource",
    "AsyncSamplingResource",
    "AsyncServiceResource",
    "AsyncTelemetryResource",
    "AsyncTelemetryResourceWithRawResponse",
    "AsyncTrainingResource",
    "AsyncWeightsResource",
]

__path__.append(_aliases(__name__, "futures models sampling service telemetry training weights"))
