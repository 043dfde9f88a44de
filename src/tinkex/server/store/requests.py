"""Requests: accepted once, finished once, kept until they are fetched."""

import asyncio
import base64
import enum
import secrets
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from tinkex.server.store import tally
from tinkex.server.store.database import Database
from tinkex.server.store.files import Files
from tinkex.server.store.tables import completions, requests
from tinkex.server.store.trouble import FILES, Damaged, StorageTrouble

# Larger payloads and results are files of their own: rows stay small enough to copy.
INLINE_BYTES = 64 * 1024
#: Requests that an owner says it has fetched and that are not noted yet: a tenth of a second of
#: the one who writes for all.
MOST_FETCHED_WAITING = 10_000

# A result that the disk does not take is offered again this often.
KEEP_RETRY_S = 0.5

# Each copy of a sampling client numbers its samples from its own number times this.
SAMPLES_OF_A_CLONE = 10**9


# Of a request id: milliseconds since 1970 in this many bytes, then random ones.
TIME_BYTES = 6
ID_BYTES = 18


class ResultGone(LookupError):
    """There was a result, and it has been kept for as long as was promised."""


def new_request_id(now_s: float) -> str:
    """Nobody can guess it, and it tells when it was given long after its row is gone."""
    time_part = int(now_s * 1000).to_bytes(TIME_BYTES)
    return base64.urlsafe_b64encode(time_part + secrets.token_bytes(ID_BYTES - TIME_BYTES)).decode()


def given_s(request_id: str) -> float | None:
    """When a server gave out this id; None for what is no such id."""
    try:
        data = base64.b64decode(request_id, altchars=b"-_", validate=True)
    except ValueError:
        return None
    return int.from_bytes(data[:TIME_BYTES]) / 1000 if len(data) == ID_BYTES else None


class Status(enum.StrEnum):
    """Where a request is; it moves once, from waiting to one of the others."""

    WAITING = "waiting"  # accepted, on disk, not finished
    DONE = "done"  # the result is on disk
    FAILED = "failed"  # the error is on disk


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


@dataclass(frozen=True, slots=True)
class _Adding:
    """A row to be."""

    new: NewRequest
    #: Of a large payload.
    place: str | None
    request_id: str = field(default_factory=lambda: new_request_id(time.time()))


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """The event that a sample has finished, in the log of the client that asked for it."""

    sampling_session_id: str
    clone_id: int
    position: int
    request_id: str
    #: None when it failed.
    result_bytes: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Accepted:
    """The request that holds this place: the one just given, or an earlier self of it."""

    request_id: str
    kind: str
    sequences: int
    is_new: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestRow:
    """A request without its payload and result."""

    request_id: str
    owner: str
    session_id: str | None
    model_id: str | None
    sampling_session_id: str | None
    seq_id: int | None
    kind: str
    status: Status
    base_model: str
    sequences: int
    version_id: str | None
    result_bytes: int | None
    error: str | None
    category: str | None
    cause: str | None


_ROW = (
    requests.c.request_id,
    requests.c.owner,
    requests.c.session_id,
    requests.c.model_id,
    requests.c.sampling_session_id,
    requests.c.seq_id,
    requests.c.kind,
    requests.c.status,
    requests.c.base_model,
    requests.c.sequences,
    requests.c.version_id,
    requests.c.result_bytes,
    requests.c.error,
    requests.c.category,
    requests.c.cause,
)


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
_FINISH_EACH = requests.update().where(
    requests.c.request_id == sa.bindparam("finished"), requests.c.status == Status.WAITING
)
_FINISH = _FINISH_EACH.returning(*_FINISHED)
# The same for many at once: who of them waits, and then the step of each.
_WAITING = sa.select(requests.c.request_id, *_FINISHED).where(
    requests.c.request_id.in_(sa.bindparam("finished", expanding=True)),
    requests.c.status == Status.WAITING,
)
_COMPLETE = completions.insert().returning(completions.c.position, sort_by_parameter_order=True)
_COMPLETION = (
    completions.c.sampling_session_id,
    completions.c.clone_id,
    completions.c.position,
    completions.c.request_id,
    completions.c.result_bytes,
)
_FETCHED = requests.update().where(
    requests.c.request_id == sa.bindparam("fetched"), requests.c.fetched_s.is_(None)
)
_ALL_FETCHED = _FETCHED.where(requests.c.owner == sa.bindparam("of"))
_SELF = sa.select(requests.c.request_id, requests.c.kind, requests.c.sequences).where(
    requests.c.seq_id == sa.bindparam("number")
)
_STEP_SELF = _SELF.where(requests.c.model_id == sa.bindparam("place"))
_SAMPLE_SELF = _SELF.where(requests.c.sampling_session_id == sa.bindparam("place"))


