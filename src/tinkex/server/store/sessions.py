"""Sessions: their rows, lists and searches of them, what was made in one, and its trace."""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sqlalchemy as sa

from tinkex.server.store import events
from tinkex.server.store.checkpoint_lists import metadata_characters, has_published_checkpoint, batches
from tinkex.server.store.checkpoints import not_expired
from tinkex.server.store.database import Database
from tinkex.server.store.keys import random_id
from tinkex.server.store.models import was_created
from tinkex.server.store.schema import (
    Status,
    checkpoint_names,
    checkpoint_versions,
    models,
    requests,
    samplers,
    sessions,
)
from tinkex.server.store.sql_dialects import in_list

# Conditions on free-form metadata are not for the database: a search looks at rows. So many of
# one search, and so many characters of their metadata; then it answers where to go on.
MAX_SEARCHED = 5_000
MAX_SEARCHED_CHARACTERS = 16 * 2**20
# Ids that are read together while searching.
READ_BATCH = 500
# Newest requests in one trace; a viewer shows no more than this in a useful way.
MAX_SPANS = 50_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    session_id: str
    owner: str
    sdk_version: str | None
    user_metadata: Mapping[str, Any]
    finished_s: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionDetails:
    """Everything that was said about a session."""

    session_id: str
    owner: str
    sdk_version: str | None
    tags: Sequence[str]
    user_metadata: Mapping[str, Any]
    project_id: str | None
    display_name: str | None
    created_s: float
    seen_s: float
    finished_s: float | None
    finish_reason: str | None
    finish_detail: str | None
    lapsed_s: float | None
    failure: Mapping[str, Any] | None

    def visible_to(self, reader: str) -> "SessionDetails":
        """What this owner may know: of another's session, that it is there and whose it is."""
        if self.owner == reader:
            return self
        return replace(
            self,
            tags=(),
            user_metadata={},
            project_id=None,
            display_name=None,
            sdk_version=None,
            # Whether it runs, fell silent, failed or was ended is its owner's to know: to others
            # every session reads as active.
            seen_s=self.created_s,
            finished_s=None,
            finish_reason=None,
            finish_detail=None,
            lapsed_s=None,
            failure=None,
        )

    @property
    def place(self) -> tuple[int, str]:
        """Where it stands in a list; in microseconds, which is what travels."""
        return _place(self.created_s, self.session_id)


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchPage:
    """One page of a search, and after which place to go on; None at the end."""

    sessions: Sequence[SessionDetails]
    next: tuple[int, str] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointTotals:
    """Checkpoints that were saved in a session and are still there."""

    checkpoints: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """When one request came and when it was finished."""

    request_id: str
    kind: str
    #: The model or the sampler it belongs to.
    track: str
    seq_id: int | None
    status: str
    created_s: float
    finished_s: float | None


_SESSION = (
    sessions.c.session_id,
    sessions.c.owner,
    sessions.c.sdk_version,
    sessions.c.user_metadata,
    sessions.c.finished_s,
)
_PAST_SESSION = tuple(
    sessions.c[name] for name in SessionDetails.__dataclass_fields__ if name in sessions.c
)
_NEWEST_FIRST = (sessions.c.created_s.desc(), sessions.c.session_id.desc())


