"""Checkpoints: saving, loading, copying and listing them, and their `tinker://` paths."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any, Final, Literal
from urllib.parse import quote

from pydantic import Field, PrivateAttr, field_validator

from tinkex import display
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

#: `training`: weights and optimizer state. `sampler`: weights for sampling. `external`: weights
#: exported as files for other programs.
CheckpointType = Literal["training", "sampler", "external"]

#: Checkpoint type by the KIND part of a path.
KINDS: Final[dict[str, CheckpointType]] = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}

#: The hosted service's web console.
CONSOLE_URL: Final = "https://tinker.thinkingmachines.ai"


def tinker_path(training_run_id: str, kind: str, name: str) -> str:
    """The path of a checkpoint; `ParsedCheckpointTinkerPath` parses it."""
    return f"tinker://{training_run_id}/{kind}/{name}"


class ParsedCheckpointTinkerPath(LenientModel):
    """The parts of a path `tinker://<training run>/<kind>/<name>`."""

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


class _Saved(LenientModel):
    """A saved checkpoint, and its pages."""

    path: str
    #: The console of the service that saved it; set by the client.
    _console: str = PrivateAttr(CONSOLE_URL)

    def get_console_url(self) -> str:
        """This checkpoint in the console of its service."""
        parsed = ParsedCheckpointTinkerPath.from_tinker_path(self.path)
        run, name = quote(parsed.training_run_id, safe=""), quote(parsed.checkpoint_id, safe="")
        return f"{self._console}/checkpoints/{run}/{name}"


# -- saving --------------------------------------------------------------------------------------


class SaveWeightsRequest(StrictModel):
    """Save weights and optimizer state, to resume training later."""

    model_id: str
    #: A name, not a path; None: the service chooses one.
    path: str | None = None
    #: As in `ForwardBackwardRequest`.
    seq_id: int | None = None
    #: Delete the checkpoint after this time; None: keep it.
    ttl_seconds: int | None = None
    #: Replace a checkpoint of the same name, including its metadata.
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None
    type: Literal["save_weights"] = "save_weights"


class SaveWeightsResponse(_Saved):
    type: Literal["save_weights"] | None = None


class SaveWeightsForSamplerRequest(StrictModel):
    """Save weights for sampling: named, or (without `path`) for one sampling session only."""

    model_id: str
    path: str | None = None
    #: Number of the sampling session to create; given if `path` is not.
    sampling_session_seq_id: int | None = None
    #: As in `ForwardBackwardRequest`.
    seq_id: int | None = None
    ttl_seconds: int | None = None
    user_metadata: dict[str, str] | None = None
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"


class SaveWeightsForSamplerResponse(_Saved):
    """The public result of a named save."""

    type: Literal["save_weights_for_sampler"] | None = None

    def get_playground_url(self) -> str:
        """This checkpoint in the playground of its service."""
        return f"{self._console}/playground?mode=checkpoint&checkpoint={quote(self.path, safe='')}"


class SaveWeightsForSamplerResponseInternal(LenientModel):
    """The result on the wire: a path for a named save, a sampling session for an unnamed one."""

    path: str | None = None
    sampling_session_id: str | None = None
    type: Literal["save_weights_for_sampler"] | None = None


class SaveWeightsExternalRequest(StrictModel):
    """Export weights as files for other programs."""

    model_id: str
    path: str
    #: As in `ForwardBackwardRequest`.
    seq_id: int | None = None
    ttl_seconds: int | None = None
    #: Public keys of `age` to encrypt the files for; at most 10.
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
    #: Signed URL of each file, by its path inside the checkpoint.
    urls: dict[str, str]
    expires: datetime

    def _shown(self) -> Iterable[tuple[str, Any]]:
        shown = {name: display.without_query(url) for name, url in self.urls.items()}
        return ("urls", shown), ("expires", self.expires)


class CheckpointArchiveUrlResponse(LenientModel):
    #: Signed URL of a tar archive of the files.
    url: str
    expires: datetime

    def _shown(self) -> Iterable[tuple[str, Any]]:
        return ("url", display.without_query(self.url)), ("expires", self.expires)


# -- loading and copying -------------------------------------------------------------------------


class LoadWeightsRequest(StrictModel):
    """
    Load weights into an existing model (`model_id` and `seq_id`) or a new one (`session_id` and
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
    #: Also load the optimizer state.
    optimizer: bool
    optimizer_config: OptimizerConfig | None = None
    #: Key of the account that owns the checkpoint, if it is another account.
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
    """Copy a checkpoint into a project, or (SDK before 0.34) into a session."""

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
    """The settings a new model needs so that it can load this checkpoint."""

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
    """A saved adapter."""

    #: `<kind>/<name>`
    checkpoint_id: str
    checkpoint_type: CheckpointType
    #: When it was saved.
    time: datetime
    tinker_path: str
    size_bytes: int | None = None
    public: bool = False
    user_metadata: dict[str, str] | None = None
    #: When it will be deleted; None: never.
    expires_at: datetime | None = None

    def _shown(self) -> Iterable[tuple[str, Any]]:
        # The path contains the id and the type.
        yield "tinker_path", self.tinker_path
        left_out = ("tinker_path", "checkpoint_id", "checkpoint_type")
        yield from ((name, value) for name, value in super()._shown() if name not in left_out)

    def _repr_html_(self) -> str:
        return checkpoints_html([self])


class Cursor(LenientModel):
    offset: int
    limit: int
    total_count: int


class CheckpointsListResponse(LenientModel):
    checkpoints: list[Checkpoint]
    cursor: Cursor | None = None

    def _repr_html_(self) -> str:
        return checkpoints_html(self.checkpoints, self.cursor.total_count if self.cursor else 0)


def checkpoints_html(checkpoints: list[Checkpoint], total: int = 0) -> str:
    """A table of checkpoints, of which there are `total`."""
    columns = ("path", "type", "saved", "bytes", "public", "expires")
    rows = [
        (
            each.tinker_path,
            each.checkpoint_type,
            each.time,
            each.size_bytes,
            each.public,
            each.expires_at or "never",
        )
        for each in checkpoints
    ]
    return display.table(columns, rows, caption="Checkpoints", total=total)


class SetCheckpointTtlRequest(StrictModel):
    #: Seconds from now; None: never expire.
    ttl_seconds: int | None
