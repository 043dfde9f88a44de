"""
Request rows inside a transaction: ids, idempotent insert, finishing, and token counts.

`Requests` calls these, and so do writes that accept or finish a request together with other rows.
"""

import base64
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from tinkex.server.store.schema import Status, completions, requests, usage
from tinkex.server.store.sql_dialects import in_list, list_parameter
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

_PASSES = frozenset({"forward", "forward_backward"})
_SAMPLE = "sample"
_TOKEN_COUNTS = "usage"

_KEY = ("owner", "hour", "session_id", "base_model", "what")
_ADD = (
    usage.update()
    .where(*(usage.c[name] == sa.bindparam(f"of_{name}") for name in _KEY))
    .values(amount=usage.c.amount + sa.bindparam("more"))
)
_INSERT_USAGE = usage.insert()


def count_tokens(
    connection: sa.Connection,
    *,
    owner: str,
    session_id: str | None,
    base_model: str,
    kind: str,
    tokens: int,
    result: bytes,
) -> None:
    """Count the tokens of a request that this transaction finishes."""
    hour = int(time.time()) // HOUR_S
    counts: dict[tuple[str, int, str, str, str], int] = connection.info.setdefault(
        _TOKEN_COUNTS, {}
    )
    for what, amount in _amounts(kind, tokens, result):
        key = (owner, hour, session_id or "", base_model, what)
        counts[key] = counts.get(key, 0) + amount


def write_token_counts(connection: sa.Connection) -> None:
    """Write the sums of this transaction to the table, right before it commits."""
    counts: dict[tuple[str, int, str, str, str], int] = connection.info.pop(_TOKEN_COUNTS, {})
    for key, amount in counts.items():
        named = dict(zip(_KEY, key, strict=True))
        known = {f"of_{name}": value for name, value in named.items()}
        if connection.execute(_ADD, {**known, "more": amount}).rowcount == 0:
            connection.execute(_INSERT_USAGE, {**named, "amount": amount})


def discard_token_counts(connection: sa.Connection) -> None:
    """Drop the sums of a transaction that was rolled back."""
    connection.info.pop(_TOKEN_COUNTS, None)


def _amounts(kind: str, tokens: int, result: bytes) -> Iterator[tuple[str, int]]:
    if kind in _PASSES and tokens:
        yield TRAINING, tokens
    if kind == _SAMPLE:
        try:
            hits, sampled = count_sample_tokens(result)
        except WireError:
            # Results are stored as the engine sent them; bad counts must not lose one.
            hits, sampled = 0, 0
        cached = min(hits, tokens)
        for what, amount in ((PREFILL, tokens - cached), (CACHED, cached), (SAMPLED, sampled)):
            if amount:
                yield what, amount


# -- idempotent insert: a repeated (model or sampler, seq_id) returns the first request -----------


@dataclass(frozen=True, kw_only=True, slots=True)
class NewRequest:
    """A request that is about to be accepted."""

    owner: str
    kind: str
    base_model: str
    payload: bytes
    session_id: str | None = None
    model_id: str | None = None
    sampling_session_id: str | None = None
    seq_id: int | None = None
    sequences: int = 0
    version_id: str | None = None
    #: Tokens in the examples of a pass, or in the prompt of a sample.
    tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Accepted:
    """The request with this (model or sampler, seq_id): the new one, or an earlier one."""

    request_id: str
    kind: str
    sequences: int
    is_new: bool
    #: The error, if the request failed when it was accepted.
    refused: str | None = None


@dataclass(frozen=True, slots=True)
class RequestInsert:
    """A row to insert."""

    new: NewRequest
    #: The storage key of a large payload.
    payload_key: str | None
    request_id: str = field(default_factory=lambda: new_request_id(time.time()))


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
)

