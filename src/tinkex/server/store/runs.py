"""Sessions, models and samplers: who made what, and what it is made of."""

import secrets
import string
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from tinkex.server.store import audit, request_writes
from tinkex.server.store.database import Database
from tinkex.server.store.request_writes import Accepted, NewRequest
from tinkex.server.store.schema import Status, custom_losses, models, requests, samplers, sessions
from tinkex.wire.errors import UserFailure

if TYPE_CHECKING:
    from tinkex.server.store.quotas import Quotas

BASE62 = string.digits + string.ascii_letters


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    session_id: str
    owner: str
    sdk_version: str | None
    user_metadata: Mapping[str, Any]
    finished_s: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """One training run: an adapter on a base model."""

    model_id: str
    owner: str
    session_id: str
    base_model: str
    lora_config: Mapping[str, Any]
    optimizer_config: Mapping[str, Any]
    user_metadata: Mapping[str, Any] | None
    created_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampler:
    """Something to sample from: a base model, or one immutable version of an adapter."""

    sampling_session_id: str
    owner: str
    session_id: str
    base_model: str
    version_id: str | None
    model_path: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class CustomLoss:
    """A loss that a user wrote, for the models of one session."""

    loss_id: str
    owner: str
    session_id: str
    #: The request as JSON.
    definition: bytes


class RunTaken(Exception):
    """There is a run with this id, and it is not the one that is being made."""


_SESSION = (
    sessions.c.session_id,
    sessions.c.owner,
    sessions.c.sdk_version,
    sessions.c.user_metadata,
    sessions.c.finished_s,
)
_MODEL = (
    models.c.model_id,
    models.c.owner,
    models.c.session_id,
    models.c.base_model,
    models.c.lora_config,
    models.c.optimizer_config,
    models.c.user_metadata,
    models.c.created_s,
)
_SAMPLER = (
    samplers.c.sampling_session_id,
    samplers.c.owner,
    samplers.c.session_id,
    samplers.c.base_model,
    samplers.c.version_id,
    samplers.c.model_path,
)


_CUSTOM_LOSS = (
    custom_losses.c.loss_id,
    custom_losses.c.owner,
    custom_losses.c.session_id,
    custom_losses.c.definition,
)


