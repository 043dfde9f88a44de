"""Runs and checkpoints as their owner sees them: pages of what there is, and changes to it."""

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sqlalchemy as sa

from tinkex.server.store import events
from tinkex.server.store.checkpoints import VERSION, Quotas, Version, not_expired, note_saved
from tinkex.server.store.database import Database
from tinkex.server.store.models import MODEL, Model, RunTaken, was_created
from tinkex.server.store.schema import (
    checkpoint_names,
    checkpoint_versions,
    models,
    requests,
    sessions,
)
from tinkex.server.store.sql_dialects import in_list
from tinkex.wire.errors import UserFailure

FEWER = "Ask for fewer at once (`limit`, `offset`); all checkpoints can be listed in such pages."


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedCheckpoint:
    """A checkpoint under its name."""

    model_id: str
    kind: str
    name: str
    version: Version
    saved_s: float
    expires_s: float | None
    user_metadata: Mapping[str, Any] | None
    public: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """A training run, with the newest checkpoint of each kind."""

    model: Model
    last_request_s: float
    newest: Mapping[str, NamedCheckpoint]
    #: Nothing can build it again.
    lost: bool


_NAME = (
    checkpoint_names.c.saved_s,
    checkpoint_names.c.expires_s,
    checkpoint_names.c.user_metadata,
    checkpoint_names.c.public,
)
_NAMED = tuple(column.label(f"named_{column.name}") for column in _NAME)
_KEY = (checkpoint_names.c.model_id, checkpoint_names.c.kind, checkpoint_names.c.name)
_KEYED = tuple(column.label(f"key_{column.name}") for column in _KEY)
_SAVED = (
    sa.select(*VERSION, *_NAMED, *_KEYED)
    .select_from(checkpoint_names)
    .join(checkpoint_versions, checkpoint_names.c.version_id == checkpoint_versions.c.version_id)
)


