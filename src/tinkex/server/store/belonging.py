"""
Whether the files in a storage belong to the database that is looked at.

A database that was lost, or another one than before (`--db` forgotten), knows nothing of what lies
in the storage, and would take every checkpoint for left behind. Folders are named after models, and
those after sessions, whose rows are never deleted: what is of an unknown session is not ours.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from tinkex.server.store.among import among
from tinkex.server.store.database import Database, DatabaseRefused
from tinkex.server.store.files import Files
from tinkex.server.store.tables import sessions

#: Where folders have the names of models.
OF_MODELS = ("checkpoints", "snapshots")
# Parameters of one statement; every database takes as many.
AT_ONCE = 500


@dataclass(frozen=True, kw_only=True, slots=True)
class Belonging:
    """Sessions that have files, by whether the database knows them."""

    known: frozenset[str]
    strange: frozenset[str]

    @property
    def another(self) -> bool:
        """Nothing of all that is there is known: it is another database, or an empty one."""
        return bool(self.strange) and not self.known

    def may_go(self, place: str) -> bool:
        """Whether a file that no row points to may be taken for left behind."""
        room, _, name = place.partition("/")
        if room in OF_MODELS:
            return session_of(name) in self.known
        # These do not tell whose they are; a database that knows all sessions is theirs.
        return not self.strange


def session_of(name: str) -> str:
    """Of a model, or of something below the folder of one."""
    return name.partition("/")[0].partition(":")[0]


def named_in(files: Files) -> list[str]:
    """Sessions that have files; where they are far away this asks for two lists."""
    return sorted({session_of(name) for room in OF_MODELS for name in files.names(room)})


def belonging(connection: sa.Connection, named: Sequence[str]) -> Belonging:
    """What the database knows of them."""
    known = frozenset(_known(connection, named))
    return Belonging(known=known, strange=frozenset(named) - known)


def refuse_another(database: Database, files: Files) -> None:
    """Raises unless the files are this database's: its clients would hear that nothing is there."""
    named = named_in(files)
    if not named or not database.read_now(lambda rows: belonging(rows, named)).another:
        return
    raise DatabaseRefused(
        f"the database knows none of the {len(named)} sessions whose checkpoints or snapshots are "
        "in the storage: it is another one, or a new one in place of one that was lost. Check "
        "--data, --db and --storage; restore a back-up with `tinkex restore` if it was lost; or "
        "choose a new folder with --data to begin anew. Nothing was deleted."
    )


def _known(connection: sa.Connection, named: Sequence[str]) -> Iterator[str]:
    for start in range(0, len(named), AT_ONCE):
        some = named[start : start + AT_ONCE]
        statement = sa.select(sessions.c.session_id).where(among(sessions.c.session_id, some))
        yield from connection.scalars(statement)
