"""Models, checkpoints and samplers of the fake."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tinkex.wire.checkpoints import KINDS, ParsedCheckpointTinkerPath, tinker_path
from tinkex.wire.errors import UserFailure

#: The time that lists show for everything.
FIXED_TIME = "2026-01-01T00:00:00Z"
#: The limits of the real server.
MIN_TTL_S = 3600
MAX_TTL_S = 10 * 365 * 24 * 3600


@dataclass
class Model:
    base_model: str
    rank: int
    steps: int = 0
    user_metadata: dict[str, str] | None = None
    next: int = 1
    waiting: dict[int, Callable[[], Any]] = field(default_factory=dict)
    #: Loss and tokens of each pass since the last optimizer step.
    passes: list[tuple[float, int]] = field(default_factory=list)
    #: The metrics of each optimizer step.
    trained: list[dict[str, float]] = field(default_factory=list)

    def finish_step(self, learning_rate: float) -> None:
        """Make one step of the passes since the last one."""
        loss, tokens = sum(one[0] for one in self.passes), sum(one[1] for one in self.passes)
        metrics = {"grad_norm": 1.0, "learning_rate": learning_rate, "tokens": tokens}
        if self.passes:
            metrics |= {"loss": loss / (tokens or 1), "loss_sum": loss}
        self.trained.append({**metrics, "passes": len(self.passes)})
        self.passes = []


class FakeStore:
    """Models and samplers by id, checkpoints by path."""

    def __init__(self) -> None:
        self.models: dict[str, Model] = {}
        self.checkpoints: dict[str, Model] = {}
        self.samplers: dict[str, dict[str, Any]] = {}
        self._unnamed = itertools.count(1)

    def save(
        self,
        model_id: str,
        kind: str,
        name: str | None,
        model: Model,
        *,
        ttl_s: int | None,
        overwrite: bool = False,
    ) -> str:
        _check_ttl(ttl_s)
        path = tinker_path(model_id, kind, name or f"unnamed-{next(self._unnamed)}")
        try:
            ParsedCheckpointTinkerPath.from_tinker_path(path)
        except ValueError as error:
            raise UserFailure(f"checkpoint name {name!r} cannot be used: {error}") from error
        if path in self.checkpoints and not overwrite:
            raise UserFailure(f"{path} already exists; choose another name, or overwrite it")
        self.checkpoints[path] = Model(model.base_model, model.rank, model.steps)
        return path

    def open_sampler(
        self, sampler_id: str, base_model: str | None, model_path: str | None
    ) -> dict[str, Any]:
        if model_path is not None:
            base_model = self.checkpoints[model_path].base_model
        sampler = {"sampler_id": sampler_id, "base_model": base_model, "model_path": model_path}
        self.samplers[sampler_id] = sampler
        return {"sampling_session_id": sampler_id}

    def change(self, method: str, rest: str, body: bytes) -> None:
        """Delete a checkpoint. Publishing and setting a TTL are validated but have no effect."""
        run, _, name = rest.partition("/checkpoints/")
        for action in ("/publish", "/ttl"):
            if name.endswith(action):
                self.checkpoints[f"tinker://{run}/{name.removesuffix(action)}"]
                if action == "/ttl":
                    _check_ttl(json.loads(body)["ttl_seconds"])
                return
        if method == "DELETE":
            del self.checkpoints[f"tinker://{run}/{name}"]

    def lists(self, what: str, rest: str) -> dict[str, Any]:
        """Runs and checkpoints for the `RestClient`, all on one page."""
        run, _, part = rest.partition("/")
        if run and run not in self.models:
            raise KeyError(f"training run {run}")
        if part == "metrics":
            return {"training_run_id": run, "points": self._points(self.models[run])}
        if what == "checkpoints" or part:
            found = [_checkpoint(path) for path in self.checkpoints if run in path]
            return {"checkpoints": found, "cursor": _page(found)}
        runs = [self._run(name) for name in self.models if name == (run or name)]
        return runs[0] if run else {"training_runs": runs, "cursor": _page(runs)}

    def _run(self, model_id: str) -> dict[str, Any]:
        model = self.models[model_id]
        return {
            "training_run_id": model_id,
            "base_model": model.base_model,
            "model_owner": "fake",
            "is_lora": True,
            "lora_rank": model.rank,
            "user_metadata": model.user_metadata,
            "last_request_time": FIXED_TIME,
            "steps": len(model.trained),
            "last_loss": model.trained[-1].get("loss") if model.trained else None,
            "status": "idle",
        }

    def _points(self, model: Model) -> list[dict[str, Any]]:
        """Every step; the fake does not combine steps into means."""
        return [
            {"step": number, "time": FIXED_TIME, "metrics": metrics}
            for number, metrics in enumerate(model.trained, 1)
        ]


def _check_ttl(ttl_s: int | None) -> None:
    if ttl_s is not None and not MIN_TTL_S <= ttl_s <= MAX_TTL_S:
        raise UserFailure(f"ttl_seconds is {ttl_s}; {MIN_TTL_S} to {MAX_TTL_S} are allowed.")


def _checkpoint(path: str) -> dict[str, Any]:
    kind, name = path.split("/")[-2:]
    return {
        "checkpoint_id": f"{kind}/{name}",
        "checkpoint_type": KINDS[kind],
        "time": FIXED_TIME,
        "tinker_path": path,
    }


def _page(found: list[Any]) -> dict[str, int]:
    return {"offset": 0, "limit": len(found), "total_count": len(found)}
