"""Rows that never change, or whose change is announced, kept for the next request."""

from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")

# Forgotten all at once when there are more.
MOST_CACHED = 10_000


class Cache(Generic[T]):
    """Rows by their id; those that do not exist are looked for again."""

    def __init__(self, read: Callable[[str], Awaitable[T | None]]) -> None:
        self._read = read
        self._rows: dict[str, T] = {}
        self._changes = 0

    async def get(self, key: str) -> T | None:
        if (found := self._rows.get(key)) is not None:
            return found
        changes = self._changes
        row = await self._read(key)
        # What was read while something changed may be as it was before: not to be kept.
        if row is not None and changes == self._changes:
            if len(self._rows) >= MOST_CACHED:
                self._rows.clear()
            self._rows[key] = row
        return row

    def forget(self, key: str) -> None:
        """Its row has changed."""
        self._changes += 1
        self._rows.pop(key, None)
