"""
tinkex: a client for the Tinker training API, and a server to run it yourself.

All public names are listed here, and each is loaded when it is first used, so that
`import tinkex` is fast. Names that are not listed may change without notice.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

__title__ = "tinkex"

#: The module of each name. `make stub` writes `__init__.pyi` from it, for type checkers.
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
#: Importable but not in `__all__`, as in the official client.
_NOT_LISTED = {"APIResponse", "AsyncAPIResponse", "resources"}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}
_PUBLIC = sorted({"__title__", *_HOME_OF, *_MODULES})

__all__ = [name for name in _PUBLIC if name not in _NOT_LISTED]


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
    return list(_PUBLIC)


if os.environ.get("TINKEX_LOG") or os.environ.get("TINKER_LOG"):
    importlib.import_module("tinkex.client.observe.logging_setup").configure(os.environ)
