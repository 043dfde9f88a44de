"""
The samples of one client: let in, numbered, sent, waited for, started over where that is harmless.

Any thread may hand one in; everything else happens on the background loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import os
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, nullcontext
from time import monotonic
from typing import Any, Generic, TypeVar

from tinkex.client.batching import input_bytes
from tinkex.client.errors import own_copy
from tinkex.client.futures import Promise
from tinkex.client.http.backpressure import Line
from tinkex.client.http.polling import Poller, QueueObserver, Wanted
from tinkex.client.http.transport import Kind
from tinkex.client.observe import instrumentation
from tinkex.client.observe.instrumentation import Operation
from tinkex.client.sample_retry import RetryHandler
from tinkex.client.sample_stream import Told, answers_all, open_stream
from tinkex.client.session import Connection, Session, closed
from tinkex.wire.codec import encode_json
from tinkex.wire.futures import SamplingSessionFuturesTarget, UntypedAPIFuture
from tinkex.wire.protobuf import decode_sample_response
from tinkex.wire.sampling import (
    CLONE_STRIDE,
    JoinSamplingSessionRequest,
    JoinSamplingSessionResponse,
    SampleRequest,
    SampleResponse,
)

T = TypeVar("T")

#: A token in the JSON of a prompt has about this many bytes.
BYTES_PER_TOKEN = 10
#: "Busy" with a prompt above this size is waited out longer.
LARGE_PROMPT_BYTES = 128 * 1024


class Sample(Generic[T]):
    """One call of the user's, until it is answered."""

    __slots__ = ("arrived", "context", "finish", "insists", "promise", "request", "task", "told")

    def __init__(
        self,
        request: SampleRequest,
        finish: Callable[[SampleRequest, SampleResponse], T],
        *,
        insists: bool,
        told: Told | None = None,
        context: contextvars.Context | None = None,
    ) -> None:
        self.arrived = monotonic()
        #: The caller's, where its traces are to show this sample.
        self.context = context
        self.request = request
        self.finish = finish
        #: Started over even where the server asks clients not to.
        self.insists = insists
        #: For one that is read while it is drawn.
        self.told = told
        self.promise: Promise[T] = Promise(yields_to_waiter=True)
        self.task: asyncio.Task[T] | None = None


