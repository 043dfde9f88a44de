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
from tinkex.server.api.deps import Turns, context_of
from tinkex.server.api.errors import Refusal
from tinkex.server.settings import Settings
from tinkex.wire.codec import decode_json, decompress
from tinkex.wire.errors import TooLarge

T = TypeVar("T")

# MERGED: Bodies on their way in: how much of them one owner has in memory, whatever the number of connections. Each request has limits of its own, and they say nothing about many at once: eight kilobytes may unpack to `max_decoded_bytes`, and a hundred connections may each hold `max_body_bytes`.


#: Bodies of the largest size whose bytes one owner may have arriving at once.
BODIES = 8
#: Large bodies of one owner that are unpacked and decoded at once; the next wait for them.
MAX_DECODES_PER_OWNER = 2
RETRY_AFTER_S = 1


class Intake:
    """What is arriving, owner by owner."""

    def __init__(self, *, max_body_bytes: int) -> None:
        self._most_bytes = BODIES * max_body_bytes
        self._bytes: dict[str, int] = {}
        self._turns = Turns(MAX_DECODES_PER_OWNER)

    @contextmanager
    def holding(self, owner: str) -> Iterator[Callable[[int], None]]:
        """Inside, tell how many more bytes have come; a 429 when they are too many."""
        mine = 0

        def more(size: int) -> None:
            nonlocal mine
            total = self._bytes.get(owner, 0) + size
            if total > self._most_bytes:
                raise Refusal(
                    429,
                    f"requests that you are sending now have more than {self._most_bytes} bytes "
                    "together. Send this again when some have arrived.",
                    headers={"Retry-After": str(RETRY_AFTER_S)},
                )
            self._bytes[owner] = total
            mine += size

        try:
            yield more
        finally:
            self._bytes[owner] = self._bytes.get(owner, 0) - mine
            if not self._bytes[owner]:
                del self._bytes[owner]

    def turn(self, owner: str) -> AbstractAsyncContextManager[None]:
        """To unpack and decode a large body."""
        return self._turns.turn(owner)


# MERGED: Room for large bodies on their way in: so many bytes of everybody together, the next wait a little. A body takes its room before it is read, and keeps it until its request is answered: until then it is in memory in one form or another. Small bodies need none, so they pass however full it is. Whoever has room and does not use it, sending slower than anybody's line, keeps only what has arrived as soon as others wait.


#: Bodies up to this size need no room: so much of each is in uvicorn's memory anyway.
SMALL_BYTES = 64 * 1024
#: While others wait, a body has to come at this pace, after a moment.
PACE_BYTES_S = 64 * 1024
MOMENT_S = 5.0
#: Large bodies of everybody that are unpacked and decoded at once.
MAX_DECODES = 4
# How often those who wait look for somebody slow.
LOOK_S = 1.0
#: Where in the scope of a request the room is that it has.
TAKEN = "tinkex.room"


class NoRoom(Exception):
    """There is none, and there was none for as long as anybody waits."""


@dataclass(slots=True, eq=False)
class Place:
    """Room of one body."""

    size: int
    since_s: float
    arrived: int = 0
    #: It was too slow, and others got its room.
    lost: bool = False


class Room:
    """Belongs to one event loop. Who comes first gets room first."""

    def __init__(
        self, most_bytes: int, *, wait_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        #: 0 is any number.
        self._most_bytes = most_bytes
        self._wait_s = wait_s
        self._clock = clock
        self._taken_bytes = 0
        self._places: set[Place] = set()
        self._waiting: deque[tuple[int, asyncio.Future[Place]]] = deque()
        #: The most that was ever taken at once.
        self.peak_bytes = 0
        #: For whoever unpacks and decodes a large body: one may become many times larger.
        self.work = asyncio.Semaphore(MAX_DECODES)

    async def take(self, size: int) -> Place | None:
        """Room for so many bytes, once there is some; none is needed for a small body."""
        if size <= SMALL_BYTES or not self._most_bytes:
            return None
        # One that is larger than everything gets everything.
        size = min(size, self._most_bytes)
        waiting: asyncio.Future[Place] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, waiting))
        self._give()
        until_s = self._clock() + self._wait_s
        try:
            while not waiting.done():
                if (left_s := until_s - self._clock()) <= 0:
                    raise NoRoom(
                        f"bodies that arrive now have {self._taken_bytes} of the "
                        f"{self._most_bytes} bytes that there is room for, and {size} more did not "
                        f"fit within {self._wait_s:g} s. Send this again in a moment."
                    )
                self._take_from_the_slow()
                await asyncio.wait({waiting}, timeout=min(left_s, LOOK_S))
        except BaseException:
            if waiting.done() and not waiting.cancelled():
                self.leave(waiting.result())
            else:
                self._waiting.remove((size, waiting))
                self._give()
            raise
        return waiting.result()

    def arrived(self, place: Place, size: int) -> None:
        """More of a body has come; NoRoom if it was so slow that others have its room."""
        place.arrived += size
        if place.lost:
            raise NoRoom(
                f"this body came slower than {PACE_BYTES_S} bytes in a second while others waited "
                "for its room. Send it again."
            )

    def leave(self, place: Place) -> None:
        if place in self._places:
            self._places.discard(place)
            self._taken_bytes -= place.size
            self._give()

    def _give(self) -> None:
        while self._waiting:
            size, waiting = self._waiting[0]
            if self._taken_bytes + size > self._most_bytes and self._places:
                return
            self._waiting.popleft()
            place = Place(size, self._clock())
            self._places.add(place)
            self._taken_bytes += size
            self.peak_bytes = max(self.peak_bytes, self._taken_bytes)
            waiting.set_result(place)

    def _take_from_the_slow(self) -> None:
        now_s = self._clock()
        for place in self._places:
            due = (now_s - place.since_s - MOMENT_S) * PACE_BYTES_S
            if place.arrived < min(due, place.size) and not place.lost:
                place.lost = True
                self._taken_bytes -= place.size - place.arrived
                place.size = place.arrived
        self._give()


