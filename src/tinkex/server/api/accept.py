"""Accept before acknowledging: the row is on disk, then the client hears the request's id."""

from starlette.responses import Response

from tinkex.server.api.context import Context, answer
from tinkex.server.plan import Kind
from tinkex.server.store import Accepted, NewRequest, RequestRow, Status
from tinkex.wire.errors import WireError
from tinkex.wire.futures import UntypedAPIFuture


async def accepted(context: Context, new: NewRequest) -> Response:
    """Store the request, or find its earlier self; hand it on if it is new; answer its id."""
    first = await context.store.requests.accept(new)
    if first.kind != new.kind:
        raise WireError.at(
            ("seq_id",),
            f"step {new.seq_id} of this model was already used for {first.kind}, so it cannot be "
            f"{new.kind}. Two clients may be numbering the steps of one model.",
            "seq_id_reused",
        )
    if first.is_new:
        await _hand_on(context, new, first)
    ids = [f"{first.request_id}-{index}" for index in range(first.sequences)]
    return answer(
        UntypedAPIFuture(
            request_id=first.request_id,
            model_id=new.model_id,
            sample_sequence_ids=ids if new.kind == Kind.SAMPLE else None,
        )
    )


def row_of(new: NewRequest, first: Accepted) -> RequestRow:
    """The row that was just written."""
    return RequestRow(
        request_id=first.request_id,
        owner=new.owner,
        session_id=new.session_id,
        model_id=new.model_id,
        sampling_session_id=new.sampling_session_id,
        seq_id=new.seq_id,
        kind=new.kind,
        status=Status.WAITING,
        base_model=new.base_model,
        sequences=new.sequences,
        version_id=new.version_id,
        result_bytes=None,
        error=None,
        category=None,
        cause=None,
    )


async def _hand_on(context: Context, new: NewRequest, first: Accepted) -> None:
    row = row_of(new, first)
    dispatcher = context.dispatcher
    dispatcher.expect(
        row.request_id, owner=row.owner, base_model=row.base_model, payload=new.payload
    )
    match new.kind:
        case Kind.SAMPLE:
            dispatcher.sample(row)
        case Kind.UNLOAD_MODEL:
            dispatcher.unload(row)
        case _:
            await dispatcher.step(row)
