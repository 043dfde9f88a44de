"""
The scheduler as a web process sees it: requests become rows, and workers run them.

It has the methods of `Scheduler` that routes use. Everything that a worker must know is in a row; the
notification after it only saves the time until the worker looks.
"""

import asyncio
import base64
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from tinkex.server.cluster import messages
from tinkex.server.cluster.known_workers import LOOK_S, KnownWorkers
from tinkex.server.cluster.remote_results import RemoteFutures
from tinkex.server.queued_request import Outcome, QueuedRequest
from tinkex.server.retry import PeriodicTask
from tinkex.server.scheduler.fairness import QueueState, TrainingLimits
from tinkex.server.scheduler.results import ComputeUsage, SessionFailures
from tinkex.server.scheduler.sample_worker import TokenStream
from tinkex.server.scheduler.step_queue import number_of
from tinkex.server.store import StorageError, Store
from tinkex.server.store.notifier import WEB, Notifier, channel_of
from tinkex.server.store.server_secrets import NOTIFICATIONS
from tinkex.server.store.workers import RefusedStep
from tinkex.wire.proto.frames_pb2 import Tokens

log = logging.getLogger("tinkex.server.cluster")


class RemoteScheduler:
    """Gives requests to workers. Belongs to one event loop; call `start` first, `close` last."""

    def __init__(
        self, store: Store, futures: RemoteFutures, workers: KnownWorkers, *, db_url: str, name: str
    ) -> None:
        self._store = store
        self._futures = futures
        self._workers = workers
        self._channel = channel_of(name)
        self.notifier = Notifier(
            db_url, [WEB, self._channel], self._heard, secret=store.secrets[NOTIFICATIONS]
        )
        futures.listening_since_s = lambda: self.notifier.listening_since_s
        self._failures = SessionFailures(store)
        #: Workers know the limits from the keys; this one is not used.
        self.training_limits = TrainingLimits(0)
        self._streams: dict[str, TokenStream] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._look_task = PeriodicTask()
        futures.on_finished = self._finished
        #: Called with sessions that another web process finished, or whose clients timed out.
        self.on_changed_sessions: Callable[[list[str]], Awaitable[None]] | None = None

    async def start(self) -> None:
        await self._futures.look()
        self.notifier.start()
        self._look_task.start(self._look, LOOK_S, what="looking for results", log=log)

    async def close(self) -> None:
        await self._look_task.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.notifier.close()

    async def _look(self) -> None:
        try:
            await self._futures.look()
        except StorageError as error:
            log.info("results cannot be looked for now: %s", error)

    def _heard(self, kind: str, items: list[Any]) -> None:
        match kind:
            case messages.FINISHED:
                for item in items:
                    request, is_complete = messages.finished_request(item)
                    self._futures.heard(request, is_complete=is_complete)
            case messages.EVENTS:
                self._futures.completion_log.heard(items)
            case messages.CHANGED_SESSIONS:
                self._spawn(self._changed_sessions(items))
            case messages.TOKENS:
                for item in items:
                    request_id, _, text = item.partition(" ")
                    if (stream := self._streams.get(request_id)) is not None:
                        stream.add(Tokens.FromString(base64.b64decode(text)))

    async def _changed_sessions(self, session_ids: list[str]) -> None:
        if self.on_changed_sessions is not None:
            try:
                await self.on_changed_sessions(session_ids)
            except StorageError as error:
                log.info("changed sessions cannot be read now: %s", error)

    def _finished(self, request_id: str) -> None:
        self._streams.pop(request_id, None)

    # -- requests ------------------------------------------------------------------------------------

    async def place(self, request: QueuedRequest) -> None:
        """Choose the worker of a new request. A step goes to the worker of its model."""
        if request.model_id is not None and not request.creates_model:
            request.home = ""
            return
        # A custom loss goes to the workers that have models of its session (`create_custom_loss`).
        request.home = self._workers.choose_home(request)

    def submit(self, request: QueuedRequest, *, token_stream: TokenStream | None = None) -> None:
        """A stored request: tell its worker."""
        request_id = request.request_id
        if self._futures.is_cached(request_id):
            return
        # The row has it.
        request.payload = None
        self._futures.track(request)
        if not request.home:
            return  # a worker finds it
        channel = channel_of(request.home)
        if token_stream is not None:
            self._streams[request_id] = token_stream
            self.notifier.send(channel, messages.STREAMED, f"{request_id} {self._channel}")
        else:
            self.notifier.send(channel, messages.ACCEPTED, request_id)

    def creation_refused(self, request: QueuedRequest, outcome: Outcome) -> None:
        """A model was refused on acceptance: mark its session as failed."""
        self._failures.update(request, outcome)

    async def refuse_step(self, step: QueuedRequest) -> None:
        """Record a refused step with its outcome. It fails so if its client sends later steps."""
        model_id, error = step.model_id or "", step.outcome.error if step.outcome else None
        refused = RefusedStep(
            model_id=model_id, seq_id=number_of(step), kind=step.kind, error=error or ""
        )
        if (home := await self._store.workers.refuse(refused)) is not None:
            self.notifier.send(channel_of(home), messages.REFUSED, model_id)

    async def is_blocked_by(self, model_id: str, seq_id: int) -> bool:
        """Whether later steps of a model wait for this one."""
        return await self._store.requests.has_later_steps(model_id, seq_id)

    def queue_state(self, request_id: str) -> QueueState:
        """The state of an unfinished request, as far as its worker has told."""
        request = self._futures.unfinished_request(request_id)
        if request is None:
            return QueueState(state="active")
        row = self._workers.row(request.home)
        if row is None or row.base_model != request.base_model or not self._workers.live():
            reason = self._workers.waiting_for(request.base_model)
        else:
            reason = self._workers.reason(row)
        return QueueState(state="active" if reason is None else "paused_capacity", reason=reason)

    def token_stream(self, request_id: str) -> TokenStream | None:
        """The tokens of a running sample, if it was started with a stream at this web process."""
        return self._streams.get(request_id)

    def cancel(self, request_id: str, *, owner: str) -> None:
        """Cancel a sample. No effect on anything else: a step never leaves its queue."""
        self._spawn(self._cancel(request_id, owner=owner, after_s=0.0))

    def cancel_unless_polled(self, request_id: str, *, owner: str, after_s: float) -> None:
        """
        The reader of a sample disconnected: cancel it unless it is polled within the time.

        A poll at any web process counts: that one finds the mark with its next look but one, and
        deletes it.
        """
        self._spawn(self._cancel(request_id, owner=owner, after_s=max(after_s, 3 * LOOK_S)))

    async def _cancel(self, request_id: str, *, owner: str, after_s: float) -> None:
        try:
            home = await self._store.workers.cancel(request_id, owner=owner, after_s=after_s)
        except StorageError as error:
            log.info("%s was not cancelled: %s", request_id, error)
            return
        if home and not after_s:
            self.notifier.send(channel_of(home), messages.CANCELLED, request_id)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def snapshot(self, model_id: str) -> bool:
        """Workers do this by themselves."""
        return False

    def unload_session(self, session_id: str) -> None:
        """Workers unload the models of a session that has timed out or is finished by themselves."""
        self.notifier.send(WEB, messages.CHANGED_SESSIONS, session_id)

    # -- metrics -------------------------------------------------------------------------------------

    @property
    def usage(self) -> ComputeUsage:
        """What all workers computed."""
        usage = ComputeUsage()
        usage.by_task = self._workers.compute_usage()
        return usage
