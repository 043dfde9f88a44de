"""The ids of requests: secret, and each tells when it was given."""

import base64
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from tinkex.server.store.schema import Status, completions, requests, usage
from tinkex.server.store.sql_dialects import in_list, listed
from tinkex.wire.errors import WireError
from tinkex.wire.protobuf import count_sample_tokens

# Of a request id: milliseconds since 1970 in this many bytes, then random ones.
TIME_BYTES = 6
ID_BYTES = 18


def new_request_id(now_s: float) -> str:
    """Nobody can guess it, and it tells when it was given long after its row is gone."""
    time_part = int(now_s * 1000).to_bytes(TIME_BYTES)
    return base64.urlsafe_b64encode(time_part + secrets.token_bytes(ID_BYTES - TIME_BYTES)).decode()


def issued_s(request_id: str) -> float | None:
    """When a server gave out this id; None for what is no such id."""
    try:
        data = base64.b64decode(request_id, altchars=b"-_", validate=True)
    except ValueError:
        return None
    return int.from_bytes(data[:TIME_BYTES]) / 1000 if len(data) == ID_BYTES else None


# MERGED: Tokens, counted in the transaction that stores a result. Sums of one transaction gather on its connection and are written once, before it commits: many small results cost one row, and a result that is not stored is not counted.


HOUR_S = 3600

TRAINING = "training"  # tokens of the examples of forward and forward_backward
PREFILL = "prefill"  # prompt tokens that were computed
CACHED = "cached"  # prompt tokens that the prefix cache had
SAMPLED = "sampled"  # tokens drawn

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
    """Count a request that is being finished inside this transaction."""
    hour = int(time.time()) // HOUR_S
    counts: dict[tuple[str, int, str, str, str], int] = connection.info.setdefault(_TOKEN_COUNTS, {})
    for what, amount in _amounts(kind, tokens, result):
        key = (owner, hour, session_id or "", base_model, what)
        counts[key] = counts.get(key, 0) + amount


def write_token_counts(connection: sa.Connection) -> None:
    """Put the sums of this transaction into the table: the last thing before it commits."""
    counts: dict[tuple[str, int, str, str, str], int] = connection.info.pop(_TOKEN_COUNTS, {})
    for key, amount in counts.items():
        named = dict(zip(_KEY, key, strict=True))
        known = {f"of_{name}": value for name, value in named.items()}
        if connection.execute(_ADD, {**known, "more": amount}).rowcount == 0:
            connection.execute(_INSERT_USAGE, {**named, "amount": amount})


def discard_token_counts(connection: sa.Connection) -> None:
    """The transaction was undone, and what it counted with it."""
    connection.info.pop(_TOKEN_COUNTS, None)


def _amounts(kind: str, tokens: int, result: bytes) -> Iterator[tuple[str, int]]:
    if kind in _PASSES and tokens:
        yield TRAINING, tokens
    if kind == _SAMPLE:
        try:
            hits, sampled = count_sample_tokens(result)
        except WireError:
            # Whatever an engine answered is stored as it is; it must not cost the user the result.
            hits, sampled = 0, 0
        cached = min(hits, tokens)
        for what, amount in ((PREFILL, tokens - cached), (CACHED, cached), (SAMPLED, sampled)):
            if amount:
                yield what, amount


# MERGED: RequestInsert requests inside a transaction: a place that is taken stays its first holder's.


@dataclass(frozen=True, kw_only=True, slots=True)
class NewRequest:
    """What is about to be accepted."""

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
    #: Of the examples of a pass, or of the prompt of a sample.
    tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Accepted:
    """The request that holds this place: the one just given, or an earlier self of it."""

    request_id: str
    kind: str
    sequences: int
    is_new: bool
    #: Why it failed with its acceptance, if it did.
    refused: str | None = None


@dataclass(frozen=True, slots=True)
class RequestInsert:
    """A row to be."""

    new: NewRequest
    #: Of a large payload.
    place: str | None
    request_id: str = field(default_factory=lambda: new_request_id(time.time()))


# The columns of a request that nothing has become of yet.
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

# Built once: putting a statement together costs more than SQLite takes to run it.
# The constraints decide whether a place is taken; what is answered are the rows that are new.
_INSERT = sqlite.insert(requests).on_conflict_do_nothing().returning(requests.c.request_id)
# One array for each column: thousands of single values would take psycopg longer to name than
# PostgreSQL to store. Texts come without a length: a cast would cut what the column refuses.
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
_SELF = sa.select(requests.c.request_id, requests.c.kind, requests.c.sequences).where(
    requests.c.seq_id == sa.bindparam("number")
)
_STEP_SELF = _SELF.where(requests.c.model_id == sa.bindparam("place"))
_SAMPLE_SELF = _SELF.where(requests.c.sampling_session_id == sa.bindparam("place"))


