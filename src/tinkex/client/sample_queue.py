"""
The sample queue of one client: admits, numbers, sends and retries samples, and fetches results.

Any thread may submit a sample; everything else happens on the background loop.
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
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Generic, TypeVar

from tinkex.client.connection import Connection
from tinkex.client.errors import (
    APIConnectionError,
    APIStatusError,
    RequestFailedError,
    own_copy,
)
from tinkex.client.futures import Promise
from tinkex.client.http.backpressure import ClientQueue, input_bytes
from tinkex.client.http.polling import ExpectedResult
from tinkex.client.http.retry import RetryConfig, is_retryable, is_user_error, retrying
from tinkex.client.http.shared_poll import SharedPoll
from tinkex.client.http.transport import Kind, Request
from tinkex.client.observe import instrumentation
from tinkex.client.observe.instrumentation import Operation
from tinkex.client.observe.queue_states import QueueObserver, subject_of
from tinkex.client.observe.waiting import Limit
from tinkex.client.sample_stream import PartialOutput, answers_all, open_stream
from tinkex.client.session import Session, closed_error
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

#: Approximate size of a prompt token in JSON.
BYTES_PER_TOKEN = 10
#: After a 429, prompts above this size wait longer.
LARGE_PROMPT_BYTES = 128 * 1024
#: Retries of a sample that the server accepted and then failed. Limited by number, not by time:
#: against a server that always fails, retries would otherwise go on silently for two hours.
MAX_SERVER_FAILURES = 3


@dataclass(eq=False, slots=True)
class Sample(Generic[T]):
    """One call of the user, until it has a result."""

    request: SampleRequest
    finish: Callable[[SampleRequest, SampleResponse], T]
    #: Retried even if the server asks clients not to retry samples.
    always_retry: bool
    #: Set for a streamed sample.
    partial: PartialOutput | None
    #: The caller's context, if traces are enabled.
    context: contextvars.Context | None
    arrived: float = field(default_factory=monotonic)
    promise: Promise[T] = field(default_factory=lambda: Promise(cancel_with_waiter=True))
    task: asyncio.Task[T] | None = None


class SampleQueue:
    """
    The samples of one client in one process.

    Its clone id (`cloned_sampler_id` in the protocol) determines the range of its seq_ids. An
    original client has clone id 0. With `own_clone_id` the queue gets another one. Copies of a
    client (unpickled, made from a handle, or in a forked child) need that: a server takes two
    samples with the same seq_id for one request.
    """

    def __init__(
        self,
        holder: Session,
        sampling_session_id: str | None,
        *,
        own_clone_id: bool,
        handler: RetryHandler,
        observer: QueueObserver,
    ) -> None:
        self.pid = os.getpid()
        self._metrics = instrumentation.METRICS
        self._holder = holder
        self._sampling_session_id = sampling_session_id
        self._own_clone_id = own_clone_id
        self._handler = handler
        self._observer = observer
        self._rng = random.Random()
        #: Submitted, and not yet seen by the loop. Appending is safe from any thread.
        self._arrived: deque[Sample[Any]] = deque()
        self._wakeup_pending = False
        self._waiting_samples: ClientQueue[Sample[Any]] = ClientQueue(
            self._start_sample, handler.config.max_connections
        )
        self._running: set[Sample[Any]] = set()
        self._opening: asyncio.Task[None] | None = None
        self._connection: Connection | None = None
        self._seq_ids: Iterator[int] = iter(())
        self._shared_poll: SharedPoll | None = None

    def submit(
        self,
        request: SampleRequest,
        finish: Callable[[SampleRequest, SampleResponse], T],
        *,
        always_retry: bool = False,
        partial: PartialOutput | None = None,
    ) -> Promise[T]:
        """Queue a sample, from any thread. Never blocks."""
        loop = self._holder.loop()
        context = contextvars.copy_context() if self._holder.settings.otel else None
        sample = Sample(request, finish, always_retry, partial, context)
        self._metrics.change("samples_waiting", "sample", 1)
        if partial is not None:
            sample.promise.add_done_callback(lambda _: partial.end())
        self._arrived.append(sample)
        if not self._wakeup_pending:  # one wake-up for many calls in a row
            self._wakeup_pending = True
            loop.call_soon_threadsafe(self._take_arrived)
        return sample.promise

    # -- on the loop -----------------------------------------------------------------------------

    def _take_arrived(self) -> None:
        self._wakeup_pending = False  # first, so that later arrivals wake the loop again
        new = [self._arrived.popleft() for _ in range(len(self._arrived))]
        if self._holder.closed:  # after they were submitted
            self._metrics.change("samples_waiting", "sample", -len(new))
            for sample in new:
                sample.promise.fail(closed_error())
        elif self._connection is None:
            self._waiting_samples.waiting.extend(new)
            if self._opening is None:
                self._opening = asyncio.get_running_loop().create_task(self._open())
                self._holder.track(self._opening)
                self._opening.add_done_callback(self._opened)
        else:
            self._enqueue(self._connection, new)

    async def _open(self) -> None:
        """Before the first sample: get the server's configuration, and a clone id if needed."""
        self._holder.close_with_session(self)
        connection, _ = await self._holder.open()
        clone_id = 0
        sampler = self._sampling_session_id
        if self._own_clone_id:
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
        self._seq_ids = itertools.count(CLONE_STRIDE * clone_id)
        if connection.config.sample_use_retrieve_futures and sampler is not None:
            self._shared_poll = SharedPoll(
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
            self._enqueue(self._connection, [])
            return
        error = closed_error() if task.cancelled() else task.exception()
        self._fail_waiting(lambda: own_copy(error or closed_error()))

    def _enqueue(self, connection: Connection, new: list[Sample[Any]]) -> None:
        self._handler.watch(self._give_up, connection.config.sample_enable_stuck_detection)
        connection.limits.samples.enqueue(self._waiting_samples, new)

    def _start_sample(self, sample: Sample[Any]) -> bool:
        connection = self._connection
        self._metrics.change("samples_waiting", "sample", -1)
        if connection is None or sample.promise.done():
            return False  # cancelled while it waited
        self._metrics.observe("wait", "sample", monotonic() - sample.arrived)
        try:
            if sample.context is None:
                sample.task = self._create_task(connection, sample)
            else:
                sample.task = sample.context.run(self._create_task, connection, sample)
        except BaseException as error:  # noqa: BLE001 (raised by the promise)
            sample.promise.fail(error)  # only this sample fails; later ones continue
            return False
        self._running.add(sample)
        self._holder.follow(sample.task, sample.promise)

        def ended(_: object) -> None:
            self._running.discard(sample)
            connection.limits.samples.release(self._waiting_samples)
            if self._waiting_samples.idle:
                self._handler.stop_watching()

        sample.task.add_done_callback(ended)
        return True

    def _create_task(self, connection: Connection, sample: Sample[T]) -> asyncio.Task[T]:
        loop = asyncio.get_running_loop()
        return Operation("sample", self._holder.tracing, self._sampling_session_id or "").run(
            lambda: loop.create_task(self._run_sample(connection, sample))
        )

    def close(self) -> None:
        """Fail all waiting samples when the session closes; it cancels the running ones."""
        self._fail_waiting(closed_error)
        self._handler.stop_watching()

    def _give_up(self, stuck: Callable[[], Exception]) -> None:
        self._fail_waiting(stuck)
        for sample in list(self._running):
            sample.promise.fail(stuck())
            if sample.task is not None:
                sample.task.cancel()

    def _fail_waiting(self, error: Callable[[], BaseException]) -> None:
        waiting = list(self._waiting_samples.waiting)
        self._waiting_samples.waiting.clear()
        self._metrics.change("samples_waiting", "sample", -len(waiting))
        for sample in waiting:
            sample.promise.fail(error())

    # -- one sample ------------------------------------------------------------------------------

    async def _run_sample(self, connection: Connection, sample: Sample[T]) -> T:
        may_retry = sample.always_retry or not connection.config.sample_no_retries
        if sample.request.seq_id is not None:
            may_retry = False  # the requested seq_id is used up
        failures, sent = 0, False

        def was_sent() -> None:
            nonlocal sent
            sent = True

        async def attempt() -> SampleResponse:
            nonlocal sent
            sent = False
            return await self._attempt(connection, sample.request, was_sent, sample.partial)

        def delay_after(error: Exception) -> float | None:
            nonlocal failures
            failures += 1
            delay = self._handler.retry_delay_s(error, failures, sent=sent, rng=self._rng)
            if sample.partial is not None and sample.partial.has_tokens:
                return None  # a new sample would continue with other tokens than those already read
            return delay if may_retry else None

        answer = await retrying(attempt, delay_after)
        self._handler.succeeded()
        if sample.partial is not None:
            sample.partial.complete(answer)
        return sample.finish(sample.request, answer)

    async def _attempt(
        self,
        connection: Connection,
        request: SampleRequest,
        was_sent: Callable[[], None],
        partial: PartialOutput | None,
    ) -> SampleResponse:
        """Submit the sample once, under a new seq_id, and get its result."""
        # Only samples of a sampling session are numbered, and a seq_id set by the caller is kept.
        fixed = request.sampling_session_id is None or request.seq_id is not None
        seq_id = None if fixed else next(self._seq_ids)
        if partial is not None:
            streamed = await self._streamed(connection, request, seq_id, was_sent, partial)
            if streamed is not None:
                return streamed
        shared_poll = self._shared_poll
        started = monotonic()
        if shared_poll is None:
            promised = await self._submit(connection, request, seq_id)
        else:
            with shared_poll.submitting():
                promised = await self._submit(connection, request, seq_id)
                shared_poll.register(promised.request_id)
        round_trip_s = monotonic() - started
        was_sent()
        try:
            return await self._result(
                connection, promised.request_id, _expected(promised), round_trip_s
            )
        except asyncio.CancelledError:
            self._holder.cancel_later(connection, promised.request_id)
            raise

    async def _submit(
        self, connection: Connection, request: SampleRequest, seq_id: int | None
    ) -> UntypedAPIFuture:
        async with self._submitting(connection, request, seq_id) as (body, rate_limit_wait_s):
            return await connection.calls.call(
                "POST",
                "asample",
                body,
                answer=UntypedAPIFuture,
                kind=Kind.SAMPLE,
                headers={"X-Tinker-Sampling-Backpressure": "1"},
                rate_limit_wait_s=rate_limit_wait_s,
                rate_limit_ends=self._handler.limit,
                about=_description(request, seq_id),
            )

    @asynccontextmanager
    async def _submitting(
        self, connection: Connection, request: SampleRequest, seq_id: int | None
    ) -> AsyncIterator[tuple[bytes, float]]:
        """Yields the body and the wait after a 429. If cancelled inside, cancels the sample too."""
        size = input_bytes(request.prompt, per_token=BYTES_PER_TOKEN)
        limits = connection.limits
        slow_start = limits.slow_start.hold(1) if limits.backoff.in_slow_start else nullcontext()
        async with slow_start, limits.sample_bytes.hold(size):
            # Encoded only now, so that thousands of waiting prompts are not kept as bodies too.
            body = encode_json(
                request if seq_id is None else request.model_copy(update={"seq_id": seq_id})
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
        seq_id: int | None,
        was_sent: Callable[[], None],
        partial: PartialOutput,
    ) -> SampleResponse | None:
        """Submit a sample and stream its tokens; None if the service has no streams."""
        async with self._submitting(connection, request, seq_id) as (body, rate_limit_wait_s):
            stream = await open_stream(
                connection.calls,
                body,
                rate_limit_wait_s=rate_limit_wait_s,
                rate_limit_ends=self._handler.limit,
                about=_description(request, seq_id),
            )
        if stream is None:
            return None
        was_sent()
        request_id = stream.promised.request_id
        try:
            answer = await stream.read(partial)
            if answer is not None and answers_all(request):
                return answer
            # After a broken stream, the result is fetched as usual: it is not sampled twice.
            return await connection.results.fetch(
                request_id,
                _expected(stream.promised),
                observer=self._handler.recording(self._observer),
            )
        except asyncio.CancelledError:
            self._holder.cancel_later(connection, request_id)
            raise

    async def _result(
        self,
        connection: Connection,
        request_id: str,
        expected: ExpectedResult[SampleResponse],
        round_trip_s: float,
    ) -> SampleResponse:
        shared_poll, fetch = self._shared_poll, connection.results.fetch
        observer = self._handler.recording(self._observer)
        if shared_poll is None:
            return await fetch(request_id, expected, observer=observer, round_trip_s=round_trip_s)
        event = await shared_poll.finished(request_id)
        if event is None:
            with shared_poll.self_polling():
                return await fetch(
                    request_id, expected, observer=observer, round_trip_s=round_trip_s
                )
        try:
            async with connection.limits.fetches.hold(1):
                return await fetch(
                    request_id,
                    expected,
                    observer=observer,
                    round_trip_s=round_trip_s,
                    size=getattr(event, "response_payload_uncompressed_size", None) or 0,
                )
        finally:
            shared_poll.fetched(request_id)


def _expected(promised: UntypedAPIFuture) -> ExpectedResult[SampleResponse]:
    def read(body: bytes) -> SampleResponse:
        return decode_sample_response(body, promised.sample_sequence_ids)

    return ExpectedResult(request_type="Sample", answer=SampleResponse, read_protobuf=read)


def _description(request: SampleRequest, seq_id: int | None) -> str:
    model = request.sampling_session_id or request.model_path or request.base_model
    seq_id = request.seq_id if seq_id is None else seq_id
    return f"a sample of {model}" if seq_id is None else f"sample {seq_id} of {model}"


# -- retries -------------------------------------------------------------------------------------


def should_restart(error: Exception, config: RetryConfig, failures: int, *, sent: bool) -> bool:
    """Whether to retry a failed sample under a new seq_id."""
    if isinstance(error, RequestFailedError):
        return not is_user_error(error) and failures <= MAX_SERVER_FAILURES
    listed = isinstance(error, config.retryable_exceptions)
    if not sent:
        # The submission was already retried for retryable errors. Retrying here too would multiply
        # the attempts.
        return listed and not is_retryable(error)
    if isinstance(error, APIStatusError):
        # 410: the result expired, and can be sampled again.
        return listed or error.status_code == 410 or is_retryable(error)
    return listed


class RetryHandler:
    """The retries of one client: delays between attempts, and a timeout without progress."""

    def __init__(self, config: RetryConfig) -> None:
        self.config = config
        self._last_seen = "nothing"
        self._last_success = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"RetryHandler({self.config!r})"

    def retry_delay_s(
        self, error: Exception, failures: int, *, sent: bool, rng: random.Random
    ) -> float | None:
        """Seconds until a failed sample is retried; None to let it fail."""
        self._last_seen = f"{type(error).__name__}: {error}"
        if not self.config.enable_retry_logic:
            return None
        if not should_restart(error, self.config, failures, sent=sent):
            return None
        return self.config.delay_s(failures, rng=rng)

    # -- progress --------------------------------------------------------------------------------

    def succeeded(self) -> None:
        self._last_success = monotonic()

    def watch(self, give_up: Callable[[Callable[[], Exception]], None], allowed: bool) -> None:
        """Samples are waiting: from now on one must finish within `progress_timeout`."""
        if self._timer is None and allowed and self.config.enable_stuck_detection:
            self._last_success = monotonic()  # the client was idle until now
            self._start_timer(self.config.progress_timeout, give_up)

    def stop_watching(self) -> None:
        """No samples are waiting."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def limit(self) -> Limit:
        """When waiting samples fail because none finished."""
        if self._timer is None:
            return Limit()
        ends_at = self._last_success + self.config.progress_timeout
        return Limit(ends_at, "RetryConfig.progress_timeout")

    def recording(self, observer: QueueObserver) -> QueueObserver:
        """Wraps `observer` and records the last queue state, for the stuck-sample error."""
        return _RecordingObserver(self, observer)

    def record_state(self, queue_state: str, reason: str | None) -> None:
        self._last_seen = f"queue state {queue_state}" + (f", {reason}" if reason else "")

    def _start_timer(
        self, delay_s: float, give_up: Callable[[Callable[[], Exception]], None]
    ) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(delay_s, self._check_progress, give_up)

    def _check_progress(self, give_up: Callable[[Callable[[], Exception]], None]) -> None:
        self._timer = None
        left_s = self._last_success + self.config.progress_timeout - monotonic()
        if left_s > 0:
            self._start_timer(left_s, give_up)
        else:
            give_up(self._stuck_error)

    def _stuck_error(self) -> Exception:
        return APIConnectionError(
            Request(method="POST", url="asample"),
            f"No sample of this client finished for {self.config.progress_timeout:g} s, so all "
            "waiting samples failed (RetryConfig.progress_timeout). Check the server, or allow "
            f"more time. Last seen: {self._last_seen}.",
        )


class _RecordingObserver:
    def __init__(self, handler: RetryHandler, observer: QueueObserver) -> None:
        self._handler = handler
        self._observer = observer
        self.subject = subject_of(observer)
        self.limit = handler.limit

    def on_queue_state_change(self, queue_state: str, queue_state_reason: str | None) -> None:
        self._handler.record_state(queue_state, queue_state_reason)
        self._observer.on_queue_state_change(queue_state, queue_state_reason)
