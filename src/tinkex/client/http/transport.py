"""
Sends HTTP requests with aiohttp: bytes and headers in, bytes and headers out.

Knows nothing about the API. The only module that imports aiohttp, and only when the first request
is sent. Why aiohttp: docs/decisions/0014-client.md.
"""

from __future__ import annotations

import asyncio
import enum
import errno
import functools
import json
import ssl
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol, Self
from urllib.parse import urljoin, urlsplit

from tinkex.client.errors import TinkerError, status_error

if TYPE_CHECKING:
    import aiohttp


CONNECT_S = 10.0
#: Idle connections are closed earlier than common proxies and servers close them. If a server is
#: faster, the request is retried.
KEEP_ALIVE_S = 20.0
#: Larger bodies are sent in pieces: asyncio copies the part that the socket does not take at once.
MAX_BODY_AT_ONCE = 1024 * 1024
PIECE_BYTES = 256 * 1024
#: Redirects of one request that are followed; the next one is returned as the response.
MAX_REDIRECTS = 20
#: Statuses with a new location, and those of them that keep method and body.
REDIRECTS = frozenset({301, 302, 303, 307, 308})
KEEPS_METHOD = frozenset({307, 308})


class Kind(enum.Enum):
    """Kinds of requests; each has its own connections, so that none can starve another."""

    SESSION = "session"
    TRAIN = "train"
    SAMPLE = "sample"
    RETRIEVE = "retrieve"
    #: Queries about runs, checkpoints and models, and copies of weights.
    REST = "rest"
    TELEMETRY = "telemetry"


#: Maximum connections for each kind; 0 means no limit. Servers hold polls open, each on its own
#: connection; the limit on running samples bounds their number.
CONNECTIONS = {
    Kind.SESSION: 16,
    Kind.TRAIN: 64,
    Kind.SAMPLE: 256,
    Kind.RETRIEVE: 0,
    Kind.REST: 64,
    Kind.TELEMETRY: 2,
}


