"""What only the console lists: the requests of a run, an owner's samplers, and usage by day."""

from dataclasses import dataclass

import sqlalchemy as sa

from tinkex.server.store.database import Database, every
from tinkex.server.store.schema import requests, samplers, usage

HOURS_PER_DAY = 24


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRequest:
    """A request of a run whose row still exists."""

    request_id: str
    seq_id: int | None
    kind: str
    status: str
    created_s: float
    finished_s: float | None
    tokens: int
    error: str | None
    category: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ListedSampler:
    sampling_session_id: str
    session_id: str
    base_model: str
    model_path: str | None
    created_s: float
    clients: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DayUsage:
    """The amount of one kind of tokens that an owner used in a day."""

    owner: str
    #: Whole days since 1970, UTC.
    day: int
    base_model: str
    what: str
    amount: int


class ConsoleReads:
    """Every read has a limit."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def requests(
        self, model_id: str, *, limit: int, offset: int
    ) -> tuple[list[RunRequest], int]:
        """A page of the requests of a run, newest first, and the total."""
        columns = [requests.c[name] for name in RunRequest.__dataclass_fields__]
        of_run = requests.c.model_id == model_id
        page = sa.select(*columns).where(of_run).order_by(requests.c.seq_id.desc())
        count = sa.select(sa.func.count()).select_from(requests).where(of_run)

        def operation(connection: sa.Connection) -> tuple[list[RunRequest], int]:
            found = every(RunRequest, page.limit(limit).offset(offset))(connection)
            return found, connection.scalar(count) or 0

        return await self._database.read_report(operation)

    async def samplers(
        self, owner: str, *, limit: int, offset: int
    ) -> tuple[list[ListedSampler], int]:
        """A page of the owner's samplers, newest first, and the total."""
        columns = [samplers.c[name] for name in ListedSampler.__dataclass_fields__]
        of_owner = samplers.c.owner == owner
        # The id breaks ties, or pages would overlap.
        order = (samplers.c.created_s.desc(), samplers.c.sampling_session_id)
        page = sa.select(*columns).where(of_owner).order_by(*order)
        count = sa.select(sa.func.count()).select_from(samplers).where(of_owner)

        def operation(connection: sa.Connection) -> tuple[list[ListedSampler], int]:
            found = every(ListedSampler, page.limit(limit).offset(offset))(connection)
            return found, connection.scalar(count) or 0

        return await self._database.read_report(operation)

    async def usage_by_day(
        self, owner: str | None, *, first_hour: int, limit: int
    ) -> list[DayUsage]:
        """Usage since an hour, of one owner or of all, the newest day first."""
        day = (usage.c.hour // HOURS_PER_DAY).label("day")
        by = (usage.c.owner, usage.c.base_model, usage.c.what)
        statement = (
            sa.select(*by, day, sa.func.sum(usage.c.amount).label("amount"))
            .where(usage.c.hour >= first_hour)
            .group_by("day", *by)
            .order_by(sa.desc("day"), *by)
            .limit(limit)
        )
        if owner is not None:
            statement = statement.where(usage.c.owner == owner)
        return await self._database.read_report(every(DayUsage, statement))
