"""Models, samplers and custom losses of sessions, and the base-model hash of each run."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import sqlalchemy as sa

from tinkex.server.queued_request import PASSES, Outcome, QueuedRequest
from tinkex.server.store import request_rows
from tinkex.server.store.database import Database, columns, every, one, scalar, values
from tinkex.server.store.keys import random_id
from tinkex.server.store.quotas import Quotas
from tinkex.server.store.schema import (
    checkpoint_versions,
    custom_losses,
    models,
    samplers,
)
from tinkex.wire.errors import UserFailure


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A training run: an adapter on a base model."""

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
    """What a sampling client samples from: a base model, or one immutable adapter version."""

    sampling_session_id: str
    owner: str
    session_id: str
    base_model: str
    version_id: str | None
    model_path: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class CustomLoss:
    """A user-written loss, for the models of one session."""

    loss_id: str
    owner: str
    session_id: str
    #: The request as JSON.
    definition: bytes


class RunTaken(Exception):
    """Another run already has this id."""


MODEL_COLUMNS = columns(Model, models)
_SAMPLERS = sa.select(*columns(Sampler, samplers))
_CUSTOM_LOSSES = sa.select(*columns(CustomLoss, custom_losses))
_HOMES = (
    sa.select(models.c.home)
    .where(models.c.session_id == sa.bindparam("session_id"))
    .order_by(models.c.model_id)
    .with_for_update(read=True)
)


class Models:
    """The rows of models, samplers and custom losses."""

    def __init__(self, database: Database, quotas: Quotas) -> None:
        self._database = database
        self._quotas = quotas

    async def create_model(
        self,
        *,
        model: Model,
        model_seq_id: int,
        request: QueuedRequest,
    ) -> QueuedRequest:
        """
        Insert a model and its step 0 in one transaction; a repeat returns the first.

        If the owner is over quota, step 0 is stored as failed and has an outcome.
        Raises RunTaken if the run is a copied checkpoint, which has no step 0.
        """

        def operation(connection: sa.Connection) -> QueuedRequest:
            known = connection.execute(
                sa.select(models.c.last_request_s).where(
                    models.c.session_id == model.session_id,
                    models.c.model_seq_id == model_seq_id,
                )
            ).first()
            if known is None:
                row = {**values(model), "model_seq_id": model_seq_id, "home": request.home}
                connection.execute(models.insert(), row)
            first = request_rows.insert(connection, request)
            if first is not request:
                return first
            if known is not None and known.last_request_s is None:
                raise RunTaken(model.model_id)  # it never had a step 0, not even a deleted one
            request.outcome = None
            try:
                self._quotas.check(connection, model.owner, runs=1)
            except UserFailure as over:
                request.outcome = Outcome(error=str(over), category="user")
                request_rows.finish(connection, request, request.outcome)
            return request

        return await self._database.write(operation)

    async def model(self, model_id: str) -> Model | None:
        statement = sa.select(*MODEL_COLUMNS).where(models.c.model_id == model_id)
        return await self._database.read(one(Model, statement))

    async def create_sampler(self, sampler: Sampler, sampling_session_seq_id: int) -> Sampler:
        """A new sampler, or the one that an earlier try of the same call created."""
        return await self._database.write(
            lambda connection: insert_sampler(connection, sampler, sampling_session_seq_id)
        )

    async def sampler(self, sampling_session_id: str) -> Sampler | None:
        statement = _SAMPLERS.where(samplers.c.sampling_session_id == sampling_session_id)
        return await self._database.read(one(Sampler, statement))

    async def add_sampler_client(self, sampling_session_id: str) -> int:
        """The number of a new client of a sampler, from 1; the original client is 0."""
        statement = (
            samplers.update()
            .where(samplers.c.sampling_session_id == sampling_session_id)
            .values(clients=samplers.c.clients + 1)
            .returning(samplers.c.clients)
        )
        return await self._database.write(scalar(statement))

    async def create_custom_loss(
        self, *, custom_loss_seq_id: int, request: QueuedRequest
    ) -> QueuedRequest:
        """Insert a loss and its request in one transaction; a repeat returns the first."""

        def operation(connection: sa.Connection) -> QueuedRequest:
            first = _first_loss(connection, request, custom_loss_seq_id)
            if first is not None:
                return first
            if request.home is not None:
                # Locked: who takes a model of the session over from now on reads this loss.
                homes = connection.scalars(_HOMES, {"session_id": request.session_id})
                request.home = min(filter(None, homes), default=request.home)
            request_rows.insert(connection, request)
            connection.execute(
                custom_losses.insert(),
                {
                    "loss_id": random_id(),
                    "owner": request.owner,
                    "session_id": request.session_id,
                    "custom_loss_seq_id": custom_loss_seq_id,
                    "request_id": request.request_id,
                    "definition": request.payload,
                    "created_s": time.time(),
                },
            )
            return request

        return await self._database.write(operation)

    async def find_custom_loss(
        self, *, custom_loss_seq_id: int, request: QueuedRequest
    ) -> QueuedRequest | None:
        """The request that created the custom loss with this number; writes nothing."""
        return await self._database.read(
            lambda connection: _first_loss(connection, request, custom_loss_seq_id)
        )

    async def custom_loss(self, request_id: str) -> CustomLoss:
        """The loss that a request created."""
        statement = _CUSTOM_LOSSES.where(custom_losses.c.request_id == request_id)
        (found,) = await self._database.read(every(CustomLoss, statement))
        return found

    async def custom_losses(self, session_id: str) -> list[CustomLoss]:
        """All losses of a session in order, including failed ones."""
        return await self._database.read(_losses_of(session_id))

    async def log_and_losses(
        self, model: Model, *, after: int, limit: int
    ) -> tuple[list[QueuedRequest], list[CustomLoss]]:
        """
        What a copy of a model lacks, in one read: its next finished steps with small payloads, and the
        losses that they may need.
        """
        log = request_rows.log_of(model.model_id, after=after, payloads=True).limit(limit)

        def operation(
            connection: sa.Connection,
        ) -> tuple[list[QueuedRequest], list[CustomLoss]]:
            steps = [request_rows.with_payload(row) for row in connection.execute(log)]
            # After the steps: a loss that one of them uses was stored before it.
            uses_losses = any(step.kind in PASSES for step in steps)
            return steps, _losses_of(model.session_id)(connection) if uses_losses else []

        return await self._database.read(operation)


