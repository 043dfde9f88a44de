"""What may be deleted, and deleting it: rows first, then the files that only they pointed to."""

import functools
import logging
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from tinkex.server.store.blobs import PREFIX_DEPTHS, Files
from tinkex.server.store.database import Database, DatabaseRefused
from tinkex.server.store.events import note_audit
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
    telemetry,
)
from tinkex.server.store.snapshots import truncate_log, drop_older
from tinkex.server.store.sql_dialects import in_list

log = logging.getLogger("tinkex.server.store")

# Parameters of one statement; every database takes as many.
BATCH_ROWS = 500
# Pages given back to the system at a time.
PAGES_PER_CALL = 1000
# Those that the next requests need anyway stay.
PAGES_RESERVED = 250


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointName:
    """A checkpoint's name, as far as keeping it goes."""

    model_id: str
    kind: str
    name: str
    saved_s: float
    public: bool


class Retention:
    """Every call does a bounded piece of work, and can be made again after a crash in it."""

    def __init__(self, database: Database, files: Files, folder: Path) -> None:
        self._database = database
        self._files = files
        #: Checkpoints are here too when the store is elsewhere.
        self._cache = None if files.local is not None else folder

    # -- requests ----------------------------------------------------------------------------

    async def drop_results(
        self, *, fetched_before_s: float, unfetched_before_s: float, abandoned_before_s: float
    ) -> list[str]:
        """
        Some requests whose time has come, without their results from now on.

        The row goes too, unless its model may have to be built again from it.
        """
        old = sa.or_(
            requests.c.fetched_s < fetched_before_s,
            sa.and_(requests.c.fetched_s.is_(None), requests.c.finished_s < unfetched_before_s),
        )
        has_result = sa.or_(requests.c.result.is_not(None), requests.c.result_place.is_not(None))
        # The bound on `finished_s` is implied by the others, and finds the index.
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

        def act(connection: sa.Connection) -> tuple[list[str], list[str]]:
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
            places = [row.result_place for row in rows]
            places += [row.payload_place for row in rows if not row.needed]
            return stripped + deleted, [place for place in places if place is not None]

        request_ids, places = await self._database.write(act)
        await self._remove(places)
        return request_ids

    async def drop_events(
        self, *, completions_before_s: float, telemetry_before_s: float, audit_before_s: float
    ) -> None:
        def act(connection: sa.Connection) -> None:
            for table, before_s in (
                (completions, completions_before_s),
                (telemetry, telemetry_before_s),
                (audit, audit_before_s),
            ):
                connection.execute(table.delete().where(table.c.at_s < before_s))

        await self._database.write(act)

    # -- snapshots ---------------------------------------------------------------------------

    async def models_without_snapshot(
        self, *, silent_before_s: float, abandoned_before_s: float, most: int
    ) -> list[str]:
        """Models of silent sessions whose log has steps that no snapshot is past."""
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
            .where(sa.not_(session_ended(abandoned_before_s)), sessions.c.seen_s < silent_before_s, behind)
            .order_by(sessions.c.seen_s)
            .limit(most)
        )
        return await self._database.read(lambda connection: list(connection.scalars(statement)))

    async def drop_snapshots(self, *, abandoned_before_s: float) -> None:
        """Snapshots of models that nobody can go on with."""
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

        def act(connection: sa.Connection) -> list[str]:
            rows = connection.execute(statement).all()
            gone = [row.model_id for row in rows]
            places = [row.place for row in rows]
            for model_id in gone:
                places += drop_older(connection, model_id)
            connection.execute(snapshots.delete().where(in_list(snapshots.c.model_id, gone)))
            return places

        await self._remove(await self._database.write(act))

    async def drop_older_snapshots(self, *, before_s: float) -> None:
        """The way back behind a snapshot that has been the newest since then."""
        statement = (
            sa.select(snapshots.c.model_id, snapshots.c.seq_id)
            .join(older_snapshots, older_snapshots.c.model_id == snapshots.c.model_id)
            .where(snapshots.c.created_s < before_s)
            .limit(BATCH_ROWS)
        )

        def act(connection: sa.Connection) -> list[str]:
            places = []
            for row in connection.execute(statement).all():
                places += drop_older(connection, row.model_id)
                places += truncate_log(connection, row.model_id, up_to=row.seq_id)
            return places

        await self._remove(await self._database.write(act))

    # -- checkpoints -------------------------------------------------------------------------

    async def drop_expired_names(self, *, now_s: float) -> None:
        statement = checkpoint_names.delete().where(checkpoint_names.c.expires_s <= now_s)
        await self._database.write(
            lambda connection: _drop_named(connection, statement, reason="expired"), reserve=True
        )

    async def names_over_limit(self, *, keep_last: int) -> list[CheckpointName]:
        """All names of runs that have more of a kind than are to be kept."""
        columns = [checkpoint_names.c[name] for name in CheckpointName.__dataclass_fields__]
        crowd = (
            sa.select(checkpoint_names.c.model_id, checkpoint_names.c.kind)
            .group_by(checkpoint_names.c.model_id, checkpoint_names.c.kind)
            .having(sa.func.count() > keep_last)
            .limit(BATCH_ROWS)
            .subquery()
        )
        statement = sa.select(*columns).join(
            crowd,
            sa.and_(
                crowd.c.model_id == checkpoint_names.c.model_id,
                crowd.c.kind == checkpoint_names.c.kind,
            ),
        )
        return await self._database.read(
            lambda connection: [CheckpointName(**row._mapping) for row in connection.execute(statement)]
        )

    async def drop_names(self, names: Iterable[CheckpointName]) -> None:
        def act(connection: sa.Connection) -> None:
            for name in names:
                statement = checkpoint_names.delete().where(
                    checkpoint_names.c.model_id == name.model_id,
                    checkpoint_names.c.kind == name.kind,
                    checkpoint_names.c.name == name.name,
                    # Not the one that has taken its place meanwhile.
                    checkpoint_names.c.saved_s == name.saved_s,
                )
                _drop_named(connection, statement, reason="keep_last")

        await self._database.write(act, reserve=True)

    async def drop_versions(self, *, abandoned_before_s: float, owner: str | None = None) -> None:
        """Saves, of this owner or of all, that no name, open sampler or rebuilt model can mean."""
        version_id = checkpoint_versions.c.version_id
        named = sa.select(checkpoint_names.c.name).where(
            checkpoint_names.c.version_id == version_id
        )
        sampled = (
            sa.select(samplers.c.sampling_session_id)
            .join(sessions, sessions.c.session_id == samplers.c.session_id)
            .where(samplers.c.version_id == version_id, sa.not_(session_ended(abandoned_before_s)))
        )
        asked = (
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
                sa.not_(asked.exists()),
            )
            .limit(BATCH_ROWS)
        )

        if owner is not None:
            statement = statement.where(checkpoint_versions.c.owner == owner)

        def act(connection: sa.Connection) -> list[str]:
            rows = connection.execute(statement).all()
            gone = [row.version_id for row in rows]
            connection.execute(
                checkpoint_versions.update()
                .where(in_list(version_id, gone))
                .values(discarded_s=time.time())
            )
            return [row.place for row in rows]

        await self._remove(await self._database.write(act))

    # -- files -------------------------------------------------------------------------------

    async def delete_orphans(self, *, before_s: float) -> int:
        """Delete files that no row points to and that nobody is about to; how many."""
        swept = 0
        named = await self._database.with_folder(lambda: session_ids_in(self._files))
        ours = await self._database.read(lambda connection: storage_ownership(connection, named))
        if ours.unknown_sessions:
            log.warning(
                "the storage has files of %d sessions that this database does not know; none of "
                "them is deleted. `tinkex doctor` says more.",
                len(ours.unknown_sessions),
            )
        for room, depth in PREFIX_DEPTHS.items():
            places = await self._database.with_folder(
                functools.partial(self._files.list_older, room, depth, before_s=before_s)
            )
            for start in range(0, len(places), BATCH_ROWS):
                some = places[start : start + BATCH_ROWS]
                known = await self._known(room, some)
                lost = [place for place in some if place not in known and ours.is_orphan(place)]
                await self._remove(lost)
                swept += len(lost)
        return swept

    async def _known(self, room: str, places: Collection[str]) -> set[str]:
        columns = {
            "payloads": requests.c.payload_place,
            "results": requests.c.result_place,
            "checkpoints": checkpoint_versions.c.place,
            "snapshots": snapshots.c.place,
        }
        statement: sa.Select[Any] | sa.CompoundSelect[Any]
        statement = sa.select(columns[room]).where(in_list(columns[room], places))
        if room == "checkpoints":
            statement = statement.where(checkpoint_versions.c.discarded_s.is_(None))
        elif room == "snapshots":
            older = older_snapshots.c.place
            statement = statement.union(sa.select(older).where(in_list(older, places)))
        return await self._database.read(lambda connection: set(connection.scalars(statement)))

    async def free_pages(self) -> int:
        """Give some free pages of the database back to the system; how many."""

        def act(connection: sa.Connection) -> int:
            if connection.dialect.name == "sqlite":
                free: int = connection.exec_driver_sql("PRAGMA freelist_count").scalar_one()
                pages = min(PAGES_PER_CALL, max(0, free - PAGES_RESERVED))
                # Python's driver takes one step of this statement, and a step is a page.
                for _ in range(pages):
                    connection.exec_driver_sql("PRAGMA incremental_vacuum(1)")
                return pages
            return 0

        return await self._database.write(act)

    async def _remove(self, places: Sequence[str]) -> None:
        if places:
            await self._database.with_folder(lambda: self._remove_all(places))

    def _remove_all(self, places: Sequence[str]) -> None:
        for place in places:
            self._files.remove(place)
            if self._cache is not None:
                Files(str(self._cache)).remove(place)


