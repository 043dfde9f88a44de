"""Those who sleep until something happens, their time is up, or they are gone themselves."""

import asyncio
from collections.abc import Callable

#: Is given what wakes a sleeper, for when nobody is there any more who would hear of it.
Leaving = Callable[[Callable[[], None]], None]


class Sleepers:
    """Belongs to one event loop."""

    __slots__ = ("_waiters",)

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[None]] = set()

    def __len__(self) -> int:
        return len(self._waiters)

    def wake(self) -> None:
        for waiter in self._waiters:
            _let_go(waiter)

    async def sleep(self, within_s: float, leaving: Leaving | None) -> None:
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        self._waiters.add(waiter)
        # One timer and no task for each: thousands sleep at once.
        timer = loop.call_later(within_s, _let_go, waiter)
        if leaving is not None:
            leaving(lambda: _let_go(waiter))
        try:
            await waiter
        finally:
            timer.cancel()
            self._waiters.discard(waiter)


def _let_go(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)