class BodyBudgets:
    """The byte budgets of one server; one for each owner, and one for all."""

    def __init__(self, settings: Settings) -> None:
        self.owners = Intake(max_body_bytes=settings.max_body_bytes)
        self.room = Room(settings.max_arriving_bytes, wait_s=settings.arriving_wait_s)


def budgets_of(request: Request) -> BodyBudgets:
    budgets: BodyBudgets = request.app.state.body_budgets
    return budgets


# A client that has begun to send would read a refusal as a broken connection and try again for
# minutes; so a body that is too large is swallowed first, up to so many times the limit.
SWALLOWED = 8
# Smaller bodies are unpacked and decoded where they arrive: moving to a thread would cost more.
INLINE_BYTES = 128 * 1024
# Of a body that is too large, its two ends are kept, to see whose step it was.
KEPT_END_BYTES = 4096
#: Where in the scope of a request its body is, for who must say whose step was refused.
SENT = "tinkex.sent"


async def read_body(request: Request) -> bytes:
    """The body of a message without data, unpacked, within the limits."""
    settings = context_of(request).settings
    with budgets_of(request).owners.holding(owner_of(request)) as more:
        limit = min(settings.max_body_bytes, settings.max_message_bytes)
        packed = await _received(
            request, limit, more, "The server's setting is TINKEX_MAX_MESSAGE_BYTES."
        )
        limit = min(settings.max_decoded_bytes, settings.max_message_bytes)
        unpacked = decompress(packed, request.headers.get("content-encoding"), max_bytes=limit)
    request.scope[SENT] = unpacked
    return unpacked


async def read_data(request: Request, decode: Callable[[bytes], T]) -> T:
    """A pass or a sample, which may be large: its body, unpacked, within the limits, and decoded."""
    settings = context_of(request).settings
    budgets = budgets_of(request)
    owner = owner_of(request)
    with budgets.owners.holding(owner) as more:
        packed = await _received(
            request,
            settings.max_body_bytes,
            more,
            "Send fewer or shorter "
            "examples in one request, or start the server with a larger TINKEX_MAX_BODY_BYTES.",
        )
        encoding = request.headers.get("content-encoding")

        def unpack(most: int = settings.max_decoded_bytes) -> bytes:
            unpacked = decompress(packed, encoding, max_bytes=most)
            request.scope[SENT] = unpacked
            return unpacked

        if len(packed) <= INLINE_BYTES:
            # More may come out of it than went in.
            with contextlib.suppress(TooLarge):
                return decode(unpack(min(INLINE_BYTES, settings.max_decoded_bytes)))
        async with budgets.owners.turn(owner), budgets.room.work:
            return await asyncio.to_thread(lambda: decode(unpack()))


async def _received(
    request: Request, limit: int, more: Callable[[int], None], advice: str
) -> bytes:
    body = bytearray()
    total = 0
    tail = b""
    full: Refusal | None = None
    # Before anything is read; what does not say how much it is, is large once more than a little came.
    declared = request.headers.get("content-length", "")
    place = await _room(request, min(int(declared), limit)) if declared.isdecimal() else None
    async for part in request.stream():
        total += len(part)
        if total <= limit and full is None:
            try:
                if place is None and not declared and total > SMALL_BYTES:
                    place = await _room(request, limit)
                if place is not None:
                    _arrived(request, place, len(part))
                more(len(part))
                body += part
            except Refusal as refusal:
                full = refusal
                body.clear()
            continue
        # The first part that is read may be over the limit by itself.
        body += part[: max(0, KEPT_END_BYTES - len(body))]
        tail = (tail + part)[-KEPT_END_BYTES:]
        if total > limit * SWALLOWED:
            break
    if total > limit:
        request.scope[SENT] = bytes(body[:KEPT_END_BYTES]) + b" " + tail
        raise TooLarge(f"the body has {total} bytes or more, and {limit} are allowed. {advice}")
    if full is not None:
        raise full
    return bytes(body)


async def _room(request: Request, size: int) -> Place | None:
    """Room for a body, kept until its request is answered."""
    room = budgets_of(request).room
    try:
        place = await room.take(size)
    except NoRoom as full:
        raise _no_room(full) from None
    if place is not None:
        request.scope[TAKEN] = (room, place)
    return place


def _arrived(request: Request, place: Place, size: int) -> None:
    try:
        budgets_of(request).room.arrived(place, size)
    except NoRoom as slow:
        raise _no_room(slow) from None


def _no_room(why: NoRoom) -> Refusal:
    return Refusal(429, str(why), headers={"Retry-After": str(RETRY_AFTER_S)})


async def read_json(request: Request, message: type[T]) -> T:
    """The body as a wire type."""
    return decode_json(message, await read_body(request))


def stored(scope: Scope) -> None:
    """The body of a request is not in memory any more, or will not be in a moment."""
    if (taken := scope.pop(TAKEN, None)) is not None:
        room, place = taken
        room.leave(place)


class Leaving:
    """Around every request: whatever becomes of it, its room is free afterwards."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        finally:
            stored(scope)