class Requests:
    """The rows of what was asked for."""

    def __init__(self, database: Database, files: Files) -> None:
        self._database = database
        self._files = files
        self._fetched_waiting: Counter[str] = Counter()

    async def accept(self, new: NewRequest) -> Accepted:
        """On disk when this answers; a repeat of an accepted request finds the first."""
        place = None
        if len(new.payload) > INLINE_BYTES:
            place = await self._put("payloads", new.payload)
        return await self._database.submit_one_of(_insert_many, _Adding(new, place))

    async def file_refused(self, new: NewRequest, error: str, *, cause: str) -> None:
        """A step that was refused takes its number, failed as the user's, unless it is taken."""

        def act(connection: sa.Connection) -> None:
            first = insert(connection, new)
            if first.is_new:
                values = _failure(first.request_id, error, category="user", cause=cause)
                _finish(connection, _Ending(values, None))

        await self._database.write(act, must=True)

    async def keep(self, result: bytes) -> str | None:
        """
        Make a large result durable; its place for `finish`, or None for a small one.

        It was promised: while the disk does not take it, it waits here.
        """
        if len(result) <= INLINE_BYTES:
            return None
        while True:
            try:
                return await self._put("results", result)
            except StorageTrouble:
                await asyncio.sleep(KEEP_RETRY_S)

    async def _put(self, room: str, data: bytes) -> str:
        condition = self._database.condition
        try:
            place = await self._database.in_thread(lambda: self._files.put(room, data))
        except OSError as error:
            if condition.note(error, FILES) is None:
                raise
            raise condition.refusal(error) from error
        condition.clear(FILES)
        return place

    async def _get(self, request_id: str, what: str, place: str) -> bytes:
        try:
            return await self._database.in_thread(lambda: self._files.get(place))
        except Damaged as error:
            raise Damaged(f"the {what} of request {request_id} {error}") from error

    def finish(
        self, request_id: str, result: bytes, place: str | None
    ) -> asyncio.Future[Completion | None]:
        """Done when awaited; in the order of the calls. A finished request stays as it was."""
        return self._database.submit_one_of(
            _finish_many, _Ending(_success(request_id, result, place), result), must=True
        )

    async def finish_load(self, request_id: str, result: bytes, version_id: str) -> None:
        """A load is done, and building the model again will load the same version."""
        await self._database.write(
            lambda connection: set_done(connection, request_id, result, version_id=version_id),
            must=True,
        )

    def fail(
        self, request_id: str, error: str, *, category: str, cause: str
    ) -> asyncio.Future[Completion | None]:
        """Done when awaited; in the order of the calls. A finished request stays as it was."""
        values = _failure(request_id, error, category=category, cause=cause)
        return self._database.submit_one_of(_finish_many, _Ending(values, None), must=True)

    async def completions(
        self,
        sampling_session_id: str,
        clone_id: int,
        *,
        after: int,
        up_to: int,
        most: int | None = None,
    ) -> list[Completion]:
        """The beginning of a part of one client's log, in order."""
        statement = (
            sa.select(*_COMPLETION)
            .where(
                completions.c.sampling_session_id == sampling_session_id,
                completions.c.clone_id == clone_id,
                completions.c.position > after,
                completions.c.position <= up_to,
            )
            .order_by(completions.c.position)
            .limit(most)
        )
        return await self._database.read(
            lambda connection: [Completion(**row._mapping) for row in connection.execute(statement)]
        )

    async def last_position(self) -> int:
        """Of the newest event in any log."""
        statement = sa.select(sa.func.coalesce(sa.func.max(completions.c.position), 0))
        return await self._database.read(
            lambda connection: connection.execute(statement).scalar_one()
        )

    async def get(self, request_id: str) -> RequestRow | None:
        statement = sa.select(*_ROW).where(requests.c.request_id == request_id)
        return await self._database.read(
            lambda connection: _row(connection.execute(statement).first())
        )

    async def payload(self, request_id: str) -> bytes | Path:
        """The normal form of what was asked for: the bytes, or a large one's file."""
        statement = sa.select(requests.c.payload, requests.c.payload_place).where(
            requests.c.request_id == request_id
        )
        row = await self._database.read(
            lambda connection: connection.execute(statement).first(), must=True
        )
        if row is None or (row.payload is None and row.payload_place is None):
            raise Damaged(f"the payload of request {request_id} is not kept any more")
        if row.payload_place is None:
            return bytes(row.payload)
        place: str = row.payload_place
        payload = await self._get(request_id, "payload", place)
        # Engines on this machine read the file themselves; it has been looked at now.
        return self._files.path(place) or payload

    async def result(self, request_id: str) -> bytes:
        """The normal form of what came out."""
        statement = sa.select(requests.c.result, requests.c.result_place).where(
            requests.c.request_id == request_id
        )
        row = await self._database.read(lambda connection: connection.execute(statement).first())
        if row is None:
            raise ResultGone(request_id)
        if row.result_place is None and row.result is None:
            raise ResultGone(request_id)
        if row.result_place is None:
            return bytes(row.result)
        return await self._get(request_id, "result", row.result_place)

    async def waiting(self) -> list[RequestRow]:
        """What was accepted and not finished, oldest first: the work of a new start."""
        statement = (
            sa.select(*_ROW)
            .where(requests.c.status == Status.WAITING)
            .order_by(requests.c.created_s)
        )
        return await self._database.read(lambda connection: _rows(connection, statement))

    async def log(self, model_id: str, *, after: int = -1) -> list[RequestRow]:
        """The finished steps of a model, in order, after one: what it is built again from."""
        statement = (
            sa.select(*_ROW)
            .where(
                requests.c.model_id == model_id,
                requests.c.seq_id > after,
                requests.c.status != Status.WAITING,
            )
            .order_by(requests.c.seq_id)
        )
        return await self._database.read(lambda connection: _rows(connection, statement), must=True)

    async def has_steps(self, model_id: str) -> bool:
        """Whether anything is known of how a model came to be."""
        statement = sa.select(requests.c.request_id).where(
            requests.c.model_id == model_id, requests.c.seq_id == 0
        )
        return await self._database.read(
            lambda connection: connection.execute(statement).first() is not None
        )

    def fetched(self, request_id: str) -> None:
        """Note, some time soon, that the whole result was handed out."""
        values = {"fetched": request_id, "fetched_s": time.time()}
        self._database.write_later(lambda connection: connection.execute(_FETCHED, values))

    def all_fetched(self, request_ids: Sequence[str], *, owner: str) -> None:
        """The same for many, as far as they are this owner's; a repeat changes nothing."""
        now_s = time.time()
        # Each was noted when its result was sent; what is left out here costs nothing but room.
        some = request_ids[: MOST_FETCHED_WAITING - self._fetched_waiting[owner]]
        values = [{"fetched": one, "of": owner, "fetched_s": now_s} for one in some]
        if not values:
            return
        self._fetched_waiting[owner] += len(values)
        waiting = [len(values)]

        def act(connection: sa.Connection) -> None:
            # Once, however often it is tried.
            while waiting:
                self._fetched_waiting[owner] -= waiting.pop()
            connection.execute(_ALL_FETCHED, values)

        self._database.write_later(act)


