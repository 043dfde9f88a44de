"""
Request rows inside a transaction: ids, idempotent insert, finishing, and token counts.

`Requests` calls these, and so do writes that accept or finish a request together with other rows.
"""

import base64
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from tinkex.server.queued_request import PASSES, Cause, Kind, Outcome, QueuedRequest
from tinkex.server.store.ownership import check_terms
from tinkex.server.store.schema import Status, completions, models, requests, samplers, usage
from tinkex.server.store.sql_dialects import in_list, list_parameter
from tinkex.server.store.step_rows import RECORDED, record_step
from tinkex.wire.errors import WireError
from tinkex.wire.protobuf import count_sample_tokens

# -- ids -----------------------------------------------------------------------------------------

# A request id is a time in milliseconds since 1970 in this many bytes, then random bytes.
TIME_BYTES = 6
ID_BYTES = 18


def new_request_id(now_s: float) -> str:
    """An id that cannot be guessed, and that contains its time even when the row is deleted."""
    time_part = int(now_s * 1000).to_bytes(TIME_BYTES)
    return base64.urlsafe_b64encode(time_part + secrets.token_bytes(ID_BYTES - TIME_BYTES)).decode()


def issued_s(request_id: str) -> float | None:
    """When this id was issued; None if it is not a request id."""
    try:
        data = base64.b64decode(request_id, altchars=b"-_", validate=True)
    except ValueError:
        return None
    return int.from_bytes(data[:TIME_BYTES]) / 1000 if len(data) == ID_BYTES else None


# -- token counts --------------------------------------------------------------------------------
#
# Tokens are counted in the transaction that stores a result. The sums of a transaction are kept on
# its connection and written once before the commit: many small results cost one row, and a result
# that is not stored is not counted.

HOUR_S = 3600

TRAINING = "training"  # tokens of the examples of forward and forward_backward
PREFILL = "prefill"  # computed prompt tokens
CACHED = "cached"  # prompt tokens from the prefix cache
SAMPLED = "sampled"  # generated tokens

_TOKEN_COUNTS = "usage"

#: Where a connection keeps the name of its writer; see `usage.writer`.
WRITER = "writer"

_KEY = ("owner", "hour", "session_id", "key_id", "base_model", "what")
_Key = tuple[str, int, str, int, str, str]


def _add_usage(insert: Any) -> Any:
    return insert.on_conflict_do_update(
        index_elements=[*_KEY, "writer"], set_={"amount": usage.c.amount + insert.excluded.amount}
    )


_ADD_USAGE = {
    "sqlite": _add_usage(sqlite.insert(usage)),
    "postgresql": _add_usage(postgresql.insert(usage)),
}


def count_tokens(connection: sa.Connection, request: QueuedRequest, result: bytes) -> None:
    """Count the tokens of a request that this transaction finishes."""
    hour = int(time.time()) // HOUR_S
    counts: dict[_Key, int] = connection.info.setdefault(_TOKEN_COUNTS, {})
    session_id = request.session_id or ""
    for what, amount in _amounts(request, result):
        key = (request.owner, hour, session_id, request.key_id, request.base_model, what)
        counts[key] = counts.get(key, 0) + amount


def write_token_counts(connection: sa.Connection) -> None:
    """Write the sums of this transaction to the table, right before it commits."""
    counts: dict[_Key, int] = connection.info.pop(_TOKEN_COUNTS, {})
    if counts:
        writer = connection.info.get(WRITER, "")
        # Sorted: two transactions that add to the same rows must not wait for each other.
        rows = [
            {**dict(zip(_KEY, key, strict=True)), "writer": writer, "amount": amount}
            for key, amount in sorted(counts.items())
        ]
        connection.execute(_ADD_USAGE[connection.dialect.name], rows)


def discard_token_counts(connection: sa.Connection) -> None:
    """Drop the sums of a transaction that was rolled back."""
    connection.info.pop(_TOKEN_COUNTS, None)


