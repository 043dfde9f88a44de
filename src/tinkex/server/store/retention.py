"""
Retention: deletes rows that are no longer needed, then the files that only they referred to.

Files of a session that the database does not know are not deleted: see `database_identity`.
"""

import functools
import logging
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from tinkex.server.store import blob_cache
from tinkex.server.store.blob_cache import BlobCache
from tinkex.server.store.blobs import PREFIX_DEPTHS, Files
from tinkex.server.store.database import Database, every, note_audit, scalars, session_ended
from tinkex.server.store.database_identity import session_ids_in, stored_sessions
from tinkex.server.store.schema import (
    Status,
    audit,
    checkpoint_names,
    checkpoint_versions,
    completions,
    models,
    older_snapshots,
    requests,
    samplers,
    sessions,
    snapshots,
    step_metrics,
    telemetry,
)
from tinkex.server.store.snapshots import drop_older, truncate_log
from tinkex.server.store.sql_dialects import in_list
from tinkex.wire.checkpoints import tinker_path

log = logging.getLogger("tinkex.server.store")

# Rows per transaction.
BATCH_ROWS = 500
# Free pages of the SQLite file that one call returns to the file system.
PAGES_PER_CALL = 1000
# Free pages that stay for the next requests.
PAGES_RESERVED = 250


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointName:
    """What `keep_last` needs to know about a checkpoint's name."""

    model_id: str
    kind: str
    name: str
    saved_s: float
    public: bool


