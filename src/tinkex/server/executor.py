"""
The seam behind which computing happens, and its local form: one child process for each base model.

An engine is asked with `Work` and answers with bytes. It may die at any moment: then everything
that was with it raises `EngineLost`, a new engine with an empty memory comes up, and its number
(the incarnation) is another. Whoever asked knows what has to be asked again.
"""

import asyncio
import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tinkex.wire.proto import frames_pb2


class Task(enum.Enum):
    """What an engine can be asked for."""

    CREATE = enum.auto()  # a new adapter
    PASS = enum.auto()  # forward, or forward and backward
    OPTIM_STEP = enum.auto()
    SAVE = enum.auto()
    LOAD = enum.auto()
    SNAPSHOT = enum.auto()  # everything a model is
    RESTORE = enum.auto()  # and back to it, after CREATE
    CLEAR_GRADIENTS = enum.auto()
    DROP = enum.auto()  # forget an adapter
    SAMPLE = enum.auto()
    REGISTER_LOSS = enum.auto()  # a loss that a user wrote
    FORGET_LOSSES = enum.auto()  # those of a session


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """One thing for an engine to do."""

    task: Task
    model_id: str = ""
    #: The request in its normal form.
    payload: bytes = b""
    #: The same as a local file, when it is large.
    payload_file: Path | None = None
    #: CREATE only: JSON.
    lora_config: bytes = b""
    optimizer_config: bytes = b""
    #: PASS only.
    backward: bool = False
    #: PASS, REGISTER_LOSS, FORGET_LOSSES: a loss is for the models of its session.
    session_id: str = ""
    #: REGISTER_LOSS only.
    loss_id: str = ""
    #: SAVE, LOAD, SNAPSHOT, RESTORE: the files. SAMPLE: the adapter, None is the base model.
    folder: str | None = None
    #: SAVE, LOAD: with the optimizer's state.
    optimizer: bool = False
    #: SAMPLE: who asked; owners share an engine evenly.
    owner: str = ""
    #: SAMPLE: called with tokens as they are drawn; an engine that starts over begins at 0 again.
    on_tokens: Callable[[frames_pb2.Tokens], None] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What came of it."""

    result: bytes
    #: Seconds the engine itself computed.
    compute_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """A base model this server answers for."""

    name: str
    folder: Path
    arch: str = ""
    max_context_length: int | None = None


class WorkFailed(Exception):
    """The engine is well, and the work could not be done."""

    def __init__(self, category: str, message: str) -> None:
        super().__init__(message)
        self.category = category
        self.message = message


class EngineLost(Exception):
    """The engine died, or is not the one that was meant."""


class BatchFailed(EngineLost):
    """
    Work failed beside other work, and nobody knows whose fault it is.

    The engine lives; what it holds of the model is not to be used any more.
    """


class ModelNotLoaded(EngineLost):
    """The engine lives and does not have this model; built again, it does."""


class EngineRefused(Exception):
    """The engine cannot run with these settings; starting it again would not help."""


class Executor(Protocol):
    """Runs work on base models. Its methods may be called any number of times at once."""

    @property
    def served(self) -> Sequence[ServedModel]: ...

    async def start(self) -> None:
        """Ready to take work when this returns."""

    async def close(self) -> None: ...

    async def ready(self, base_model: str) -> int:
        """Wait until an engine for this model is up; its incarnation."""

    async def send(
        self, base_model: str, work: Work, *, incarnation: int | None = None
    ) -> asyncio.Future[Outcome]:
        """
        Hand work to that incarnation (None: any); its outcome, or WorkFailed or EngineLost.

        The engine has the work when this returns, before anything that is sent later. A sample
        whose outcome is cancelled is given up by the engine too; all other work goes on.
        """

    def waiting_for(self, base_model: str) -> str | None:
        """Why work waits although its turn has come; None when nothing is in the way."""

    def stats(self, base_model: str) -> frames_pb2.Stats | None:
        """Sizes and counts of this model's engine as last told; None when it is not up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """How local engines are started."""

    device: str = "auto"
    dtype: str = "auto"
    threads: int = 0
    deterministic: bool = False
    #: Limits; 0 lets the engine measure or choose.
    memory_bytes: int = 0
    adapter_bytes: int = 0
    kv_tokens: int = 0
    max_batch_tokens: int = 0
    max_sequences: int = 0
    host_bytes: int = 0
    prefix_cache: bool = True
    idle_adapters: int = 16
    #: Where engines put what fits no memory, each in a folder of its own. None is a temporary one.
    spill_folder: Path | None = None
    #: Engines that share this file compute one at a time. None when there is only one.
    turn_file: Path | None = None
    #: Of several engines, one that nobody asked for so long leaves the memory; 0 is never.
    idle_s: float = 0.0
