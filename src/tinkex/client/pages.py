"""A list that the service gives out page by page, as one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from tinkex.client.futures import Promise, refuse_to_block

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Page(Generic[T]):
    items: list[T]
    #: What the next page is asked for by; None after the last.
    next: Any = None


class Pages(Generic[T]):
    """
    All of a list: `for` or `async for` over it; every loop starts anew.

    Pages are fetched as the loop comes to them. What is added meanwhile may be missing, and never
    comes twice; what is deleted meanwhile moves the rest up, so take `list(...)` before deleting.
    """

    def __init__(
        self,
        fetch: Callable[[Any], Promise[R]],
        read: Callable[[Any, R], Page[T]],
        key: Callable[[T], Hashable],
    ) -> None:
        self._fetch = fetch
        self._read = read
        self._key = key

    def __iter__(self) -> Iterator[T]:
        seen: set[Hashable] = set()
        place: Any = None
        while True:
            refuse_to_block("a `for` loop over pages", "anext(pages)")
            page = self._read(place, self._fetch(place).block())
            yield from self._new(page.items, seen)
            if (place := page.next) is None:
                return

    async def __aiter__(self) -> AsyncIterator[T]:
        seen: set[Hashable] = set()
        place: Any = None
        while True:
            page = self._read(place, await self._fetch(place))
            for item in self._new(page.items, seen):
                yield item
            if (place := page.next) is None:
                return

    def _new(self, items: list[T], seen: set[Hashable]) -> list[T]:
        fresh = []
        for item in items:
            if (key := self._key(item)) not in seen:
                seen.add(key)
                fresh.append(item)
        return fresh


def by_offset(
    fetch: Callable[[int, int], Promise[R]],
    items: Callable[[R], list[T]],
    key: Callable[[T], Hashable],
    *,
    size: int,
) -> Pages[T]:
    """Pages that are asked for by how many, and after how many."""

    def read(place: int | None, found: R) -> Page[T]:
        offset, got = place or 0, items(found)
        cursor = getattr(found, "cursor", None)
        total = None if cursor is None else cursor.total_count
        return Page(got, next_offset(offset, len(got), size, total))

    return Pages(lambda place: fetch(size, place or 0), read, key)


def next_offset(offset: int, got: int, limit: int, total: int | None) -> int | None:
    """Where the page after one of `got` items begins; None if that was the last."""
    after = offset + got
    last = got < limit if total is None else after >= total
    return None if last or not got else after
