"""How often requests that wait were with an engine that died. Written only when one dies."""

from collections.abc import Mapping

import sqlalchemy as sa

from tinkex.server.store.database import Database
from tinkex.server.store.status import Status
from tinkex.server.store.tables import requests

_WAITING = requests.c.status == Status.WAITING
_NOTE = (
    requests.update()
    .where(requests.c.request_id == sa.bindparam("lost"), _WAITING)
    .values(deaths=sa.bindparam("times"))
)
_ALL = sa.select(requests.c.request_id, requests.c.deaths).where(_WAITING, requests.c.deaths > 0)
_CLEAR = requests.update().where(_WAITING, requests.c.deaths > 0).values(deaths=0)


class Deaths:
    """A number in the row of a request; it goes with the row."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def all(self) -> dict[str, int]:
        """Of everything that waits and was lost before."""
        return await self._database.read(
            lambda connection: {row.request_id: row.deaths for row in connection.execute(_ALL)}
        )

    async def note(self, deaths: Mapping[str, int]) -> None:
        """From now on these have been lost so often."""
        rows = [{"lost": request_id, "times": times} for request_id, times in deaths.items()]
        if rows:
            await self._database.write(
                lambda connection: connection.execute(_NOTE, rows), must=True
            )

    async def clear(self, base_model: str) -> None:
        """What was lost with engines of this model was lost because of another one."""
        statement = _CLEAR.where(requests.c.base_model == base_model)
        await self._database.write(lambda connection: connection.execute(statement), must=True)
