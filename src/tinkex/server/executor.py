"""
The `Executor` protocol: how the server runs work on engines.

A base model has one engine, or several replicas (`ServedModel.engines`).

A caller sends an `Order` and gets a `Done` with result bytes. An engine may crash at any time. Then
all orders it had fail with `EngineLost`, and a new engine starts with an empty memory and a new
incarnation number. The caller decides what to send again.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tinkex.wire.engine_settings import engine_name
from tinkex.wire.proto.frames_pb2 import Done, Order, Ready, Stats, Tokens

#: The fields of `Stats` that count up; the others are current values.
COUNTERS = ("tokens_trained", "tokens_prefilled", "tokens_sampled")

#: Called with tokens of a running sample.
OnTokens = Callable[[Tokens], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """A base model that this server serves."""

    name: str
    folder: Path
    arch: str = ""
    max_context_length: int | None = None
    #: How many engines it has. A request runs on one of them.
    replicas: int = 1
    #: In a web process of a cluster: its live workers, which are its engines there.
    workers: tuple[str, ...] = ()

    @property
    def engines(self) -> tuple[str, ...]:
        """The names of its engines."""
        if self.workers:
            return self.workers
        if self.replicas == 1:
            return (self.name,)
        return tuple(engine_name(self.name, number) for number in range(self.replicas))


class WorkFailed(Exception):
    """The work failed; the engine is healthy."""

    def __init__(self, category: str, message: str) -> None:
        super().__init__(message)
        self.category = category
        self.message = message


class EngineLost(Exception):
    """The work has to run again. Without a subclass: the engine crashed while it had the work."""

    #: How many attempts this counts for the work (`scheduler.engine_client`).
    attempts = 1


class EngineKilled(EngineLost):
    """The engine was killed from outside or stopped, or was lost before it had the work."""

    attempts = 0


class BatchFailed(EngineLost):
    """
    A batch with work of several models failed, and the cause cannot be attributed to one of them.

    The engine is up, but its state of the model must not be used any more.
    """

    #: As many as isolate a request: each runs alone next.
    attempts = 2


class ModelNotLoaded(EngineLost):
    """The engine is up but does not have this model; the model has to be rebuilt."""


class EngineRefused(Exception):
    """The engine cannot run with these settings; a restart would not help."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint

    @property
    def text(self) -> str:
        """The message and the hint, for a place that shows one text."""
        return f"{self} {self.hint}".rstrip()


class Executor(Protocol):
    """Runs work on engines, by their names. All methods may be called concurrently."""

    @property
    def served(self) -> Sequence[ServedModel]: ...

    async def start(self) -> None:
        """Start engines; the executor accepts work when this returns."""

    async def close(self) -> None: ...

    async def ready(self, engine: str, /) -> int:
        """
        Wait until the engine is up; return its incarnation.

        No two engines of one executor have the same one.
        """

    async def send(
        self,
        engine: str,
        order: Order,
        /,
        *,
        incarnation: int | None = None,
        on_tokens: OnTokens | None = None,
    ) -> asyncio.Future[Done]:
        """
        Send an order to this incarnation (None: any). The future raises WorkFailed or EngineLost.

        When this returns, the engine has received the order before anything sent later. Cancelling
        the future of a sample cancels the sample in the engine; other work always runs to its end.
        `on_tokens` gets tokens as they are sampled; after an engine restart, they start at 0.
        """

    def waiting_for(self, engine: str, /) -> str | None:
        """Why the engine does not make progress, as text for users; None when it does."""

    def facts(self, engine: str, /) -> Ready | None:
        """What the engine reported when it was ready; None if it was not started yet."""

    def stats(self, engine: str, /) -> Stats | None:
        """
        The last statistics that the engine reported; None while it is down.

        Its `COUNTERS` count since the start of this process, across restarts of the engine.
        """