def max_open_polls() -> int:
    """How many connections may be held open: half of the process's file limit."""
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        return 256
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1_000_000 if soft == resource.RLIM_INFINITY else max(soft // 2, 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request. Headers and body may contain secrets, so neither is printed."""

    method: str
    url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    body: bytes | None = field(default=None, repr=False)
    #: Seconds from the start to the last byte of the response.
    deadline_s: float = 60.0
    kind: Kind = Kind.SESSION
    #: Identifies the request in logs; the same for all its attempts.
    request_id: str | None = None
    #: Whether a redirect within the same origin is followed.
    follow_redirects: bool = True

    @property
    def path(self) -> str:
        return urlsplit(self.url).path

    def without_payload(self) -> Request:
        """The parts that an error may keep: no headers and no body."""
        return Request(method=self.method, url=self.url, kind=self.kind, request_id=self.request_id)


class Headers(dict[str, str]):
    """Response headers. Names are stored in lower case and looked up in any case."""

    __slots__ = ()

    def __init__(self, headers: Mapping[str, str] | None = None) -> None:
        super().__init__()
        for name, value in (headers or {}).items():
            low = name.lower()
            # RFC 9110: several headers of one name are one list.
            self[low] = f"{dict.__getitem__(self, low)}, {value}" if low in self else value

    def __getitem__(self, name: str) -> str:
        return super().__getitem__(name.lower())

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name.lower() if isinstance(name, str) else name)

    def get(self, name: str, default: Any = None) -> Any:
        return super().get(name.lower(), default)

    def __reduce__(self) -> tuple[Any, ...]:
        return Headers, (dict(self),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """
    One response, read to the end.

    Attributes that programs read from `error.response` have the names of httpx, as upstream.
    """

    status_code: int
    #: May contain cookies, so they are not printed.
    headers: Mapping[str, str] = field(default_factory=Headers, repr=False)
    content: bytes = field(default=b"", repr=False)
    #: Without headers and body.
    request: Request
    #: From sending the request to the end of the response.
    elapsed: timedelta = field(default=timedelta(0), repr=False, compare=False)

    def __post_init__(self) -> None:
        if type(self.headers) is not Headers:
            object.__setattr__(self, "headers", Headers(self.headers))

    @property
    def url(self) -> str:
        """The address that responded, after redirects."""
        return self.request.url

    @property
    def reason_phrase(self) -> str:
        from http import HTTPStatus

        try:
            return HTTPStatus(self.status_code).phrase
        except ValueError:
            return ""

    @property
    def is_success(self) -> bool:
        return 200 <= self.status_code < 300

    @property
    def is_redirect(self) -> bool:
        return 300 <= self.status_code < 400

    @property
    def is_client_error(self) -> bool:
        return 400 <= self.status_code < 500

    @property
    def is_server_error(self) -> bool:
        return self.status_code >= 500

    @property
    def is_error(self) -> bool:
        return self.status_code >= 400

    def raise_for_status(self) -> Self:
        """This response if it is a success; otherwise raises its `APIStatusError`."""
        if self.is_success:
            return self
        raise status_error(self)

    @property
    def text(self) -> str:
        return self.content.decode("utf-8", "replace")

    def json(self) -> Any:
        return json.loads(self.content)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StreamedResponse:
    """A response whose body is still arriving. Must be closed; belongs to one event loop."""

    status_code: int
    headers: Mapping[str, str]
    #: Without headers and body.
    request: Request
    #: The next bytes, empty at the end. Raises `Unreachable` if they do not arrive.
    read: Callable[[], Awaitable[bytes]] = field(repr=False)
    #: Closes the connection, or returns it to the pool if everything was read.
    close: Callable[[], None] = field(repr=False)

    async def chunks(self) -> AsyncIterator[bytes]:
        while chunk := await self.read():
            yield chunk

    async def read_all(self) -> Response:
        """The same response, read to the end and closed."""
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
    """
    No complete response: refused, reset or cut short. Raised by transports only.

    `reason` says it in plain words, such as `connection refused`.
    """

    def __init__(self, found: str, reason: str | None = None) -> None:
        super().__init__(found)
        self.reason = reason or found


class DeadlineExceeded(Unreachable):
    """No complete response within the deadline."""


class Transport(Protocol):
    """
    Sends one request and returns its response, whatever the status.

    Raises `Unreachable` or `DeadlineExceeded` if there is none. Never retries: the caller does.
    Used from one event loop.
    """

    async def send(self, request: Request) -> Response: ...

    async def stream(self, request: Request) -> StreamedResponse:
        """Like `send`, without waiting for the body; the deadline applies to each piece of it."""

    async def close(self) -> None: ...


class HttpTransport:
    """
    HTTP/1.1 over aiohttp, with a connection pool for each kind of request.

    Follows redirects only within the same origin, because requests carry the key. Keeps cookies of
    its service, since load balancers use them for session affinity.
    """

    def __init__(
        self, base_url: str, *, ca_bundle: str | None = None, proxy: str | None = None
    ) -> None:
        self._base_url = base_url
        self._ca_bundle = ca_bundle
        self._sessions: dict[Kind, aiohttp.ClientSession] = {}
        # Looked up once: aiohttp's own lookup (`trust_env`) costs 0.3 ms for each request.
        self._proxy = proxy
        self._tls: ssl.SSLContext | None = None
        self._cookies: aiohttp.CookieJar | None = None

    async def send(self, request: Request) -> Response:
        started = monotonic()
        with _network_errors(request):
            async with asyncio.timeout(request.deadline_s):
                request, answer = await self._ask(request)
                async with answer:
                    content = await answer.read()
        return Response(
            status_code=answer.status,
            headers=Headers(answer.headers),
            content=content,
            request=request.without_payload(),
            elapsed=timedelta(seconds=monotonic() - started),
        )

    async def stream(self, request: Request) -> StreamedResponse:
        with _network_errors(request):
            async with asyncio.timeout(request.deadline_s):
                request, answer = await self._ask(request)

        async def read() -> bytes:
            with _network_errors(request):
                async with asyncio.timeout(request.deadline_s):
                    return await answer.content.readany()

        return StreamedResponse(
            status_code=answer.status,
            headers=Headers(answer.headers),
            request=request.without_payload(),
            read=read,
            close=answer.close,
        )

    async def _ask(self, request: Request) -> tuple[Request, aiohttp.ClientResponse]:
        """The response, with its body still unread, and the request that it belongs to."""
        session = self._sessions.get(request.kind) or self._open(request.kind)
        followed = 0
        while True:
            body, headers = _body(request)
            answer = await session.request(
                request.method,
                request.url,
                data=body,
                headers=headers,
                proxy=self._proxy,
                allow_redirects=False,
            )
            if (
                answer.status not in REDIRECTS
                or not request.follow_redirects
                or followed == MAX_REDIRECTS
            ):
                return request, answer
            following = redirected(request, answer.status, answer.headers.get("Location"))
            if following is None:
                return request, answer
            answer.release()
            request = following
            followed += 1

    async def close(self) -> None:
        sessions, self._sessions = self._sessions, {}
        for session in sessions.values():
            await session.close()

    def _open(self, kind: Kind) -> aiohttp.ClientSession:
        import aiohttp

        if self._tls is None and self._base_url.startswith("https:"):
            self._tls = _tls(self._ca_bundle)
        if self._cookies is None:
            self._cookies = _cookie_jar(self._base_url)
        connector = _connector()(
            limit=CONNECTIONS[kind],
            keepalive_timeout=KEEP_ALIVE_S,
            ssl=self._tls if self._tls is not None else True,
        )
        session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=self._cookies,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            requote_redirect_url=False,
            # Headers are complete; aiohttp must not add `application/octet-stream` to bodies.
            skip_auto_headers=("User-Agent", "Content-Type"),
        )
        self._sessions[kind] = session
        return session


