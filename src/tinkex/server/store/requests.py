"""Requests: accepted once, finished once, stored until their results are fetched."""

import asyncio
import functools
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from tinkex.server.queued_request import Kind, Outcome, QueuedRequest
from tinkex.server.store.blobs import Files
from tinkex.server.store.database import Database, columns, every, execute, scalar, scalars
from tinkex.server.store.request_rows import (
    ROW,
    Completion,
    find,
    find_earlier,
    finish,
    finish_many,
    insert,
    insert_many,
    log_of,
    new_request_id,
    request_of,
)
from tinkex.server.store.schema import Status, completions, refused_steps, requests, samplers
from tinkex.server.store.sql_dialects import in_list, list_parameter
from tinkex.server.store.storage_health import FILES, Damaged

# Larger payloads and results are stored as files, so that rows stay small.
INLINE_BYTES = 64 * 1024
#: Maximum number of fetched marks per owner that wait to be written. Writing that many takes a
#: tenth of a second.
MAX_FETCHED_PENDING = 10_000


class ResultGone(LookupError):
    """The result was deleted after its retention time."""


_FETCHED = requests.update().where(
    requests.c.request_id == sa.bindparam("fetched"), requests.c.fetched_s.is_(None)
)
_COUNT_WAITING = sa.select(sa.func.count()).where(requests.c.status == Status.WAITING)
_ALL_FETCHED = _FETCHED.where(requests.c.owner == sa.bindparam("of"))


