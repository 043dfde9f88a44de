"""Answers a client reads when it starts: its flags, its token, whose key it uses, and whether the server is up."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tinkex.wire.base import LenientModel, StrictModel

__all__ = [
    "AuthTokenResponse",
    "ClientConfigRequest",
    "ClientConfigResponse",
    "ClientDynamicConfigResponse",
    "HealthResponse",
    "WhoamiResponse",
]


class ClientConfigRequest(StrictModel):
    sdk_version: str


class ClientConfigResponse(LenientModel):
    """Flags a server may set once, when a client starts. Every one has a default."""

    #: Exchange the key for a short-lived token.
    pjwt_auth_enabled: bool = False
    credential_default_source: str = "api_key"
    #: Estimated bytes of prompts being submitted at once.
    sample_dispatch_bytes_semaphore_size: int = 10 * 1024 * 1024
    #: Bytes of results being fetched at once.
    inflight_response_bytes_semaphore_size: int = 50 * 1024 * 1024
    #: Submit the parts of a batch together, the first one last.
    parallel_fwdbwd_chunks: bool = True
    #: Compress passes with zstd.
    proto_compress_fwdbwd: bool = False
    #: Examples and estimated bytes in one part of a batch.
    fwdbwd_max_chunk_len: int = 1024
    fwdbwd_max_chunk_bytes_count: int = 5_000_000
    fwdbwd_dispatch_bytes_semaphore_size: int = 50_000_000
    #: How long a 402 means "wait".
    billing_exception_max_pause_duration_sec: int = 3600
    sample_no_retries: bool = False
    sample_enable_stuck_detection: bool = True
    #: Samples of one client in flight.
    sample_max_concurrent_requests: int = 2000
    use_pyqwest_transport: bool = True
    #: Make a model from a checkpoint by one `load_weights`.
    create_model_via_load_weights: bool = False
    #: Wait for samples through `retrieve_futures`.
    sample_use_retrieve_futures: bool = False
    #: Upload custom losses.
    custom_loss_server_side: bool = False
    #: Copies of a sampling client ask for their number.
    sample_join_sampling_session: bool = False


class ClientDynamicConfigResponse(LenientModel):
    """Flags a client asks for again while it runs."""

    refresh_interval_sec: int = 300
    sample_cancel_enabled: bool = False
    sample_cancel_max_batch_size: int = 64


class AuthTokenResponse(LenientModel):
    jwt: str = Field(repr=False)


class WhoamiResponse(LenientModel):
    user_urn: str
    org_urn: str
    email: str | None = None


class HealthResponse(LenientModel):
    status: Literal["ok"]