class Runs:
    """The rows of sessions and of what was made in them."""

    def __init__(self, database: Database, quotas: "Quotas") -> None:
        self._database = database
        self._quotas = quotas

    async def create_session(
        self,
        *,
        owner: str,
        sdk_version: str | None,
        tags: list[str],
        user_metadata: Mapping[str, Any],
        project_id: str | None,
        display_name: str | None,
        idempotency_key: str | None,
    ) -> Session:
        """A new session, or the one made by an earlier try of the same call."""

        def act(connection: sa.Connection) -> Session:
            if idempotency_key is not None:
                first = connection.execute(
                    sa.select(*_SESSION).where(
                        sessions.c.owner == owner, sessions.c.idempotency_key == idempotency_key
                    )
                ).first()
                if first is not None:
                    return Session(**first._mapping)
            session_id = _random_id()
            now_s = time.time()
            connection.execute(
                sessions.insert(),
                {
                    "session_id": session_id,
                    "owner": owner,
                    "sdk_version": sdk_version,
                    "tags": tags,
                    "user_metadata": dict(user_metadata),
                    "project_id": project_id,
                    "display_name": display_name,
                    "idempotency_key": idempotency_key,
                    "created_s": now_s,
                    "seen_s": now_s,
                },
            )
            details = {"session_id": session_id, "sdk_version": sdk_version}
            audit.note(connection, owner=owner, event="session.created", details=details)
            return Session(
                session_id=session_id,
                owner=owner,
                sdk_version=sdk_version,
                user_metadata=user_metadata,
                finished_s=None,
            )

        return await self._database.write(act)

    async def session(self, session_id: str) -> Session | None:
        statement = sa.select(*_SESSION).where(sessions.c.session_id == session_id)

        def act(connection: sa.Connection) -> Session | None:
            row = connection.execute(statement).first()
            return None if row is None else Session(**row._mapping)

        return await self._database.read(act)

    def seen(self, session_id: str) -> None:
        """Note, some time soon, that the client of a session is alive."""
        statement = (
            sessions.update().where(sessions.c.session_id == session_id).values(seen_s=time.time())
        )
        self._database.write_later(
            lambda connection: connection.execute(statement), about=("seen", session_id)
        )

    async def silent_sessions(self, before_s: float) -> list[str]:
        """Sessions not heard of since then, with nothing of theirs left to run."""
        busy = sa.select(requests.c.session_id).where(
            requests.c.status == Status.WAITING, requests.c.session_id.is_not(None)
        )
        statement = sa.select(sessions.c.session_id).where(
            sessions.c.finished_s.is_(None),
            sessions.c.lapsed_s.is_(None),
            sessions.c.seen_s < before_s,
            sessions.c.session_id.not_in(busy),
        )
        return await self._database.read(lambda connection: _texts(connection, statement))

    async def lapse_sessions(self, session_ids: Sequence[str]) -> None:
        """Mark sessions whose clients are taken for gone."""
        statement = (
            sessions.update()
            .where(sessions.c.session_id == sa.bindparam("silent"))
            .values(lapsed_s=time.time())
        )
        values = [{"silent": session_id} for session_id in session_ids]
        await self._database.write(lambda connection: connection.execute(statement, values))

    async def lapsed_sessions(self) -> list[str]:
        statement = sa.select(sessions.c.session_id).where(
            sessions.c.lapsed_s.is_not(None), sessions.c.finished_s.is_(None)
        )
        return await self._database.read(lambda connection: _texts(connection, statement))

    def revive_session(self, session_id: str) -> None:
        """Note, some time soon, that a client came back."""
        statement = (
            sessions.update()
            .where(sessions.c.session_id == session_id)
            .values(lapsed_s=None, seen_s=time.time())
        )
        self._database.write_later(
            lambda connection: connection.execute(statement), about=("revived", session_id)
        )

    def mark_failed(self, session_id: str, failure: Mapping[str, Any] | None) -> None:
        """Note, with the next transaction, why a session has failed, or that it has not."""
        statement = (
            sessions.update()
            .where(sessions.c.session_id == session_id)
            .values(failure=None if failure is None else dict(failure))
        )
        self._database.write_later(
            lambda connection: connection.execute(statement), about=("failed", session_id)
        )

    async def failed_sessions(self) -> list[str]:
        statement = sa.select(sessions.c.session_id).where(sessions.c.failure.is_not(None))
        return await self._database.read(lambda connection: _texts(connection, statement))

    async def finish_session(self, session_id: str, reason: str, detail: str | None) -> None:
        """The first reason stays."""
        statement = (
            sessions.update()
            .where(sessions.c.session_id == session_id, sessions.c.finished_s.is_(None))
            .values(finished_s=time.time(), finish_reason=reason, finish_detail=detail)
            .returning(sessions.c.owner)
        )
        details = {"session_id": session_id, "reason": reason}

        def act(connection: sa.Connection) -> None:
            if (row := connection.execute(statement).first()) is not None:
                audit.note(connection, owner=row.owner, event="session.finished", details=details)

        # What a session kept may go once it has ended.
        await self._database.write(act, reserve=True)

    async def create_model(
        self,
        *,
        model: Model,
        model_seq_id: int,
        request: NewRequest,
    ) -> Accepted:
        """
        The model and its step 0 in one transaction; a repeat finds the first.

        Over its owner's quota it is accepted and has failed, so that its future says so at once.
        Raises RunTaken when the run is a copied checkpoint, which has no step 0.
        """

        def act(connection: sa.Connection) -> Accepted:
            known = connection.execute(
                sa.select(models.c.last_request_s).where(
                    models.c.session_id == model.session_id,
                    models.c.model_seq_id == model_seq_id,
                )
            ).first()
            if known is None:
                connection.execute(
                    models.insert(),
                    {
                        "model_id": model.model_id,
                        "owner": model.owner,
                        "session_id": model.session_id,
                        "model_seq_id": model_seq_id,
                        "base_model": model.base_model,
                        "lora_config": dict(model.lora_config),
                        "optimizer_config": dict(model.optimizer_config),
                        "user_metadata": model.user_metadata and dict(model.user_metadata),
                        "created_s": model.created_s,
                    },
                )
            accepted = request_writes.insert(connection, request)
            if known is not None and accepted.is_new and known.last_request_s is None:
                raise RunTaken(model.model_id)  # it never had a step 0, not even one that is gone
            if accepted.is_new:
                try:
                    self._quotas.check(connection, model.owner, runs=1)
                except UserFailure as over:
                    ending = request_writes.failure(
                        accepted.request_id, str(over), category="user", cause="work"
                    )
                    request_writes.finish(connection, ending)
                    return replace(accepted, refused=str(over))
            return accepted

        return await self._database.write(act)

    async def model(self, model_id: str) -> Model | None:
        statement = sa.select(*_MODEL).where(models.c.model_id == model_id)

        def act(connection: sa.Connection) -> Model | None:
            row = connection.execute(statement).first()
            return None if row is None else Model(**row._mapping)

        return await self._database.read(act)

    async def last_request_s(self, model_id: str) -> float | None:
        """When the newest request of a model came."""
        statement = sa.select(sa.func.max(requests.c.created_s)).where(
            requests.c.model_id == model_id
        )
        return await self._database.read(lambda connection: connection.scalar(statement))

    async def create_sampler(self, sampler: Sampler, sampling_session_seq_id: int) -> Sampler:
        """A new sampler, or the one made by an earlier try of the same call."""
        return await self._database.write(
            lambda connection: insert_sampler(connection, sampler, sampling_session_seq_id)
        )

    async def sampler(self, sampling_session_id: str) -> Sampler | None:
        statement = sa.select(*_SAMPLER).where(
            samplers.c.sampling_session_id == sampling_session_id
        )

        def act(connection: sa.Connection) -> Sampler | None:
            row = connection.execute(statement).first()
            return None if row is None else Sampler(**row._mapping)

        return await self._database.read(act)

    async def join_sampler(self, sampling_session_id: str) -> int:
        """The number of one more client of a sampler, from 1; the original is 0."""
        statement = (
            samplers.update()
            .where(samplers.c.sampling_session_id == sampling_session_id)
            .values(clients=samplers.c.clients + 1)
            .returning(samplers.c.clients)
        )
        return await self._database.write(
            lambda connection: connection.execute(statement).scalar_one()
        )

    async def create_custom_loss(self, *, custom_loss_seq_id: int, request: NewRequest) -> Accepted:
        """The loss and its request in one transaction; a repeat finds the first."""

        def act(connection: sa.Connection) -> Accepted:
            first = connection.execute(
                sa.select(custom_losses.c.request_id).where(
                    custom_losses.c.session_id == request.session_id,
                    custom_losses.c.custom_loss_seq_id == custom_loss_seq_id,
                )
            ).first()
            if first is not None:
                return Accepted(
                    request_id=first.request_id, kind=request.kind, sequences=0, is_new=False
                )
            accepted = request_writes.insert(connection, request)
            connection.execute(
                custom_losses.insert(),
                {
                    "loss_id": _random_id(),
                    "owner": request.owner,
                    "session_id": request.session_id,
                    "custom_loss_seq_id": custom_loss_seq_id,
                    "request_id": accepted.request_id,
                    "definition": request.payload,
                    "created_s": time.time(),
                },
            )
            return accepted

        return await self._database.write(act)

    async def custom_loss(self, request_id: str) -> CustomLoss:
        """The loss that a request made."""
        statement = sa.select(*_CUSTOM_LOSS).where(custom_losses.c.request_id == request_id)
        return await self._database.read(
            lambda connection: CustomLoss(**connection.execute(statement).one()._mapping)
        )

    async def custom_losses(self, session_id: str) -> list[CustomLoss]:
        """All losses of a session, in the order of their numbers, those that failed included."""
        statement = (
            sa.select(*_CUSTOM_LOSS)
            .where(custom_losses.c.session_id == session_id)
            .order_by(custom_losses.c.custom_loss_seq_id)
        )
        return await self._database.read(
            lambda connection: [CustomLoss(**row._mapping) for row in connection.execute(statement)]
        )


