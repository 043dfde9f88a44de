"""Requests: accepted once, finished once, kept until they are fetched."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from tinkex.server.store.blobs import Files
from tinkex.server.store.database import Database
from tinkex.server.store.request_writes import (
    Accepted,
    RequestInsert,
    Completion,
    FinalState,
    NewRequest,
    failure,
    finish,
    finish_many,
    insert,
    insert_many,
    set_done,
)
from tinkex.server.store.schema import Status, completions, custom_losses, requests
from tinkex.server.store.sql_dialects import in_list
from tinkex.server.store.storage_health import FILES, Damaged

# Larger payloads and results are files of their own: rows stay small enough to copy.
INLINE_BYTES = 64 * 1024
#: Requests that an owner says it has fetched and that are not noted yet: a tenth of a second of
#: the one who writes for all.
MAX_FETCHED_PENDING = 10_000


class ResultGone(LookupError):
    """There was a result, and it has been kept for as long as was promised."""


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
    #: Of the examples of a pass, or of the prompt of a sample.
    tokens: int = 0


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
    requests.c.tokens,
)

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
_COUNT_WAITING = sa.select(sa.func.count()).where(requests.c.status == Status.WAITING)
_ALL_FETCHED = _FETCHED.where(requests.c.owner == sa.bindparam("of"))


class Requests:
    """The rows of what was asked for."""

    def __init__(self, database: Database, files: Files) -> None:
        self._database = database
        self._files = files
        self._fetched_waiting: Counter[str] = Counter()
        self._fetched_lock = threading.Lock()

    async def accept(self, new: NewRequest) -> Accepted:
        """On disk when this answers; a repeat of an accepted request finds the first."""
        place = None
        if len(new.payload) > INLINE_BYTES:
            self._database.health.refuse_new_data()
            place = await self._put("payloads", new.payload)
        return await self._database.submit_batched(insert_many, RequestInsert(new, place))

    async def store_refused(self, new: NewRequest, error: str, *, cause: str) -> None:
        """A step that was refused takes its number, failed as the user's, unless it is taken."""

        def act(connection: sa.Connection) -> None:
            first = insert(connection, new)
            if first.is_new:
                final = failure(first.request_id, error, category="user", cause=cause)
                finish(connection, final)

        await self._database.write(act, required=True)

    async def store_result(self, result: bytes) -> str | None:
        """
        Make a large result durable; its place for `success`, or None for a small one.

        It was promised: while the disk does not take it, it waits here.
        """
        if len(result) <= INLINE_BYTES:
            return None
        return await self._put("results", result, required=True)

    async def _put(self, room: str, data: bytes, *, required: bool = False) -> str:
        place = await self._database.with_file(lambda: self._files.put(room, data), required=required)
        self._database.health.clear(FILES)
        return place

    async def _get(self, request_id: str, what: str, place: str, *, required: bool = False) -> bytes:
        try:
            return await self._database.with_file(lambda: self._files.get(place), required=required)
        except Damaged as error:
            raise Damaged(f"the {what} of request {request_id} {error}") from error

    def finish_one(self, final: FinalState) -> asyncio.Future[Completion | None]:
        """
        Write what `success` or `failure` made. Done when awaited; in the order of the calls.

        A finished request stays as it was.
        """
        return self._database.submit_batched(finish_many, final, required=True)

    async def finish_all(self, finals: Sequence[FinalState]) -> None:
        """The same for several steps of a model: all of them, or none."""
        if len(finals) == 1:
            # Shares its statements with those of other models.
            await self.finish_one(finals[0])
            return
        await self._database.write(lambda connection: finish_many(connection, finals), required=True)

    async def finish_load(self, request_id: str, result: bytes, version_id: str) -> None:
        """A load is done, and building the model again will load the same version."""
        await self._database.write(
            lambda connection: set_done(connection, request_id, result, version_id=version_id),
            required=True,
        )

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
        row = await self._database.read(lambda connection: connection.execute(statement).first())
        if row is None or (row.payload is None and row.payload_place is None):
            raise Damaged(f"the payload of request {request_id} is not kept any more")
        if row.payload_place is None:
            return bytes(row.payload)
        place: str = row.payload_place
        path = self._files.path(place)
        # Engines on this machine read the file themselves: it is read here once at most.
        if path is not None and await self._database.with_file(lambda: self._files.known(place)):
            return path
        payload = await self._get(request_id, "payload", place, required=True)
        return path or payload

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

    async def count_waiting(self) -> int:
        """How many were accepted and are not finished."""
        return await self._database.read(
            lambda connection: connection.execute(_COUNT_WAITING).scalar_one()
        )

    async def waiting_owners(self) -> list[str]:
        """Whose requests wait; those with the fewest first."""
        statement = (
            sa.select(requests.c.owner)
            .where(requests.c.status == Status.WAITING)
            .group_by(requests.c.owner)
            .order_by(sa.func.count(), requests.c.owner)
        )
        return await self._database.read(
            lambda connection: list(connection.execute(statement).scalars())
        )

    async def waiting_of(
        self, owner: str, *, after: tuple[float, str] | None, most: int
    ) -> tuple[list[RequestRow], tuple[float, str] | None]:
        """The next rows of one owner, oldest first, and where to go on; None after the last."""
        place = sa.tuple_(requests.c.created_s, requests.c.request_id)
        statement = (
            sa.select(requests.c.created_s, *_ROW)
            .where(requests.c.status == Status.WAITING, requests.c.owner == owner)
            .order_by(requests.c.created_s, requests.c.request_id)
            .limit(most)
        )
        if after is not None:
            # The first condition is the one that the index answers.
            statement = statement.where(requests.c.created_s >= after[0], place > after)

        def act(
            connection: sa.Connection,
        ) -> tuple[list[RequestRow], tuple[float, str] | None]:
            found = connection.execute(statement).all()
            rows = [_request_row(dict(one._mapping)) for one in found]
            last = (found[-1].created_s, found[-1].request_id) if len(found) == most else None
            return rows, last

        return await self._database.read(act)

    async def waiting_steps(self, model_id: str) -> list[RequestRow]:
        """The unfinished steps of one model, in order."""
        statement = (
            sa.select(*_ROW)
            .where(
                requests.c.model_id == model_id,
                requests.c.seq_id.is_not(None),
                requests.c.status == Status.WAITING,
            )
            .order_by(requests.c.seq_id)
        )
        return await self._database.read(lambda connection: _rows(connection, statement))

    async def still_waiting(self, request_ids: Collection[str]) -> dict[str, str]:
        """Those of these requests that wait, each with its base model."""
        statement = sa.select(requests.c.request_id, requests.c.base_model).where(
            in_list(requests.c.request_id, request_ids), requests.c.status == Status.WAITING
        )
        return await self._database.read(
            lambda connection: {
                row.request_id: row.base_model for row in connection.execute(statement)
            }
        )

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
        return await self._database.read(lambda connection: _rows(connection, statement))

    async def has_steps(self, model_id: str) -> bool:
        """Whether anything is known of how a model came to be."""
        statement = sa.select(requests.c.request_id).where(
            requests.c.model_id == model_id, requests.c.seq_id == 0
        )
        return await self._database.read(
            lambda connection: connection.execute(statement).first() is not None
        )

    def mark_fetched(self, request_id: str) -> None:
        """Note, some time soon, that the whole result was handed out."""
        values = {"fetched": request_id, "fetched_s": time.time()}
        self._database.write_deferred(lambda connection: connection.execute(_FETCHED, values))

    def mark_all_fetched(self, request_ids: Sequence[str], *, owner: str) -> None:
        """The same for many, as far as they are this owner's; a repeat changes nothing."""
        now_s = time.time()
        # Each was noted when its result was sent; what is left out here costs nothing but room.
        with self._fetched_lock:
            some = request_ids[: MAX_FETCHED_PENDING - self._fetched_waiting[owner]]
            if not some:
                return
            self._fetched_waiting[owner] += len(some)
        values = [{"fetched": one, "of": owner, "fetched_s": now_s} for one in some]
        waiting = [len(values)]

        def waits_no_more() -> None:
            # Once, however often it is tried. The writer calls it too, in its thread.
            with self._fetched_lock:
                while waiting:
                    self._fetched_waiting[owner] -= waiting.pop()
                if not self._fetched_waiting[owner]:
                    del self._fetched_waiting[owner]

        def act(connection: sa.Connection) -> None:
            waits_no_more()
            connection.execute(_ALL_FETCHED, values)

        self._database.write_deferred(act, on_dropped=waits_no_more)


