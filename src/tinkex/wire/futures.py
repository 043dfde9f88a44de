"""
Futures, and the responses to polling them.

The kind of response follows from its fields: "try again" (`type`), "complete, metadata only"
(`status`), a failure (`error`), or else the result itself.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, get_args

from pydantic import BaseModel, Field, field_validator

from tinkex.wire.base import LenientModel, Payload, StrictModel
from tinkex.wire.checkpoints import (
    LoadWeightsResponse,
    SaveWeightsExternalResponse,
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
)
from tinkex.wire.errors import RequestErrorCategory, WireError
from tinkex.wire.training import (
    CreateModelResponse,
    ForwardBackwardOutput,
    ModelID,
    OptimStepResponse,
    UnloadModelResponse,
)

__all__ = [
    "CancelFutureRequest",
    "CompleteMetadata",
    "FutureCompletion",
    "FutureFailed",
    "FutureFinished",
    "FutureRetrieveRequest",
    "FutureRetrieveResponse",
    "FuturesRetrieveRequest",
    "FuturesRetrieveResponse",
    "QueueState",
    "RequestFailedResponse",
    "RequestID",
    "SamplingSessionFuturesTarget",
    "TryAgainResponse",
    "UntypedAPIFuture",
]

log = logging.getLogger(__name__)

RequestID: TypeAlias = str

#: Why a request is not running yet.
QueueState = Literal["active", "paused_capacity", "paused_rate_limit"]


class UntypedAPIFuture(LenientModel):
    """A future: the response to every request that runs asynchronously."""

    request_id: RequestID
    model_id: ModelID | None = None
    #: For samples: the id of each sequence to come.
    sample_sequence_ids: list[str] | None = None


# -- polling one future --------------------------------------------------------------------------


class FutureRetrieveRequest(StrictModel):
    request_id: RequestID
    #: The server may send only the size of a large result, so that the client can reserve memory.
    allow_metadata_only: bool = False


class CancelFutureRequest(StrictModel):
    request_id: RequestID


class TryAgainResponse(LenientModel):
    """The result is not ready."""

    type: Literal["try_again"] = "try_again"
    request_id: RequestID
    queue_state: QueueState = "active"
    #: Human-readable; set if the state is not `active`.
    queue_state_reason: str | None = None

    @field_validator("queue_state", mode="before")
    @classmethod
    def _unknown_means_active(cls, value: Any) -> Any:
        if value in get_args(QueueState):
            return value
        log.info("unknown queue state %r, treated as active", str(value)[:80])
        return "active"


class RequestFailedResponse(LenientModel):
    """The request was accepted but failed."""

    error: str
    category: RequestErrorCategory

    @field_validator("category", mode="before")
    @classmethod
    def _parse_category(cls, value: Any) -> RequestErrorCategory:
        return RequestErrorCategory.parse(value)


class CompleteMetadata(LenientModel):
    """The result is ready and has this size; poll without `allow_metadata_only` to fetch it."""

    status: Literal["complete_metadata"] = "complete_metadata"
    response_payload_size: int


FutureRetrieveResponse: TypeAlias = (
    TryAgainResponse
    | ForwardBackwardOutput
    | OptimStepResponse
    | SaveWeightsResponse
    | LoadWeightsResponse
    | SaveWeightsForSamplerResponse
    | SaveWeightsExternalResponse
    | CreateModelResponse
    | UnloadModelResponse
    | RequestFailedResponse
)

ResultT = TypeVar("ResultT", bound=BaseModel | Payload)


def read_future(
    value: Mapping[str, Any], result_type: type[ResultT]
) -> TryAgainResponse | CompleteMetadata | RequestFailedResponse | ResultT:
    """Parse a JSON response of `retrieve_future`, testing the cases in the order of clients."""
    found: Any
    if value.get("type") == "try_again":
        found = TryAgainResponse
    elif value.get("status") == "complete_metadata":
        found = CompleteMetadata
    elif "error" in value:
        found = RequestFailedResponse
        value = {**value, "error": str(value["error"])}
    else:
        found = result_type
    try:
        return found.model_validate(value)  # type: ignore[no-any-return]
    except WireError:
        raise
    except ValueError as error:
        raise WireError(f"this response is not a valid {found.__name__}: {error}") from None


# -- polling many futures ------------------------------------------------------------------------


class SamplingSessionFuturesTarget(StrictModel):
    """The samples of one client of a sampling session."""

    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: str
    #: Clone id of the client; 0 is the original.
    cloned_sampler_id: int = 0


class FuturesRetrieveRequest(StrictModel):
    target: SamplingSessionFuturesTarget
    #: The last `cursor` received; only later events are returned.
    prev_cursor: int = 0
    #: How long the server waits for an event, in seconds.
    timeout: float | None = None
    #: Results that the client has; their payloads may be deleted.
    retrieved_request_ids: list[str] = Field(default=[])


class FutureFinished(LenientModel):
    state: Literal["finished"] = "finished"
    request_id: RequestID
    response_payload_uncompressed_size: int | None = None


class FutureFailed(LenientModel):
    state: Literal["failed"] = "failed"
    request_id: RequestID


FutureCompletion: TypeAlias = Annotated[FutureFinished | FutureFailed, Field(discriminator="state")]


class FuturesRetrieveResponse(LenientModel):
    completions: list[FutureCompletion]
    cursor: int
