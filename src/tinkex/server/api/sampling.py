"""Sampling sessions, and samples. Each sample runs at once; a repeat finds its first self."""

import secrets
from dataclasses import dataclass

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from tinkex.server.api.accept import accepted, admit, tokens_known
from tinkex.server.api.auth import owner_of
from tinkex.server.api.context import (
    SENT,
    Context,
    answer,
    context_of,
    describe,
    read_data,
    read_json,
)
from tinkex.server.api.errors import Refusal
from tinkex.server.api.reading import readable
from tinkex.server.plan import Kind
from tinkex.server.saving import refuse_external
from tinkex.server.store import NewRequest, Sampler
from tinkex.wire.codec import decode_json, encode_json
from tinkex.wire.errors import UserFailure, WireError
from tinkex.wire.sampling import (
    CreateSamplingSessionRequest,
    CreateSamplingSessionResponse,
    GetSamplerResponse,
    JoinSamplingSessionRequest,
    JoinSamplingSessionResponse,
    SampleRequest,
)
from tinkex.wire.scrubbing import scrubbed

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
    sampler = await context.store.runs.create_sampler(
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
    counter = await context.store.runs.join_sampler(sampler.sampling_session_id)
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
