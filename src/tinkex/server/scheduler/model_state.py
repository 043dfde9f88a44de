"""One model that has had work since this process started: its line, its engine, what it costs."""

import asyncio
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from tinkex.server.executor import Outcome
from tinkex.server.scheduler import step_queue
from tinkex.server.scheduler.jobs import Ending
from tinkex.server.scheduler.step_queue import Cause, Kind, Line, Step
from tinkex.server.store import Model, RequestRow, Status, Store


@dataclass(frozen=True, slots=True)
class Unstored:
    """What became of a step, and why the optimizer was to be refused before it, if it was."""

    step: Step
    ending: Ending
    spoiled: str | None

    @property
    def is_late(self) -> bool:
        """It was never in the line of its model."""
        return self.ending.cause is Cause.LATE


@dataclass(slots=True)
class Run:
    """Changed by whoever is in its driver's place, one at a time."""

    model: Model
    line: Line
    #: The engine incarnation that has this model in memory, as its log says.
    live_in: int | None = None
    driver: asyncio.Task[None] | None = None
    gap_timer: asyncio.TimerHandle | None = None
    #: What became of steps and is not on disk yet, in their order; and who stores it.
    unstored: deque[Unstored] = field(default_factory=deque)
    storing: asyncio.Task[None] | None = None
    #: A result could not be stored: what runs now is put back, and the model built again.
    going_back: bool = False
    #: Seconds that engines computed for it.
    computed_s: float = 0.0
    #: The snapshot that is being written while the model goes on.
    writing: asyncio.Task[None] | None = None
    #: Steps, and bytes of payloads, since the last snapshot.
    steps_since: int = 0
    bytes_since: int = 0
    #: Whether the last step was one of the optimizer, after which there are no gradients.
    stepped: bool = False

    @property
    def is_idle(self) -> bool:
        """Nothing of it runs, waits, or is known here only."""
        waits = self.line.held or self.line.running or self.line.refused
        return self.driver is None and self.storing is None and not waits

    def computed(self, answer: asyncio.Future[Outcome]) -> None:
        """An engine has answered: the time it took is this model's."""
        if not answer.cancelled() and answer.exception() is None:
            self.computed_s += answer.result().compute_s

    async def settled(self) -> None:
        """Until every result of this model is on disk."""
        while self.storing is not None:
            await asyncio.wait({self.storing})

    async def written(self) -> None:
        """Until no snapshot of this model is under way."""
        if self.writing is not None:
            await asyncio.wait({self.writing})
            self.writing = None


class Runs:
    """The runs of this process, each read from its log the first time it is asked for."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._runs: dict[str, Run] = {}
        self._opening: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def get(self, model_id: str) -> Run | None:
        """The run if this process has opened it."""
        return self._runs.get(model_id)

    def opened(self) -> Iterable[Run]:
        return self._runs.values()

    def forget(self, run: Run) -> None:
        """Its log has all there is to know; while something of it is only here it stays."""
        model_id = run.model.model_id
        if not run.is_idle or self._runs.get(model_id) is not run:
            return
        del self._runs[model_id]
        if (opening := self._opening.get(model_id)) is not None and not opening.locked():
            del self._opening[model_id]

    async def open(self, model_id: str, *, first_seq: int = 0) -> Run:
        """The run of a model; `first_seq` is where a model begins whose log was deleted."""
        async with self._opening[model_id]:
            if (run := self._runs.get(model_id)) is not None:
                return run
            model = await self._store.models.model(model_id)
            if model is None:
                raise LookupError(f"model {model_id} is not in the database")
            snapshot = await self._store.snapshots.newest(model_id)
            after = -1 if snapshot is None else snapshot.seq_id
            finished = [
                (step_of(row), row.error if row.status is Status.FAILED else None)
                for row in await self._store.requests.log(model_id, after=after)
                # The line had gone on without it.
                if row.cause != Cause.LATE
            ]
            spoiled = None if snapshot is None else snapshot.spoiled
            line = step_queue.restored(finished, next_seq=after + 1, spoiled=spoiled)
            if snapshot is None and not await self._store.requests.has_steps(model_id):
                line.stillborn, line.next_seq = step_queue.forgotten(), first_seq
            run = Run(model=model, line=line, steps_since=len(finished))
            self._runs[model_id] = run
            return run


def step_of(row: RequestRow) -> Step:
    return Step(
        seq_id=row.seq_id or 0,
        request_id=row.request_id,
        kind=Kind(row.kind),
        creates=row.kind == Kind.LOAD_WEIGHTS and row.seq_id == 0,
        tokens=row.tokens,
    )
