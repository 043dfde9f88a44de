"""What was used, hour by hour: tokens as `tally` counted them, and checkpoints while they lasted."""

from dataclasses import dataclass

import sqlalchemy as sa

from tinkex.server.store.checkpoint_lists import within_metadata_budget
from tinkex.server.store.checkpoints import not_expired
from tinkex.server.store.database import Database
from tinkex.server.store.schema import (
    checkpoint_names,
    checkpoint_versions,
    models,
    sessions,
    usage,
)
from tinkex.server.store.sql_dialects import in_list


@dataclass(frozen=True, kw_only=True, slots=True)
class UsageRow:
    """So much of one thing in one hour."""

    hour: int
    session_id: str
    project_id: str | None
    base_model: str
    what: str
    amount: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredCheckpoint:
    """
    A checkpoint that was given a name, for as long as its files were kept.

    Saves without a name are the server's own affair: they are no checkpoints in any list, nobody
    can delete them, and they go by themselves when their sampler does.
    """

    session_id: str
    project_id: str | None
    base_model: str
    size_bytes: int
    since_s: float
    until_s: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ProjectStorage:
    """What the checkpoints of one project take."""

    project_id: str | None
    checkpoints: int
    size_bytes: int


_STORED = sa.select(
    models.c.session_id,
    sessions.c.project_id,
    models.c.base_model,
    checkpoint_versions.c.size_bytes,
    checkpoint_versions.c.created_s.label("since_s"),
    checkpoint_versions.c.discarded_s.label("until_s"),
)


class Usage:
    """The rows of what was used."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def between(self, *, owner: str, first_hour: int, end_hour: int, most: int) -> list[UsageRow]:
        """What an owner used from one hour on and before another, by hour; the first rows."""
        statement = (
            sa.select(
                usage.c.hour,
                usage.c.session_id,
                sessions.c.project_id,
                usage.c.base_model,
                usage.c.what,
                usage.c.amount,
            )
            .join_from(usage, sessions, usage.c.session_id == sessions.c.session_id, isouter=True)
            .where(usage.c.owner == owner, usage.c.hour >= first_hour, usage.c.hour < end_hour)
            .order_by(usage.c.hour, usage.c.session_id, usage.c.base_model, usage.c.what)
            .limit(most)
        )
        return await self._database.read_report(
            lambda connection: [UsageRow(**row._mapping) for row in connection.execute(statement)]
        )

    async def stored(
        self, *, owner: str, since_s: float, until_s: float, most: int
    ) -> list[StoredCheckpoint]:
        """The owner's checkpoints whose files were there at some moment of a time; the first."""
        versions = checkpoint_versions.c
        statement = (
            _STORED.join_from(checkpoint_versions, models, versions.model_id == models.c.model_id)
            .join(sessions, models.c.session_id == sessions.c.session_id)
            .where(
                versions.owner == owner,
                versions.name.is_not(None),
                versions.created_s < until_s,
                sa.or_(versions.discarded_s.is_(None), versions.discarded_s > since_s),
            )
            .order_by(versions.created_s)
            .limit(most)
        )
        return await self._database.read_report(
            lambda connection: [StoredCheckpoint(**row._mapping) for row in connection.execute(statement)]
        )

    async def current(
        self, *, owner: str, project_id: str | None, now_s: float, most: int
    ) -> list[ProjectStorage]:
        """By project, the owner's checkpoints as they are listed now, each once for its name."""
        versions = checkpoint_versions.c
        statement = (
            sa.select(
                sessions.c.project_id,
                sa.func.count().label("checkpoints"),
                sa.func.sum(versions.size_bytes).label("size_bytes"),
            )
            .join_from(
                checkpoint_names,
                checkpoint_versions,
                checkpoint_names.c.version_id == versions.version_id,
            )
            .join(models, versions.model_id == models.c.model_id)
            .join(sessions, models.c.session_id == sessions.c.session_id)
            .where(versions.owner == owner, not_expired(now_s))
            .group_by(sessions.c.project_id)
            .order_by(sa.func.coalesce(sessions.c.project_id, ""))
            .limit(most)
        )
        if project_id is not None:
            statement = statement.where(sessions.c.project_id == project_id)
        return await self._database.read_report(
            lambda connection: [
                ProjectStorage(
                    project_id=row.project_id,
                    checkpoints=row.checkpoints,
                    size_bytes=int(row.size_bytes),
                )
                for row in connection.execute(statement)
            ]
        )

    async def metadata(self, session_ids: list[str]) -> dict[str, dict[str, object]]:
        """What the clients of these sessions said about them."""
        statement = sa.select(sessions.c.session_id, sessions.c.user_metadata).where(
            in_list(sessions.c.session_id, session_ids)
        )
        return await self._database.read_report(
            lambda connection: {
                session_id: dict(metadata)
                for session_id, metadata in within_metadata_budget(
                    ((row.session_id, row.user_metadata) for row in connection.execute(statement)),
                    "Ask about a shorter time.",
                )
            }
        )