class CheckpointLists:
    """Lists, and what an owner may do to a name. Expired names are not there any more."""

    def __init__(self, database: Database, quotas: Quotas) -> None:
        self._database = database
        self._quotas = quotas

    async def checkpoints(
        self,
        *,
        owner: str,
        kinds: Collection[str],
        model_id: str | None = None,
        published: bool = False,
        limit: int | None = None,
        offset: int = 0,
    ) -> tuple[list[NamedCheckpoint], int]:
        """A page, newest first, and how many there are; also of what others published if asked."""
        of_owner = checkpoint_versions.c.owner == owner
        readable = [
            sa.or_(of_owner, checkpoint_names.c.public) if published else of_owner,
            checkpoint_names.c.kind.in_(sorted(kinds)),
            not_expired(time.time()),
        ]
        if model_id is not None:
            readable.append(checkpoint_names.c.model_id == model_id)
        chosen = _SAVED.where(*readable)
        # Two saves of one moment have an order too, or pages would overlap.
        page = chosen.order_by(checkpoint_names.c.saved_s.desc(), *_KEY)
        page = page.limit(limit).offset(offset)
        count = sa.select(sa.func.count()).select_from(chosen.subquery())

        def act(connection: sa.Connection) -> tuple[list[NamedCheckpoint], int]:
            found: list[NamedCheckpoint] = []
            weight = MetadataBudget(FEWER)
            for row in connection.execute(page):
                found.append(_saved(row))
                weight.add(found[-1].user_metadata)
            return found, connection.scalar(count) or 0

        return await self._database.read_report(act)

    async def checkpoint(self, *, model_id: str, kind: str, name: str) -> NamedCheckpoint | None:
        statement = _SAVED.where(_is(model_id, kind, name), not_expired(time.time()))

        def act(connection: sa.Connection) -> NamedCheckpoint | None:
            row = connection.execute(statement).first()
            return None if row is None else _saved(row)

        return await self._database.read(act)

    async def runs(
        self,
        *,
        owner: str,
        project_id: str | None,
        limit: int,
        offset: int,
        published: bool = False,
    ) -> tuple[list[RunSummary], int]:
        """
        A page, newest first, and how many there are.

        If asked, also the runs of which others published something; in a project, one's own only.
        """
        of_owner = models.c.owner == owner
        shared = published and project_id is None
        chosen = sa.select(models.c.model_id).where(
            sa.or_(of_owner, has_published_checkpoint(time.time())) if shared else of_owner,
            was_created(),
        )
        if project_id is not None:
            chosen = chosen.join(sessions, sessions.c.session_id == models.c.session_id).where(
                sessions.c.project_id == project_id
            )
        page = chosen.order_by(models.c.created_s.desc(), models.c.model_id)
        page = page.limit(limit).offset(offset)
        count = sa.select(sa.func.count()).select_from(chosen.subquery())

        def act(connection: sa.Connection) -> tuple[list[RunSummary], int]:
            found: list[RunSummary] = []
            weight = MetadataBudget(FEWER)
            for ids in batches(list(connection.scalars(page))):
                for run in _runs(connection, ids, owner):
                    weight.add(run.model.user_metadata)
                    for saved in run.newest.values():
                        weight.add(saved.user_metadata)
                    found.append(run)
            return found, connection.scalar(count) or 0

        return await self._database.read_report(act)

    async def run(self, model_id: str, *, reader: str) -> RunSummary | None:
        """A run as this owner may see it; None if nothing of it is theirs or published."""

        def act(connection: sa.Connection) -> RunSummary | None:
            found = next(iter(_runs(connection, [model_id], reader)), None)
            if found is None or (found.model.owner != reader and not found.newest):
                return None
            return found

        return await self._database.read(act)

    async def delete(self, *, model_id: str, kind: str, name: str) -> bool:
        """Take the name away; whether it was there. Its files go when nothing uses them."""
        statement = checkpoint_names.delete().where(_is(model_id, kind, name), not_expired(time.time()))
        return await self._change(
            statement, "checkpoint.deleted", (model_id, kind, name), reserve=True
        )

    async def set_public(self, public: bool, *, model_id: str, kind: str, name: str) -> bool:
        """Whether it is there. What is so already is not written, nor noted, once more."""
        statement = checkpoint_names.update().where(
            _is(model_id, kind, name),
            not_expired(time.time()),
            checkpoint_names.c.public.is_(not public),
        )
        event = "checkpoint.published" if public else "checkpoint.unpublished"
        return await self._change(
            # Nobody must wait for room to hide what is theirs.
            statement.values(public=public),
            event,
            (model_id, kind, name),
            reserve=not public,
        )

    async def set_expiry(
        self, expires_s: float | None, *, model_id: str, kind: str, name: str
    ) -> bool:
        statement = checkpoint_names.update().where(_is(model_id, kind, name), not_expired(time.time()))
        return await self._change(
            statement.values(expires_s=expires_s),
            "checkpoint.expiry_set",
            (model_id, kind, name),
            expires_s=expires_s,
        )

    async def earlier_copy(self, version: Version, fingerprint: str) -> Version | None:
        """What an earlier try of this copy made; RunTaken if its run is something else."""
        return await self._database.read(
            lambda connection: _earlier_copy(connection, version, fingerprint)
        )

    async def add_copy(
        self,
        version: Version,
        *,
        fingerprint: str,
        model: Model,
        model_seq_id: int,
        source: Version,
        like: NamedCheckpoint | None,
        expires_s: float | None,
    ) -> Version:
        """A run that is one copied checkpoint; a repeat finds the first copy. May raise RunTaken."""
        # An adapter fits the content of the base model that it was trained on.
        made_on = sa.select(models.c.base_hash).where(models.c.model_id == source.model_id)

        def act(connection: sa.Connection) -> Version:
            if (first := _earlier_copy(connection, version, fingerprint)) is not None:
                return first
            connection.execute(
                models.insert(),
                {
                    **{column.name: getattr(model, column.name) for column in MODEL},
                    "model_seq_id": model_seq_id,
                    "base_hash": connection.scalar(made_on),
                },
            )
            values = {column.name: getattr(version, column.name) for column in VERSION}
            connection.execute(checkpoint_versions.insert(), {**values, "fingerprint": fingerprint})
            connection.execute(
                checkpoint_names.insert(),
                {
                    "model_id": version.model_id,
                    "kind": version.kind,
                    "name": version.name,
                    "version_id": version.version_id,
                    "saved_s": version.created_s,
                    "expires_s": expires_s,
                    "user_metadata": None if like is None else like.user_metadata,
                    "public": False,
                },
            )
            self._quotas.check(
                connection, version.owner, size_bytes=version.size_bytes, checkpoints=1, runs=1
            )
            note_saved(connection, version, "checkpoint.copied")
            return version

        return await self._database.write(act)

    async def _change(
        self,
        statement: sa.Update | sa.Delete,
        event: str,
        key: tuple[str, str, str],
        *,
        reserve: bool = False,
        **details: object,
    ) -> bool:
        """Change a name, and say so in the audit log if that changed it; whether it was there."""
        model_id, kind, name = key
        told = {"model_id": model_id, "tinker_path": f"tinker://{model_id}/{kind}/{name}"}
        whose = sa.select(models.c.owner).where(models.c.model_id == model_id)
        there = sa.select(checkpoint_names.c.name).where(_is(*key), not_expired(time.time()))

        def act(connection: sa.Connection) -> bool:
            if not connection.execute(statement).rowcount:
                return connection.execute(there).first() is not None
            owner = connection.execute(whose).scalar_one()
            events.note_audit(connection, owner=owner, event=event, details={**told, **details})
            return True

        return await self._database.write(act, reserve=reserve)