class Desk:
    """Where the samples of one client in one process are handed in."""

    def __init__(
        self,
        holder: Session,
        sampling_session_id: str | None,
        *,
        clone: bool,
        handler: RetryHandler,
        observer: QueueObserver,
    ) -> None:
        self.pid = os.getpid()
        self._metrics = instrumentation.here
        self._holder = holder
        self._sampling_session_id = sampling_session_id
        self._clone = clone
        self._handler = handler
        self._observer = observer
        self._rng = random.Random()
        #: Handed in, and not seen by the loop yet. Appending is safe from any thread.
        self._arrived: deque[Sample[Any]] = deque()
        self._rung = False
        self._line: Line[Sample[Any]] = Line(self._begin, handler.config.max_connections)
        self._inside: set[Sample[Any]] = set()
        self._opening: asyncio.Task[None] | None = None
        self._connection: Connection | None = None
        self._numbers: Iterator[int] = iter(())
        self._poller: Poller | None = None

    def hand_in(
        self,
        request: SampleRequest,
        finish: Callable[[SampleRequest, SampleResponse], T],
        *,
        insists: bool = False,
        told: Told | None = None,
    ) -> Promise[T]:
        """Queue a sample; never blocks. From any thread."""
        loop = self._holder.loop()
        context = contextvars.copy_context() if self._holder.settings.otel else None
        sample = Sample(request, finish, insists=insists, told=told, context=context)
        self._metrics.change("samples_waiting", "sample", 1)
        if told is not None:
            sample.promise.add_done_callback(lambda _: told.end())
        self._arrived.append(sample)
        if not self._rung:  # one wake-up for a thousand calls in a row
            self._rung = True
            loop.call_soon_threadsafe(self._look)
        return sample.promise

    # -- on the loop -----------------------------------------------------------------------------

    def _look(self) -> None:
        self._rung = False  # first: what arrives from now on rings again
        new = [self._arrived.popleft() for _ in range(len(self._arrived))]
        if self._holder.closed:  # since they were handed in
            self._metrics.change("samples_waiting", "sample", -len(new))
            for sample in new:
                sample.promise.fail(closed())
        elif self._connection is None:
            self._line.waiting.extend(new)
            if self._opening is None:
                self._opening = asyncio.get_running_loop().create_task(self._open())
                self._holder.track(self._opening)
                self._opening.add_done_callback(self._opened)
        else:
            self._join(self._connection, new)

    async def _open(self) -> None:
        """What has to be known before the first sample: the server's wishes, and our number."""
        self._holder.at_close(self)
        connection, _ = await self._holder.open()
        clone_id = 0
        sampler = self._sampling_session_id
        if self._clone:
            # A copy must not number its samples like the original: equal numbers are one request.
            if connection.config.sample_join_sampling_session and sampler is not None:
                joined = await connection.calls.call(
                    "POST",
                    "join_sampling_session",
                    JoinSamplingSessionRequest(sampling_session_id=sampler),
                    answer=JoinSamplingSessionResponse,
                    about=f"joining {sampler}",
                )
                clone_id = joined.client_counter
            else:
                clone_id = random.SystemRandom().randint(1, CLONE_STRIDE)
        self._numbers = itertools.count(CLONE_STRIDE * clone_id)
        if connection.config.sample_use_retrieve_futures and sampler is not None:
            self._poller = Poller(
                connection.calls,
                SamplingSessionFuturesTarget(
                    sampling_session_id=sampler, cloned_sampler_id=clone_id
                ),
                keep=self._holder.track,
                rng=self._rng,
            )
        self._connection = connection

    def _opened(self, task: asyncio.Task[None]) -> None:
        self._opening = None
        if self._connection is not None:
            self._join(self._connection, [])
            return
        error = closed() if task.cancelled() else task.exception()
        self._fail_waiting(lambda: own_copy(error or closed()))

    def _join(self, connection: Connection, new: list[Sample[Any]]) -> None:
        self._handler.watch(self._give_up, connection.config.sample_enable_stuck_detection)
        connection.lane.samples.join(self._line, new)

    def _begin(self, sample: Sample[Any]) -> bool:
        connection = self._connection
        self._metrics.change("samples_waiting", "sample", -1)
        if connection is None or sample.promise.done():
            return False  # taken back while it waited
        self._metrics.observe("wait", "sample", monotonic() - sample.arrived)
        try:
            if sample.context is None:
                sample.task = self._start(connection, sample)
            else:
                sample.task = sample.context.run(self._start, connection, sample)
        except BaseException as error:  # noqa: BLE001 (raised where the result is asked for)
            sample.promise.fail(error)  # this sample alone fails; those behind it go on
            return False
        self._inside.add(sample)
        self._holder.follow(sample.task, sample.promise)

        def ended(_: object) -> None:
            self._inside.discard(sample)
            connection.lane.samples.leave(self._line)
            if self._line.idle:
                self._handler.rest()

        sample.task.add_done_callback(ended)
        return True

    def _start(self, connection: Connection, sample: Sample[T]) -> asyncio.Task[T]:
        loop = asyncio.get_running_loop()
        return Operation("sample", self._holder.tracing, self._sampling_session_id or "").run(
            lambda: loop.create_task(self._draw(connection, sample))
        )

    def close(self) -> None:
        """The session ends: what was let in is cancelled by it, what waits is told here."""
        self._fail_waiting(closed)
        self._handler.rest()

    def _give_up(self, stuck: Callable[[], Exception]) -> None:
        self._fail_waiting(stuck)
        for sample in list(self._inside):
            sample.promise.fail(stuck())
            if sample.task is not None:
                sample.task.cancel()

    def _fail_waiting(self, error: Callable[[], BaseException]) -> None:
        waiting = list(self._line.waiting)
        self._line.waiting.clear()
        self._metrics.change("samples_waiting", "sample", -len(waiting))
        for sample in waiting:
            sample.promise.fail(error())

    # -- one sample ------------------------------------------------------------------------------

    async def _draw(self, connection: Connection, sample: Sample[T]) -> T:
        insists = sample.insists or not connection.config.sample_no_retries
        if sample.request.seq_id is not None:
            insists = False  # the number that was asked for is used up
        failures = 0
        while True:
            sent = False

            def was_sent() -> None:
                nonlocal sent
                sent = True

            try:
                answer = await self._attempt(connection, sample.request, was_sent, sample.told)
            except Exception as error:
                failures += 1
                delay = self._handler.again_after_s(error, failures, sent=sent, rng=self._rng)
                if delay is None or not insists:
                    raise
                if sample.told is not None and sample.told.begun:
                    raise  # other tokens would follow those that were read
                await asyncio.sleep(delay)
            else:
                self._handler.succeeded()
                if sample.told is not None:
                    sample.told.complete(answer)
                return sample.finish(sample.request, answer)

    async def _attempt(
        self,
        connection: Connection,
        request: SampleRequest,
        was_sent: Callable[[], None],
        told: Told | None,
    ) -> SampleResponse:
        """One submission and its result, under a number of its own."""
        # Only a sampling session numbers its samples, and one who numbers them himself means it.
        fixed = request.sampling_session_id is None or request.seq_id is not None
        number = None if fixed else next(self._numbers)
        if told is not None:
            streamed = await self._streamed(connection, request, number, was_sent, told)
            if streamed is not None:
                return streamed
        poller = self._poller
        started = monotonic()
        if poller is None:
            promised = await self._submit(connection, request, number)
        else:
            with poller.expecting():
                promised = await self._submit(connection, request, number)
                poller.register(promised.request_id)
        round_trip_s = monotonic() - started
        was_sent()
        try:
            return await self._result(
                connection, promised.request_id, _wanted(promised), round_trip_s
            )
        except asyncio.CancelledError:
            self._holder.cancel_later(connection, promised.request_id)
            raise

    async def _submit(
        self, connection: Connection, request: SampleRequest, number: int | None
    ) -> UntypedAPIFuture:
        async with self._submitting(connection, request, number) as (body, busy_s):
            return await connection.calls.call(
                "POST",
                "asample",
                body,
                answer=UntypedAPIFuture,
                kind=Kind.SAMPLE,
                headers={"X-Tinker-Sampling-Backpressure": "1"},
                busy_s=busy_s,
                about=_named(request, number),
            )

    @asynccontextmanager
    async def _submitting(
        self, connection: Connection, request: SampleRequest, number: int | None
    ) -> AsyncIterator[tuple[bytes, float]]:
        """The body to send, and how long "busy" is waited out; one given up inside is taken back."""
        size = input_bytes(request.prompt, per_token=BYTES_PER_TOKEN)
        lane = connection.lane
        careful = lane.careful.hold(1) if lane.backoff.recent else nullcontext()
        async with careful, lane.sample_bytes.hold(size):
            # Encoded only now: ten thousand waiting prompts are not ten thousand bodies.
            body = encode_json(
                request if number is None else request.model_copy(update={"seq_id": number})
            )
            try:
                yield body, 5.0 if size > LARGE_PROMPT_BYTES else 1.0
            except asyncio.CancelledError:
                if request.sampling_session_id is not None:
                    self._holder.cancel_later(
                        connection, connection.calls.request("POST", "asample", body)
                    )
                raise

    async def _streamed(
        self,
        connection: Connection,
        request: SampleRequest,
        number: int | None,
        was_sent: Callable[[], None],
        told: Told,
    ) -> SampleResponse | None:
        """One submission that is read while it is drawn; None where the service has no streams."""
        async with self._submitting(connection, request, number) as (body, busy_s):
            stream = await open_stream(
                connection.calls, body, busy_s=busy_s, about=_named(request, number)
            )
        if stream is None:
            return None
        was_sent()
        request_id = stream.promised.request_id
        try:
            answer = await stream.read(told)
            if answer is not None and answers_all(request):
                return answer
            # Broken off, it is fetched like any other: nothing is lost, nothing drawn twice.
            return await connection.results.fetch(
                request_id,
                _wanted(stream.promised),
                observer=self._handler.observing(self._observer),
            )
        except asyncio.CancelledError:
            self._holder.cancel_later(connection, request_id)
            raise

    async def _result(
        self,
        connection: Connection,
        request_id: str,
        wanted: Wanted[SampleResponse],
        round_trip_s: float,
    ) -> SampleResponse:
        poller, fetch = self._poller, connection.results.fetch
        observer = self._handler.observing(self._observer)
        if poller is None:
            return await fetch(request_id, wanted, observer=observer, round_trip_s=round_trip_s)
        event = await poller.finished(request_id)
        if event is None:
            with poller.asking():
                return await fetch(request_id, wanted, observer=observer, round_trip_s=round_trip_s)
        try:
            async with connection.lane.fetches.hold(1):
                return await fetch(
                    request_id,
                    wanted,
                    observer=observer,
                    round_trip_s=round_trip_s,
                    size=getattr(event, "response_payload_uncompressed_size", None) or 0,
                )
        finally:
            poller.fetched(request_id)


def _wanted(promised: UntypedAPIFuture) -> Wanted[SampleResponse]:
    def read(body: bytes) -> SampleResponse:
        return decode_sample_response(body, promised.sample_sequence_ids)

    return Wanted(request_type="Sample", answer=SampleResponse, read_protobuf=read)


def _named(request: SampleRequest, number: int | None) -> str:
    model = request.sampling_session_id or request.model_path or request.base_model
    number = request.seq_id if number is None else number
    return f"a sample of {model}" if number is None else f"sample {number} of {model}"
