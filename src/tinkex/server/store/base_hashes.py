"""Which content of its base model each run was made on."""

from typing import Any

import sqlalchemy as sa

from tinkex.server.store.database import Database
from tinkex.server.store.schema import checkpoint_versions, models


class BaseHashes:
    """A text in the row of a run; none until the content was known for the first time."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def fill(self, base_model: str, found: str) -> int:
        """Runs without a hash get this one; how many runs have another."""

        def act(connection: sa.Connection) -> int:
            _fill(connection, models.c.base_model == base_model, found)
            others = sa.select(sa.func.count()).where(
                models.c.base_model == base_model, models.c.base_hash != found
            )
            return connection.scalar(others) or 0

        return await self._database.write(act, must=True)

    async def replace(self, base_model: str, found: str) -> int:
        """All runs go on with this content; how many had another."""
        statement = (
            models.update()
            .where(models.c.base_model == base_model, models.c.base_hash != found)
            .values(base_hash=found)
        )
        return await self._database.write(
            lambda connection: connection.execute(statement).rowcount, must=True
        )

    def fill_run(self, model_id: str, found: str) -> None:
        """The same for one new run, with some later transaction."""
        self._database.write_later(
            lambda connection: _fill(connection, models.c.model_id == model_id, found)
        )

    async def of_run(self, model_id: str) -> str | None:
        return await self._one(sa.select(models.c.base_hash).where(models.c.model_id == model_id))

    async def of_version(self, version_id: str) -> str | None:
        """Of the run that a checkpoint was saved from."""
        return await self._one(
            sa.select(models.c.base_hash)
            .join(checkpoint_versions, checkpoint_versions.c.model_id == models.c.model_id)
            .where(checkpoint_versions.c.version_id == version_id)
        )

    async def _one(self, statement: sa.Select[Any]) -> str | None:
        return await self._database.read(lambda connection: connection.scalar(statement))


def _fill(connection: sa.Connection, whose: sa.ColumnElement[bool], found: str) -> None:
    connection.execute(
        models.update().where(whose, models.c.base_hash.is_(None)).values(base_hash=found)
    )