def _body(request: Request) -> tuple[bytes | AsyncIterator[memoryview] | None, Mapping[str, str]]:
    """The body as aiohttp takes it, and the headers. With a length it is not sent as chunked."""
    body = request.body
    if body is None or len(body) <= MAX_BODY_AT_ONCE:
        return body, request.headers

    async def pieces() -> AsyncIterator[memoryview]:
        view = memoryview(body)
        for start in range(0, len(view), PIECE_BYTES):
            yield view[start : start + PIECE_BYTES]

    return pieces(), {**request.headers, "Content-Length": str(len(body))}


@functools.cache
def _connector() -> type[aiohttp.TCPConnector]:
    import aiohttp

    class Connector(aiohttp.TCPConnector):
        """
        Does not reuse a connection that received data while idle.

        Such data would be read as the response to the next request: gateways send a 408 before they
        close, and broken ones send a response twice, or more bytes than announced.
        """

        async def connect(self, *args: Any, **named: Any) -> aiohttp.connector.Connection:
            while True:
                connection = await super().connect(*args, **named)
                if connection.protocol is None or not connection.protocol.should_close:
                    return connection
                connection.close()

    return Connector


def _cookie_jar(base_url: str) -> aiohttp.CookieJar:
    from http.cookies import SimpleCookie

    import aiohttp
    import yarl

    service = yarl.URL(base_url)
    own_origin = origin(base_url)

    class Cookies(aiohttp.CookieJar):
        """Cookies of one origin. Cookies ignore ports, so another service could share the host."""

        def update_cookies(self, cookies: Any, response_url: yarl.URL = service) -> None:
            if origin(str(response_url)) == own_origin:
                super().update_cookies(cookies, response_url)

        def filter_cookies(self, request_url: yarl.URL = service) -> Any:
            if origin(str(request_url)) != own_origin:
                return SimpleCookie()
            return super().filter_cookies(request_url)

    # Values unchanged: most servers do not accept quoted ones. `unsafe` also accepts cookies from a
    # server that is addressed by IP.
    return Cookies(unsafe=True, quote_cookie=False)


def redirected(request: Request, status: int, location: str | None) -> Request | None:
    """The request after a redirect; None for another origin, which must not get the key."""
    url = redirect_url(request.url, location)
    if url is None or origin(url) != origin(request.url):
        return None
    request = replace(request, url=url)
    if status in KEEPS_METHOD or request.method in ("GET", "HEAD"):
        return request
    # As all HTTP clients do: the body is not sent again.
    left = ("content-type", "content-length", "content-encoding")
    headers = {name: each for name, each in request.headers.items() if name.lower() not in left}
    return replace(request, method="GET", body=None, headers=headers)


@contextmanager
def _network_errors(request: Request) -> Iterator[None]:
    """Converts network errors to `Unreachable` and `DeadlineExceeded`."""
    import aiohttp

    try:
        yield
    except TimeoutError as error:
        raise DeadlineExceeded(f"no response within {request.deadline_s:g} s") from error
    except aiohttp.InvalidURL as error:
        raise TinkerError(f"{request.url!r} is not a valid URL.") from error
    except (aiohttp.ClientError, OSError, asyncio.IncompleteReadError) as error:
        found = str(error) or type(error).__name__
        raise Unreachable(found, _plain_reason(error, found)) from error


