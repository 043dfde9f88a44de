"""Adding requests inside a transaction: a place that is taken stays its first holder's."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from tinkex.server.store.request_ids import new_request_id
from tinkex.server.store.status import Status
from tinkex.server.store.tables import requests


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
class Adding:
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
    return _earlier_self(connection, new) or insert_many(connection, [Adding(new, None)])[0]


def insert_many(connection: sa.Connection, group: Sequence[Adding]) -> list[Accepted]:
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


def _values(adding: Adding) -> tuple[object, ...]:
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
