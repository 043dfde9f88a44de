"""Sessions: creating and finishing them, lists, search, contents, and traces."""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sqlalchemy as sa

from tinkex.server.store.checkpoint_catalog import batches, metadata_characters
from tinkex.server.store.database import (
    Database,
    columns,
    every,
    execute,
    has_published_checkpoint,
    not_expired,
    note_audit,
    one,
    scalars,
    values,
    was_created,
)
from tinkex.server.store.keys import random_id
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

# A search filters free-form metadata in Python. One search reads at most this many rows, and this
# many characters of metadata; then it returns where to continue.
MAX_SEARCHED = 5_000
MAX_SEARCHED_CHARACTERS = 16 * 2**20
# Sessions whose failure is taken back once their work succeeds.
MAX_FAILED = 10_000
# Ids fetched at a time while searching.
READ_BATCH = 500
# The newest requests in one trace; viewers become unusable with more.
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
    """All columns of a session that a client may see."""

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
        """The fields that `reader` may see: of another owner's session, only that it exists."""
        if self.owner == reader:
            return self
        return replace(
            self,
            tags=(),
            user_metadata={},
            project_id=None,
            display_name=None,
            sdk_version=None,
            # Its state is private: for others every session looks active.
            seen_s=self.created_s,
            finished_s=None,
            finish_reason=None,
            finish_detail=None,
            lapsed_s=None,
            failure=None,
        )

    @property
    def position(self) -> tuple[int, str]:
        """Its position in a list: time in microseconds, as in search cursors, and id."""
        return _position(self.created_s, self.session_id)


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchPage:
    """One page of a search, and the position after which it continues; None at the end."""

    sessions: Sequence[SessionDetails]
    next: tuple[int, str] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointTotals:
    """The number and size of the checkpoints of a session."""

    checkpoints: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """When one request was accepted and finished."""

    request_id: str
    kind: str
    #: Its model or sampler.
    track: str
    seq_id: int | None
    status: str
    created_s: float
    finished_s: float | None


_SESSIONS = sa.select(*columns(Session, sessions))
_DETAILS = sa.select(*columns(SessionDetails, sessions))
_NEWEST_FIRST = (sessions.c.created_s.desc(), sessions.c.session_id.desc())