def insert_sampler(
    connection: sa.Connection, sampler: Sampler, sampling_session_seq_id: int
) -> Sampler:
    """Add a sampler inside a transaction, unless its place is taken."""
    first = connection.execute(
        sa.select(*_SAMPLER).where(
            samplers.c.session_id == sampler.session_id,
            samplers.c.sampling_session_seq_id == sampling_session_seq_id,
        )
    ).first()
    if first is not None:
        return Sampler(**first._mapping)
    connection.execute(
        samplers.insert(),
        {
            "sampling_session_id": sampler.sampling_session_id,
            "owner": sampler.owner,
            "session_id": sampler.session_id,
            "sampling_session_seq_id": sampling_session_seq_id,
            "base_model": sampler.base_model,
            "version_id": sampler.version_id,
            "model_path": sampler.model_path,
            "created_s": time.time(),
        },
    )
    return sampler


def _texts(connection: sa.Connection, statement: sa.Select[str]) -> list[str]:
    return list(connection.scalars(statement))


def _random_id() -> str:
    """128 random bits in base 62: 22 characters, none of which means something in a path."""
    number = secrets.randbits(128)
    digits = []
    for _ in range(22):
        number, digit = divmod(number, 62)
        digits.append(BASE62[digit])
    return "".join(digits)
