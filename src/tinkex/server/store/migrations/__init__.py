"""
The schema version of a database: reads it, refuses unsupported ones, upgrades the rest.

A new database gets the tables of `schema` and the newest version. A file in `versions` changes the
tables of the version before it.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from tinkex.server.store.schema import metadata
from tinkex.server.store.sql_dialects import lock_migrations
from tinkex.server.store.storage_health import DatabaseRefused

#: The oldest schema version that can be upgraded.
OLDEST = "0008"


@dataclass(frozen=True, slots=True)
class Outdated:
    """A schema version that is not the newest; None for a database without tables."""

    version: str | None
    newest: str

    @property
    def is_empty(self) -> bool:
        return self.version is None

    def __str__(self) -> str:
        found = "has no tables" if self.is_empty else f"has schema version {self.version}"
        return f"the database {found}, and this tinkex needs version {self.newest}"


def alembic_config() -> Config:
    """Tells Alembic where the migration scripts are."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent))
    return config


def known_versions() -> list[str]:
    """All schema versions this tinkex can open, newest first."""
    scripts = ScriptDirectory.from_config(alembic_config())
    return [script.revision for script in scripts.walk_revisions()]


def current_version(connection: sa.Connection) -> str | None:
    """The schema version of a database; None if it has no tables."""
    return MigrationContext.configure(connection).get_current_revision()


def outdated(engine: sa.Engine) -> Outdated | None:
    """How the schema differs from the newest, without changing it; None if it does not."""
    known = known_versions()
    with engine.connect() as connection:
        found = current_version(connection)
    if found is not None and found not in known:
        problem, advice = unsupported(found)
        raise DatabaseRefused(f"the database {engine.url!r} {problem}. {advice}")
    return None if found == known[0] else Outdated(found, known[0])


def unsupported(version: str) -> tuple[str, str]:
    """Why a schema version that is not in `known_versions` cannot be opened, and what to do."""
    if version < OLDEST:
        return (
            f"has schema version {version}, and the oldest that this tinkex upgrades is {OLDEST}",
            "Start a server of tinkex 0.1 on it once, then use this version.",
        )
    return (
        f"has schema version {version}, which this tinkex does not know",
        "It was made by a newer tinkex: use that one, or restore an older backup: `tinkex restore`.",
    )


def migrate(engine: sa.Engine) -> None:
    """Create the tables of `schema`, or upgrade older ones to them."""
    config = alembic_config()
    logging.getLogger("alembic").setLevel(logging.WARNING)
    with engine.begin() as connection:
        # Another process may start at the same time. Then one of them changes the tables.
        lock_migrations(connection)
        if current_version(connection) is None:
            metadata.create_all(connection)
            scripts = ScriptDirectory.from_config(config)
            MigrationContext.configure(connection).stamp(scripts, "head")
            return
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
