"""Lists of runs and checkpoints, and changes to checkpoint names: publish, expire, delete, copy."""

import json
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sqlalchemy as sa

from tinkex.server.store.checkpoints import (
    VERSION_COLUMNS,
    Version,
    insert_name,
    insert_version,
    note_saved,
)
from tinkex.server.store.database import (
    Database,
    has_published_checkpoint,
    name_is,
    not_expired,
    note_audit,
    values,
    was_created,
)
from tinkex.server.store.models import MODEL_COLUMNS, Model, RunTaken
from tinkex.server.store.quotas import Quotas
from tinkex.server.store.schema import (
    Status,
    checkpoint_names,
    checkpoint_versions,
    models,
    requests,
    sessions,
)
from tinkex.server.store.sql_dialects import in_list
from tinkex.server.store.step_history import newest_steps, run_status
from tinkex.wire.checkpoints import tinker_path
from tinkex.wire.errors import UserFailure

_FEWER = "Request smaller pages with `limit` and `offset`."


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedCheckpoint:
    """A checkpoint with its name."""

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
    #: Recovery cannot rebuild it.
    lost: bool
    # These are None in the run of another owner.
    #: Optimizer steps so far, without those of a server that stored no metrics yet.
    steps: int | None = None
    last_loss: float | None = None
    #: See `run_status`.
    status: str | None = None


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
    sa.select(*VERSION_COLUMNS, *_NAMED, *_KEYED)
    .select_from(checkpoint_names)
    .join(checkpoint_versions, checkpoint_names.c.version_id == checkpoint_versions.c.version_id)
)


