"""Sampling sessions, and samples. Each sample runs at once; a repeat finds its first self."""

import asyncio
import contextlib
import math
import secrets
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from tinkex.server.api.auth import owner_of
from tinkex.server.api.bodies import stored
from tinkex.server.api.deps import (
    SENT,
    Context,
    answer,
    context_of,
    describe,
    dialect_of,
    read_data,
    read_json,
    readable,
)
from tinkex.server.api.errors import Refusal
from tinkex.server.api.futures import INLINE_ENCODE_BYTES
from tinkex.server.api.submit import accepted, admit, sequence_ids, take, tokens_known
from tinkex.server.scheduler.checkpoints import refuse_external
from tinkex.server.scheduler.jobs import bug
from tinkex.server.scheduler.results import Settled, UnknownRequest
from tinkex.server.scheduler.sample_worker import Tap
from tinkex.server.scheduler.step_queue import Kind
from tinkex.server.store import Accepted, NewRequest, Sampler
from tinkex.server.store.requests import ResultGone
from tinkex.wire.codec import decode_json, encode_json
from tinkex.wire.errors import UserFailure, WireError
from tinkex.wire.partial_sample import Growing, Reader, SampledTokens
from tinkex.wire.protobuf import decode_sample_response
from tinkex.wire.redaction import scrubbed
from tinkex.wire.sampling import (
    CreateSamplingSessionRequest,
    CreateSamplingSessionResponse,
    GetSamplerResponse,
    JoinSamplingSessionRequest,
    JoinSamplingSessionResponse,
    SampleRequest,
    SampleResponse,
)
from tinkex.wire.sdk_versions import Dialect

router = APIRouter(prefix="/api/v1", tags=["sampling"])

# Ids are promised for each sequence before it exists; a typing error must not promise a billion.
MOST_SEQUENCES = 1024
# Sample numbers of clones run to 10^9 times 10^9.
LARGEST_SEQ_ID = 2**63 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class _Source:
    """What is sampled from."""

    base_model: str
    version_id: str | None
    model_path: str | None
    session_id: str | None = None


@router.post("/create_sampling_session", openapi_extra=dict(describe(CreateSamplingSessionRequest)))
async def create_sampling_session(request: Request) -> Response:
    """Unknown base models and paths are refused here, with what there is."""
    asked = await read_json(request, CreateSamplingSessionRequest)
    context = context_of(request)
    session = await context.open_session(request, asked.session_id)
    number = asked.sampling_session_seq_id
    if number < 0:
        raise WireError.at(("sampling_session_seq_id",), f"{number} is negative.")
    source = await _source(request, context, asked.base_model, asked.model_path)
    sampler = await context.store.models.create_sampler(
        Sampler(
            sampling_session_id=f"{session.session_id}:sample:{number}",
            owner=session.owner,
            session_id=session.session_id,
            base_model=source.base_model,
            version_id=source.version_id,
            model_path=source.model_path,
        ),
        number,
    )
    if (sampler.base_model, sampler.model_path) != (source.base_model, source.model_path):
        raise WireError.at(
            ("sampling_session_seq_id",),
            f"{number} of this session is a sampler of {sampler.model_path or sampler.base_model}, "
            "so it cannot be another one. Use the next free number.",
            "sampling_session_seq_id_reused",
        )
    return answer(CreateSamplingSessionResponse(sampling_session_id=sampler.sampling_session_id))


@router.post("/join_sampling_session", openapi_extra=dict(describe(JoinSamplingSessionRequest)))
async def join_sampling_session(request: Request) -> Response:
    """A number for a copy of a sampling client, that no other copy has or will have."""
    asked = await read_json(request, JoinSamplingSessionRequest)
    context = context_of(request)
    sampler = await context.sampler(request, asked.sampling_session_id)
    await context.open_session(request, sampler.session_id)
    counter = await context.store.models.add_sampler_client(sampler.sampling_session_id)
    return answer(JoinSamplingSessionResponse(client_counter=counter))


@router.get("/samplers/{sampling_session_id}")
async def get_sampler(request: Request, sampling_session_id: str) -> Response:
    context = context_of(request)
    sampler = await context.sampler(request, sampling_session_id)
    described = GetSamplerResponse(
        sampler_id=sampler.sampling_session_id,
        base_model=sampler.base_model,
        model_path=sampler.model_path,
    )
    # Ours beside the protocol's fields: an alias alone does not lead to a tokenizer.
    found = context.tokenizer_id(sampler.base_model)
    return answer({**described.model_dump(exclude_none=True), "tokenizer_id": found})


async def asample(request: Request) -> Response:
    return await accepted(context_of(request), await asked_sample(request))


async def asked_sample(request: Request) -> NewRequest:
    """The sample that a body asks for, checked and within its owner's limits."""
    context = context_of(request)
    try:
        asked, payload = await read_data(request, _decoded)
    except UserFailure as failure:
        return await _unsound(request, context, failure, request.scope[SENT])
    # Of no use from here on, and a stream may last.
    del request.scope[SENT]
    source = await _sampled_from(request, context, asked)
    return await _new_sample(
        context,
        request,
        source,
        payload=payload,
        sampling_session_id=asked.sampling_session_id,
        seq_id=asked.seq_id,
        sequences=asked.num_samples,
        tokens=tokens_known(asked.prompt),
    )


