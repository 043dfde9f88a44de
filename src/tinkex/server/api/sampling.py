"""The routes of sampling: sampling sessions, and samples whose results are polled."""

import secrets
from dataclasses import dataclass

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from tinkex.server.api.auth import owner_of
from tinkex.server.api.bodies import RECEIVED_BODY, MessageRoute, read_data
from tinkex.server.api.deps import (
    Context,
    context_of,
    describe_body,
    json_response,
    readable_checkpoint,
)
from tinkex.server.api.errors import Refusal
from tinkex.server.api.submit import FUTURE, accept, count_tokens, future_response
from tinkex.server.queued_request import Kind, QueuedRequest
from tinkex.server.scheduler.checkpoints import refuse_external
from tinkex.server.scheduler.replicas import PREFIX_TOKENS
from tinkex.server.store import Sampler
from tinkex.wire.codec import decode_json, encode_json
from tinkex.wire.errors import UserFailure, WireError
from tinkex.wire.inputs import EncodedTextChunk, ModelInput
from tinkex.wire.redaction import redact
from tinkex.wire.sampling import (
    CreateSamplingSessionRequest,
    CreateSamplingSessionResponse,
    GetSamplerResponse,
    JoinSamplingSessionRequest,
    JoinSamplingSessionResponse,
    SampleRequest,
)

router = APIRouter(prefix="/api/v1", tags=["sampling"], route_class=MessageRoute)

# The ids of all sequences are returned immediately, before the sequences exist. The limit keeps a
# typo from creating a billion of them.
MAX_SEQUENCES = 1024
# A cloned sampling client numbers its samples from its clone id times 10^9, and ids go up to 10^9.
MAX_SAMPLE_SEQ_ID = 2**63 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
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
    source = await named_source(request, context, message.base_model, message.model_path)
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


async def read_sample(request: Request) -> QueuedRequest:
    """Read and check the sample of a request."""
    context = context_of(request)
    try:
        message, payload = await read_data(request, _decode)
    except UserFailure as failure:
        return await _invalid_sample(request, context, failure, request.scope[RECEIVED_BODY])
    # No longer needed; a stream would keep it in memory for minutes.
    del request.scope[RECEIVED_BODY]
    source = await _resolve_source(request, context, message)
    return new_sample(
        request,
        source,
        payload=payload,
        sampling_session_id=message.sampling_session_id,
        seq_id=message.seq_id,
        sequences=message.num_samples,
        tokens=await count_tokens(request, source.base_model, [message.prompt]),
        prompt_start=prompt_start(message.prompt),
    )


def prompt_start(prompt: ModelInput) -> bytes:
    """The first text tokens of a prompt; empty if it begins with something else."""
    first = prompt.chunks[0] if prompt.chunks else None
    return first.tokens_np[:PREFIX_TOKENS].tobytes() if isinstance(first, EncodedTextChunk) else b""


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
) -> QueuedRequest:
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
        source = await named_source(request, context, base_model, model_path)
    else:
        raise failure  # without a model, the sample cannot be accepted
    seq_id, sequences = failure.request.get("seq_id"), failure.request.get("num_samples", 1)
    return new_sample(
        request,
        source,
        payload=redact(body.decode(errors="replace")).encode(),
        sampling_session_id=sampling_session_id,
        seq_id=seq_id if isinstance(seq_id, int) else None,
        sequences=sequences if isinstance(sequences, int) else 1,
    )


def new_sample(
    request: Request,
    source: Source,
    *,
    payload: bytes,
    sampling_session_id: str | None,
    seq_id: int | None,
    sequences: int,
    tokens: int = 0,
    prompt_start: bytes = b"",
) -> QueuedRequest:
    if not 1 <= sequences <= MAX_SEQUENCES:
        raise WireError.at(
            ("num_samples",),
            f"{sequences} samples were requested; 1 to {MAX_SEQUENCES} are allowed.",
        )
    if seq_id is not None and not 0 <= seq_id <= MAX_SAMPLE_SEQ_ID:
        raise WireError.at(("seq_id",), f"{seq_id} is not between 0 and {MAX_SAMPLE_SEQ_ID}.")
    return QueuedRequest(
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
        prompt_start=prompt_start,
    )


async def _resolve_source(request: Request, context: Context, message: SampleRequest) -> Source:
    """Resolve one of the three ways to name a model; refuse two that disagree."""
    if message.mode != "session":
        return await named_source(request, context, message.base_model, message.model_path)
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


def _sampler_source(sampler: Sampler) -> Source:
    return Source(
        base_model=sampler.base_model,
        version_id=sampler.version_id,
        model_path=sampler.model_path,
        session_id=sampler.session_id,
    )


async def named_source(
    request: Request, context: Context, base_model: str | None, model_path: str | None
) -> Source:
    """A checkpoint, or a base model without an adapter."""
    if model_path is None:
        if base_model is None:
            raise WireError.at(
                ("base_model",), "give `base_model`, or `model_path` of a checkpoint.", "missing"
            )
        base = context.base_model(base_model)
        return Source(base_model=base.name, version_id=None, model_path=None)
    version, run = await readable_checkpoint(request, context, model_path)
    refuse_external(version)
    if base_model is not None and context.base_model(base_model).name != run.base_model:
        raise Refusal(
            400,
            f"{model_path} is an adapter of {run.base_model}, not of {base_model}. "
            "Omit `base_model`.",
        )
    base = context.base_model(run.base_model)
    return Source(base_model=base.name, version_id=version.version_id, model_path=model_path)
