"""What engines are told for each kind of request. Pure: from stored things to work."""

import asyncio
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinkex.server.executor import Task, Work
from tinkex.server.scheduler.crash_isolation import MOST_DEATHS
from tinkex.server.scheduler.step_queue import Cause, Kind
from tinkex.server.store import CustomLoss, Damaged, Model, Store
from tinkex.server.store.requests import INLINE_BYTES
from tinkex.wire.codec import encode_json
from tinkex.wire.proto import frames_pb2


def create(model: Model) -> Work:
    return Work(
        task=Task.CREATE,
        model_id=model.model_id,
        lora_config=encode_json(dict(model.lora_config)),
        optimizer_config=encode_json(dict(model.optimizer_config)),
    )


def register(loss: CustomLoss) -> Work:
    return Work(
        task=Task.REGISTER_LOSS,
        loss_id=loss.loss_id,
        session_id=loss.session_id,
        payload=loss.definition,
    )


def forget_losses(session_id: str) -> Work:
    return Work(task=Task.FORGET_LOSSES, session_id=session_id)


def pass_or_step(model: Model, kind: Kind, payload: bytes | Path) -> Work:
    return Work(
        task=Task.OPTIM_STEP if kind is Kind.OPTIM_STEP else Task.PASS,
        model_id=model.model_id,
        backward=kind is Kind.FORWARD_BACKWARD,
        session_id=model.session_id,
        **_carried(payload),
    )


def sample(
    owner: str,
    folder: str | None,
    payload: bytes | Path,
    on_tokens: Callable[[frames_pb2.Tokens], None] | None = None,
) -> Work:
    return Work(
        task=Task.SAMPLE, folder=folder, owner=owner, on_tokens=on_tokens, **_carried(payload)
    )


def drop(model_id: str) -> Work:
    return Work(task=Task.DROP, model_id=model_id)


def clear_gradients(model_id: str) -> Work:
    return Work(task=Task.CLEAR_GRADIENTS, model_id=model_id)


def size(payload: bytes | Path) -> int:
    return payload.stat().st_size if isinstance(payload, Path) else len(payload)


def _carried(payload: bytes | Path) -> dict[str, Any]:
    return {"payload_file": payload} if isinstance(payload, Path) else {"payload": payload}


# MERGED: What requests carry, kept in memory between their acceptance and their turn.


# Up to this much is kept; the rest is read back.
PAYLOADS_BYTES = 128 * 2**20


class Payloads:
    """Bytes, or the file that holds them: large ones are files already, and engines read those."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._kept: dict[str, bytes] = {}
        self._kept_bytes = 0

    def keep(self, request_id: str, payload: bytes) -> None:
        """Keep this for its turn if it is small and there is room."""
        fits = self._kept_bytes + len(payload) <= PAYLOADS_BYTES
        if len(payload) <= INLINE_BYTES and fits:
            self._kept[request_id] = payload
            self._kept_bytes += len(payload)

    async def get(self, request_id: str) -> bytes | Path:
        if (payload := self._kept.get(request_id)) is not None:
            return payload
        return await self._store.requests.payload(request_id)

    async def read(self, request_id: str) -> bytes:
        """The bytes themselves, wherever they are."""
        payload = await self.get(request_id)
        return await asyncio.to_thread(payload.read_bytes) if isinstance(payload, Path) else payload

    def forget(self, request_id: str) -> None:
        if (payload := self._kept.pop(request_id, None)) is not None:
            self._kept_bytes -= len(payload)


# MERGED: What becomes of a request: a result, or a failure that says whose it is.


log = logging.getLogger("tinkex.server.scheduler")


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """How a request ended."""

    result: bytes = b""
    error: str | None = None
    category: str | None = None
    cause: Cause = Cause.WORK
    #: The commit has happened already, together with other rows.
    committed: bool = False
    #: The next request of its kind would end the same way.
    lasting: bool = False


def deadly(reason: str) -> Ending:
    """The engine dies of it, so the others must not meet it again."""
    return Ending(
        error=f"the engine died {MOST_DEATHS} times while this request was running, the last time "
        f"with nothing else beside it, so it is not tried again: {reason}. "
        "The server's log says more.",
        category="server",
    )


def unstorable(error: Exception) -> Ending:
    """Its result was computed, and nothing takes it."""
    number = secrets.token_hex(4)
    log.error("a result could not be stored (%s)", number, exc_info=error)
    return Ending(
        error=f"its result could not be stored ({type(error).__name__}), so it counts as not done. "
        f"Send the work again. The server's log has the details under the id {number}.",
        category="server",
    )


def bug(error: Exception) -> Ending:
    """A bug fails what met it, and is in the log under the id that its user sees."""
    number = secrets.token_hex(4)
    if isinstance(error, Damaged):
        log.error("damage %s: %s", number, error)
        text = f"{error}. The server's log has this under the id {number}."
        return Ending(error=text, category="server")
    log.error("bug %s", number, exc_info=error)
    return Ending(
        error=f"the server failed unexpectedly ({type(error).__name__}). "
        f"Its log has the details under the id {number}.",
        category="server",
    )