def _earlier_copy(connection: sa.Connection, version: Version, fingerprint: str) -> Version | None:
    """
    The copy with this name and content in the run of `version`; None if there is no such run.

    A run that was made in another way, or holds something else, raises RunTaken: its checkpoints
    are not what was to be copied.
    """
    trained = sa.exists().where(requests.c.model_id == models.c.model_id)
    run = connection.execute(
        sa.select(models.c.last_request_s, trained.label("trained")).where(
            models.c.model_id == version.model_id
        )
    ).first()
    if run is None:
        return None
    copy = connection.execute(
        _SAVED.where(
            _is(version.model_id, version.kind, version.name or ""),
            checkpoint_versions.c.fingerprint == fingerprint,
            not_expired(time.time()),
        )
    ).first()
    if copy is None or run.trained or run.last_request_s is not None:
        raise RunTaken(version.model_id)
    return _saved(copy).version


def has_published_checkpoint(now_s: float) -> sa.ColumnElement[bool]:
    """Models of which a checkpoint is published."""
    return sa.exists().where(
        checkpoint_names.c.model_id == models.c.model_id, checkpoint_names.c.public, not_expired(now_s)
    )


def _is(model_id: str, kind: str, name: str) -> sa.ColumnElement[bool]:
    return sa.and_(
        checkpoint_names.c.model_id == model_id,
        checkpoint_names.c.kind == kind,
        checkpoint_names.c.name == name,
    )


