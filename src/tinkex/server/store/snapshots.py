"""Snapshots: what a model is after a step, so that little before it has to be kept.

The one before the newest is kept for a while, and the steps since: if the files of the newest are
damaged, the model is built from there.
"""

import logging
import secrets
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import sqlalchemy as sa

from tinkex.server.store.blobs import UNREADABLE, Files, folder_problem, fingerprint
from tinkex.server.store.database import Database
from tinkex.server.store.schema import Status, older_snapshots, requests, snapshots
from tinkex.server.store.storage_health import Damaged

log = logging.getLogger("tinkex.server.store")

#: Where damaged ones go, for whoever wants to look at them.
SET_ASIDE = "set-aside"
# Where a model begins: with nothing, before its first step.
NO_STEP = -1

_COLUMNS = tuple(snapshots.c)


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """The files of a model as it is after one of its steps."""

    model_id: str
    seq_id: int
    place: str
    #: Why the next optimizer step is refused, if it is.
    spoiled: str | None
    size_bytes: int
    created_s: float
    fingerprint: str | None


class Snapshots:
    """The newest snapshot of each model, and what to do without it."""

    def __init__(self, database: Database, files: Files, folder: Path) -> None:
        self._database = database
        self._files = files
        self._folder = files.local or str(folder)

    def new_key(self, model_id: str) -> tuple[str, str]:
        """A place that was never used, and the folder the engine writes for it."""
        place = f"snapshots/{model_id}/{secrets.token_hex(12)}"
        return place, self._at(place)

    def _at(self, place: str) -> str:
        return f"{self._folder}/{place}"

    async def newest(self, model_id: str) -> Snapshot | None:
        statement = sa.select(*_COLUMNS).where(snapshots.c.model_id == model_id)

        def act(connection: sa.Connection) -> Snapshot | None:
            row = connection.execute(statement).first()
            return None if row is None else Snapshot(**row._mapping)

        return await self._database.read(act)

    async def newest_intact(self, model_id: str) -> Snapshot | None:
        """
        The newest whose files are what was written; None is the beginning.

        Damaged ones are set aside on the way. Raises Damaged when nothing is left to begin from.
        """
        while (newest := await self.newest(model_id)) is not None:
            problem = await self._problem(newest)
            if problem is None:
                return newest
            if problem.startswith(UNREADABLE):
                # It may be whole: it stays where it is until it can be read.
                raise Damaged(f"the snapshot of {model_id} after step {newest.seq_id} {problem}")
            log.error("the snapshot of %s after step %d %s", model_id, newest.seq_id, problem)
            if not await self.set_aside(newest):
                raise Damaged(
                    f"the snapshot of {model_id} after step {newest.seq_id} {problem}, and the "
                    "steps before it are not kept any more"
                )
        return None

    async def set_aside(self, bad: Snapshot) -> bool:
        """Go back to the one before, or to the beginning; False when neither is there."""
        if not await self._database.write(lambda connection: fall_back(connection, bad), required=True):
            return False
        aside = f"{SET_ASIDE}/{bad.place}"
        await self._database.with_folder(lambda: self._files.move(bad.place, aside), required=True)
        log.error("it was set aside as %s; %s is built from before it", aside, bad.model_id)
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
        """The folder on this machine."""
        folder = self._at(snapshot.place)
        await self._database.with_folder(
            lambda: self._files.download(snapshot.place, folder), required=True
        )
        return folder

    async def save(
        self, *, model_id: str, seq_id: int, place: str, size_bytes: int, spoiled: str | None
    ) -> bool:
        """
        The newest from now on. What is behind the one before it is deleted, and that one is kept.

        Refused while a step that is in it has no result on disk: that step would run again.
        """
        folder = self._at(place)
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
        # The log before it may go then.
        done = await self._database.write(
            lambda connection: _replace(connection, row), reserve=True
        )
        gone = [place] if done is None else done
        await self._database.with_folder(lambda: self._remove(gone))
        return done is not None

    def _remove(self, places: list[str]) -> None:
        for place in places:
            self._files.remove(place)


def _replace(connection: sa.Connection, new: Snapshot) -> list[str] | None:
    """The places that nothing refers to any more; None when it is too early."""
    past = sa.and_(requests.c.model_id == new.model_id, requests.c.seq_id <= new.seq_id)
    unfinished = past & (requests.c.status == Status.WAITING)
    if connection.execute(sa.select(requests.c.request_id).where(unfinished)).first() is not None:
        return None
    of_model = snapshots.c.model_id == new.model_id
    row = connection.execute(sa.select(*_COLUMNS).where(of_model)).first()
    gone = drop_older(connection, new.model_id)
    if row is None:
        # The log has never been cut: it is a way to build the model as good as a snapshot.
        beginning = {"seq_id": NO_STEP, "size_bytes": 0, "created_s": new.created_s}
        connection.execute(older_snapshots.insert(), {"model_id": new.model_id, **beginning})
    else:
        gone += truncate_log(connection, new.model_id, up_to=row.seq_id)
        connection.execute(snapshots.delete().where(of_model))
        connection.execute(older_snapshots.insert(), dict(row._mapping))
    connection.execute(snapshots.insert(), asdict(new))
    return gone


def drop_older(connection: sa.Connection, model_id: str) -> list[str]:
    """There is no way back behind the newest from now on; the places that were for it."""
    of_model = older_snapshots.c.model_id == model_id
    gone = connection.execute(
        older_snapshots.delete().where(of_model).returning(older_snapshots.c.place)
    )
    return [place for place in gone.scalars() if place is not None]


def truncate_log(connection: sa.Connection, model_id: str, *, up_to: int) -> list[str]:
    """These steps never run again: what they carried may go. The places of it."""
    past = sa.and_(requests.c.model_id == model_id, requests.c.seq_id <= up_to)
    places = sa.select(requests.c.payload_place).where(past, requests.c.payload_place.is_not(None))
    gone = list(connection.scalars(places))
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
    """Make the one before the newest, or the beginning, the newest; False when there is none."""
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
