"""
Downloads one file from a signed link: in pieces, resumed after interruptions, verified at the end.

Blocking, for use in threads. Signed links need no key, so none is sent. Links may lead to other
hosts: the headers of the settings are sent only to the service's own origin, where a gateway may
need them, and are dropped when a redirect leaves it.
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import random
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Self, TypeVar
from urllib.parse import unquote, urlsplit

from tinkex.client.errors import (
    APIConnectionError,
    APIStatusError,
    TinkerError,
    status_error,
)
from tinkex.client.http.retry import RetryPolicy, retrying_in_thread
from tinkex.client.http.transport import Request, Response, origin, redirect_url
from tinkex.client.http.typed_requests import KEY_HEADER
from tinkex.client.observe.waiting import Cause, Limit, ThreadedWaiting
from tinkex.client.settings import Settings

if TYPE_CHECKING:
    from urllib.request import OpenerDirector

T = TypeVar("T")

PIECE_BYTES = 1024 * 1024
#: Seconds without data until a connection counts as broken.
SILENCE_S = 20.0
#: A link is renewed when it has less than this left, or half of its lifetime.
RENEW_MARGIN = timedelta(minutes=5)

CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-\d+|\*)/(\d+)")


class DownloadFailed(TinkerError):
    """The download does not match what the service announced."""


class Stopped(Exception):
    """Another file failed, or the caller cancelled."""


@dataclass(frozen=True, kw_only=True)
class FileInfo:
    """What the service says about a file before the download."""

    size: int
    #: Changes when the file changes; None if the service sends nothing suitable.
    tag: str | None
    sha256: bytes | None


def file_info(status: int, headers: Mapping[str, str]) -> FileInfo:
    """From the response to a request for the first byte. Header names are lower case."""
    found = CONTENT_RANGE.fullmatch(headers.get("content-range", "").strip())
    length = headers.get("content-length", "")
    if status in (206, 416) and found:
        size = int(found[2])
    elif status == 200 and length.isdigit() and "content-encoding" not in headers:
        size = int(length)
    else:
        raise DownloadFailed(
            f"The service does not say how large the file is (status {status}), so a complete "
            "download could not be verified."
        )
    tag = headers.get("etag", "")
    if not tag or tag.startswith("W/"):  # a weak tag does not guarantee equal bytes
        tag = headers.get("last-modified", "")
    return FileInfo(size=size, tag=tag or None, sha256=_sha256(headers))


def _sha256(headers: Mapping[str, str]) -> bytes | None:
    """The checksum of the whole file in `Repr-Digest` or `Digest`, if the service sends one."""
    for header, form in (
        ("repr-digest", r"(?:^|,)\s*sha-256=:([A-Za-z0-9+/=]+):"),
        ("digest", r"(?i:(?:^|,)\s*sha-256)=([A-Za-z0-9+/=]+)"),
    ):
        if found := re.search(form, headers.get(header, "")):
            return base64.b64decode(found[1])
    return None


class Links:
    """Signed links by name, renewed before they expire. Thread-safe."""

    def __init__(
        self,
        renew: Callable[[], tuple[Mapping[str, str], datetime]],
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._renew = renew
        self._now = now
        self._lock = threading.Lock()
        self._links: Mapping[str, str] | None = None
        self._good_until = now()

    def names(self) -> list[str]:
        with self._lock:
            return sorted(self._fresh())

    def get(self, name: str) -> str:
        with self._lock:
            links = self._fresh()
            if name not in links:
                raise DownloadFailed(f"{name} was removed from the checkpoint during the download.")
            return links[name]

    def refused(self, name: str, link: str) -> None:
        """The service no longer accepts this link."""
        with self._lock:
            if self._links is not None and self._links.get(name) == link:
                self._links = None

    def _fresh(self) -> Mapping[str, str]:
        now = self._now()
        if self._links is None or now >= self._good_until:
            self._links, expires = self._renew()
            self._good_until = expires - min(RENEW_MARGIN, (expires - now) / 2)
        return self._links


class Fetcher:
    """Downloads files until `stop` is set."""

    def __init__(self, settings: Settings, stop: threading.Event) -> None:
        self.stop = stop
        self._policy = RetryPolicy(give_up_s=settings.give_up_s)
        self._waiting = ThreadedWaiting(settings.wait_notice_s)
        self._rng = random.Random()
        self._opener = _opener(settings)
        self._origin = origin(settings.base_url)
        # The key is never sent to signed links, not even if the user sets it as a header.
        self._headers = {
            name: value
            for name, value in settings.headers.items()
            if name.lower() != KEY_HEADER.lower()
        }

    def probe(self, links: Links, name: str) -> FileInfo:
        """Get the size and checksum of a file."""

        def ask(link: str) -> FileInfo:
            with self._open(link, {"Range": "bytes=0-0"}, accept=(200, 206, 416)) as answer:
                return file_info(answer.status, answer.headers)

        return self._with_retries(links, name, ask, lambda: 0)

    def fetch(
        self, links: Links, name: str, info: FileInfo, target: Path, on_bytes: Callable[[int], None]
    ) -> None:
        """Download the rest of a file whose beginning is in `target`; reports every piece."""
        target.touch()

        def ask(link: str) -> None:
            while (have := target.stat().st_size) < info.size:
                self._fetch_rest(link, info, target, have, on_bytes)

        self._with_retries(links, name, ask, lambda: target.stat().st_size)
        _verify(name, info, target)

    def _fetch_rest(
        self, link: str, info: FileInfo, target: Path, have: int, on_bytes: Callable[[int], None]
    ) -> None:
        headers = {"Range": f"bytes={have}-"}
        if info.tag:
            headers["If-Range"] = info.tag
        with self._open(link, headers, accept=(200, 206)) as answer:
            start = _start(answer.status, answer.headers, info, have)
            if start < have:  # this service always sends the whole file
                on_bytes(start - have)
            with target.open("r+b") as file:
                file.truncate(start)
                file.seek(start)
                position = start
                while piece := answer.read(PIECE_BYTES):
                    if self.stop.is_set():
                        raise Stopped
                    file.write(piece)
                    position += len(piece)
                    on_bytes(len(piece))
        if position < info.size:
            raise APIConnectionError(
                _without_query(link),
                f"The download broke off after {position:,} of {info.size:,} bytes. Start it again: "
                "it resumes there.",
            )

    def _with_retries(
        self, links: Links, name: str, ask: Callable[[str], T], progress: Callable[[], int]
    ) -> T:
        """Retry under the policy; progress resets the counters."""
        failures, refusals, since, last = 0, 0, monotonic(), progress()
        link: str | None = None
        request = object()  # identifies this download in `_waiting`

        def attempt() -> T:
            nonlocal link
            if self.stop.is_set():
                raise Stopped
            link = None
            link = links.get(name)
            return ask(link)

        def delay_after(error: Exception) -> float | None:
            nonlocal failures, refusals, since, last
            if link is None:  # the request for links failed, and was retried by `Calls`
                return None
            if (here := progress()) > last:
                failures, refusals, since, last = 0, 0, monotonic(), here
            if isinstance(error, APIStatusError) and error.status_code == 403 and not refusals:
                # Expired early, because of different clocks.
                refusals += 1
                links.refused(name, link)
                return 0.0
            failures += 1
            elapsed_s, now = monotonic() - since, datetime.now(UTC)
            delay_s = self._policy.delay_s(
                failures, error, elapsed_s=elapsed_s, now=now, rng=self._rng
            )
            if delay_s is not None:
                limit = Limit(since + self._policy.give_up_s, "TINKEX_GIVE_UP_S")
                self._waiting.wait(request, _cause(name, error), limit, since=since)
            return delay_s

        try:
            answer = retrying_in_thread(attempt, delay_after, self.stop.wait)
        except BaseException:
            self._waiting.leave(request)
            raise
        self._waiting.over(request)
        return answer

    def _open(self, link: str, headers: Mapping[str, str], *, accept: tuple[int, ...]) -> _Answer:
        from urllib.error import HTTPError
        from urllib.request import Request as UrlRequest

        link_origin = origin(link)
        if link_origin is None:
            raise DownloadFailed(
                "The service sent a link that is not an http:// or https:// address."
            )
        # `identity`: sizes and ranges must be those of the file, not of a compressed form.
        request = UrlRequest(link, headers={**headers, "Accept-Encoding": "identity"})
        if link_origin == self._origin:
            for name, value in self._headers.items():
                # Headers that the request already has take precedence.
                if not request.has_header(name.capitalize()):
                    request.add_unredirected_header(name, value)
        try:
            answer = _Answer(self._opener.open(request, timeout=SILENCE_S), link)
        except HTTPError as error:  # also a response
            answer = _Answer(error, link)
        except (OSError, http.client.HTTPException) as error:
            raise _broken(link, error) from error
        if answer.status in accept:
            return answer
        with answer:
            content = answer.read(2000)
        raise status_error(
            Response(
                status_code=answer.status,
                headers=answer.headers,
                content=content,
                request=_without_query(link),
            ),
            about="downloading",
        )


def fetch_file(
    link: str,
    target: Path,
    *,
    settings: Settings,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Download one file from one link; renamed to `target` when complete. Returns its size."""
    fetcher = Fetcher(settings, threading.Event())
    # The link is used immediately, and a single link cannot be renewed.
    links = Links(lambda: ({target.name: link}, datetime.now(UTC) + timedelta(hours=1)))
    info = fetcher.probe(links, target.name)
    part = target.with_name(target.name + ".part")
    part.unlink(missing_ok=True)
    done = 0

    def on_bytes(count: int) -> None:
        nonlocal done
        done += count
        if progress:
            progress(done, info.size)

    fetcher.fetch(links, target.name, info, part, on_bytes)
    part.replace(target)
    return info.size


