"""The clients and their futures, under the import paths of the official client."""

from __future__ import annotations

from tinkex.client.admin import AdminClient
from tinkex.client.futures import APIFuture, AwaitableConcurrentFuture
from tinkex.client.rest import RestClient
from tinkex.client.sampling import SamplingClient
from tinkex.client.service import ServiceClient
from tinkex.client.training import TrainingClient
from tinkex.compat.submodule_aliases import aliases as _aliases

__all__ = [
    "APIFuture",
    "AdminClient",
    "AwaitableConcurrentFuture",
    "RestClient",
    "SamplingClient",
    "ServiceClient",
    "TrainingClient",
]

__path__.append(
    _aliases(
        __name__,
        "admin_client api_future custom_loss rest_client sampling_client service_client "
        "training_client",
    )
)
