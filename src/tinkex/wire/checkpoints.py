"""Checkpoints: saving, loading, copying, listing, and the paths that name them."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final, Literal
from urllib.parse import quote

from pydantic import Field, field_validator

from tinkex.wire.base import LenientModel, StrictModel
from tinkex.wire.training import AdamOptimizerConfig, OptimizerConfig, optimizer_config_from

__all__ = [
    "Checkpoint",
    "CheckpointArchiveUrlResponse",
    "CheckpointType",
    "CheckpointsListResponse",
    "CopyWeightsRequest",
    "CopyWeightsResponse",
    "Cursor",
    "ExternalWeightsUrlsResponse",
    "LoadWeightsRequest",
    "LoadWeightsResponse",
    "ParsedCheckpointTinkerPath",
    "SaveWeightsExternalRequest",
    "SaveWeightsExternalResponse",
    "SaveWeightsExternalResponseInternal",
    "SaveWeightsForSamplerRequest",
    "SaveWeightsForSamplerResponse",
    "SaveWeightsForSamplerResponseInternal",
    "SaveWeightsRequest",
    "SaveWeightsResponse",
    "SetCheckpointTtlRequest",
    "WeightsInfoRequest",
    "WeightsInfoResponse",
]

#: `training`: weights and optimizer state. `sampler`: weights to sample from. `external`: weights
#: in files for other programs.
CheckpointType = Literal["training", "sampler", "external"]

#: The middle part of a path, by what kind of checkpoint it names.
KINDS: Final[dict[str, CheckpointType]] = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}

#: Where the hosted service shows its pages.
CONSOLE_URL: Final = "https://tinker.thinkingmachines.ai"


class ParsedCheckpointTinkerPath(LenientModel):
    """`tinker://<training run>/<kind>/<name>`, taken apart."""

    tinker_path: str
    training_run_id: str
    checkpoint_type: CheckpointType
    #: `<kind>/<name>`
    checkpoint_id: str

    @classmethod
    def from_tinker_path(cls, tinker_path: str) -> ParsedCheckpointTinkerPath:
        scheme, _, rest = tinker_path.partition("://")
        parts = rest.split("/")
        if scheme != "tinker" or len(parts) != 3 or not all(parts) or parts[1] not in KINDS:
            raise ValueError(
                f"Invalid tinker path: {tinker_path}. A path is tinker://RUN/KIND/NAME, "
                f"where KIND is one of {', '.join(KINDS)}."
            )
        return cls(
            tinker_path=tinker_path,
            training_run_id=parts[0],
            checkpoint_type=KINDS[parts[1]],
            checkpoint_id=f"{parts[1]}/{parts[2]}",
        )


def _console_url(tinker_path: str) -> str:
    parsed = ParsedCheckpointTinkerPath.from_tinker_path(tinker_path)
    run, checkpoint = quote(parsed.training_run_id, safe=""), quote(parsed.checkpoint_id, safe="")
    return f"{CONSOLE_URL}/checkpoints/{run}/{checkpoint}"


# -- saving --------------------------------------------------------------------------------------


class SaveWeightsRequest(StrictModel):
    """Weights and optimizer state, to go on from later."""

    model_id: str
    #: A name, not a path; None lets the service choose.
    path: str | None = None
    #: As in `ForwardBackwardRequest`.
    seq_id: int | None = None
    #: Delete it after this long; None keeps it.
    ttl_seconds: int | None = None
    #: Replace a checkpoint of the same name, its metadata too.
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None
    type: Literal["save_weights"] = "save_weights"


class SaveWeightsResponse(LenientModel):
    path: str
    type: Literal["save_weights"] | None = None

    def get_console_url(self) -> str:
        """The page of the hosted service about this checkpoint."""
        return _console_url(self.path)


class SaveWeightsForSamplerRequest(StrictModel):
    """Weights to sample from: under a name, or (without `path`) for one sampling session only."""

    model_id: str
    path: str | None = None
    #: Given when there is no `path`: the number of the sampling session to make.
    sampling_session_seq_id: int | None = None
    #: As in `ForwardBackwardRequest`.
    seq_id: int | None = None
    ttl_seconds: int | None = None
    user_metadata: dict[str, str] | None = None
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"


class SaveWeightsForSamplerResponse(LenientModel):
    """What a caller sees of a named save."""

    path: str
    type: Literal["save_weights_for_sampler"] | None = None

    def get_console_url(self) -> str:
        """The page of the hosted service about this checkpoint."""
        return _console_url(self.path)

    def get_playground_url(self) -> str:
        """The page of the hosted service to try this checkpoint on."""
        return f"{CONSOLE_URL}/playground?mode=checkpoint&checkpoint={quote(self.path, safe='')}"


class SaveWeightsForSamplerResponseInternal(LenientModel):
    """What travels: a path for a named save, a sampling session for an unnamed one."""

    path: str | None = None
    sampling_session_id: str | None = None
    type: Literal["save_weights_for_sampler"] | None = None


class SaveWeightsExternalRequest(StrictModel):
    """Weights as files for other programs."""

    model_id: str
    path: str
    #: As in `ForwardBackwardRequest`.
    seq_id: int | None = None
    ttl_seconds: int | None = None
    #: age keys that can read the files; at most 10.
    age_encryption_recipients: list[str] | None = None
    type: Literal["save_weights_external"] = "save_weights_external"


class SaveWeightsExternalResponse(LenientModel):
    path: str
    type: Literal["save_weights_external"] | None = None


class SaveWeightsExternalResponseInternal(LenientModel):
    path: str | None = None
    size_bytes: int | None = None
    type: Literal["save_weights_external"] | None = None


class ExternalWeightsUrlsResponse(LenientModel):
    #: Signed address of each file, by its path inside the checkpoint.
    urls: dict[str, str]
    expires: datetime


class CheckpointArchiveUrlResponse(LenientModel):
    #: Signed address of a tar of the files.
    url: str
    expires: datetime


# -- loading and copying -------------------------------------------------------------------------


class LoadWeightsRequest(StrictModel):
    """
    Weights into a model: an existing one (`model_id` and `seq_id`), or a new one (`session_id` and
    `model_seq_id`).
    """

    model_id: str | None = None
    #: As in `ForwardBackwardRequest`.
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    #: A `tinker://` path.
    path: str
    #: Also the optimizer's state.
    optimizer: bool
    optimizer_config: OptimizerConfig | None = None
    #: Key of the account that owns the checkpoint, if that is another one.
    weights_access_token: str | None = Field(default=None, repr=False)
    type: Literal["load_weights"] = "load_weights"

    @field_validator("optimizer_config", mode="before")
    @classmethod
    def _by_tag(cls, value: Any) -> Any:
        return optimizer_config_from(value)


class LoadWeightsResponse(LenientModel):
    path: str | None = None
    model_id: str | None = None
    type: Literal["load_weights"] | None = None


class CopyWeightsRequest(StrictModel):
    """A copy of somebody's checkpoint: into a project, or (before 0.34) into a session."""

    session_id: str | None = None
    model_seq_id: int | None = None
    destination_project_id: str | None = None
    source_path: str
    ttl_seconds: int | None = None
    weights_access_token: str | None = Field(default=None, repr=False)


