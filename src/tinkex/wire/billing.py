"""Audit log and billing types."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from tinkex.wire.base import LenientModel, RequestTime, StrictModel

__all__ = [
    "AuditLogEntry",
    "AuditLogResponse",
    "BillingEventInfo",
    "BillingUsageEvent",
    "BillingUsageResponse",
    "BillingUsageSession",
    "CheckpointBillingEvent",
    "CurrentCheckpointStorageUsageItem",
    "CurrentCheckpointStorageUsageResponse",
    "GetBillingUsageRequest",
    "GetCurrentCheckpointStorageUsageRequest",
    "SamplingPrefillBillingEvent",
    "SamplingSampleBillingEvent",
    "StorageBillingEvent",
    "TrainingBillingEvent",
    "UsageByKeyItem",
    "UsageByKeyResponse",
]


class AuditLogEntry(LenientModel):
    timestamp: datetime
    event: str
    event_details: dict[str, object] = Field(default={})
    model_id: str | None = None
    tinker_path: str | None = None
    purpose: str | None = None


class AuditLogResponse(LenientModel):
    entries: list[AuditLogEntry]


class TrainingBillingEvent(LenientModel):
    type: Literal["training"] = "training"
    token_count: int


class SamplingPrefillBillingEvent(LenientModel):
    type: Literal["sampling_prefill"] = "sampling_prefill"
    #: Whether these tokens were in the prefix cache.
    cached: bool
    token_count: int


class SamplingSampleBillingEvent(LenientModel):
    type: Literal["sampling_sample"] = "sampling_sample"
    token_count: int


class CheckpointBillingEvent(LenientModel):
    type: Literal["checkpoint"] = "checkpoint"
    count: int


class StorageBillingEvent(LenientModel):
    type: Literal["storage"] = "storage"
    gigabyte_hours: float


BillingEventInfo: TypeAlias = Annotated[
    TrainingBillingEvent
    | SamplingPrefillBillingEvent
    | SamplingSampleBillingEvent
    | CheckpointBillingEvent
    | StorageBillingEvent,
    Field(discriminator="type"),
]


class BillingUsageEvent(LenientModel):
    """Usage of one hour by one user and session."""

    bucket_start: datetime
    bucket_end: datetime
    base_model: str | None = None
    user_id: str | None = None
    user_name: str | None = None
    session_id: str | None = None
    project_id: str | None = None
    estimated_cost_usd: float | None = None
    effective_rate_usd_per_million_tokens: float | None = None
    effective_rate_usd_per_gigabyte_month: float | None = None
    event_info: BillingEventInfo


class BillingUsageSession(LenientModel):
    user_metadata: dict[str, str] | None = None


class BillingUsageResponse(LenientModel):
    data: list[BillingUsageEvent]
    sessions: dict[str, BillingUsageSession] = Field(default={})
    #: Costs are complete up to this time.
    cost_data_through: datetime | None = None


class GetBillingUsageRequest(StrictModel):
    #: Whole UTC hours, at most 14 days apart.
    starting_on: RequestTime
    ending_before: RequestTime


class GetCurrentCheckpointStorageUsageRequest(StrictModel):
    project_id: str | None = None


class CurrentCheckpointStorageUsageItem(LenientModel):
    project_id: str | None = None
    org_user_urn: str | None = None
    user_email: str | None = None
    user_name: str | None = None
    checkpoint_count: int
    size_bytes: int
    size_gigabytes: float
    estimated_monthly_cost_usd: float | None = None


class CurrentCheckpointStorageUsageResponse(LenientModel):
    effective_rate_usd_per_gigabyte_month: float | None = None
    data: list[CurrentCheckpointStorageUsageItem]


class UsageByKeyItem(LenientModel):
    """Tokens that the requests of one key used, on one base model. Only of a tinkex server."""

    owner: str
    #: None for usage without a key: from before the server had keys, or stored them with usage.
    key_id: int | None = None
    #: The first characters of the key.
    hint: str | None = None
    name: str | None = None
    #: `active`, `revoked` or `expired`.
    state: str | None = None
    base_model: str
    training: int = 0
    sampled: int = 0
    #: Prompt tokens that were computed, and those from the prefix cache.
    prefill: int = 0
    cached: int = 0
    estimated_cost_usd: float | None = None


class UsageByKeyResponse(LenientModel):
    #: Empty on a server without keys.
    data: list[UsageByKeyItem]
