"""What a client requests at start-up: configuration flags, a token, its identity, server health."""

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
    """Flags that a server sets once, when a client starts. Each has a default."""

    #: Exchange the API key for a short-lived token.
    pjwt_auth_enabled: bool = False
    credential_default_source: str = "api_key"
    #: Limit on the estimated bytes of prompts that are being submitted.
    sample_dispatch_bytes_semaphore_size: int = 10 * 1024 * 1024
    #: Limit on the bytes of results that are being fetched.
    inflight_response_bytes_semaphore_size: int = 50 * 1024 * 1024
    #: Submit the chunks of a batch concurrently, the first one last.
    parallel_fwdbwd_chunks: bool = True
    #: Compress passes with zstd.
    proto_compress_fwdbwd: bool = False
    #: Maximum examples and estimated bytes of one chunk of a batch.
    fwdbwd_max_chunk_len: int = 1024
    fwdbwd_max_chunk_bytes_count: int = 5_000_000
    fwdbwd_dispatch_bytes_semaphore_size: int = 50_000_000
    #: How long a client waits and retries after HTTP 402.
    billing_exception_max_pause_duration_sec: int = 3600
    sample_no_retries: bool = False
    sample_enable_stuck_detection: bool = True
    #: Maximum samples of one client in flight.
    sample_max_concurrent_requests: int = 2000
    use_pyqwest_transport: bool = True
    #: Create a model from a checkpoint with one `load_weights`.
    create_model_via_load_weights: bool = False
    #: Wait for samples with `retrieve_futures`.
    sample_use_retrieve_futures: bool = False
    #: Upload custom losses and run them on the server.
    custom_loss_server_side: bool = False
    #: Copies of a sampling client request their clone id from the server.
    sample_join_sampling_session: bool = False


class ClientDynamicConfigResponse(LenientModel):
    """Flags that a client fetches again while it runs."""

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
