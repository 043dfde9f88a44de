"""Finding the first self of a request without writing anything."""

import sqlalchemy as sa

from tinkex.server.store.accepting import Accepted, NewRequest
from tinkex.server.store.database import Database
from tinkex.server.store.tables import custom_losses, requests


class Repeats:
    """A request is repeated when its client did not get the answer. The place is what counts."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def find(self, new: NewRequest) -> Accepted | None:
        """The request that has this place in the line of its model or sampler, if there is one."""
        if new.seq_id is None:
            return None
        place = (
            requests.c.model_id == new.model_id
            if new.model_id is not None
            else requests.c.sampling_session_id == new.sampling_session_id
        )
        statement = sa.select(requests.c.request_id, requests.c.kind, requests.c.sequences).where(
            place, requests.c.seq_id == new.seq_id
        )
        row = await self._database.read(lambda connection: connection.execute(statement).first())
        return None if row is None else Accepted(**row._mapping, is_new=False)

    async def has_loss(self, session_id: str, number: int) -> bool:
        """Whether a session has a loss of this number."""
        statement = sa.select(custom_losses.c.loss_id).where(
            custom_losses.c.session_id == session_id,
            custom_losses.c.custom_loss_seq_id == number,
        )
        return await self._database.read(
            lambda connection: connection.execute(statement).first() is not None
        )
