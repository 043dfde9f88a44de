"""
The routes of sampling: sampling sessions, samples, and samples as a stream.

`asample` returns a request id. `stream_sample` returns server-sent events:

    accepted   {"request_id", "sample_sequence_ids"}: the sample is stored from here on
    token      {"sequence", "tokens", "logprobs"}: new tokens
    done       the complete response as JSON, with "sample_sequence_ids"
    error      {"error", "category"}: instead of `done`

A broken stream loses nothing: the result can be fetched by its request id, and a repeated request
reads the same sample. A stream without `done` or `error` at its end means that the server stopped;
the sample continues after the next start.
"""

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
from tinkex.server.api.bodies import RECEIVED_BODY, MessageRoute, read_data
from tinkex.server.api.deps import (
    Context,
    context_of,
    describe_body,
    dialect_of,
    json_response,
    readable_checkpoint,
)
from tinkex.server.api.errors import Refusal
from tinkex.server.api.futures import INLINE_ENCODE_BYTES
from tinkex.server.api.submit import (
    FUTURE,
    accept,
    future_response,
    sequence_ids,
    tokens_known,
)
from tinkex.server.scheduler.checkpoints import refuse_external
from tinkex.server.scheduler.result_waiters import FinishedRequest, UnknownRequest, internal_error
from tinkex.server.scheduler.sample_worker import TokenStream
from tinkex.server.scheduler.step_queue import Kind
from tinkex.server.store import Accepted, NewRequest, Sampler
from tinkex.server.store.requests import ResultGone
from tinkex.wire.codec import decode_json, encode_json
from tinkex.wire.errors import UserFailure, WireError
from tinkex.wire.partial_sample import PartialSample, PartialSampleReader, SampledTokens
from tinkex.wire.protobuf import decode_sample_response
from tinkex.wire.redaction import redact
from tinkex.wire.sampling import (
    CreateSamplingSessionRequest,
    CreateSamplingSessionResponse,
    GetSamplerResponse,
    JoinSamplingSessionRequest,
    JoinSamplingSessionResponse,
    SampleRequest,
    SampleResponse,
)
from tinkex.wire.sdk_versions import SdkVersion

router = APIRouter(prefix="/api/v1", tags=["sampling"], route_class=MessageRoute)

# The ids of all sequences are returned immediately, before the sequences exist. The limit keeps a
# typo from creating a billion of them.
MAX_SEQUENCES = 1024
# A cloned sampling client numbers its samples from its clone id times 10^9, and ids go up to 10^9.
MAX_SAMPLE_SEQ_ID = 2**63 - 1

EVENT_STREAM = "text/event-stream"
_EVENTS = {
    EVENT_STREAM: {
        "schema": {
            "type": "string",
            "description": "Events `accepted` (`request_id`, `sample_sequence_ids`), `token` "
            "(`sequence`, `tokens`, `logprobs`) as they are sampled, and `done` (the response as JSON) or "
            "`error` (`error`, `category`).",
        }
    }
}
# Proxies must neither cache nor buffer the events.
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
# Sent while there are no tokens, so that proxies and clients do not close the connection as idle.
KEEP_ALIVE_S = 10.0
KEEP_ALIVE = b": keep-alive\n\n"
STOPPING = b": the server is stopping; the result can be fetched by its request id\n\n"
# The last event of a long sample may have megabytes. It is sent in slices, so that a slow reader
# keeps only one slice in memory.
SLICE_BYTES = 64 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class _Source:
    """The model that a sample is drawn from."""

    base_model: str
    version_id: str | None
    model_path: str | None
    session_id: str | None = None


@router.post("/create_sampling_session")
async def create_sampling_session(
    request: Request, message: CreateSamplingSessionRequest
) -> Response:
    """Refuses unknown base models and paths with a list of the known ones."""
    context = context_of(request)
    session = await context.open_session(request, message.session_id)
    number = message.sampling_session_seq_id
    if number < 0:
        raise WireError.at(("sampling_session_seq_id",), f"{number} is negative.")
    source = await _named_source(request, context, message.base_model, message.model_path)
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
            f"number {number} of this session is already a sampler of "
            f"{sampler.model_path or sampler.base_model}. Use the next free number.",
            "sampling_session_seq_id_reused",
        )
    return json_response(
        CreateSamplingSessionResponse(sampling_session_id=sampler.sampling_session_id)
    )


