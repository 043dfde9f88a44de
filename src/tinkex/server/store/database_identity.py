"""
Database identity: do the stored files belong to this database?

A lost database, or another one (`--db` forgotten), knows none of the files and would delete every
checkpoint as an orphan. Folders are named after sessions, whose rows are never deleted: files of an
unknown session are not deleted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from tinkex.server.store.blobs import Files
from tinkex.server.store.database import Database
from tinkex.server.store.schema import sessions
from tinkex.server.store.sql_dialects import in_list
from tinkex.server.store.storage_health import DatabaseRefused

#: Key prefixes whose folders have the names of models.
MODEL_PREFIXES = ("checkpoints", "snapshots")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredSessions:
    """Sessions with stored files, by whether they are in the database."""

    known: frozenset[str]
    unknown_sessions: frozenset[str]

    @property
    def is_wrong_database(self) -> bool:
        """Whether none of the files belongs to this database: it is another or an empty one."""
        return bool(self.unknown_sessions) and not self.known

    def may_delete(self, key: str) -> bool:
        """Whether a file that no row refers to may be deleted."""
        prefix, _, name = key.partition("/")
        if prefix in MODEL_PREFIXES:
            return session_of(name) in self.known
        # The key has no session id; safe if all sessions with files are in the database.
        return not self.unknown_sessions


def session_of(name: str) -> str:
    """The session id in the name of a model, or in a key below its folder."""
    return name.partition("/")[0].partition(":")[0]


def session_ids_in(files: Files) -> list[str]:
    """Ids of sessions with stored files. In an object store this takes two listings."""
    return sorted(
        {session_of(name) for prefix in MODEL_PREFIXES for name in files.top_names(prefix)}
    )


def stored_sessions(connection: sa.Connection, session_ids: Sequence[str]) -> StoredSessions:
    """Which of these sessions are in the database."""
    statement = sa.select(sessions.c.session_id).where(in_list(sessions.c.session_id, session_ids))
    known = frozenset(connection.scalars(statement))
    return StoredSessions(known=known, unknown_sessions=frozenset(session_ids) - known)


def refuse_wrong_database(database: Database, files: Files) -> None:
    """Raise if the stored files belong to another database."""
    session_ids = session_ids_in(files)
    stored = database.read_sync(lambda connection: stored_sessions(connection, session_ids))
    if not stored.is_wrong_database:
        return
    raise DatabaseRefused(
        f"the database has none of the {len(session_ids)} sessions whose checkpoints or snapshots "
        "are in the storage: it is another database, or a new one in place of a lost one. Check "
        "--data, --db and --storage; if the database was lost, restore a backup with `tinkex "
        "restore`; or choose a new folder with --data to start over. Nothing was deleted."
    )