_WITH_SESSION = (
    requests.outerjoin(models, models.c.model_id == requests.c.model_id)
    .outerjoin(sessions, sessions.c.session_id == models.c.session_id)
    .outerjoin(snapshots, snapshots.c.model_id == requests.c.model_id)
    .outerjoin(older_snapshots, older_snapshots.c.model_id == requests.c.model_id)
)


_OTHERS = requests.alias("others")
_WAITS = sa.select(_OTHERS.c.request_id).where(
    _OTHERS.c.model_id == requests.c.model_id, _OTHERS.c.status == Status.WAITING
)


def session_ended(abandoned_before_s: float) -> sa.ColumnElement[bool]:
    """Sessions in which nothing new can happen."""
    return sa.or_(sessions.c.finished_s.is_not(None), sessions.c.seen_s < abandoned_before_s)


def _needed(abandoned_before_s: float) -> sa.ColumnElement[bool]:
    """Steps that their model may have to be built again from, or that tell why there is none."""
    rebuilds = sa.and_(
        requests.c.model_id.is_not(None),
        requests.c.seq_id.is_not(None),
        requests.c.seq_id > sa.func.coalesce(older_snapshots.c.seq_id, snapshots.c.seq_id, -1),
        # What was accepted before the end is still run.
        sa.or_(sa.not_(session_ended(abandoned_before_s)), _WAITS.exists()),
    )
    # Without it, a model that was never made would look like a run.
    refuses = sa.and_(
        requests.c.model_id.is_not(None),
        requests.c.seq_id == 0,
        requests.c.status == Status.FAILED,
    )
    return sa.or_(rebuilds, refuses)


