"""
Typed HTTP calls. Each layer adds one thing:

        Calls.call              typed request in, typed response out
          Calls.with_retries    retries under the policy
            Calls.once          one exchange; failures become tinkex errors
              Calls._send       adds the credential; once more with a new token after a 401
                Transport.send  bytes and headers; follows redirects
"""

from __future__ import annotations

import copy
import logging
import platform
import random
import sys
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from time import monotonic
from typing import Any, Self, TypeVar

from tinkex.client.auth.credentials import Credential
from tinkex.client.errors import (
    APIConnectionError,
    APIError,
    APIResponseValidationError,
    APIStatusError,
    APITimeoutError,
    TinkerError,
    identified,
    status_error,
)
from tinkex.client.http.backpressure import ServiceLimits
from tinkex.client.http.circuit_breaker import Breaker
from tinkex.client.http.retried_call import RetriedCall
from tinkex.client.http.retry import LONG_WAIT_S, requested_delay_s
from tinkex.client.http.transport import (
    DeadlineExceeded,
    Kind,
    Request,
    Response,
    StreamedResponse,
    Transport,
    Unreachable,
)
from tinkex.client.observe import instrumentation
from tinkex.client.observe.waiting import Cause, Limit
from tinkex.client.settings import PROTOCOL_VERSION, Settings
from tinkex.wire.codec import JSON_TYPE, NOT_JSON, decode_json, encode_json
from tinkex.wire.content_digest import is_intact
from tinkex.wire.errors import WireError

log = logging.getLogger("tinkex.calls")

T = TypeVar("T")
A = TypeVar("A", bound=Response | StreamedResponse)
E = TypeVar("E", bound=TinkerError)

DEADLINE_S = 60.0
#: A server that is lost again so soon after a line about it is not mentioned again.
CONNECTION_QUIET_S = 10.0
ACCEPTS = "accepts requests again"
KEY_HEADER = "X-API-Key"
#: Headers that may be logged with their values: the client sets them, and none is secret.
_LOGGED_HEADERS = frozenset({"accept", "content-type", "content-encoding", "x-idempotency-key"})
_SECRET_HEADERS = frozenset(
    {"x-api-key", "x-tinker-weights-access-token", "cf-access-client-secret", "authorization"}
)


def client_headers(version: str) -> dict[str, str]:
    """What every request says about this client; servers adapt to the version."""
    systems = {"Linux": "Linux", "Darwin": "MacOS", "Windows": "Windows", "FreeBSD": "FreeBSD"}
    machines = {"x86_64": "x64", "AMD64": "x64", "aarch64": "arm64", "arm64": "arm64"}
    system, machine = platform.system(), platform.machine()
    return {
        "Accept": JSON_TYPE,
        "User-Agent": f"tinkex/{version} (tinker {PROTOCOL_VERSION})",
        "X-Stainless-Package-Version": PROTOCOL_VERSION,
        "X-Stainless-OS": systems.get(system, f"Other:{system}"),
        "X-Stainless-Arch": machines.get(machine, f"other:{machine}"),
        "X-Stainless-Runtime": platform.python_implementation(),
        "X-Stainless-Runtime-Version": ".".join(map(str, sys.version_info[:3])),
        "X-Stainless-Async": "async:asyncio",
    }


