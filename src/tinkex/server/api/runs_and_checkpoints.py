"""The routes that list training runs and checkpoints, and publish, expire and delete them."""

import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from tinkex.server.api.auth import owner_of
from tinkex.server.api.bodies import MessageRoute, read_body
from tinkex.server.api.deps import context_of, describe_body, dialect_of, json_response
from tinkex.server.api.errors import Refusal, not_found
from tinkex.server.api.response_limits import (
    MAX_PAGE_SIZE,
    MAX_REPORT_ENTRIES,
    Access,
    Offset,
    PageSize,
    bounded,
    report,
)
from tinkex.server.api.sessions import metadata_as_text
from tinkex.server.scheduler.checkpoints import (
    EXTERNAL,
    SAMPLER,
    TRAINING,
    check_ttl,
    no_checkpoint,
)
from tinkex.server.store.checkpoint_catalog import NamedCheckpoint, RunSummary
from tinkex.server.store.step_history import StepPoint
from tinkex.wire.checkpoints import (
    KINDS,
    Checkpoint,
    CheckpointsListResponse,
    Cursor,
    SetCheckpointTtlRequest,
    tinker_path,
)
from tinkex.wire.codec import decode_json, parse_json
from tinkex.wire.errors import UserFailure
from tinkex.wire.sessions import (
    StepMetrics,
    TrainingRun,
    TrainingRunMetricsResponse,
    TrainingRunsResponse,
)

router = APIRouter(prefix="/api/v1", tags=["runs"], route_class=MessageRoute)

#: Points of one response.
MAX_POINTS = 10_000
Points = Annotated[int, Query(ge=2, le=MAX_POINTS)]

Search = Annotated[str | None, Query(max_length=200)]

CHECKPOINT = "/training_runs/{run}/checkpoints/{kind}/{name}"


@router.get("/training_runs")
@bounded(entries=MAX_PAGE_SIZE)
async def list_training_runs(
    request: Request,
    limit: PageSize = 20,
    offset: Offset = 0,
    access_scope: Access = "owned",
    project_id: str | None = None,
    search: Search = None,
) -> Response:
    """Newest first. `search` finds a text in the ids, base models and metadata of your runs."""
    catalog = context_of(request).store.checkpoint_catalog
    runs, total = await catalog.runs(
        owner=owner_of(request),
        project_id=project_id,
        published=access_scope == "accessible",
        limit=limit,
        offset=offset,
        search=search,
    )
    return await report(
        request,
        lambda: TrainingRunsResponse(
            training_runs=[_run(run) for run in runs],
            cursor=Cursor(offset=offset, limit=limit, total_count=total),
        ),
        advice="Request fewer with `limit`.",
    )


@router.get("/training_runs/{run}")
async def get_training_run(request: Request, run: str, access_scope: Access = "owned") -> Response:
    return json_response(_run(await _readable(request, run, access_scope)))


@router.get("/training_runs/{run}/metrics")
@bounded(entries=MAX_POINTS)
async def get_training_run_metrics(request: Request, run: str, points: Points = 1000) -> Response:
    """
    The metrics of its optimizer steps in order.

    If the run has more steps than `points`, a point is the mean over several steps, except for the
    last one.
    """
    await _readable(request, run, "owned")
    found = await context_of(request).store.step_history.points(run, limit=points)
    return await report(
        request,
        lambda: TrainingRunMetricsResponse(
            training_run_id=run, points=[step_metrics(point) for point in found]
        ),
        advice="Request fewer with `points`.",
    )


@router.get("/training_runs/{run}/checkpoints")
@bounded(entries=MAX_REPORT_ENTRIES)
async def list_run_checkpoints(
    request: Request, run: str, access_scope: Access = "owned"
) -> Response:
    """All checkpoints of a run, newest first."""
    await _readable(request, run, access_scope)
    found, total = await context_of(request).store.checkpoint_catalog.checkpoints(
        owner=owner_of(request),
        kinds=_kinds(request),
        model_id=run,
        published=access_scope == "accessible",
        limit=MAX_REPORT_ENTRIES,
    )
    advice = "List them with GET checkpoints, page by page."
    if total > MAX_REPORT_ENTRIES:
        raise UserFailure(
            f"{run} has {total} checkpoints; the maximum of one response is {MAX_REPORT_ENTRIES}. {advice}"
        )
    return await report(
        request,
        lambda: CheckpointsListResponse(checkpoints=[_checkpoint(saved) for saved in found]),
        advice=advice,
    )


@router.get("/checkpoints")
@bounded(entries=MAX_PAGE_SIZE)
async def list_checkpoints(
    request: Request, limit: PageSize = 100, offset: Offset = 0, access_scope: Access = "owned"
) -> Response:
    """All checkpoints of an owner, newest first."""
    found, total = await context_of(request).store.checkpoint_catalog.checkpoints(
        owner=owner_of(request),
        kinds=_kinds(request),
        published=access_scope == "accessible",
        limit=limit,
        offset=offset,
    )
    return await report(
        request,
        lambda: CheckpointsListResponse(
            checkpoints=[_checkpoint(saved) for saved in found],
            cursor=Cursor(offset=offset, limit=limit, total_count=total),
        ),
        advice="Request fewer with `limit`.",
    )


