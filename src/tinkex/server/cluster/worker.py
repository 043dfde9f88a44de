"""
A worker among others: its heartbeat, the work that comes to it, and that of workers that died.

Everything that it does is decided by rows. Notifications make it look at once; without them it looks
every second.
"""

import asyncio
import base64
import contextlib
import logging
import time
from collections.abc import Coroutine, Mapping
from typing import Any

from tinkex.server.cluster import messages
from tinkex.server.cluster.copies import KEPT_S, Copies
from tinkex.server.cluster.known_workers import LOOK_S, KnownWorkers, plan_homes
from tinkex.server.cluster.moves import TRAINING_S, Moves
from tinkex.server.cluster.worker_scheduler import WorkerScheduler
from tinkex.server.executor import Executor, ServedModel
from tinkex.server.queued_request import Kind, Outcome, QueuedRequest
from tinkex.server.retry import PeriodicTask, poll_async
from tinkex.server.scheduler.result_waiters import CompletionLog, Futures
from tinkex.server.scheduler.sample_worker import TokenStream
from tinkex.server.store import Completion, NotOwner, StorageError, Store
from tinkex.server.store.notifier import MAX_BYTES, WEB, Notifier, channel_of
from tinkex.server.store.server_secrets import NOTIFICATIONS
from tinkex.server.store.workers import DRAINING, GONE, UP, NewHomes, Replaced
from tinkex.wire.proto.frames_pb2 import Stats, Tokens

log = logging.getLogger("tinkex.server.cluster")

#: Requests of a dead worker that one look moves.
STRANDED_BATCH = 500
#: How often sessions of loaded models are looked at, and what else other processes change.
SESSIONS_S = 5.0
REFRESH_S = 30.0
#: Refusals that no later step followed, or whose step was sent again, are deleted after this time.
REFUSED_KEPT_S = 24 * 3600.0
#: The last heartbeat, which says that the worker is gone, may take this long.
LEAVE_S = 5.0