def insert(connection: sa.Connection, new: NewRequest) -> Accepted:
    """Add a request with a small payload inside a transaction, unless its place is taken."""
    return _insert_many(connection, [_Adding(new, None)])[0]


def _insert_many(connection: sa.Connection, group: Sequence[_Adding]) -> list[Accepted]:
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
        else _earlier_self(connection, adding.new)
        for adding in group
    ]


def _values(adding: _Adding) -> tuple[object, ...]:
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


def _earlier_self(connection: sa.Connection, new: NewRequest) -> Accepted:
    """Who has the place of a request that could not be added."""
    statement = _STEP_SELF if new.model_id is not None else _SAMPLE_SELF
    place = new.model_id or new.sampling_session_id
    row = connection.execute(statement, {"number": new.seq_id, "place": place}).one()
    return Accepted(request_id=row.request_id, kind=row.kind, sequences=row.sequences, is_new=False)


@dataclass(frozen=True, slots=True)
class _Ending:
    """What is written of a request that is over."""

    #: The columns, with the request's id as `finished`.
    values: dict[str, Any]
    #: None when it failed.
    result: bytes | None


def set_done(
    connection: sa.Connection,
    request_id: str,
    result: bytes,
    *,
    version_id: str,
) -> None:
    """Store a result, and which version it is about, inside a transaction."""
    values = _success(request_id, result, None)
    _finish(connection, _Ending({**values, "version_id": version_id}, result))