def _amounts(request: QueuedRequest, result: bytes) -> Iterator[tuple[str, int]]:
    tokens = request.tokens
    if request.kind in PASSES and tokens:
        yield TRAINING, tokens
    if request.kind == Kind.SAMPLE:
        try:
            hits, sampled = count_sample_tokens(result)
        except WireError:
            # Results are stored as the engine sent them; bad counts must not lose one.
            hits, sampled = 0, 0
        cached = min(hits, tokens)
        for what, amount in ((PREFILL, tokens - cached), (CACHED, cached), (SAMPLED, sampled)):
            if amount:
                yield what, amount


# -- reading ---------------------------------------------------------------------------------------

#: The columns of a row as a `QueuedRequest`.
ROW = (
    requests.c.request_id,
    requests.c.owner,
    requests.c.session_id,
    requests.c.model_id,
    requests.c.sampling_session_id,
    requests.c.seq_id,
    requests.c.kind,
    requests.c.base_model,
    requests.c.sequences,
    requests.c.version_id,
    requests.c.tokens,
    requests.c.status,
    requests.c.error,
    requests.c.category,
    requests.c.cause,
    requests.c.home,
    requests.c.deaths.label("attempts"),
    requests.c.key_id,
)


def request_of(row: sa.Row[*tuple[Any, ...]]) -> QueuedRequest:
    """The request of a row; payload and result are read when they are needed."""
    values = {column.name: row._mapping[column.name] for column in ROW}
    status, error, category, cause = (
        values.pop(name) for name in ("status", "error", "category", "cause")
    )
    request = QueuedRequest(**{**values, "kind": Kind(values["kind"])})
    if status != Status.WAITING:
        cause = Cause(cause) if cause else Cause.WORK
        request.outcome = Outcome(error=error, category=category, cause=cause)
    return request


def find(connection: sa.Connection, request_id: str) -> QueuedRequest | None:
    row = connection.execute(sa.select(*ROW).where(requests.c.request_id == request_id)).first()
    return None if row is None else request_of(row)


def with_payload(row: sa.Row[*tuple[Any, ...]]) -> QueuedRequest:
    """The request of a row that has the payload too; that of a large one is read when it is needed."""
    request = request_of(row)
    request.payload = None if row.payload is None else bytes(row.payload)
    return request


def log_of(model_id: str, *, after: int, payloads: bool = False) -> sa.Select[*tuple[Any, ...]]:
    """The finished steps of a model after this one, in order."""
    statement = sa.select(*ROW, *((requests.c.payload,) if payloads else ()))
    return statement.where(
        requests.c.model_id == model_id,
        requests.c.seq_id > after,
        requests.c.status != Status.WAITING,
    ).order_by(requests.c.seq_id)


# -- idempotent insert: a repeated (model or sampler, seq_id) returns the first request -----------


# The columns of a request that is not finished.
_NEW = (
    "request_id",
    "owner",
    "session_id",
    "model_id",
    "sampling_session_id",
    "seq_id",
    "kind",
    "status",
    "base_model",
    "payload",
    "payload_place",
    "sequences",
    "version_id",
    "tokens",
    "created_s",
    "home",
    "key_id",
)

# Built once: building a statement takes longer than SQLite takes to run it.
# The unique constraints reject repeats; the ids of the new rows are returned.
_ADDED = (requests.c.request_id, requests.c.home)
_INSERT = sqlite.insert(requests).on_conflict_do_nothing().returning(*_ADDED)
# One array for each column: psycopg would take longer to bind thousands of single values than
# PostgreSQL takes to store them. Text has no length here: a cast would truncate long values.
_ARRAYS = sa.func.unnest(
    *(
        sa.bindparam(
            name,
            type_=sa.ARRAY(
                sa.Text() if isinstance(requests.c[name].type, sa.String) else requests.c[name].type
            ),
        )
        for name in _NEW
    )
).table_valued(*_NEW)
_ROWS = _ARRAYS.render_derived()
#: A step goes to the worker that has its model at this moment.
_HOME = sa.case(
    (
        _ROWS.c.home == "",
        sa.select(models.c.home).where(models.c.model_id == _ROWS.c.model_id).scalar_subquery(),
    ),
    else_=_ROWS.c.home,
)
_INSERT_ARRAYS = (
    postgresql.insert(requests)
    .from_select(
        list(_NEW), sa.select(*(_HOME if name == "home" else _ROWS.c[name] for name in _NEW))
    )
    .on_conflict_do_nothing()
    .returning(*_ADDED)
)
_BY_SEQ_ID = sa.select(*ROW).where(requests.c.seq_id == sa.bindparam("wanted_seq_id"))
_STEP_BY_SEQ_ID = _BY_SEQ_ID.where(requests.c.model_id == sa.bindparam("parent_id"))
_SAMPLE_BY_SEQ_ID = _BY_SEQ_ID.where(requests.c.sampling_session_id == sa.bindparam("parent_id"))


