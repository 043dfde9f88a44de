"""
Usage reports: tokens by hour, as `request_rows` counted them, and stored checkpoints over time.
"""

from dataclasses import dataclass

import sqlalchemy as sa

from tinkex.server.store.checkpoint_catalog import within_metadata_budget
from tinkex.server.store.database import Database, columns, every, not_expired
from tinkex.server.store.schema import (
    api_keys,
    checkpoint_names,
    checkpoint_versions,
    models,
    sessions,
    usage,
)
from tinkex.server.store.sql_dialects import in_list


@dataclass(frozen=True, kw_only=True, slots=True)
class UsageRow:
    """The amount of one kind of tokens in one hour."""

    hour: int
    session_id: str
    project_id: str | None
    base_model: str
    what: str
    amount: int


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyUsage:
    """The tokens of one kind that the requests of a key used."""

    owner: str
    #: 0 for usage without a key.
    key_id: int
    base_model: str
    what: str
    amount: int


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyLabel:
    """What a list shows of a key, also of a revoked one."""

    key_id: int
    hint: str
    name: str
    expires_s: float | None
    revoked_s: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredCheckpoint:
    """
    A named checkpoint, for as long as its files were stored.

    Unnamed saves do not count: they are in no list, users cannot delete them, and the server
    deletes them with their sampler.
    """

    session_id: str
    project_id: str | None
    base_model: str
    size_bytes: int
    since_s: float
    until_s: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ProjectStorage:
    """The number and size of the checkpoints of one project."""

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
    """Reads of the usage rows."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def between(
        self, *, owner: str, first_hour: int, end_hour: int, limit: int
    ) -> list[UsageRow]:
        """An owner's usage in [first_hour, end_hour), by hour; at most `limit` rows."""
        by = (usage.c.hour, usage.c.session_id, usage.c.base_model, usage.c.what)
        statement = (
            sa.select(
                usage.c.hour,
                usage.c.session_id,
                sessions.c.project_id,
                usage.c.base_model,
                usage.c.what,
                sa.func.sum(usage.c.amount).label("amount"),
            )
            .join_from(usage, sessions, usage.c.session_id == sessions.c.session_id, isouter=True)
            .where(usage.c.owner == owner, usage.c.hour >= first_hour, usage.c.hour < end_hour)
            # The rows of all writers together.
            .group_by(*by, sessions.c.project_id)
            .order_by(*by)
            .limit(limit)
        )
        return await self._database.read_report(
            lambda connection: [
                UsageRow(**{**row._mapping, "amount": int(row.amount)})
                for row in connection.execute(statement)
            ]
        )

    async def by_key(
        self, *, owner: str | None, first_hour: int, limit: int
    ) -> tuple[list[KeyUsage], dict[int, KeyLabel]]:
        """Usage since an hour of one owner or of all, by key, and the keys."""
        by = (usage.c.owner, usage.c.key_id, usage.c.base_model, usage.c.what)
        chosen = [usage.c.hour >= first_hour]
        if owner is not None:
            chosen.append(usage.c.owner == owner)
        statement = (
            sa.select(*by, sa.func.sum(usage.c.amount).label("amount"))
            .where(*chosen)
            .group_by(*by)
            .order_by(*by)
            .limit(limit)
        )
        labels = sa.select(*columns(KeyLabel, api_keys)).where(
            api_keys.c.key_id.in_(sa.select(usage.c.key_id).where(*chosen))
        )

        def operation(
            connection: sa.Connection,
        ) -> tuple[list[KeyUsage], dict[int, KeyLabel]]:
            used = [
                KeyUsage(**{**row._mapping, "amount": int(row.amount)})
                for row in connection.execute(statement)
            ]
            found = every(KeyLabel, labels)(connection)
            return used, {one.key_id: one for one in found}

        return await self._database.read_report(operation)

    async def stored(
        self, *, owner: str, since_s: float, until_s: float, limit: int
    ) -> list[StoredCheckpoint]:
        """The owner's checkpoints that were stored at some time in a range; at most `limit`."""
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
            .limit(limit)
        )
        return await self._database.read_report(every(StoredCheckpoint, statement))

    async def current(
        self, *, owner: str, project_id: str | None, now_s: float, limit: int
    ) -> list[ProjectStorage]:
        """
        Number and size of the owner's listed checkpoints, by project.

        If two names refer to the same files, both are counted.
        """
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
            .limit(limit)
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
        """The user metadata of these sessions."""
        statement = sa.select(sessions.c.session_id, sessions.c.user_metadata).where(
            in_list(sessions.c.session_id, session_ids)
        )
        return await self._database.read_report(
            lambda connection: {
                session_id: dict(metadata)
                for session_id, metadata in within_metadata_budget(
                    ((row.session_id, row.user_metadata) for row in connection.execute(statement)),
                    "Request a shorter time.",
                )
            }
        )
