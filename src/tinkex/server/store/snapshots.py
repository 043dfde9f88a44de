"""Snapshots: what a model is after a step, so that nothing before it has to be kept."""

import secrets
import time
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa

from tinkex.server.store.database import Database
from tinkex.server.store.files import Files
from tinkex.server.store.requests import Status
from tinkex.server.store.tables import requests, snapshots

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


class Snapshots:
    """The newest snapshot of each model."""

    def __init__(self, database: Database, files: Files, folder: Path) -> None:
        self._database = database
        self._files = files
        self._folder = files.local or folder

    def new_place(self, model_id: str) -> tuple[str, Path]:
        """A place that was never used, and the folder the engine writes for it."""
        place = f"snapshots/{model_id}/{secrets.token_hex(12)}"
        return place, self._folder / place

    async def newest(self, model_id: str) -> Snapshot | None:
        statement = sa.select(*_COLUMNS).where(snapshots.c.model_id == model_id)

        def act(connection: sa.Connection) -> Snapshot | None:
            row = connection.execute(statement).first()
            return None if row is None else Snapshot(**row._mapping)

        return await self._database.read(act)

    async def open(self, snapshot: Snapshot) -> Path:
        """The folder on this machine."""
        folder = self._folder / snapshot.place
        await self._database.in_thread(lambda: self._files.download(snapshot.place, folder))
        return folder

    async def save(
        self, *, model_id: str, seq_id: int, place: str, size_bytes: int, spoiled: str | None
    ) -> bool:
        """
        The newest from now on; the payloads up to it, and the one before it, are deleted.

        Refused while a step that is in it has no result on disk: that step would run again.
        """
        folder = self._folder / place
        await self._database.in_thread(lambda: self._files.upload(folder, place))
        row = Snapshot(
            model_id=model_id,
            seq_id=seq_id,
            place=place,
            spoiled=spoiled,
            size_bytes=size_bytes,
            created_s=time.time(),
        )
        done = await self._database.write(lambda connection: _replace(connection, row))
        gone = [place] if done is None else done
        await self._database.in_thread(lambda: self._remove(gone))
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
    places = sa.select(requests.c.payload_place).where(past, requests.c.payload_place.is_not(None))
    gone = list(connection.scalars(places))
    older = sa.select(snapshots.c.place).where(snapshots.c.model_id == new.model_id)
    gone += connection.scalars(older)
    connection.execute(
        requests.update()
        .where(
            past,
            sa.or_(requests.c.payload.is_not(None), requests.c.payload_place.is_not(None)),
        )
        .values(payload=None, payload_place=None)
    )
    connection.execute(snapshots.delete().where(snapshots.c.model_id == new.model_id))
    connection.execute(
        snapshots.insert(), {column.name: getattr(new, column.name) for column in _COLUMNS}
    )
    return gone
