"""
tinkex: a client for the Tinker training API, and a server to run it yourself.

All public names are listed here, and each is loaded when it is first used, so that
`import tinkex` is fast. Names that are not listed may change without notice.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tinkex import auth as auth
    from tinkex import resources as resources
    from tinkex import types
    from tinkex.client.admin import AdminClient
    from tinkex.client.custom_loss import LossHandle, PerDatumLossFn
    from tinkex.client.errors import (
        APIConnectionError,
        APIError,
        APIResponseValidationError,
        APIStatusError,
        APITimeoutError,
        AuthenticationError,
        BadRequestError,
        BillingError,
        ConflictError,
        ExperimentalWarning,
        InternalServerError,
        NotFoundError,
        PermissionDeniedError,
        RateLimitError,
        RequestFailedError,
        TinkerError,
        UnprocessableEntityError,
    )
    from tinkex.client.files.checkpoint_download import (
        download_checkpoint,
        download_checkpoint_async,
    )
    from tinkex.client.futures import APIFuture
    from tinkex.client.http.circuit_breaker import BreakerPolicy, CircuitOpenError
    from tinkex.client.http.retry import RetryConfig
    from tinkex.client.observe.instrumentation import metrics_snapshot, reset_metrics
    from tinkex.client.observe.progress import progress
    from tinkex.client.observe.queue_states import QueueState, on_queue_state
    from tinkex.client.recovery import Recovery, recovering, recovering_async
    from tinkex.client.rest import RestClient
    from tinkex.client.sample_stream import SampleStream
    from tinkex.client.sampling import SamplingClient
    from tinkex.client.service import ServiceClient
    from tinkex.client.settings import Settings
    from tinkex.client.training import TrainingClient
    from tinkex.client.version import __version__
    from tinkex.compat.raw_responses import APIResponse as APIResponse
    from tinkex.compat.raw_responses import AsyncAPIResponse as AsyncAPIResponse
    from tinkex.compat.request_options import RequestOptions, Timeout
    from tinkex.wire.checkpoints import Checkpoint, CheckpointType, ParsedCheckpointTinkerPath
    from tinkex.wire.inputs import (
        Datum,
        DmelChunk,
        EncodedTextChunk,
        ModelInput,
        ModelInputChunk,
        PromptProvenanceSpan,
        SampledProvenanceSpan,
    )
    from tinkex.wire.partial_sample import SampledTokens
    from tinkex.wire.sampling import (
        SampledSequence,
        SampleRequest,
        SampleResponse,
        SamplingParams,
        StopReason,
    )
    from tinkex.wire.sessions import TrainingRun
    from tinkex.wire.tensors import TensorData, TensorDtype
    from tinkex.wire.training import (
        AdamOptimizerConfig,
        AdamParams,
        DimuonOptimizerConfig,
        DimuonParams,
        ForwardBackwardOutput,
        LoraConfig,
        ModelID,
        OptimParams,
        OptimStepRequest,
        OptimStepResponse,
    )

__title__ = "tinkex"

__all__ = [
    "APIConnectionError",
    "APIError",
    "APIFuture",
    "APIResponseValidationError",
    "APIStatusError",
    "APITimeoutError",
    "AdamOptimizerConfig",
    "AdamParams",
    "AdminClient",
    "AuthenticationError",
    "BadRequestError",
    "BillingError",
    "BreakerPolicy",
    "Checkpoint",
    "CheckpointType",
    "CircuitOpenError",
    "ConflictError",
    "Datum",
    "DimuonOptimizerConfig",
    "DimuonParams",
    "DmelChunk",
    "EncodedTextChunk",
    "ExperimentalWarning",
    "ForwardBackwardOutput",
    "InternalServerError",
    "LoraConfig",
    "LossHandle",
    "ModelID",
    "ModelInput",
    "ModelInputChunk",
    "NotFoundError",
    "OptimParams",
    "OptimStepRequest",
    "OptimStepResponse",
    "ParsedCheckpointTinkerPath",
    "PerDatumLossFn",
    "PermissionDeniedError",
    "PromptProvenanceSpan",
    "QueueState",
    "RateLimitError",
    "Recovery",
    "RequestFailedError",
    "RequestOptions",
    "RestClient",
    "RetryConfig",
    "SampleRequest",
    "SampleResponse",
    "SampleStream",
    "SampledProvenanceSpan",
    "SampledSequence",
    "SampledTokens",
    "SamplingClient",
    "SamplingParams",
    "ServiceClient",
    "Settings",
    "StopReason",
    "TensorData",
    "TensorDtype",
    "Timeout",
    "TinkerError",
    "TrainingClient",
    "TrainingRun",
    "UnprocessableEntityError",
    "__title__",
    "__version__",
    "auth",
    "download_checkpoint",
    "download_checkpoint_async",
    "metrics_snapshot",
    "on_queue_state",
    "progress",
    "recovering",
    "recovering_async",
    "reset_metrics",
    "types",
]

#: The module of each name. The imports above repeat it for type checkers; a test compares them.
_HOMES = {
    "client.admin": "AdminClient",
    "client.custom_loss": "LossHandle PerDatumLossFn",
    "client.errors": (
        "APIConnectionError APIError APIResponseValidationError APIStatusError APITimeoutError "
        "AuthenticationError BadRequestError BillingError ConflictError ExperimentalWarning "
        "InternalServerError NotFoundError PermissionDeniedError RateLimitError "
        "RequestFailedError TinkerError UnprocessableEntityError"
    ),
    "client.files.checkpoint_download": "download_checkpoint download_checkpoint_async",
    "client.futures": "APIFuture",
    "client.http.circuit_breaker": "BreakerPolicy CircuitOpenError",
    "client.http.retry": "RetryConfig",
    "client.observe.instrumentation": "metrics_snapshot reset_metrics",
    "client.observe.progress": "progress",
    "client.observe.queue_states": "QueueState on_queue_state",
    "client.recovery": "Recovery recovering recovering_async",
    "client.rest": "RestClient",
    "client.sample_stream": "SampleStream",
    "client.sampling": "SamplingClient",
    "client.service": "ServiceClient",
    "client.settings": "Settings",
    "client.training": "TrainingClient",
    "client.version": "__version__",
    "compat.raw_responses": "APIResponse AsyncAPIResponse",
    "compat.request_options": "RequestOptions Timeout",
    "wire.checkpoints": "Checkpoint CheckpointType ParsedCheckpointTinkerPath",
    "wire.inputs": (
        "Datum DmelChunk EncodedTextChunk ModelInput ModelInputChunk PromptProvenanceSpan "
        "SampledProvenanceSpan"
    ),
    "wire.partial_sample": "SampledTokens",
    "wire.sessions": "TrainingRun",
    "wire.sampling": "SampleRequest SampleResponse SampledSequence SamplingParams StopReason",
    "wire.tensors": "TensorData TensorDtype",
    "wire.training": (
        "AdamOptimizerConfig AdamParams DimuonOptimizerConfig DimuonParams ForwardBackwardOutput "
        "LoraConfig ModelID OptimParams OptimStepRequest OptimStepResponse"
    ),
}
#: Modules that are available as attributes without an import, as upstream.
_MODULES = ("auth", "resources", "types")
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"tinkex.{name}")
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'tinkex' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"tinkex.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if os.environ.get("TINKEX_LOG") or os.environ.get("TINKER_LOG"):
    importlib.import_module("tinkex.client.observe.logging_setup").configure(os.environ)