def insert(connection: sa.Connection, new: NewRequest) -> Accepted:
    """Add a request with a small payload inside a transaction, unless its place is taken."""
    # Looked for first: a repeat is answered also while nothing can be added.
    return _earlier_self(connection, new) or insert_many(connection, [RequestInsert(new, None)])[0]


def insert_many(connection: sa.Connection, group: Sequence[RequestInsert]) -> list[Accepted]:
    """Add requests, each unless its place is taken."""
    rows = [_values(adding) for adding in group]
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
            request_id=adding.request_id,
            kind=adding.new.kind,
            sequences=adding.new.sequences,
            is_new=True,
        )
        if adding.request_id in added
        else _holder(connection, adding.new)
        for adding in group
    ]


def _values(adding: RequestInsert) -> tuple[object, ...]:
    """In the order of `_NEW`."""
    new = adding.new
    return (
        adding.request_id,
        new.owner,
        new.session_id,
        new.model_id,
        new.sampling_session_id,
        new.seq_id,
        new.kind,
        Status.WAITING,
        new.base_model,
        new.payload if adding.place is None else None,
        adding.place,
        new.sequences,
        new.version_id,
        new.tokens,
        time.time(),
    )


def _earlier_self(connection: sa.Connection, new: NewRequest) -> Accepted | None:
    """The request that has this place already, if there is one."""
    if new.seq_id is None:
        return None
    statement = _STEP_SELF if new.model_id is not None else _SAMPLE_SELF
    place = new.model_id or new.sampling_session_id
    row = connection.execute(statement, {"number": new.seq_id, "place": place}).first()
    return None if row is None else Accepted(**row._mapping, is_new=False)


def _holder(connection: sa.Connection, new: NewRequest) -> Accepted:
    """Who has the place of a request that could not be added."""
    if (found := _earlier_self(connection, new)) is None:
        raise LookupError(f"step {new.seq_id} was not added, and no other one has its place")
    return found


# MERGED: Finishing requests inside a transaction: once each, with all that is counted and told by it.


# Each copy of a sampling client numbers its samples from its own number times this.
SAMPLES_PER_CLONE = 10**9


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """The event that a sample has finished, in the log of the client that asked for it."""

    sampling_session_id: str
    clone_id: int
    position: int
    request_id: str
    #: None when it failed.
    result_bytes: int | None


@dataclass(frozen=True, slots=True)
class FinalState:
    """What is written of a request that is over."""

    #: The columns, with the request's id as `finished`.
    values: dict[str, Any]
    #: None when it failed.
    result: bytes | None


# What is counted, and told to clients, of a request that is over.
_FINISHED = (
    requests.c.owner,
    requests.c.session_id,
    requests.c.base_model,
    requests.c.kind,
    requests.c.tokens,
    requests.c.sampling_session_id,
    requests.c.seq_id,
)
# Built once: putting a statement together costs more than SQLite takes to run it.
_FINISH_EACH = requests.update().where(
    requests.c.request_id == sa.bindparam("finished"), requests.c.status == Status.WAITING
)
_FINISH = _FINISH_EACH.returning(*_FINISHED)
# The same for many at once: who of them waits, and then the step of each.
# Whoever waits is told apart here: SQLite would look for them among all who wait.
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
    """Store a result, and which version it is about, inside a transaction."""
    final = success(request_id, result, None)
    finish(connection, replace(final, values={**final.values, "version_id": version_id}))


def success(request_id: str, result: bytes, place: str | None) -> FinalState:
    """With the place of a large result, which is on disk already."""
    values = {
        "finished": request_id,
        "status": Status.DONE,
        "result": result if place is None else None,
        "result_place": place,
        "result_bytes": len(result),
        "error": None,
        "category": None,
        "cause": None,
        "finished_s": time.time(),
    }
    return FinalState(values, result)


def failure(request_id: str, error: str, *, category: str, cause: str) -> FinalState:
    """Whose fault it was, and why it failed."""
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
    """The one step from waiting to finished, with everything that is counted by it."""
    row = connection.execute(_FINISH, final.values).first()
    return _finished(connection, [final], [row])[0]


def finish_many(
    connection: sa.Connection, finals: Sequence[FinalState]
) -> Sequence[Completion | None]:
    """The same for many, with few statements. The first of two finals of a request counts."""
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
    """Count what was just finished, and tell the clients; None was finished before."""
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
    told = {name: value for name, value in event.items() if name != "at_s"}
    return Completion(position=position, **told)


def _event(final: FinalState, row: sa.Row[*tuple[Any, ...]]) -> dict[str, Any] | None:
    """What the log of a sampling client says of its sample; None for anything else."""
    if row.sampling_session_id is None or row.seq_id is None:
        return None
    return {
        "sampling_session_id": row.sampling_session_id,
        "clone_id": row.seq_id // SAMPLES_PER_CLONE,
        "request_id": final.values["finished"],
        "result_bytes": None if final.result is None else len(final.result),
        "at_s": final.values["finished_s"],
    }
