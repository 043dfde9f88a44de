"""
Ownership of models, for several workers on one database.

A worker that wants to run the steps of a model takes it: it becomes the model's home, and the term of
the model grows by one. Whoever had the model before may not know yet: it may be cut off, or its process
may be stopped. So every transaction that publishes something of a model checks the term first, under a
lock that a take-over has to wait for. Clocks decide when to take a model over, never whether that is
safe.

A server that is alone on its database needs none of this, and has no `Ownership`.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import sqlalchemy as sa

from tinkex.server.store import step_rows
from tinkex.server.store.schema import models
from tinkex.server.store.sql_dialects import in_list, list_parameter

if TYPE_CHECKING:
    from tinkex.server.store.database import Database


class NotOwner(Exception):
    """Another worker has taken these models: nothing of them may be published here."""

    def __init__(self, model_ids: list[str]) -> None:
        super().__init__(f"another worker has {', '.join(model_ids)}")
        self.model_ids = model_ids


_TERMS = (
    sa.select(models.c.model_id, models.c.term)
    .where(in_list(models.c.model_id, sa.bindparam("wanted", type_=sa.Text)))
    # In one order, so that two transactions do not wait for each other.
    .order_by(models.c.model_id)
    # In PostgreSQL, a take-over waits for the end of this transaction. Accepting requests does not:
    # it locks only the key of the row. SQLite has one transaction that writes at a time.
    .with_for_update(read=True)
)


def check_terms(connection: sa.Connection, terms: Mapping[str, int]) -> None:
    """
    Raise NotOwner unless all these models still have these terms.

    The first statement of a transaction that publishes something of them.
    """
    rows = connection.execute(_TERMS, {"wanted": list_parameter(list(terms))})
    current = {row.model_id: row.term for row in rows}
    lost = [model_id for model_id, term in terms.items() if current.get(model_id) != term]
    if lost:
        raise NotOwner(lost)


class Ownership:
    """The models of one worker."""

    def __init__(self, database: "Database", worker: str) -> None:
        self._database = database
        self.worker = worker

    async def take(self, model_id: str) -> int:
        """
        Begin to run the steps of a model; returns its new term. NotOwner if another is its home.

        `Workers.rehome` makes this worker the home of a model whose worker is dead.
        """
        statement = (
            models.update()
            .where(
                models.c.model_id == model_id,
                sa.or_(models.c.home.is_(None), models.c.home == self.worker),
            )
            .values(home=self.worker, term=models.c.term + 1)
            .returning(models.c.term)
        )

        def operation(connection: sa.Connection) -> int:
            taken: int | None = connection.execute(statement).scalar()
            if taken is None:
                raise NotOwner([model_id])
            # Others have written its steps since this process did.
            step_rows.forget_run(connection, model_id)
            return taken

        return await self._database.write(operation, required=True)

    async def home(self, model_id: str) -> tuple[str | None, int]:
        """The worker that has a model, and the term."""
        statement = sa.select(models.c.home, models.c.term).where(models.c.model_id == model_id)

        def operation(connection: sa.Connection) -> tuple[str | None, int]:
            row = connection.execute(statement).one()
            return row.home, row.term

        return await self._database.read(operation)