class CheckpointCatalog:
    """Lists, and changes of names by their owner. Expired names are treated as deleted."""

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
        """A page, newest first, and the total; with `published` also those of other owners."""
        of_owner = checkpoint_versions.c.owner == owner
        readable = [
            sa.or_(of_owner, checkpoint_names.c.public) if published else of_owner,
            checkpoint_names.c.kind.in_(sorted(kinds)),
            not_expired(time.time()),
        ]
        if model_id is not None:
            readable.append(checkpoint_names.c.model_id == model_id)
        chosen = _SAVED.where(*readable)
        # The key breaks ties, or pages would overlap.
        page = chosen.order_by(checkpoint_names.c.saved_s.desc(), *_KEY)
        page = page.limit(limit).offset(offset)
        count = sa.select(sa.func.count()).select_from(chosen.subquery())

        def operation(connection: sa.Connection) -> tuple[list[NamedCheckpoint], int]:
            found: list[NamedCheckpoint] = []
            budget = MetadataBudget(_FEWER)
            for row in connection.execute(page):
                found.append(_saved(row))
                budget.add(found[-1].user_metadata)
            return found, connection.scalar(count) or 0

        return await self._database.read_report(operation)

    async def checkpoint(self, *, model_id: str, kind: str, name: str) -> NamedCheckpoint | None:
        statement = _SAVED.where(name_is(model_id, kind, name), not_expired(time.time()))

        def operation(connection: sa.Connection) -> NamedCheckpoint | None:
            row = connection.execute(statement).first()
            return None if row is None else _saved(row)

        return await self._database.read(operation)

    async def runs(
        self,
        *,
        owner: str,
        project_id: str | None,
        limit: int,
        offset: int,
        published: bool = False,
        search: str | None = None,
    ) -> tuple[list[RunSummary], int]:
        """
        A page, newest first, and the total.

        With `published`, also runs with checkpoints that others published, except in a project. With
        `search`, runs of the owner whose id, base model or metadata contain this text.
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
        if search:
            # Another owner's metadata is not shown, so it is not searched either.
            chosen = chosen.where(of_owner, _contains(search))
        page = chosen.order_by(models.c.created_s.desc(), models.c.model_id)
        page = page.limit(limit).offset(offset)
        count = sa.select(sa.func.count()).select_from(chosen.subquery())

        def operation(connection: sa.Connection) -> tuple[list[RunSummary], int]:
            found: list[RunSummary] = []
            budget = MetadataBudget(_FEWER)
            for ids in batches(list(connection.scalars(page))):
                for run in _runs(connection, ids, owner):
                    budget.add(run.model.user_metadata)
                    for saved in run.newest.values():
                        budget.add(saved.user_metadata)
                    found.append(run)
            return found, connection.scalar(count) or 0

        return await self._database.read_report(operation)

    async def run(self, model_id: str, *, reader: str) -> RunSummary | None:
        """A run as `reader` may see it; None if it is not theirs and has nothing published."""

        def operation(connection: sa.Connection) -> RunSummary | None:
            found = next(iter(_runs(connection, [model_id], reader)), None)
            if found is None or (found.model.owner != reader and not found.newest):
                return None
            return found

        return await self._database.read(operation)

    async def own_runs(self, ids: Sequence[str], *, owner: str) -> list[RunSummary]:
        """Those of these runs that are the owner's, in the same order."""
        return await self._database.read_report(
            lambda connection: [
                run for run in _runs(connection, ids, owner) if run.model.owner == owner
            ]
        )

    async def delete(self, *, model_id: str, kind: str, name: str) -> bool:
        """Delete a name; whether it existed. The cleanup deletes unused files later."""
        statement = checkpoint_names.delete().where(
            name_is(model_id, kind, name), not_expired(time.time())
        )
        return await self._change(
            statement, "checkpoint.deleted", (model_id, kind, name), reserve=True
        )

    async def set_public(self, public: bool, *, model_id: str, kind: str, name: str) -> bool:
        """Publish or unpublish a name; whether it exists. Audited only if it changes."""
        statement = checkpoint_names.update().where(
            name_is(model_id, kind, name),
            not_expired(time.time()),
            checkpoint_names.c.public.is_(not public),
        )
        event = "checkpoint.published" if public else "checkpoint.unpublished"
        return await self._change(
            # Unpublishing must work on a full disk too.
            statement.values(public=public),
            event,
            (model_id, kind, name),
            reserve=not public,
        )

    async def set_expiry(
        self, expires_s: float | None, *, model_id: str, kind: str, name: str
    ) -> bool:
        statement = checkpoint_names.update().where(
            name_is(model_id, kind, name), not_expired(time.time())
        )
        return await self._change(
            statement.values(expires_s=expires_s),
            "checkpoint.expiry_set",
            (model_id, kind, name),
            expires_s=expires_s,
        )

    async def earlier_copy(self, version: Version, fingerprint: str) -> Version | None:
        """The version that an earlier try of this copy created. May raise RunTaken."""
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
        """Add a run with one copied checkpoint, or return the first copy. May raise RunTaken."""
        # The copy needs the same base model content as its source.
        base_hash = sa.select(models.c.base_hash).where(models.c.model_id == source.model_id)

        def operation(connection: sa.Connection) -> Version:
            if (first := _earlier_copy(connection, version, fingerprint)) is not None:
                return first
            more = {"model_seq_id": model_seq_id, "base_hash": connection.scalar(base_hash)}
            connection.execute(models.insert(), {**values(model), **more})
            insert_version(connection, version, fingerprint)
            insert_name(
                connection,
                version,
                saved_s=version.created_s,
                expires_s=expires_s,
                user_metadata=None if like is None else like.user_metadata,
            )
            self._quotas.check(
                connection, version.owner, size_bytes=version.size_bytes, checkpoints=1, runs=1
            )
            note_saved(connection, version, "checkpoint.copied")
            return version

        return await self._database.write(operation)

    async def _change(
        self,
        statement: sa.Update | sa.Delete,
        event: str,
        key: tuple[str, str, str],
        *,
        reserve: bool = False,
        **details: object,
    ) -> bool:
        """Change a name, and audit it if it changed; whether the name exists."""
        model_id, kind, name = key
        identity = {"model_id": model_id, "tinker_path": tinker_path(model_id, kind, name)}
        owned_by = sa.select(models.c.owner).where(models.c.model_id == model_id)
        existing = sa.select(checkpoint_names.c.name).where(name_is(*key), not_expired(time.time()))

        def operation(connection: sa.Connection) -> bool:
            if not connection.execute(statement).rowcount:
                return connection.execute(existing).first() is not None
            owner = connection.execute(owned_by).scalar_one()
            note_audit(connection, owner=owner, event=event, details={**identity, **details})
            return True

        return await self._database.write(operation, reserve=reserve)


def _contains(text: str) -> sa.ColumnElement[bool]:
    """Whether the id, the base model or the metadata of a run contain a text, in any case."""
    # Metadata is stored as JSON, which escapes some characters.
    escaped = json.dumps(text)[1:-1]
    return sa.or_(
        models.c.model_id.icontains(text, autoescape=True),
        models.c.base_model.icontains(text, autoescape=True),
        sa.cast(models.c.user_metadata, sa.Text).icontains(escaped, autoescape=True),
    )


