"""
Promises of a result, and the answers to asking for one.

An answer is told apart by its shape and its `type`: "try again", a failure, "done, but large", or
the result itself. There is no `status` field to go by, except the one of the third.
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
    "read_future",
]

log = logging.getLogger(__name__)

RequestID: TypeAlias = str

#: Why a request has not run yet.
QueueState = Literal["active", "paused_capacity", "paused_rate_limit"]


class UntypedAPIFuture(LenientModel):
    """A promise: the answer to every submission that takes time."""

    request_id: RequestID
    model_id: ModelID | None = None
    #: Of a sample: a name for each sequence that will come.
    sample_sequence_ids: list[str] | None = None


# -- asking for one ------------------------------------------------------------------------------


class FutureRetrieveRequest(StrictModel):
    request_id: RequestID
    #: A large result may be answered by its size only, so that the client can make room first.
    allow_metadata_only: bool = False


class CancelFutureRequest(StrictModel):
    request_id: RequestID


class TryAgainResponse(LenientModel):
    """Not yet."""

    type: Literal["try_again"] = "try_again"
    request_id: RequestID
    queue_state: QueueState = "active"
    #: For people, when the state is not `active`.
    queue_state_reason: str | None = None

    @field_validator("queue_state", mode="before")
    @classmethod
    def _unknown_states_wait(cls, value: Any) -> Any:
        if value in get_args(QueueState):
            return value
        log.info("unknown queue state %r, taken as waiting", str(value)[:80])
        return "active"


class RequestFailedResponse(LenientModel):
    """The request was taken and could not be finished."""

    error: str
    category: RequestErrorCategory

    @field_validator("category", mode="before")
    @classmethod
    def _any_word(cls, value: Any) -> RequestErrorCategory:
        return RequestErrorCategory.parse(value)


class CompleteMetadata(LenientModel):
    """The result is there, and this large; ask again without `allow_metadata_only` to get it."""

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
    """What a JSON answer to `retrieve_future` says, looked at in the order clients look."""
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
        raise WireError(f"this answer is no {found.__name__}: {error}") from None


# -- waiting for many ----------------------------------------------------------------------------


class SamplingSessionFuturesTarget(StrictModel):
    """The samples of one client of a sampling session."""

    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: str
    #: Which copy of the client; 0 is the original.
    cloned_sampler_id: int = 0


class FuturesRetrieveRequest(StrictModel):
    target: SamplingSessionFuturesTarget
    #: The last `cursor` received; events up to it were seen.
    prev_cursor: int = 0
    #: Seconds to wait for an event.
    timeout: float | None = None
    #: Results that were fetched: their payloads may be deleted.
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
