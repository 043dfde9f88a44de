"""Copies of checkpoints, one's own or another owner's, as runs of their own."""

import functools
import hashlib
import time

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from tinkex.server.api.auth import owner_of
from tinkex.server.api.context import Context, answer, context_of, describe, read_json
from tinkex.server.api.reading import readable
from tinkex.server.saving import check_ttl, tinker_path
from tinkex.server.store import Model, OverQuota, RunTaken, Saved, Session, Version
from tinkex.server.store.trouble import NewRefused
from tinkex.wire.checkpoints import CopyWeightsRequest, CopyWeightsResponse
from tinkex.wire.errors import WireError

router = APIRouter(prefix="/api/v1", tags=["checkpoints"])

# What a copy of a save without a name is called.
UNNAMED = "copy"


@router.post("/copy_weights", openapi_extra=dict(describe(CopyWeightsRequest)))
async def copy_weights(request: Request) -> Response:
    """Into a project, or (before 0.34) into a session. A repeat finds the first copy."""
    asked = await read_json(request, CopyWeightsRequest)
    context = context_of(request)
    check_ttl(asked.ttl_seconds)
    source, run = await readable(
        request, context, asked.source_path, token=asked.weights_access_token
    )
    session, number = await _place(request, context, asked)
    now_s = time.time()
    # Whoever may read a checkpoint may not read what its owner noted about the run.
    is_own = run.owner == session.owner
    model = Model(
        model_id=f"{session.session_id}:train:{number}",
        owner=session.owner,
        session_id=session.session_id,
        base_model=run.base_model,
        lora_config=run.lora_config,
        optimizer_config=run.optimizer_config,
        user_metadata=run.user_metadata if is_own else None,
        created_s=now_s,
    )
    checkpoints, catalog = context.store.checkpoints, context.store.catalog
    copy = checkpoints.new_version(
        owner=model.owner,
        model_id=model.model_id,
        kind=source.kind,
        name=source.name or UNNAMED,
    ).sized(source.size_bytes)
    written = await checkpoints.fingerprint(source)
    version = await catalog.earlier_copy(copy, written)
    if version is None:
        add = functools.partial(
            catalog.add_copy,
            copy,
            fingerprint=written,
            model=model,
            model_seq_id=number,
            source=source,
            like=await _notes(context, source, is_own=is_own),
            expires_s=None if asked.ttl_seconds is None else now_s + asked.ttl_seconds,
        )
        await checkpoints.copy_files(source, copy)
        try:
            version = await context.store.within_quota(model.owner, add)
        except (OverQuota, RunTaken, NewRefused):
            # After any other error the row may be there: the sweep, which looks, deletes them.
            await checkpoints.discard(copy)
            raise
        if version is not copy:  # another try of this copy was first
            await checkpoints.discard(copy)
    path = tinker_path(version.model_id, version.kind, version.name or UNNAMED)
    return answer(CopyWeightsResponse(tinker_path=path))


async def _notes(context: Context, source: Version, *, is_own: bool) -> Saved | None:
    """The checkpoint whose own metadata the copy may have: the reader's, or a published one."""
    if source.name is None:
        return None
    saved = await context.store.catalog.checkpoint(
        model_id=source.model_id, kind=source.kind, name=source.name
    )
    return saved if saved is not None and (is_own or saved.public) else None


def _copy_key(key: str) -> str:
    """Hashed, as those of sessions: a header may hold anything."""
    return f"copy:{hashlib.sha256(key.encode()).hexdigest()}"


async def _place(
    request: Request, context: Context, asked: CopyWeightsRequest
) -> tuple[Session, int]:
    """The session that the copy belongs to, and its number in it."""
    if asked.session_id is not None:
        if asked.model_seq_id is None or asked.model_seq_id < 0:
            raise WireError.at(("model_seq_id",), "a number from 0 is needed.", "missing")
        return await context.open_session(request, asked.session_id), asked.model_seq_id
    if asked.destination_project_id is None:
        raise WireError.at(
            ("destination_project_id",),
            "give `destination_project_id`, or `session_id` and `model_seq_id`.",
            "missing",
        )
    # The client repeats a copy under one key, so the key finds the session of the first try.
    key = request.headers.get("x-idempotency-key")
    session = await context.store.runs.create_session(
        owner=owner_of(request),
        sdk_version=None,
        tags=["copy"],
        user_metadata={},
        project_id=asked.destination_project_id,
        display_name=None,
        idempotency_key=None if key is None else _copy_key(key),
    )
    return session, 0
