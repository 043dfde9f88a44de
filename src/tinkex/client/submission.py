"""
Submits training steps: in the order of the calls, under consecutive `seq_id`s, without gaps.

    TicketQueue    sends one step at a time, in the order of the calls
    SeqIds         assigns `seq_id`s and remembers those that did not reach the server
    Part           one request of a step; a large batch is split into several
    StepSubmitter  puts these together: `submit` queues a step and returns its future
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from time import monotonic
from typing import Any, TypeVar

from pydantic import BaseModel

from tinkex.client import validation
from tinkex.client.batching import datum_bytes, split_batch
from tinkex.client.connection import Connection
from tinkex.client.errors import APIStatusError, BadRequestError, UnprocessableEntityError
from tinkex.client.futures import Promise
from tinkex.client.http.polling import ExpectedResult
from tinkex.client.http.retry import is_retryable
from tinkex.client.http.transport import Kind
from tinkex.client.http.typed_requests import decode
from tinkex.client.observe import instrumentation
from tinkex.client.observe.queue_states import QueueLog
from tinkex.client.session import Session, closed_error
from tinkex.extras import needs
from tinkex.wire.base import Payload
from tinkex.wire.codec import JSON_TYPE, PROTOBUF_TYPE
from tinkex.wire.futures import UntypedAPIFuture
from tinkex.wire.inputs import Datum, ModelInput
from tinkex.wire.protobuf import decode_forward_backward_output, encode_forward_backward_request
from tinkex.wire.tensors import TensorData
from tinkex.wire.training import (
    ForwardBackwardInput,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    LossFnType,
)

log = logging.getLogger("tinkex.training")

R = TypeVar("R", bound=BaseModel | Payload)
T = TypeVar("T")


class TicketQueue:
    """
    Runs work in the order in which tickets were taken, like a ticket lock.

    A ticket is the position of one step in that order. `take_ticket` may be called from any thread;
    `start` and `skip` only on the event loop. One of the two must be called once for every ticket.
    """

    def __init__(self) -> None:
        self._tickets = itertools.count()
        self._serving = 0
        self._waiting: dict[int, asyncio.Event] = {}
        self._done: set[int] = set()

    def take_ticket(self) -> int:
        return next(self._tickets)

    def start(self, ticket: int, send: Callable[[], Awaitable[T]]) -> asyncio.Task[T]:
        """Run `send` as soon as every earlier ticket is done."""
        task = asyncio.ensure_future(self._send_in_turn(ticket, send))
        # Not a `finally` in the coroutine: a task cancelled before its first step never runs
        # one, and all later tickets would wait forever.
        task.add_done_callback(lambda _: self.skip(ticket))
        return task

    async def _send_in_turn(self, ticket: int, send: Callable[[], Awaitable[T]]) -> T:
        if ticket != self._serving:
            await self._waiting.setdefault(ticket, asyncio.Event()).wait()
        return await send()

    def skip(self, ticket: int) -> None:
        """Mark a ticket as done: later ones no longer wait for it."""
        self._done.add(ticket)
        self._waiting.pop(ticket, None)
        while self._serving in self._done:
            self._done.remove(self._serving)
            self._serving += 1
        if next_in_line := self._waiting.pop(self._serving, None):
            next_in_line.set()


class SubmissionOutcome(Enum):
    """The outcome of one submission."""

    UNSENT = "unsent"  # not sent: the seq_id is free
    REFUSED = "refused"  # refused by the server: the seq_id is free
    UNKNOWN = "unknown"  # sent, but no response: the server may have accepted it
    ACCEPTED = "accepted"


@dataclass
class SeqIds:
    """
    The `seq_id`s of one model, assigned at the time of sending, so that the client leaves no gaps.

    A server runs steps strictly in the order of `seq_id`, so a missing one blocks all later steps.
    A `seq_id` that never reached the server is reused if no later one did. Otherwise it is kept in
    `unused`, and the next step first sends a no-op step for it.
    """

    next: int = 1
    #: Unused seq_id -> whether it belongs to a batch that the server may have accepted in part. The
    #: gradients of that part must not be applied.
    unused: dict[int, bool] = field(default_factory=dict)

    def record(
        self, outcomes: Sequence[SubmissionOutcome], *, adds_gradients: bool = False
    ) -> None:
        """Record the outcomes of submissions under `next`, `next + 1`, ..., in this order."""
        first = self.next
        reached = [
            first + index
            for index, outcome in enumerate(outcomes)
            if outcome in (SubmissionOutcome.ACCEPTED, SubmissionOutcome.UNKNOWN)
        ]
        if not reached:
            return
        self.next = max(reached) + 1
        for seq_id, outcome in zip(range(first, self.next), outcomes, strict=False):
            if outcome is not SubmissionOutcome.ACCEPTED:
                self.unused[seq_id] = adds_gradients and len(outcomes) > 1


@dataclass(frozen=True, kw_only=True)
class Part:
    """One request of a step; most steps have one, a large batch several."""

    path: str
    #: seq_id -> body. Called once: retries send the same bytes.
    encode: Callable[[int], bytes]
    size_bytes: int = 0
    content_type: str = JSON_TYPE
    adds_gradients: bool = False


@dataclass(frozen=True)
class Accepted:
    """A submission that the server has accepted."""

    request_id: str
    round_trip_s: float


@dataclass(kw_only=True)
class Submission:
    """A part, its seq_id, and its outcome so far."""

    part: Part
    seq_id: int
    outcome: SubmissionOutcome = SubmissionOutcome.UNSENT
    accepted: Accepted | None = None
    error: Exception | None = None

    def mark_sent(self) -> None:
        """Called just before bytes are sent: from here on the server may have accepted it."""
        self.outcome = SubmissionOutcome.UNKNOWN

    def mark_refused(self, error: APIStatusError, *, before: SubmissionOutcome) -> None:
        """
        Record an error response to one attempt; `before` is the outcome before that attempt.

        A server that refuses a step does not have it, unless it accepted an earlier attempt whose
        response was lost. Other errors may come from a gateway that forwarded the request.
        """
        is_refusal = error.status_code == 429 or not is_retryable(error)
        if is_refusal and before is not SubmissionOutcome.UNKNOWN:
            self.outcome = SubmissionOutcome.REFUSED


class StepSubmitter:
    """Submits the steps of one model in the order of the calls."""

    def __init__(self, holder: Session, model_id: str, queue_log: QueueLog) -> None:
        self._holder = holder
        self._model_id = model_id
        self._queue_log = queue_log
        self._order = TicketQueue()
        self._seq_ids = SeqIds()
        self._pid = os.getpid()
        #: The thread that runs a custom loss of this client.
        self._loss_thread: int | None = None

    def submit(
        self,
        parts: Callable[[Connection], list[Part]],
        expected: ExpectedResult[R],
        finish: Callable[[list[R]], T],
    ) -> Promise[T]:
        """Queue a step of these parts. `finish` turns the results of the parts into one."""
        return self.submit_with(lambda _: self.send(parts), expected, finish)

    def submit_with(
        self,
        send: Callable[[Promise[T]], Coroutine[Any, Any, tuple[Connection, list[Accepted]]]],
        expected: ExpectedResult[R],
        finish: Callable[[list[R]], T],
    ) -> Promise[T]:
        """
        Queue a step in the caller's thread; `send` runs later, when all earlier steps are sent.

        Later steps continue however this one ends: sent, refused, cancelled, or never started.
        """
        if self._holder.closed:
            raise closed_error()
        if self._pid != os.getpid():
            raise RuntimeError(
                f"The training client of {self._model_id} belongs to process {self._pid}. In a "
                "forked process its steps would reuse the same seq_ids. Create a training "
                "client from a checkpoint here, or use a sampling client."
            )
        if self._loss_thread == threading.get_ident():
            raise RuntimeError(
                "A custom loss cannot call the training client that runs it: the call would wait "
                "for the step, and the step waits for the loss. Other clients can be called."
            )
        self._holder.loop()  # raises here, before a ticket exists that would never be done
        promise: Promise[T] = Promise()
        ticket = self._order.take_ticket()

        async def in_turn() -> tuple[Connection, list[Accepted]]:
            # From here on the step runs to its end. If it was cancelled before, it is not sent.
            if not promise.set_running_or_notify_cancel():
                raise asyncio.CancelledError
            return await send(promise)

        def begin() -> asyncio.Task[T]:
            submission: asyncio.Task[tuple[Connection, list[Accepted]]] | None = None

            def make() -> asyncio.Task[T]:
                nonlocal submission
                # Without an await in between: every ticket must be started.
                submission = self._order.start(ticket, in_turn)
                self._holder.track(submission)
                return asyncio.create_task(self._finish(submission, expected, finish))

            try:
                return instrumentation.Operation(
                    instrumentation.operation_name(expected.request_type),
                    self._holder.tracing,
                    self._model_id,
                ).run(make)
            except BaseException:
                # The step did not start. Later steps must not wait for its ticket.
                if submission is None:
                    self._order.skip(ticket)
                else:
                    submission.cancel()
                raise

        self._holder.start(promise, begin)
        return promise

    @contextmanager
    def running_loss(self) -> Iterator[None]:
        """
        The context in which this thread runs a custom loss.

        Records the thread, because a custom loss must not call the training client that runs it.
        Steps are sent one at a time, so there is at most one such thread.
        """
        self._loss_thread = threading.get_ident()
        try:
            yield
        finally:
            self._loss_thread = None

    async def send(
        self, parts: Callable[[Connection], list[Part]]
    ) -> tuple[Connection, list[Accepted]]:
        """
        Assign seq_ids to the parts, send them, and record every outcome.

        Runs when all earlier steps are sent.
        """
        connection = await self._holder.connect()
        await self._fill_unused(connection)
        first = self._seq_ids.next
        submissions = [
            Submission(part=part, seq_id=first + index)
            for index, part in enumerate(parts(connection))
        ]

        async def send(submission: Submission) -> None:
            try:
                submission.accepted = await self._post(connection, submission)
            except Exception as error:  # noqa: BLE001 (kept, and raised once all are settled)
                submission.error = error

        try:
            if len(submissions) > 1 and connection.config.parallel_fwdbwd_chunks:
                # The first part is sent last. The server runs parts in the order of their seq_ids,
                # so it starts the batch only when it has all parts.
                await asyncio.gather(*(send(each) for each in submissions[1:]))
                if all(each.error is None for each in submissions):
                    await send(submissions[0])
            else:
                for each in submissions:
                    await send(each)
                    if each.error is not None:
                        break
        finally:
            self._seq_ids.record(
                [each.outcome for each in submissions],
                adds_gradients=any(each.part.adds_gradients for each in submissions),
            )
        for each in submissions:
            if each.error is not None:
                raise each.error
        return connection, [each.accepted for each in submissions if each.accepted is not None]

    async def _post(self, connection: Connection, submission: Submission) -> Accepted:
        calls, part, seq_id = connection.calls, submission.part, submission.seq_id
        async with connection.limits.training_bytes.hold(part.size_bytes):
            body = part.encode(seq_id)
            headers = {}
            if part.content_type == PROTOBUF_TYPE and connection.config.proto_compress_fwdbwd:
                packed = await asyncio.to_thread(compressed, body)
                if packed is not None:
                    body, headers = packed, {"Content-Encoding": "zstd"}
            started = monotonic()
            about = f"step {seq_id} of {self._model_id}"
            request = calls.request(
                "POST",
                part.path,
                body,
                kind=Kind.TRAIN,
                content_type=part.content_type,
                headers=headers,
            )

            async def attempt() -> UntypedAPIFuture:
                before = submission.outcome
                try:
                    answer = await calls.once(request, about=about, on_send=submission.mark_sent)
                except APIStatusError as error:
                    submission.mark_refused(error, before=before)
                    raise
                return decode(UntypedAPIFuture, answer, about=about)

            promised = await calls.with_retries(attempt, path=part.path, kind=Kind.TRAIN)
            submission.outcome = SubmissionOutcome.ACCEPTED
            return Accepted(promised.request_id, monotonic() - started)

    async def _fill_unused(self, connection: Connection) -> None:
        """Send a no-op step for every seq_id that an earlier step left unused."""
        for seq_id, partial_batch in sorted(self._seq_ids.unused.items()):
            taken = await self._send_noop(connection, seq_id, partial_batch)
            if (
                not taken
                and partial_batch
                and (taken := await self._send_noop(connection, seq_id, False))
            ):
                # This server validates a pass before it accepts it, so no pass can be made to fail.
                log.warning(
                    "The server accepted only part of a batch of %s. The next optim_step applies "
                    "the gradients of that part. To discard them, resume from the last saved state.",
                    self._model_id,
                )
            if not taken:
                log.debug("seq_id %d of %s is already used", seq_id, self._model_id)
            del self._seq_ids.unused[seq_id]

    async def _send_noop(self, connection: Connection, seq_id: int, partial_batch: bool) -> bool:
        """Whether the server accepted the no-op step."""
        part = noop_step(self._model_id, partial_batch)
        try:
            await self._post(connection, Submission(part=part, seq_id=seq_id))
        except UnprocessableEntityError:
            # The seq_id belongs to another kind of step: the request without a response did
            # arrive. Retrying would block this client forever.
            return False
        except BadRequestError:
            if not partial_batch:
                raise
            return False
        return True

    async def _finish(
        self,
        submission: asyncio.Task[tuple[Connection, list[Accepted]]],
        expected: ExpectedResult[R],
        finish: Callable[[list[R]], T],
    ) -> T:
        return finish(await self.fetch(*await asyncio.shield(submission), expected))

    async def fetch(
        self, connection: Connection, accepted: list[Accepted], expected: ExpectedResult[R]
    ) -> list[R]:
        return await gather_or_cancel(
            connection.results.fetch(
                each.request_id,
                expected,
                observer=self._queue_log,
                round_trip_s=each.round_trip_s,
            )
            for each in accepted
        )


async def gather_or_cancel(work: Any) -> list[Any]:
    """Like gather, but the first failure cancels the others."""
    tasks = [asyncio.ensure_future(each) for each in work]
    if len(tasks) == 1:
        return [await tasks[0]]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def pass_parts(
    model_id: str,
    data: Sequence[Datum],
    loss_fn: LossFnType = "cross_entropy",
    config: dict[str, float | str] | None = None,
    *,
    forward_only: bool,
) -> Callable[[Connection], list[Part]]:
    data = validation.batch(data)
    validation.loss_name(loss_fn)
    # Validates the name of the loss here, where the caller sees it. The data were checked above.
    ForwardBackwardInput(data=[], loss_fn=loss_fn, loss_fn_config=config)
    sizes = [datum_bytes(datum) for datum in data]

    def parts(connection: Connection) -> list[Part]:
        return [
            Part(
                path="forward_backward",
                encode=pass_encoder(
                    model_id, data[piece], loss_fn, config, forward_only=forward_only
                ),
                size_bytes=sum(sizes[piece]),
                content_type=PROTOBUF_TYPE,
                adds_gradients=not forward_only,
            )
            for piece in split_batch(
                sizes,
                max_count=connection.config.fwdbwd_max_chunk_len,
                max_bytes=connection.config.fwdbwd_max_chunk_bytes_count,
            )
        ]

    return parts


def pass_result(request_type: str) -> ExpectedResult[ForwardBackwardOutput]:
    return ExpectedResult(
        request_type=request_type,
        answer=ForwardBackwardOutput,
        read_protobuf=decode_forward_backward_output,
    )


def pass_encoder(
    model_id: str,
    data: list[Datum],
    loss_fn: LossFnType,
    loss_fn_config: dict[str, float | str] | None,
    *,
    forward_only: bool,
) -> Callable[[int], bytes]:
    def encode(seq_id: int) -> bytes:
        return encode_forward_backward_request(
            ForwardBackwardRequest(
                forward_backward_input=ForwardBackwardInput(
                    data=data, loss_fn=loss_fn, loss_fn_config=loss_fn_config
                ),
                model_id=model_id,
                seq_id=seq_id,
            ),
            forward_only=forward_only,
        )

    return encode


def noop_step(model_id: str, partial_batch: bool) -> Part:
    """
    A no-op step for a seq_id that was assigned and not used.

    Usually a forward pass over one token, which changes nothing. If the server accepted part of a
    batch, the step must fail instead, so that the next `optim_step` fails too and does not apply
    partial gradients. So it has two targets for its one token, which no server can compute, and
    weight zero in case one does. The name of its loss setting tells the user what happened.
    """
    targets = 2 if partial_batch else 1
    datum = Datum(
        model_input=ModelInput.from_ints([0]),
        loss_fn_inputs={
            "target_tokens": TensorData(data=[0] * targets, dtype="int64"),
            "weights": TensorData(data=[0.0] * targets, dtype="float32"),
        },
    )
    config: dict[str, float | str] | None = (
        {"part_of_this_batch_was_never_sent": 1.0} if partial_batch else None
    )
    return Part(
        path="forward_backward",
        encode=pass_encoder(
            model_id, [datum], "cross_entropy", config, forward_only=not partial_batch
        ),
        content_type=PROTOBUF_TYPE,
    )


def compressed(body: bytes) -> bytes | None:
    """The body compressed with zstd; None if no zstd is installed. Servers accept both."""
    try:
        if sys.version_info >= (3, 14):
            from compression import zstd

            return zstd.compress(body, level=1)
        with needs("Compressing batches"):
            import zstandard
    except ImportError:
        _log_missing_zstd()
        return None
    return bytes(zstandard.ZstdCompressor(level=1).compress(body))


@functools.cache
def _log_missing_zstd() -> None:
    log.debug(
        "The server asks for compressed batches, but zstd is not installed: they are sent "
        "uncompressed. Run pip install 'tinkex[zstd]', or use Python 3.14."
    )