def _earlier_copy(connection: sa.Connection, version: Version, fingerprint: str) -> Version | None:
    """
    The copy with this name and content in the run of `version`; None if there is no such run.

    Raises RunTaken if the run was created in another way or has other content.
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
            name_is(version.model_id, version.kind, version.name),
            checkpoint_versions.c.fingerprint == fingerprint,
            not_expired(time.time()),
        )
    ).first()
    if copy is None or run.trained or run.last_request_s is not None:
        raise RunTaken(version.model_id)
    return _saved(copy).version


def _runs(connection: sa.Connection, ids: Sequence[str], reader: str) -> list[RunSummary]:
    """Runs in the order of `ids`; of other owners' runs only what is published."""
    chosen = (
        sa.select(
            *MODEL_COLUMNS,
            models.c.last_request_s,
            sessions.c.failure,
            sessions.c.finished_s,
            sessions.c.lapsed_s,
        )
        .join(sessions, sessions.c.session_id == models.c.session_id)
        .where(in_list(models.c.model_id, ids), was_created())
    )
    newest: dict[str, dict[str, NamedCheckpoint]] = {}
    for saved in _newest(connection, ids, reader):
        newest.setdefault(saved.model_id, {})[saved.kind] = saved
    steps = newest_steps(connection, ids)
    requested = {row.model_id: row for row in connection.execute(_requested(ids))}
    now_s = time.time()
    found = {}
    for row in connection.execute(chosen):
        named = row._mapping
        model = Model(**{column.name: named[column.name] for column in MODEL_COLUMNS})
        of_run = requested.get(model.model_id)
        last_s = (of_run and of_run.last_s) or row.last_request_s or model.created_s
        failed = (row.failure or {}).get("reason", {}).get("training_run_id")
        if model.owner != reader:
            model = replace(model, user_metadata=None)
            failed = None
            shown = newest.get(model.model_id, {}).values()
            last_s = max((saved.saved_s for saved in shown), default=model.created_s)
        summary = RunSummary(
            model=model,
            last_request_s=last_s,
            newest=newest.get(model.model_id, {}),
            lost=failed == model.model_id,
        )
        if model.owner == reader:
            step = steps.get(model.model_id)
            summary = replace(
                summary,
                steps=0 if step is None else step.number,
                last_loss=None if step is None else step.loss,
                status=run_status(
                    lost=summary.lost,
                    has_work=of_run is not None and bool(of_run.has_work),
                    session_ended=row.finished_s is not None,
                    session_timed_out=row.lapsed_s is not None,
                    last_step_s=None if step is None else step.finished_s,
                    now_s=now_s,
                ),
            )
        found[model.model_id] = summary
    return [found[model_id] for model_id in ids if model_id in found]


def _requested(ids: Sequence[str]) -> sa.Select[Any]:
    """When each of these runs had its last request that still has a row, and if one waits."""
    # Not `WHERE status = 'waiting'`: SQLite would scan the waiting rows of all runs by that index.
    waits = sa.case((requests.c.status == Status.WAITING, 1), else_=0)
    return (
        sa.select(
            requests.c.model_id,
            sa.func.max(requests.c.created_s).label("last_s"),
            sa.func.max(waits).label("has_work"),
        )
        .where(in_list(requests.c.model_id, ids))
        .group_by(requests.c.model_id)
    )


def _newest(connection: sa.Connection, ids: Sequence[str], reader: str) -> list[NamedCheckpoint]:
    own = sa.select(models.c.model_id).where(models.c.owner == reader)
    rank = (
        sa.func.row_number()
        .over(
            partition_by=(checkpoint_names.c.model_id, checkpoint_names.c.kind),
            order_by=checkpoint_names.c.saved_s.desc(),
        )
        .label("rank")
    )
    ranked = (
        sa.select(*_KEY, rank)
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
            ranked.c.rank == 1,
        ),
    )
    return [_saved(row) for row in connection.execute(first)]


def _saved(row: sa.Row[*tuple[Any, ...]]) -> NamedCheckpoint:
    named = row._mapping
    return NamedCheckpoint(
        version=Version(**{column.name: named[column.name] for column in VERSION_COLUMNS}),
        **{column.name: named[f"named_{column.name}"] for column in _NAME},
        **{column.name: named[f"key_{column.name}"] for column in _KEY},
    )


# -- a limit on the metadata of one page: users may store long metadata ---------------------------

#: Characters of metadata on one page; several copies are in memory before it is sent.
MAX_METADATA_CHARACTERS = 16 * 2**20
#: Rows read at a time.
ROWS_PER_READ = 200


def metadata_characters(metadata: Mapping[str, Any] | None) -> int:
    return sum(len(key) + len(str(value)) for key, value in (metadata or {}).items())


class MetadataBudget:
    """Counts the metadata of a page; raises when it exceeds the limit."""

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
                f"metadata, which is the limit of one response. {self._advice}"
            )


def batches(ids: list[str]) -> Iterator[list[str]]:
    for start in range(0, len(ids), ROWS_PER_READ):
        yield ids[start : start + ROWS_PER_READ]


def within_metadata_budget(
    rows: Iterable[tuple[str, Mapping[str, Any]]], advice: str
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The same pairs of name and metadata; raises when they exceed the limit."""
    budget = MetadataBudget(advice)
    for name, metadata in rows:
        budget.add(metadata)
        yield name, metadata