def _runs(connection: sa.Connection, ids: Sequence[str], reader: str) -> list[RunSummary]:
    """Runs in the order of their ids; of those of others only what was published."""
    last = (
        sa.select(sa.func.max(requests.c.created_s))
        .where(requests.c.model_id == models.c.model_id)
        .scalar_subquery()
    )
    chosen = (
        sa.select(*MODEL, models.c.last_request_s, last.label("last_s"), sessions.c.failure)
        .join(sessions, sessions.c.session_id == models.c.session_id)
        .where(in_list(models.c.model_id, ids), was_created())
    )
    newest: dict[str, dict[str, NamedCheckpoint]] = {}
    for saved in _newest(connection, ids, reader):
        newest.setdefault(saved.model_id, {})[saved.kind] = saved
    found = {}
    for row in connection.execute(chosen):
        values = dict(row._mapping)
        last_s = values.pop("last_s") or values["last_request_s"] or values["created_s"]
        del values["last_request_s"]
        failed = (values.pop("failure") or {}).get("reason", {}).get("training_run_id")
        model = Model(**values)
        if model.owner != reader:
            model = replace(model, user_metadata=None)
            failed = None
            shown = newest.get(model.model_id, {}).values()
            last_s = max((saved.saved_s for saved in shown), default=model.created_s)
        found[model.model_id] = RunSummary(
            model=model,
            last_request_s=last_s,
            newest=newest.get(model.model_id, {}),
            lost=failed == model.model_id,
        )
    return [found[model_id] for model_id in ids if model_id in found]


def _newest(connection: sa.Connection, ids: Sequence[str], reader: str) -> list[NamedCheckpoint]:
    own = sa.select(models.c.model_id).where(models.c.owner == reader)
    place = (
        sa.func.row_number()
        .over(
            partition_by=(checkpoint_names.c.model_id, checkpoint_names.c.kind),
            order_by=checkpoint_names.c.saved_s.desc(),
        )
        .label("place_in_line")
    )
    ranked = (
        sa.select(*_KEY, place)
        .where(
            in_list(checkpoint_names.c.model_id, ids),
            sa.or_(checkpoint_names.c.public, checkpoint_names.c.model_id.in_(own)),
            not_expired(time.time()),
        )
        .subquery()
    )
    first = _SAVED.join(
        ranked,
        sa.and_(
            ranked.c.model_id == checkpoint_names.c.model_id,
            ranked.c.kind == checkpoint_names.c.kind,
            ranked.c.name == checkpoint_names.c.name,
            ranked.c.place_in_line == 1,
        ),
    )
    return [_saved(row) for row in connection.execute(first)]


def _saved(row: sa.Row[*tuple[Any, ...]]) -> NamedCheckpoint:
    values = row._mapping
    return NamedCheckpoint(
        version=Version(**{column.name: values[column.name] for column in VERSION}),
        **{column.name: values[f"named_{column.name}"] for column in _NAME},
        **{column.name: values[f"key_{column.name}"] for column in _KEY},
    )


# MERGED: Pages of a list have an end in bytes too: what clients say about their things may be long.


#: Characters of all metadata on one page. It is in memory several times before it is sent.
MAX_METADATA_CHARACTERS = 16 * 2**20
#: Rows that are looked at together.
ROWS_PER_READ = 200


def metadata_characters(metadata: Mapping[str, Any] | None) -> int:
    return sum(len(key) + len(str(value)) for key, value in (metadata or {}).items())


class MetadataBudget:
    """What the metadata of a page comes to; raises when it is too much."""

    def __init__(self, advice: str) -> None:
        self._advice = advice
        self._characters = 0
        self._entries = 0

    def add(self, metadata: Mapping[str, Any] | None) -> None:
        self._entries += 1
        self._characters += metadata_characters(metadata)
        if self._characters > MAX_METADATA_CHARACTERS:
            raise UserFailure(
                f"the first {self._entries} entries have more than {MAX_METADATA_CHARACTERS} characters of "
                f"metadata, which is the most of one answer. {self._advice}"
            )


def batches(ids: list[str]) -> Iterator[list[str]]:
    for start in range(0, len(ids), ROWS_PER_READ):
        yield ids[start : start + ROWS_PER_READ]


def within_metadata_budget(
    rows: Iterable[tuple[str, Mapping[str, Any]]], advice: str
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The same pairs of a name and its metadata, as far as they fit."""
    weight = MetadataBudget(advice)
    for name, metadata in rows:
        weight.add(metadata)
        yield name, metadata