class _Answer:
    """A response that converts connection errors. Header names are lower case."""

    def __init__(self, raw: Any, link: str) -> None:
        self.status: int = raw.status
        self.headers = {name.lower(): value for name, value in raw.headers.items()}
        self._raw, self._link = raw, link

    def read(self, size: int) -> bytes:
        try:
            return bytes(self._raw.read(size))
        except (OSError, http.client.HTTPException) as error:
            raise _broken(self._link, error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._raw.close()


def _start(status: int, headers: Mapping[str, str], info: FileInfo, have: int) -> int:
    """The first byte of a response; raises if the file changed since it was probed."""
    if status == 200:
        start, total = 0, headers.get("content-length", "")
    else:
        found = CONTENT_RANGE.fullmatch(headers.get("content-range", "").strip())
        start, total = (int(found[1] or -1), found[2]) if found else (-1, "")
    if start not in (0, have) or total != str(info.size):
        raise DownloadFailed(
            f"The file changed during the download: {info.size} bytes before, {total or 'unknown'}"
            " now. Download the checkpoint again."
        )
    return start


def _verify(name: str, info: FileInfo, target: Path) -> None:
    size = target.stat().st_size
    if size != info.size:
        target.unlink()
        raise DownloadFailed(
            f"{name} has {size} bytes instead of {info.size}. It was deleted; download it again."
        )
    if info.sha256 is None:
        return
    with target.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").digest()
    if found != info.sha256:
        target.unlink()
        raise DownloadFailed(
            f"{name} has the checksum {found.hex()} instead of {info.sha256.hex()}. "
            "It was deleted; download it again."
        )


def _opener(settings: Settings) -> OpenerDirector:
    import ssl
    from urllib.request import (
        BaseHandler,
        HTTPRedirectHandler,
        HTTPSHandler,
        ProxyHandler,
        build_opener,
    )
    from urllib.request import Request as UrlRequest

    class Proxies(BaseHandler):
        """
        Uses the proxy of the settings for each host.

        Not `ProxyHandler`, which reads the exempt hosts from the environment each time.
        """

        handler_order = 100  # before the handlers that open connections

        def http_open(self, request: UrlRequest) -> Any:
            proxy = None if request.has_proxy() else settings.proxy_to(request.full_url)
            if proxy is None:
                return None  # the next handler opens it
            parts, scheme = urlsplit(proxy), request.type
            if parts.username is not None:
                name, password = unquote(parts.username), unquote(parts.password or "")
                word = base64.b64encode(f"{name}:{password}".encode()).decode("ascii")
                request.add_unredirected_header("Proxy-Authorization", f"Basic {word}")
            request.set_proxy(parts.netloc.rpartition("@")[2], parts.scheme)
            if request.type != scheme:  # http through a proxy that uses TLS itself
                return self.parent.open(request, timeout=request.timeout)
            return None

        https_open = http_open

    class Redirects(HTTPRedirectHandler):
        """Keeps the headers of the settings within one origin, and drops them outside."""

        def http_error_302(
            self, req: UrlRequest, fp: Any, code: int, msg: str, headers: Any
        ) -> Any:
            location = headers.get("location", headers.get("uri"))  # as in urllib
            if location is not None and redirect_url(req.full_url, location) is None:
                fp.close()
                raise DownloadFailed(
                    "The link redirects to an address that is neither http:// nor https://."
                )
            return super().http_error_302(req, fp, code, msg, headers)

        http_error_301 = http_error_303 = http_error_302
        http_error_307 = http_error_308 = http_error_302

        def redirect_request(self, req: UrlRequest, fp: Any, *rest: Any) -> UrlRequest | None:
            following = super().redirect_request(req, fp, *rest)
            if following is None:
                return None
            if origin(following.full_url) == origin(req.full_url):
                for name, value in req.unredirected_hdrs.items():
                    following.add_unredirected_header(name, value)
            return following

    return build_opener(
        HTTPSHandler(context=ssl.create_default_context(cafile=settings.ca_bundle)),
        ProxyHandler({}),
        Proxies(),
        Redirects(),
    )


def _without_query(link: str) -> Request:
    """The parts that an error may keep: the query of a signed link is a secret."""
    return Request(method="GET", url=link.partition("?")[0])


def _broken(link: str, error: Exception) -> APIConnectionError:
    found = str(getattr(error, "reason", error)) or type(error).__name__
    request = _without_query(link)
    return APIConnectionError(request).explain(f"{request.url}: {found}.")


def _cause(name: str, error: Exception) -> Cause:
    reason = error.summary if isinstance(error, TinkerError) else str(error)
    return Cause("download", f"Download of {name}", reason, over="goes on")