class Calls:
    """Requests to one service with one credential. Belongs to one event loop."""

    def __init__(
        self,
        settings: Settings,
        transport: Transport,
        limits: ServiceLimits,
        *,
        headers: Mapping[str, str],
        base_url: str | None = None,
        credential: Credential | None = None,
        clock: Callable[[], float] = monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self.settings = settings
        self.limits = limits
        self._transport = transport
        self.clock = clock
        self.rng = rng or random.Random()
        self.root = base_url or settings.base_url
        self._headers = merged(headers, settings.headers)
        self._sets_own_key = any(name.lower() == KEY_HEADER.lower() for name in settings.headers)
        #: Queried before every attempt.
        self.credential = credential or settings.credential()
        #: Called for every 429, with the seconds of the shared back-off.
        self.on_rate_limit: Callable[[float], None] = lambda _: None
        self.tracing = instrumentation.tracing() if settings.otel else None
        #: Whether the service has ever responded: a wrong address should fail early.
        self.reached = False

    def with_credential(self, credential: Credential) -> Self:
        """The same service with another credential."""
        sibling = copy.copy(self)
        sibling.credential = credential
        return sibling

    async def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        answer: type[T],
        kind: Kind = Kind.SESSION,
        content_type: str = JSON_TYPE,
        headers: Mapping[str, str] | None = None,
        deadline_s: float = DEADLINE_S,
        give_up_s: float | None = None,
        rate_limit_wait_s: float | None = None,
        rate_limit_ends: Callable[[], Limit] = Limit,
        follow_redirects: bool = True,
        about: str = "",
    ) -> T:
        """
        Send a wire type (or encoded bytes) and return the response as `answer`.

        Retried for `give_up_s` (default: from the settings; 0 tries once). With
        `rate_limit_wait_s` a 429 is not a failure: the call waits as long as the server asks, or
        `rate_limit_wait_s`, as often as it comes; the caller ends that at `rate_limit_ends`.
        """
        request = self.request(
            method,
            path,
            body,
            kind=kind,
            content_type=content_type,
            headers=headers,
            deadline_s=deadline_s,
            follow_redirects=follow_redirects,
        )

        async def attempt_once() -> T:
            response = await self.once(request, about=about)
            # Decoded here, so that a damaged response is retried.
            return None if answer is type(None) else decode(answer, response, about=about)

        return await self.with_retries(
            attempt_once,
            path=path,
            kind=kind,
            give_up_s=give_up_s,
            rate_limit_wait_s=rate_limit_wait_s,
            rate_limit_ends=rate_limit_ends,
        )

    async def with_retries(
        self,
        attempt_once: Callable[[], Awaitable[T]],
        *,
        path: str,
        kind: Kind = Kind.SESSION,
        give_up_s: float | None = None,
        rate_limit_wait_s: float | None = None,
        rate_limit_ends: Callable[[], Limit] = Limit,
    ) -> T:
        """Call `attempt_once`, and retry it under the policy."""
        call = RetriedCall(
            self,
            attempt_once,
            path=path,
            kind=kind,
            give_up_s=give_up_s,
            rate_limit_wait_s=rate_limit_wait_s,
            rate_limit_ends=rate_limit_ends,
        )
        return await call.run()

    def cause(self, error: APIError) -> Cause:
        """Why a request is retried, for the user."""
        if not isinstance(error, APIStatusError):
            return self.no_answer(error.summary.removeprefix(f"{self.root}: "))
        reason = error.summary
        asked_s = requested_delay_s(error, datetime.now(UTC))
        if asked_s is not None and asked_s > LONG_WAIT_S:
            reason = f"{reason.rstrip('.')}. It asks to wait {asked_s:.0f} s (Retry-After)"
        if error.status_code == 429:
            return Cause("busy", self.root, reason, does="Waiting", over=ACCEPTS)
        return Cause(f"status {error.status_code}", self.root, reason, over=ACCEPTS)

    def no_answer(self, reason: str) -> Cause:
        over = "answers again" if self.reached else "answers"
        return Cause("connection", self.root, reason, over=over, quiet_s=CONNECTION_QUIET_S)

    def note_rate_limit(self, path: str, error: APIError, delay_s: float) -> None:
        """After a 429: delay all requests with the same limits by `delay_s`."""
        self.limits.backoff.extend(delay_s)
        self.limits.busy = self.cause(error)
        instrumentation.METRICS.count("rate_limited", instrumentation.endpoint(path))
        self.on_rate_limit(delay_s)

    def breaker(self, kind: Kind) -> Breaker | None:
        # Telemetry may fail silently, and must not count as a failure of the service.
        policy = self.settings.breaker
        if policy is None or kind is Kind.TELEMETRY:
            return None
        if (kind, policy) not in self.limits.breakers:
            self.limits.breakers[kind, policy] = Breaker(policy, self.clock)
        return self.limits.breakers[kind, policy]

    async def once(
        self, request: Request, *, about: str = "", on_send: Callable[[], None] | None = None
    ) -> Response:
        """
        One exchange. Raises for every status that is not a success.

        `on_send` is called just before the transport gets the request. An error without that call
        means that nothing was sent.
        """
        with self.network_errors(request, about=about):
            response = await self._send(request, self._exchange, on_send)
        self._note_response(response)
        if response.status_code >= 300:
            raise self._error_from(request, response, about)
        return response

    async def open(self, request: Request, *, about: str = "") -> StreamedResponse:
        """Like `once`, for a response that is read as it arrives. The caller must close it."""
        with self.network_errors(request, about=about):
            answer = await self._send(request, self._stream)
        self._note_response(answer)
        if isinstance(answer, Response):
            raise self._error_from(request, answer, about)
        return answer

    @contextmanager
    def network_errors(self, request: Request, *, about: str = "") -> Iterator[None]:
        """Converts errors of the transport to tinkex errors."""
        try:
            yield
        except DeadlineExceeded as error:
            timeout = APITimeoutError(request.without_payload())
            raise self._located(timeout, request, about, error.reason) from error
        except Unreachable as error:
            lost = APIConnectionError(request.without_payload())
            raise self._located(lost, request, about, error.reason, str(error)) from error

    def _note_response(self, answer: Response | StreamedResponse) -> None:
        self.reached = True
        if note := answer.headers.get("x-deprecation-note"):
            level = logging.WARNING
            if answer.headers.get("x-deprecation-level") == "error":
                level = logging.ERROR
            log.log(level, "%s", note)

    def _error_from(
        self, request: Request, response: Response, about: str
    ) -> APIConnectionError | APIStatusError:
        if response.status_code == 400 and not response.content:
            # Servers send a body with a 400. Without a body, it comes from a faulty proxy.
            error = APIConnectionError(request.without_payload())
            found = "an empty 400, probably from a broken proxy"
            return self._located(error, request, about, found)
        return status_error(response, about=about)

    async def _send(
        self,
        request: Request,
        exchange: Callable[[Request], Awaitable[A]],
        on_send: Callable[[], None] | None = None,
    ) -> A:
        """One exchange with the current credential; a second one if the token had expired."""
        signed = await self.signed(request)
        if on_send is not None:
            on_send()
        answer = await exchange(signed)
        refused = answer.status_code == 401 and signed is not request
        if refused and await self.credential.renew(signed.headers[KEY_HEADER]):
            answer = await exchange(await self.signed(request))
        return answer

    async def signed(self, request: Request) -> Request:
        """The request with the current credential, unless it has one already."""
        if self._sets_own_key or KEY_HEADER in request.headers:
            return request
        token = await self.credential.token()
        if token is None:
            return request
        return replace(request, headers={**request.headers, KEY_HEADER: token})

    async def _stream(self, request: Request) -> StreamedResponse | Response:
        """A response whose body is still arriving; an error response is read to its end."""
        with _Measured(request, self.clock) as measured:
            streamed = await self._transport.stream(request)
            measured.status = streamed.status_code
        if streamed.status_code < 300:
            return streamed
        return _without_secrets(await streamed.read_all(), request)

    async def _exchange(self, request: Request) -> Response:
        debugging = log.isEnabledFor(logging.DEBUG)
        if debugging:
            log.debug("%s %s %s", request.method, request.path, _loggable(request.headers))
        started = self.clock()
        with _Measured(request, self.clock) as measured:
            response = await self._transport.send(request)
            measured.status, measured.size = response.status_code, len(response.content)
        if not is_intact(response.content, response.headers.get("content-digest")):
            raise Unreachable(
                "the response was damaged in transit (its Content-Digest does not match)"
            )
        if debugging:
            log.debug(
                "%s %s: %d, %d bytes after %.3f s",
                request.method,
                request.path,
                response.status_code,
                len(response.content),
                self.clock() - started,
            )
        return response if response.status_code < 300 else _without_secrets(response, request)

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        kind: Kind = Kind.SESSION,
        content_type: str = JSON_TYPE,
        headers: Mapping[str, str] | None = None,
        deadline_s: float = DEADLINE_S,
        follow_redirects: bool = True,
    ) -> Request:
        """The request that `once` sends: with the client's headers and the encoded body."""
        sent = dict(self._headers)
        request_id = None
        if method != "GET":
            sent["Content-Type"] = content_type
            # The same for all attempts, so that a server can recognize a retry.
            # Unique is enough: `uuid4` asks the kernel for random bytes each time.
            key = uuid.UUID(int=self.rng.getrandbits(128), version=4)
            request_id = sent["X-Idempotency-Key"] = f"tinkex-{key}"
        if headers:
            sent = merged(sent, headers)
        if self.tracing is not None:
            self.tracing.inject(sent)
        data = body if body is None or isinstance(body, bytes) else encode_json(body)
        return Request(
            method=method,
            url=f"{self.root}/api/v1/{path}",
            headers=sent,
            body=data,
            deadline_s=deadline_s,
            kind=kind,
            request_id=request_id,
            follow_redirects=follow_redirects,
        )

    def _located(self, error: E, request: Request, about: str, reason: str, found: str = "") -> E:
        """The error with its text: what happened, then to which request, then what to check."""
        about = f"{about}: " if about else ""
        found = f": {found}" if found and found != reason else ""
        return error.explain(
            f"{self.root}: {reason}.",
            details=f"{about}{request.method} {request.url}{identified(request)}{found}",
            hint="Check that the server is running and that base_url (TINKER_BASE_URL) is right.",
        )


