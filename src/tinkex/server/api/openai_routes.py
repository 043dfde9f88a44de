"""
The routes of OpenAI's API: models, chat completions and completions.

Each request is an ordinary sample: stored before it runs, within the limits of its owner, fair
between owners, and counted. But its client cannot come back for a result, so a sample whose client
disconnects is canceled at once. They are at `/v1`, where OpenAI's clients expect them, and at
`/oai/api/v1`, where Tinker has them.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from fastapi import APIRouter
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from tinkex.models.tokenizer import Tokenizer
from tinkex.server.api.auth import owner_of
from tinkex.server.api.bodies import RECEIVED_BODY, MessageRoute, in_decode_slot, read_data
from tinkex.server.api.deps import Context, context_of, describe_body, json_response
from tinkex.server.api.errors import OPENAI_PREFIXES, Refusal, openai_error
from tinkex.server.api.futures import in_thread_if_large, on_disconnect_of
from tinkex.server.api.openai_answers import Answer, event_of
from tinkex.server.api.openai_prompts import (
    Prepared,
    PromptLimits,
    check_logprobs,
    prepare_chat,
    prepare_completion,
)
from tinkex.server.api.response_limits import bounded, report
from tinkex.server.api.sample_stream import KEEP_ALIVE, EventStream, SampleReader
from tinkex.server.api.sampling import Source, named_source, new_sample, prompt_start
from tinkex.server.api.submit import RETRY_AFTER_S, accept
from tinkex.server.queued_request import Outcome, QueuedRequest
from tinkex.server.scheduler.checkpoints import SAMPLER, no_checkpoint
from tinkex.server.scheduler.results import internal_error
from tinkex.server.scheduler.sample_worker import TokenStream
from tinkex.server.store import Version
from tinkex.wire.checkpoints import tinker_path
from tinkex.wire.codec import JSON_TYPE, encode_json
from tinkex.wire.errors import UserFailure
from tinkex.wire.openai import ChatRequest, CompletionRequest, read_chat, read_completion
from tinkex.wire.protobuf import decode_sample_response
from tinkex.wire.sampling import SampleResponse

T = TypeVar("T")

#: Checkpoints that `/v1/models` lists, newest first.
MAX_LISTED = 1_000
#: `owned_by` of a base model, and of a checkpoint that another owner published or shared: the name of
#: that owner is nobody else's business.
SERVED = "tinkex"
ANOTHER_OWNER = "another-owner"
#: Prompts up to this size are rendered on the event loop: a thread would cost more.
INLINE_PROMPT_BYTES = 16 * 1024
#: The same for answers with this many tokens.
INLINE_TOKENS = 2048
#: How often a waiting request looks whether its client is still there, besides being told so.
WAIT_S = 10.0
STOPPING = (
    "the server is stopping, and this answer is not complete. Send the request again in a moment."
)


# -- models --------------------------------------------------------------------------------------


@bounded(entries=MAX_LISTED)
async def list_models(request: Request) -> Response:
    """The base models, then checkpoints: the caller's and published ones, newest first."""
    context = context_of(request)
    saved, _ = await context.store.checkpoint_catalog.checkpoints(
        owner=owner_of(request), kinds={SAMPLER}, published=True, limit=MAX_LISTED
    )
    served = [model.name for model in context.executor.served]
    models = [
        *(_model(name, created=0, owned_by=SERVED) for name in served),
        *(
            _checkpoint_model(tinker_path(one.model_id, one.kind, one.name), one.version, request)
            for one in saved
        ),
    ]
    listed = {"object": "list", "data": models}
    return await report(request, lambda: listed, advice="Delete checkpoints that nobody needs.")


async def get_model(request: Request, model: str) -> Response:
    context = context_of(request)
    source = await _source(request, context, model)
    if source.version_id is None:
        return json_response(_model(model, created=0, owned_by=SERVED))
    version = await context.store.checkpoints.version(source.version_id)
    if version is None:  # deleted since
        raise Refusal(404, no_checkpoint(model), field="model")
    return json_response(_checkpoint_model(model, version, request))


