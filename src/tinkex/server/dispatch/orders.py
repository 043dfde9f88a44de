"""What engines are told for each kind of request. Pure: from stored things to work."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tinkex.server.executor import Task, Work
from tinkex.server.plan import Kind
from tinkex.server.store import CustomLoss, Model
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
