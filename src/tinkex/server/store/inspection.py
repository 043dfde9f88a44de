"""
Read-only inspection of a store, for `tinkex doctor` and `tinkex backup`.

Checks that all stored files exist and match their fingerprints, and that model logs have no gaps.
"""

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from tinkex.server.store import sql_dialects
from tinkex.server.store.blobs import PREFIX_DEPTHS, UNREADABLE, Files, folder_problem
from tinkex.server.store.connections import any_key
from tinkex.server.store.database_copy import CopyFailed
from tinkex.server.store.database_identity import session_ids_in, stored_sessions
from tinkex.server.store.migrations import current_version, known_versions
from tinkex.server.store.schema import (
    Status,
    checkpoint_versions,
    models,
    older_snapshots,
    requests,
    sessions,
    snapshots,
)
from tinkex.server.store.snapshots import SET_ASIDE
from tinkex.server.store.storage_health import Damaged
from tinkex.wire.checkpoints import tinker_path

PAYLOAD = "payload"
RESULT = "result"
CHECKPOINT = "checkpoint"
SNAPSHOT = "snapshot"
OLDER_SNAPSHOT = "older snapshot"

# Maximum number of integrity errors that are reported.
MAX_PROBLEMS = 20
# Steps that recovery replays and that need their payload.
_KINDS_WITH_PAYLOAD = ("create_model", "forward_backward", "optim_step", "load_weights")


@dataclass(frozen=True, kw_only=True, slots=True)
class DamagedItem:
    """A stored file or folder that is missing or damaged."""

    what: str
    #: The id of its request or model, or the path of its checkpoint.
    name: str
    key: str
    problem: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LogGap:
    """A model whose log has missing steps, so that recovery cannot rebuild it."""

    model_id: str
    #: Steps that are missing or have lost their payload.
    seq_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspection:
    """The result of an inspection."""

    #: Why the database cannot be opened, if it cannot.
    refused: str | None = None
    #: Integrity errors that the database reports.
    damage: tuple[str, ...] = ()
    #: The schema version; None if there are no tables.
    version: str | None = None
    newest_version: str = ""
    known_versions: frozenset[str] = frozenset()
    #: The number of checked files and folders.
    checked: int = 0
    damaged: tuple[DamagedItem, ...] = ()
    #: Keys that no row refers to.
    orphans: tuple[str, ...] = ()
    log_gaps: tuple[LogGap, ...] = ()
    #: Models with a fallback for their newest snapshot.
    has_fallback: frozenset[str] = frozenset()
    #: Damaged snapshots that were moved to `set-aside`.
    set_aside: int = 0
    #: Sessions that have stored files and are not in the database.
    unknown_sessions: tuple[str, ...] = ()
    #: Whether an API key was ever created.
    has_keys: bool = False
    #: Whether there are stored files, and none of them belongs to the database.
    is_wrong_database: bool = False


def inspect(url: str, files: Files, *, young_s: float, abandoned_s: float) -> Inspection:
    """Inspect a store. Files younger than `young_s` are not orphans: requests may be running."""
    versions = known_versions()
    newest, known = versions[0], frozenset(versions)
    database = sa.make_url(url).database
    if url.startswith("sqlite") and (not database or not Path(database).is_file()):
        return Inspection(refused=f"there is no file {database}", newest_version=newest)
    engine = sa.create_engine(url)
    try:
        with engine.connect() as connection:
            damage = _integrity_errors(connection)
            version = None if damage else current_version(connection)
            if damage or version != newest:
                return Inspection(
                    damage=damage,
                    version=version,
                    newest_version=newest,
                    known_versions=known,
                    is_wrong_database=version is None
                    and not damage
                    and bool(session_ids_in(files)),
                )
            return _inspect_files(
                connection,
                files,
                newest=newest,
                known=known,
                young_s=young_s,
                abandoned_s=abandoned_s,
            )
    except sa.exc.DBAPIError as error:
        reason = str(error.orig).strip().partition("\n")[0]
        if isinstance(error, sa.exc.OperationalError):
            return Inspection(refused=reason, newest_version=newest)
        return Inspection(damage=(reason,), newest_version=newest)
    finally:
        engine.dispose()


def _integrity_errors(connection: sa.Connection) -> tuple[str, ...]:
    if connection.dialect.name != "sqlite":
        return ()
    found = connection.exec_driver_sql(f"PRAGMA integrity_check({MAX_PROBLEMS})").scalars().all()
    problems = [str(line) for line in found if line != "ok"]
    if not problems:
        rows = connection.exec_driver_sql("PRAGMA foreign_key_check").all()
        problems = [f"a row of {row[0]} refers to a missing row of {row[2]}" for row in rows]
    return tuple(problems[:MAX_PROBLEMS])


def _inspect_files(
    connection: sa.Connection,
    files: Files,
    *,
    newest: str,
    known: frozenset[str],
    young_s: float,
    abandoned_s: float,
) -> Inspection:
    damaged, keys = [], set()
    for what, name, key, written in references(connection):
        keys.add(key)
        if (problem := _problem(files, what, key, written)) is not None:
            damaged.append(DamagedItem(what=what, name=name, key=key, problem=problem))
    before_s = time.time() - young_s
    stored = stored_sessions(connection, session_ids_in(files))
    orphans = [
        key
        for prefix, depth in PREFIX_DEPTHS.items()
        for key in files.list_older(prefix, depth, before_s=before_s)
        if key not in keys and stored.may_delete(key)
    ]
    return Inspection(
        version=newest,
        newest_version=newest,
        known_versions=known,
        checked=len(keys),
        damaged=tuple(damaged),
        orphans=tuple(sorted(orphans)),
        log_gaps=tuple(_log_gaps(connection, seen_after_s=time.time() - abandoned_s)),
        has_fallback=frozenset(connection.scalars(sa.select(older_snapshots.c.model_id))),
        unknown_sessions=tuple(sorted(stored.unknown_sessions)),
        is_wrong_database=stored.is_wrong_database,
        has_keys=any_key(connection),
        set_aside=len(files.list_older(f"{SET_ASIDE}/snapshots", 2, before_s=float("inf"))),
    )