def _plain_reason(error: BaseException, found: str) -> str:
    """What a network error means, in the words that people search for."""
    import aiohttp

    if isinstance(error, aiohttp.ClientProxyConnectionError):
        words = _ERRNO_WORDS.get(error.os_error.errno or 0, str(error.os_error))
        return f"the proxy at {error.host}:{error.port}: {words}"
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return "the host name cannot be resolved"
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        # Older releases of aiohttp set no `os_error` here.
        return f"the TLS connection failed ({error.certificate_error})"
    if isinstance(error, aiohttp.ClientConnectorSSLError):
        return f"the TLS connection failed ({error.os_error})"
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(cause, OSError) and cause.errno in _ERRNO_WORDS:
        return _ERRNO_WORDS[cause.errno]
    if "Connect call failed" in found:  # several addresses, each with an error of its own
        return "connection refused"
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "the server closed the connection"
    return found


_ERRNO_WORDS = {
    errno.ECONNREFUSED: "connection refused",
    errno.ECONNRESET: "connection reset",
    errno.EPIPE: "connection reset",
    errno.EHOSTUNREACH: "no route to the host",
    errno.ENETUNREACH: "the network is unreachable",
    errno.ETIMEDOUT: "the connection timed out",
}


def _tls(ca_bundle: str | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_bundle)
    except (OSError, ssl.SSLError) as error:
        raise TinkerError(
            f"The CA bundle {ca_bundle!r} cannot be read ({error}). "
            "TINKEX_CA_BUNDLE must name a PEM file."
        ) from error


# -- origins: which addresses may get the key ----------------------------------------------------

_USUAL_PORTS = {"http": 80, "https": 443}


def origin(url: str) -> tuple[str, str, int] | None:
    """Scheme, host and port; None if it is not an http:// or https:// address."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:  # a port that is not a number, or an incomplete IPv6 address
        return None
    if parts.scheme not in _USUAL_PORTS or not parts.hostname:
        return None
    return parts.scheme, parts.hostname, _USUAL_PORTS[parts.scheme] if port is None else port


def redirect_url(url: str, location: str | None) -> str | None:
    """The redirect target of a response from `url`; None if it is not an http(s) address."""
    if not location or "\\" in location:  # some programs read it as a slash: another host
        return None
    try:
        found = urljoin(url, location)
    except ValueError:
        return None
    return None if origin(found) is None else found


# -- proxies -------------------------------------------------------------------------------------


def proxy_variables(env: Mapping[str, str]) -> dict[str, str]:
    """The variables that `proxy_for` reads."""
    names = [f"{name}_proxy" for name in ("http", "https", "all", "no")]
    names += [*map(str.upper, names), "REQUEST_METHOD"]
    return {name: env[name] for name in names if name in env}


def proxy_for(url: str, env: Mapping[str, str]) -> str | None:
    """The proxy for this address, or None. Lowercase variables have precedence, as is usual."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    named = {
        name: env.get(f"{name}_proxy") or env.get(f"{name.upper()}_PROXY") or ""
        for name in (parts.scheme, "all", "no")
    }
    if parts.scheme == "http" and "REQUEST_METHOD" in env:
        # In a CGI program, HTTP_PROXY is a request header that any client can set.
        named["http"] = env.get("http_proxy", "")
    proxy = named[parts.scheme] or named["all"]
    if not proxy and sys.platform not in ("darwin", "win32"):
        return None
    import urllib.request

    if proxy:
        # Not documented, but the rules of NO_PROXY are implemented there.
        exempt = urllib.request.proxy_bypass_environment  # type: ignore[attr-defined]
        if exempt(host, {"no": named["no"]}):
            return None
    elif not urllib.request.proxy_bypass(host):
        proxy = urllib.request.getproxies().get(parts.scheme, "")  # from the system settings
    if not proxy:
        return None
    if "://" not in proxy:
        proxy = f"http://{proxy}"
    if not proxy.startswith(("http://", "https://")):
        raise TinkerError(
            f"The proxy set for {parts.scheme}:// addresses is not an http:// or https:// proxy "
            f"({proxy.split('://')[0]}). Use an HTTP proxy, or exempt {host} with NO_PROXY."
        )
    return proxy
