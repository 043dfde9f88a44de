"""
The base of RestClient and AdminClient: requests without a session, and lists in pages.

All such clients in one process with the same service and key share one connection. It is closed
with the last of them.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar
from urllib.parse import urlencode

from tinkex import display
from tinkex.client.background_loop import after_fork
from tinkex.client.connection import Connection
from tinkex.client.errors import APITimeoutError
from tinkex.client.futures import Promise, refuse_to_block
from tinkex.client.http.transport import Kind, Request
from tinkex.client.session import Session
from tinkex.client.settings import PROTOCOL_VERSION, Settings
from tinkex.tracebacks import public_edge

if TYPE_CHECKING:
    from tinkex.client.observe.telemetry import Telemetry


T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Page(Generic[T]):
    items: list[T]
    #: The cursor of the next page; None after the last.
    next: Any = None


class Pages(Generic[T]):
    """
    A complete list: `for` or `async for` over it; every loop starts from the beginning.

    Pages are fetched as the loop reaches them. Items added in the meantime may be missing, and none
    comes twice. Deleting items shifts the pages, so take `list(...)` before deleting.
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
        cursor: Any = None
        while True:
            refuse_to_block("a `for` loop over pages", "anext(pages)")
            page = self._read(cursor, self._fetch(cursor).block())
            yield from self._new(page.items, seen)
            if (cursor := page.next) is None:
                return

    async def __aiter__(self) -> AsyncIterator[T]:
        seen: set[Hashable] = set()
        cursor: Any = None
        while True:
            page = self._read(cursor, await self._fetch(cursor))
            for item in self._new(page.items, seen):
                yield item
            if (cursor := page.next) is None:
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
    """Pages by limit and offset."""

    def read(cursor: int | None, found: R) -> Page[T]:
        offset, got = cursor or 0, items(found)
        page_info = getattr(found, "cursor", None)
        total = None if page_info is None else page_info.total_count
        return Page(got, next_offset(offset, len(got), size, total))

    return Pages(lambda cursor: fetch(size, cursor or 0), read, key)


def next_offset(offset: int, got: int, limit: int, total: int | None) -> int | None:
    """The offset of the page after one with `got` items; None if that was the last."""
    after = offset + got
    last = got < limit if total is None else after >= total
    return None if last or not got else after