# Built once: building a statement takes longer than SQLite takes to run it.
# The unique constraints reject repeats; the ids of the new rows are returned.
_INSERT = sqlite.insert(requests).on_conflict_do_nothing().returning(requests.c.request_id)
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
_INSERT_ARRAYS = (
    postgresql.insert(requests)
    .from_select(list(_NEW), sa.select(_ARRAYS.render_derived()))
    .on_conflict_do_nothing()
    .returning(requests.c.request_id)
)
_BY_SEQ_ID = sa.select(requests.c.request_id, requests.c.kind, requests.c.sequences).where(
    requests.c.seq_id == sa.bindparam("wanted_seq_id")
)
_STEP_BY_SEQ_ID = _BY_SEQ_ID.where(requests.c.model_id == sa.bindparam("parent_id"))
_SAMPLE_BY_SEQ_ID = _BY_SEQ_ID.where(requests.c.sampling_session_id == sa.bindparam("parent_id"))


def insert(connection: sa.Connection, new: NewRequest) -> Accepted:
    """Insert a request with a small payload, unless it is a repeat."""
    # The search comes first, so that a repeat succeeds while new rows are refused.
    return find_earlier(connection, new) or insert_many(connection, [RequestInsert(new, None)])[0]


def insert_many(connection: sa.Connection, group: Sequence[RequestInsert]) -> list[Accepted]:
    """Insert requests, except repeats."""
    rows = [_values(row) for row in group]
    if connection.dialect.name == "sqlite":
        found = connection.scalars(_INSERT, [dict(zip(_NEW, row, strict=True)) for row in rows])
    else:
        columns = zip(*rows, strict=True)
        found = connection.scalars(
            _INSERT_ARRAYS, {name: list(column) for name, column in zip(_NEW, columns, strict=True)}
        )
    added = set(found)
    return [
        Accepted(
            request_id=row.request_id,
            kind=row.new.kind,
            sequences=row.new.sequences,
            is_new=True,
        )
        if row.request_id in added
        else _existing(connection, row.new)
        for row in group
    ]


def _values(row: RequestInsert) -> tuple[object, ...]:
    """The values of a row, in the order of `_NEW`."""
    new = row.new
    return (
        row.request_id,
        new.owner,
        new.session_id,
        new.model_id,
        new.sampling_session_id,
        new.seq_id,
        new.kind,
        Status.WAITING,
        new.base_model,
        new.payload if row.payload_key is None else None,
        row.payload_key,
        new.sequences,
        new.version_id,
        new.tokens,
        time.time(),
    )


def find_earlier(connection: sa.Connection, new: NewRequest) -> Accepted | None:
    """The request that already has this (model or sampler, seq_id), if there is one."""
    if new.seq_id is None:
        return None
    statement = _STEP_BY_SEQ_ID if new.model_id is not None else _SAMPLE_BY_SEQ_ID
    parent_id = new.model_id or new.sampling_session_id
    values = {"wanted_seq_id": new.seq_id, "parent_id": parent_id}
    row = connection.execute(statement, values).first()
    return None if row is None else Accepted(**row._mapping, is_new=False)


def _existing(connection: sa.Connection, new: NewRequest) -> Accepted:
    """The earlier request whose constraint prevented this insert."""
    if (found := find_earlier(connection, new)) is None:
        raise LookupError(f"step {new.seq_id} was not inserted, and no earlier one exists")
    return found


# -- finishing: once per request, with its token counts and the event for its client --------------

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


@dataclass(frozen=True, slots=True)
class FinalState:
    """What is written when a request finishes."""

    #: The columns; the request id is in `finished`.
    values: dict[str, Any]
    #: None if it failed.
    result: bytes | None


# The columns that token counts and completion events need.
_FINISHED = (
    requests.c.owner,
    requests.c.session_id,
    requests.c.base_model,
    requests.c.kind,
    requests.c.tokens,
    requests.c.sampling_session_id,
    requests.c.seq_id,
)
# Built once: building a statement takes longer than SQLite takes to run it.
_FINISH_EACH = requests.update().where(
    requests.c.request_id == sa.bindparam("finished"), requests.c.status == Status.WAITING
)
_FINISH = _FINISH_EACH.returning(*_FINISHED)
# For many at once: first find those that still wait, then update each. The status is filtered in
# Python: with `status = 'waiting'` in the query SQLite would scan all waiting rows by that index.
_CHOSEN = sa.select(requests.c.request_id, requests.c.status, *_FINISHED).where(
    in_list(requests.c.request_id, sa.bindparam("finished", type_=sa.Text))
)
_COMPLETE = completions.insert().returning(completions.c.position, sort_by_parameter_order=True)


