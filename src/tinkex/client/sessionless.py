"""
Clients without a session: they ask and change things, and train or sample nothing.

All of one process that ask the same service with the same key share one connection. It ends with
the last of them; closing one leaves the others alone.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Callable, Coroutine, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar
from urllib.parse import urlencode

from tinkex.client.errors import APITimeoutError
from tinkex.client.futures import Promise, refuse_to_block
from tinkex.client.session import Connection, Session
from tinkex.client.settings import PROTOCOL_VERSION, Settings
from tinkex.client.transport import Kind, Request

if TYPE_CHECKING:
    from tinkex.client.telemetry import Telemetry

T = TypeVar("T")


class Sessionless:
    """What RestClient and AdminClient have in common."""

    #: What the connection belongs to.
    holder: Session

    def __init__(
        self,
        _holder: Session | None = None,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
    ) -> None:
        if _holder is not None and (base_url is not None or api_key is not None):
            raise ValueError(
                "A client of another one asks the same service with the same key: "
                "leave out base_url and api_key."
            )
        self._closed = False
        self._timeout_s: float | None = None
        if _holder is not None:
            self.holder = _holder
        else:
            self.holder = _join(self, Settings.resolve(base_url=base_url, api_key=api_key))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.holder.settings.base_url}>"

    def with_timeout(self, seconds: float) -> Self:
        """The same client, whose calls fail with `APITimeoutError` after so long altogether."""
        if not seconds > 0:
            raise ValueError(f"a time-out of {seconds!r} seconds: it must be above zero.")
        sibling = type(self)(self._open_holder())
        sibling._timeout_s = seconds
        _share(self, sibling)
        return sibling

    def get_telemetry(self) -> Telemetry | None:
        """The reporter of the session this client was made from; None without one."""
        return self.holder.telemetry

    # -- asking ----------------------------------------------------------------------------------

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
        """The request of the method called `name`, whose arguments have been checked."""
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
            raise RuntimeError(f"This {type(self).__name__} is closed. Create a new one to go on.")
        return self.holder

    # -- the end ---------------------------------------------------------------------------------

    def close(self) -> Promise[None]:
        """Be done with this client. Its connection stays as long as another client uses it."""
        self._closed = True
        if _leave(self):
            return self.holder.close("success")
        done: Promise[None] = Promise()
        done.finish(None)
        return done

    def __enter__(self) -> Self:
        self._open_holder()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        refuse_to_block(f"leaving `with {type(self).__name__}`", "client.close")
        self.close().block()

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()


def sdk_headers(name: str) -> dict[str, str]:
    """Which method asks: services count by it."""
    return {"x-sdk-version": PROTOCOL_VERSION, "x-sdk-method": name}


def with_query(path: str, query: Mapping[str, object] | None) -> str:
    """What is None is left out."""
    pairs = [(name, value) for name, value in (query or {}).items() if value is not None]
    return f"{path}?{urlencode(pairs)}" if pairs else path


# -- who shares a connection -------------------------------------------------------------------------

_lock = threading.Lock()
#: Held weakly: what nobody uses goes, and its connection with it.
_holders: weakref.WeakValueDictionary[tuple[str, str], Session] = weakref.WeakValueDictionary()
_users: weakref.WeakKeyDictionary[Session, weakref.WeakSet[Sessionless]] = (
    weakref.WeakKeyDictionary()
)


def _forget_lock() -> None:
    """In a forked child: another thread of the parent may have held it."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forget_lock)


def _join(user: Sessionless, settings: Settings) -> Session:
    with _lock:
        holder = _holders.get(settings.lane)
        # Other settings (headers, patience) of the same service are another connection.
        if holder is None or holder.closed or holder.settings != settings:
            holder = _holders[settings.lane] = Session(settings)
        _users.setdefault(holder, weakref.WeakSet()).add(user)
        return holder


def _share(user: Sessionless, sibling: Sessionless) -> None:
    with _lock:
        users = _users.get(user.holder)
        if users is not None and user in users:
            users.add(sibling)


def _leave(user: Sessionless) -> bool:
    """Whether it was the last of those that share its connection."""
    with _lock:
        users = _users.get(user.holder)
        if users is None or user not in users:  # a ServiceClient's connection, or closed before
            return False
        users.discard(user)
        return not users
