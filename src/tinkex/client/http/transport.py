"""Which proxy the environment names for an address."""

from __future__ import annotations

import asyncio
import enum
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
from urllib.parse import urlsplit

from tinkex.client.errors import TinkerError, status_error
from tinkex.client.http.origins import origin, redirect_url

if TYPE_CHECKING:
    import aiohttp


def proxy_variables(env: Mapping[str, str]) -> dict[str, str]:
    """What `proxy_for` reads of an environment."""
    names = [f"{name}_proxy" for name in ("http", "https", "all", "no")]
    names += [*map(str.upper, names), "REQUEST_METHOD"]
    return {name: env[name] for name in names if name in env}


def proxy_for(url: str, env: Mapping[str, str]) -> str | None:
    """The proxy for this address, or None. Small letters win over capitals, as everywhere."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    named = {
        name: env.get(f"{name}_proxy") or env.get(f"{name.upper()}_PROXY") or ""
        for name in (parts.scheme, "all", "no")
    }
    if parts.scheme == "http" and "REQUEST_METHOD" in env:
        # In a CGI program HTTP_PROXY is a header of whoever asks.
        named["http"] = env.get("http_proxy", "")
    proxy = named[parts.scheme] or named["all"]
    if not proxy and sys.platform not in ("darwin", "win32"):
        return None
    import urllib.request

    if proxy:
        # Documented nowhere but in its source, and the rules of NO_PROXY are written down there.
        exempt = urllib.request.proxy_bypass_environment  # type: ignore[attr-defined]
        if exempt(host, {"no": named["no"]}):
            return None
    elif not urllib.request.proxy_bypass(host):
        proxy = urllib.request.getproxies().get(parts.scheme, "")  # what the system says
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


# MERGED: The seam to the network: bytes and headers in, bytes and headers out. Knows no protocol. The only place that imports aiohttp, and only when the first request is sent. Why aiohttp: docs/decisions/0002-transport.md.


CONNECT_S = 10.0
#: Idle connections are dropped before common proxies and servers do so (uvicorn: 5 s would race;
#: a lost race is a retry, not an error).
KEEP_ALIVE_S = 20.0
#: Redirects of one request that are followed; the next one is the answer.
MOST_REDIRECTS = 20
#: Those that say where to ask, and those of them that keep method and body.
REDIRECTS = frozenset({301, 302, 303, 307, 308})
UNCHANGED = frozenset({307, 308})


class Kind(enum.Enum):
    """Kinds of work; each has connections of its own, so that none can starve another."""

    SESSION = "session"
    TRAIN = "train"
    SAMPLE = "sample"
    RETRIEVE = "retrieve"
    #: What users ask about: runs, checkpoints, models, copies of weights.
    REST = "rest"
    TELEMETRY = "telemetry"


#: Connections at most for each kind; 0 is no limit. Polls are held open by the server, each on a
#: connection of its own; how many there are is limited where samples are admitted.
CONNECTIONS = {
    Kind.SESSION: 16,
    Kind.TRAIN: 64,
    Kind.SAMPLE: 256,
    Kind.RETRIEVE: 0,
    Kind.REST: 64,
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
    #: Whether a redirect within the same origin is followed.
    follows: bool = True

    @property
    def path(self) -> str:
        return urlsplit(self.url).path

    def bare(self) -> Request:
        """What an error may keep: where it went, nothing of what it carried."""
        return Request(method=self.method, url=self.url, kind=self.kind, request_id=self.request_id)


class Headers(dict[str, str]):
    """The headers of an answer. Names are kept in lower case, and found in any."""

    __slots__ = ()

    def __init__(self, headers: Mapping[str, str] | None = None) -> None:
        super().__init__()
        for name, value in (headers or {}).items():
            low = name.lower()
            # Several of one name are one list, says RFC 9110.
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
    One answer, read to the end.

    What programs read of `error.response` has the names of httpx, which the official client uses.
    """

    status_code: int
    #: May hold cookies, so not printed.
    headers: Mapping[str, str] = field(default_factory=Headers, repr=False)
    content: bytes = field(default=b"", repr=False)
    #: Without headers and body.
    request: Request
    #: From sending the request to the end of the answer.
    elapsed: timedelta = field(default=timedelta(0), repr=False, compare=False)

    def __post_init__(self) -> None:
        if type(self.headers) is not Headers:
            object.__setattr__(self, "headers", Headers(self.headers))

    @property
    def url(self) -> str:
        """Where the answer came from, after redirects."""
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
        """This answer, if it is a success; else the `APIStatusError` for it."""
        if self.is_success:
            return self
        raise status_error(self)

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

    Raises `Unreachable` or `TooSlow` when there is none. Never repeats a request: that is decided
    above. Used from one event loop.
    """

    async def send(self, request: Request) -> Response: ...

    async def stream(self, request: Request) -> Streamed:
        """The same, without waiting for the body; the deadline is for each piece of it."""

    async def close(self) -> None: ...


class HttpTransport:
    """
    HTTP/1.1 over aiohttp, with a pool of connections for each kind of work.

    Follows redirects within the origin it was asked, and never to another one: requests carry the
    key. Keeps cookies for its service, which load balancers need to find the same server again.
    """

    def __init__(
        self, base_url: str, *, ca_bundle: str | None = None, proxy: str | None = None
    ) -> None:
        self._base_url = base_url
        self._ca_bundle = ca_bundle
        self._sessions: dict[Kind, aiohttp.ClientSession] = {}
        # Found once for all requests: aiohttp's own look-up (`trust_env`) costs 0.3 ms each time.
        self._proxy = proxy
        self._tls: ssl.SSLContext | None = None
        self._cookies: aiohttp.CookieJar | None = None

    async def send(self, request: Request) -> Response:
        started = monotonic()
        with _failures(request):
            async with asyncio.timeout(request.deadline_s):
                request, answer = await self._ask(request)
                async with answer:
                    content = await answer.read()
        return Response(
            status_code=answer.status,
            headers=Headers(answer.headers),
            content=content,
            request=request.bare(),
            elapsed=timedelta(seconds=monotonic() - started),
        )

    async def stream(self, request: Request) -> Streamed:
        with _failures(request):
            async with asyncio.timeout(request.deadline_s):
                request, answer = await self._ask(request)

        async def read() -> bytes:
            with _failures(request):
                async with asyncio.timeout(request.deadline_s):
                    return await answer.content.readany()

        return Streamed(
            status_code=answer.status,
            headers=Headers(answer.headers),
            request=request.bare(),
            read=read,
            close=answer.close,
        )

    async def _ask(self, request: Request) -> tuple[Request, aiohttp.ClientResponse]:
        """The answer, with its body still to be read, and the request that it answers."""
        session = self._sessions.get(request.kind) or self._open(request.kind)
        followed = 0
        while True:
            answer = await session.request(
                request.method,
                request.url,
                data=request.body,
                headers=request.headers,
                proxy=self._proxy,
                allow_redirects=False,
            )
            if answer.status not in REDIRECTS or not request.follows or followed == MOST_REDIRECTS:
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


def _cookie_jar(base_url: str) -> aiohttp.CookieJar:
    from http.cookies import SimpleCookie

    import aiohttp
    import yarl

    service = yarl.URL(base_url)
    place = origin(base_url)

    class Cookies(aiohttp.CookieJar):
        """Those of one origin. Cookies know no ports, so another service could share a host."""

        def update_cookies(self, cookies: Any, response_url: yarl.URL = service) -> None:
            if origin(str(response_url)) == place:
                super().update_cookies(cookies, response_url)

        def filter_cookies(self, request_url: yarl.URL = service) -> Any:
            if origin(str(request_url)) != place:
                return SimpleCookie()
            return super().filter_cookies(request_url)

    # Values as they came: to most servers a quoted one is another. `unsafe`: also from a server
    # that is named by its IP address.
    return Cookies(unsafe=True, quote_cookie=False)


def redirected(request: Request, status: int, location: str | None) -> Request | None:
    """What a redirect says to ask instead; None if that is elsewhere, and so not for our key."""
    url = redirect_url(request.url, location)
    if url is None or origin(url) != origin(request.url):
        return None
    request = replace(request, url=url)
    if status in UNCHANGED or request.method in ("GET", "HEAD"):
        return request
    # As every HTTP client does it: what was sent is not sent again.
    left = ("content-type", "content-length", "content-encoding")
    headers = {name: each for name, each in request.headers.items() if name.lower() not in left}
    return replace(request, method="GET", body=None, headers=headers)


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
