"""
The dispatcher: takes what was accepted, and knows how each request stands.

Steps go to `turns`, samples to `samples`; this file only shows them the way.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from tinkex.server.executor import Executor, Task, WorkFailed
from tinkex.server.scheduler import crash_isolation
from tinkex.server.scheduler.base_model_check import BaseCheck
from tinkex.server.scheduler.checkpoints import Saving
from tinkex.server.scheduler.crash_isolation import MOST_DEATHS, Roll, boot_id
from tinkex.server.scheduler.execution import Desk, Results
from tinkex.server.scheduler.fairness import Places, Waiting
from tinkex.server.scheduler.jobs import Ending
from tinkex.server.scheduler.model_state import Run, Runs, step_of
from tinkex.server.scheduler.model_worker import Steps, Turns
from tinkex.server.scheduler.recovery import Rebuilding, Revival, Snapshots
from tinkex.server.scheduler.results import Futures
from tinkex.server.scheduler.sample_worker import Losses, Samples, Tap
from tinkex.server.scheduler.step_queue import Kind
from tinkex.server.store import RequestRow, Status, StorageError, Store
from tinkex.wire.codec import encode_json
from tinkex.wire.training import UnloadModelResponse

log = logging.getLogger("tinkex.server.scheduler")

# How long a stopping server waits for results to reach the disk.
SETTLE_S = 5.0
# How often is looked whether steps of a client that left still wait for a missing number.
GAP_LOOK_S = 1.0


class Dispatcher:
    """Runs what was accepted. Belongs to one event loop; `start` before, `close` after."""

    def __init__(
        self,
        *,
        store: Store,
        executor: Executor,
        futures: Futures,
        gap_s: float,
        snapshot_steps: int = 200,
        snapshot_bytes: int = 64 * 2**20,
        max_training: int = 0,
        max_sequences: int = 0,
        rolls: Mapping[str, Roll] | None = None,
        web_crashed: bool = False,
        base_check: BaseCheck | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        desk = Desk(
            store=store,
            executor=executor,
            futures=futures,
            rolls=rolls,
            base_check=base_check,
            max_sequences=max_sequences,
        )
        saving = Saving(store, base_check)
        self._places = Places(max_training=max_training)
        rebuilding = Rebuilding(self._places.contested)
        self._places.freed = rebuilding.look_again
        revival = Revival(desk, saving, rebuilding)
        self._desk = desk
        self._revival = revival
        self._store = store
        self._rolls = rolls or {}
        #: The web process before this one died of what it did.
        self._web_crashed = web_crashed
        self._runs = Runs(store)
        #: Models whose steps are being read.
        self._opening: set[str] = set()
        self._samples = Samples(desk)
        self._losses = Losses(desk, self._runs, revival)
        self._snapshots = Snapshots(
            desk, revival, steps=snapshot_steps, payload_bytes=snapshot_bytes
        )
        results = Results(desk)
        self._turns = Turns(
            desk,
            revival=revival,
            rebuilding=rebuilding,
            results=results,
            steps=Steps(desk, revival, saving, results),
            places=self._places,
            snapshots=self._snapshots,
            gap_s=gap_s,
            clock=clock,
        )

    async def start(self) -> None:
        """Take up what an earlier process accepted and did not finish."""
        await self._desk.futures.start()
        await self._desk.failures.start()
        # Before any work of theirs is taken up: who asks for more brings the limits of their key.
        now_s = time.time()
        for key in await self._store.keys.all():
            if key.state(now_s) == "active" and "max_training" in key.limits:
                self.allow(key.owner, key.limits["max_training"])
        await self._remember_deaths()
        # In the background: new requests need not wait for what is on disk.
        self._desk.spawn(Pickup(self._desk, self.take).run())

    async def _remember_deaths(self) -> None:
        """How often what waits was lost so far; the end of the last web process counts too."""
        deaths = await self._store.crash_counts.all()
        inside = [
            one for roll in self._rolls.values() if roll.remains for one in roll.remains.inside
        ]
        base_models = await self._store.requests.still_waiting([*deaths, *inside])
        guilty: dict[str, str] = {}
        found: dict[str, int] = {}
        for base_model, roll in self._rolls.items():
            remains, roll.remains = roll.remains, None
            if remains is None or not crash_isolation.counts(
                remains, boot_id=boot_id(), web_crashed=self._web_crashed
            ):
                continue
            lost = [name for name in remains.inside if name in base_models]
            log.warning("%d requests were lost with the engine of %s", len(lost), base_model)
            found.update({request_id: deaths.get(request_id, 0) + 1 for request_id in lost})
            # Alone as in `Company`: then it is known who it was.
            if len(remains.inside) == len(lost) == 1 and found[lost[0]] >= MOST_DEATHS:
                guilty[lost[0]] = f"the web process died with the engine of {base_model}"
        await self._store.crash_counts.set(found)
        deaths.update(found)
        for request_id, reason in guilty.items():
            base_model = base_models[request_id]
            # Whoever shared an engine with it was lost because of it.
            deaths = {one: n for one, n in deaths.items() if base_models.get(one) != base_model}
            await self._store.crash_counts.clear(base_model)
            self._desk.companies[base_model].remember(request_id, MOST_DEATHS, reason=reason)
        for request_id, times in deaths.items():
            if request_id in base_models:
                self._desk.companies[base_models[request_id]].remember(request_id, times)

    async def close(self) -> None:
        """Stop; what is unfinished is on disk and waits for the next start."""
        self._desk.closing = True
        for run in self._runs.opened():
            if run.gap_timer is not None:
                run.gap_timer.cancel()
        # Results that are on their way to the disk get there, so that they need not be computed
        # again.
        storing = [run.storing for run in self._runs.opened() if run.storing is not None]
        if storing:
            await asyncio.wait(storing, timeout=SETTLE_S)
        await self._desk.stop()

    def take(
        self,
        row: RequestRow,
        *,
        payload: bytes | None = None,
        tap: Tap | None = None,
    ) -> None:
        """
        A request is on disk: run it when its turn comes, unless it is here already.

        Reads nothing, so nothing can fail between the commit and this. A sample tells its tokens
        to the tap as they are drawn.
        """
        request_id = row.request_id
        if self._desk.futures.is_kept(request_id):
            return
        # Even if it is here: `Pickup` may find a request before the one who accepted it hands it
        # on, and has no tap for it.
        if tap is not None:
            self._samples.open_tap(request_id, tap)
        if request_id in self._desk.taken:
            return
        # Now, because a step may have to wait for its model to be read.
        self._desk.futures.expect(row)
        if payload is not None:
            self._desk.payloads.keep(request_id, payload)
        match Kind(row.kind):
            case Kind.SAMPLE:
                self._carry(row, self._samples.run(row))
            case Kind.UNLOAD_MODEL:
                self._carry(row, self._unload(row))
            case Kind.CREATE_CUSTOM_LOSS:
                self._carry(row, self._losses.create(row))
            case _:
                self._step(row)

    async def take_again(self, request_id: str) -> None:
        """A request was repeated: take it up if it waits and is not here."""
        if request_id in self._desk.taken or self._desk.futures.is_kept(request_id):
            return
        # While it cannot be read it stays where it is: `Pickup` finds it.
        with contextlib.suppress(StorageError):
            row = await self._store.requests.get(request_id)
            if row is not None and row.status is Status.WAITING:
                self.take(row)

    def _carry(self, row: RequestRow, work: Coroutine[Any, Any, None]) -> None:
        """Run what is outside the order of steps; what does not come to an end is found again."""
        if not self._desk.take(row):
            work.close()
            return

        async def carry() -> None:
            try:
                await work
            except Exception:
                self._desk.taken.discard(row.request_id)
                raise

        self._desk.spawn(carry())

    def _step(self, row: RequestRow) -> None:
        if row.model_id is None or row.seq_id is None:
            raise ValueError(f"request {row.request_id} is not a step of a model")
        run = self._runs.get(row.model_id)
        if run is None:
            if row.model_id not in self._opening:
                self._opening.add(row.model_id)
                self._desk.spawn(self._open_line(row.model_id, row.seq_id))
        elif self._desk.take(row):
            self._turns.arrive(run, step_of(row))

    async def _open_line(self, model_id: str, first_seq: int) -> None:
        """Open a model that has steps: all that are on disk arrive together."""
        try:
            await self._open(model_id, first_seq=first_seq)
        except StorageError as error:
            log.info("the steps of %s are taken up later: %s", model_id, error)
        finally:
            self._opening.discard(model_id)

    async def _open(self, model_id: str, *, first_seq: int = 0) -> Run:
        if (run := self._runs.get(model_id)) is None:
            run = await self._runs.open(model_id, first_seq=first_seq)
            # A step whose number comes before another's must not be missed as if it never came.
            await self._turns.find(run)
        return run

    def not_made(self, row: RequestRow, error: str) -> None:
        """A model was refused with its acceptance: its session has failed."""
        self._desk.failures.settled(
            Ending(error=error, category="user"),
            request_id=row.request_id,
            kind=Kind(row.kind),
            session_id=row.session_id,
            model_id=row.model_id,
            creates=True,
        )

    async def refuse(self, model_id: str, seq_id: int, kind: Kind, reason: str) -> None:
        """A step was refused: if its sender goes on, it counts as failed with this reason."""
        run = await self._open(model_id, first_seq=seq_id)
        self._turns.refuse(run, seq_id, kind, reason)

    def tap(self, request_id: str) -> Tap | None:
        """Where the tokens of a running sample can be read, if it was begun with a tap."""
        return self._samples.tap(request_id)

    def abandon(self, request_id: str, *, owner: str, after_s: float) -> None:
        """The reader of a sample is gone: give it up unless somebody asks for it by then."""
        self._desk.spawn(self._samples.abandon(request_id, owner=owner, after_s=after_s))

    def cancel(self, request_id: str, *, owner: str) -> None:
        """
        Give up a sample that nobody waits for any more.

        Harmless for everything else: what is finished stays so, and a step of a model is never
        taken out of its line.
        """
        self._samples.cancel(request_id, owner=owner)

    async def _unload(self, row: RequestRow) -> None:
        """Free a model's memory; its next step brings it back from its log."""
        if (model_id := row.model_id) is None:
            raise ValueError(f"request {row.request_id} names no model")
        run = await self._open(model_id)
        ending = Ending(result=encode_json(UnloadModelResponse(model_id=model_id)))

        async def drop() -> None:
            nonlocal ending
            try:
                await self._revival.drop(run)
            except WorkFailed as failed:
                ending = Ending(error=failed.message, category=failed.category)

        # Between two steps: never while one runs, nor while the model is being built again.
        while run.driver is not None:
            await asyncio.wait({run.driver})
        if run.live_in is not None or self._revival.holds(run):
            await asyncio.wait({self._turns.between(run, drop())})
        await self._desk.settle(row, ending)

    def free_session(self, session_id: str) -> None:
        """Take a session's models out of memory; the next step of each brings it back."""
        for run in self._runs.opened():
            if run.model.session_id == session_id and not self._desk.closing:
                self._desk.spawn(self._retire(run))

    async def _retire(self, run: Run) -> None:
        """Out of the engine's memory and out of ours, once nothing of it runs or waits."""
        newest = max(run.line.held, default=run.line.next_seq - 1)
        while (driver := run.driver) is not None or run.line.held:
            # Steps behind a number that does not come are given up after a while.
            await (asyncio.sleep(GAP_LOOK_S) if driver is None else asyncio.wait({driver}))
        # With later steps its client is back, and wants it where it is.
        if self._desk.closing or run.line.next_seq > newest + 1:
            return
        if run.live_in is not None or self._revival.holds(run):
            await asyncio.wait({self._turns.between(run, self._free(run))})
            while run.driver is not None:
                await asyncio.wait({run.driver})
        self._runs.forget(run)

    async def _free(self, run: Run) -> None:
        with contextlib.suppress(WorkFailed):
            await self._revival.drop(run)

    async def snapshot(self, model_id: str) -> bool:
        """Write a model's state down now, between two of its steps; whether that was possible."""
        while (run := await self._open(model_id)).driver is not None:
            await asyncio.wait({run.driver})
        if self._desk.closing or run.line.stillborn is not None:
            return False
        written, was_live = False, run.live_in is not None

        async def write() -> None:
            nonlocal written
            written = await self._snapshots.write(run)

        await asyncio.wait({self._turns.between(run, write())})
        if not was_live:
            self._desk.spawn(self._retire(run))
        return written

    def allow(self, owner: str, max_training: int) -> None:
        """From now on so many models of this owner may train at once; 0 is any number."""
        self._places.allow(owner, max_training)

    def awaits(self, model_id: str, seq_id: int) -> bool:
        """Whether later steps of a model wait for this one."""
        run = self._runs.get(model_id)
        return run is not None and run.line.awaits(seq_id)

    def standing(self, request_id: str, base_model: str) -> Waiting:
        """How an unfinished request stands, and what is in its way."""
        executor = self._desk.executor
        if (reason := executor.waiting_for(base_model)) is not None:
            return Waiting(state="paused_capacity", reason=reason)
        if self._desk.companies[base_model].keeps_out(request_id):
            return Waiting(
                state="paused_capacity",
                reason=f"the engine of {base_model} died more than once; what was with it is "
                "tried a little at a time, to find what kills it",
            )
        if (waiting := self._places.why(request_id)) is not None:
            return waiting
        stats = executor.stats(base_model)
        if request_id in self._samples and stats is not None and stats.samples_waiting:
            return Waiting(
                state="paused_capacity",
                reason=f"the engine is full: {stats.sequences_running} sequences are being "
                f"sampled, and {stats.samples_waiting} samples wait",
            )
        return Waiting(state="active")

    @property
    def computed(self) -> Mapping[Task, tuple[int, float]]:
        """Number of operations and seconds of computing, by task."""
        return self._desk.computed

    @property
    def used_s(self) -> Mapping[str, float]:
        """Seconds of computing by owner: who has which share."""
        return self._desk.used_s


