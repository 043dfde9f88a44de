"""
Snapshots: the state of a model after a step, so that recovery does not need the steps before it.

The snapshot before the newest is kept for a while, with the steps since: if the newest is damaged,
the model is rebuilt from there.
"""

import logging
import secrets
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import sqlalchemy as sa

from tinkex.durable_files import fingerprint
from tinkex.server.store.blob_cache import BlobCache
from tinkex.server.store.blobs import UNREADABLE, Files, folder_problem
from tinkex.server.store.database import Database, one
from tinkex.server.store.ownership import check_terms
from tinkex.server.store.schema import Status, older_snapshots, requests, snapshots
from tinkex.server.store.storage_health import Damaged

log = logging.getLogger("tinkex.server.store")

#: The key prefix where damaged snapshots are moved, for inspection.
SET_ASIDE = "set-aside"
# The seq_id of an empty model, before its first step.
NO_STEP = -1

_COLUMNS = tuple(snapshots.c)


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """The stored state of a model after one of its steps."""

    model_id: str
    seq_id: int
    place: str
    #: The error for the next optimizer step, if it must be refused.
    spoiled: str | None
    size_bytes: int
    created_s: float
    fingerprint: str | None


class Snapshots:
    """The newest snapshot of each model, and the fallback to the one before it."""

    def __init__(self, database: Database, files: Files, folder: Path, cache: BlobCache) -> None:
        self._database = database
        self._files = files
        self._cache = cache
        self._folder = files.local or str(folder)

    def new_key(self, model_id: str) -> tuple[str, str]:
        """A new key, and the folder that the engine writes for it."""
        key = f"snapshots/{model_id}/{secrets.token_hex(12)}"
        return key, self._path(key)

    def _path(self, key: str) -> str:
        return f"{self._folder}/{key}"

    async def newest(self, model_id: str) -> Snapshot | None:
        statement = sa.select(*_COLUMNS).where(snapshots.c.model_id == model_id)
        return await self._database.read(one(Snapshot, statement))

    async def newest_intact(self, model_id: str, *, term: int | None = None) -> Snapshot | None:
        """
        The newest snapshot that is not damaged; None means that the whole log is replayed.

        Damaged snapshots are moved to SET_ASIDE. Raises Damaged if the model cannot be rebuilt
        without them.
        """
        while (newest := await self.newest(model_id)) is not None:
            problem = await self._problem(newest)
            if problem is None:
                return newest
            if problem.startswith(UNREADABLE):
                # It may be intact, so it stays until it can be read.
                raise Damaged(f"the snapshot of {model_id} after step {newest.seq_id} {problem}")
            log.error("the snapshot of %s after step %d %s", model_id, newest.seq_id, problem)
            if not await self.set_aside(newest, term=term):
                raise Damaged(
                    f"the snapshot of {model_id} after step {newest.seq_id} {problem}, and the "
                    "steps before it were deleted"
                )
        return None

    async def set_aside(self, bad: Snapshot, *, term: int | None = None) -> bool:
        """
        Move a damaged snapshot away and use the one before it, or an empty model and the whole log.

        Returns False, and changes nothing, if neither is possible.
        """

        def operation(connection: sa.Connection) -> bool:
            if term is not None:
                check_terms(connection, {bad.model_id: term})
            return fall_back(connection, bad)

        if not await self._database.write(operation, required=True):
            return False
        aside = f"{SET_ASIDE}/{bad.place}"
        await self._database.with_folder(lambda: self._files.move(bad.place, aside), required=True)
        log.error(
            "the damaged snapshot was moved to %s; %s is rebuilt from the snapshot before it, or from "
            "its whole log",
            aside,
            bad.model_id,
        )
        return True

    async def _problem(self, snapshot: Snapshot) -> str | None:
        try:
            folder = await self.open(snapshot)
        except FileNotFoundError:
            return f"is missing: there is no folder {snapshot.place}"
        return await self._database.with_folder(
            lambda: folder_problem(folder, snapshot.place, snapshot.fingerprint)
        )

    async def open(self, snapshot: Snapshot) -> str:
        """The folder of a snapshot on this machine."""
        folder = self._path(snapshot.place)
        await self._database.with_folder(
            lambda: self._files.download(snapshot.place, folder), required=True
        )
        if self._cache.enabled:
            self._cache.touch(folder)
        return folder

    async def save(
        self,
        *,
        model_id: str,
        seq_id: int,
        place: str,
        size_bytes: int,
        spoiled: str | None,
        term: int | None = None,
    ) -> bool:
        """
        Make this the newest snapshot, and the newest so far the fallback; older data is deleted.

        Returns False, and saves nothing, while a step that it contains has no result on disk: that
        step would run again.
        """
        folder = self._path(place)
        written = await self._database.with_folder(lambda: fingerprint(folder))
        await self._database.with_folder(lambda: self._files.upload(folder, place))
        row = Snapshot(
            model_id=model_id,
            seq_id=seq_id,
            place=place,
            spoiled=spoiled,
            size_bytes=size_bytes,
            created_s=time.time(),
            fingerprint=written,
        )

        def operation(connection: sa.Connection) -> list[str] | None:
            if term is not None:
                # It truncates the log, which belongs to the worker that has the model.
                check_terms(connection, {model_id: term})
            return _replace(connection, row)

        # May use the disk reserve: it frees the log before it.
        done = await self._database.write(operation, reserve=True)
        gone = [place] if done is None else done
        await self._database.with_folder(lambda: self._remove(gone))
        return done is not None

    def _remove(self, keys: list[str]) -> None:
        for key in keys:
            self._files.remove(key)