def _losses_of(session_id: str) -> Callable[[sa.Connection], list[CustomLoss]]:
    statement = _CUSTOM_LOSSES.where(custom_losses.c.session_id == session_id)
    return every(CustomLoss, statement.order_by(custom_losses.c.custom_loss_seq_id))


def _first_loss(
    connection: sa.Connection, request: QueuedRequest, custom_loss_seq_id: int
) -> QueuedRequest | None:
    request_id = connection.scalar(
        sa.select(custom_losses.c.request_id).where(
            custom_losses.c.session_id == request.session_id,
            custom_losses.c.custom_loss_seq_id == custom_loss_seq_id,
        )
    )
    if request_id is None:
        return None
    row = request_rows.find(connection, request_id)
    # Without a row: its result was deleted after its retention time.
    return row or replace(request, request_id=request_id, outcome=Outcome())


def insert_sampler(
    connection: sa.Connection, sampler: Sampler, sampling_session_seq_id: int
) -> Sampler:
    """Insert a sampler inside a transaction; returns the first one for a repeat."""
    statement = _SAMPLERS.where(
        samplers.c.session_id == sampler.session_id,
        samplers.c.sampling_session_seq_id == sampling_session_seq_id,
    )
    if (first := one(Sampler, statement)(connection)) is not None:
        return first
    more = {"sampling_session_seq_id": sampling_session_seq_id, "created_s": time.time()}
    connection.execute(samplers.insert(), {**values(sampler), **more})
    return sampler


class BaseHashes:
    """The hash of the base model of each run; NULL until it is known."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def fill(self, base_model: str, found: str) -> int:
        """Set the hash of runs without one; returns how many runs have another."""

        def operation(connection: sa.Connection) -> int:
            _fill(connection, models.c.base_model == base_model, found)
            others = sa.select(sa.func.count()).where(
                models.c.base_model == base_model, models.c.base_hash != found
            )
            return connection.scalar(others) or 0

        return await self._database.write(operation, required=True)

    async def replace(self, base_model: str, found: str) -> int:
        """Set the hash of all runs; returns how many had another."""
        statement = (
            models.update()
            .where(models.c.base_model == base_model, models.c.base_hash != found)
            .values(base_hash=found)
        )
        return await self._database.write(
            lambda connection: connection.execute(statement).rowcount, required=True
        )

    def fill_run(self, model_id: str, found: str) -> None:
        """Set the hash of one new run, with a deferred write."""
        self._database.write_deferred(
            lambda connection: _fill(connection, models.c.model_id == model_id, found)
        )

    async def of_run(self, model_id: str) -> str | None:
        statement = sa.select(models.c.base_hash).where(models.c.model_id == model_id)
        return await self._database.read(scalar(statement))

    async def of_version(self, version_id: str) -> str | None:
        """The hash of the run of a checkpoint version."""
        statement = (
            sa.select(models.c.base_hash)
            .join(checkpoint_versions, checkpoint_versions.c.model_id == models.c.model_id)
            .where(checkpoint_versions.c.version_id == version_id)
        )
        return await self._database.read(scalar(statement))


def _fill(connection: sa.Connection, which: sa.ColumnElement[bool], found: str) -> None:
    connection.execute(
        models.update().where(which, models.c.base_hash.is_(None)).values(base_hash=found)
    )