@router.delete(CHECKPOINT, status_code=204)
async def delete_checkpoint(request: Request, run: str, kind: str, name: str) -> Response:
    """The path no longer works for anyone; open samplers of the checkpoint continue."""
    key = await _key(request, run, kind, name)
    return _changed(await context_of(request).store.checkpoint_catalog.delete(**key), key)


@router.post(f"{CHECKPOINT}/publish", status_code=204)
async def publish(request: Request, run: str, kind: str, name: str) -> Response:
    """All owners of this server may read it. Publishing again has no effect."""
    key = await _key(request, run, kind, name)
    return _changed(await context_of(request).store.checkpoint_catalog.set_public(True, **key), key)


@router.delete(f"{CHECKPOINT}/publish", status_code=204)
async def unpublish(request: Request, run: str, kind: str, name: str) -> Response:
    key = await _key(request, run, kind, name)
    return _changed(
        await context_of(request).store.checkpoint_catalog.set_public(False, **key), key
    )


@router.put(
    f"{CHECKPOINT}/ttl", status_code=204, dependencies=[describe_body(SetCheckpointTtlRequest)]
)
async def set_ttl(request: Request, run: str, kind: str, name: str) -> Response:
    """Seconds from now; null never expires."""
    ttl_s = _ttl(await read_body(request))
    key = await _key(request, run, kind, name)
    check_ttl(ttl_s)
    expires_s = None if ttl_s is None else time.time() + ttl_s
    return _changed(
        await context_of(request).store.checkpoint_catalog.set_expiry(expires_s, **key), key
    )


async def _readable(request: Request, run: str, access_scope: Access) -> RunSummary:
    """A run of the caller or, with `accessible`, one with a published checkpoint."""
    found = await context_of(request).store.checkpoint_catalog.run(run, reader=owner_of(request))
    if found is None or (access_scope == "owned" and found.model.owner != owner_of(request)):
        raise _no_run(run)
    return found


def _no_run(run: str) -> Refusal:
    """Unlike a route that trains, none of these could go on with a new model."""
    return not_found("training run", run, "`tinkex run list` or GET training_runs lists yours.")


def _ttl(body: bytes) -> int | None:
    """The TTL; null is valid here, unlike a missing field."""
    try:
        parsed: object = parse_json(body)
    except ValueError:
        parsed = None
    if isinstance(parsed, dict) and parsed.get("ttl_seconds", "") is None:
        return None
    return decode_json(SetCheckpointTtlRequest, body).ttl_seconds


def time_of(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


async def _key(request: Request, run: str, kind: str, name: str) -> Mapping[str, Any]:
    """The key of a checkpoint, whose run must belong to the caller."""
    model = await context_of(request).find_model(request, run)
    if model is None:
        raise _no_run(run)
    return {"model_id": model.model_id, "kind": kind, "name": name}


def _changed(found: bool, key: Mapping[str, Any]) -> Response:
    if not found:
        raise Refusal(404, no_checkpoint(tinker_path(key["model_id"], key["kind"], key["name"])))
    return Response(status_code=204)


def _kinds(request: Request) -> set[str]:
    """The checkpoint kinds that this SDK version knows."""
    known = dialect_of(request, None).knows_external_checkpoints
    return set(KINDS) if known else set(KINDS) - {EXTERNAL}


def _run(run: RunSummary) -> TrainingRun:
    model = run.model
    training, sampler = run.newest.get(TRAINING), run.newest.get(SAMPLER)
    return TrainingRun(
        training_run_id=model.model_id,
        base_model=model.base_model,
        model_owner=model.owner,
        is_lora=True,
        corrupted=run.lost,
        lora_rank=model.lora_config["rank"],
        last_request_time=time_of(run.last_request_s),
        last_checkpoint=None if training is None else _checkpoint(training),
        last_sampler_checkpoint=None if sampler is None else _checkpoint(sampler),
        user_metadata=metadata_as_text(model.user_metadata),
        steps=run.steps,
        last_loss=run.last_loss,
        status=run.status,
    )


def step_metrics(point: StepPoint) -> StepMetrics:
    return StepMetrics(
        step=point.step,
        steps=point.steps,
        time=time_of(point.finished_s),
        metrics=dict(point.metrics),
        loss_min=point.loss_min,
        loss_max=point.loss_max,
    )


def _checkpoint(saved: NamedCheckpoint) -> Checkpoint:
    return Checkpoint(
        checkpoint_id=f"{saved.kind}/{saved.name}",
        checkpoint_type=KINDS[saved.kind],
        time=time_of(saved.saved_s),
        tinker_path=tinker_path(saved.model_id, saved.kind, saved.name),
        size_bytes=saved.version.size_bytes,
        public=saved.public,
        expires_at=None if saved.expires_s is None else time_of(saved.expires_s),
        user_metadata=metadata_as_text(saved.user_metadata),
    )