class PublishedResults(Futures):
    """The requests of a worker. Nobody polls here: web processes are notified of results."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.completion_log: PublishedEvents = PublishedEvents(store)
        self.notifier: Notifier | None = None

    def finish(self, request: QueuedRequest, event: Completion | None = None) -> None:
        # Of a step, the term says that nobody else has finished it, and of a sample its event.
        is_ours = request.term is not None or event is not None
        finished = messages.finished_item(request, with_outcome=is_ours)
        if request.outcome is not None and request.outcome.result:
            # Only that it is finished is remembered.
            request.outcome = Outcome(compute_s=request.outcome.compute_s)
        if self.notifier is not None:
            self.notifier.send(WEB, messages.FINISHED, finished)
        super().finish(request, event)


class PublishedEvents(CompletionLog):
    """Tells web processes which samplers have new events."""

    notifier: Notifier | None = None

    def add(self, event: Completion) -> None:
        if self.notifier is not None:
            self.notifier.send(WEB, messages.EVENTS, event.sampling_session_id)


class SentTokens(TokenStream):
    """The tokens of a running sample, for the web process that streams them."""

    def __init__(self, request_id: str, channel: str, notifier: Notifier) -> None:
        super().__init__()
        self._request_id, self._channel, self._notifier = request_id, channel, notifier

    def add(self, tokens: Tokens) -> None:
        text = base64.b64encode(tokens.SerializeToString()).decode()
        if len(text) < MAX_BYTES - 200:
            self._notifier.send(self._channel, messages.TOKENS, f"{self._request_id} {text}")
            return
        middle = len(tokens.tokens) // 2
        if middle:
            self.add(_part(tokens, 0, middle))
            self.add(_part(tokens, middle, len(tokens.tokens)))


def _part(tokens: Tokens, first: int, last: int) -> Tokens:
    count = tokens.top_count
    return Tokens(
        sequence=tokens.sequence,
        start=tokens.start + first,
        tokens=tokens.tokens[first:last],
        logprobs=tokens.logprobs[first:last],
        top_count=count,
        top_tokens=tokens.top_tokens[first * count : last * count],
        top_logprobs=tokens.top_logprobs[first * count : last * count],
    )


class Worker:
    """One worker of a cluster. Belongs to one event loop; `start` first, `drain` and `close` last."""

    def __init__(
        self,
        name: str,
        model: ServedModel,
        *,
        store: Store,
        executor: Executor,
        scheduler: WorkerScheduler,
        results: PublishedResults,
        db_url: str,
        takeover_s: float,
    ) -> None:
        self.name = name
        self._model = model
        self._store = store
        self._executor = executor
        self._scheduler = scheduler
        self._takeover_s = takeover_s
        self.known = KnownWorkers(store, takeover_s=takeover_s)
        scheduler.live_workers = self._live
        secret = store.secrets[NOTIFICATIONS]
        self._notifier = Notifier(db_url, [channel_of(name)], self._heard, secret=secret)
        results.notifier = results.completion_log.notifier = self._notifier
        self._moves = Moves(
            name,
            model.name,
            scheduler=scheduler,
            store=store,
            known=self.known,
            notifier=self._notifier,
            spawn=self._spawn,
        )
        self._copies = Copies(
            scheduler,
            store,
            self._notifier,
            kept_s=takeover_s + KEPT_S,
            spawn=self._spawn,
        )
        scheduler.take_copies_from(self._copies.take)
        scheduler.on_forwarded = self._tell_moved
        self._term = 0
        self._state = UP
        self._beaten_s = self._steady_since_s = time.monotonic()
        self._sessions_s = self._refreshed_s = time.monotonic()
        self._beat_task, self._look_task = PeriodicTask(), PeriodicTask()
        self._tasks: set[asyncio.Task[None]] = set()
        self._forwarding = asyncio.Lock()
        #: Set when another process has registered under this name.
        self.replaced = asyncio.Event()

    async def start(self) -> None:
        """Register. Work comes once the scheduler is started."""
        self._term = await self._store.workers.register(
            self.name,
            base_model=self._model.name,
            model={
                "folder": str(self._model.folder),
                "arch": self._model.arch,
                "max_context_length": self._model.max_context_length,
            },
        )
        self._beaten_s = self._steady_since_s = time.monotonic()
        await self.known.look()
        self._notifier.start()
        self._beat_task.start(self._beat, LOOK_S, what="the heartbeat", log=log, after_s=0.0)
        self._look_task.start(self._look, LOOK_S, what="looking at the tables", log=log)

    @property
    def is_leader(self) -> bool:
        """Whether it does what one worker of its base model has to do for all."""
        rows = self.known.that_take(self._model.name)
        return bool(rows) and rows[0].name == self.name

    @property
    def is_first(self) -> bool:
        """Whether it does what one worker has to do for the whole database."""
        return min(self.known.live(), default="") == self.name

    # -- heartbeat -----------------------------------------------------------------------------------

    async def _beat(self) -> None:
        try:
            await self._store.workers.beat(
                self.name, self._term, state=self._state, stats=self._stats()
            )
            silent_s = time.monotonic() - self._beaten_s
            self._beaten_s = time.monotonic()
            if silent_s >= self._interruption_s:
                self._steady_since_s = self._beaten_s
            if silent_s >= self._takeover_s:
                await self._drop_lost(silent_s)
        except Replaced:
            log.error("another process has the name %s; this one ends", self.name)
            self._scheduler.replaced = True
            self.replaced.set()
        except StorageError as error:
            log.info("no heartbeat now: %s", error)

    @property
    def _interruption_s(self) -> float:
        """Heartbeats that are this far apart were interrupted."""
        return max(self._takeover_s / 2, 2 * LOOK_S)

    @property
    def _is_steady(self) -> bool:
        """
        Whether its own heartbeats came without interruption for the time that makes others dead.

        After an outage of the database, and when the whole cluster starts, the others are silent too
        and about to return.
        """
        now_s = time.monotonic()
        steady_s = now_s - self._steady_since_s
        return now_s - self._beaten_s < self._interruption_s and steady_s >= self._takeover_s

    def _takes_from(self, home: str | None) -> bool:
        """Whether the work of this home goes to other workers now; None is no home."""
        base_model = self._model.name
        if home in self.known.live(base_model):
            return False
        if self._is_steady:
            return True
        row = self.known.row(home)
        if row is not None and row.base_model == base_model and row.state != GONE:
            return False  # it may be about to return
        # It does not return. If others are about to start, they share its work.
        others = [
            row for row in self.known.rows if row.base_model == base_model and row.name != self.name
        ]
        return not others or any(row.takes_work(self._takeover_s) for row in others)

    async def _drop_lost(self, silent_s: float) -> None:
        """This worker was not heard of for long: others may have taken its models."""
        log.warning("no heartbeat for %.0f s; other workers may have its models", silent_s)
        self._scheduler.disown_all(await self._store.workers.lost_models(self._scheduler.terms()))

    def _stats(self) -> Mapping[str, Any]:
        engines = [self._executor.stats(engine) for engine in self._model.engines]
        reasons = [self._executor.waiting_for(engine) for engine in self._model.engines]
        replicas = self._scheduler.replicas(self._model.name)
        loads = replicas.loads()
        problem = self._store.health.problem
        return {
            "models": sum(load.models for load in loads),
            "sequences": sum(load.sequences for load in loads),
            "waiting": self._scheduler.waiting,
            "training": self._scheduler.runs_with_steps(time.monotonic() - TRAINING_S),
            "waiting_for": None if None in reasons else reasons[0],
            "storage": None if problem is None else problem.summary,
            "engines": [_fields(stats) for stats in engines if stats is not None],
            "usage": self._scheduler.usage.by_task,
        }

    # -- work ----------------------------------------------------------------------------------------

    def _heard(self, kind: str, items: list[str]) -> None:
        match kind:
            case messages.ACCEPTED:
                self._spawn(self._submit(items, {}))
            case messages.STREAMED:
                channels = dict(item.split(" ", 1) for item in items)
                self._spawn(self._submit(list(channels), channels))
            case messages.CANCELLED:
                self._spawn(self._cancel())
            case messages.REFUSED:
                self._spawn(self._refuse(items))
            case messages.COPY:
                for item in items:
                    self._copies.asked(*item)
            case messages.COPIED:
                for item in items:
                    self._moves.answered(item)
            case messages.NO_COPY:
                for item in items:
                    self._copies.not_needed(*item)
            case messages.MOVED:
                for item in items:
                    self._spawn(self._scheduler.adopt(item))

    async def _submit(self, request_ids: list[str], channels: Mapping[str, str]) -> None:
        for request in await self._store.workers.waiting_requests(request_ids, self.name):
            stream = None
            if (channel := channels.get(request.request_id)) is not None:
                stream = SentTokens(request.request_id, channel, self._notifier)
            self._scheduler.submit(request, token_stream=stream)
        if self._state == DRAINING:
            await self._send_on()

    async def _cancel(self) -> None:
        for request_id, owner in await self._store.workers.cancelled(self.name):
            self._scheduler.cancel(request_id, owner=owner)

    async def _refuse(self, model_ids: list[str]) -> None:
        """Refused steps of these models. Their rows stay until the logs of the models have them."""
        for step in await self._store.workers.refused(model_ids):
            model = await self._store.models.model(step.model_id)
            if model is None or model.base_model != self._model.name:
                continue
            refused = QueuedRequest(
                owner=model.owner,
                kind=Kind(step.kind),
                base_model=model.base_model,
                session_id=model.session_id,
                model_id=step.model_id,
                seq_id=step.seq_id,
                outcome=Outcome(error=step.error, category="user"),
            )
            # The worker that has the model reads it.
            with contextlib.suppress(NotOwner):
                await self._scheduler.refuse_step(refused)

    async def _look(self) -> None:
        """What lost notifications did not tell, and what nobody else does."""
        try:
            await self.known.look()
            await self._cancel()
            if gaps := self._scheduler.models_with_gap():
                await self._refuse(gaps)
            self._copies.look()
            if self._state == DRAINING:
                await self._send_on()
            else:
                self._moves.balance()
            if self.is_leader:
                await self._adopt()
            now_s = time.monotonic()
            if now_s - self._sessions_s >= SESSIONS_S:
                self._sessions_s = now_s
                await self._unload_sessions()
            if now_s - self._refreshed_s >= REFRESH_S:
                self._refreshed_s = now_s
                await self._scheduler.refresh()
                if self.is_first:
                    await self._store.workers.drop_refused(older_than_s=REFUSED_KEPT_S)
        except StorageError as error:
            log.info("the tables cannot be looked at now: %s", error)

    async def _adopt(self) -> None:
        """Find homes for the waiting requests of workers that are dead, or that have none."""
        base_model = self._model.name
        waiting = await self._store.workers.waiting_by_home(base_model)
        # In this order: a worker that a request waits for has registered before.
        running = await self._live()
        live = self.known.live(base_model)
        for home in filter(self._takes_from, waiting):
            stranded = await self._store.workers.stranded(base_model, home, limit=STRANDED_BATCH)
            if home in running:
                # It serves another base model now. It registers custom losses all the same.
                stranded = [one for one in stranded if one.kind != Kind.CREATE_CUSTOM_LOSS]
            rows = self.known.that_take(base_model)
            homes = plan_homes(stranded, rows, live, base_model, running=running)
            if homes.models or homes.requests:
                log.warning(
                    "%s: %d models and %d requests go to other workers",
                    "requests without a worker" if home is None else f"the worker {home} is gone",
                    len(homes.models),
                    len(homes.requests),
                )
                await self._store.workers.rehome(homes)
                self._tell(homes, [one.request_id for one in stranded])

    async def _send_on(self) -> None:
        """Give what came to a draining worker, and what it does not run, to other workers."""
        base_model = self._model.name
        async with self._forwarding:
            limit = STRANDED_BATCH + self._scheduler.unfinished
            stranded = [
                one
                for one in await self._store.workers.stranded(base_model, self.name, limit=limit)
                if not self._scheduler.has(one.request_id, one.model_id)
                and one.kind != Kind.CREATE_CUSTOM_LOSS
            ]
            if not stranded:
                return
            others = self.known.live(base_model) - {self.name}
            rows = [row for row in self.known.that_take(base_model) if row.name != self.name]
            homes = plan_homes(stranded, rows, others, base_model)
            if homes.models or homes.requests:
                await self._store.workers.rehome(homes)
                self._tell(homes, [one.request_id for one in stranded])

    def _tell_moved(self, home: str, model_id: str) -> None:
        self._notifier.send(channel_of(home), messages.MOVED, model_id)

    async def _live(self) -> frozenset[str]:
        """The names of all workers that run at this moment."""
        await self.known.look()
        return self.known.live()

    def _tell(self, homes: NewHomes, request_ids: list[str]) -> None:
        targets = {home for _, home in homes.models.values()} | set(homes.requests.values())
        for target in targets:
            for request_id in request_ids:
                self._notifier.send(channel_of(target), messages.ACCEPTED, request_id)

    async def _unload_sessions(self) -> None:
        if found := self._scheduler.sessions():
            for session_id in await self._store.workers.silent_sessions(list(found)):
                self._scheduler.unload_session(session_id)

    def homes(self) -> list[str]:
        """The workers whose idle models of its base model this one takes snapshots of."""
        if not self.is_leader:
            return [self.name]
        return [self.name, *filter(self._takes_from, (row.name for row in self.known.rows))]

    async def snapshot(self, model_id: str) -> bool:
        """Take a snapshot of an idle model, here or of a worker that is gone."""
        home, term = await self._store.ownership(self.name).home(model_id)
        if home is not None and self._takes_from(home):
            await self._store.workers.rehome(NewHomes(models={model_id: (term, self.name)}))
        return await self._scheduler.snapshot(model_id)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.info("a notification was not followed; the table is looked at: %s", error)

    # -- the end -------------------------------------------------------------------------------------

    async def drain(self, within_s: float) -> None:
        """Give models and waiting samples to other workers; running samples may finish."""
        self._state = DRAINING
        self._scheduler.drain()
        await self._beat()
        try:
            async with asyncio.timeout(within_s):
                await self.known.look()
                if any(row.name != self.name for row in self.known.that_take(self._model.name)):
                    self._scheduler.placement.give_up_waiting_samples()
                await self._send_on()
                await self._moves.move_all(within_s=within_s)
                await self._send_on()
                await poll_async(lambda: not self._scheduler.placement.has_samples, every_s=0.05)
        except TimeoutError:
            log.warning("not everything was finished within %.0f s; other workers do it", within_s)
        except StorageError as error:
            log.warning("models were not handed over: %s", error)

    async def close(self) -> None:
        """Leave. What still waits here is taken by the others at once."""
        await self._beat_task.close()
        await self._look_task.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._state = GONE
        if not self.replaced.is_set():
            try:
                async with asyncio.timeout(LEAVE_S):
                    await self._beat()
            except TimeoutError:
                log.info("the database does not respond; others notice by the missing heartbeat")
        await self._notifier.close()


def _fields(stats: Stats) -> dict[str, int | float]:
    return {field.name: getattr(stats, field.name) for field in Stats.DESCRIPTOR.fields}
