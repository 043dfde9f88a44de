"""
Raw HTTP responses, for endpoints that no client wraps.

    raw = Raw(service)
    answer = raw.request("GET", "healthz")                     # read to the end
    print(answer.status_code, answer.headers["content-type"], answer.json())

    with raw.stream("POST", "stream_sample", body) as answer:  # read as it arrives
        for event in answer.iter_events():
            ...

Retries, credentials and errors work as in the clients: an error status raises its error. Each
method has an `_async` variant that returns an `AsyncAPIResponse`.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from datetime import timedelta
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, overload

from tinkex.client.futures import Promise, refuse_to_block
from tinkex.client.http.sse import Consumed, EventStream, ServerSentEvent
from tinkex.client.http.transport import Kind, Request, Response, StreamedResponse
from tinkex.client.http.typed_requests import DEADLINE_S, Calls, decode
from tinkex.client.session import Session

if TYPE_CHECKING:
    from tinkex.client.rest import RestClient
    from tinkex.client.service import ServiceClient

T = TypeVar("T")


class Raw:
    """Any endpoint, by method and path below `/api/v1/`."""

    def __init__(self, client: ServiceClient | RestClient | Session) -> None:
        self._session = client if isinstance(client, Session) else client.holder

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: Mapping[str, str] | None = None,
        timeout: float = DEADLINE_S,
        max_retries: int | None = None,
    ) -> APIResponse:
        """Send, and read the response to its end. A `body` that is not bytes is sent as JSON."""
        refuse_to_block("request", "request_async")
        sent = self._send(method, path, body, headers, timeout, max_retries, read_all=True)
        return APIResponse(sent.block())

    async def request_async(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: Mapping[str, str] | None = None,
        timeout: float = DEADLINE_S,  # noqa: ASYNC109 (as `request`)
        max_retries: int | None = None,
    ) -> AsyncAPIResponse:
        sent = self._send(method, path, body, headers, timeout, max_retries, read_all=True)
        return AsyncAPIResponse(await sent)

    def stream(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: Mapping[str, str] | None = None,
        timeout: float = DEADLINE_S,
        max_retries: int | None = None,
    ) -> APIResponse:
        """Send, and read the response as it arrives; `timeout` is per piece. Must be closed."""
        refuse_to_block("stream", "stream_async")
        sent = self._send(method, path, body, headers, timeout, max_retries, read_all=False)
        return APIResponse(sent.block())

    async def stream_async(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: Mapping[str, str] | None = None,
        timeout: float = DEADLINE_S,  # noqa: ASYNC109 (as `stream`)
        max_retries: int | None = None,
    ) -> AsyncAPIResponse:
        sent = self._send(method, path, body, headers, timeout, max_retries, read_all=False)
        return AsyncAPIResponse(await sent)

    def _send(
        self,
        method: str,
        path: str,
        body: Any,
        headers: Mapping[str, str] | None,
        timeout: float,
        max_retries: int | None,
        *,
        read_all: bool,
    ) -> Promise[_OpenAnswer]:
        async def work() -> _OpenAnswer:
            calls = (await self._session.connect()).calls
            request = calls.request(
                method, path, body, kind=Kind.RETRIEVE, headers=headers, deadline_s=timeout
            )
            attempts = 0

            async def once() -> _OpenAnswer:
                nonlocal attempts
                attempts += 1
                began = monotonic()
                streamed = await calls.open(request, about=path)
                answer = _OpenAnswer(
                    self._session,
                    calls,
                    request,
                    streamed,
                    elapsed=timedelta(seconds=monotonic() - began),
                    retries_taken=attempts - 1,
                )
                if read_all:
                    await answer.read()
                return answer

            # Retries are limited by time, not by number; 0 turns them off.
            give_up_s = 0.0 if max_retries == 0 else None
            return await calls.with_retries(once, path=path, give_up_s=give_up_s)

        return self._session.run(work())


class _OpenAnswer:
    """A response on the background loop, where its body arrives."""

    def __init__(
        self,
        session: Session,
        calls: Calls,
        request: Request,
        streamed: StreamedResponse,
        *,
        elapsed: timedelta,
        retries_taken: int,
    ) -> None:
        self.session = session
        self.streamed = streamed
        self.elapsed = elapsed
        self.retries_taken = retries_taken
        self.closed = False
        self._calls = calls
        self._request = request
        self._begun = False
        self._content: bytes | None = None

    async def read(self) -> bytes:
        if self._content is None:
            self._content = b"".join([chunk async for chunk in self.chunks()])
        return self._content

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body in pieces; only once, unless it was read completely before."""
        if self._content is not None:
            if self._content:
                yield self._content
            return
        if self._begun:
            raise Consumed(
                "The body of this response has already been read in pieces, and can be read only "
                "once. Call read() first to keep it, or send the request again."
            )
        self._begun = True
        try:
            with self._calls.network_errors(self._request):
                async for chunk in self.streamed.chunks():
                    yield chunk
        finally:
            await self.close()

    async def texts(self) -> AsyncIterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        async for chunk in self.chunks():
            if text := decoder.decode(chunk):
                yield text
        if text := decoder.decode(b"", True):
            yield text

    async def lines(self) -> AsyncIterator[str]:
        rest = ""
        async for text in self.texts():
            *lines, rest = (rest + text).split("\n")
            for line in lines:
                yield line.removesuffix("\r")
        if rest:
            yield rest

    def events(self) -> AsyncIterator[ServerSentEvent]:
        return aiter(EventStream(self.chunks()))

    async def close(self) -> None:
        self.closed = True
        self.streamed.close()

    def parse(self, content: bytes, to: type[T] | None) -> T | Any:
        if to is None:
            return json.loads(content)
        response = Response(
            status_code=self.streamed.status_code,
            headers=self.streamed.headers,
            content=content,
            request=self.streamed.request,
        )
        return decode(to, response)


