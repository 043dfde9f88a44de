"""Rows that never change, or whose change is announced, kept for the next request."""

import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")

# What nobody asked for in so long is forgotten; sooner when there is too much of it.
KEPT_S = 120.0
MOST_NEW = 5_000


class Cache(Generic[T]):
    """Rows by their id; those that do not exist are looked for again."""

    def __init__(
        self,
        read: Callable[[str], Awaitable[T | None]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read = read
        self._clock = clock
        # Two generations: a row that is used moves to the new one, the old one goes as a whole.
        self._new: dict[str, T] = {}
        self._old: dict[str, T] = {}
        self._turned_s = clock()
        self._changes = 0

    async def get(self, key: str) -> T | None:
        if (found := self._new.get(key)) is not None:
            return found
        if (found := self._old.get(key)) is not None:
            self._keep(key, found)
            return found
        changes = self._changes
        row = await self._read(key)
        # What was read while something changed may be as it was before: not to be kept.
        if row is not None and changes == self._changes:
            self._keep(key, row)
        return row

    def forget(self, key: str) -> None:
        """Its row has changed."""
        self._changes += 1
        self._new.pop(key, None)
        self._old.pop(key, None)

    def _keep(self, key: str, row: T) -> None:
        now_s = self._clock()
        if now_s - self._turned_s > KEPT_S or len(self._new) >= MOST_NEW:
            self._old, self._new, self._turned_s = self._new, {}, now_s
        self._new[key] = row