def references(connection: sa.Connection) -> Iterator[tuple[str, str, str, str | None]]:
    """Every key in the rows: what it is, its name, the key, and its fingerprint if there is one."""
    columns: tuple[tuple[str, Any, Any, Any], ...] = (
        (PAYLOAD, requests.c.request_id, requests.c.payload_place, sa.null()),
        (RESULT, requests.c.request_id, requests.c.result_place, sa.null()),
        (SNAPSHOT, snapshots.c.model_id, snapshots.c.place, snapshots.c.fingerprint),
        (
            OLDER_SNAPSHOT,
            older_snapshots.c.model_id,
            older_snapshots.c.place,
            older_snapshots.c.fingerprint,
        ),
    )
    for what, name, key, written in columns:
        statement = sa.select(name, key, written).where(key.is_not(None))
        for row in connection.execute(statement):
            yield what, row[0], row[1], row[2]
    versions = checkpoint_versions.c
    statement = sa.select(versions.model_id, versions.kind, versions.name, versions.version_id)
    statement = statement.add_columns(versions.place, versions.fingerprint)
    for row in connection.execute(statement.where(versions.discarded_s.is_(None))):
        name = row.name or f".{row.version_id}"
        yield CHECKPOINT, tinker_path(row.model_id, row.kind, name), row.place, row.fingerprint


def _problem(files: Files, what: str, key: str, written: str | None) -> str | None:
    if what in (PAYLOAD, RESULT):
        try:
            files.get(key)
        except Damaged as damaged:
            return str(damaged)
        return None
    if files.local is not None:
        try:
            return folder_problem(f"{files.local}/{key}", key, written)
        except OSError as error:
            return f"{UNREADABLE}: {error.strerror} ({error.filename or key})"
    # Object stores have their own checksums: only check that it exists.
    return None if files.exists(key) else f"is missing: there is no folder {key}"


def _log_gaps(connection: sa.Connection, *, seen_after_s: float) -> Iterator[LogGap]:
    """Models of open sessions whose logs have gaps after their oldest snapshot."""
    first = sa.func.coalesce(older_snapshots.c.seq_id, snapshots.c.seq_id, -1)
    empty = sa.and_(requests.c.payload.is_(None), requests.c.payload_place.is_(None))
    statement = (
        sa.select(
            requests.c.model_id,
            requests.c.seq_id,
            requests.c.cause,
            first.label("replay_after"),
            sa.and_(
                empty, requests.c.status == Status.DONE, requests.c.kind.in_(_KINDS_WITH_PAYLOAD)
            ).label("empty"),
        )
        .join(models, models.c.model_id == requests.c.model_id)
        .join(sessions, sessions.c.session_id == models.c.session_id)
        .outerjoin(snapshots, snapshots.c.model_id == requests.c.model_id)
        .outerjoin(older_snapshots, older_snapshots.c.model_id == requests.c.model_id)
        .where(
            requests.c.seq_id > first,
            requests.c.status != Status.WAITING,
            sessions.c.finished_s.is_(None),
            sessions.c.seen_s > seen_after_s,
        )
        .order_by(requests.c.model_id, requests.c.seq_id)
    )
    missing: defaultdict[str, list[int]] = defaultdict(list)
    last: dict[str, int] = {}
    for row in connection.execute(statement):
        before = last.get(row.model_id, row.replay_after)
        # A step that never arrived is not a gap: the step after it failed with this cause.
        if row.cause != "gap":
            missing[row.model_id] += range(before + 1, row.seq_id)
        if row.empty:
            missing[row.model_id].append(row.seq_id)
        last[row.model_id] = row.seq_id
    for model_id, seq_ids in missing.items():
        if seq_ids:
            yield LogGap(model_id=model_id, seq_ids=tuple(seq_ids))


def rebuild_indexes(url: str) -> None:
    """Rebuild the indexes from the tables."""
    engine = sa.create_engine(url)
    with contextlib.closing(engine.raw_connection()) as connection:
        connection.cursor().execute("REINDEX")
        connection.commit()
    engine.dispose()


def referenced_keys(url: str) -> set[str]:
    """The keys of all files and folders that rows refer to."""
    engine = sa.create_engine(url)
    try:
        with engine.connect() as connection:
            return {key for _, _, key, _ in references(connection)}
    except sa.exc.DBAPIError as error:
        raise CopyFailed(
            f"its schema is not the one of this version ({error.orig}); start the server once"
        ) from error
    finally:
        engine.dispose()


def database_holder(url: str) -> str | None:
    """A process that uses a PostgreSQL database now; None if nobody does, or if it is SQLite."""
    if not url.startswith("postgresql"):
        return None
    engine = sa.create_engine(url)
    try:
        with engine.connect() as connection:
            return sql_dialects.lock_holder(connection)
    except sa.exc.DBAPIError:
        return None  # `inspect` says why it cannot be read
    finally:
        engine.dispose()


def schema_version(url: str) -> str | None:
    """The schema version of a database."""
    engine = sa.create_engine(url)
    try:
        with engine.connect() as connection:
            return current_version(connection)
    finally:
        engine.dispose()