def _drop_named(connection: sa.Connection, statement: sa.Delete, *, reason: str) -> None:
    """Delete names, and say so to their owners."""
    key = (checkpoint_names.c.model_id, checkpoint_names.c.kind, checkpoint_names.c.name)
    gone = connection.execute(statement.returning(*key)).all()
    for model_id, kind, name in gone:
        owner = connection.scalar(sa.select(models.c.owner).where(models.c.model_id == model_id))
        if owner is not None:
            path = f"tinker://{model_id}/{kind}/{name}"
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


# MERGED: Whether the files in a storage belong to the database that is looked at. A database that was lost, or another one than before (`--db` forgotten), knows nothing of what lies in the storage, and would take every checkpoint for left behind. Folders are named after models, and those after sessions, whose rows are never deleted: what is of an unknown session is not ours.


#: Where folders have the names of models.
MODEL_PREFIXES = ("checkpoints", "snapshots")
# Parameters of one statement; every database takes as many.


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageOwnership:
    """Sessions that have files, by whether the database knows them."""

    known: frozenset[str]
    unknown_sessions: frozenset[str]

    @property
    def is_wrong_database(self) -> bool:
        """Nothing of all that is there is known: it is another database, or an empty one."""
        return bool(self.unknown_sessions) and not self.known

    def is_orphan(self, place: str) -> bool:
        """Whether a file that no row points to may be taken for left behind."""
        room, _, name = place.partition("/")
        if room in MODEL_PREFIXES:
            return session_of(name) in self.known
        # These do not tell whose they are; a database that knows all sessions is theirs.
        return not self.unknown_sessions


def session_of(name: str) -> str:
    """Of a model, or of something below the folder of one."""
    return name.partition("/")[0].partition(":")[0]


def session_ids_in(files: Files) -> list[str]:
    """Sessions that have files; where they are far away this asks for two lists."""
    return sorted({session_of(name) for room in MODEL_PREFIXES for name in files.top_names(room)})


def storage_ownership(connection: sa.Connection, named: Sequence[str]) -> StorageOwnership:
    """What the database knows of them."""
    known = frozenset(_known(connection, named))
    return StorageOwnership(known=known, unknown_sessions=frozenset(named) - known)


def refuse_wrong_database(database: Database, files: Files) -> None:
    """Raises unless the files are this database's: its clients would hear that nothing is there."""
    named = session_ids_in(files)
    if not named or not database.read_sync(lambda rows: storage_ownership(rows, named)).is_wrong_database:
        return
    raise DatabaseRefused(
        f"the database knows none of the {len(named)} sessions whose checkpoints or snapshots are "
        "in the storage: it is another one, or a new one in place of one that was lost. Check "
        "--data, --db and --storage; restore a back-up with `tinkex restore` if it was lost; or "
        "choose a new folder with --data to begin anew. Nothing was deleted."
    )


def _known(connection: sa.Connection, named: Sequence[str]) -> Iterator[str]:
    for start in range(0, len(named), BATCH_ROWS):
        some = named[start : start + BATCH_ROWS]
        statement = sa.select(sessions.c.session_id).where(in_list(sessions.c.session_id, some))
        yield from connection.scalars(statement)
