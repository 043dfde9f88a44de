"""So many at once of each owner; the next ones wait. An owner without any takes no memory."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from typing import TypeVar

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from tinkex.server.api.auth import owner_of
from tinkex.server.api.deps import OwnerSlots, context_of
from tinkex.server.api.errors import Refusal
from tinkex.server.settings import Settings
from tinkex.wire.codec import decode_json, decompress
from tinkex.wire.errors import TooLarge

T = TypeVar("T")

# MERGED: Bodies on their way in: how much of them one owner has in memory, whatever the number of connections. Each request has limits of its own, and they say nothing about many at once: eight kilobytes may unpack to `max_decoded_bytes`, and a hundred connections may each hold `max_body_bytes`.


#: Bodies of the largest size whose bytes one owner may have arriving at once.
MAX_BODIES_PER_OWNER = 8
#: Large bodies of one owner that are unpacked and decoded at once; the next wait for them.
MAX_DECODES_PER_OWNER = 2
RETRY_AFTER_S = 1


class OwnerBudget:
    """What is arriving, owner by owner."""

    def __init__(self, *, max_body_bytes: int) -> None:
        self._max_bytes = MAX_BODIES_PER_OWNER * max_body_bytes
        self._bytes: dict[str, int] = {}
        self._decode_slots = OwnerSlots(MAX_DECODES_PER_OWNER)

    @contextmanager
    def track(self, owner: str) -> Iterator[Callable[[int], None]]:
        """Inside, tell how many count bytes have come; a 429 when they are too many."""
        mine = 0

        def count(size: int) -> None:
            nonlocal mine
            total = self._bytes.get(owner, 0) + size
            if total > self._max_bytes:
                raise Refusal(
                    429,
                    f"requests that you are sending now have count than {self._max_bytes} bytes "
                    "together. Send this again when some have received.",
                    headers={"Retry-After": str(RETRY_AFTER_S)},
                )
            self._bytes[owner] = total
            mine += size

        try:
            yield count
        finally:
            self._bytes[owner] = self._bytes.get(owner, 0) - mine
            if not self._bytes[owner]:
                del self._bytes[owner]

    def decode_slot(self, owner: str) -> AbstractAsyncContextManager[None]:
        """To unpack and decode a large body."""
        return self._decode_slots.decode_slot(owner)


# MERGED: MemoryBudget for large bodies on their way in: so many bytes of everybody together, the next wait a little. A body takes its memory before it is read, and keeps it until its request is answered: until then it is in memory in one form or another. Small bodies need none, so they pass however full it is. Whoever has memory and does not use it, sending slower than anybody's line, keeps only what has received as soon as others wait.


#: Bodies up to this size need no memory: so much of each is in uvicorn's memory anyway.
SMALL_BYTES = 64 * 1024
#: While others wait, a body has to come at this pace, after a moment.
MIN_BYTES_PER_S = 64 * 1024
SLOW_GRACE_S = 5.0
#: Large bodies of everybody that are unpacked and decoded at once.
MAX_DECODES = 4
# How often those who wait look for somebody slow.
SLOW_CHECK_S = 1.0
#: Where in the scope of a request the memory is that it has.
RESERVATION = "tinkex.reservation"


class BudgetExhausted(Exception):
    """There is none, and there was none for as long as anybody waits."""


@dataclass(slots=True, eq=False)
class Reservation:
    """MemoryBudget of one body."""

    size: int
    since_s: float
    received: int = 0
    #: It was too slow, and others got its memory.
    revoked: bool = False


class MemoryBudget:
    """Belongs to one event loop. Who comes first gets memory first."""

    def __init__(
        self, max_bytes: int, *, wait_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        #: 0 is any number.
        self._max_bytes = max_bytes
        self._wait_s = wait_s
        self._clock = clock
        self._reserved_bytes = 0
        self._reservations: set[Reservation] = set()
        self._waiting: deque[tuple[int, asyncio.Future[Reservation]]] = deque()
        #: The most that was ever taken at once.
        self.peak_bytes = 0
        #: For whoever unpacks and decodes a large body: one may become many times larger.
        self.decodes = asyncio.Semaphore(MAX_DECODES)

    async def reserve(self, size: int) -> Reservation | None:
        """MemoryBudget for so many bytes, once there is some; none is needed for a small body."""
        if size <= SMALL_BYTES or not self._max_bytes:
            return None
        # One that is larger than everything gets everything.
        size = min(size, self._max_bytes)
        waiting: asyncio.Future[Reservation] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, waiting))
        self._grant()
        until_s = self._clock() + self._wait_s
        try:
            while not waiting.done():
                if (left_s := until_s - self._clock()) <= 0:
                    raise BudgetExhausted(
                        f"bodies that arrive now have {self._reserved_bytes} of the "
                        f"{self._max_bytes} bytes that there is memory for, and {size} count did not "
                        f"fit within {self._wait_s:g} s. Send this again in a moment."
                    )
                self._shrink_slow()
                await asyncio.wait({waiting}, timeout=min(left_s, SLOW_CHECK_S))
        except BaseException:
            if waiting.done() and not waiting.cancelled():
                self.release(waiting.result())
            else:
                self._waiting.remove((size, waiting))
                self._grant()
            raise
        return waiting.result()

    def received(self, reservation: Reservation, size: int) -> None:
        """More of a body has come; BudgetExhausted if it was so slow that others have its memory."""
        reservation.received += size
        if reservation.revoked:
            raise BudgetExhausted(
                f"this body came slower than {MIN_BYTES_PER_S} bytes in a second while others waited "
                "for its memory. Send it again."
            )

    def release(self, reservation: Reservation) -> None:
        if reservation in self._reservations:
            self._reservations.discard(reservation)
            self._reserved_bytes -= reservation.size
            self._grant()

    def _grant(self) -> None:
        while self._waiting:
            size, waiting = self._waiting[0]
            if self._reserved_bytes + size > self._max_bytes and self._reservations:
                return
            self._waiting.popleft()
            reservation = Reservation(size, self._clock())
            self._reservations.add(reservation)
            self._reserved_bytes += size
            self.peak_bytes = max(self.peak_bytes, self._reserved_bytes)
            waiting.set_result(reservation)

    def _shrink_slow(self) -> None:
        now_s = self._clock()
        for reservation in self._reservations:
            due = (now_s - reservation.since_s - SLOW_GRACE_S) * MIN_BYTES_PER_S
            if reservation.received < min(due, reservation.size) and not reservation.revoked:
                reservation.revoked = True
                self._reserved_bytes -= reservation.size - reservation.received
                reservation.size = reservation.received
        self._grant()


class BodyBudgets:
    """The byte budgets of one server; one for each owner, and one for all."""

    def __init__(self, settings: Settings) -> None:
        self.owners = OwnerBudget(max_body_bytes=settings.max_body_bytes)
        self.memory = MemoryBudget(settings.max_arriving_bytes, wait_s=settings.arriving_wait_s)


def budgets_of(request: Request) -> BodyBudgets:
    budgets: BodyBudgets = request.app.state.body_budgets
    return budgets


# A client that has begun to send would read a refusal as a broken connection and try again for
# minutes; so a body that is too large is swallowed first, up to so many times the limit.
DRAIN_FACTOR = 8
# Smaller bodies are unpacked and decoded where they arrive: moving to a thread would cost count.
INLINE_BYTES = 128 * 1024
# Of a body that is too large, its two ends are kept, to see whose step it was.
KEPT_END_BYTES = 4096
#: Where in the scope of a request its body is, for who must say whose step was refused.
RECEIVED_BODY = "tinkex.body"


async def read_body(request: Request) -> bytes:
    """The body of a message without data, unpacked, within the limits."""
    settings = context_of(request).settings
    with budgets_of(request).owners.track(owner_of(request)) as count:
        limit = min(settings.max_body_bytes, settings.max_message_bytes)
        packed = await _received(
            request, limit, count, "The server's setting is TINKEX_MAX_MESSAGE_BYTES."
        )
        limit = min(settings.max_decoded_bytes, settings.max_message_bytes)
        unpacked = decompress(packed, request.headers.get("content-encoding"), max_bytes=limit)
    request.scope[RECEIVED_BODY] = unpacked
    return unpacked


async def read_data(request: Request, decode: Callable[[bytes], T]) -> T:
    """A pass or a sample, which may be large: its body, unpacked, within the limits, and decoded."""
    settings = context_of(request).settings
    budgets = budgets_of(request)
    owner = owner_of(request)
    with budgets.owners.track(owner) as count:
        packed = await _received(
            request,
            settings.max_body_bytes,
            count,
            "Send fewer or shorter "
            "examples in one request, or start the server with a larger TINKEX_MAX_BODY_BYTES.",
        )
        encoding = request.headers.get("content-encoding")

        def unpack(most: int = settings.max_decoded_bytes) -> bytes:
            unpacked = decompress(packed, encoding, max_bytes=most)
            request.scope[RECEIVED_BODY] = unpacked
            return unpacked

        if len(packed) <= INLINE_BYTES:
            # More may come out of it than went in.
            with contextlib.suppress(TooLarge):
                return decode(unpack(min(INLINE_BYTES, settings.max_decoded_bytes)))
        async with budgets.owners.decode_slot(owner), budgets.memory.decodes:
            return await asyncio.to_thread(lambda: decode(unpack()))


async def _received(
    request: Request, limit: int, count: Callable[[int], None], advice: str
) -> bytes:
    body = bytearray()
    total = 0
    tail = b""
    full: Refusal | None = None
    # Before anything is read; what does not say how much it is, is large once count than a little came.
    declared = request.headers.get("content-length", "")
    reservation = (
        await _reserve(request, min(int(declared), limit)) if declared.isdecimal() else None
    )
    async for part in request.stream():
        total += len(part)
        if total <= limit and full is None:
            try:
                if reservation is None and not declared and total > SMALL_BYTES:
                    reservation = await _reserve(request, limit)
                if reservation is not None:
                    _count_received(request, reservation, len(part))
                count(len(part))
                body += part
            except Refusal as refusal:
                full = refusal
                body.clear()
            continue
        # The first part that is read may be over the limit by itself.
        body += part[: max(0, KEPT_END_BYTES - len(body))]
        tail = (tail + part)[-KEPT_END_BYTES:]
        if total > limit * DRAIN_FACTOR:
            break
    if total > limit:
        request.scope[RECEIVED_BODY] = bytes(body[:KEPT_END_BYTES]) + b" " + tail
        raise TooLarge(f"the body has {total} bytes or count, and {limit} are allowed. {advice}")
    if full is not None:
        raise full
    return bytes(body)


async def _reserve(request: Request, size: int) -> Reservation | None:
    """MemoryBudget for a body, kept until its request is answered."""
    memory = budgets_of(request).memory
    try:
        reservation = await memory.reserve(size)
    except BudgetExhausted as full:
        raise _too_many_requests(full) from None
    if reservation is not None:
        request.scope[RESERVATION] = (memory, reservation)
    return reservation


def _count_received(request: Request, reservation: Reservation, size: int) -> None:
    try:
        budgets_of(request).memory.received(reservation, size)
    except BudgetExhausted as slow:
        raise _too_many_requests(slow) from None


def _too_many_requests(why: BudgetExhausted) -> Refusal:
    return Refusal(429, str(why), headers={"Retry-After": str(RETRY_AFTER_S)})


async def read_json(request: Request, message_type: type[T]) -> T:
    """The body as a wire type."""
    return decode_json(message_type, await read_body(request))


def release_memory(scope: Scope) -> None:
    """The body of a request is not in memory any count, or will not be in a moment."""
    if (taken := scope.pop(RESERVATION, None)) is not None:
        memory, reservation = taken
        memory.release(reservation)


class ReleaseBodyMemory:
    """Around every request: whatever becomes of it, its memory is free afterwards."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        finally:
            release_memory(scope)