@router.post("/join_sampling_session")
async def join_sampling_session(request: Request, message: JoinSamplingSessionRequest) -> Response:
    """A unique number for a clone of a sampling client."""
    context = context_of(request)
    sampler = await context.sampler(request, message.sampling_session_id)
    await context.open_session(request, sampler.session_id)
    counter = await context.store.models.add_sampler_client(sampler.sampling_session_id)
    return json_response(JoinSamplingSessionResponse(client_counter=counter))


@router.get("/samplers/{sampling_session_id}")
async def get_sampler(request: Request, sampling_session_id: str) -> Response:
    context = context_of(request)
    sampler = await context.sampler(request, sampling_session_id)
    described = GetSamplerResponse(
        sampler_id=sampler.sampling_session_id,
        base_model=sampler.base_model,
        model_path=sampler.model_path,
    )
    # An extension of the protocol: an alias alone does not identify a tokenizer.
    found = context.tokenizer_id(sampler.base_model)
    return json_response({**described.model_dump(exclude_none=True), "tokenizer_id": found})


@router.post(
    "/asample",
    operation_id="sampleRequest",
    dependencies=[describe_body(SampleRequest)],
    summary="Sample sequences",
    responses=FUTURE,
)
async def asample(request: Request) -> Response:
    new = await read_sample(request)
    return future_response(new, await accept(request, new))


async def read_sample(request: Request) -> NewRequest:
    """Read and check the sample of a request."""
    context = context_of(request)
    try:
        message, payload = await read_data(request, _decode)
    except UserFailure as failure:
        return await _invalid_sample(request, context, failure, request.scope[RECEIVED_BODY])
    # No longer needed; a stream would keep it in memory for minutes.
    del request.scope[RECEIVED_BODY]
    source = await _resolve_source(request, context, message)
    return _new_sample(
        request,
        source,
        payload=payload,
        sampling_session_id=message.sampling_session_id,
        seq_id=message.seq_id,
        sequences=message.num_samples,
        tokens=tokens_known(message.prompt),
    )


def _decode(body: bytes) -> tuple[SampleRequest, bytes]:
    """The request and its normalized encoding. For a large body this runs in a thread."""
    message = decode_json(SampleRequest, body)
    if message.sampling_params.seed is None:
        # Fixed here, so that a sample that is repeated after a crash has the same tokens.
        params = message.sampling_params.model_copy(update={"seed": secrets.randbits(31)})
        message = message.model_copy(update={"sampling_params": params})
    return message, encode_json(message)


async def _invalid_sample(
    request: Request, context: Context, failure: UserFailure, body: bytes
) -> NewRequest:
    """A well-formed sample with unknown fields or values: it is accepted, and fails as a user error."""
    sampling_session_id, base_model, model_path = (
        name if isinstance(name := failure.request.get(field), str) else None
        for field in ("sampling_session_id", "base_model", "model_path")
    )
    if sampling_session_id is not None:
        sampler = await context.sampler(request, sampling_session_id)
        await context.open_session(request, sampler.session_id)
        source = _sampler_source(sampler)
    elif base_model is not None or model_path is not None:
        source = await _named_source(request, context, base_model, model_path)
    else:
        raise failure  # without a model, the sample cannot be accepted
    seq_id, sequences = failure.request.get("seq_id"), failure.request.get("num_samples", 1)
    return _new_sample(
        request,
        source,
        payload=redact(body.decode(errors="replace")).encode(),
        sampling_session_id=sampling_session_id,
        seq_id=seq_id if isinstance(seq_id, int) else None,
        sequences=sequences if isinstance(sequences, int) else 1,
    )


