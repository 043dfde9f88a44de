"""Requests: accepted once, finished once, kept until they are fetched."""

import asyncio
import enum
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa

from tinkex.server.store.database import Database
from tinkex.server.store.files import Files
from tinkex.server.store.tables import requests

# Larger payloads and results are files of their own: rows stay small enough to copy.
INLINE_BYTES = 64 * 1024


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


# Built once: putting a statement together costs more than SQLite takes to run it.
_INSERT = requests.insert()
_FINISH = requests.update().where(
    requests.c.request_id == sa.bindparam("finished"), requests.c.status == Status.WAITING
)
_FETCHED = requests.update().where(
    requests.c.request_id == sa.bindparam("fetched"), requests.c.fetched_s.is_(None)
)
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

    async def accept(self, new: NewRequest) -> Accepted:
        """On disk when this answers; a repeat of an accepted request finds the first."""
        place = None
        if len(new.payload) > INLINE_BYTES:
            place = await self._database.in_thread(lambda: self._files.put("payloads", new.payload))
        return await self._database.write(lambda connection: insert(connection, new, place))

    async def keep(self, result: bytes) -> str | None:
        """Make a large result durable; its place for `finish`, or None for a small one."""
        if len(result) <= INLINE_BYTES:
            return None
        return await self._database.in_thread(lambda: self._files.put("results", result))

    def finish(self, request_id: str, result: bytes, place: str | None) -> asyncio.Future[None]:
        """Done when awaited; in the order of the calls. A finished request stays as it was."""
        return self._database.submit(
            lambda connection: set_done(connection, request_id, result, place=place)
        )

    async def finish_load(self, request_id: str, result: bytes, version_id: str) -> None:
        """A load is done, and building the model again will load the same version."""
        await self._database.write(
            lambda connection: set_done(connection, request_id, result, version_id=version_id)
        )

    def fail(
        self, request_id: str, error: str, *, category: str, cause: str
    ) -> asyncio.Future[None]:
        """Done when awaited; in the order of the calls. A finished request stays as it was."""
        values = {
            "finished": request_id,
            "status": Status.FAILED,
            "error": error,
            "category": category,
            "cause": cause,
            "finished_s": time.time(),
        }
        return self._database.submit(lambda connection: _run(connection, _FINISH, values))

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
        row = await self._database.read(lambda connection: connection.execute(statement).one())
        if row.payload_place is None:
            return bytes(row.payload)
        place: str = row.payload_place
        file = self._files.path(place)
        if file is not None:
            return file
        return await self._database.in_thread(lambda: self._files.get(place))

    async def result(self, request_id: str) -> bytes:
        """The normal form of what came out."""
        statement = sa.select(requests.c.result, requests.c.result_place).where(
            requests.c.request_id == request_id
        )
        row = await self._database.read(lambda connection: connection.execute(statement).one())
        if row.result_place is None:
            return bytes(row.result)
        place: str = row.result_place
        return await self._database.in_thread(lambda: self._files.get(place))

    async def waiting(self) -> list[RequestRow]:
        """What was accepted and not finished, oldest first: the work of a new start."""
        statement = (
            sa.select(*_ROW)
            .where(requests.c.status == Status.WAITING)
            .order_by(requests.c.created_s)
        )
        return await self._database.read(lambda connection: _rows(connection, statement))

    async def log(self, model_id: str) -> list[RequestRow]:
        """The finished steps of a model in order: what it is built again from."""
        statement = (
            sa.select(*_ROW)
            .where(
                requests.c.model_id == model_id,
                requests.c.seq_id.is_not(None),
                requests.c.status != Status.WAITING,
            )
            .order_by(requests.c.seq_id)
        )
        return await self._database.read(lambda connection: _rows(connection, statement))

    def fetched(self, request_id: str) -> None:
        """Note, some time soon, that the whole result was handed out."""
        values = {"fetched": request_id, "fetched_s": time.time()}
        self._database.write_later(lambda connection: _run(connection, _FETCHED, values))


def insert(connection: sa.Connection, new: NewRequest, place: str | None) -> Accepted:
    """Add a request inside a transaction, unless its place is taken."""
    if first := _earlier_self(connection, new):
        return first
    request_id = secrets.token_urlsafe(18)
    connection.execute(
        _INSERT,
        {
            "request_id": request_id,
            "owner": new.owner,
            "session_id": new.session_id,
            "model_id": new.model_id,
            "sampling_session_id": new.sampling_session_id,
            "seq_id": new.seq_id,
            "kind": new.kind,
            "status": Status.WAITING,
            "base_model": new.base_model,
            "payload": new.payload if place is None else None,
            "payload_place": place,
            "sequences": new.sequences,
            "version_id": new.version_id,
            "created_s": time.time(),
        },
    )
    return Accepted(request_id=request_id, kind=new.kind, sequences=new.sequences, is_new=True)


def set_done(
    connection: sa.Connection,
    request_id: str,
    result: bytes,
    *,
    place: str | None = None,
    version_id: str | None = None,
) -> None:
    """Store a result inside a transaction."""
    values: dict[str, object] = {
        "finished": request_id,
        "status": Status.DONE,
        "result": result if place is None else None,
        "result_place": place,
        "result_bytes": len(result),
        "finished_s": time.time(),
    }
    if version_id is not None:
        values["version_id"] = version_id
    _run(connection, _FINISH, values)


def _run(connection: sa.Connection, statement: sa.Update, values: dict[str, object]) -> None:
    connection.execute(statement, values)


def _earlier_self(connection: sa.Connection, new: NewRequest) -> Accepted | None:
    if new.seq_id is None:
        return None
    statement = _STEP_SELF if new.model_id is not None else _SAMPLE_SELF
    place = new.model_id or new.sampling_session_id
    row = connection.execute(statement, {"number": new.seq_id, "place": place}).first()
    if row is None:
        return None
    return Accepted(request_id=row.request_id, kind=row.kind, sequences=row.sequences, is_new=False)


def _rows(connection: sa.Connection, statement: sa.Select[*tuple[object, ...]]) -> list[RequestRow]:
    return [row for found in connection.execute(statement) if (row := _row(found)) is not None]


def _row(found: sa.Row[*tuple[object, ...]] | None) -> RequestRow | None:
    if found is None:
        return None
    values = dict(found._mapping)
    values["status"] = Status(values["status"])
    return RequestRow(**values)