class Requests:
    """The request rows."""

    def __init__(self, database: Database, files: Files) -> None:
        self._database = database
        self._files = files
        self._fetched_pending: Counter[str] = Counter()
        self._fetched_lock = threading.Lock()

    async def accept(self, new: QueuedRequest) -> QueuedRequest:
        """Accept a request; it is on disk when this returns. A repeat returns the first request."""
        key, payload = None, new.payload or b""
        if len(payload) > INLINE_BYTES:
            self._database.health.refuse_new_data()
            key = await self._put("payloads", payload)
        new.request_id = new_request_id(time.time())
        return await self._database.write_batched(insert_many, (new, key))

    async def find_repeat(self, new: QueuedRequest) -> QueuedRequest | None:
        """The earlier request with the same (model or sampler, seq_id); writes nothing."""
        if new.seq_id is None:
            return None
        return await self._database.read(lambda connection: find_earlier(connection, new))

    async def store_refused(self, refused: QueuedRequest, outcome: Outcome) -> None:
        """Store a refused step as failed, so that its seq_id is used up."""
        noted = refused_steps.delete().where(
            refused_steps.c.model_id == refused.model_id, refused_steps.c.seq_id == refused.seq_id
        )

        def operation(connection: sa.Connection) -> None:
            # A copy, so that a step which could not be stored still has no id.
            new = replace(refused)
            if insert(connection, new) is new:
                finish(connection, new, outcome)
            connection.execute(noted)

        await self._database.write(operation, required=True)

    async def store_result(self, result: bytes) -> str | None:
        """
        Write a large result to a file; returns its key for `Outcome`, or None for a small one.

        While the disk refuses writes, this waits, because the request was already accepted.
        """
        if len(result) <= INLINE_BYTES:
            return None
        return await self._put("results", result, required=True)

    async def _put(self, prefix: str, data: bytes, *, required: bool = False) -> str:
        write = functools.partial(self._files.put, prefix, data)
        key = await self._database.with_file(write, required=required)
        self._database.health.clear(FILES)
        return key

    async def _get(self, request_id: str, what: str, key: str, *, required: bool = False) -> bytes:
        try:
            return await self._database.with_file(lambda: self._files.get(key), required=required)
        except Damaged as error:
            raise Damaged(f"the {what} of request {request_id} {error}") from error

    def finish_one(
        self, request: QueuedRequest, outcome: Outcome
    ) -> asyncio.Future[Completion | None]:
        """Finish a request, in the order of the calls; a finished one stays unchanged."""
        return self._database.write_batched(finish_many, (request, outcome), required=True)

    async def finish_all(self, group: Sequence[tuple[QueuedRequest, Outcome]]) -> None:
        """Finish several steps of a model in one transaction."""
        if len(group) == 1:
            # Shares its statements with those of other models.
            await self.finish_one(*group[0])
            return
        await self._database.write(lambda connection: finish_many(connection, group), required=True)

    async def completions(
        self,
        sampling_session_id: str,
        clone_id: int,
        *,
        after: int,
        up_to: int | None = None,
        limit: int | None = None,
    ) -> tuple[list[Completion], int]:
        """
        The first events in a range of one client's completion log, in order.

        Also the position of the newest event of the sampler at that time: no later event has a
        lower one.
        """
        statement = (
            sa.select(*columns(Completion, completions))
            .where(
                completions.c.sampling_session_id == sampling_session_id,
                completions.c.clone_id == clone_id,
                completions.c.position > after,
            )
            .order_by(completions.c.position)
            .limit(limit)
        )
        if up_to is not None:
            statement = statement.where(completions.c.position <= up_to)
        newest = sa.select(samplers.c.events).where(
            samplers.c.sampling_session_id == sampling_session_id
        )

        def operation(connection: sa.Connection) -> tuple[list[Completion], int]:
            return every(Completion, statement)(connection), connection.scalar(newest) or 0

        return await self._database.read(operation)

    async def get(self, request_id: str) -> QueuedRequest | None:
        return await self._database.read(lambda connection: find(connection, request_id))

    async def _requests(self, statement: sa.Select[*tuple[Any, ...]]) -> list[QueuedRequest]:
        return await self._database.read(
            lambda connection: [request_of(row) for row in connection.execute(statement)]
        )

    async def payload(self, request_id: str) -> bytes | Path:
        """The normalized request: its bytes, or the file of a large one."""
        statement = sa.select(requests.c.payload, requests.c.payload_place).where(
            requests.c.request_id == request_id
        )
        row = await self._database.read(lambda connection: connection.execute(statement).first())
        if row is None or (row.payload is None and row.payload_place is None):
            raise Damaged(f"the payload of request {request_id} was deleted")
        if row.payload_place is None:
            return bytes(row.payload)
        key: str = row.payload_place
        path = self._files.path(key)
        # Engines on this machine read the file themselves: here it is read at most once.
        if path is not None and await self._database.with_file(lambda: self._files.known(key)):
            return path
        payload = await self._get(request_id, "payload", key, required=True)
        return path or payload

    async def result(self, request_id: str) -> bytes:
        """The normalized result."""
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

    async def finished(
        self, request_ids: Sequence[str], *, with_results: Sequence[str]
    ) -> dict[str, tuple[QueuedRequest, bytes | None]]:
        """These requests by id, some with their results if those are small."""
        chosen = in_list(requests.c.request_id, sa.bindparam("wanted", type_=sa.Text))
        rows = sa.select(*ROW).where(chosen)
        results = sa.select(requests.c.request_id, requests.c.result).where(chosen)

        def operation(
            connection: sa.Connection,
        ) -> dict[str, tuple[QueuedRequest, bytes | None]]:
            small = {}
            if with_results:
                given = {"wanted": list_parameter(with_results)}
                small = dict(connection.execute(results, given).all())
            found = {}
            for row in connection.execute(rows, {"wanted": list_parameter(request_ids)}):
                result = small.get(row.request_id)
                found[row.request_id] = (
                    request_of(row),
                    None if result is None else bytes(result),
                )
            return found

        return await self._database.read(operation)

    async def look_at(
        self, request_ids: Sequence[str]
    ) -> tuple[list[str], list[str], dict[str, str | None]]:
        """
        What became of these requests.

        Returns those that do not wait any more, those that are to be cancelled unless polled, and
        the workers that the others wait for.
        """
        statement = sa.select(
            requests.c.request_id, requests.c.status, requests.c.cancel_s, requests.c.home
        ).where(in_list(requests.c.request_id, request_ids))
        rows = await self._database.read(lambda connection: connection.execute(statement).all())
        homes = {row.request_id: row.home for row in rows if row.status == Status.WAITING}
        abandoned = [row.request_id for row in rows if row.cancel_s is not None]
        return [one for one in request_ids if one not in homes], abandoned, homes

    async def news_of(self, request_ids: Sequence[str]) -> tuple[list[str], list[str]]:
        """
        Those of these requests that are finished, and those to be cancelled unless polled.

        Cheaper than `look_at`: nothing is read of those that only wait, or whose rows are deleted.
        """
        statement = sa.select(requests.c.request_id, requests.c.status, requests.c.cancel_s).where(
            in_list(requests.c.request_id, request_ids),
            sa.or_(requests.c.status != Status.WAITING, requests.c.cancel_s.is_not(None)),
        )
        rows = await self._database.read(lambda connection: connection.execute(statement).all())
        ended = [row.request_id for row in rows if row.status != Status.WAITING]
        return ended, [row.request_id for row in rows if row.cancel_s is not None]

    async def loads(self) -> dict[str, tuple[int, int, int]]:
        """The unfinished requests of each owner, their tokens, and sequences of samples."""
        sequences = sa.case((requests.c.kind == Kind.SAMPLE, requests.c.sequences), else_=0)
        statement = (
            sa.select(
                requests.c.owner,
                sa.func.count(),
                sa.func.sum(requests.c.tokens),
                sa.func.sum(sequences),
            )
            .where(requests.c.status == Status.WAITING)
            .group_by(requests.c.owner)
        )
        rows = await self._database.read(lambda connection: connection.execute(statement).all())
        return {owner: (int(one), int(two), int(three)) for owner, one, two, three in rows}

    async def newest_events(self, sampling_session_ids: Sequence[str]) -> dict[str, int]:
        """The position of the newest event of each sampler."""
        statement = sa.select(samplers.c.sampling_session_id, samplers.c.events).where(
            in_list(samplers.c.sampling_session_id, sampling_session_ids)
        )
        return await self._database.read(
            lambda connection: dict(connection.execute(statement).all())
        )

    async def has_later_steps(self, model_id: str, seq_id: int) -> bool:
        """Whether steps of a model wait behind this number."""
        statement = (
            sa.select(requests.c.request_id)
            .where(requests.c.model_id == model_id, requests.c.seq_id > seq_id, _WAITING)
            .limit(1)
        )
        return await self._database.read(scalar(statement)) is not None

    async def count_waiting(self, *, home: str | None = None) -> int:
        """The number of accepted, unfinished requests; with `home`, of that worker."""
        return await self._database.read(scalar(_of_worker(_COUNT_WAITING, home)))

    async def waiting_owners(self, *, home: str | None = None) -> list[str]:
        """Owners with waiting requests; those with the fewest first."""
        statement = (
            _of_worker(sa.select(requests.c.owner), home)
            .where(requests.c.status == Status.WAITING)
            .group_by(requests.c.owner)
            .order_by(sa.func.count(), requests.c.owner)
        )
        return await self._database.read(scalars(statement))

    async def waiting_of(
        self,
        owner: str,
        *,
        after: tuple[float, str] | None,
        limit: int,
        home: str | None = None,
    ) -> tuple[list[QueuedRequest], tuple[float, str] | None]:
        """The next rows of one owner, oldest first, and the next `after`; None at the end."""
        position = sa.tuple_(requests.c.created_s, requests.c.request_id)
        statement = (
            _of_worker(sa.select(requests.c.created_s, *ROW), home)
            .where(requests.c.status == Status.WAITING, requests.c.owner == owner)
            .order_by(requests.c.created_s, requests.c.request_id)
            .limit(limit)
        )
        if after is not None:
            # The first condition uses the index.
            statement = statement.where(requests.c.created_s >= after[0], position > after)

        def operation(
            connection: sa.Connection,
        ) -> tuple[list[QueuedRequest], tuple[float, str] | None]:
            found = connection.execute(statement).all()
            last = (found[-1].created_s, found[-1].request_id) if len(found) == limit else None
            return [request_of(row) for row in found], last

        return await self._database.read(operation)

    async def waiting_steps(self, model_id: str) -> list[QueuedRequest]:
        """The unfinished steps of one model, in order."""
        statement = (
            sa.select(*ROW)
            .where(
                requests.c.model_id == model_id,
                requests.c.seq_id.is_not(None),
                requests.c.status == Status.WAITING,
            )
            .order_by(requests.c.seq_id)
        )
        return await self._requests(statement)

    async def log(self, model_id: str, *, after: int = -1) -> list[QueuedRequest]:
        """The finished steps of a model after `after`, in order. Recovery replays them."""
        return await self._requests(log_of(model_id, after=after))

    async def has_steps(self, model_id: str) -> bool:
        """Whether a model's step 0 is stored."""
        statement = sa.select(requests.c.request_id).where(
            requests.c.model_id == model_id, requests.c.seq_id == 0
        )
        return await self._database.read(scalar(statement)) is not None

    def mark_fetched(self, request_id: str) -> None:
        """Record, with a deferred write, that the whole result was sent."""
        values = {"fetched": request_id, "fetched_s": time.time()}
        self._database.write_deferred_batched(_mark_many_fetched, values)

    def mark_all_fetched(self, request_ids: Sequence[str], *, owner: str) -> None:
        """Like `mark_fetched`, for many requests of this owner; a repeat changes nothing."""
        now_s = time.time()
        # Each was marked when its result was sent; a mark that is dropped here only costs space.
        with self._fetched_lock:
            some = request_ids[: MAX_FETCHED_PENDING - self._fetched_pending[owner]]
            if not some:
                return
            self._fetched_pending[owner] += len(some)
        values = [{"fetched": one, "of": owner, "fetched_s": now_s} for one in some]
        pending = [len(values)]

        def not_pending() -> None:
            # Counts once, however often the write is retried. Also called by the writer thread.
            with self._fetched_lock:
                while pending:
                    self._fetched_pending[owner] -= pending.pop()
                if not self._fetched_pending[owner]:
                    del self._fetched_pending[owner]

        def operation(connection: sa.Connection) -> None:
            not_pending()
            connection.execute(_ALL_FETCHED, values)

        self._database.write_deferred(operation, on_dropped=not_pending)


