"""
The session that a `ServiceClient` and all clients created from it share, and its heartbeat.

Everything here runs on the background loop, so it needs no locks. After a fork the child opens
its own connection on its own loop; the session id stays the same.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import itertools
import logging
import os
import weakref
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, get_args
from urllib.parse import quote, urlsplit

from pydantic import BaseModel

from tinkex.client import background_loop, validation
from tinkex.client.background_loop import SingleFlight
from tinkex.client.connection import (
    Connection,
    MakeTransport,
    close_unreferenced,
    http_transport,
    inherited,
    open_connection,
    refresh_config,
)
from tinkex.client.errors import APIConnectionError, APIStatusError, TinkerError
from tinkex.client.futures import Promise, settle
from tinkex.client.http.polling import ExpectedResult
from tinkex.client.http.transport import Kind, Request
from tinkex.client.observe import instrumentation
from tinkex.client.observe.queue_states import QueueObserver
from tinkex.client.observe.telemetry import Telemetry
from tinkex.client.observe.waiting import Limit
from tinkex.client.settings import LOCAL, PROTOCOL_VERSION, Settings
from tinkex.local.registry import LEASE_HEADER
from tinkex.wire.base import Payload
from tinkex.wire.checkpoints import CONSOLE_URL, WeightsInfoRequest, WeightsInfoResponse
from tinkex.wire.futures import UntypedAPIFuture
from tinkex.wire.sessions import (
    CreateSessionRequest,
    CreateSessionResponse,
    GetServerCapabilitiesResponse,
    SessionHeartbeatRequest,
    SessionHeartbeatResponse,
)

if TYPE_CHECKING:
    from tinkex.client.local_server import LocalServer
    from tinkex.client.observe.instrumentation import Tracing

log = logging.getLogger("tinkex.session")

T = TypeVar("T")
R = TypeVar("R", bound=BaseModel | Payload)

HEARTBEAT_EVERY_S = 10.0
#: Heartbeats may fail for this long before the user gets a warning.
HEARTBEAT_WARN_AFTER_S = 120.0
#: Limits how long closing waits for a server that does not respond.
FINISH_TIMEOUT_S = 10.0
FINISH_RETRY_S = 8.0

CloseStatus = Literal["success", "errored", "interrupted"]


class Closeable(Protocol):
    """An object of a session that has waiting work."""

    def close(self) -> None: ...


class Session:
    """
    The shared part of a `ServiceClient` and all clients created from it.

    Nothing is sent before the first operation that needs the server.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        user_metadata: Mapping[str, str] | None = None,
        display_name: str | None = None,
        session_id: str | None = None,
        make_transport: MakeTransport = http_transport,
    ) -> None:
        self.settings = settings
        self.closed = False
        #: Whether another process created the session and this one only joined it.
        self.joined = session_id is not None
        self._session_id = session_id
        self._user_metadata = dict(user_metadata or {})
        self._display_name = display_name
        self.make_transport = make_transport
        self._server: LocalServer | None = None
        self._creator_pid = os.getpid()
        self._model_numbers = itertools.count()
        self._sampler_numbers = itertools.count()
        self._loss_numbers = itertools.count()
        #: Custom losses of this session: digest -> name.
        self.losses: dict[str, str] = {}
        self._reset()

    def __repr__(self) -> str:
        return f"<Session {self._session_id or 'not started'} at {self.settings.base_url}>"

    def _reset(self) -> None:
        """Start without a connection, in this process."""
        self._pid = os.getpid()
        self._telemetry: Telemetry | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._dependents: weakref.WeakSet[Closeable] = weakref.WeakSet()
        self._connected = SingleFlight(self._connect, keep_result=True)
        self._opened = SingleFlight(self._open, keep_result=True)

    @property
    def session_id(self) -> str | None:
        """None until the first operation that needs a session."""
        return self._session_id

    @property
    def telemetry(self) -> Telemetry | None:
        """The telemetry reporter; None before the session exists, or if telemetry is off."""
        return self._telemetry

    @property
    def tracing(self) -> Tracing | None:
        """The OpenTelemetry tracer; None unless the settings enable it."""
        return instrumentation.tracing() if self.settings.otel else None

    @property
    def console(self) -> str:
        """The address of the service's console, before `/sessions` and the like."""
        connection = self._connected.value
        if connection is None and self.settings.base_url == LOCAL:
            connection = self.run(self.connect()).block()  # its address is not known before
        return console_of(self.settings.base_url if connection is None else connection.calls.root)

    # -- running work ----------------------------------------------------------------------------

    def run(self, work: Coroutine[Any, Any, T], *, cancel_with_waiter: bool = False) -> Promise[T]:
        """Start `work` on the background loop. It is cancelled when the session closes."""
        promise: Promise[T] = Promise(cancel_with_waiter=cancel_with_waiter)
        self.start(promise, lambda: asyncio.ensure_future(work), on_rejected=work.close)
        return promise

    def start(
        self,
        promise: Promise[T],
        make: Callable[[], asyncio.Task[T]],
        *,
        on_rejected: Callable[[], None] | None = None,
    ) -> None:
        """Create a task on the background loop and pass its outcome to the promise."""
        try:
            loop = self.loop()
        except RuntimeError:
            if on_rejected is not None:
                on_rejected()
            raise

        def begin() -> None:
            try:
                task = make()
            except BaseException as error:  # noqa: BLE001 (raised by the promise)
                # Exceptions in a loop callback are only logged: the caller would wait forever.
                promise.fail(error)
            else:
                self.follow(task, promise)

        loop.call_soon_threadsafe(begin)

    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop of this session's work. Raises `RuntimeError` if the session is closed."""
        if self.closed:
            raise closed_error()
        if self._pid != os.getpid():
            inherited.append((self._connected, self._opened, self._tasks))
            if self._session_id is None:
                self._creator_pid = os.getpid()  # the parent had no session yet
            self._reset()
        return background_loop.background()

    def follow(self, task: asyncio.Task[T], promise: Promise[T]) -> None:
        """Pass the outcome of a task to the promise; cancelling the promise cancels the task."""
        self.track(task)
        task.add_done_callback(functools.partial(self._settle, promise))
        loop = task.get_loop()
        promise.add_done_callback(
            lambda done: loop.call_soon_threadsafe(task.cancel) if done.cancelled() else None
        )

    def close_with_session(self, waiting: Closeable) -> None:
        """Close this object too when the session closes. Holds a weak reference."""
        self._dependents.add(waiting)

    def _settle(self, promise: Promise[T], task: asyncio.Task[T]) -> None:
        error = None if task.cancelled() else task.exception()
        # The caller removes the frames of this package (`tinkex.tracebacks`), maybe at once.
        frames = None if error is None else error.__traceback__
        settle(promise, task)
        # Afterwards, so that the caller does not wait for this.
        if error is not None and self._telemetry:
            self._telemetry.record_error(error, frames)

    def track(self, task: asyncio.Task[Any]) -> None:
        """Keep a task, and cancel it when the session closes."""
        self._tasks.add(task)
        background_loop.keep(task)
        task.add_done_callback(self._tasks.discard)

    # -- connecting ------------------------------------------------------------------------------

    async def connect(self) -> Connection:
        """The connection, with the server's configuration; opened once."""
        if self.closed:
            raise closed_error()
        return await self._connected.get()

    async def open(self) -> tuple[Connection, str]:
        """The connection and the session id; creates the session if there is none."""
        connection = await self.connect()
        return connection, await self._opened.get()

    async def _connect(self) -> Connection:
        url, settings, found = self.settings.base_url, self.settings, self.settings._found
        if url == LOCAL or found is not None:
            from tinkex.client import local_server

            tells_waits = settings.wait_notice_s is not None
            if self._server is None and found is not None:
                self._server = await asyncio.to_thread(
                    local_server.hold, found, tells_waits=tells_waits
                )
            elif self._server is None:
                local = replace(local_server.LocalSettings.from_env(), tells_waits=tells_waits)
                self._server = await asyncio.to_thread(local_server.attach, local)
            if self._server is not None and url == LOCAL:
                url = self._server.url
                settings = settings.for_local_server(self._server.running)
        connection = await open_connection(settings, url, self.make_transport)
        # When the session is garbage-collected, its connection is closed.
        weakref.finalize(
            self, close_unreferenced, background_loop.background(), connection, self._server
        ).atexit = False
        return connection

    async def _open(self) -> str:
        connection = await self._connected.get()
        if self._session_id is None:
            answer = await connection.calls.call(
                "POST",
                "create_session",
                CreateSessionRequest(
                    tags=list(self.settings.tags),
                    user_metadata=self._user_metadata,
                    sdk_version=PROTOCOL_VERSION,
                    project_id=self.settings.project_id,
                    display_name=self._display_name,
                ),
                answer=CreateSessionResponse,
                headers=None if self._server is None else {LEASE_HEADER: self._server.lease},
                about="creating a session",
            )
            for level, text in (
                (logging.INFO, answer.info_message),
                (logging.WARNING, answer.warning_message),
                (logging.ERROR, answer.error_message),
            ):
                if text:
                    log.log(level, "%s", text)
            self._session_id = answer.session_id
        work = [
            _send_heartbeats(connection, self._session_id),
            refresh_config(connection, weakref.ref(self)),
        ]
        if self.settings.telemetry:
            self._telemetry = Telemetry(self._session_id, connection.calls)
            connection.telemetry = self._telemetry
            connection.calls.on_rate_limit = self._telemetry.record_rate_limit
            work.append(self._telemetry.send_regularly())
        for each in work:
            # In an empty context: these tasks outlive the operation that opened the session, so its
            # trace span must not leak into them.
            task = asyncio.create_task(each, context=contextvars.Context())
            background_loop.keep(task)
            connection.background_tasks.append(task)
        return self._session_id

    # -- requests --------------------------------------------------------------------------------

    async def submit(
        self,
        connection: Connection,
        path: str,
        body: Any,
        expected: ExpectedResult[R],
        *,
        kind: Kind = Kind.TRAIN,
        observer: QueueObserver | None = None,
    ) -> R:
        """Send a request that returns a request id, and wait for its result."""
        name = instrumentation.operation_name(expected.request_type)
        with instrumentation.measured(name, connection.calls.tracing, self._session_id or ""):
            started = monotonic()
            promised = await connection.calls.call(
                "POST", path, body, answer=UntypedAPIFuture, kind=kind, about=expected.request_type
            )
            return await connection.results.fetch(
                promised.request_id, expected, observer=observer, round_trip_s=monotonic() - started
            )

    async def served_name(self, connection: Connection, base_model: str) -> str:
        """
        The name of a base model on the server.

        A local server that does not serve it yet adds it. Everywhere else this asks nothing.
        """
        server = self._server
        if server is None or not server.adds_models:
            return base_model
        served = await self._served(connection)
        if base_model in served or base_model.partition(":")[0] in served:
            return base_model
        return await asyncio.to_thread(server.add_model, base_model)

    async def serve_base_of(self, connection: Connection, path: str) -> None:
        """Like `served_name`, for the base model of saved weights."""
        if self._server is None or not self._server.adds_models:
            return
        try:
            info = await connection.calls.call(
                "POST",
                "weights_info",
                WeightsInfoRequest(tinker_path=path),
                answer=WeightsInfoResponse,
                kind=Kind.REST,
            )
        except APIStatusError:
            return  # the request that needs the weights says why
        await self.served_name(connection, info.base_model)

    async def _served(self, connection: Connection) -> set[str | None]:
        answer = await connection.calls.call(
            "GET",
            "get_server_capabilities",
            answer=GetServerCapabilitiesResponse,
            kind=Kind.REST,
        )
        return {model.model_name for model in answer.supported_models}

    def cancel_later(self, connection: Connection, request: str | Request) -> None:
        """Cancel an abandoned sample in the background, if the server supports it."""
        if not self.closed:
            connection.cancels.add(request)

    def next_model_number(self) -> int:
        self._check_created_here("models")
        return next(self._model_numbers)

    def next_sampler_number(self) -> int:
        self._check_created_here("samplers")
        return next(self._sampler_numbers)

    def next_loss_number(self) -> int:
        self._check_created_here("custom losses")
        return next(self._loss_numbers)

    def _check_created_here(self, what: str) -> None:
        # The numbers belong to the session. Another process would assign the same ones, and the
        # server would return the objects of the first process.
        if self.joined or self._creator_pid != os.getpid():
            raise RuntimeError(
                f"This process only joined session {self._session_id}; it cannot create {what} "
                "in it. Create a ServiceClient in this process."
            )

    # -- the end ---------------------------------------------------------------------------------

    def close(self, status: CloseStatus, detail: str | None = None) -> Promise[None]:
        """End the session; nothing can be sent afterwards. Later calls have no effect."""
        validation.one_of("status", status, get_args(CloseStatus))
        promise: Promise[None] = Promise()
        if self.closed:
            promise.finish(None)
            return promise
        self.closed = True
        loop = background_loop.background()

        def begin() -> None:
            task = loop.create_task(self._close(status, detail))
            background_loop.keep(task)
            task.add_done_callback(functools.partial(settle, promise))

        loop.call_soon_threadsafe(begin)
        return promise

    async def _close(self, status: CloseStatus, detail: str | None) -> None:
        if self._pid != os.getpid():  # a forked child that did not send anything
            return
        for waiting in list(self._dependents):
            waiting.close()
        for task in list(self._tasks):
            task.cancel()
        connection = self._connected.value
        self._connected.stop()
        self._opened.stop()
        if connection is not None:
            for task in connection.background_tasks:
                task.cancel()
            if self._telemetry is not None:
                await self._telemetry.end()
            if (
                self._session_id is not None
                and not self.joined
                and self._creator_pid == os.getpid()
            ):
                try:
                    async with asyncio.timeout(FINISH_TIMEOUT_S):
                        await connection.calls.call(
                            "POST",
                            f"sessions/{quote(self._session_id, safe=':')}/finish",
                            {"reason": {"type": status}, "detail": detail},
                            answer=type(None),
                            kind=Kind.SESSION,
                            give_up_s=FINISH_RETRY_S,
                        )
                except (TinkerError, TimeoutError) as error:
                    reason = error.summary if isinstance(error, TinkerError) else "no answer"
                    log.warning("the server was not notified of the end of the session: %s", reason)
            await connection.transport.close()
        if self._server is not None:
            self._server.release()