def _success(request_id: str, result: bytes, place: str | None) -> dict[str, Any]:
    return {
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


def _failure(request_id: str, error: str, *, category: str, cause: str) -> dict[str, Any]:
    return {
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


def _finish(connection: sa.Connection, ending: _Ending) -> Completion | None:
    """The one step from waiting to finished, with everything that is counted by it."""
    row = connection.execute(_FINISH, ending.values).first()
    return _finished(connection, [ending], [row])[0]


def _finish_many(
    connection: sa.Connection, endings: Sequence[_Ending]
) -> Sequence[Completion | None]:
    """The same for many, with few statements. The first of two endings of a request counts."""
    if len(endings) == 1:
        return [_finish(connection, endings[0])]
    ids = [ending.values["finished"] for ending in endings]
    waiting = {row.request_id: row for row in connection.execute(_WAITING, {"finished": ids})}
    rows = [waiting.pop(request_id, None) for request_id in ids]
    steps = [ending.values for ending, row in zip(endings, rows, strict=True) if row is not None]
    if steps:
        connection.execute(_FINISH_EACH, steps)
    return _finished(connection, endings, rows)


def _finished(
    connection: sa.Connection,
    endings: Sequence[_Ending],
    rows: Sequence[sa.Row[*tuple[Any, ...]] | None],
) -> list[Completion | None]:
    """Count what was just finished, and tell the clients; None was finished before."""
    events: list[dict[str, Any] | None] = []
    for ending, row in zip(endings, rows, strict=True):
        if row is not None and ending.result is not None:
            tally.count(
                connection,
                owner=row.owner,
                session_id=row.session_id,
                base_model=row.base_model,
                kind=row.kind,
                tokens=row.tokens,
                result=ending.result,
            )
        events.append(None if row is None else _event(ending, row))
    new = [event for event in events if event is not None]
    positions = iter(connection.scalars(_COMPLETE, new) if new else ())
    return [None if event is None else _completion(next(positions), event) for event in events]


def _completion(position: int, event: dict[str, Any]) -> Completion:
    told = {name: value for name, value in event.items() if name != "at_s"}
    return Completion(position=position, **told)


def _event(ending: _Ending, row: sa.Row[*tuple[Any, ...]]) -> dict[str, Any] | None:
    """What the log of a sampling client says of its sample; None for anything else."""
    if row.sampling_session_id is None or row.seq_id is None:
        return None
    return {
        "sampling_session_id": row.sampling_session_id,
        "clone_id": row.seq_id // SAMPLES_OF_A_CLONE,
        "request_id": ending.values["finished"],
        "result_bytes": None if ending.result is None else len(ending.result),
        "at_s": ending.values["finished_s"],
    }


def _rows(connection: sa.Connection, statement: sa.Select[*tuple[object, ...]]) -> list[RequestRow]:
    return [row for found in connection.execute(statement) if (row := _row(found)) is not None]


def _row(found: sa.Row[*tuple[object, ...]] | None) -> RequestRow | None:
    if found is None:
        return None
    values = dict(found._mapping)
    values["status"] = Status(values["status"])
    return RequestRow(**values)
