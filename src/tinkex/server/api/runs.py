"""Training runs, as lists and details show them."""

from datetime import UTC, datetime

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from tinkex.server.api.context import Context, answer, context_of
from tinkex.server.saving import SAMPLER, TRAINING, tinker_path
from tinkex.wire.checkpoints import KINDS, Checkpoint
from tinkex.wire.runs import TrainingRun

router = APIRouter(prefix="/api/v1", tags=["runs"])


@router.get("/training_runs/{model_id}")
async def get_training_run(request: Request, model_id: str) -> Response:
    context = context_of(request)
    model = await context.model(request, model_id)
    last_s = await context.store.runs.last_request_s(model_id) or model.created_s
    metadata = model.user_metadata
    return answer(
        TrainingRun(
            training_run_id=model.model_id,
            base_model=model.base_model,
            model_owner=model.owner,
            is_lora=True,
            lora_rank=model.lora_config["rank"],
            last_request_time=_time(last_s),
            last_checkpoint=await _newest(context, model_id, TRAINING),
            last_sampler_checkpoint=await _newest(context, model_id, SAMPLER),
            # Any JSON was taken in; what goes out is text.
            user_metadata=metadata and {key: str(value) for key, value in metadata.items()},
        )
    )


async def _newest(context: Context, model_id: str, kind: str) -> Checkpoint | None:
    found = await context.store.checkpoints.newest(model_id, kind)
    if found is None:
        return None
    version, about = found
    name = version.name or ""
    expires_s = about["expires_s"]
    return Checkpoint(
        checkpoint_id=f"{kind}/{name}",
        checkpoint_type=KINDS[kind],
        time=_time(about["saved_s"]),
        tinker_path=tinker_path(model_id, kind, name),
        size_bytes=version.size_bytes,
        public=about["public"],
        expires_at=None if expires_s is None else _time(expires_s),
        user_metadata=about["user_metadata"],
    )


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
