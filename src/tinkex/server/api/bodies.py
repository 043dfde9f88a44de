"""
Reading request bodies within memory budgets.

Limits on a single request do not limit the memory of many concurrent requests: eight kilobytes may
decompress to `max_decoded_bytes`, and a hundred connections may each send `max_body_bytes`. So
there are two budgets:

- Per owner: bytes that are arriving, and large bodies that are decoded at the same time.
- Global (`MemoryBudget`): bytes of all large bodies. A large body reserves its bytes before it is
  read and keeps them until its request is stored (`submit.accept`) or answered, because until then
  the body, or the request decoded from it, is in memory. When the budget is exhausted, new large
  bodies wait up to `arriving_wait_s`, then get a 429. While others wait, a sender slower than
  64 KiB/s loses the unused part of its reservation.

Small bodies need no reservation, so they are accepted even when the budget is exhausted.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import request_response
from starlette.types import ASGIApp, Receive, Scope, Send

from tinkex.server.api.auth import owner_of
from tinkex.server.api.deps import OwnerSlots, context_of
from tinkex.server.api.errors import Refusal
from tinkex.server.settings import Settings
from tinkex.wire.codec import decode_json, decompress
from tinkex.wire.errors import TooLarge

T = TypeVar("T")

#: An owner may have this many times `max_body_bytes` arriving at the same time.
MAX_BODIES_PER_OWNER = 8
#: Large bodies that are decompressed and decoded at the same time; further ones wait.
MAX_DECODES_PER_OWNER = 2
MAX_DECODES = 4
#: Bodies up to this size need no reservation: uvicorn buffers this much of each anyway.
SMALL_BYTES = 64 * 1024
#: While others wait, a body must arrive at this rate, after a grace time.
MIN_BYTES_PER_S = 64 * 1024
SLOW_GRACE_S = 5.0
# How often waiting requests check for slow senders.
SLOW_CHECK_S = 1.0
RETRY_AFTER_S = 1
# If the server refused a request while its client is still sending, the client would see a broken
# connection and retry for minutes. So a body that is too large is read and dropped first, up to
# this many times the limit.
DRAIN_FACTOR = 8
# Smaller bodies are decoded on the event loop: a thread would cost more.
DECODE_INLINE_BYTES = 128 * 1024
# The first and last bytes of a body that is too large are kept: they may contain the model and the
# number of the step.
KEPT_END_BYTES = 4096

#: Key in the request scope: the (budget, reservation) of its body.
RESERVATION = "tinkex.reservation"
#: Key in the request scope: the body, to find the step that a refused request was for.
RECEIVED_BODY = "tinkex.body"


class BudgetExhausted(Refusal):
    """A 429: a body does not fit into a budget now."""

    def __init__(self, text: str) -> None:
        super().__init__(429, text, headers={"Retry-After": str(RETRY_AFTER_S)})


class OwnerBudget:
    """Bytes that are arriving, and decodes that are running, per owner."""

    def __init__(self, *, max_body_bytes: int) -> None:
        self._max_bytes = MAX_BODIES_PER_OWNER * max_body_bytes
        self._bytes: dict[str, int] = {}
        self._decode_slots = OwnerSlots(MAX_DECODES_PER_OWNER)

    @contextmanager
    def track(self, owner: str) -> Iterator[Callable[[int], None]]:
        """Yields a function that counts received bytes; it raises BudgetExhausted."""
        counted = 0

        def count(size: int) -> None:
            nonlocal counted
            total = self._bytes.get(owner, 0) + size
            if total > self._max_bytes:
                raise BudgetExhausted(
                    f"the requests that you are sending now have more than {self._max_bytes} "
                    "bytes together. Send this one again when some of them have arrived."
                )
            self._bytes[owner] = total
            counted += size

        try:
            yield count
        finally:
            self._bytes[owner] = self._bytes.get(owner, 0) - counted
            if not self._bytes[owner]:
                del self._bytes[owner]

    def decode_slot(self, owner: str) -> AbstractAsyncContextManager[None]:
        """Permission to decompress and decode a large body."""
        return self._decode_slots.slot(owner)


@dataclass(slots=True, eq=False)
class Reservation:
    """Bytes of the memory budget that one body holds."""

    size: int
    since_s: float
    received: int = 0
    #: The sender was too slow, and its unused bytes went to others.
    revoked: bool = False


class MemoryBudget:
    """Bytes of all large bodies; first come, first served. Belongs to one event loop."""

    def __init__(
        self, max_bytes: int, *, wait_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        #: 0 is no limit.
        self._max_bytes = max_bytes
        self._wait_s = wait_s
        self._clock = clock
        self._reserved_bytes = 0
        self._reservations: set[Reservation] = set()
        self._waiting: deque[tuple[int, asyncio.Future[Reservation]]] = deque()
        #: The maximum of reserved bytes so far.
        self.peak_bytes = 0
        #: Held while a large body is decoded, which may make it many times larger.
        self.decodes = asyncio.Semaphore(MAX_DECODES)

    async def reserve(self, size: int) -> Reservation | None:
        """Reserve bytes for a body, waiting if needed; None for a small body."""
        if size <= SMALL_BYTES or not self._max_bytes:
            return None
        # A body larger than the whole budget gets the whole budget.
        size = min(size, self._max_bytes)
        waiting: asyncio.Future[Reservation] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, waiting))
        self._grant()
        until_s = self._clock() + self._wait_s
        try:
            while not waiting.done():
                if (left_s := until_s - self._clock()) <= 0:
                    raise BudgetExhausted(
                        f"bodies that are arriving now use {self._reserved_bytes} of the "
                        f"{self._max_bytes} bytes of the server's budget, and {size} more did not "
                        f"fit within {self._wait_s:g} s. Send this request again in a moment."
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

    def count(self, reservation: Reservation, size: int) -> None:
        """Count received bytes; raises BudgetExhausted if the reservation was revoked."""
        reservation.received += size
        if reservation.revoked:
            raise BudgetExhausted(
                f"this body arrived slower than {MIN_BYTES_PER_S} bytes per second while other "
                "requests waited for memory. Send it again."
            )

    def release(self, reservation: Reservation) -> None:
        if reservation in self._reservations:
            self._reservations.discard(reservation)
            self._reserved_bytes -= reservation.size
            self._grant()

    def _grant(self) -> None:
        """Give free bytes to waiting requests, in order."""
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
        """Revoke the unused bytes of slow senders."""
        now_s = self._clock()
        for reservation in self._reservations:
            due = (now_s - reservation.since_s - SLOW_GRACE_S) * MIN_BYTES_PER_S
            if reservation.received < min(due, reservation.size) and not reservation.revoked:
                reservation.revoked = True
                self._reserved_bytes -= reservation.size - reservation.received
                reservation.size = reservation.received
        self._grant()


class BodyBudgets:
    """The budgets of one server."""

    def __init__(self, settings: Settings) -> None:
        self.owners = OwnerBudget(max_body_bytes=settings.max_body_bytes)
        self.memory = MemoryBudget(settings.max_arriving_bytes, wait_s=settings.arriving_wait_s)


def budgets_of(request: Request) -> BodyBudgets:
    budgets: BodyBudgets = request.app.state.body_budgets
    return budgets


async def read_body(request: Request) -> bytes:
    """Read and decompress a body that carries no training data: at most `max_message_bytes`."""
    settings = context_of(request).settings
    with budgets_of(request).owners.track(owner_of(request)) as count:
        limit = min(settings.max_body_bytes, settings.max_message_bytes)
        packed = await _receive(
            request, limit, count, "The server's setting is TINKEX_MAX_MESSAGE_BYTES."
        )
        limit = min(settings.max_decoded_bytes, settings.max_message_bytes)
        body = decompress(packed, request.headers.get("content-encoding"), max_bytes=limit)
    request.scope[RECEIVED_BODY] = body
    return body


async def read_data(request: Request, decode: Callable[[bytes], T]) -> T:
    """Read, decompress and decode a pass or a sample, which may be large."""
    settings = context_of(request).settings
    budgets = budgets_of(request)
    owner = owner_of(request)
    with budgets.owners.track(owner) as count:
        packed = await _receive(
            request,
            settings.max_body_bytes,
            count,
            "Send fewer or shorter examples in one request, or start the server with a larger "
            "TINKEX_MAX_BODY_BYTES.",
        )
        encoding = request.headers.get("content-encoding")

        def unpack(max_bytes: int = settings.max_decoded_bytes) -> bytes:
            body = decompress(packed, encoding, max_bytes=max_bytes)
            request.scope[RECEIVED_BODY] = body
            return body

        if len(packed) <= DECODE_INLINE_BYTES:
            # A small body may decompress to a large one; then it is decoded in a thread.
            with contextlib.suppress(TooLarge):
                return decode(unpack(min(DECODE_INLINE_BYTES, settings.max_decoded_bytes)))
        return await in_decode_slot(request, lambda: decode(unpack()))


async def in_decode_slot(request: Request, work: Callable[[], T]) -> T:
    """Run work on a large body in a thread; an owner has few at a time."""
    budgets = budgets_of(request)
    async with budgets.owners.decode_slot(owner_of(request)), budgets.memory.decodes:
        return await asyncio.to_thread(work)


async def _receive(
    request: Request, limit: int, count: Callable[[int], None], advice: str
) -> bytes:
    """The body as it was sent, at most `limit` bytes, within both budgets."""
    body = bytearray()
    total = 0
    tail = b""
    refusal: Refusal | None = None
    # With a Content-Length, reserve before reading. Without one, reserve the maximum as soon as the
    # body turns out not to be small.
    declared = request.headers.get("content-length", "")
    reservation = (
        await _reserve(request, min(int(declared), limit)) if declared.isdecimal() else None
    )
    async for part in request.stream():
        total += len(part)
        if total <= limit and refusal is None:
            try:
                if reservation is None and not declared and total > SMALL_BYTES:
                    reservation = await _reserve(request, limit)
                if reservation is not None:
                    budgets_of(request).memory.count(reservation, len(part))
                count(len(part))
                body += part
            except Refusal as error:
                refusal = error
                body.clear()
            continue
        # The first part may exceed the limit on its own.
        body += part[: max(0, KEPT_END_BYTES - len(body))]
        tail = (tail + part)[-KEPT_END_BYTES:]
        if total > limit * DRAIN_FACTOR:
            break
    if total > limit:
        request.scope[RECEIVED_BODY] = bytes(body[:KEPT_END_BYTES]) + b" " + tail
        raise TooLarge(f"the body has {total} bytes or more, and {limit} are allowed. {advice}")
    if refusal is not None:
        raise refusal
    return bytes(body)


async def _reserve(request: Request, size: int) -> Reservation | None:
    """Reserve memory for a body until its request is stored or answered."""
    memory = budgets_of(request).memory
    reservation = await memory.reserve(size)
    if reservation is not None:
        request.scope[RESERVATION] = (memory, reservation)
    return reservation


def release_memory(scope: Scope) -> None:
    """Release the reservation of a request whose body is no longer in memory."""
    if (reserved := scope.pop(RESERVATION, None)) is not None:
        memory, reservation = reserved
        memory.release(reservation)


class ReleaseBodyMemory:
    """Middleware that releases the reservation of each request when it is over."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        finally:
            release_memory(scope)


class MessageRoute(APIRoute):
    """
    A route that FastAPI describes and does not call.

    FastAPI would read a body without budgets and by other rules. Here the parameter with a wire type
    is the body, read within the budgets and decoded as on all other routes. FastAPI calls only routes
    with query parameters.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        if not self.dependant.query_params:
            # Starlette's, without the stacks for FastAPI's dependencies: they take time.
            self.app = request_response(self.get_route_handler())

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        if self.dependant.query_params:
            assert self.body_field is None, f"FastAPI would read the body of {self.path}"
            return super().get_route_handler()
        endpoint: Callable[..., Awaitable[Response]] = self.endpoint
        request_name = self.dependant.request_param_name or ""
        if not self.dependant.body_params:

            async def call(request: Request) -> Response:
                return await endpoint(**{request_name: request}, **request.path_params)

            return call
        (body,) = self.dependant.body_params
        name = body.name
        message_type: Any = body.field_info.annotation

        async def call_with_message(request: Request) -> Response:
            message = decode_json(message_type, await read_body(request))
            return await endpoint(**{request_name: request, name: message}, **request.path_params)

        return call_with_message