class _LoopIterator(Generic[T]):
    """Iterates over a generator on the background loop, one item at a time."""

    def __init__(self, session: Session, source: AsyncIterator[T]) -> None:
        self._session = session
        self._source = source

    def next(self) -> Promise[tuple[T] | None]:
        async def step() -> tuple[T] | None:
            try:
                return (await anext(self._source),)
            except StopAsyncIteration:
                return None

        return self._session.run(step())


class _ResponseBase:
    """What is known once the headers have arrived."""

    def __init__(self, answer: _OpenAnswer) -> None:
        self._answer = answer

    @property
    def status_code(self) -> int:
        return self._answer.streamed.status_code

    @property
    def headers(self) -> Mapping[str, str]:
        """Names are in lower case."""
        return self._answer.streamed.headers

    @property
    def method(self) -> str:
        return self._answer.streamed.request.method

    @property
    def url(self) -> str:
        return self._answer.streamed.request.url

    @property
    def elapsed(self) -> timedelta:
        """From sending the request to the headers of the response."""
        return self._answer.elapsed

    @property
    def retries_taken(self) -> int:
        return self._answer.retries_taken

    @property
    def http_request(self) -> Request:
        """Without its headers and body, which may contain secrets."""
        return self._answer.streamed.request

    @property
    def is_closed(self) -> bool:
        return self._answer.closed

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.status_code} {self.method} {self.url}>"


class APIResponse(_ResponseBase):
    """A response for blocking programs."""

    def read(self) -> bytes:
        return self._answer.session.run(self._answer.read()).block()

    def text(self) -> str:
        return self.read().decode("utf-8", "replace")

    def json(self) -> Any:
        return json.loads(self.read())

    @overload
    def parse(self) -> Any: ...
    @overload
    def parse(self, *, to: type[T]) -> T: ...
    def parse(self, *, to: type[Any] | None = None) -> Any:
        """The body as a type of `tinkex.types`; without one, as JSON."""
        return self._answer.parse(self.read(), to)

    def iter_bytes(self) -> Iterator[bytes]:
        return self._each(self._answer.chunks)

    def iter_text(self) -> Iterator[str]:
        return self._each(self._answer.texts)

    def iter_lines(self) -> Iterator[str]:
        return self._each(self._answer.lines)

    def iter_events(self) -> Iterator[ServerSentEvent]:
        """Server-sent events."""
        return self._each(self._answer.events)

    def _each(self, pieces: Callable[[], AsyncIterator[T]]) -> Iterator[T]:
        pull = _LoopIterator(self._answer.session, pieces())
        while (found := pull.next().block()) is not None:
            yield found[0]

    def close(self) -> None:
        """Close the connection. What was read stays available."""
        if not self.is_closed:
            self._answer.session.run(self._answer.close()).block()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class AsyncAPIResponse(_ResponseBase):
    """A response for coroutines."""

    async def read(self) -> bytes:
        return await self._answer.session.run(self._answer.read())

    async def text(self) -> str:
        return (await self.read()).decode("utf-8", "replace")

    async def json(self) -> Any:
        return json.loads(await self.read())

    @overload
    async def parse(self) -> Any: ...
    @overload
    async def parse(self, *, to: type[T]) -> T: ...
    async def parse(self, *, to: type[Any] | None = None) -> Any:
        """The body as a type of `tinkex.types`; without one, as JSON."""
        return self._answer.parse(await self.read(), to)

    def iter_bytes(self) -> AsyncIterator[bytes]:
        return self._each(self._answer.chunks)

    def iter_text(self) -> AsyncIterator[str]:
        return self._each(self._answer.texts)

    def iter_lines(self) -> AsyncIterator[str]:
        return self._each(self._answer.lines)

    def iter_events(self) -> AsyncIterator[ServerSentEvent]:
        """Server-sent events."""
        return self._each(self._answer.events)

    async def _each(self, pieces: Callable[[], AsyncIterator[T]]) -> AsyncIterator[T]:
        pull = _LoopIterator(self._answer.session, pieces())
        while (found := await pull.next()) is not None:
            yield found[0]

    async def close(self) -> None:
        """Close the connection. What was read stays available."""
        if not self.is_closed:
            await self._answer.session.run(self._answer.close())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()
