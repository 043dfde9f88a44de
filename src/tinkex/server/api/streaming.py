"""
Samples as they are drawn: server-sent events.

    accepted   {"request_id", "sample_sequence_ids"}: from here on the sample is on disk
    token      {"sequence", "tokens", "logprobs"}, as they come
    done       the answer as JSON, with "sample_sequence_ids"; or
    error      {"error", "category"}

A stream that breaks loses nothing: the result can be fetched by its request id, and a repeated
request reads the same sample. A stream that ends without `done` or `error` belongs to a server that
stops; the sample goes on at its next start.
"""

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from tinkex.server.api.accept import sequence_ids, take
from tinkex.server.api.auth import owner_of
from tinkex.server.api.context import Context, context_of, dialect_of
from tinkex.server.api.futures import INLINE_ENCODE_BYTES
from tinkex.server.api.room import stored
from tinkex.server.api.sampling import asked_sample
from tinkex.server.dispatch.ending import bug
from tinkex.server.dispatch.tap import Tap
from tinkex.server.futures import Settled, UnknownRequest
from tinkex.server.store import Accepted
from tinkex.server.store.requests import ResultGone
from tinkex.wire.codec import encode_json
from tinkex.wire.dialect import Dialect
from tinkex.wire.errors import UserFailure
from tinkex.wire.growing import Growing, Reader, SampledTokens
from tinkex.wire.protobuf import decode_sample_response
from tinkex.wire.sampling import SampleResponse

EVENT_STREAM = "text/event-stream"
# A sign of life for proxies, and for clients that would take a silent connection for a dead one.
BEAT_S = 10.0
BEAT = b": keep-alive\n\n"
STOPPING = b": the server is stopping; the result can be fetched by its request id\n\n"

# An event of a long sample is megabytes: sent in slices, no more than one waits for a slow reader.
SLICE_BYTES = 64 * 1024

# Proxies must neither keep the events nor collect them.
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


async def stream_sample(request: Request) -> Response:
    context = context_of(request)
    new = await asked_sample(request)
    first = await take(context, new, tap=Tap())
    # A stream may last for minutes, and its body is on disk.
    stored(request.scope)
    session = None
    if new.session_id is not None:
        session = await context.session(request, new.session_id)
    told = _Told(context, first, owner=owner_of(request), dialect=dialect_of(request, session))
    return _Stream(told.events())


class _Stream(StreamingResponse):
    """Closes its events when the client is gone: they tell whoever made them, at once."""

    def __init__(self, events: AsyncGenerator[bytes]) -> None:
        self._events, self._slices = events, slices(events)
        super().__init__(self._slices, media_type=EVENT_STREAM, headers=HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._events), contextlib.aclosing(self._slices):
            await super().__call__(scope, receive, send)


async def slices(pieces: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """The same bytes, none of them large."""
    async for piece in pieces:
        for start in range(0, len(piece), SLICE_BYTES):
            yield piece[start : start + SLICE_BYTES]


class _Told:
    """One sample for one reader."""

    def __init__(self, context: Context, first: Accepted, *, owner: str, dialect: Dialect) -> None:
        self._context = context
        self._request_id = first.request_id
        self._ids = sequence_ids(first)
        self._owner = owner
        self._dialect = dialect
        # None where the sample is over, or was begun by `asample`: then it comes all at once.
        self._tap = context.dispatcher.tap(first.request_id)
        self._growing = Growing() if self._tap is None else self._tap.growing
        self._reader = Reader(self._growing)
        self._settled: Settled | None = None

    async def events(self) -> AsyncGenerator[bytes]:
        over = False
        try:
            accepted = {"request_id": self._request_id, "sample_sequence_ids": self._ids}
            yield event("accepted", accepted)
            async with contextlib.aclosing(self._until_settled()) as pieces:
                async for piece in pieces:
                    yield piece
            if self._settled is None:
                over = True
                yield STOPPING
                return
            for piece in await self._ending(self._settled):
                yield piece
            over = True
            self._context.store.requests.fetched(self._request_id)
        except (UnknownRequest, ResultGone):
            over = True
            yield error("the result is not kept any more: ask for a new sample.", "user")
        except Exception as failure:  # noqa: BLE001  too late for a status: it must be told here
            over = True
            ending = bug(failure)
            yield error(ending.error or "", ending.category)
        finally:
            # One that `asample` began has others who wait for it.
            if not over and self._tap is not None:
                self._context.dispatcher.abandon(
                    self._request_id,
                    owner=self._owner,
                    after_s=self._context.settings.stream_grace_s,
                )

    async def _until_settled(self) -> AsyncGenerator[bytes]:
        """Tokens as they come, until the sample is over or the server stops."""
        futures = self._context.futures
        beat_s = min(BEAT_S, self._context.settings.long_poll_s or BEAT_S)
        while True:
            waiting = asyncio.ensure_future(
                futures.wait(self._request_id, owner=self._owner, within_s=beat_s)
            )
            try:
                async for piece in self._tokens_until(waiting):
                    yield piece
                self._settled = await waiting
                if self._settled is not None or futures.closing:
                    return
            finally:
                waiting.cancel()
            yield BEAT

    async def _tokens_until(self, waiting: asyncio.Future[Any]) -> AsyncGenerator[bytes]:
        while not waiting.done():
            # Asked for first and waited for last: what comes while a piece is sent is not missed.
            changed = set() if self._tap is None else {self._tap.changed}
            for news in self._reader.news():
                yield token(news)
            await asyncio.wait({waiting} | changed, return_when=asyncio.FIRST_COMPLETED)

    async def _ending(self, settled: Settled) -> list[bytes]:
        """What was not told yet, and the whole answer."""
        if settled.error is not None:
            return [error(settled.error, settled.category)]
        try:
            if len(settled.result) <= INLINE_ENCODE_BYTES:
                return self._answer(settled.result)
            return await asyncio.to_thread(self._answer, settled.result)
        except UserFailure as failure:  # numbers that JSON cannot hold
            return [error(str(failure), "user")]

    def _answer(self, result: bytes) -> list[bytes]:
        response = decode_sample_response(result, self._ids)
        for index, sequence in enumerate(response.sequences):
            self._growing.take(index, sequence.tokens, sequence.logprobs, start=0)
        done = event("done", {**whole(response, self._dialect), "sample_sequence_ids": self._ids})
        return [*(token(news) for news in self._reader.news()), done]


def whole(response: SampleResponse, dialect: Dialect) -> dict[str, Any]:
    """The JSON that a poll answers, with the likeliest tokens beside the drawn ones."""
    answer = dialect.sample_json(response)
    for shown, sequence in zip(answer["sequences"], response.sequences, strict=True):
        if sequence.topk_logprobs is not None:
            shown["topk_logprobs"] = sequence.topk_logprobs
    return answer


def token(news: SampledTokens) -> bytes:
    logprobs = [number if math.isfinite(number) else None for number in news.logprobs]
    return event("token", {"sequence": news.sequence, "tokens": news.tokens, "logprobs": logprobs})


def error(text: str, category: str | None) -> bytes:
    return event("error", {"error": text, "category": category or "unknown"})


def event(name: str, data: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), encode_json(data))