class Sessions:
    """The rows of sessions, and reads of them as their owner, or a reader of published runs, may see them."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def create_session(
        self,
        *,
        owner: str,
        sdk_version: str | None,
        tags: list[str],
        user_metadata: Mapping[str, Any],
        project_id: str | None,
        display_name: str | None,
        idempotency_key: str | None,
    ) -> Session:
        """A new session, or the one made by an earlier try of the same call."""

        def act(connection: sa.Connection) -> Session:
            if idempotency_key is not None:
                first = connection.execute(
                    sa.select(*_SESSION).where(
                        sessions.c.owner == owner, sessions.c.idempotency_key == idempotency_key
                    )
                ).first()
                if first is not None:
                    return Session(**first._mapping)
            session_id = random_id()
            now_s = time.time()
            connection.execute(
                sessions.insert(),
                {
                    "session_id": session_id,
                    "owner": owner,
                    "sdk_version": sdk_version,
                    "tags": tags,
                    "user_metadata": dict(user_metadata),
                    "project_id": project_id,
                    "display_name": display_name,
                    "idempotency_key": idempotency_key,
                    "created_s": now_s,
                    "seen_s": now_s,
                },
            )
            details = {"session_id": session_id, "sdk_version": sdk_version}
            events.note_audit(connection, owner=owner, event="session.created", details=details)
            return Session(
                session_id=session_id,
                owner=owner,
                sdk_version=sdk_version,
                user_metadata=user_metadata,
                finished_s=None,
            )

        return await self._database.write(act)

    async def session(self, session_id: str) -> Session | None:
        statement = sa.select(*_SESSION).where(sessions.c.session_id == session_id)

        def act(connection: sa.Connection) -> Session | None:
            row = connection.execute(statement).first()
            return None if row is None else Session(**row._mapping)

        return await self._database.read(act)

    def mark_seen(self, session_id: str) -> None:
        """Note, some time soon, that the client of a session is not_expired."""
        statement = (
            sessions.update().where(sessions.c.session_id == session_id).values(seen_s=time.time())
        )
        self._database.write_deferred(
            lambda connection: connection.execute(statement), key=("seen", session_id)
        )

    async def inactive_sessions(self, before_s: float) -> list[str]:
        """Sessions not heard of since then, with nothing of theirs left to run."""
        busy = sa.select(requests.c.session_id).where(
            requests.c.status == Status.WAITING, requests.c.session_id.is_not(None)
        )
        statement = sa.select(sessions.c.session_id).where(
            sessions.c.finished_s.is_(None),
            sessions.c.lapsed_s.is_(None),
            sessions.c.seen_s < before_s,
            sessions.c.session_id.not_in(busy),
        )
        return await self._database.read(lambda connection: _texts(connection, statement))

    async def mark_lapsed(self, session_ids: Sequence[str]) -> None:
        """Mark sessions whose clients are taken for gone."""
        statement = (
            sessions.update()
            .where(sessions.c.session_id == sa.bindparam("silent"))
            .values(lapsed_s=time.time())
        )
        values = [{"silent": session_id} for session_id in session_ids]
        await self._database.write(lambda connection: connection.execute(statement, values))

    async def lapsed_sessions(self) -> list[str]:
        statement = sa.select(sessions.c.session_id).where(
            sessions.c.lapsed_s.is_not(None), sessions.c.finished_s.is_(None)
        )
        return await self._database.read(lambda connection: _texts(connection, statement))

    def mark_active(self, session_id: str) -> None:
        """Note, some time soon, that a client came back."""
        statement = (
            sessions.update()
            .where(sessions.c.session_id == session_id)
            .values(lapsed_s=None, seen_s=time.time())
        )
        self._database.write_deferred(
            lambda connection: connection.execute(statement), key=("revived", session_id)
        )

    def mark_failed(self, session_id: str, failure: Mapping[str, Any] | None) -> None:
        """Note, with the next transaction, why a session has failed, or that it has not."""
        statement = (
            sessions.update()
            .where(sessions.c.session_id == session_id)
            .values(failure=None if failure is None else dict(failure))
        )
        self._database.write_deferred(
            lambda connection: connection.execute(statement), key=("failed", session_id)
        )

    async def failed_sessions(self) -> list[str]:
        statement = sa.select(sessions.c.session_id).where(sessions.c.failure.is_not(None))
        return await self._database.read(lambda connection: _texts(connection, statement))

    async def finish_session(self, session_id: str, reason: str, detail: str | None) -> None:
        """The first reason stays."""
        statement = (
            sessions.update()
            .where(sessions.c.session_id == session_id, sessions.c.finished_s.is_(None))
            .values(finished_s=time.time(), finish_reason=reason, finish_detail=detail)
            .returning(sessions.c.owner)
        )
        details = {"session_id": session_id, "reason": reason}

        def act(connection: sa.Connection) -> None:
            if (row := connection.execute(statement).first()) is not None:
                events.note_audit(
                    connection, owner=row.owner, event="session.finished", details=details
                )

        # What a session kept may go once it has ended.
        await self._database.write(act, reserve=True)

    async def list_ids(
        self, *, owner: str, limit: int, offset: int, published: bool = False
    ) -> list[str]:
        """Of an owner's sessions, newest first; also of those of which others published a run."""
        statement = (
            sa.select(sessions.c.session_id)
            .where(_readable(owner, published))
            .order_by(*_NEWEST_FIRST)
            .limit(limit)
            .offset(offset)
        )
        return await self._database.read_report(
            lambda connection: list(connection.execute(statement).scalars())
        )

    async def details(
        self, session_id: str, *, reader: str, published: bool = False
    ) -> SessionDetails | None:
        """A session as this owner may see it."""
        statement = sa.select(*_PAST_SESSION).where(
            sessions.c.session_id == session_id, _readable(reader, published)
        )

        def act(connection: sa.Connection) -> SessionDetails | None:
            row = connection.execute(statement).first()
            return None if row is None else SessionDetails(**row._mapping).visible_to(reader)

        return await self._database.read(act)

    async def contents(
        self, session_id: str, *, reader: str, most: int
    ) -> tuple[list[str], list[str]]:
        """
        Ids of the first models and samplers of a session, in the order of their numbers.

        Of another's session only the models of which something is published.
        """
        shown = sa.or_(models.c.owner == reader, has_published_checkpoint(time.time()))
        of_models = (
            sa.select(models.c.model_id)
            .where(models.c.session_id == session_id, shown, was_created())
            .order_by(models.c.model_seq_id)
            .limit(most)
        )
        of_samplers = (
            sa.select(samplers.c.sampling_session_id)
            .where(samplers.c.session_id == session_id, samplers.c.owner == reader)
            .order_by(samplers.c.sampling_session_seq_id)
            .limit(most)
        )
        return await self._database.read_report(
            lambda connection: (
                list(connection.execute(of_models).scalars()),
                list(connection.execute(of_samplers).scalars()),
            )
        )

    async def search(
        self,
        *,
        owner: str,
        published: bool = False,
        session_id: str | None,
        after: tuple[int, str] | None,
        wanted: Callable[[SessionDetails], bool],
        limit: int,
    ) -> SearchPage:
        """The next sessions that are wanted, as their reader may see them, newest first."""
        readable = _readable(owner, published)
        # Without what is long in them: they are sorted.
        statement = sa.select(sessions.c.session_id, sessions.c.created_s)
        statement = statement.where(readable).order_by(*_NEWEST_FIRST)
        if session_id is not None:
            statement = statement.where(sessions.c.session_id == session_id)
        if after is not None:
            # A microsecond too many; the exact place is compared below.
            statement = statement.where(sessions.c.created_s <= (after[0] + 1) / 1_000_000)

        def act(connection: sa.Connection) -> SearchPage:
            found: list[SessionDetails] = []
            characters = 0
            ids = _next_ids(connection, statement, after)
            for row in _rows(connection, ids[:MAX_SEARCHED]):
                session = row.visible_to(owner)
                characters += metadata_characters(row.user_metadata)
                if wanted(session):
                    if len(found) == limit:
                        return SearchPage(sessions=found, next=found[-1].place)
                    found.append(session)
                if characters > MAX_SEARCHED_CHARACTERS:
                    return SearchPage(sessions=found, next=session.place)
            more = len(ids) > MAX_SEARCHED
            return SearchPage(sessions=found, next=session.place if more else None)

        return await self._database.read_report(act)

    async def checkpoint_totals(
        self, session_ids: Collection[str], *, reader: str, now_s: float
    ) -> dict[str, CheckpointTotals]:
        """What is kept of each of these sessions; of those of others, what is published."""
        named = (
            sa.select(models.c.session_id, sa.func.count().label("number"))
            .join_from(checkpoint_names, models, checkpoint_names.c.model_id == models.c.model_id)
            .where(
                in_list(models.c.session_id, session_ids),
                sa.or_(models.c.owner == reader, checkpoint_names.c.public),
                not_expired(now_s),
            )
            .group_by(models.c.session_id)
        )
        kept = (
            sa.select(models.c.session_id, sa.func.sum(checkpoint_versions.c.size_bytes))
            .join_from(checkpoint_names, models, checkpoint_names.c.model_id == models.c.model_id)
            .join(
                checkpoint_versions,
                checkpoint_versions.c.version_id == checkpoint_names.c.version_id,
            )
            .where(
                in_list(models.c.session_id, session_ids),
                models.c.owner == reader,
                not_expired(now_s),
            )
            .group_by(models.c.session_id)
        )

        def act(connection: sa.Connection) -> dict[str, CheckpointTotals]:
            numbers = {row[0]: int(row[1]) for row in connection.execute(named)}
            sizes = {row[0]: int(row[1]) for row in connection.execute(kept)}
            return {
                one: CheckpointTotals(checkpoints=numbers.get(one, 0), size_bytes=sizes.get(one, 0))
                for one in session_ids
            }

        return await self._database.read_report(act)

    async def set_project(self, session_id: str, project_id: str, *, owner: str) -> None:
        """Move a session, and with it all that was made in it."""
        statement = (
            sessions.update()
            .where(sessions.c.session_id == session_id)
            .values(project_id=project_id)
        )
        details = {"session_id": session_id, "project_id": project_id}

        def act(connection: sa.Connection) -> None:
            connection.execute(statement)
            events.note_audit(
                connection, owner=owner, event="project.session_moved", details=details
            )

        await self._database.write(act)

    async def spans(self, session_id: str) -> list[Span]:
        """The requests of a session that are still known, oldest first."""
        statement = (
            sa.select(
                requests.c.request_id,
                requests.c.kind,
                sa.func.coalesce(
                    requests.c.model_id, requests.c.sampling_session_id, requests.c.session_id
                ).label("track"),
                requests.c.seq_id,
                requests.c.status,
                requests.c.created_s,
                requests.c.finished_s,
            )
            .where(requests.c.session_id == session_id)
            .order_by(requests.c.created_s.desc())
            .limit(MAX_SPANS)
        )
        found = await self._database.read_report(
            lambda connection: [Span(**row._mapping) for row in connection.execute(statement)]
        )
        return found[::-1]