def _rows(connection: sa.Connection, statement: sa.Select[*tuple[object, ...]]) -> list[RequestRow]:
    return [row for found in connection.execute(statement) if (row := _row(found)) is not None]


def _row(found: sa.Row[*tuple[object, ...]] | None) -> RequestRow | None:
    if found is None:
        return None
    return _request_row(dict(found._mapping))


def _request_row(values: dict[str, Any]) -> RequestRow:
    values.pop("created_s", None)
    return RequestRow(**{**values, "status": Status(values["status"])})


# MERGED: Finding the first self of a request without writing anything.


class Repeats:
    """A request is repeated when its client did not get the answer. The place is what counts."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def find(self, new: NewRequest) -> Accepted | None:
        """The request that has this place in the line of its model or sampler, if there is one."""
        if new.seq_id is None:
            return None
        place = (
            requests.c.model_id == new.model_id
            if new.model_id is not None
            else requests.c.sampling_session_id == new.sampling_session_id
        )
        statement = sa.select(requests.c.request_id, requests.c.kind, requests.c.sequences).where(
            place, requests.c.seq_id == new.seq_id
        )
        row = await self._database.read(lambda connection: connection.execute(statement).first())
        return None if row is None else Accepted(**row._mapping, is_new=False)

    async def has_loss(self, session_id: str, number: int) -> bool:
        """Whether a session has a loss of this number."""
        statement = sa.select(custom_losses.c.loss_id).where(
            custom_losses.c.session_id == session_id,
            custom_losses.c.custom_loss_seq_id == number,
        )
        return await self._database.read(
            lambda connection: connection.execute(statement).first() is not None
        )


# MERGED: How often requests that wait were with an engine that died. Written only when one dies.


_WAITING = requests.c.status == Status.WAITING
_NOTE = (
    requests.update()
    .where(requests.c.request_id == sa.bindparam("lost"), _WAITING)
    .values(deaths=sa.bindparam("times"))
)
_ALL = sa.select(requests.c.request_id, requests.c.deaths).where(_WAITING, requests.c.deaths > 0)
_CLEAR = requests.update().where(_WAITING, requests.c.deaths > 0).values(deaths=0)


class CrashCounts:
    """A number in the row of a request; it goes with the row."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def all(self) -> dict[str, int]:
        """Of everything that waits and was lost before."""
        return await self._database.read(
            lambda connection: {row.request_id: row.deaths for row in connection.execute(_ALL)}
        )

    async def note(self, deaths: Mapping[str, int]) -> None:
        """From now on these have been lost so often."""
        rows = [{"lost": request_id, "times": times} for request_id, times in deaths.items()]
        if rows:
            await self._database.write(
                lambda connection: connection.execute(_NOTE, rows), required=True
            )

    async def clear(self, base_model: str) -> None:
        """What was lost with engines of this model was lost because of another one."""
        statement = _CLEAR.where(requests.c.base_model == base_model)
        await self._database.write(lambda connection: connection.execute(statement), required=True)
