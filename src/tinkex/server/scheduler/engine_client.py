"""
One engine, as the scheduler sees it: orders, attempts, and requests that crash it.

`EngineClient.attempt` runs a batch of steps or a sample. When an engine ends by itself, everything it
was running is lost. This counts as one attempt for each of these requests, and they run again: most
crashes are not caused by a request. After two such attempts a request is isolated (`CrashIsolation`):
it runs alone or, if there are many such requests, in small groups. If the engine ends while a request
runs alone, that request fails, and the counts of the others are reset.

The replicas of a base model share the counts, because a lost request may run on another one.
Counts are stored when an engine ends, so they survive the web process. `crash_files` counts for a web
process that crashes together with its engines.
"""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tinkex.server.executor import EngineKilled, EngineLost, OnTokens
from tinkex.server.queued_request import Kind, QueuedRequest
from tinkex.server.scheduler.base_model_check import BaseModelCheck
from tinkex.server.scheduler.crash_files import CrashFiles
from tinkex.server.scheduler.fairness import Admission
from tinkex.server.scheduler.results import MAX_ATTEMPTS, Execution
from tinkex.server.store import CustomLoss, Model
from tinkex.wire.codec import encode_json
from tinkex.wire.proto import frames_pb2
from tinkex.wire.proto.frames_pb2 import Done, Order

T = TypeVar("T")

#: Why a request must not run that was running alone when the web process crashed.
ENDED_WEB_PROCESS = "the web process crashed together with it"
#: A request that was lost this many times is isolated.
ISOLATE_AFTER = MAX_ATTEMPTS - 1
#: Up to this many isolated requests run one by one; more run in this many groups at first.
MAX_SINGLY = 16
GROUPS = 8


def group_size(isolated: int, attempts: int) -> int:
    """How many of this many isolated requests run together after this many attempts."""
    if isolated <= MAX_SINGLY:
        return 1
    return max(1, int(isolated / GROUPS ** (attempts - ISOLATE_AFTER + 1)))


def after_web_crash(
    attempts: Mapping[str, int], isolated: frozenset[str]
) -> tuple[dict[str, int], str | None]:
    """
    The new counts of a base model's waiting requests, and the request that must fail if known.

    `isolated` are the isolated requests that were running on any engine. No other request ran beside
    them on their engine; other replicas of the base model may have run some. These do not count. If
    there are none isolated, any request may have crashed the web process, so all of them count.
    """
    running = [request_id for request_id in attempts if request_id in isolated]
    suspects = running if isolated else attempts
    counted = {request_id: attempts[request_id] + 1 for request_id in suspects}
    if len(running) == 1 and counted[running[0]] >= MAX_ATTEMPTS:
        return {}, running[0]
    return {**{one: count for one, count in attempts.items() if count}, **counted}, None


@dataclass(slots=True, eq=False)
class Attempt:
    """One step batch of a model, or one sample, on an engine."""

    request_ids: Sequence[str]
    #: The largest number of earlier attempts of its requests.
    earlier: int
    #: Whether nothing else was on the engine at any time during this attempt.
    alone: bool = True
    #: Set when it may run; None if it never had to wait.
    admitted: asyncio.Event | None = None

    @property
    def is_isolated(self) -> bool:
        return self.earlier >= ISOLATE_AFTER


@dataclass(slots=True)
class LostAttempts:
    """How often requests of one base model were lost, on any of its engines."""

    counts: dict[str, int] = field(default_factory=dict)
    #: The request that crashed the last web process, until it has failed. It must not run.
    culprit: str | None = None

    def restore(self, counts: Mapping[str, int], culprit: str | None) -> None:
        """Set the counts of an earlier process, and the request that it found to crash engines."""
        self.counts, self.culprit = dict(counts), culprit


