"""
The workers as another process sees them, from rows that are a second old, and where new work goes.

The functions that decide are pure. What they decide is written to the row of the request; a worker that
died meanwhile is noticed by the others (`worker`).
"""

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tinkex.server.executor import OnTokens, ServedModel
from tinkex.server.queued_request import Kind, QueuedRequest
from tinkex.server.retry import PeriodicTask
from tinkex.server.scheduler.replicas import (
    ReplicaLoad,
    choose_for_sample,
    choose_for_training,
    sample_key,
)
from tinkex.server.store import StorageError, Store
from tinkex.server.store.workers import NewHomes, Stranded, WorkerRow
from tinkex.wire.proto.frames_pb2 import Done, Order, Ready, Stats

log = logging.getLogger("tinkex.server.cluster")

#: How often the rows are read, and the tables are looked at for lost notifications.
LOOK_S = 1.0


def loads_of(rows: Sequence[WorkerRow], extra: Mapping[str, "Extra"]) -> list[ReplicaLoad]:
    """The loads of workers, with what was given to them since their last heartbeat."""
    return [
        ReplicaLoad(
            name=row.name,
            is_up=row.stats.get("waiting_for") is None,
            models=row.stats.get("models", 0) + extra[row.name].models,
            sequences=row.stats.get("sequences", 0) + extra[row.name].sequences,
        )
        for row in rows
    ]


class Extra:
    """What one worker got lately, which its heartbeat may not tell yet."""

    def __init__(self) -> None:
        self.models = 0
        self.sequences = 0
        self._old = (0, 0)

    def age(self) -> None:
        """Forget what was given before the last look; its heartbeat has told of it since."""
        models, sequences = self._old
        self.models -= models
        self.sequences -= sequences
        self._old = (self.models, self.sequences)


def choose_home(
    request: QueuedRequest, rows: Sequence[WorkerRow], extra: Mapping[str, Extra]
) -> str | None:
    """The worker for a new model or a sample; None if there is no worker for it."""
    if not rows:
        return None
    loads = loads_of(rows, extra)
    if request.kind is Kind.SAMPLE:
        number = choose_for_sample(sample_key(request), loads, sequences=request.sequences)
        extra[rows[number].name].sequences += request.sequences
    else:
        number = choose_for_training(loads)
        extra[rows[number].name].models += request.model_id is not None
    return rows[number].name


def plan_homes(
    stranded: Iterable[Stranded],
    rows: Sequence[WorkerRow],
    live: frozenset[str],
    base_model: str,
    *,
    running: frozenset[str] = frozenset(),
) -> NewHomes:
    """
    Where work of a dead worker goes: to the home of its model if that is alive, or to a new one.

    `rows` are the workers of this base model that take new work, `live` those that run, and `running`
    the workers of all base models that do.
    """
    models: dict[str, tuple[int, str]] = {}
    requests: dict[str, str] = {}
    extra: defaultdict[str, Extra] = defaultdict(Extra)
    for one in stranded:
        if one.model_home is not None and one.model_home in live:
            requests[one.request_id] = one.model_home
            continue
        if one.model_id is not None and one.model_id in models:
            continue
        if one.kind == Kind.CREATE_CUSTOM_LOSS:
            # It goes from worker to worker, in the order of their names (`WorkerScheduler`). One that
            # drains or serves another base model may have a model of the session, too.
            if running:
                requests[one.request_id] = min(running)
            continue
        request = QueuedRequest(
            request_id=one.request_id,
            owner=one.owner,
            kind=Kind.CREATE_MODEL if one.model_id is not None else Kind.SAMPLE,
            base_model=base_model,
            model_id=one.model_id,
            version_id=one.version_id,
            sequences=one.sequences,
        )
        if (home := choose_home(request, rows, extra)) is None:
            break
        if one.model_id is None:
            requests[one.request_id] = home
        else:
            models[one.model_id] = (one.model_term or 0, home)
    return NewHomes(models=models, requests=requests)