# MERGED: Finds accepted requests that this process does not have, and takes them up. At a start that is everything that an earlier process left. Later it is what was committed and then not handed on, because a read failed or the connection ended in between.


#: How often the number of waiting rows is compared with what is here.
LOOK_S = 5.0
#: Rows that are read at once, so that nothing else waits long for one reader or the event loop.
PIECE = 200


class Pickup:
    """A loop that runs until the server stops."""

    def __init__(self, desk: Desk, take: Callable[[RequestRow], None]) -> None:
        self._desk = desk
        self._take = take

    async def run(self) -> None:
        while not self._desk.closing:
            try:
                # One number from an index, while nothing is missing.
                if await self._desk.store.requests.count_waiting() > len(self._desk.taken):
                    await self.look()
            except StorageError as error:
                log.info("waiting requests cannot be looked for now: %s", error)
            except Exception:
                log.exception("waiting requests could not be looked for; it is tried again")
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Take up what waits, a piece of each owner in turn, those who have least first."""
        requests = self._desk.store.requests
        places = dict.fromkeys(await requests.waiting_owners())
        while places and not self._desk.closing:
            for owner, after in list(places.items()):
                rows, last = await requests.waiting_of(owner, after=after, limit=PIECE)
                for row in rows:
                    self._take(row)
                if last is None:
                    del places[owner]
                else:
                    places[owner] = last
