"""The seam to the network: bytes and headers in, bytes and headers out. Knows no protocol.

The only place that imports aiohttp, and only when the first request is sent. Why aiohttp:
docs/decisions/0002-transport.md.
"""

from __future__ import annotations

import asyncio
import enum
import functools
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from tinkex.client.errors import TinkerError

if TYPE_CHECKING:
    import aiohttp

CONNECT_S = 10.0
#: Idle connections are dropped before common proxies and servers do so (uvicorn: 5 s would race;
#: a lost race is a retry, not an error).
KEEP_ALIVE_S = 20.0


class Kind(enum.Enum):
    """Kinds of work; each has connections of its own, so that none can starve another."""

    SESSION = "session"
    TRAIN = "train"
    SAMPLE = "sample"
    RETRIEVE = "retrieve"
    TELEMETRY = "telemetry"


#: Connections at most for each kind; 0 is no limit. Polls are held open by the server, each on a
#: connection of its own; how many there are is limited where samples are admitted.
CONNECTIONS = {
    Kind.SESSION: 16,
    Kind.TRAIN: 64,
    Kind.SAMPLE: 256,
    Kind.RETRIEVE: 0,
    Kind.TELEMETRY: 2,
}


def most_polls() -> int:
    """How many connections may be held open: half of the files this process may have."""
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        return 256
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1_000_000 if soft == resource.RLIM_INFINITY else max(soft // 2, 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request. Headers and body may hold secrets, so neither is printed."""

    method: str
    url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    body: bytes | None = field(default=None, repr=False)
    #: Seconds from start to the last byte of the answer.
    deadline_s: float = 60.0
    kind: Kind = Kind.SESSION
    #: What it can be found by: the same for all its attempts.
    request_id: str | None = None

    @property
    def path(self) -> str:
        return urlsplit(self.url).path

    def bare(self) -> Request:
        """What an error may keep: where it went, nothing of what it carried."""
        return Request(method=self.method, url=self.url, kind=self.kind, request_id=self.request_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """One answer, read to the end. Header names are lower case."""

    status_code: int
    headers: Mapping[str, str] = field(default_factory=dict)
    content: bytes = field(default=b"", repr=False)
    #: Without headers and body.
    request: Request

    @property
    def text(self) -> str:
        return self.content.decode("utf-8", "replace")

    def json(self) -> Any:
        return json.loads(self.content)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Streamed:
    """One answer whose body is still coming. To be closed; belongs to one event loop."""

    status_code: int
    headers: Mapping[str, str]
    #: Without headers and body.
    request: Request
    #: The next bytes, none at the end. Raises `Unreachable` when they do not come.
    read: Callable[[], Awaitable[bytes]] = field(repr=False)
    #: Hangs up, unless everything was read: then the connection serves others.
    close: Callable[[], None] = field(repr=False)

    async def chunks(self) -> AsyncIterator[bytes]:
        while chunk := await self.read():
            yield chunk

    async def whole(self) -> Response:
        """The same answer, read to the end and closed."""
        try:
            content = b"".join([chunk async for chunk in self.chunks()])
        finally:
            self.close()
        return Response(
            status_code=self.status_code,
            headers=self.headers,
            content=content,
            request=self.request,
        )


class Unreachable(Exception):
    """No whole answer came back: refused, reset, cut short. Raised by transports only."""


class TooSlow(Unreachable):
    """No whole answer within the deadline."""


class Transport(Protocol):
    """
    Sends one request and returns its answer, whatever the status.

    Raises `Unreachable` or `TooSlow` when there is none. Never repeats a request, never follows
    a redirect: both are decided above. Used from one event loop.
    """

    async def send(self, request: Request) -> Response: ...

    async def stream(self, request: Request) -> Streamed:
        """The same, without waiting for the body; the deadline is for each piece of it."""

    async def close(self) -> None: ...


class HttpTransport:
    """HTTP/1.1 over aiohttp, with a pool of connections for each kind of work."""

    def __init__(
        self, base_url: str, *, ca_bundle: str | None = None, proxy: str | None = None
    ) -> None:
        self._base_url = base_url
        self._ca_bundle = ca_bundle
        self._sessions: dict[Kind, aiohttp.ClientSession] = {}
        # Found once for all requests: aiohttp's own look-up (`trust_env`) costs 0.3 ms each time.
        self._proxy = proxy
        self._tls: ssl.SSLContext | None = None

    async def send(self, request: Request) -> Response:
        with _failures(request):
            async with asyncio.timeout(request.deadline_s), self._ask(request) as answer:
                return Response(
                    status_code=answer.status,
                    headers=_headers(answer),
                    content=await answer.read(),
                    request=request.bare(),
                )

    async def stream(self, request: Request) -> Streamed:
        with _failures(request):
            async with asyncio.timeout(request.deadline_s):
                answer = await self._ask(request)

        async def read() -> bytes:
            with _failures(request):
                async with asyncio.timeout(request.deadline_s):
                    return await answer.content.readany()

        return Streamed(
            status_code=answer.status,
            headers=_headers(answer),
            request=request.bare(),
            read=read,
            close=answer.close,
        )

    def _ask(self, request: Request) -> aiohttp.client._RequestContextManager:
        session = self._sessions.get(request.kind) or self._open(request.kind)
        return session.request(
            request.method,
            request.url,
            data=request.body,
            headers=request.headers,
            proxy=self._proxy,
            allow_redirects=False,
        )

    async def close(self) -> None:
        sessions, self._sessions = self._sessions, {}
        for session in sessions.values():
            await session.close()

    def _open(self, kind: Kind) -> aiohttp.ClientSession:
        import aiohttp

        if self._tls is None and self._base_url.startswith("https:"):
            self._tls = _tls(self._ca_bundle)
        connector = _connector()(
            limit=CONNECTIONS[kind],
            keepalive_timeout=KEEP_ALIVE_S,
            ssl=self._tls if self._tls is not None else True,
        )
        session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            requote_redirect_url=False,
            # Ours are complete; aiohttp must not add `application/octet-stream` to bare bodies.
            skip_auto_headers=("User-Agent", "Content-Type"),
        )
        self._sessions[kind] = session
        return session


@functools.cache
def _connector() -> type[aiohttp.TCPConnector]:
    import aiohttp

    class Connector(aiohttp.TCPConnector):
        """
        Uses no connection again on which something came while nobody had asked.

        It would be taken for the answer to the next request: gateways say 408 before they hang up,
        and broken ones send an answer twice, or more of it than they announced.
        """

        async def connect(self, *args: Any, **named: Any) -> aiohttp.connector.Connection:
            while True:
                connection = await super().connect(*args, **named)
                if connection.protocol is None or not connection.protocol.should_close:
                    return connection
                connection.close()

    return Connector


def _headers(answer: aiohttp.ClientResponse) -> dict[str, str]:
    return {name.lower(): value for name, value in answer.headers.items()}


@contextmanager
def _failures(request: Request) -> Iterator[None]:
    """What goes wrong on the network, in words of ours."""
    import aiohttp

    try:
        yield
    except TimeoutError as error:
        raise TooSlow(f"no answer within {request.deadline_s:g} s") from error
    except aiohttp.InvalidURL as error:
        raise TinkerError(f"{request.url!r} is not a URL that can be asked.") from error
    except (aiohttp.ClientError, OSError, asyncio.IncompleteReadError) as error:
        raise Unreachable(str(error) or type(error).__name__) from error


def _tls(ca_bundle: str | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_bundle)
    except (OSError, ssl.SSLError) as error:
        raise TinkerError(
            f"The CA bundle {ca_bundle!r} cannot be read ({error}). "
            "TINKEX_CA_BUNDLE must name a PEM file."
        ) from error