class KnownWorkers:
    """
    The workers of all base models. Belongs to one event loop; call `start` first, `close` last.

    In a web process it is the executor: it knows what is served, and runs nothing.
    """

    def __init__(
        self,
        store: Store,
        *,
        takeover_s: float,
        folders: Mapping[str, Path] | None = None,
    ) -> None:
        self._store = store
        self._takeover_s = takeover_s
        #: Folders of base models on this machine, for tokenizers.
        self._folders = dict(folders or {})
        self._rows: list[WorkerRow] = []
        self._extra: defaultdict[str, Extra] = defaultdict(Extra)
        self._task = PeriodicTask()

    async def start(self) -> None:
        await self.look()
        self._task.start(self._look, LOOK_S, what="reading the workers", log=log)

    async def close(self) -> None:
        await self._task.close()

    async def _look(self) -> None:
        try:
            await self.look()
        except StorageError as error:
            log.info("the workers cannot be read now: %s", error)

    async def look(self) -> None:
        self._rows = await self._store.workers.all()
        for extra in self._extra.values():
            extra.age()

    @property
    def rows(self) -> Sequence[WorkerRow]:
        return self._rows

    def row(self, name: str | None) -> WorkerRow | None:
        return next((row for row in self._rows if row.name == name), None)

    def live(self, base_model: str | None = None) -> frozenset[str]:
        """
        The names of all workers that run; with a base model, only of those that serve it.

        A worker may start again under its name with another base model.
        """
        return frozenset(
            row.name
            for row in self._rows
            if row.is_live(self._takeover_s) and base_model in (None, row.base_model)
        )

    def that_take(self, base_model: str) -> list[WorkerRow]:
        """The workers of a base model that take new work, by name."""
        return [
            row
            for row in self._rows
            if row.base_model == base_model and row.takes_work(self._takeover_s)
        ]

    def choose_home(self, request: QueuedRequest, *, without: str = "") -> str | None:
        """The worker for a new request; None if there is none."""
        rows = [row for row in self.that_take(request.base_model) if row.name != without]
        return choose_home(request, rows, self._extra)

    # -- the executor of a web process -------------------------------------------------------------

    @property
    def served(self) -> Sequence[ServedModel]:
        """The base models of all workers, also of those that are down: their requests wait."""
        found: dict[str, ServedModel] = {}
        # Live ones last: what they say about a model counts.
        for row in sorted(self._rows, key=lambda row: row.is_live(self._takeover_s)):
            folder = self._folders.get(row.base_model) or Path(row.model.get("folder", ""))
            workers = tuple(name for name, _ in self._engine_stats(row.base_model))
            found[row.base_model] = ServedModel(
                name=row.base_model,
                folder=folder,
                arch=row.model.get("arch", ""),
                max_context_length=row.model.get("max_context_length"),
                replicas=max(len(workers), 1),
                workers=workers,
            )
        return [found[name] for name in sorted(found)]

    async def ready(self, engine: str, /) -> int:
        raise NotImplementedError("a web process runs nothing")

    async def send(
        self,
        engine: str,
        order: Order,
        /,
        *,
        incarnation: int | None = None,
        on_tokens: OnTokens | None = None,
    ) -> asyncio.Future[Done]:
        raise NotImplementedError("a web process runs nothing")

    def waiting_for(self, engine: str, /) -> str | None:
        """Why a worker, or no worker of a base model, makes progress; None if it does."""
        if (row := self.row(engine.partition("#")[0])) is not None:
            return self.reason(row)
        base_model = engine
        rows = [row for row in self._rows if row.base_model == base_model]
        reasons = [self.reason(row) for row in rows if row.is_live(self._takeover_s)]
        if not reasons:
            return f"no worker of {base_model} is running; the request runs when one starts"
        return None if None in reasons else reasons[0]

    def reason(self, row: WorkerRow) -> str | None:
        """Why one worker makes no progress; None if it does."""
        if not row.is_live(self._takeover_s):
            return f"the worker {row.name} does not respond; its work goes to others"
        reason: str | None = row.stats.get("waiting_for")
        if reason is None and (problem := row.stats.get("storage")) is not None:
            # The work may be done, with a result that cannot be stored now.
            return f"the worker {row.name} waits: {problem}"
        return reason

    def facts(self, engine: str, /) -> Ready | None:
        """Workers do not tell; their logs do."""
        return None

    def stats(self, engine: str, /) -> Stats | None:
        """The last statistics of an engine, by the name of its worker."""
        for base_model in {row.base_model for row in self._rows}:
            for name, stats in self._engine_stats(base_model):
                if name == engine:
                    return Stats(**stats)
        return None

    def _engine_stats(self, base_model: str) -> Iterable[tuple[str, Mapping[str, Any]]]:
        """The statistics of each engine of a base model, with the name of its worker."""
        for row in self._rows:
            if row.base_model == base_model and row.is_live(self._takeover_s):
                for number, one in enumerate(row.stats.get("engines", [])):
                    yield (row.name if number == 0 else f"{row.name}#{number}"), one

    def compute_usage(self) -> dict[str, tuple[int, float]]:
        """What all live workers computed: operations and seconds by task."""
        counts: Counter[str] = Counter()
        seconds: Counter[str] = Counter()
        for row in self._rows:
            if row.is_live(self._takeover_s):
                usage: Mapping[str, Any] = row.stats.get("usage", {})
                for task, (count, total_s) in usage.items():
                    counts[task] += count
                    seconds[task] += total_s
        return {task: (counts[task], float(seconds[task])) for task in counts}
