"""
Connections that nobody uses do not stay: heads, bodies and answers have to move.

Uvicorn closes a connection that is idle after an answer. It waits for ever for a first request, for
the rest of a head or of a body, and for a reader of its answer; these have a limit here.
"""

import asyncio
import enum
import socket
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

#: A body or an answer moves when this much of it does; a last piece may be smaller.
STEP_BYTES = 4096
# A peer that is gone without a word (power, network) is noticed by the system after about this long.
GONE_S = 60


#: In the scope of a request that waits: what to call when its client is gone. Asking the server for
#: that news, as ASGI has it, would take a task of its own for each of thousands of polls.
GONE = "tinkex.gone"


class Phase(enum.Enum):
    """What a connection waits for."""

    HEAD = enum.auto()  # a request, or the rest of its head
    IDLE = enum.auto()  # the next request after an answer; uvicorn's to limit
    BODY = enum.auto()  # the rest of a body
    WORK = enum.auto()  # us
    ANSWER = enum.auto()  # a reader


class Patience:
    """How long one connection has been where it is. No clock, no sockets."""

    def __init__(self, *, head_s: float, stall_s: float) -> None:
        self._limit_s = {Phase.HEAD: head_s, Phase.BODY: stall_s, Phase.ANSWER: stall_s}
        self._place: tuple[Phase, int] | None = None
        self._since_s = 0.0
        self._moved = 0

    def is_over(self, phase: Phase, *, request: int, moved: int, now_s: float) -> bool:
        """Look at the connection: its phase, which request it is, and bytes moved in that phase."""
        place = (phase, request)
        steps = phase is not Phase.HEAD and moved - self._moved >= STEP_BYTES
        if place != self._place or steps:
            self._place, self._since_s, self._moved = place, now_s, moved
        limit_s = self._limit_s.get(phase, 0.0)
        return 0 < limit_s <= now_s - self._since_s


def patient(
    base: "str | type[asyncio.Protocol]", *, head_s: float, stall_s: float
) -> type[asyncio.Protocol]:
    """Uvicorn's protocol with these limits; 0 is none."""
    if isinstance(base, str):
        from uvicorn.protocols.http.h11_impl import H11Protocol

        base = H11Protocol
    limits = [limit_s for limit_s in (head_s, stall_s) if limit_s > 0]
    look_s = min(limits) / 4 if limits else 0.0

    # Both of uvicorn's protocols have the same parts that matter here.
    class Patient(cast("type[HttpToolsProtocol]", base)):  # type: ignore[misc]
        """Looks at itself every few seconds."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._patience = Patience(head_s=head_s, stall_s=stall_s)
            self._received = 0
            self._requests = 0
            self._last: object = None
            self._next_look: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            _notice_the_dead(transport.get_extra_info("socket"))
            self._look()

        def data_received(self, data: bytes) -> None:
            self._received += len(data)
            super().data_received(data)

        def connection_lost(self, exc: Exception | None) -> None:
            waiting = self.cycle is not None and not self.cycle.response_complete
            super().connection_lost(exc)
            if waiting and (leave := self.cycle.scope.get(GONE)) is not None:
                leave()
            self._unset_keepalive_if_required()
            if self._next_look is not None:
                self._next_look.cancel()
            # It holds this object, which holds it and the socket: memory until the next look for
            # garbage, which is rare.
            self.__dict__.pop("parser", None)

        def _look(self) -> None:
            if not look_s:
                return
            phase, moved = self._phase()
            if self.cycle is not self._last:
                self._last = self.cycle
                self._requests += 1
            now_s = self.loop.time()
            if self._patience.is_over(phase, request=self._requests, moved=moved, now_s=now_s):
                self.transport.abort()
                return
            self._next_look = self.loop.call_later(look_s, self._look)

        def _phase(self) -> tuple[Phase, int]:
            """Where this connection is, and how much has moved there."""
            over = self.cycle is None or self.cycle.response_complete
            unread = self.transport.get_write_buffer_size()
            # While it is paused, and when all is said, nothing is added to what is unread.
            if unread and (over or self.flow.write_paused):
                return Phase.ANSWER, -unread
            if not over:
                return (Phase.BODY if self.cycle.more_body else Phase.WORK), self._received
            return (Phase.HEAD if self.timeout_keep_alive_task is None else Phase.IDLE), 0

    return Patient


def _notice_the_dead(sock: Any) -> None:
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", GONE_S // 2),
        ("TCP_KEEPINTVL", max(1, GONE_S // 8)),
        ("TCP_KEEPCNT", 4),
        ("TCP_USER_TIMEOUT", GONE_S * 1000),
    ):
        # Not every system has all of them.
        if (option := getattr(socket, name, None)) is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