def _new_sample(
    request: Request,
    source: _Source,
    *,
    payload: bytes,
    sampling_session_id: str | None,
    seq_id: int | None,
    sequences: int,
    tokens: int = 0,
) -> NewRequest:
    if not 1 <= sequences <= MAX_SEQUENCES:
        raise WireError.at(
            ("num_samples",),
            f"{sequences} samples were requested; 1 to {MAX_SEQUENCES} are allowed.",
        )
    if seq_id is not None and not 0 <= seq_id <= MAX_SAMPLE_SEQ_ID:
        raise WireError.at(("seq_id",), f"{seq_id} is not between 0 and {MAX_SAMPLE_SEQ_ID}.")
    return NewRequest(
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


async def _resolve_source(request: Request, context: Context, message: SampleRequest) -> _Source:
    """Resolve one of the three ways to name a model; refuse two that disagree."""
    if message.mode != "session":
        return await _named_source(request, context, message.base_model, message.model_path)
    source = _sampler_source(await context.sampler(request, message.sampling_session_id or ""))
    if source.session_id is not None:
        await context.open_session(request, source.session_id)
    same_base = (
        message.base_model is not None
        and context.base_model(message.base_model).name == source.base_model
    )
    message.check_agrees(
        base_model=message.base_model if same_base else source.base_model,
        model_path=source.model_path,
    )
    return source


def _sampler_source(sampler: Sampler) -> _Source:
    return _Source(
        base_model=sampler.base_model,
        version_id=sampler.version_id,
        model_path=sampler.model_path,
        session_id=sampler.session_id,
    )


async def _named_source(
    request: Request, context: Context, base_model: str | None, model_path: str | None
) -> _Source:
    """A checkpoint, or a base model without an adapter."""
    if model_path is None:
        if base_model is None:
            raise WireError.at(
                ("base_model",), "give `base_model`, or `model_path` of a checkpoint.", "missing"
            )
        base = context.base_model(base_model)
        return _Source(base_model=base.name, version_id=None, model_path=None)
    version, run = await readable_checkpoint(request, context, model_path)
    refuse_external(version)
    if base_model is not None and context.base_model(base_model).name != run.base_model:
        raise Refusal(
            400,
            f"{model_path} is an adapter of {run.base_model}, not of {base_model}. "
            "Omit `base_model`.",
        )
    base = context.base_model(run.base_model)
    return _Source(base_model=base.name, version_id=version.version_id, model_path=model_path)


@router.post(
    "/stream_sample",
    operation_id="streamSample",
    dependencies=[describe_body(SampleRequest)],
    summary="Sample sequences, as a stream",
    response_class=StreamingResponse,
    responses={200: {"content": _EVENTS}},
)
async def stream_sample(request: Request) -> Response:
    context = context_of(request)
    new = await read_sample(request)
    first = await accept(request, new, token_stream=TokenStream())
    session = None
    if new.session_id is not None:
        session = await context.session(request, new.session_id)
    sample = _SampleEvents(
        context, first, owner=owner_of(request), dialect=dialect_of(request, session)
    )
    return _EventStream(sample.events())


class _EventStream(StreamingResponse):
    """Closes its event generator when the client disconnects, so that the sample is abandoned."""

    def __init__(self, events: AsyncGenerator[bytes]) -> None:
        self._events, self._slices = events, slices(events)
        super().__init__(self._slices, media_type=EVENT_STREAM, headers=STREAM_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._events), contextlib.aclosing(self._slices):
            await super().__call__(scope, receive, send)


async def slices(pieces: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """The same bytes in pieces of at most `SLICE_BYTES`."""
    async for piece in pieces:
        for start in range(0, len(piece), SLICE_BYTES):
            yield piece[start : start + SLICE_BYTES]


class _SampleEvents:
    """The events of one sample for one client."""

    def __init__(
        self, context: Context, first: Accepted, *, owner: str, dialect: SdkVersion
    ) -> None:
        self._context = context
        self._request_id = first.request_id
        self._ids = sequence_ids(first)
        self._owner = owner
        self._dialect = dialect
        # None if the sample is finished or was started by `asample`: then all tokens come at the end.
        self._tap = context.scheduler.token_stream(first.request_id)
        self._growing = PartialSample() if self._tap is None else self._tap.growing
        self._reader = PartialSampleReader(self._growing)
        self._settled: FinishedRequest | None = None

    async def events(self) -> AsyncGenerator[bytes]:
        ended = False
        try:
            accepted = {"request_id": self._request_id, "sample_sequence_ids": self._ids}
            yield event("accepted", accepted)
            async with contextlib.aclosing(self._tokens_until_settled()) as pieces:
                async for piece in pieces:
                    yield piece
            if self._settled is None:
                ended = True
                yield STOPPING
                return
            for piece in await self._ending(self._settled):
                yield piece
            ended = True
            self._context.store.requests.mark_fetched(self._request_id)
        except (UnknownRequest, ResultGone):
            ended = True
            yield error_event("the result has expired: request a new sample.", "user")
        except Exception as failure:  # noqa: BLE001  too late for an HTTP status
            ended = True
            ending = internal_error(failure)
            yield error_event(ending.error or "", ending.category)
        finally:
            # A sample that `asample` started may have other clients that wait for it.
            if not ended and self._tap is not None:
                self._context.scheduler.cancel_unless_polled(
                    self._request_id,
                    owner=self._owner,
                    after_s=self._context.settings.stream_grace_s,
                )

    async def _tokens_until_settled(self) -> AsyncGenerator[bytes]:
        """Token events until the sample is finished or the server stops."""
        futures = self._context.futures
        keep_alive_s = min(KEEP_ALIVE_S, self._context.settings.long_poll_s or KEEP_ALIVE_S)
        while True:
            waiting = asyncio.ensure_future(
                futures.wait(self._request_id, owner=self._owner, within_s=keep_alive_s)
            )
            try:
                async for piece in self._new_tokens_until(waiting):
                    yield piece
                self._settled = await waiting
                if self._settled is not None or futures.closing:
                    return
            finally:
                waiting.cancel()
            yield KEEP_ALIVE

    async def _new_tokens_until(self, waiting: asyncio.Future[Any]) -> AsyncGenerator[bytes]:
        while not waiting.done():
            # Get the future before sending, so that no token that arrives meanwhile is missed.
            changed = set() if self._tap is None else {self._tap.changed}
            for news in self._reader.read_new():
                yield token_event(news)
            await asyncio.wait({waiting} | changed, return_when=asyncio.FIRST_COMPLETED)

    async def _ending(self, settled: FinishedRequest) -> list[bytes]:
        """Events for the remaining tokens and the complete response."""
        if settled.error is not None:
            return [error_event(settled.error, settled.category)]
        try:
            if len(settled.result) <= INLINE_ENCODE_BYTES:
                return self._answer(settled.result)
            return await asyncio.to_thread(self._answer, settled.result)
        except UserFailure as failure:  # numbers that JSON cannot represent
            return [error_event(str(failure), "user")]

    def _answer(self, result: bytes) -> list[bytes]:
        response = decode_sample_response(result, self._ids)
        for index, sequence in enumerate(response.sequences):
            self._growing.add(index, sequence.tokens, sequence.logprobs, start=0)
        done = event(
            "done", {**complete_json(response, self._dialect), "sample_sequence_ids": self._ids}
        )
        return [*(token_event(news) for news in self._reader.read_new()), done]


def complete_json(response: SampleResponse, dialect: SdkVersion) -> dict[str, Any]:
    """The JSON response of a poll, with the top-k logprobs added."""
    answer = dialect.sample_json(response)
    for encoded, sequence in zip(answer["sequences"], response.sequences, strict=True):
        if sequence.topk_logprobs is not None:
            encoded["topk_logprobs"] = sequence.topk_logprobs
    return answer


def token_event(news: SampledTokens) -> bytes:
    logprobs = [number if math.isfinite(number) else None for number in news.logprobs]
    return event("token", {"sequence": news.sequence, "tokens": news.tokens, "logprobs": logprobs})


def error_event(text: str, category: str | None) -> bytes:
    return event("error", {"error": text, "category": category or "unknown"})


def event(name: str, data: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), encode_json(data))
