"""Sessions and how they end, session search, training runs, and served models."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AwareDatetime, BeforeValidator, Field, field_validator

from tinkex import display
from tinkex.wire.base import LenientModel, StrictModel, time_from_text
from tinkex.wire.checkpoints import Checkpoint, Cursor
from tinkex.wire.training import AdamOptimizerConfig, OptimizerConfig, optimizer_config_from

__all__ = [
    "AccessibleSearchOwner",
    "ActiveSessionStatusQuery",
    "CancelledSessionStatusQuery",
    "ClientFinishedSessionStatusQuery",
    "ClientSessionFinishErrored",
    "ClientSessionFinishInterrupted",
    "ClientSessionFinishReason",
    "ClientSessionFinishReasonType",
    "ClientSessionFinishSuccess",
    "ClientSessionFinished",
    "CreateSessionRequest",
    "CreateSessionResponse",
    "FailedSessionStatusQuery",
    "FinishSessionRequest",
    "GetInfoRequest",
    "GetInfoResponse",
    "GetServerCapabilitiesResponse",
    "GetSessionResponse",
    "ListSessionsResponse",
    "ModelData",
    "OwnSearchOwner",
    "SearchOwner",
    "SessionActive",
    "SessionCancelled",
    "SessionFailed",
    "SessionFailedReason",
    "SessionFailedRequestReason",
    "SessionFailedSamplingSessionReason",
    "SessionFailedTrainingRunReason",
    "SessionHeartbeatRequest",
    "SessionHeartbeatResponse",
    "SessionSearchCursor",
    "SessionSearchRequest",
    "SessionSearchResponse",
    "SessionStatus",
    "SessionStatusQuery",
    "SessionSummary",
    "StepMetrics",
    "SupportedModel",
    "TrainingRun",
    "TrainingRunMetricsResponse",
    "TrainingRunsResponse",
    "UserSearchOwner",
]


# -- served models -------------------------------------------------------------------------------


class SupportedModel(LenientModel):
    model_name: str | None = None
    #: Tokens of prompt and completion together.
    max_context_length: int | None = None
    trainable: bool | None = None
    sampleable: bool | None = None


class GetServerCapabilitiesResponse(LenientModel):
    supported_models: list[SupportedModel]


class GetInfoRequest(StrictModel):
    model_id: str
    type: Literal["get_info"] = "get_info"


class ModelData(LenientModel):
    arch: str | None = None
    model_name: str | None = None
    #: A name on the Hugging Face hub, or a folder.
    tokenizer_id: str | None = None


class GetInfoResponse(LenientModel):
    type: Literal["get_info"] | None = None
    model_data: ModelData
    model_id: str
    optimizer_config: OptimizerConfig = AdamOptimizerConfig()
    is_lora: bool | None = None
    lora_rank: int | None = None
    model_name: str | None = None

    @field_validator("optimizer_config", mode="before")
    @classmethod
    def _by_tag(cls, value: Any) -> Any:
        return optimizer_config_from(value)


class TrainingRun(LenientModel):
    """A model that is or was trained."""

    #: The same as its `model_id`.
    training_run_id: str
    base_model: str
    model_owner: str
    is_lora: bool
    corrupted: bool = False
    lora_rank: int | None = None
    last_request_time: datetime
    last_checkpoint: Checkpoint | None = None
    last_sampler_checkpoint: Checkpoint | None = None
    user_metadata: dict[str, str] | None = None
    # Only a tinkex server sends these, and only to the owner of the run.
    #: Optimizer steps so far. In a run that began on a server that did not count them, those since
    #: its upgrade.
    steps: int | None = None
    #: The loss of the last step, per token.
    last_loss: float | None = None
    #: `running`, `idle`, `finished` (its session was closed) or `failed`.
    status: str | None = None

    def _shown(self) -> Iterable[tuple[str, Any]]:
        for name, value in super()._shown():
            if name != "corrupted" or value:
                yield name, value.tinker_path if isinstance(value, Checkpoint) else value

    def _repr_html_(self) -> str:
        return runs_html([self])


class StepMetrics(LenientModel):
    """The metrics of one optimizer step, or the means over several that follow each other."""

    #: The number of the step in its run, from 1; of several steps, that of the last.
    step: int
    #: How many steps this is the mean of.
    steps: int = 1
    #: When the step finished.
    time: datetime
    #: By name: `loss`, `tokens`, `learning_rate`, `grad_norm`, `update_norm`, `seconds`, and what
    #: losses add.
    metrics: dict[str, float]
    #: The smallest and largest loss of these steps.
    loss_min: float | None = None
    loss_max: float | None = None


class TrainingRunMetricsResponse(LenientModel):
    """The steps of a run in order, as at most as many points as were requested."""

    training_run_id: str
    points: list[StepMetrics]


class TrainingRunsResponse(LenientModel):
    training_runs: list[TrainingRun]
    cursor: Cursor

    def _repr_html_(self) -> str:
        return runs_html(self.training_runs, self.cursor.total_count)


def runs_html(runs: list[TrainingRun], total: int = 0) -> str:
    """A table of training runs, of which there are `total`."""
    columns = (
        *("run", "name", "base model", "rank", "steps", "loss", "status"),
        *("last request", "last checkpoint"),
    )
    rows = [
        (
            run.training_run_id,
            (run.user_metadata or {}).get("name"),
            run.base_model,
            run.lora_rank,
            run.steps,
            run.last_loss,
            run.status or ("failed" if run.corrupted else None),
            run.last_request_time,
            run.last_checkpoint and run.last_checkpoint.tinker_path,
        )
        for run in runs
    ]
    return display.table(columns, rows, caption="Training runs", total=total)


# -- sessions ------------------------------------------------------------------------------------


class CreateSessionRequest(StrictModel):
    tags: list[str]
    user_metadata: dict[str, Any] | None
    sdk_version: str
    project_id: str | None = None
    display_name: str | None = None
    type: Literal["create_session"] = "create_session"


class CreateSessionResponse(LenientModel):
    type: Literal["create_session"] = "create_session"
    #: Messages that the client logs at these levels.
    info_message: str | None = None
    warning_message: str | None = None
    error_message: str | None = None
    session_id: str


class SessionHeartbeatRequest(StrictModel):
    session_id: str
    type: Literal["session_heartbeat"] = "session_heartbeat"


class SessionHeartbeatResponse(LenientModel):
    type: Literal["session_heartbeat"] = "session_heartbeat"


class GetSessionResponse(LenientModel):
    training_run_ids: list[str]
    sampler_ids: list[str]
    user_metadata: dict[str, str] | None = None
    display_name: str | None = None


class ListSessionsResponse(LenientModel):
    sessions: list[str]


# -- how a session ended -------------------------------------------------------------------------

ClientSessionFinishReasonType = Literal["success", "errored", "interrupted"]


class ClientSessionFinishSuccess(LenientModel):
    type: Literal["success"] = "success"


class ClientSessionFinishErrored(LenientModel):
    type: Literal["errored"] = "errored"


class ClientSessionFinishInterrupted(LenientModel):
    type: Literal["interrupted"] = "interrupted"


ClientSessionFinishReason: TypeAlias = Annotated[
    ClientSessionFinishSuccess | ClientSessionFinishErrored | ClientSessionFinishInterrupted,
    Field(discriminator="type"),
]


class FinishSessionRequest(StrictModel):
    """The client has finished; only the first request counts."""

    reason: ClientSessionFinishReason
    detail: str | None = None


class ClientSessionFinished(LenientModel):
    type: Literal["client_finished"] = "client_finished"
    reason: ClientSessionFinishReason
    detail: str | None = None


class SessionActive(LenientModel):
    type: Literal["active"] = "active"


class SessionCancelled(LenientModel):
    type: Literal["cancelled"] = "cancelled"
    detail: str | None = None


class SessionFailedRequestReason(LenientModel):
    type: Literal["request"] = "request"
    request_id: str
    request_type: str


class SessionFailedTrainingRunReason(LenientModel):
    type: Literal["training_run"] = "training_run"
    training_run_id: str


class SessionFailedSamplingSessionReason(LenientModel):
    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: str


SessionFailedReason: TypeAlias = Annotated[
    SessionFailedRequestReason
    | SessionFailedTrainingRunReason
    | SessionFailedSamplingSessionReason,
    Field(discriminator="type"),
]


class SessionFailed(LenientModel):
    type: Literal["failed"] = "failed"
    category: Literal["user", "internal"]
    reason: SessionFailedReason
    message: str


SessionStatus: TypeAlias = Annotated[
    SessionFailed | SessionCancelled | ClientSessionFinished | SessionActive,
    Field(discriminator="type"),
]


# -- searching sessions --------------------------------------------------------------------------


class OwnSearchOwner(StrictModel):
    """Sessions of the caller."""

    type: Literal["own"] = "own"


class AccessibleSearchOwner(StrictModel):
    """Sessions that the caller may see."""

    type: Literal["accessible"] = "accessible"


class UserSearchOwner(StrictModel):
    """Sessions of these users."""

    type: Literal["user"] = "user"
    owner_urns: list[str] = Field(min_length=1, max_length=10)


SearchOwner: TypeAlias = Annotated[
    OwnSearchOwner | AccessibleSearchOwner | UserSearchOwner, Field(discriminator="type")
]


class ActiveSessionStatusQuery(StrictModel):
    type: Literal["active"] = "active"


class CancelledSessionStatusQuery(StrictModel):
    type: Literal["cancelled"] = "cancelled"


class FailedSessionStatusQuery(StrictModel):
    type: Literal["failed"] = "failed"


class ClientFinishedSessionStatusQuery(StrictModel):
    type: Literal["client_finished"] = "client_finished"
    #: Only these reasons; None: any.
    reasons: list[ClientSessionFinishReasonType] | None = Field(default=None, min_length=1)


SessionStatusQuery: TypeAlias = Annotated[
    ActiveSessionStatusQuery
    | CancelledSessionStatusQuery
    | FailedSessionStatusQuery
    | ClientFinishedSessionStatusQuery,
    Field(discriminator="type"),
]


class SessionSearchCursor(LenientModel):
    """Where the next page starts."""

    last_created_at: Annotated[AwareDatetime, BeforeValidator(time_from_text)]
    last_session_id: str


class SessionSearchRequest(StrictModel):
    session_id: str | None = None
    project_ids: list[str] | None = None
    #: Sessions whose metadata has all of these entries.
    user_metadata: dict[str, str] = Field(default={})
    display_name: str | None = Field(default=None, min_length=1)
    owner: SearchOwner = OwnSearchOwner()
    #: Sessions in any of these states; None: all.
    statuses: list[SessionStatusQuery] | None = Field(default=None, min_length=1)
    limit: int = Field(default=50, ge=1, le=200)
    cursor: SessionSearchCursor | None = None


class SessionSummary(LenientModel):
    session_id: str
    created_at: datetime
    owner: str
    project_id: str
    status: SessionStatus | None = None
    checkpoints_count: int
    display_name: str | None = None
    user_metadata: dict[str, str] | None = None
    checkpoint_storage_bytes: int | None = None


class SessionSearchResponse(LenientModel):
    sessions: list[SessionSummary]
    next_cursor: SessionSearchCursor | None = None


# -- traces --------------------------------------------------------------------------------------


class TraceExportResponse(LenientModel):
    """A trace is created on request; poll until it is ready."""

    status: Literal["pending", "ready", "failed"]
    url: str | None = Field(default=None, repr=False)  # signed
    error: str | None = None