class CopyWeightsResponse(LenientModel):
    tinker_path: str


class WeightsInfoRequest(StrictModel):
    tinker_path: str


class WeightsInfoResponse(LenientModel):
    """What a new model needs to be able to load a checkpoint."""

    base_model: str
    optimizer_config: OptimizerConfig = AdamOptimizerConfig()
    is_lora: bool
    lora_rank: int | None = None
    train_unembed: bool | None = None
    train_mlp: bool | None = None
    train_attn: bool | None = None

    @field_validator("optimizer_config", mode="before")
    @classmethod
    def _by_tag(cls, value: Any) -> Any:
        return optimizer_config_from(value)


# -- listing -------------------------------------------------------------------------------------


class Checkpoint(LenientModel):
    #: `<kind>/<name>`
    checkpoint_id: str
    checkpoint_type: CheckpointType
    #: When it was made.
    time: datetime
    tinker_path: str
    size_bytes: int | None = None
    public: bool = False
    user_metadata: dict[str, str] | None = None
    #: When it will be deleted; None: never.
    expires_at: datetime | None = None


class Cursor(LenientModel):
    offset: int
    limit: int
    total_count: int


class CheckpointsListResponse(LenientModel):
    checkpoints: list[Checkpoint]
    cursor: Cursor | None = None


class SetCheckpointTtlRequest(StrictModel):
    #: Seconds from now; None takes an expiry away.
    ttl_seconds: int | None
