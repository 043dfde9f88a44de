"""
Quotas: what owners may store.

* bytes: the files of all saves and copies, also unnamed ones. A save that was deleted or overwritten
  counts until nothing uses its files.
* checkpoints: those that are listed: with a name, and not expired.
* runs: those whose session is open, or that have a checkpoint.
"""

import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TypeVar

import sqlalchemy as sa

from tinkex.server.store.conditions import not_expired, session_ended, was_created
from tinkex.server.store.database import Database
from tinkex.server.store.retention import Retention
from tinkex.server.store.schema import (
    api_keys,
    checkpoint_names,
    checkpoint_versions,
    models,
    sessions,
)
from tinkex.wire.errors import UserFailure

T = TypeVar("T")

_WHAT = {
    "max_checkpoint_bytes": "bytes of checkpoints",
    "max_checkpoints": "checkpoints",
    "max_runs": "training runs",
}
_ADVICE = {
    "max_checkpoint_bytes": "Delete checkpoints that you do not need (`tinkex checkpoint delete`), "
    "or save with `ttl_seconds`. Unnamed saves for sampling are deleted when their session ends.",
    "max_checkpoints": "Delete some that you do not need (`tinkex checkpoint delete`), or save with "
    "`ttl_seconds`.",
    "max_runs": "A run counts until its client is closed and its checkpoints are deleted or have "
    "expired (`tinkex checkpoint delete`).",
}


class OverQuota(UserFailure):
    """An owner would store more than allowed; the text has usage, limit, and what to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Quota:
    """What one owner may store; 0 is unlimited."""

    max_checkpoint_bytes: int = 0
    max_checkpoints: int = 0
    max_runs: int = 0

    @classmethod
    def of(cls, settings: object) -> "Quota":
        return cls(**{field.name: getattr(settings, field.name) for field in fields(cls)})


def owner_quota(server: Quota, keys: Iterable[Mapping[str, int]]) -> Quota:
    """
    The quota of an owner whose API keys have these limits.

    Checkpoints belong to owners, not to keys, so the highest limit among their keys counts.
    """
    of_keys = list(keys) or [{}]
    most = {}
    for field in fields(Quota):
        numbers = [key.get(field.name, getattr(server, field.name)) for key in of_keys]
        most[field.name] = 0 if 0 in numbers else max(numbers)
    return Quota(**most)


def over_quota_message(name: str, *, used: int, new: int, limit: int) -> str | None:
    """Why `new` more is over the quota; None if it fits. 0 is an unknown size."""
    if not limit or used + max(new, 1) <= limit:
        return None
    more = f", this needs {new} more" if new else ""
    return (
        f"over quota: you have {used} {_WHAT[name]}{more}, and {limit} are allowed ({name}). "
        f"{_ADVICE[name]} The operator of the server can allow more."
    )


class Quotas:
    """Checks what owners store against their quota."""

    def __init__(self, database: Database, retention: Retention) -> None:
        self._database = database
        self._retention = retention
        #: The quota of owners whose keys set none.
        self.server = Quota()
        #: A session without activity for this long counts as ended.
        self.abandoned_s = float("inf")

    def check(
        self,
        connection: sa.Connection,
        owner: str,
        *,
        size_bytes: int = 0,
        checkpoints: int = 0,
        runs: int = 0,
    ) -> None:
        """Raise OverQuota inside the transaction that has added this much, if it is too much."""
        added = {
            "max_checkpoint_bytes": size_bytes,
            "max_checkpoints": checkpoints,
            "max_runs": runs,
        }
        new = {name: count for name, count in added.items() if count}
        quota = self._allowed(connection, owner)
        for name, used in self._used(connection, owner, quota, new):
            _refuse_over_quota(name, used=used - new[name], new=new[name], quota=quota)

    async def refuse_save(self, owner: str, *, checkpoints: int) -> None:
        """Called before files are written: raise OverQuota if not even an empty save would fit."""
        new = {"max_checkpoint_bytes": 0}
        if checkpoints:
            new["max_checkpoints"] = checkpoints

        def operation(connection: sa.Connection) -> None:
            quota = self._allowed(connection, owner)
            for name, used in self._used(connection, owner, quota, new):
                _refuse_over_quota(name, used=used, new=new[name], quota=quota)

        await self._database.read(operation)

    async def within(self, owner: str, function: Callable[[], Awaitable[T]]) -> T:
        """
        The result of `function`. On OverQuota, delete the owner's unused files and retry once.

        The cleanup would delete them a little later; the user cannot delete them earlier.
        """
        try:
            return await function()
        except OverQuota:
            abandoned_before_s = time.time() - self.abandoned_s
            await self._retention.drop_versions(abandoned_before_s=abandoned_before_s, owner=owner)
        return await function()

    def _allowed(self, connection: sa.Connection, owner: str) -> Quota:
        keys = sa.select(api_keys.c.limits).where(
            api_keys.c.owner == owner,
            api_keys.c.revoked_s.is_(None),
            sa.or_(api_keys.c.expires_s.is_(None), api_keys.c.expires_s > time.time()),
        )
        return owner_quota(self.server, connection.scalars(keys))

    def _used(
        self, connection: sa.Connection, owner: str, quota: Quota, names: Collection[str]
    ) -> Iterator[tuple[str, int]]:
        """The name and usage of each of these quotas that has a limit."""
        now_s = time.time()
        # Built only when needed: a save does not count runs.
        statements: dict[str, Callable[[], sa.Select[int]]] = {
            "max_checkpoint_bytes": lambda: _bytes(owner),
            "max_checkpoints": lambda: _checkpoints(owner, now_s),
            "max_runs": lambda: _runs(owner, now_s, now_s - self.abandoned_s),
        }
        for name, statement in statements.items():
            if name in names and getattr(quota, name):
                yield name, int(connection.scalar(statement()) or 0)


def _refuse_over_quota(name: str, *, used: int, new: int, quota: Quota) -> None:
    if (
        reason := over_quota_message(name, used=used, new=new, limit=getattr(quota, name))
    ) is not None:
        raise OverQuota(reason)


def _bytes(owner: str) -> sa.Select[int]:
    return sa.select(sa.func.sum(checkpoint_versions.c.size_bytes)).where(
        checkpoint_versions.c.owner == owner, checkpoint_versions.c.discarded_s.is_(None)
    )


def _checkpoints(owner: str, now_s: float) -> sa.Select[int]:
    return (
        sa.select(sa.func.count())
        .select_from(checkpoint_names)
        .join(models, models.c.model_id == checkpoint_names.c.model_id)
        .where(models.c.owner == owner, not_expired(now_s))
    )


def _runs(owner: str, now_s: float, abandoned_before_s: float) -> sa.Select[int]:
    named = sa.exists().where(checkpoint_names.c.model_id == models.c.model_id, not_expired(now_s))
    return (
        sa.select(sa.func.count())
        .select_from(models)
        .join(sessions, sessions.c.session_id == models.c.session_id)
        .where(
            models.c.owner == owner,
            was_created(),
            sa.or_(sa.not_(session_ended(abandoned_before_s)), named),
        )
    )
