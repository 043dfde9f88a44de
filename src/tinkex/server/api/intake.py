"""
Bodies on their way in: how much of them one owner has in memory, whatever the number of connections.

Each request has limits of its own, and they say nothing about many at once: eight kilobytes may
unpack to `max_decoded_bytes`, and a hundred connections may each hold `max_body_bytes`.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager

from tinkex.server.api.errors import Refusal
from tinkex.server.api.turns import Turns

#: Bodies of the largest size whose bytes one owner may have arriving at once.
BODIES = 8
#: Large bodies of one owner that are unpacked and decoded at once; the next wait for them.
AT_ONCE = 2
RETRY_AFTER_S = 1


class Intake:
    """What is arriving, owner by owner."""

    def __init__(self, *, max_body_bytes: int) -> None:
        self._most_bytes = BODIES * max_body_bytes
        self._bytes: dict[str, int] = {}
        self._turns = Turns(AT_ONCE)

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