def insert(connection: sa.Connection, new: QueuedRequest) -> QueuedRequest:
    """Insert a request with a small payload, unless it is a repeat."""
    # The search comes first, so that a repeat succeeds while new rows are refused.
    if (first := find_earlier(connection, new)) is not None:
        return first
    new.request_id = new_request_id(time.time())
    return insert_many(connection, [(new, None)])[0]


def insert_many(
    connection: sa.Connection, group: Sequence[tuple[QueuedRequest, str | None]]
) -> list[QueuedRequest]:
    """Insert requests, each with the storage key of a large payload; repeats return the first."""
    rows = [_values(new, key) for new, key in group]
    if connection.dialect.name == "sqlite":
        found = connection.execute(_INSERT, [dict(zip(_NEW, row, strict=True)) for row in rows])
    else:
        columns = zip(*rows, strict=True)
        found = connection.execute(
            _INSERT_ARRAYS, {name: list(column) for name, column in zip(_NEW, columns, strict=True)}
        )
    added: dict[str, str | None] = dict(found.all())
    for new, _ in group:
        new.home = added.get(new.request_id, new.home)
    return [new if new.request_id in added else _existing(connection, new) for new, _ in group]


def _values(new: QueuedRequest, payload_key: str | None) -> tuple[object, ...]:
    """The values of a row, in the order of `_NEW`."""
    return (
        new.request_id,
        new.owner,
        new.session_id,
        new.model_id,
        new.sampling_session_id,
        new.seq_id,
        new.kind,
        Status.WAITING,
        new.base_model,
        (new.payload or b"") if payload_key is None else None,
        payload_key,
        new.sequences,
        new.version_id,
        new.tokens,
        time.time(),
        new.home,
        new.key_id,
    )


def find_earlier(connection: sa.Connection, new: QueuedRequest) -> QueuedRequest | None:
    """The request that already has this (model or sampler, seq_id), if there is one."""
    if new.seq_id is None:
        return None
    statement = _STEP_BY_SEQ_ID if new.model_id is not None else _SAMPLE_BY_SEQ_ID
    parent_id = new.model_id or new.sampling_session_id
    values = {"wanted_seq_id": new.seq_id, "parent_id": parent_id}
    row = connection.execute(statement, values).first()
    return None if row is None else request_of(row)


def _existing(connection: sa.Connection, new: QueuedRequest) -> QueuedRequest:
    """The earlier request whose constraint prevented this insert."""
    if (found := find_earlier(connection, new)) is None:
        raise LookupError(f"step {new.seq_id} was not inserted, and no earlier one exists")
    return found


# -- finishing: once per request, with its token counts, step metrics and the event for its client -

# A copy of a sampling client numbers its samples from its clone id times this.
SAMPLES_PER_CLONE = 10**9


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """The event that a sample has finished, in the completion log of its client."""

    sampling_session_id: str
    clone_id: int
    position: int
    request_id: str
    #: None if it failed.
    result_bytes: int | None


# Built once: building a statement takes longer than SQLite takes to run it.
_FINISH = requests.update().where(
    requests.c.request_id == sa.bindparam("finished"), requests.c.status == Status.WAITING
)
# For many at once: first find those that still wait, then update each. The status is filtered in
# Python: with `status = 'waiting'` in the query SQLite would scan all waiting rows by that index.
# In PostgreSQL the rows stay locked, so that no other writer finishes them; in one order, so that
# two writers do not wait for each other.
_CHOSEN = (
    sa.select(requests.c.request_id, requests.c.status)
    .where(in_list(requests.c.request_id, sa.bindparam("finished", type_=sa.Text)))
    .order_by(requests.c.request_id)
    .with_for_update(key_share=True)
)
_NEXT_POSITIONS = (
    samplers.update()
    .where(samplers.c.sampling_session_id == sa.bindparam("sampler"))
    .values(events=samplers.c.events + sa.bindparam("more"))
    .returning(samplers.c.events)
)
_COMPLETE = completions.insert()