def _model(name: str, *, created: int, owned_by: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": owned_by}


def _checkpoint_model(path: str, version: Version, request: Request) -> dict[str, Any]:
    caller = owner_of(request)
    owner = caller if version.owner == caller else ANOTHER_OWNER
    return _model(path, created=int(version.created_s), owned_by=owner)


async def _source(request: Request, context: Context, model: str) -> Source:
    """The base model or checkpoint of this name; a 404, also for another owner's."""
    is_path = model.startswith("tinker://")
    try:
        return await named_source(
            request, context, None if is_path else model, model if is_path else None
        )
    except (Refusal, UserFailure) as refusal:
        if isinstance(refusal, Refusal) and refusal.status not in (400, 404):
            raise
        raise Refusal(404, str(refusal), field="model") from None


# -- completions ---------------------------------------------------------------------------------


async def chat_completions(request: Request) -> Response:
    message, size = await _read(request, read_chat)

    def prepare(tokenizer: Tokenizer, limits: PromptLimits, folder: Path) -> list[Prepared]:
        return [prepare_chat(message, tokenizer, limits, folder)]

    return await _answer(request, message, size, prepare)


async def completions(request: Request) -> Response:
    message, size = await _read(request, read_completion)

    def prepare(tokenizer: Tokenizer, limits: PromptLimits, _: Path) -> list[Prepared]:
        return prepare_completion(message, tokenizer, limits)

    return await _answer(request, message, size, prepare)


async def _read(request: Request, decode: Callable[[bytes], T]) -> tuple[T, int]:
    """The message, and the bytes of the body."""
    message = await read_data(request, decode)
    # No longer needed; a stream would keep it in memory for minutes.
    return message, len(request.scope.pop(RECEIVED_BODY))


async def _answer(
    request: Request,
    message: ChatRequest | CompletionRequest,
    size: int,
    prepare: Callable[[Tokenizer, PromptLimits, Path], list[Prepared]],
) -> Response:
    context = context_of(request)
    source = await _source(request, context, message.model)
    base = context.base_model(source.base_model)
    tokenizer = await context.tokenizers.of(base)
    limits = PromptLimits.of(
        base.max_context_length, max_message_bytes=context.settings.max_message_bytes
    )
    if size <= INLINE_PROMPT_BYTES and not _takes_long(message):
        prepared = prepare(tokenizer, limits, base.folder)
    else:
        prepared = await in_decode_slot(request, lambda: prepare(tokenizer, limits, base.folder))
    check_logprobs(message, prepared, base.max_context_length)
    samples = [_new_sample(request, source, one) for one in prepared]
    if isinstance(message, ChatRequest):
        message.messages.clear()  # a stream would keep its images in memory for minutes

    def answer_to(request_id: str) -> Answer:
        return Answer(
            message=message,
            tokenizer=tokenizer,
            request_id=request_id,
            prompts=[one.tokens for one in prepared],
            tool_format=prepared[0].tool_format,
        )

    if message.stream:
        first = await accept(request, samples[0], token_stream=TokenStream())
        reader = SampleReader(context, first, owner=owner_of(request))
        return EventStream(_chunks(context, reader, answer_to(first.request_id), first))
    responses = await _responses(request, context, samples)
    answer = answer_to(samples[0].request_id)
    sampled = sum(len(one.tokens) for each in responses for one in each.sequences)
    if sampled <= INLINE_TOKENS:
        return json_response(answer.complete(responses))
    body = await asyncio.to_thread(lambda: encode_json(answer.complete(responses)))
    return Response(body, media_type=JSON_TYPE)


def _takes_long(message: ChatRequest | CompletionRequest) -> bool:
    """Whether a small body may take long: schemas are compiled, and images need files."""
    return isinstance(message, ChatRequest) and bool(
        message.response_format or message.tools or message.has_images
    )


def _new_sample(request: Request, source: Source, prepared: Prepared) -> QueuedRequest:
    named = {"model_path": source.model_path, "base_model": None}
    if source.model_path is None:
        named["base_model"] = source.base_model
    return new_sample(
        request,
        source,
        payload=encode_json(prepared.sample.model_copy(update=named)),
        sampling_session_id=None,
        seq_id=None,
        sequences=prepared.sample.num_samples,
        tokens=len(prepared.tokens),
        prompt_start=prompt_start(prepared.sample.prompt),
    )


async def _responses(
    request: Request, context: Context, samples: Sequence[QueuedRequest]
) -> list[SampleResponse]:
    """Run all samples of a request; if one is refused or fails, or the client leaves, cancel all."""
    accepted: list[QueuedRequest] = []
    try:
        for sample in samples:
            accepted.append(await accept(request, sample))  # noqa: PERF401  kept if the next fails
        responses = [await _response(request, context, first) for first in accepted]
    except BaseException:
        # A sample that was accepted just now has a task that has not begun, and only a sample that
        # has begun can be canceled.
        await asyncio.sleep(0)
        for first in accepted:
            context.scheduler.cancel(first.request_id, owner=first.owner)
        raise
    for first in accepted:
        context.store.requests.mark_fetched(first.request_id)
    return responses


async def _response(request: Request, context: Context, first: QueuedRequest) -> SampleResponse:
    while True:
        found = await context.futures.wait(
            first.request_id,
            owner=first.owner,
            within_s=WAIT_S,
            wake_early=on_disconnect_of(request),
        )
        if (outcome := found.outcome) is not None:
            break
        if context.futures.closing:
            raise Refusal(503, STOPPING, headers={"Retry-After": str(RETRY_AFTER_S)})
        if await request.is_disconnected():
            raise ClientDisconnect
    if outcome.error is not None:
        raise _failed(outcome)
    return await in_thread_if_large(outcome.result, lambda: decode_sample_response(outcome.result))


def _failed(outcome: Outcome) -> Refusal:
    return Refusal(400 if outcome.category == "user" else 500, outcome.error or "it failed.")


async def _chunks(
    context: Context, reader: SampleReader, answer: Answer, first: QueuedRequest
) -> AsyncGenerator[bytes]:
    """The events of a stream. An error ends it with an event of its own."""
    ended = False
    try:
        yield b"".join(answer.first_chunks())
        async with contextlib.aclosing(reader.new_tokens()) as pieces:
            async for piece in pieces:
                # Together: each piece is a write to the socket.
                chunks = [chunk for news in piece for chunk in answer.chunks(news)]
                yield b"".join(chunks) if piece else KEEP_ALIVE
        if (outcome := reader.outcome) is None:
            yield event_of(openai_error(STOPPING, 503))
            return
        ended = True
        if outcome.error is not None:
            failed = _failed(outcome)
            yield event_of(openai_error(failed.detail, failed.status))
            return
        yield await in_thread_if_large(
            outcome.result, lambda: _last_chunks(answer, reader, outcome.result)
        )
        context.store.requests.mark_fetched(first.request_id)
    except Exception as failure:  # noqa: BLE001  too late for an HTTP status
        yield event_of(openai_error(internal_error(failure).error, 500))
    finally:
        if not ended:
            context.scheduler.cancel(first.request_id, owner=first.owner)


def _last_chunks(answer: Answer, reader: SampleReader, result: bytes) -> bytes:
    response = decode_sample_response(result)
    rest = [chunk for news in reader.rest(response) for chunk in answer.chunks(news)]
    return b"".join([*rest, *answer.last_chunks(response)])


def _router(prefix: str, *, described: bool) -> APIRouter:
    router = APIRouter(
        prefix=prefix.rstrip("/"),
        tags=["openai"],
        route_class=MessageRoute,
        include_in_schema=described,
    )
    router.get("/models")(list_models)
    router.get("/models/{model:path}")(get_model)
    router.post("/chat/completions", dependencies=[describe_body(ChatRequest)])(chat_completions)
    router.post("/completions", dependencies=[describe_body(CompletionRequest)])(completions)
    return router


#: The same routes at both places; the description of the API has them once.
routers = tuple(
    _router(prefix, described=number == 0) for number, prefix in enumerate(OPENAI_PREFIXES)
)