class Retention:
    """Every call does a bounded amount of work, and can be repeated after a crash."""

    def __init__(self, database: Database, files: Files, cache: BlobCache) -> None:
        self._database = database
        self._files = files
        self._cache = cache

    # -- requests ----------------------------------------------------------------------------

    async def drop_results(
        self, *, fetched_before_s: float, unfetched_before_s: float, abandoned_before_s: float
    ) -> list[str]:
        """
        Delete the results of some expired requests; returns the ids of those requests.

        The row is deleted too, unless recovery may need it to rebuild its model.
        """
        old = sa.or_(
            requests.c.fetched_s < fetched_before_s,
            sa.and_(requests.c.fetched_s.is_(None), requests.c.finished_s < unfetched_before_s),
        )
        has_result = sa.or_(requests.c.result.is_not(None), requests.c.result_place.is_not(None))
        # The bound on `finished_s` follows from the others; it makes SQLite use the index.
        latest_s = max(fetched_before_s, unfetched_before_s)
        needed = _needed(abandoned_before_s)
        statement = (
            sa.select(
                requests.c.request_id,
                requests.c.model_id,
                requests.c.payload_place,
                requests.c.result_place,
                requests.c.created_s,
                needed.label("needed"),
            )
            .select_from(_WITH_SESSION)
            .where(requests.c.finished_s < latest_s, old, sa.or_(has_result, sa.not_(needed)))
            .limit(BATCH_ROWS)
        )

        def operation(connection: sa.Connection) -> tuple[list[str], list[str]]:
            rows = connection.execute(statement).all()
            stripped = [row.request_id for row in rows if row.needed]
            deleted = [row.request_id for row in rows if not row.needed]
            connection.execute(
                requests.update()
                .where(in_list(requests.c.request_id, stripped))
                .values(result=None, result_place=None)
            )
            connection.execute(requests.delete().where(in_list(requests.c.request_id, deleted)))
            newest: dict[str, float] = {}
            for row in rows:
                if row.model_id is not None and not row.needed:
                    newest[row.model_id] = max(newest.get(row.model_id, 0.0), row.created_s)
            for model_id, last_s in newest.items():
                _note_last_request(connection, model_id, last_s)
            keys = [row.result_place for row in rows]
            keys += [row.payload_place for row in rows if not row.needed]
            return stripped + deleted, [key for key in keys if key is not None]

        request_ids, keys = await self._database.write(operation)
        await self._remove(keys)
        return request_ids

    async def drop_events(
        self, *, completions_before_s: float, telemetry_before_s: float, audit_before_s: float
    ) -> None:
        def operation(connection: sa.Connection) -> None:
            for table, before_s in (
                (completions, completions_before_s),
                (telemetry, telemetry_before_s),
                (audit, audit_before_s),
            ):
                connection.execute(table.delete().where(table.c.at_s < before_s))

        await self._database.write(operation)

    # -- steps -------------------------------------------------------------------------------

    async def runs_with_old_steps(self, *, before_s: float, abandoned_before_s: float) -> list[str]:
        """Some runs whose session has ended and whose last step, of several, is this old."""
        last = (
            sa.select(step_metrics.c.number)
            .where(step_metrics.c.model_id == models.c.model_id, _STEP_FINISHED)
            .order_by(step_metrics.c.number.desc())
            .limit(1)
            .scalar_subquery()
        )
        newest, older = step_metrics.alias("newest"), step_metrics.alias("older")
        has_older = sa.exists().where(
            older.c.model_id == models.c.model_id, older.c.number < newest.c.number
        )
        statement = (
            sa.select(models.c.model_id)
            .join(sessions, sessions.c.session_id == models.c.session_id)
            .join(newest, sa.and_(newest.c.model_id == models.c.model_id, newest.c.number == last))
            .where(
                # Follows from the age of the step; saves looking for it in newer runs.
                models.c.created_s < before_s,
                newest.c.finished_s < before_s,
                session_ended(abandoned_before_s),
                has_older,
            )
            .limit(BATCH_ROWS)
        )
        return await self._database.read(scalars(statement))

    async def drop_steps(self, model_id: str) -> int:
        """Delete some steps of a run, but not the last: lists of runs show it. Returns how many."""
        of_run = step_metrics.c.model_id == model_id
        number = step_metrics.c.number
        last = sa.select(sa.func.max(number)).where(of_run, _STEP_FINISHED).scalar_subquery()
        oldest = sa.select(number).where(of_run, number < last).order_by(number).limit(BATCH_ROWS)

        def operation(connection: sa.Connection) -> int:
            found = connection.scalars(oldest).all()
            if found:
                connection.execute(step_metrics.delete().where(of_run, number <= found[-1]))
            return len(found)

        return await self._database.write(operation)

    # -- snapshots ---------------------------------------------------------------------------

    async def models_without_snapshot(
        self,
        *,
        inactive_before_s: float,
        abandoned_before_s: float,
        limit: int,
        homes: Sequence[str] | None = None,
        base_model: str | None = None,
    ) -> list[str]:
        """
        Models of inactive sessions that have steps after their newest snapshot.

        With `homes`, only those of these workers; with a base model, only those of it.
        """
        newest = sa.func.coalesce(snapshots.c.seq_id, -1)
        behind = (
            sa.select(requests.c.request_id)
            .where(
                requests.c.model_id == models.c.model_id,
                requests.c.seq_id > newest,
                requests.c.status == Status.DONE,
            )
            .exists()
        )
        statement = (
            sa.select(models.c.model_id)
            .join(sessions, sessions.c.session_id == models.c.session_id)
            .outerjoin(snapshots, snapshots.c.model_id == models.c.model_id)
            .where(
                sa.not_(session_ended(abandoned_before_s)),
                sessions.c.seen_s < inactive_before_s,
                behind,
            )
            .order_by(sessions.c.seen_s)
            .limit(limit)
        )
        if homes is not None:
            statement = statement.where(in_list(models.c.home, homes))
        if base_model is not None:
            statement = statement.where(models.c.base_model == base_model)
        return await self._database.read(scalars(statement))

    async def drop_snapshots(self, *, abandoned_before_s: float) -> None:
        """Delete snapshots of models whose session has ended."""
        waiting = (
            sa.select(requests.c.request_id)
            .where(requests.c.model_id == snapshots.c.model_id)
            .where(requests.c.status == Status.WAITING)
            .exists()
        )
        statement = (
            sa.select(snapshots.c.model_id, snapshots.c.place)
            .join(models, models.c.model_id == snapshots.c.model_id)
            .join(sessions, sessions.c.session_id == models.c.session_id)
            .where(session_ended(abandoned_before_s), sa.not_(waiting))
            .limit(BATCH_ROWS)
        )

        def operation(connection: sa.Connection) -> list[str]:
            rows = connection.execute(statement).all()
            gone = [row.model_id for row in rows]
            keys = [row.place for row in rows]
            for model_id in gone:
                keys += drop_older(connection, model_id)
            connection.execute(snapshots.delete().where(in_list(snapshots.c.model_id, gone)))
            return keys

        await self._remove(await self._database.write(operation))

    async def drop_older_snapshots(self, *, before_s: float) -> None:
        """Delete the fallback of snapshots saved before `before_s`, and the log up to them."""
        statement = (
            sa.select(snapshots.c.model_id, snapshots.c.seq_id)
            .join(older_snapshots, older_snapshots.c.model_id == snapshots.c.model_id)
            .where(snapshots.c.created_s < before_s)
            .limit(BATCH_ROWS)
        )

        def operation(connection: sa.Connection) -> list[str]:
            keys = []
            for row in connection.execute(statement).all():
                keys += drop_older(connection, row.model_id)
                keys += truncate_log(connection, row.model_id, up_to=row.seq_id)
            return keys

        await self._remove(await self._database.write(operation))

    # -- checkpoints -------------------------------------------------------------------------

    async def drop_expired_names(self, *, now_s: float) -> None:
        statement = checkpoint_names.delete().where(checkpoint_names.c.expires_s <= now_s)
        await self._database.write(
            lambda connection: _drop_named(connection, statement, reason="expired"), reserve=True
        )

    async def names_over_limit(self, *, keep_last: int) -> list[CheckpointName]:
        """All names of runs that have more than `keep_last` of a kind."""
        columns = [checkpoint_names.c[name] for name in CheckpointName.__dataclass_fields__]
        crowded = (
            sa.select(checkpoint_names.c.model_id, checkpoint_names.c.kind)
            .group_by(checkpoint_names.c.model_id, checkpoint_names.c.kind)
            .having(sa.func.count() > keep_last)
            .limit(BATCH_ROWS)
            .subquery()
        )
        statement = sa.select(*columns).join(
            crowded,
            sa.and_(
                crowded.c.model_id == checkpoint_names.c.model_id,
                crowded.c.kind == checkpoint_names.c.kind,
            ),
        )
        return await self._database.read(every(CheckpointName, statement))

    async def drop_names(self, names: Iterable[CheckpointName]) -> None:
        def operation(connection: sa.Connection) -> None:
            for name in names:
                statement = checkpoint_names.delete().where(
                    checkpoint_names.c.model_id == name.model_id,
                    checkpoint_names.c.kind == name.kind,
                    checkpoint_names.c.name == name.name,
                    # Not a newer checkpoint with this name.
                    checkpoint_names.c.saved_s == name.saved_s,
                )
                _drop_named(connection, statement, reason="keep_last")

        await self._database.write(operation, reserve=True)

    async def drop_versions(self, *, abandoned_before_s: float, owner: str | None = None) -> None:
        """Discard versions, of one owner or all, that no name, open sampler or recovery needs."""
        version_id = checkpoint_versions.c.version_id
        named = sa.select(checkpoint_names.c.name).where(
            checkpoint_names.c.version_id == version_id
        )
        sampled = (
            sa.select(samplers.c.sampling_session_id)
            .join(sessions, sessions.c.session_id == samplers.c.session_id)
            .where(samplers.c.version_id == version_id, sa.not_(session_ended(abandoned_before_s)))
        )
        requested = (
            sa.select(requests.c.request_id)
            .select_from(_WITH_SESSION)
            .where(
                requests.c.version_id == version_id,
                sa.or_(
                    requests.c.status == Status.WAITING,
                    sa.and_(requests.c.kind == "load_weights", _needed(abandoned_before_s)),
                ),
            )
        )
        statement = (
            sa.select(version_id, checkpoint_versions.c.place)
            .where(
                checkpoint_versions.c.discarded_s.is_(None),
                sa.not_(named.exists()),
                sa.not_(sampled.exists()),
                sa.not_(requested.exists()),
            )
            .limit(BATCH_ROWS)
        )

        if owner is not None:
            statement = statement.where(checkpoint_versions.c.owner == owner)

        def operation(connection: sa.Connection) -> list[str]:
            rows = connection.execute(statement).all()
            gone = [row.version_id for row in rows]
            connection.execute(
                checkpoint_versions.update()
                .where(in_list(version_id, gone))
                .values(discarded_s=time.time())
            )
            return [row.place for row in rows]

        await self._remove(await self._database.write(operation))

    # -- files -------------------------------------------------------------------------------

    async def delete_orphans(self, *, before_s: float) -> int:
        """Delete old files that no row refers to; returns how many."""
        deleted = 0
        session_ids = await self._database.with_folder(lambda: session_ids_in(self._files))
        stored = await self._database.read(
            lambda connection: stored_sessions(connection, session_ids)
        )
        if stored.unknown_sessions:
            log.warning(
                "the storage has files of %d sessions that are not in this database; they are not "
                "deleted. Run `tinkex doctor` for details.",
                len(stored.unknown_sessions),
            )
        for prefix, depth in PREFIX_DEPTHS.items():
            keys = await self._database.with_folder(
                functools.partial(self._files.list_older, prefix, depth, before_s=before_s)
            )
            for start in range(0, len(keys), BATCH_ROWS):
                some = keys[start : start + BATCH_ROWS]
                known = await self._known(prefix, some)
                orphans = [key for key in some if key not in known and stored.may_delete(key)]
                await self._remove(orphans)
                deleted += len(orphans)
        return deleted

    async def trim_cache(self, *, limit_bytes: int, now_s: float) -> list[str]:
        """Delete local copies of stored folders beyond the limit; returns their keys."""
        if not self._cache.enabled:
            return []
        copies = await self._database.with_folder(self._cache.copies)
        stored: set[str] = set()
        for prefix in blob_cache.PREFIXES:
            keys = [copy.key for copy in copies if copy.key.startswith(f"{prefix}/")]
            stored |= await self._known(prefix, keys)
        gone = blob_cache.to_delete(copies, stored=stored, limit_bytes=limit_bytes, now_s=now_s)
        for key in gone:
            await self._database.with_folder(functools.partial(self._cache.delete, key))
        return gone

    async def _known(self, prefix: str, keys: Collection[str]) -> set[str]:
        columns = {
            "payloads": requests.c.payload_place,
            "results": requests.c.result_place,
            "checkpoints": checkpoint_versions.c.place,
            "snapshots": snapshots.c.place,
        }
        statement: sa.Select[Any] | sa.CompoundSelect[Any]
        statement = sa.select(columns[prefix]).where(in_list(columns[prefix], keys))
        if prefix == "checkpoints":
            statement = statement.where(checkpoint_versions.c.discarded_s.is_(None))
        elif prefix == "snapshots":
            older = older_snapshots.c.place
            statement = statement.union(sa.select(older).where(in_list(older, keys)))
        return await self._database.read(lambda connection: set(connection.scalars(statement)))

    async def free_pages(self) -> int:
        """Return some free pages of the SQLite file to the file system; returns how many."""

        def operation(connection: sa.Connection) -> int:
            if connection.dialect.name == "sqlite":
                free: int = connection.exec_driver_sql("PRAGMA freelist_count").scalar_one()
                pages = min(PAGES_PER_CALL, max(0, free - PAGES_RESERVED))
                # Python's driver runs one step of this statement, which frees one page.
                for _ in range(pages):
                    connection.exec_driver_sql("PRAGMA incremental_vacuum(1)")
                return pages
            return 0

        return await self._database.write(operation)

    async def _remove(self, keys: Sequence[str]) -> None:
        if keys:
            await self._database.with_folder(lambda: self._remove_all(keys))

    def _remove_all(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._files.remove(key)
            if self._cache.enabled:
                self._cache.delete(key)


_WITH_SESSION = (
    requests.outerjoin(models, models.c.model_id == requests.c.model_id)
    .outerjoin(sessions, sessions.c.session_id == models.c.session_id)
    .outerjoin(snapshots, snapshots.c.model_id == requests.c.model_id)
    .outerjoin(older_snapshots, older_snapshots.c.model_id == requests.c.model_id)
)


_STEP_FINISHED = step_metrics.c.finished_s.is_not(None)

_OTHERS = requests.alias("others")
_WAITS = sa.select(_OTHERS.c.request_id).where(
    _OTHERS.c.model_id == requests.c.model_id, _OTHERS.c.status == Status.WAITING
)


def _needed(abandoned_before_s: float) -> sa.ColumnElement[bool]:
    """SQL: recovery may need the step, or it has the error of a model that was not created."""
    rebuilds = sa.and_(
        requests.c.model_id.is_not(None),
        requests.c.seq_id.is_not(None),
        requests.c.seq_id > sa.func.coalesce(older_snapshots.c.seq_id, snapshots.c.seq_id, -1),
        # Requests accepted before the session ended still run.
        sa.or_(sa.not_(session_ended(abandoned_before_s)), _WAITS.exists()),
    )
    # Without this row, a model whose creation failed would look like a run.
    refuses = sa.and_(
        requests.c.model_id.is_not(None),
        requests.c.seq_id == 0,
        requests.c.status == Status.FAILED,
    )
    return sa.or_(rebuilds, refuses)


def _drop_named(connection: sa.Connection, statement: sa.Delete, *, reason: str) -> None:
    """Delete names, with an audit entry for their owner."""
    key = (checkpoint_names.c.model_id, checkpoint_names.c.kind, checkpoint_names.c.name)
    gone = connection.execute(statement.returning(*key)).all()
    for model_id, kind, name in gone:
        owner = connection.scalar(sa.select(models.c.owner).where(models.c.model_id == model_id))
        if owner is not None:
            path = tinker_path(model_id, kind, name)
            details = {"model_id": model_id, "tinker_path": path, "reason": reason}
            note_audit(connection, owner=owner, event="checkpoint.deleted", details=details)


def _note_last_request(connection: sa.Connection, model_id: str, last_s: float) -> None:
    connection.execute(
        models.update()
        .where(
            models.c.model_id == model_id,
            sa.or_(models.c.last_request_s.is_(None), models.c.last_request_s < last_s),
        )
        .values(last_request_s=last_s)
    )