# A class, because a context manager made from a generator takes twice the time for each request.
class _Measured:
    """Counts one exchange, its bytes and its duration."""

    __slots__ = ("_clock", "_endpoint", "_metrics", "_size", "_started", "size", "status")

    def __init__(self, request: Request, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._metrics = instrumentation.METRICS
        self._endpoint = instrumentation.endpoint(request.url.partition("/api/v1/")[2])
        self._size = len(request.body or b"")
        self._started = 0.0
        #: None if there was no response.
        self.status: int | None = None
        self.size = 0

    def __enter__(self) -> Self:
        self._metrics.request_started(self._endpoint, self._size)
        self._started = self._clock()
        return self

    def __exit__(self, *_: object) -> None:
        status = "none" if self.status is None else str(self.status)
        taken_s = self._clock() - self._started
        self._metrics.request_finished(self._endpoint, status, self.size, taken_s)


def merged(headers: Mapping[str, str], over: Mapping[str, str]) -> dict[str, str]:
    """All headers, with case-insensitive names; `over` takes precedence."""
    if not over:
        return dict(headers)
    replaced = {name.lower() for name in over}
    kept = {name: value for name, value in headers.items() if name.lower() not in replaced}
    return {**kept, **over}


def _without_secrets(response: Response, request: Request) -> Response:
    """Removes secrets: some gateways echo the request, and errors are printed and stored."""
    content = response.content
    for name, value in request.headers.items():
        if name.lower() in _SECRET_HEADERS and value:
            content = content.replace(value.encode(), b"***")
    return response if content == response.content else replace(response, content=content)


def _loggable(headers: Mapping[str, str]) -> dict[str, str]:
    """Headers for the log, with only those values that cannot be secret."""
    return {
        name: value if low in _LOGGED_HEADERS or low.startswith("x-tinker-request") else "…"
        for name, value in headers.items()
        # These are always the same.
        if not (low := name.lower()).startswith(("x-stainless", "user-agent"))
    }


def decode(answer: type[T], response: Response, *, about: str = "") -> T:
    """The body as `answer`, or an error that says what does not fit."""
    try:
        return decode_json(answer, response.content)
    except ValueError as error:
        what = f"{about}: " if about else ""
        unreadable = APIResponseValidationError(
            response,
            response.text[:2000],
            f"{what}the response to {response.request.method} {response.request.path}"
            f"{identified(response.request, response)} is not a {answer.__name__}: "
            f"{str(error).rstrip('.')}. "
            "Is base_url the address of a Tinker service?",
        )
        unreadable.garbled = isinstance(error, WireError) and error.errors[0].type == NOT_JSON
        raise unreadable from error
