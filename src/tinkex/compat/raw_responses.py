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
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from datetime import timedelta
from time import monotonic
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeAlias, TypeVar, overload

from tinkex.client.futures import Promise, as_written, refuse_to_block
from tinkex.client.http.sse import Consumed, EventStream, ServerSentEvent
from tinkex.client.http.transport import Kind, Request, Response, StreamedResponse
from tinkex.client.http.typed_requests import DEADLINE_S, Calls, decode
from tinkex.client.session import Session

if TYPE_CHECKING:
    from tinkex.client.rest import RestClient
    from tinkex.client.service import ServiceClient

T = TypeVar("T")
P = ParamSpec("P")


# -- variants ------------------------------------------------------------------------------------
# The requests of `Raw` and the iterators of `_OpenAnswer` are written once; their blocking and
# asynchronous variants are generated here.

_DOCS = {
    True: "Send, and read the response to its end. A `body` that is not bytes is sent as JSON.",
    False: "Send, and read the response as it arrives; `timeout` is per piece. Must be closed.",
}
Send: TypeAlias = Callable[Concatenate["Raw", P], Callable[[bool], Promise["_OpenAnswer"]]]


def _blocking(
    send: Send[P], name: str, *, read_all: bool
) -> Callable[Concatenate[Raw, P], APIResponse]:
    def variant(self: Raw, /, *args: P.args, **kwargs: P.kwargs) -> APIResponse:
        refuse_to_block(name, f"{name}_async")
        return APIResponse(send(self, *args, **kwargs)(read_all).block())

    return as_written(variant, name, send, _DOCS[read_all])


def _awaiting(
    send: Send[P], name: str, *, read_all: bool
) -> Callable[Concatenate[Raw, P], Coroutine[Any, Any, AsyncAPIResponse]]:
    async def variant(self: Raw, /, *args: P.args, **kwargs: P.kwargs) -> AsyncAPIResponse:
        return AsyncAPIResponse(await send(self, *args, **kwargs)(read_all))

    return as_written(variant, name, send, _DOCS[read_all])


def _iterates(
    pieces: Callable[[_OpenAnswer], AsyncIterator[T]],
) -> Callable[[APIResponse], Iterator[T]]:
    def variant(self: APIResponse) -> Iterator[T]:
        source = pieces(self._answer)
        while (found := self._answer.session.run(_next(source)).block()) is not None:
            yield found[0]

    return as_written(variant, pieces.__name__, pieces)


def _iterates_async(
    pieces: Callable[[_OpenAnswer], AsyncIterator[T]],
) -> Callable[[AsyncAPIResponse], AsyncIterator[T]]:
    async def variant(self: AsyncAPIResponse) -> AsyncIterator[T]:
        source = pieces(self._answer)
        while (found := await self._answer.session.run(_next(source))) is not None:
            yield found[0]

    return as_written(variant, pieces.__name__, pieces)


async def _next(source: AsyncIterator[T]) -> tuple[T] | None:
    """One item, on the background loop; None at the end."""
    try:
        return (await anext(source),)
    except StopAsyncIteration:
        return None


class Raw:
    """Any endpoint, by method and path below `/api/v1/`."""

    def __init__(self, client: ServiceClient | RestClient | Session) -> None:
        self._session = client if isinstance(client, Session) else client.holder

    def _send(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: Mapping[str, str] | None = None,
        timeout: float = DEADLINE_S,
        max_retries: int | None = None,
    ) -> Callable[[bool], Promise[_OpenAnswer]]:
        """The request as a function; its argument says whether to read the whole response."""

        async def work(read_all: bool) -> _OpenAnswer:
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
                elapsed = timedelta(seconds=monotonic() - began)
                answer = _OpenAnswer(
                    self._session, calls, request, streamed, elapsed, retries_taken=attempts - 1
                )
                if read_all:
                    await answer.read()
                return answer

            # Retries are limited by time, not by number; 0 turns them off.
            give_up_s = 0.0 if max_retries == 0 else None
            return await calls.with_retries(once, path=path, kind=request.kind, give_up_s=give_up_s)

        return lambda read_all: self._session.run(work(read_all))

    request = _blocking(_send, "request", read_all=True)
    request_async = _awaiting(_send, "request_async", read_all=True)
    stream = _blocking(_send, "stream", read_all=False)
    stream_async = _awaiting(_send, "stream_async", read_all=False)