def console_of(url: str) -> str:
    """
    The console of a service: the address before `/sessions`, `/training_runs/RUN` and so on.

    A server of one's own has a console with the same pages. Nothing about its runs may lead to the
    hosted service.
    """
    host = urlsplit(url).hostname or ""
    if host.endswith((".thinkingmachines.dev", ".thinkingmachines.ai")):
        return CONSOLE_URL
    return url


def closed_error() -> RuntimeError:
    return RuntimeError("ServiceClient is closed. Create a new one to continue.")


async def _send_heartbeats(connection: Connection, session_id: str) -> None:
    """Send heartbeats until the server reports that the session has ended."""
    waiting, calls, beat = connection.limits.waiting, connection.calls, object()
    last = monotonic()
    try:
        while True:
            await asyncio.sleep(HEARTBEAT_EVERY_S)
            began = monotonic()
            try:
                await calls.call(
                    "POST",
                    "session_heartbeat",
                    SessionHeartbeatRequest(session_id=session_id),
                    answer=SessionHeartbeatResponse,
                    deadline_s=10.0,
                    give_up_s=0.0,
                )
                last = monotonic()
                waiting.over(beat)
            except APIStatusError as error:
                if error.status_code == 410:
                    log.info("session %s has ended on the server", session_id)
                    return
                _warn_if_overdue(last, error)
            except TinkerError as error:
                if isinstance(error, APIConnectionError) and instrumentation.operations_in_flight():
                    # A server that hangs: a poll alone would find out after 45 s.
                    limit = Limit(last + calls.settings.reconnect_s, "results: TINKEX_RECONNECT_S")
                    notice_s = calls.settings.wait_notice_s
                    waiting.wait(beat, calls.cause(error), limit, since=began, notice_s=notice_s)
                _warn_if_overdue(last, error)
    finally:
        waiting.leave(beat)


def _warn_if_overdue(last: float, error: TinkerError) -> None:
    silent_s = monotonic() - last
    if silent_s > HEARTBEAT_WARN_AFTER_S:
        log.warning("no heartbeat reached the server for %.0f s: %s", silent_s, error.summary)