@public_edge
class Sessionless:
    """The common part of RestClient and AdminClient."""

    #: Owns the connection.
    holder: Session

    def __init__(
        self,
        _holder: Session | None = None,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
    ) -> None:
        """
        Creating a client sends nothing.

        Args:
            base_url: Address of the service, or `"local"`; else `TINKER_BASE_URL`, or the one of
                `tinkex use`. If there is no key either: the running server of this user.
            api_key: Key of the service; else `TINKER_API_KEY`, or the one of `tinkex auth login`.

        Raises:
            TinkerError: No service is named or found, or there is no key for it.

        Example:
            rest = tinkex.RestClient(base_url="http://127.0.0.1:8000", api_key="tml-local")
        """
        if _holder is not None and (base_url is not None or api_key is not None):
            raise ValueError(
                "This client shares the service and key of another client: "
                "leave out base_url and api_key."
            )
        self._closed = False
        self._timeout_s: float | None = None
        if _holder is not None:
            self.holder = _holder
        else:
            self.holder = _join_connection(
                self, Settings.resolve(base_url=base_url, api_key=api_key)
            )

    def __repr__(self) -> str:
        return display.call(type(self).__name__, [("base_url", self.holder.settings.base_url)])

    def with_timeout(self, seconds: float) -> Self:
        """
        The same client with a time limit for each call.

        Args:
            seconds: Limit of a call with all its retries; then it fails with `APITimeoutError`.

        Returns:
            A client that shares the connection.

        Raises:
            ValueError: Not above zero.

        Example:
            runs = rest.with_timeout(10).list_training_runs().result()
        """
        if not seconds > 0:
            raise ValueError(f"the timeout is {seconds!r} seconds; it must be above zero.")
        sibling = type(self)(self._open_holder())
        sibling._timeout_s = seconds
        _share_connection(self, sibling)
        return sibling

    def get_telemetry(self) -> Telemetry | None:
        """
        The telemetry reporter of the session that created this client.

        Returns:
            The reporter; None without such a session.

        Example:
            reporter = rest.get_telemetry()
        """
        return self.holder.telemetry

    # -- requests --------------------------------------------------------------------------------

    def _ask(
        self,
        name: str,
        method: str,
        path: str,
        body: Any = None,
        *,
        answer: type[T],
        query: Mapping[str, object] | None = None,
        about: str,
    ) -> Promise[T]:
        """Send the request of the public method `name`, whose arguments are validated."""
        path = with_query(path, query)
        headers = sdk_headers(name)

        async def work(connection: Connection) -> T:
            return await connection.calls.call(
                method, path, body, answer=answer, kind=Kind.REST, headers=headers, about=about
            )

        return self._run(work, method, path)

    def _run(
        self, work: Callable[[Connection], Coroutine[Any, Any, T]], method: str, path: str
    ) -> Promise[T]:
        holder, timeout_s = self._open_holder(), self._timeout_s

        async def started() -> T:
            try:
                async with asyncio.timeout(timeout_s):
                    return await work(await holder.connect())
            except TimeoutError as error:
                url = f"{holder.settings.base_url}/api/v1/{path}"
                raise APITimeoutError(Request(method=method, url=url)) from error

        return holder.run(started())

    def _open_holder(self) -> Session:
        if self._closed:
            raise RuntimeError(
                f"This {type(self).__name__} is closed. Create a new one to continue."
            )
        return self.holder

    # -- the end ---------------------------------------------------------------------------------

    def close(self) -> Promise[None]:
        """
        Close this client. Its connection stays open while another client uses it.

        Returns:
            A future that is done when it is closed.

        Example:
            rest.close().result()
        """
        self._closed = True
        if _leave_connection(self):
            return self.holder.close("success")
        done: Promise[None] = Promise()
        done.finish(None)
        return done

    def __enter__(self) -> Self:
        self._open_holder()
        return self

    def __exit__(self, *_: object) -> None:
        refuse_to_block(f"leaving `with {type(self).__name__}`", "client.close")
        self.close().block()

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def sdk_headers(name: str) -> dict[str, str]:
    """Names the method, for the statistics of the service."""
    return {"x-sdk-version": PROTOCOL_VERSION, "x-sdk-method": name}


def with_query(path: str, query: Mapping[str, object] | None) -> str:
    """Adds the query; None values are left out."""
    pairs = [(name, value) for name, value in (query or {}).items() if value is not None]
    return f"{path}?{urlencode(pairs)}" if pairs else path


# -- shared connections --------------------------------------------------------------------------

_lock = threading.Lock()
#: Weak references: an unused session is dropped, and its connection with it.
_holders: weakref.WeakValueDictionary[tuple[str, str], Session] = weakref.WeakValueDictionary()
_users: weakref.WeakKeyDictionary[Session, weakref.WeakSet[Sessionless]] = (
    weakref.WeakKeyDictionary()
)


@after_fork
def _reset_after_fork() -> None:
    """In a forked child: another thread of the parent may hold the lock."""
    global _lock
    _lock = threading.Lock()


def _join_connection(user: Sessionless, settings: Settings) -> Session:
    with _lock:
        holder = _holders.get(settings.limits_key)
        # Other settings (headers, timeouts) of the same service need another connection.
        if holder is None or holder.closed or holder.settings != settings:
            holder = _holders[settings.limits_key] = Session(settings)
        _users.setdefault(holder, weakref.WeakSet()).add(user)
        return holder


def _share_connection(user: Sessionless, sibling: Sessionless) -> None:
    with _lock:
        users = _users.get(user.holder)
        if users is not None and user in users:
            users.add(sibling)


def _leave_connection(user: Sessionless) -> bool:
    """Whether this was the last client of its connection."""
    with _lock:
        users = _users.get(user.holder)
        if users is None or user not in users:  # a ServiceClient's connection, or already closed
            return False
        users.discard(user)
        return not users
