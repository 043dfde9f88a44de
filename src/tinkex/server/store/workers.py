"""
The workers of a database that several processes share, and which of them runs what.

A worker writes a heartbeat every second. One without a heartbeat for `takeover_s` is dead: the requests
that wait for it get another home. All times are of the database's clock, so clocks of machines do not
matter. Whether a worker may publish is decided by terms alone (`ownership`).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

from tinkex.server.queued_request import Kind, QueuedRequest
from tinkex.server.store import step_rows
from tinkex.server.store.database import Database, every, execute
from tinkex.server.store.ownership import NotOwner
from tinkex.server.store.request_rows import ROW, with_payload
from tinkex.server.store.schema import Status, models, refused_steps, requests, sessions, workers
from tinkex.server.store.sql_dialects import in_list

UP, DRAINING, GONE = "up", "draining", "gone"
#: A worker that has been dead for this long is forgotten, and its base model is no longer served.
FORGET_S = 24 * 3600.0

_NOW = sa.cast(sa.func.extract("epoch", sa.func.clock_timestamp()), sa.Float)
_WAITING = requests.c.status == Status.WAITING


class Replaced(Exception):
    """Another process has registered with the name of this worker."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerRow:
    """A worker as the table has it."""

    name: str
    base_model: str
    term: int
    state: str
    #: Seconds since its last heartbeat.
    silent_s: float
    #: The fields of `ServedModel`.
    model: Mapping[str, Any]
    stats: Mapping[str, Any]

    def is_live(self, takeover_s: float) -> bool:
        """Whether it runs, as far as is known; also one that drains."""
        return self.state != GONE and self.silent_s < takeover_s

    def takes_work(self, takeover_s: float) -> bool:
        return self.state == UP and self.is_live(takeover_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stranded:
    """A waiting request whose worker is dead, or that has none."""

    request_id: str
    owner: str
    kind: str
    model_id: str | None
    version_id: str | None
    sequences: int
    #: The worker and the term of its model.
    model_home: str | None
    model_term: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class NewHomes:
    """Which worker gets which stranded work."""

    #: By model: the term that it must still have, and its new home.
    models: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    #: By request, the new home; of steps only if their model has a live home.
    requests: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class RefusedStep:
    """A step that a web process refused."""

    model_id: str
    seq_id: int
    kind: str
    error: str


class Workers:
    """The rows of workers, and the homes of requests and models."""

    def __init__(self, database: Database) -> None:
        self._database = database

    # -- the rows of workers ---------------------------------------------------------------------

    async def register(self, name: str, *, base_model: str, model: Mapping[str, Any]) -> int:
        """A process starts under this name; returns its term. An older one of this name ends."""
        row = {"base_model": base_model, "state": UP, "model": dict(model), "stats": {}}
        insert = postgresql.insert(workers).values(
            name=name, term=1, started_s=_NOW, seen_s=_NOW, **row
        )
        statement = insert.on_conflict_do_update(
            index_elements=[workers.c.name],
            set_={"term": workers.c.term + 1, "started_s": _NOW, "seen_s": _NOW, **row},
        ).returning(workers.c.term)

        def operation(connection: sa.Connection) -> int:
            connection.execute(workers.delete().where(workers.c.seen_s < _NOW - FORGET_S))
            term: int = connection.execute(statement).scalar_one()
            return term

        return await self._database.write(operation, required=True)

    async def beat(self, name: str, term: int, *, state: str, stats: Mapping[str, Any]) -> None:
        """A heartbeat. Raises Replaced if another process has the name."""
        statement = (
            workers.update()
            .where(workers.c.name == name, workers.c.term == term)
            .values(seen_s=_NOW, state=state, stats=dict(stats))
        )
        if not (await self._database.write(execute(statement))).rowcount:
            raise Replaced(name)

    async def all(self) -> list[WorkerRow]:
        """All workers, also dead ones that are not forgotten yet, by name."""
        chosen = (getattr(workers.c, name) for name in ("name", "base_model", "term", "state"))
        statement = sa.select(
            *chosen,
            (_NOW - workers.c.seen_s).label("silent_s"),
            workers.c.model,
            workers.c.stats,
        ).order_by(workers.c.name)
        return await self._database.read(every(WorkerRow, statement))

    # -- who runs what -----------------------------------------------------------------------------

    async def waiting_by_home(self, base_model: str) -> dict[str | None, int]:
        """How many requests of a base model wait for each worker."""
        statement = (
            sa.select(requests.c.home, sa.func.count())
            .where(_WAITING, requests.c.base_model == base_model)
            .group_by(requests.c.home)
        )
        return await self._database.read(
            lambda connection: dict(connection.execute(statement).all())
        )

    async def stranded(self, base_model: str, home: str | None, *, limit: int) -> list[Stranded]:
        """The oldest requests that wait for this worker, or for none."""
        statement = (
            sa.select(
                requests.c.request_id,
                requests.c.owner,
                requests.c.kind,
                requests.c.model_id,
                requests.c.version_id,
                requests.c.sequences,
                models.c.home.label("model_home"),
                models.c.term.label("model_term"),
            )
            .outerjoin(models, models.c.model_id == requests.c.model_id)
            .where(_WAITING, requests.c.base_model == base_model, requests.c.home == home)
            .order_by(requests.c.created_s)
            .limit(limit)
        )
        return await self._database.read(every(Stranded, statement))

    async def rehome(self, homes: NewHomes) -> None:
        """
        Give models and requests to other workers.

        A model that has changed hands meanwhile stays where it is: of several workers that see the
        same dead one, the first decides.
        """
        take = (
            models.update()
            .where(models.c.model_id == sa.bindparam("moved"), models.c.term == sa.bindparam("old"))
            .values(home=sa.bindparam("new"), term=models.c.term + 1)
        )
        of_model = (
            requests.update()
            .where(_WAITING, requests.c.model_id == sa.bindparam("moved"))
            .values(
                home=sa.select(models.c.home)
                .where(models.c.model_id == requests.c.model_id)
                .scalar_subquery()
            )
        )
        single = (
            requests.update()
            .where(_WAITING, requests.c.request_id == sa.bindparam("moved"))
            .values(home=sa.bindparam("new"))
        )

        def operation(connection: sa.Connection) -> None:
            # In one order, so that two transactions do not wait for each other.
            moved = [
                {"moved": one, "old": term, "new": home}
                for one, (term, home) in sorted(homes.models.items())
            ]
            if moved:
                connection.execute(take, moved)
                connection.execute(of_model, [{"moved": one["moved"]} for one in moved])
            alone = [{"moved": one, "new": home} for one, home in sorted(homes.requests.items())]
            if alone:
                connection.execute(single, alone)

        await self._database.write(operation, required=True)

    async def hand_over(self, model_id: str, *, term: int, to: str) -> None:
        """Give a model to another worker. NotOwner if it has changed hands already."""
        statement = (
            models.update()
            .where(models.c.model_id == model_id, models.c.term == term)
            .values(home=to, term=models.c.term + 1)
        )
        steps = requests.update().where(_WAITING, requests.c.model_id == model_id).values(home=to)

        def operation(connection: sa.Connection) -> None:
            if not connection.execute(statement).rowcount:
                raise NotOwner([model_id])
            connection.execute(steps)
            step_rows.forget_run(connection, model_id)

        await self._database.write(operation, required=True)

    async def forward(self, model_id: str) -> str | None:
        """Send the waiting requests of a model to its home; returns that."""
        home = (
            sa.select(models.c.home)
            .where(models.c.model_id == requests.c.model_id)
            .scalar_subquery()
        )
        statement = (
            requests.update()
            .where(_WAITING, requests.c.model_id == model_id, requests.c.home != home)
            .values(home=home)
            .returning(requests.c.home)
        )

        def operation(connection: sa.Connection) -> str | None:
            found: str | None = connection.execute(statement).scalars().first()
            return found

        return await self._database.write(operation, required=True)

    async def lost_models(self, terms: Mapping[str, int]) -> list[str]:
        """Which of these models have another term now."""
        statement = sa.select(models.c.model_id, models.c.term).where(
            in_list(models.c.model_id, list(terms))
        )
        rows = await self._database.read(lambda connection: connection.execute(statement).all())
        return [row.model_id for row in rows if row.term != terms[row.model_id]]

    async def waiting_requests(self, request_ids: Sequence[str], home: str) -> list[QueuedRequest]:
        """Those of these requests that wait for this worker, with small payloads."""
        statement = sa.select(*ROW, requests.c.payload).where(
            in_list(requests.c.request_id, request_ids), _WAITING, requests.c.home == home
        )

        return await self._database.read(
            lambda connection: [with_payload(row) for row in connection.execute(statement)]
        )

    # -- cancellation ------------------------------------------------------------------------------

    async def cancel(self, request_id: str, *, owner: str, after_s: float = 0.0) -> str | None:
        """Cancel a sample after this time, unless a poll waits for it then; returns its worker."""
        at_s = _NOW + after_s
        statement = (
            requests.update()
            .where(
                requests.c.request_id == request_id,
                requests.c.owner == owner,
                requests.c.kind == Kind.SAMPLE,
                _WAITING,
            )
            # An earlier time stays.
            .values(cancel_s=sa.func.least(sa.func.coalesce(requests.c.cancel_s, at_s), at_s))
            .returning(requests.c.home)
        )

        def operation(connection: sa.Connection) -> str | None:
            found: str | None = connection.execute(statement).scalars().first()
            return found

        return await self._database.write(operation)

    async def keep(self, request_ids: Sequence[str]) -> None:
        """Polls wait for these requests: those that would be cancelled later are not."""
        statement = (
            requests.update()
            .where(in_list(requests.c.request_id, request_ids), requests.c.cancel_s > _NOW)
            .values(cancel_s=None)
        )
        await self._database.write(execute(statement))

    async def cancelled(self, home: str) -> list[tuple[str, str]]:
        """Waiting requests of a worker that are to be cancelled now, each with its owner."""
        statement = sa.select(requests.c.request_id, requests.c.owner).where(
            _WAITING, requests.c.home == home, requests.c.cancel_s <= _NOW
        )
        return await self._database.read(
            lambda connection: [(one, owner) for one, owner in connection.execute(statement)]
        )

    # -- refused steps, sessions -------------------------------------------------------------------

    async def refuse(self, step: RefusedStep) -> str | None:
        """Remember a refused step for the worker of its model; returns that."""
        values = {
            "model_id": step.model_id,
            "seq_id": step.seq_id,
            "kind": step.kind,
            "error": step.error,
            "refused_s": _NOW,
        }
        insert = postgresql.insert(refused_steps).values(values)
        statement = insert.on_conflict_do_update(
            index_elements=[refused_steps.c.model_id, refused_steps.c.seq_id], set_=values
        )
        home = sa.select(models.c.home).where(models.c.model_id == step.model_id)

        def operation(connection: sa.Connection) -> str | None:
            connection.execute(statement)
            found: str | None = connection.scalar(home)
            return found

        return await self._database.write(operation)

    async def refused(self, model_ids: Sequence[str]) -> list[RefusedStep]:
        """The refused steps of these models. `Requests.store_refused` deletes them."""
        statement = sa.select(
            refused_steps.c.model_id,
            refused_steps.c.seq_id,
            refused_steps.c.kind,
            refused_steps.c.error,
        ).where(in_list(refused_steps.c.model_id, model_ids))
        return await self._database.read(every(RefusedStep, statement))

    async def drop_refused(self, *, older_than_s: float) -> None:
        """Delete refusals that are not in the log of their model."""
        statement = refused_steps.delete().where(refused_steps.c.refused_s < _NOW - older_than_s)
        await self._database.write(execute(statement))

    async def fence_off(self, session_id: str, live: Collection[str]) -> None:
        """
        Models of a session whose worker is none of these are rebuilt before anything more of them is
        published, also if that worker still has them.
        """
        statement = (
            models.update()
            .where(
                models.c.session_id == session_id,
                models.c.home.is_not(None),
                sa.not_(in_list(models.c.home, list(live))),
            )
            .values(term=models.c.term + 1)
        )
        await self._database.write(execute(statement), required=True)

    async def homes_of_session(self, session_id: str) -> list[str]:
        """The workers that have models of a session, by name."""
        statement = (
            sa.select(models.c.home)
            .where(models.c.session_id == session_id, models.c.home.is_not(None))
            .distinct()
        )
        return sorted(
            await self._database.read(lambda connection: list(connection.scalars(statement)))
        )

    async def silent_sessions(self, session_ids: Sequence[str]) -> list[str]:
        """Which of these sessions have timed out or are finished."""
        statement = sa.select(sessions.c.session_id).where(
            in_list(sessions.c.session_id, session_ids),
            sa.or_(sessions.c.lapsed_s.is_not(None), sessions.c.finished_s.is_not(None)),
        )
        return await self._database.read(lambda connection: list(connection.scalars(statement)))
