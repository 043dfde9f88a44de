"""
Single endpoints, for what the clients do not offer: one request, one response.

    promised = await AsyncSamplingResource(service).asample(
        request=types.SampleRequest(base_model="...", prompt=prompt, sampling_params=params)
    )

Nothing is numbered, split or ordered here; retries, credentials and errors work as in the clients.
`tinkex.types` has the types of requests and responses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from tinkex import types
from tinkex.client.errors import APIStatusError
from tinkex.client.http.transport import Kind
from tinkex.client.http.typed_requests import DEADLINE_S, decode
from tinkex.client.session import Session
from tinkex.compat.raw_responses import AsyncAPIResponse, Raw
from tinkex.compat.request_options import Timeout
from tinkex.wire.codec import JSON_TYPE, PROTOBUF_TYPE
from tinkex.wire.protobuf import encode_forward_backward_request

if TYPE_CHECKING:
    from tinkex.client.service import ServiceClient

__all__ = [
    "AsyncFuturesResource",
    "AsyncFuturesResourceWithRawResponse",
    "AsyncModelsResource",
    "AsyncSamplingResource",
    "AsyncServiceResource",
    "AsyncTelemetryResource",
    "AsyncTelemetryResourceWithRawResponse",
    "AsyncTrainingResource",
    "AsyncWeightsResource",
]

T = TypeVar("T")
Headers = Mapping[str, str]
TimeoutLike = float | Timeout | None


class _Resource:
    """Endpoints of one kind, called through the connection of a client."""

    def __init__(self, client: ServiceClient | Session) -> None:
        self._session = client if isinstance(client, Session) else client.holder

    async def _ask(
        self,
        method: str,
        path: str,
        request: Any = None,
        *,
        answer: type[T],
        kind: Kind = Kind.REST,
        content_type: str = JSON_TYPE,
        extra_headers: Headers | None = None,
        timeout: TimeoutLike = DEADLINE_S,  # noqa: ASYNC109 (as upstream)
        max_retries: int | None = None,
    ) -> T:
        async def work() -> T:
            connection = await self._session.connect()
            return await connection.calls.call(
                method,
                path,
                request,
                answer=answer,
                kind=kind,
                content_type=content_type,
                headers=extra_headers,
                deadline_s=_seconds(timeout),
                # Retries are limited by time, not by number; 0 turns them off.
                give_up_s=0.0 if max_retries == 0 else None,
                about=path,
            )

        return await self._session.run(work())

    async def _submit(
        self, path: str, request: Any, *, kind: Kind = Kind.TRAIN, **more: Any
    ) -> types.UntypedAPIFuture:
        return await self._ask(
            "POST", path, request, answer=types.UntypedAPIFuture, kind=kind, **more
        )


def _seconds(timeout: TimeoutLike) -> float:
    parts = timeout.as_dict().values() if isinstance(timeout, Timeout) else (timeout,)
    limits = [part for part in parts if part is not None]
    return max(limits) if limits else DEADLINE_S


class AsyncServiceResource(_Resource):
    async def get_server_capabilities(self) -> types.GetServerCapabilitiesResponse:
        return await self._ask(
            "GET", "get_server_capabilities", answer=types.GetServerCapabilitiesResponse
        )

    async def health_check(self) -> types.HealthResponse:
        return await self._ask("GET", "healthz", answer=types.HealthResponse)

    async def auth_token(self) -> types.AuthTokenResponse:
        return await self._ask("POST", "auth/token", {}, answer=types.AuthTokenResponse)

    async def client_config(
        self, *, request: types.ClientConfigRequest
    ) -> types.ClientConfigResponse:
        return await self._ask("POST", "client/config", request, answer=types.ClientConfigResponse)

    async def client_dynamic_config(
        self,
        *,
        request: types.ClientConfigRequest,
        timeout: TimeoutLike = 10.0,  # noqa: ASYNC109 (as upstream)
        max_retries: int | None = None,
    ) -> types.ClientDynamicConfigResponse:
        return await self._ask(
            "POST",
            "client/dynamic_config",
            request,
            answer=types.ClientDynamicConfigResponse,
            timeout=timeout,
            max_retries=max_retries,
        )

    async def create_session(
        self, *, request: types.CreateSessionRequest
    ) -> types.CreateSessionResponse:
        return await self._ask(
            "POST", "create_session", request, answer=types.CreateSessionResponse
        )

    async def session_heartbeat(
        self,
        *,
        session_id: str,
        timeout: TimeoutLike = 10.0,  # noqa: ASYNC109 (as upstream)
        max_retries: int | None = None,
    ) -> types.SessionHeartbeatResponse:
        return await self._ask(
            "POST",
            "session_heartbeat",
            types.SessionHeartbeatRequest(session_id=session_id),
            answer=types.SessionHeartbeatResponse,
            timeout=timeout,
            max_retries=max_retries,
        )

    async def create_sampling_session(
        self, *, request: types.CreateSamplingSessionRequest
    ) -> types.CreateSamplingSessionResponse:
        return await self._ask(
            "POST", "create_sampling_session", request, answer=types.CreateSamplingSessionResponse
        )

    async def join_sampling_session(
        self, *, request: types.JoinSamplingSessionRequest
    ) -> types.JoinSamplingSessionResponse:
        return await self._ask(
            "POST", "join_sampling_session", request, answer=types.JoinSamplingSessionResponse
        )

    async def create_custom_loss(
        self, *, request: types.CreateCustomLossRequest
    ) -> types.UntypedAPIFuture:
        return await self._submit("create_custom_loss", request)


class AsyncModelsResource(_Resource):
    async def create(self, *, request: types.CreateModelRequest) -> types.UntypedAPIFuture:
        return await self._submit("create_model", request)

    async def get_info(self, *, request: types.GetInfoRequest) -> types.GetInfoResponse:
        return await self._ask("POST", "get_info", request, answer=types.GetInfoResponse)

    async def copy_weights(
        self,
        *,
        request: types.CopyWeightsRequest,
        extra_headers: Headers | None = None,
        extra_headers_secret: Headers | None = None,
    ) -> types.CopyWeightsResponse:
        return await self._ask(
            "POST",
            "copy_weights",
            request,
            answer=types.CopyWeightsResponse,
            extra_headers={**(extra_headers or {}), **(extra_headers_secret or {})},
        )


class AsyncTrainingResource(_Resource):
    async def forward_backward(
        self, *, request: types.ForwardBackwardRequest, forward_only: bool = False
    ) -> types.UntypedAPIFuture:
        return await self._submit(
            "forward_backward",
            encode_forward_backward_request(request, forward_only=forward_only),
            content_type=PROTOBUF_TYPE,
        )

    async def optim_step(self, *, request: types.OptimStepRequest) -> types.UntypedAPIFuture:
        return await self._submit("optim_step", request)


class AsyncWeightsResource(_Resource):
    async def load(self, *, request: types.LoadWeightsRequest) -> types.UntypedAPIFuture:
        return await self._submit("load_weights", request)

    async def save(
        self, *, request: types.SaveWeightsRequest, max_retries: int | None = None
    ) -> types.UntypedAPIFuture:
        return await self._submit("save_weights", request, max_retries=max_retries)

    async def save_for_sampler(
        self, *, request: types.SaveWeightsForSamplerRequest, max_retries: int | None = None
    ) -> types.UntypedAPIFuture:
        return await self._submit("save_weights_for_sampler", request, max_retries=max_retries)

    async def save_external(
        self, *, request: types.SaveWeightsExternalRequest, max_retries: int | None = None
    ) -> types.UntypedAPIFuture:
        return await self._submit("save_weights_external", request, max_retries=max_retries)

    async def list(
        self, model_id: types.ModelID, *, extra_headers: Headers | None = None
    ) -> types.CheckpointsListResponse:
        return await self._ask(
            "GET",
            f"training_runs/{quote(model_id, safe='')}/checkpoints",
            answer=types.CheckpointsListResponse,
            extra_headers=extra_headers,
        )

    async def get_external_weights_urls(
        self, *, model_id: types.ModelID, checkpoint_id: str, extra_headers: Headers | None = None
    ) -> types.ExternalWeightsUrlsResponse:
        run, checkpoint = quote(model_id, safe=""), quote(checkpoint_id, safe="")
        return await self._ask(
            "GET",
            f"training_runs/{run}/checkpoints/{checkpoint}/external_weights_urls",
            answer=types.ExternalWeightsUrlsResponse,
            extra_headers=extra_headers,
        )


class AsyncSamplingResource(_Resource):
    async def asample(
        self,
        *,
        request: types.SampleRequest,
        extra_headers: Headers | None = None,
        max_retries: int | None = None,
    ) -> types.UntypedAPIFuture:
        """Any of the three modes: a sampling session, `base_model`, or `model_path`."""
        return await self._submit(
            "asample",
            request,
            kind=Kind.SAMPLE,
            extra_headers=extra_headers,
            max_retries=max_retries,
        )


class AsyncFuturesResource(_Resource):
    @property
    def with_raw_response(self) -> AsyncFuturesResourceWithRawResponse:
        """The same, with raw responses: status, headers, bytes."""
        return AsyncFuturesResourceWithRawResponse(self)

    async def retrieve(
        self,
        *,
        request: types.FutureRetrieveRequest,
        extra_headers: Headers | None = None,
        timeout: TimeoutLike = 45.0,  # noqa: ASYNC109 (as upstream)
        max_retries: int | None = None,
    ) -> types.FutureRetrieveResponse:
        """The current state: the result, or `TryAgainResponse`."""
        try:
            return await self._ask(
                "POST",
                "retrieve_future",
                request,
                answer=types.FutureRetrieveResponse,  # type: ignore[arg-type]
                kind=Kind.RETRIEVE,
                extra_headers=extra_headers,
                timeout=timeout,
                max_retries=0 if max_retries is None else max_retries,
            )
        except APIStatusError as error:
            if error.status_code != 408:  # 408 means that the result is not ready
                raise
            return decode(types.TryAgainResponse, error.response, about="retrieve_future")

    async def retrieve_multi(
        self,
        *,
        request: types.FuturesRetrieveRequest,
        extra_headers: Headers | None = None,
        timeout: TimeoutLike = 45.0,  # noqa: ASYNC109 (as upstream)
        max_retries: int | None = None,
    ) -> types.FuturesRetrieveResponse:
        return await self._ask(
            "POST",
            "retrieve_futures",
            request,
            answer=types.FuturesRetrieveResponse,
            kind=Kind.RETRIEVE,
            extra_headers=extra_headers,
            timeout=timeout,
            max_retries=0 if max_retries is None else max_retries,
        )


class AsyncFuturesResourceWithRawResponse:
    def __init__(self, futures: AsyncFuturesResource) -> None:
        self._raw = Raw(futures._session)

    async def retrieve(
        self,
        *,
        request: types.FutureRetrieveRequest,
        extra_headers: Headers | None = None,
        timeout: TimeoutLike = 45.0,  # noqa: ASYNC109 (as upstream)
        max_retries: int | None = 0,
    ) -> AsyncAPIResponse:
        return await self._raw.request_async(
            "POST",
            "retrieve_future",
            request,
            headers=extra_headers,
            timeout=_seconds(timeout),
            max_retries=max_retries,
        )


class AsyncTelemetryResource(_Resource):
    @property
    def with_raw_response(self) -> AsyncTelemetryResourceWithRawResponse:
        """The same, with raw responses."""
        return AsyncTelemetryResourceWithRawResponse(self)

    async def send(
        self,
        *,
        request: types.TelemetrySendRequest,
        timeout: TimeoutLike = 5.0,  # noqa: ASYNC109 (as upstream)
    ) -> types.TelemetryResponse:
        return await self._ask(
            "POST", "telemetry", request, answer=types.TelemetryResponse, timeout=timeout
        )


class AsyncTelemetryResourceWithRawResponse:
    def __init__(self, telemetry: AsyncTelemetryResource) -> None:
        self._raw = Raw(telemetry._session)

    async def send(
        self,
        *,
        request: types.TelemetrySendRequest,
        timeout: TimeoutLike = 5.0,  # noqa: ASYNC109 (as upstream)
    ) -> AsyncAPIResponse:
        return await self._raw.request_async(
            "POST", "telemetry", request, timeout=_seconds(timeout)
        )