def _replace(connection: sa.Connection, new: Snapshot) -> list[str] | None:
    """The keys that are not referenced any more; None if a step before it is unfinished."""
    past = sa.and_(requests.c.model_id == new.model_id, requests.c.seq_id <= new.seq_id)
    unfinished = past & (requests.c.status == Status.WAITING)
    if connection.execute(sa.select(requests.c.request_id).where(unfinished)).first() is not None:
        return None
    of_model = snapshots.c.model_id == new.model_id
    row = connection.execute(sa.select(*_COLUMNS).where(of_model)).first()
    gone = drop_older(connection, new.model_id)
    if row is None:
        # The whole log is there, so the fallback is an empty model.
        empty = {"seq_id": NO_STEP, "size_bytes": 0, "created_s": new.created_s}
        connection.execute(older_snapshots.insert(), {"model_id": new.model_id, **empty})
    else:
        gone += truncate_log(connection, new.model_id, up_to=row.seq_id)
        connection.execute(snapshots.delete().where(of_model))
        connection.execute(older_snapshots.insert(), dict(row._mapping))
    connection.execute(snapshots.insert(), asdict(new))
    return gone


def drop_older(connection: sa.Connection, model_id: str) -> list[str]:
    """Delete the fallback of a model; returns its keys."""
    of_model = older_snapshots.c.model_id == model_id
    gone = connection.execute(
        older_snapshots.delete().where(of_model).returning(older_snapshots.c.place)
    )
    return [place for place in gone.scalars() if place is not None]


def truncate_log(connection: sa.Connection, model_id: str, *, up_to: int) -> list[str]:
    """Delete the payloads of steps that never run again; returns the keys of their files."""
    past = sa.and_(requests.c.model_id == model_id, requests.c.seq_id <= up_to)
    keys = sa.select(requests.c.payload_place).where(past, requests.c.payload_place.is_not(None))
    gone = list(connection.scalars(keys))
    connection.execute(
        requests.update()
        .where(
            past,
            sa.or_(requests.c.payload.is_not(None), requests.c.payload_place.is_not(None)),
        )
        .values(payload=None, payload_place=None)
    )
    return gone


def fall_back(connection: sa.Connection, bad: Snapshot) -> bool:
    """Make the fallback the newest snapshot; False if there is none."""
    older = connection.execute(
        sa.select(older_snapshots).where(older_snapshots.c.model_id == bad.model_id)
    ).first()
    if older is None:
        return False
    connection.execute(snapshots.delete().where(snapshots.c.place == bad.place))
    connection.execute(older_snapshots.delete().where(older_snapshots.c.model_id == bad.model_id))
    if older.place is not None:
        connection.execute(snapshots.insert(), dict(older._mapping))
    return True