def _mark_many_fetched(
    connection: sa.Connection, marks: Sequence[dict[str, object]]
) -> Sequence[None]:
    # In one order, so that two processes that mark the same ones do not wait for each other.
    connection.execute(_FETCHED, sorted(marks, key=lambda mark: str(mark["fetched"])))
    return [None] * len(marks)


def _of_worker(statement: sa.Select[Any], home: str | None) -> sa.Select[Any]:
    """Only what waits for this worker; everything on a server that is alone."""
    return statement if home is None else statement.where(requests.c.home == home)


_WAITING = requests.c.status == Status.WAITING
_SET = (
    requests.update()
    .where(requests.c.request_id == sa.bindparam("lost"), _WAITING)
    .values(deaths=sa.bindparam("attempts"))
)
_ALL = sa.select(requests.c.base_model, requests.c.request_id, requests.c.deaths).where(_WAITING)
_CLEAR = requests.update().where(_WAITING, requests.c.deaths > 0).values(deaths=0)


class Attempts:
    """How often each waiting request was lost when its engine ended by itself."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def counted(self, *, home: str | None = None) -> dict[str, dict[str, int]]:
        """By base model: the attempts of waiting requests that have any; with `home`, of a worker."""
        return await self._read(_of_worker(_ALL.where(requests.c.deaths > 0), home))

    async def all_waiting(self, *, home: str | None = None) -> dict[str, dict[str, int]]:
        """By base model: the attempts of all waiting requests."""
        return await self._read(_of_worker(_ALL, home))

    async def _read(self, statement: sa.Select[Any]) -> dict[str, dict[str, int]]:
        found: defaultdict[str, dict[str, int]] = defaultdict(dict)
        for base_model, request_id, attempts in await self._database.read(
            lambda connection: connection.execute(statement).all()
        ):
            found[base_model][request_id] = attempts
        return found

    async def set(self, attempts: Mapping[str, int]) -> None:
        """Store the new attempts of these requests."""
        rows = [{"lost": request_id, "attempts": count} for request_id, count in attempts.items()]
        if rows:
            await self._database.write(execute(_SET, rows), required=True)

    async def clear(self, base_model: str, *, home: str | None = None) -> None:
        """Reset the attempts of a base model: another request ended its engine."""
        statement = _CLEAR.where(requests.c.base_model == base_model)
        if home is not None:
            statement = statement.where(requests.c.home == home)
        await self._database.write(execute(statement), required=True)