def _decoded(body: bytes) -> tuple[SampleRequest, bytes]:
    """What is asked for, and its normal form. Of a large body this runs off the event loop."""
    asked = decode_json(SampleRequest, body)
    if asked.sampling_params.seed is None:
        # Fixed here, so that a sample that runs again after a crash draws the same tokens.
        params = asked.sampling_params.model_copy(update={"seed": secrets.randbits(31)})
        asked = asked.model_copy(update={"sampling_params": params})
    return asked, encode_json(asked)


async def _unsound(
    request: Request, context: Context, failure: UserFailure, body: bytes
) -> NewRequest:
    """A sound body that asks for something unknown: accepted, and fails as the user's."""
    sampling_session_id, base_model, model_path = (
        name if isinstance(name := failure.request.get(field), str) else None
        for field in ("sampling_session_id", "base_model", "model_path")
    )
    if sampling_session_id is not None:
        sampler = await context.sampler(request, sampling_session_id)
        await context.open_session(request, sampler.session_id)
        source = _of_sampler(sampler)
    elif base_model is not None or model_path is not None:
        source = await _source(request, context, base_model, model_path)
    else:
        raise failure  # it names no model whose work it could be
    seq_id, sequences = failure.request.get("seq_id"), failure.request.get("num_samples", 1)
    return await _new_sample(
        context,
        request,
        source,
        payload=scrubbed(body.decode(errors="replace")).encode(),
        sampling_session_id=sampling_session_id,
        seq_id=seq_id if isinstance(seq_id, int) else None,
        sequences=sequences if isinstance(sequences, int) else 1,
    )


async def _new_sample(
    context: Context,
    request: Request,
    source: _Source,
    *,
    payload: bytes,
    sampling_session_id: str | None,
    seq_id: int | None,
    sequences: int,
    tokens: int = 0,
) -> NewRequest:
    if not 1 <= sequences <= MOST_SEQUENCES:
        raise WireError.at(
            ("num_samples",),
            f"{sequences} samples were asked for; 1 to {MOST_SEQUENCES} are allowed.",
        )
    if seq_id is not None and not 0 <= seq_id <= LARGEST_SEQ_ID:
        raise WireError.at(("seq_id",), f"{seq_id} is not a number of 64 bits from 0.")
    new = NewRequest(
        owner=owner_of(request),
        kind=Kind.SAMPLE,
        base_model=source.base_model,
        payload=payload,
        session_id=source.session_id,
        sampling_session_id=sampling_session_id,
        seq_id=None if sampling_session_id is None else seq_id,
        sequences=sequences,
        version_id=source.version_id,
        tokens=tokens,
    )
    await admit(request, context, new)
    return new


async def _sampled_from(request: Request, context: Context, asked: SampleRequest) -> _Source:
    """What one of the three ways to name a model means; two that disagree are refused."""
    if asked.mode != "session":
        return await _source(request, context, asked.base_model, asked.model_path)
    source = _of_sampler(await context.sampler(request, asked.sampling_session_id or ""))
    if source.session_id is not None:
        await context.open_session(request, source.session_id)
    same_base = (
        asked.base_model is not None
        and context.base_model(asked.base_model).name == source.base_model
    )
    asked.check_agrees(
        base_model=asked.base_model if same_base else source.base_model,
        model_path=source.model_path,
    )
    return source


def _of_sampler(sampler: Sampler) -> _Source:
    return _Source(
        base_model=sampler.base_model,
        version_id=sampler.version_id,
        model_path=sampler.model_path,
        session_id=sampler.session_id,
    )


async def _source(
    request: Request, context: Context, base_model: str | None, model_path: str | None
) -> _Source:
    """A checkpoint, or a base model as it is."""
    if model_path is None:
        if base_model is None:
            raise WireError.at(
                ("base_model",), "give `base_model`, or `model_path` of a checkpoint.", "missing"
            )
        base = context.base_model(base_model)
        return _Source(base_model=base.name, version_id=None, model_path=None)
    version, run = await readable(request, context, model_path)
    refuse_external(version)
    if base_model is not None and context.base_model(base_model).name != run.base_model:
        raise Refusal(
            400,
            f"{model_path} is an adapter of {run.base_model}, not of {base_model}. "
            "Leave `base_model` out.",
        )
    base = context.base_model(run.base_model)
    return _Source(base_model=base.name, version_id=version.version_id, model_path=model_path)


# MERGED: Samples as they are drawn: server-sent events. accepted {"request_id", "sample_sequence_ids"}: from here on the sample is on disk token {"sequence", "tokens", "logprobs"}, as they come done the answer as JSON, with "sample_sequence_ids"; or error {"error", "category"} A stream that breaks loses nothing: the result can be fetched by its request id, and a repeated request reads the same sample. A stream that ends without `done` or `error` belongs to a server that stops; the sample goes on at its next start.


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
            self._context.store.requests.mark_fetched(self._request_id)
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
