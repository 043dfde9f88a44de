"""
The `Executor` protocol: how the server runs work on base models.

A caller sends `Work` and gets an `Outcome` with result bytes. An engine may crash at any time. Then
all work it had fails with `EngineLost`, and a new engine starts with an empty memory and a new
incarnation number. The caller decides what to send again.
"""

import asyncio
import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tinkex.wire.proto import frames_pb2


class Task(enum.Enum):
    """The operations of an engine."""

    CREATE = enum.auto()  # create an adapter
    PASS = enum.auto()  # forward, or forward and backward
    OPTIM_STEP = enum.auto()
    SAVE = enum.auto()
    LOAD = enum.auto()
    SNAPSHOT = enum.auto()  # save the complete state of a model
    RESTORE = enum.auto()  # load a snapshot, after CREATE
    CLEAR_GRADIENTS = enum.auto()
    DROP = enum.auto()  # unload an adapter
    SAMPLE = enum.auto()
    REGISTER_LOSS = enum.auto()  # add a custom loss
    FORGET_LOSSES = enum.auto()  # remove the custom losses of a session


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """One operation for an engine, with its arguments."""

    task: Task
    model_id: str = ""
    #: The request in its normalized encoding.
    payload: bytes = b""
    #: A local file with the payload, instead of `payload`, when it is large.
    payload_file: Path | None = None
    #: CREATE: the LoRA and optimizer configurations as JSON.
    lora_config: bytes = b""
    optimizer_config: bytes = b""
    #: PASS: whether to run the backward pass.
    backward: bool = False
    #: PASS, REGISTER_LOSS, FORGET_LOSSES: the session whose models may use the loss.
    session_id: str = ""
    #: REGISTER_LOSS: the id of the new loss.
    loss_id: str = ""
    #: SAVE, LOAD, SNAPSHOT, RESTORE: the folder of the files. SAMPLE: the folder of the adapter,
    #: None for the base model.
    folder: str | None = None
    #: SAVE, LOAD: whether to include the optimizer state.
    optimizer: bool = False
    #: SAMPLE: the owner; owners get equal shares of an engine.
    owner: str = ""
    #: SAMPLE: called with tokens as they are sampled. After an engine restart, tokens start at 0.
    on_tokens: Callable[[frames_pb2.Tokens], None] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The result of finished work."""

    result: bytes
    #: Compute time inside the engine.
    compute_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """A base model that this server serves."""

    name: str
    folder: Path
    arch: str = ""
    max_context_length: int | None = None


class WorkFailed(Exception):
    """The work failed; the engine is healthy."""

    def __init__(self, category: str, message: str) -> None:
        super().__init__(message)
        self.category = category
        self.message = message


class EngineLost(Exception):
    """The engine ended by itself while it had the work; the work has to run again."""

    #: How many attempts this counts for the work (`scheduler.crash_isolation`).
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


class Executor(Protocol):
    """Runs work on base models. All methods may be called concurrently."""

    @property
    def served(self) -> Sequence[ServedModel]: ...

    async def start(self) -> None:
        """Start engines; the executor accepts work when this returns."""

    async def close(self) -> None: ...

    async def ready(self, base_model: str) -> int:
        """Wait until the engine of this model is up; return its incarnation."""

    async def send(
        self, base_model: str, work: Work, *, incarnation: int | None = None
    ) -> asyncio.Future[Outcome]:
        """
        Send work to this incarnation (None: any). The future raises WorkFailed or EngineLost.

        When this returns, the engine has received the work before anything sent later. Cancelling
        the future of a sample cancels the sample in the engine; other work always runs to its end.
        """

    def waiting_for(self, base_model: str) -> str | None:
        """Why the engine does not make progress, as text for users; None when it does."""

    def stats(self, base_model: str) -> frames_pb2.Stats | None:
        """The last statistics that the engine of this model reported; None while it is down."""