def set_done(
    connection: sa.Connection,
    request_id: str,
    result: bytes,
    *,
    version_id: str,
) -> None:
    """Finish a request with its result and its checkpoint version."""
    final = success(request_id, result, None)
    finish(connection, replace(final, values={**final.values, "version_id": version_id}))


def success(request_id: str, result: bytes, result_key: str | None) -> FinalState:
    """The final state of a request with a result; a large one is on disk under `result_key`."""
    values = {
        "finished": request_id,
        "status": Status.DONE,
        "result": result if result_key is None else None,
        "result_place": result_key,
        "result_bytes": len(result),
        "error": None,
        "category": None,
        "cause": None,
        "finished_s": time.time(),
    }
    return FinalState(values, result)


def failure(request_id: str, error: str, *, category: str, cause: str) -> FinalState:
    """The final state of a request that failed; `category` says whose error it was."""
    values = {
        "finished": request_id,
        "status": Status.FAILED,
        "result": None,
        "result_place": None,
        "result_bytes": None,
        "error": error,
        "category": category,
        "cause": cause,
        "finished_s": time.time(),
    }
    return FinalState(values, None)


def finish(connection: sa.Connection, final: FinalState) -> Completion | None:
    """Move a request from waiting to finished; None if it was finished before."""
    row = connection.execute(_FINISH, final.values).first()
    return _finished(connection, [final], [row])[0]


def finish_many(
    connection: sa.Connection, finals: Sequence[FinalState]
) -> Sequence[Completion | None]:
    """Like `finish`, for many, with few statements. The first of two for a request counts."""
    if len(finals) == 1:
        return [finish(connection, finals[0])]
    ids = [final.values["finished"] for final in finals]
    chosen = connection.execute(_CHOSEN, {"finished": list_parameter(ids)})
    waiting = {row.request_id: row for row in chosen if row.status == Status.WAITING}
    rows = [waiting.pop(request_id, None) for request_id in ids]
    steps = [final.values for final, row in zip(finals, rows, strict=True) if row is not None]
    if steps:
        connection.execute(_FINISH_EACH, steps)
    return _finished(connection, finals, rows)


def _finished(
    connection: sa.Connection,
    finals: Sequence[FinalState],
    rows: Sequence[sa.Row[*tuple[Any, ...]] | None],
) -> list[Completion | None]:
    """Count tokens and add completion events; a row of None was finished before."""
    events: list[dict[str, Any] | None] = []
    for final, row in zip(finals, rows, strict=True):
        if row is not None and final.result is not None:
            count_tokens(
                connection,
                owner=row.owner,
                session_id=row.session_id,
                base_model=row.base_model,
                kind=row.kind,
                tokens=row.tokens,
                result=final.result,
            )
        events.append(None if row is None else _event(final, row))
    new = [event for event in events if event is not None]
    positions = iter(connection.scalars(_COMPLETE, new) if new else ())
    return [None if event is None else _completion(next(positions), event) for event in events]


def _completion(position: int, event: dict[str, Any]) -> Completion:
    fields = {name: value for name, value in event.items() if name != "at_s"}
    return Completion(position=position, **fields)


def _event(final: FinalState, row: sa.Row[*tuple[Any, ...]]) -> dict[str, Any] | None:
    """The completion event of a sample; None for other requests."""
    if row.sampling_session_id is None or row.seq_id is None:
        return None
    return {
        "sampling_session_id": row.sampling_session_id,
        "clone_id": row.seq_id // SAMPLES_PER_CLONE,
        "request_id": final.values["finished"],
        "result_bytes": None if final.result is None else len(final.result),
        "at_s": final.values["finished_s"],
    }