class Sessions:
    """The session rows. Reads with a `reader` return what that owner may see."""

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
        """A new session, or the one that an earlier try of the same call created."""

        def operation(connection: sa.Connection) -> Session:
            if idempotency_key is not None:
                earlier = _SESSIONS.where(
                    sessions.c.owner == owner, sessions.c.idempotency_key == idempotency_key
                )
                if (first := one(Session, earlier)(connection)) is not None:
                    return first
            now_s = time.time()
            new = Session(
                session_id=random_id(),
                owner=owner,
                sdk_version=sdk_version,
                user_metadata=user_metadata,
                finished_s=None,
            )
            connection.execute(
                sessions.insert(),
                {
                    **values(new),
                    "tags": tags,
                    "project_id": project_id,
                    "display_name": display_name,
                    "idempotency_key": idempotency_key,
                    "created_s": now_s,
                    "seen_s": now_s,
                },
            )
            details = {"session_id": new.session_id, "sdk_version": sdk_version}
            note_audit(connection, owner=owner, event="session.created", details=details)
            return new

        return await self._database.write(operation)

    async def session(self, session_id: str) -> Session | None:
        statement = _SESSIONS.where(sessions.c.session_id == session_id)
        return await self._database.read(one(Session, statement))

    def mark_seen(self, session_id: str) -> None:
        """Record, with a deferred write, that the client of a session is alive."""
        self._set_later("seen", session_id, seen_s=time.time())

    async def inactive_sessions(self, before_s: float) -> list[str]:
        """Open sessions without activity since then and without waiting requests."""
        busy = sa.select(requests.c.session_id).where(
            requests.c.status == Status.WAITING, requests.c.session_id.is_not(None)
        )
        statement = sa.select(sessions.c.session_id).where(
            sessions.c.finished_s.is_(None),
            sessions.c.lapsed_s.is_(None),
            sessions.c.seen_s < before_s,
            sessions.c.session_id.not_in(busy),
        )
        return await self._database.read(scalars(statement))

    async def mark_all_active(self, session_ids: Sequence[str], now_s: float) -> None:
        """The clients of these sessions sent something, at any web process."""
        statement = (
            sessions.update()
            .where(in_list(sessions.c.session_id, session_ids))
            .values(seen_s=now_s, lapsed_s=None)
        )
        if session_ids:
            await self._database.write(execute(statement))

    async def mark_timed_out(self, session_ids: Sequence[str], *, before_s: float) -> None:
        """Mark sessions whose clients timed out, unless they sent something since then."""
        statement = (
            sessions.update()
            .where(sessions.c.session_id == sa.bindparam("silent"), sessions.c.seen_s < before_s)
            .values(lapsed_s=time.time())
        )
        given = [{"silent": session_id} for session_id in session_ids]
        await self._database.write(execute(statement, given))

    async def timed_out_sessions(self, among: Sequence[str] | None = None) -> list[str]:
        """The sessions whose clients timed out: all, or some of these."""
        statement = sa.select(sessions.c.session_id).where(
            sessions.c.lapsed_s.is_not(None), sessions.c.finished_s.is_(None)
        )
        if among is not None:
            statement = statement.where(in_list(sessions.c.session_id, among))
        return await self._database.read(scalars(statement))

    def mark_active(self, session_id: str) -> None:
        """Record, with a deferred write, that the client of a timed-out session came back."""
        self._set_later("revived", session_id, lapsed_s=None, seen_s=time.time())

    def mark_failed(self, session_id: str, failure: Mapping[str, Any] | None) -> None:
        """Record, with a deferred write, why a session has failed; None: it has not."""
        self._set_later("failed", session_id, failure=failure)

    def _set_later(self, what: str, session_id: str, **values: object) -> None:
        """Update a session with a deferred write, which replaces one of the same kind."""
        statement = sessions.update().where(sessions.c.session_id == session_id).values(**values)
        self._database.write_deferred(execute(statement), key=(what, session_id))

    async def failed_sessions(self, *, limit: int = MAX_FAILED) -> list[str]:
        """The sessions that have failed and may go on: those whose clients were heard of last."""
        statement = (
            sa.select(sessions.c.session_id)
            .where(sessions.c.failure.is_not(None), sessions.c.finished_s.is_(None))
            .order_by(sessions.c.seen_s.desc())
            .limit(limit)
        )
        return await self._database.read(scalars(statement))

    async def finish_session(self, session_id: str, reason: str, detail: str | None) -> None:
        """Finish a session; a repeat changes nothing."""
        statement = (
            sessions.update()
            .where(sessions.c.session_id == session_id, sessions.c.finished_s.is_(None))
            .values(finished_s=time.time(), finish_reason=reason, finish_detail=detail)
            .returning(sessions.c.owner)
        )
        details = {"session_id": session_id, "reason": reason}

        def operation(connection: sa.Connection) -> None:
            if (row := connection.execute(statement).first()) is not None:
                note_audit(connection, owner=row.owner, event="session.finished", details=details)

        # May use the disk reserve: data of a finished session can be deleted.
        await self._database.write(operation, reserve=True)

    async def list_ids(
        self, *, owner: str, limit: int, offset: int, published: bool = False
    ) -> list[str]:
        """
        Ids of an owner's sessions, newest first.

        With `published`, also sessions in which others published a checkpoint.
        """
        statement = (
            sa.select(sessions.c.session_id)
            .where(_readable(owner, published))
            .order_by(*_NEWEST_FIRST)
            .limit(limit)
            .offset(offset)
        )
        return await self._database.read_report(scalars(statement))

    async def details(
        self, session_id: str, *, reader: str, published: bool = False
    ) -> SessionDetails | None:
        """A session as `reader` may see it."""
        statement = _DETAILS.where(
            sessions.c.session_id == session_id, _readable(reader, published)
        )
        found = await self._database.read(one(SessionDetails, statement))
        return None if found is None else found.visible_to(reader)

    async def contents(
        self, session_id: str, *, reader: str, limit: int
    ) -> tuple[list[str], list[str]]:
        """
        Ids of the first models and samplers of a session, in order of creation.

        For another owner's session, only models with a published checkpoint.
        """
        shown = sa.or_(models.c.owner == reader, has_published_checkpoint(time.time()))
        of_models = (
            sa.select(models.c.model_id)
            .where(models.c.session_id == session_id, shown, was_created())
            .order_by(models.c.model_seq_id)
            .limit(limit)
        )
        of_samplers = (
            sa.select(samplers.c.sampling_session_id)
            .where(samplers.c.session_id == session_id, samplers.c.owner == reader)
            .order_by(samplers.c.sampling_session_seq_id)
            .limit(limit)
        )
        return await self._database.read_report(
            lambda connection: (
                list(connection.scalars(of_models)),
                list(connection.scalars(of_samplers)),
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
        """The next sessions that are `wanted`, newest first, as `owner` may see them."""
        readable = _readable(owner, published)
        # Ids only: the database sorts these rows.
        statement = sa.select(sessions.c.session_id, sessions.c.created_s)
        statement = statement.where(readable).order_by(*_NEWEST_FIRST)
        if session_id is not None:
            statement = statement.where(sessions.c.session_id == session_id)
        if after is not None:
            # Up to a microsecond too much; `_next_ids` compares exactly.
            statement = statement.where(sessions.c.created_s <= (after[0] + 1) / 1_000_000)

        def operation(connection: sa.Connection) -> SearchPage:
            found: list[SessionDetails] = []
            characters = 0
            ids = _next_ids(connection, statement, after)
            for row in _rows(connection, ids[:MAX_SEARCHED]):
                session = row.visible_to(owner)
                characters += metadata_characters(row.user_metadata)
                if wanted(session):
                    if len(found) == limit:
                        return SearchPage(sessions=found, next=found[-1].position)
                    found.append(session)
                if characters > MAX_SEARCHED_CHARACTERS:
                    return SearchPage(sessions=found, next=session.position)
            more = len(ids) > MAX_SEARCHED
            return SearchPage(sessions=found, next=session.position if more else None)

        return await self._database.read_report(operation)

    async def checkpoint_totals(
        self, session_ids: Collection[str], *, reader: str, now_s: float
    ) -> dict[str, CheckpointTotals]:
        """Checkpoint totals of these sessions; for other owners' only the published number."""
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
        stored = (
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

        def operation(connection: sa.Connection) -> dict[str, CheckpointTotals]:
            numbers = {row[0]: int(row[1]) for row in connection.execute(named)}
            sizes = {row[0]: int(row[1]) for row in connection.execute(stored)}
            return {
                one: CheckpointTotals(checkpoints=numbers.get(one, 0), size_bytes=sizes.get(one, 0))
                for one in session_ids
            }

        return await self._database.read_report(operation)

    async def set_project(self, session_id: str, project_id: str, *, owner: str) -> None:
        """Move a session, with everything in it, to a project."""
        statement = (
            sessions.update()
            .where(sessions.c.session_id == session_id)
            .values(project_id=project_id)
        )
        details = {"session_id": session_id, "project_id": project_id}

        def operation(connection: sa.Connection) -> None:
            connection.execute(statement)
            note_audit(connection, owner=owner, event="project.session_moved", details=details)

        await self._database.write(operation)

    async def spans(self, session_id: str) -> list[Span]:
        """The requests of a session that are still stored, oldest first."""
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
        found = await self._database.read_report(every(Span, statement))
        return found[::-1]


def _readable(owner: str, published: bool) -> sa.ColumnElement[bool]:
    """The sessions of this owner and, with `published`, sessions with published checkpoints."""
    own = sessions.c.owner == owner
    if not published:
        return own
    shared = sa.select(models.c.session_id).where(has_published_checkpoint(time.time()))
    return sa.or_(own, sessions.c.session_id.in_(shared))


def _position(created_s: float, session_id: str) -> tuple[int, str]:
    return round(created_s * 1_000_000), session_id


def _next_ids(
    connection: sa.Connection,
    statement: sa.Select[tuple[str, float]],
    after: tuple[int, str] | None,
) -> list[str]:
    """The ids that one search reads, and one more if there is one."""
    ids: list[str] = []
    options = {"yield_per": READ_BATCH}
    with connection.execute(statement, execution_options=options) as result:
        for row in result:
            if after is None or _position(row.created_s, row.session_id) < after:
                ids.append(row.session_id)
                if len(ids) > MAX_SEARCHED:
                    break
    return ids


def _rows(connection: sa.Connection, ids: list[str]) -> Iterator[SessionDetails]:
    for some in batches(ids):
        statement = _DETAILS.where(in_list(sessions.c.session_id, some))
        found = {one.session_id: one for one in every(SessionDetails, statement)(connection)}
        yield from (found[session_id] for session_id in some)