class _OpenAnswer:
    """A response on the background loop, where its body arrives."""

    def __init__(
        self,
        session: Session,
        calls: Calls,
        request: Request,
        streamed: StreamedResponse,
        elapsed: timedelta,
        *,
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
            self._content = b"".join([chunk async for chunk in self.iter_bytes()])
        return self._content

    async def iter_bytes(self) -> AsyncIterator[bytes]:
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

    async def iter_text(self) -> AsyncIterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        async for chunk in self.iter_bytes():
            if text := decoder.decode(chunk):
                yield text
        if text := decoder.decode(b"", True):
            yield text

    async def iter_lines(self) -> AsyncIterator[str]:
        rest = ""
        async for text in self.iter_text():
            *lines, rest = (rest + text).split("\n")
            for line in lines:
                yield line.removesuffix("\r")
        if rest:
            yield rest

    def iter_events(self) -> AsyncIterator[ServerSentEvent]:
        """Server-sent events."""
        return aiter(EventStream(self.iter_bytes()))

    async def close(self) -> None:
        self.closed = True
        self.streamed.close()


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

    def _parsed(self, content: bytes, to: type[Any] | None) -> Any:
        # Not on the background loop: a large body would delay heartbeats and polls.
        if to is None:
            return json.loads(content)
        response = Response(
            status_code=self.status_code,
            headers=self.headers,
            content=content,
            request=self.http_request,
        )
        return decode(to, response)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.status_code} {self.method} {self.url}>"


class APIResponse(_ResponseBase):
    """A response for blocking programs."""

    def read(self) -> bytes:
        return self._answer.session.run(self._answer.read()).block()

    def text(self) -> str:
        return self.read().decode("utf-8", "replace")

    def json(self) -> Any:
        return self._parsed(self.read(), None)

    iter_bytes = _iterates(_OpenAnswer.iter_bytes)
    iter_text = _iterates(_OpenAnswer.iter_text)
    iter_lines = _iterates(_OpenAnswer.iter_lines)
    iter_events = _iterates(_OpenAnswer.iter_events)

    @overload
    def parse(self) -> Any: ...
    @overload
    def parse(self, *, to: type[T]) -> T: ...
    def parse(self, *, to: type[Any] | None = None) -> Any:
        """The body as a type of `tinkex.types`; without one, as JSON."""
        return self._parsed(self.read(), to)

    def close(self) -> None:
        """Close the connection. What was read stays available."""
        if not self.is_closed:
            self._answer.session.run(self._answer.close()).block()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncAPIResponse(_ResponseBase):
    """A response for coroutines."""

    async def read(self) -> bytes:
        return await self._answer.session.run(self._answer.read())

    async def text(self) -> str:
        return (await self.read()).decode("utf-8", "replace")

    async def json(self) -> Any:
        return self._parsed(await self.read(), None)

    iter_bytes = _iterates_async(_OpenAnswer.iter_bytes)
    iter_text = _iterates_async(_OpenAnswer.iter_text)
    iter_lines = _iterates_async(_OpenAnswer.iter_lines)
    iter_events = _iterates_async(_OpenAnswer.iter_events)

    @overload
    async def parse(self) -> Any: ...
    @overload
    async def parse(self, *, to: type[T]) -> T: ...
    async def parse(self, *, to: type[Any] | None = None) -> Any:
        """The body as a type of `tinkex.types`; without one, as JSON."""
        return self._parsed(await self.read(), to)

    async def close(self) -> None:
        """Close the connection. What was read stays available."""
        if not self.is_closed:
            await self._answer.session.run(self._answer.close())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
