"""
Which replica of a base model runs what. A base model with one engine has one replica.

A model in training stays on one replica, because its weights are there. Samples of one prompt go to the
same replica as long as it is not much busier than the others: it has the beginning of the prompt in its
prefix cache. Adapters are read where their samples run.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tinkex.server.queued_request import QueuedRequest
    from tinkex.server.scheduler.engine_client import LostAttempts
    from tinkex.server.scheduler.engine_scheduler import EngineScheduler

#: Prompts that begin with the same tokens have the same key.
PREFIX_TOKENS = 64
#: A replica takes samples of its keys up to this many times the average load. Higher values keep more
#: of the prefix cache, lower ones even out the load.
MAX_OVER_AVERAGE = 1.25
#: When the engine of a replica has been down for this long, its work goes to the others. Until then
#: it waits, because an engine that restarts quickly has the files in memory.
DOWN_S = 5.0
#: A replica with fewer sequences is never too busy: an engine batches them.
FEW_SEQUENCES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaLoad:
    """What decides about a replica."""

    name: str
    #: Whether its engine is running, as far as is known.
    is_up: bool = True
    #: Models in training there.
    models: int = 0
    #: Sequences that are being sampled there, or wait.
    sequences: int = 0


def choose_for_training(loads: Sequence[ReplicaLoad]) -> int:
    """The replica for a model that has none: one that is up, with the fewest models."""
    return min(
        range(len(loads)),
        key=lambda number: (not loads[number].is_up, loads[number].models, number),
    )


def choose_move(loads: Sequence[ReplicaLoad]) -> tuple[int, int] | None:
    """From which replica to which a model should move, so that each has its share; None if it has."""
    up = [number for number, load in enumerate(loads) if load.is_up]
    if not up:
        return None
    most = max(up, key=lambda number: loads[number].models)
    fewest = min(up, key=lambda number: loads[number].models)
    return (most, fewest) if loads[most].models - loads[fewest].models >= 2 else None


def choose_for_sample(key: bytes, loads: Sequence[ReplicaLoad], *, sequences: int) -> int:
    """
    The replica for a sample with this key: the first by rendezvous hash that is not too busy.

    Consistent hashing with bounded loads: if a replica is added or lost, only its own keys move; if
    one key has most of the samples, they overflow to the next replica of that key, and so on.
    """
    candidates = [number for number, load in enumerate(loads) if load.is_up] or range(len(loads))
    total = sum(loads[number].sequences for number in candidates) + sequences
    allowed = max(MAX_OVER_AVERAGE * total / len(candidates), FEW_SEQUENCES)
    ranked = sorted(candidates, key=lambda number: _score(key, loads[number].name))
    for number in ranked:
        if loads[number].sequences + sequences <= allowed:
            return number
    # Only possible for a sample that is larger than the average load.
    return min(ranked, key=lambda number: loads[number].sequences)


def _score(key: bytes, name: str) -> bytes:
    return hashlib.blake2b(key, key=name.encode()[:64], digest_size=8).digest()


def sample_key(request: "QueuedRequest") -> bytes:
    """What the prefix cache of a sample depends on. After a restart its prompt is not known here."""
    start = request.prompt_start or request.request_id.encode()
    return f"{request.owner}\n{request.version_id}\n".encode() + start


class Replicas:
    """The replicas of one base model, with the samples that run on each."""

    def __init__(
        self,
        engines: Sequence["EngineScheduler"],
        lost: "LostAttempts",
    ) -> None:
        self.engines = engines
        self.lost = lost
        #: By request id: where a sample runs, and its sequences.
        self._samples: dict[str, tuple[EngineScheduler, int]] = {}
        self._sequences = dict.fromkeys(engines, 0)
        self._down_since_s: dict[EngineScheduler, float] = {}

    def for_training(self) -> "EngineScheduler":
        """Where a model that is not loaded anywhere trains."""
        if len(self.engines) == 1:
            return self.engines[0]
        return self.engines[choose_for_training(self.loads())]

    def begin_sample(self, request: "QueuedRequest") -> "EngineScheduler":
        """Where a sample runs now; it counts there until `end_sample`."""
        engine = self.engines[0]
        if len(self.engines) > 1:
            key, loads = sample_key(request), self.loads()
            engine = self.engines[choose_for_sample(key, loads, sequences=request.sequences)]
        self._samples[request.request_id] = (engine, request.sequences)
        self._sequences[engine] += request.sequences
        return engine

    def end_sample(self, request_id: str) -> None:
        engine, sequences = self._samples.pop(request_id)
        self._sequences[engine] -= sequences

    @property
    def has_samples(self) -> bool:
        return bool(self._samples)

    def of_sample(self, request_id: str) -> "EngineScheduler | None":
        """Where a sample runs; None if it does not."""
        engine, _ = self._samples.get(request_id, (None, 0))
        return engine

    def lost_engines(self, now_s: float) -> list["EngineScheduler"]:
        """Engines that have been down for `DOWN_S` while another replica was up."""
        down = [engine for engine in self.engines if not engine.is_running]
        if len(down) == len(self.engines):
            down = []
        self._down_since_s = {engine: self._down_since_s.get(engine, now_s) for engine in down}
        return [one for one, since_s in self._down_since_s.items() if now_s - since_s >= DOWN_S]

    def loads(self) -> list[ReplicaLoad]:
        return [
            ReplicaLoad(
                name=engine.name,
                is_up=engine.is_up,
                models=len(engine.models),
                sequences=self._sequences[engine],
            )
            for engine in self.engines
        ]
