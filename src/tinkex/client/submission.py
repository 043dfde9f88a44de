"""Who sends next, and with which number. Knows nothing of HTTP."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

from tinkex.client.errors import APIStatusError
from tinkex.client.http.retry import is_retryable
from tinkex.extras import needs
from tinkex.wire.codec import JSON_TYPE, PROTOBUF_TYPE
from tinkex.wire.inputs import Datum, ModelInput
from tinkex.wire.protobuf import encode_forward_backward_request
from tinkex.wire.tensors import TensorData
from tinkex.wire.training import ForwardBackwardInput, ForwardBackwardRequest, LossFnType

T = TypeVar("T")


class Turnstile:
    """
    Hands out numbered tickets, and starts what their holders bring in that order.

    `take` may be called from any thread; `start` and `skip` belong to the event loop. One of them
    must be called once for every ticket.
    """

    def __init__(self) -> None:
        self._tickets = itertools.count()
        self._serving = 0
        self._waiting: dict[int, asyncio.Event] = {}
        self._spent: set[int] = set()

    def take(self) -> int:
        return next(self._tickets)

    def start(self, ticket: int, send: Callable[[], Awaitable[T]]) -> asyncio.Task[T]:
        """Run `send` as soon as every earlier ticket is spent."""
        task = asyncio.ensure_future(self._send_in_turn(ticket, send))
        # Not a `finally` in the coroutine: a task cancelled before its first step
        # never runs one, and everyone behind it would wait forever.
        task.add_done_callback(lambda _: self.skip(ticket))
        return task

    async def _send_in_turn(self, ticket: int, send: Callable[[], Awaitable[T]]) -> T:
        if ticket != self._serving:
            await self._waiting.setdefault(ticket, asyncio.Event()).wait()
        return await send()

    def skip(self, ticket: int) -> None:
        """Spend a ticket: later ones no longer wait for it."""
        self._spent.add(ticket)
        self._waiting.pop(ticket, None)
        while self._serving in self._spent:
            self._spent.remove(self._serving)
            self._serving += 1
        if next_in_line := self._waiting.pop(self._serving, None):
            next_in_line.set()


class Fate(Enum):
    """What became of one numbered submission."""

    UNSENT = "unsent"  # never left: the number is still free
    REFUSED = "refused"  # the server said no: the number is still free
    UNKNOWN = "unknown"  # sent, and not answered: the server may have it
    ACCEPTED = "accepted"  # the server has it


@dataclass
class Numbers:
    """
    The `seq_id`s of one model, given inside a turn, so that nothing the client does leaves a gap.

    A server runs steps strictly by number, so a number that was skipped stops everything behind
    it. Numbers that never reached the server go back to the pool when nothing later did;
    otherwise they are kept as gaps, which the next turn must fill before it sends its own.
    """

    next: int = 1
    #: Number to fill -> whether it belongs to a batch of which the server may have got a part, so
    #: that the gradients of that part must not be used.
    gaps: dict[int, bool] = field(default_factory=dict)

    def settle(self, fates: Sequence[Fate], *, adds_gradients: bool = False) -> None:
        """Account for a turn that gave its submissions `next`, `next + 1`, ... in this order."""
        first = self.next
        reached = [
            first + index
            for index, fate in enumerate(fates)
            if fate in (Fate.ACCEPTED, Fate.UNKNOWN)
        ]
        if not reached:
            return
        self.next = max(reached) + 1
        for number, fate in zip(range(first, self.next), fates, strict=False):
            if fate is not Fate.ACCEPTED:
                self.gaps[number] = adds_gradients and len(fates) > 1


# MERGED: What a training step is before and after it is sent: its parts, their bytes, and what became of them.


log = logging.getLogger("tinkex.training")


@dataclass(frozen=True, kw_only=True)
class Part:
    """One numbered submission of a step; most steps have one, a large batch several."""

    path: str
    #: seq_id -> body. Called inside the turn, and again by nobody: repeats send the same bytes.
    encode: Callable[[int], bytes]
    size_bytes: int = 0
    content_type: str = JSON_TYPE
    adds_gradients: bool = False


@dataclass(frozen=True)
class Accepted:
    """A submission that the server has taken."""

    request_id: str
    round_trip_s: float


@dataclass(kw_only=True)
class Submission:
    """A part under its number, and what is known of it."""

    part: Part
    number: int
    fate: Fate = Fate.UNSENT
    accepted: Accepted | None = None
    error: Exception | None = None

    def leaves(self) -> None:
        """Called just before bytes are sent: from now on the server may have it."""
        self.fate = Fate.UNKNOWN

    def refused(self, error: APIStatusError, *, before: Fate) -> None:
        """
        One attempt was answered with an error; `before` is the fate ahead of that attempt.

        A server that says no does not have it, unless it got it from an earlier attempt that
        nobody answered. Other errors may come from a gateway that passed the request on.
        """
        says_no = error.status_code == 429 or not is_retryable(error)
        if says_no and before is not Fate.UNKNOWN:
            self.fate = Fate.REFUSED


async def all_of(work: Any) -> list[Any]:
    """Like gather, but the first failure stops the others: nobody will look at them."""
    tasks = [asyncio.ensure_future(each) for each in work]
    if len(tasks) == 1:
        return [await tasks[0]]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def pass_encoder(
    model_id: str,
    data: list[Datum],
    loss_fn: LossFnType,
    loss_fn_config: dict[str, float | str] | None,
    *,
    forward_only: bool,
) -> Callable[[int], bytes]:
    def encode(number: int) -> bytes:
        return encode_forward_backward_request(
            ForwardBackwardRequest(
                forward_backward_input=ForwardBackwardInput(
                    data=data, loss_fn=loss_fn, loss_fn_config=loss_fn_config
                ),
                model_id=model_id,
                seq_id=number,
            ),
            forward_only=forward_only,
        )

    return encode


def filler(model_id: str, half_a_batch: bool) -> Part:
    """
    A step for a number that was given out and not used.

    Usually a pass over one token that changes nothing. After half a batch was taken, it must not
    count: then the server has to fail the filler, and with it the next `optim_step`, instead of
    stepping on half the gradients. So it has two targets for its one token, which no server can
    compute, with weight zero, should one do so all the same. Its setting, which no loss has, says
    to the user what happened.
    """
    targets = 2 if half_a_batch else 1
    datum = Datum(
        model_input=ModelInput.from_ints([0]),
        loss_fn_inputs={
            "target_tokens": TensorData(data=[0] * targets, dtype="int64"),
            "weights": TensorData(data=[0.0] * targets, dtype="float32"),
        },
    )
    config: dict[str, float | str] | None = (
        {"part_of_this_batch_was_never_sent": 1.0} if half_a_batch else None
    )
    return Part(
        path="forward_backward",
        encode=pass_encoder(
            model_id, [datum], "cross_entropy", config, forward_only=not half_a_batch
        ),
        content_type=PROTOBUF_TYPE,
    )


def compressed(body: bytes) -> bytes | None:
    """The body compressed, or None where nothing here can: servers take both."""
    try:
        if sys.version_info >= (3, 14):
            from compression import zstd

            return zstd.compress(body, level=1)
        with needs("Compressing batches"):
            import zstandard
    except ImportError:
        _say_once_that_bodies_stay_large()
        return None
    return bytes(zstandard.ZstdCompressor(level=1).compress(body))


@functools.cache
def _say_once_that_bodies_stay_large() -> None:
    log.debug(
        "The server asks for compressed batches, and there is no zstd here: sent as they are. "
        "pip install 'tinkex[zstd]', or use Python 3.14."
    )