def finish(
    connection: sa.Connection, request: QueuedRequest, outcome: Outcome
) -> Completion | None:
    """
    Move a request from waiting to finished. A finished one stays unchanged.

    Returns the event of a sample; None for other requests.
    """
    return finish_many(connection, [(request, outcome)])[0]


def finish_many(
    connection: sa.Connection, group: Sequence[tuple[QueuedRequest, Outcome]]
) -> Sequence[Completion | None]:
    """
    Like `finish`, for many, with few statements. The first of two for a request counts.

    NotOwner, and nothing is finished, if a step belongs to a model that another worker has.
    """
    terms = {one.model_id: one.term for one, _ in group if one.model_id and one.term is not None}
    if terms:
        check_terms(connection, terms)
    now_s = time.time()
    if len(group) == 1:
        written = connection.execute(_FINISH, _final_values(*group[0], now_s)).rowcount
        finished = group if written else []
    else:
        ids = [request.request_id for request, _ in group]
        chosen = connection.execute(_CHOSEN, {"finished": list_parameter(ids)})
        waiting = {row.request_id for row in chosen if row.status == Status.WAITING}
        finished = []
        for request, outcome in group:
            if request.request_id in waiting:
                waiting.remove(request.request_id)
                finished.append((request, outcome))
        if finished:
            connection.execute(_FINISH, [_final_values(*pair, now_s) for pair in finished])
    for request, outcome in finished:
        if outcome.error is None:
            count_tokens(connection, request, outcome.result)
        if outcome.error is not None or request.kind in RECORDED:
            record_step(connection, request, outcome)
    events = [_event(*pair, now_s) for pair in finished if _has_event(pair[0])]
    completed = {}
    if events:
        _number(connection, events)
        connection.execute(_COMPLETE, events)
        completed = {event["request_id"]: _completion(event) for event in events}
    # A second outcome of one request has no event.
    return [completed.pop(request.request_id, None) for request, _ in group]


def _final_values(request: QueuedRequest, outcome: Outcome, now_s: float) -> dict[str, Any]:
    failed = outcome.error is not None
    inline = not failed and outcome.result_key is None
    return {
        "finished": request.request_id,
        "status": Status.FAILED if failed else Status.DONE,
        "result": outcome.result if inline else None,
        "result_place": outcome.result_key,
        "result_bytes": None if failed else len(outcome.result),
        "error": outcome.error,
        "category": (outcome.category or "server") if failed else None,
        "cause": outcome.cause if failed else None,
        "version_id": outcome.version_id or request.version_id,
        "finished_s": now_s,
    }


def _has_event(request: QueuedRequest) -> bool:
    """Whether its client waits for events: it is a numbered sample."""
    return request.sampling_session_id is not None and request.seq_id is not None


def _event(request: QueuedRequest, outcome: Outcome, now_s: float) -> dict[str, Any]:
    return {
        "sampling_session_id": request.sampling_session_id,
        "clone_id": (request.seq_id or 0) // SAMPLES_PER_CLONE,
        "request_id": request.request_id,
        "result_bytes": None if outcome.error is not None else len(outcome.result),
        "at_s": now_s,
    }


def _number(connection: sa.Connection, events: Sequence[dict[str, Any]]) -> None:
    """
    Give each event its position in the log of its sampler.

    The row of the sampler stays locked until the commit. So an event is visible before any event
    with a higher position gets one, and a client that reads in order misses none.
    """
    of_sampler: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        of_sampler.setdefault(event["sampling_session_id"], []).append(event)
    for sampler, some in sorted(of_sampler.items()):
        values = {"sampler": sampler, "more": len(some)}
        newest = connection.execute(_NEXT_POSITIONS, values).scalar_one()
        for position, event in enumerate(some, newest - len(some) + 1):
            event["position"] = position


def _completion(event: dict[str, Any]) -> Completion:
    return Completion(**{name: value for name, value in event.items() if name != "at_s"})