class CrashIsolation:
    """Admits attempts to one engine, in order of arrival."""

    def __init__(self, lost: LostAttempts | None = None, files: CrashFiles | None = None) -> None:
        self._files = files
        self.lost = lost or LostAttempts()
        self._running: set[Attempt] = set()
        self._isolated_running = 0
        #: In order of arrival.
        self._waiting: dict[Attempt, None] = {}
        self._isolated_waiting = 0
        self._held: set[str] = set()

    @contextlib.asynccontextmanager
    async def attempt(self, *request_ids: str) -> AsyncIterator[Attempt]:
        """Wait until these requests may run on the engine; they may run inside the `with` block."""
        attempt = Attempt(request_ids, max(map(self.attempts, request_ids), default=0))
        self._waiting[attempt] = None
        self._isolated_waiting += attempt.is_isolated
        self._admit()
        try:
            if attempt in self._waiting:
                attempt.admitted = asyncio.Event()
                self._held.update(request_ids)
                await attempt.admitted.wait()
                self._held.difference_update(request_ids)
            yield attempt
        finally:
            self._leave(attempt)

    def count(self, request_id: str, attempt: Attempt, attempts: int) -> bool:
        """Count lost attempts of a request; True if the request ended the engine."""
        total = self.lost.counts[request_id] = self.attempts(request_id) + attempts
        ended_engine = attempt.alone and total >= MAX_ATTEMPTS
        if ended_engine:
            # It ended the engine the other times too.
            self.lost.counts.clear()
        return ended_engine

    def attempts(self, request_id: str) -> int:
        """How often this request was lost."""
        return self.lost.counts.get(request_id, 0)

    @property
    def culprit(self) -> str | None:
        """The request that must not run."""
        return self.lost.culprit

    def is_held(self, request_id: str) -> bool:
        """Whether it waits because of an isolated request, or because it is one."""
        return request_id in self._held

    def forget(self, request_id: str) -> None:
        """The request is finished."""
        self.lost.counts.pop(request_id, None)
        if request_id == self.lost.culprit:
            self.lost.culprit = None

    def _admit(self) -> None:
        # Strictly in order, so neither isolated requests nor the others wait forever.
        while self._waiting and self._may_start(attempt := next(iter(self._waiting))):
            del self._waiting[attempt]
            self._isolated_waiting -= attempt.is_isolated
            if self._running:
                attempt.alone = False
                # With several running, all have lost the flag already.
                if len(self._running) == 1:
                    next(iter(self._running)).alone = False
            self._running.add(attempt)
            self._isolated_running += attempt.is_isolated
            if attempt.is_isolated and self._files is not None:
                self._files.add(attempt.request_ids)
            if attempt.admitted is not None:
                attempt.admitted.set()

    def _may_start(self, attempt: Attempt) -> bool:
        if not attempt.is_isolated:
            return not self._isolated_running
        if len(self._running) > self._isolated_running:
            return False
        isolated = self._isolated_running + self._isolated_waiting
        return len(self._running) < group_size(isolated, attempt.earlier)

    def _leave(self, attempt: Attempt) -> None:
        self._held.difference_update(attempt.request_ids)
        if attempt in self._running:
            self._running.discard(attempt)
            self._isolated_running -= attempt.is_isolated
            if attempt.is_isolated and self._files is not None:
                self._files.remove(attempt.request_ids)
        else:
            del self._waiting[attempt]
            self._isolated_waiting -= attempt.is_isolated
        self._admit()


class RunElsewhere(Exception):
    """The engine was lost or is down, and another replica can run the request."""