def _readable(owner: str, published: bool) -> sa.ColumnElement[bool]:
    """Sessions of this owner and, if asked for, those of which others published a checkpoint."""
    own = sessions.c.owner == owner
    if not published:
        return own
    shared = sa.select(models.c.session_id).where(has_published_checkpoint(time.time()))
    return sa.or_(own, sessions.c.session_id.in_(shared))


def _place(created_s: float, session_id: str) -> tuple[int, str]:
    return round(created_s * 1_000_000), session_id


def _next_ids(
    connection: sa.Connection,
    statement: sa.Select[tuple[str, float]],
    after: tuple[int, str] | None,
) -> list[str]:
    """As many as one search looks at, and one more if there is one."""
    ids: list[str] = []
    options = {"yield_per": READ_BATCH}
    with connection.execute(statement, execution_options=options) as result:
        for row in result:
            if after is None or _place(row.created_s, row.session_id) < after:
                ids.append(row.session_id)
                if len(ids) > MAX_SEARCHED:
                    break
    return ids


def _rows(connection: sa.Connection, ids: list[str]) -> Iterator[SessionDetails]:
    for some in batches(ids):
        statement = sa.select(*_PAST_SESSION).where(in_list(sessions.c.session_id, some))
        rows = {row.session_id: row for row in connection.execute(statement)}
        for session_id in some:
            yield SessionDetails(**rows[session_id]._mapping)


def _texts(connection: sa.Connection, statement: sa.Select[str]) -> list[str]:
    return list(connection.scalars(statement))
