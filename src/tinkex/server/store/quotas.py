"""
How much an owner may keep: bytes of checkpoints, checkpoints, runs. Checked where the rows are added.

What counts:

* bytes: files of all saves and copies that are there, also those without a name. A save that was
  deleted or overwritten counts until nothing uses its files.
* checkpoints: those that are listed, so with a name, and not expired.
* runs: those whose session goes on, or that have a checkpoint.
"""

import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields

import sqlalchemy as sa

from tinkex.server.store.checkpoint_lists import alive, was_made
from tinkex.server.store.database import Database
from tinkex.server.store.retention import ended
from tinkex.server.store.schema import (
    api_keys,
    checkpoint_names,
    checkpoint_versions,
    models,
    sessions,
)
from tinkex.wire.errors import UserFailure

_WHAT = {
    "max_checkpoint_bytes": "bytes of checkpoints",
    "max_checkpoints": "checkpoints",
    "max_runs": "training runs",
}
_ADVICE = {
    "max_checkpoint_bytes": "Delete checkpoints that you do not need (`tinkex checkpoint delete`), "
    "or save with `ttl_seconds`. Saves without a name, for sampling, go when their session ends.",
    "max_checkpoints": "Delete some that you do not need (`tinkex checkpoint delete`), or save with "
    "`ttl_seconds`.",
    "max_runs": "A run counts until its client is closed and its checkpoints are deleted or have "
    "expired (`tinkex checkpoint delete`).",
}


class OverQuota(UserFailure):
    """More than an owner may keep; the text has what there is, what is allowed, and what to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Quota:
    """What one owner may keep; 0 is no limit."""

    max_checkpoint_bytes: int = 0
    max_checkpoints: int = 0
    max_runs: int = 0

    @classmethod
    def of(cls, settings: object) -> "Quota":
        return cls(**{field.name: getattr(settings, field.name) for field in fields(cls)})


def allowed(server: Quota, keys: Iterable[Mapping[str, int]]) -> Quota:
    """
    What an owner with these limits of keys may keep.

    Things belong to owners and not to keys: the most that one of their keys allows counts.
    """
    of_keys = list(keys) or [{}]
    most = {}
    for field in fields(Quota):
        numbers = [key.get(field.name, getattr(server, field.name)) for key in of_keys]
        most[field.name] = 0 if 0 in numbers else max(numbers)
    return Quota(**most)


def over(name: str, *, used: int, new: int, most: int) -> str | None:
    """Why one more is too much; None when it fits. Something whose size is not known yet is 0."""
    if not most or used + max(new, 1) <= most:
        return None
    more = f", this needs {new} more" if new else ""
    return (
        f"over quota: you keep {used} {_WHAT[name]}{more}, and {most} are allowed ({name}). "
        f"{_ADVICE[name]} Whoever runs the server can allow more."
    )


class Quotas:
    """What owners keep, against what they may."""

    def __init__(self, database: Database) -> None:
        self._database = database
        #: For owners whose keys say nothing else.
        self.server = Quota()
        #: After so much silence a session is taken for ended.
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
        """Inside the transaction that has added so much: raises OverQuota."""
        added = {
            "max_checkpoint_bytes": size_bytes,
            "max_checkpoints": checkpoints,
            "max_runs": runs,
        }
        new = {name: count for name, count in added.items() if count}
        quota = self._allowed(connection, owner)
        for name, used in self._used(connection, owner, quota, new):
            _refuse(name, used=used - new[name], new=new[name], quota=quota)

    async def refuse_save(self, owner: str, *, checkpoints: int) -> None:
        """Before files are written: raises OverQuota if they cannot fit, whatever their size."""
        new = {"max_checkpoint_bytes": 0}
        if checkpoints:
            new["max_checkpoints"] = checkpoints

        def act(connection: sa.Connection) -> None:
            quota = self._allowed(connection, owner)
            for name, used in self._used(connection, owner, quota, new):
                _refuse(name, used=used, new=new[name], quota=quota)

        await self._database.read(act)

    def _allowed(self, connection: sa.Connection, owner: str) -> Quota:
        keys = sa.select(api_keys.c.limits).where(
            api_keys.c.owner == owner,
            api_keys.c.revoked_s.is_(None),
            sa.or_(api_keys.c.expires_s.is_(None), api_keys.c.expires_s > time.time()),
        )
        return allowed(self.server, connection.scalars(keys))

    def _used(
        self, connection: sa.Connection, owner: str, quota: Quota, names: Collection[str]
    ) -> Iterator[tuple[str, int]]:
        """What there is of these, as far as they are limited."""
        now_s = time.time()
        for name, statement in (
            ("max_checkpoint_bytes", _bytes(owner)),
            ("max_checkpoints", _checkpoints(owner, now_s)),
            ("max_runs", _runs(owner, now_s, now_s - self.abandoned_s)),
        ):
            if name in names and getattr(quota, name):
                yield name, int(connection.scalar(statement) or 0)


def _refuse(name: str, *, used: int, new: int, quota: Quota) -> None:
    if (reason := over(name, used=used, new=new, most=getattr(quota, name))) is not None:
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
        .where(models.c.owner == owner, alive(now_s))
    )


def _runs(owner: str, now_s: float, abandoned_before_s: float) -> sa.Select[int]:
    named = sa.exists().where(checkpoint_names.c.model_id == models.c.model_id, alive(now_s))
    return (
        sa.select(sa.func.count())
        .select_from(models)
        .join(sessions, sessions.c.session_id == models.c.session_id)
        .where(
            models.c.owner == owner,
            was_made(),
            sa.or_(sa.not_(ended(abandoned_before_s)), named),
        )
    )