class EngineClient:
    """Sends work to one engine, and isolates requests that crash it."""

    def __init__(
        self,
        name: str,
        execution: Execution,
        *,
        base_model: str,
        lost: LostAttempts,
        has_replicas: bool = False,
        crash_files: CrashFiles | None = None,
        base_check: BaseModelCheck | None = None,
        max_sequences: int = 0,
    ) -> None:
        self.name = name
        self.base_model = base_model
        self.base_check = base_check
        self.isolation = CrashIsolation(lost, crash_files)
        self._has_replicas = has_replicas
        self._crash_files = crash_files
        self._execution = execution
        self._executor = execution.executor
        self._admission = Admission(self.ready, max_sequences=max_sequences)
        #: Replaced when those that wait for the engine give up.
        self._given_up = asyncio.Event()
        #: Attempts were counted since the counts were stored.
        self._counts_changed = False

    def close(self) -> None:
        self._admission.close()

    async def ready(self) -> int:
        """Wait until the engine is up. Returns its incarnation."""
        return await self._unless_given_up(self._executor.ready(self.name))

    async def _unless_given_up(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which waits while the engine is down; EngineKilled at `give_up`."""
        if not self._has_replicas:
            return await work
        working = asyncio.ensure_future(work)
        given_up = asyncio.ensure_future(self._given_up.wait())
        try:
            both: set[asyncio.Future[Any]] = {working, given_up}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise EngineKilled(f"the engine of {self.name} is down")
            return working.result()
        finally:
            working.cancel()
            given_up.cancel()

    def give_up(self) -> None:
        """What waits for this engine goes to another replica."""
        self._given_up.set()
        self._given_up = asyncio.Event()
        self.give_up_waiting_samples()

    def give_up_waiting_samples(self) -> None:
        """Samples that the engine does not have yet get RunElsewhere."""
        self._admission.send_elsewhere(RunElsewhere)

    async def send(
        self,
        order: Order,
        *,
        counted: bool = False,
        incarnation: int | None = None,
        on_tokens: OnTokens | None = None,
    ) -> asyncio.Future[Done]:
        """
        Send an order; `counted` in the metrics if it is work of a request.

        The engine has the order when this returns, before anything that is sent later.
        """
        future = await self._unless_given_up(
            self._executor.send(self.name, order, incarnation=incarnation, on_tokens=on_tokens)
        )
        if counted:
            task = order.WhichOneof("work") or ""
            future.add_done_callback(functools.partial(self._execution.usage.record, task))
        return future

    async def attempt(
        self,
        requests: Sequence[QueuedRequest],
        run: Callable[[Attempt], Awaitable[None]],
        *,
        model_id: str | None = None,
        is_unfinished: Callable[[QueuedRequest], bool] = lambda _: True,
    ) -> Sequence[QueuedRequest]:
        """
        Run requests once: one sample, or a batch of steps of `model_id`.

        Keeps requests apart that crashed the engine before. If the engine is lost, this counts for
        each unfinished request. Returns the requests that have to run again. Raises `EngineLost` if
        the one request that is left crashes engines.
        """
        request_ids = [request.request_id for request in requests]
        if request_ids[0] == self.isolation.culprit:
            raise EngineLost(ENDED_WEB_PROCESS)
        names = request_ids if model_id is None else [model_id, *request_ids]
        async with self.isolation.attempt(*names) as attempt:
            try:
                await run(attempt)
            except EngineLost as lost:
                unfinished = [request for request in requests if is_unfinished(request)]
                found = [self.count_attempt(one.request_id, attempt, lost) for one in unfinished]
                if found == [True]:
                    raise
                return unfinished
        return ()

    async def run_request(
        self,
        request: QueuedRequest,
        prepare: Callable[[], Awaitable[tuple[Order, OnTokens | None]]],
    ) -> Done:
        """
        Run a request that is not a step, again after each crash until it is found to cause them.

        If there are replicas, it runs once: RunElsewhere after a loss, also during `prepare`.

        The order is made after admission, so waiting requests take no memory, and before the
        attempt: what it reads may be slow, and an isolated request would wait for it.
        """
        done = Done()

        async def run(_: Attempt) -> None:
            nonlocal done
            self._execution.futures.started(request)
            try:
                done = await (await self.send(order, counted=True, on_tokens=on_tokens))
            except EngineLost:
                if not self._execution.closing:
                    self._admission.engine_lost()
                raise

        try:
            while True:
                async with self._admission.turn(request.owner):
                    try:
                        order, on_tokens = await prepare()
                    except EngineLost as lost:
                        if self._has_replicas and not self._execution.closing:
                            raise RunElsewhere from lost
                        raise
                    again = await self.attempt([request], run)
                if not again:
                    self.isolation.forget(request.request_id)
                    return done
                if self._execution.closing:
                    raise EngineLost("the server is stopping")
                if self._has_replicas:
                    raise RunElsewhere
        except RunElsewhere:
            raise
        except BaseException:
            self.isolation.forget(request.request_id)
            raise

    def count_attempt(self, request_id: str, attempt: Attempt, lost: EngineLost) -> bool:
        """Count an attempt whose engine was lost; True if its request or rebuild ended the engine."""
        stopping = self._execution.closing or self._execution.futures.closing
        if not lost.attempts or stopping:
            return False
        ended_engine = self.isolation.count(request_id, attempt, lost.attempts)
        # One write for all requests that were lost together.
        if not self._counts_changed:
            self._counts_changed = True
            self._execution.spawn(self._store_counts())
        return ended_engine

    async def _store_counts(self) -> None:
        """Store the counts, so that they survive this process."""
        self._counts_changed = False
        if self._crash_files is not None:
            self._crash_files.mark_running()
        stored = self._execution.store.attempts
        if counts := dict(self.isolation.lost.counts):
            await stored.set(counts)
        else:
            await stored.clear(self.base_model, home=self._execution.worker_name)


# -- orders ---------------------------------------------------------------------------------------


def create_order(model: Model) -> Order:
    return Order(
        create=frames_pb2.Create(
            model_id=model.model_id,
            lora_config=encode_json(dict(model.lora_config)),
            optimizer_config=encode_json(dict(model.optimizer_config)),
        )
    )


def training_order(model: Model, kind: Kind, payload: bytes | Path) -> Order:
    """A forward pass, a forward and backward pass, or an optimizer step."""
    carried = _payload(payload)
    if kind is Kind.OPTIM_STEP:
        step = frames_pb2.OptimStep(model_id=model.model_id, payload=carried)
        return Order(optim_step=step)
    return Order(
        run_pass=frames_pb2.Pass(
            model_id=model.model_id,
            payload=carried,
            backward=kind is Kind.FORWARD_BACKWARD,
            session_id=model.session_id,
        )
    )


def sample_order(owner: str, folder: str | None, payload: bytes | Path, *, streams: bool) -> Order:
    """`folder` is that of the adapter; None for the base model."""
    return Order(
        sample=frames_pb2.Sample(
            payload=_payload(payload), adapter_folder=folder or "", owner=owner, streams=streams
        )
    )


def register_loss_order(loss: CustomLoss) -> Order:
    return Order(
        register_loss=frames_pb2.RegisterLoss(
            loss_id=loss.loss_id, session_id=loss.session_id, payload=_payload(loss.definition)
        )
    )


def clear_gradients_order(model_id: str) -> Order:
    return Order(clear_gradients=frames_pb2.ClearGradients(model_id=model_id))


def payload_size(payload: bytes | Path) -> int:
    return payload.stat().st_size if isinstance(payload, Path) else len(payload)


def _payload(payload: bytes | Path) -> frames_pb2.Payload:
    if isinstance(payload, Path):
        return frames_pb2.Payload(file=str(payload))
    return frames_pb2.Payload(inline=payload)
