"""Who may read a checkpoint: its owner, everybody once it is published, a holder of its owner's key."""

from starlette.requests import Request

from tinkex.server.api.auth import reader_owners
from tinkex.server.api.context import Context
from tinkex.server.api.errors import Refusal
from tinkex.server.saving import no_checkpoint
from tinkex.server.store import Model, Version


async def readable(
    request: Request, context: Context, path: str, *, token: str | None = None
) -> tuple[Version, Model]:
    """A checkpoint and the run it was saved from; a 404 if there is none to read."""
    version = await context.store.checkpoints.find(
        path, readers=await reader_owners(request, token)
    )
    source = None if version is None else await context.store.runs.model(version.model_id)
    if version is None or source is None:
        raise Refusal(404, no_checkpoint(path))
    return version, source
