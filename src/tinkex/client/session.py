"""
What the clients of one program share: connection, settings from the server, session, heartbeat.

Everything here runs on the background loop, so it needs no locks. After a fork the child builds
its own connection on its own loop; the session id stays the same.
"""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import functools
import itertools
import logging
import os
import weakref
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar, get_args
from urllib.parse import quote

from pydantic import BaseModel

from tinkex.client import background_loop, validation
from tinkex.client.auth.credentials import Credential
from tinkex.client.auth.token_exchange import Exchanged, sign_in
from tinkex.client.errors import APIStatusError, TinkerError
from tinkex.client.futures import Promise, settle
from tinkex.client.http.api_calls import Calls, client_headers
from tinkex.client.http.backpressure import Lane, Lanes
from tinkex.client.http.cancellation import Cancels
from tinkex.client.http.polling import QueueObserver, Results, Wanted
from tinkex.client.http.transport import HttpTransport, Kind, Request, Transport, most_polls
from tinkex.client.observe import instrumentation, telemetry
from tinkex.client.observe.telemetry import Telemetry
from tinkex.client.settings import LOCAL, PROTOCOL_VERSION, Settings
from tinkex.wire.base import Payload
from tinkex.wire.client_config import (
    ClientConfigRequest,
    ClientConfigResponse,
    ClientDynamicConfigResponse,
)
from tinkex.wire.futures import UntypedAPIFuture
from tinkex.wire.sessions import (
    CreateSessionRequest,
    CreateSessionResponse,
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
#: Beats may fail for this long before the user hears of it.
HEARTBEAT_QUIET_S = 120.0
#: Saying goodbye must not hold up a program whose server is gone.
FINISH_GIVE_UP_S = 10.0
#: The server's wishes are asked for again no sooner than this.
LEAST_REFRESH_S = 10.0

CloseStatus = Literal["success", "errored", "interrupted"]
MakeTransport = Callable[[str, Settings], Transport]


class Closeable(Protocol):
    """Something of a session's that has work waiting."""

    def close(self) -> None: ...


def http_transport(base_url: str, settings: Settings) -> Transport:
    return HttpTransport(base_url, ca_bundle=settings.ca_bundle, proxy=settings.proxy)


@dataclass(eq=False)
class Connection:
    """A server that has answered, as one process sees it."""

    pid: int
    transport: Transport
    calls: Calls
    results: Results
    lane: Lane
    #: Who is asking.
    credential: Credential
    config: ClientConfigResponse
    dynamic: ClientDynamicConfigResponse
    cancels: Cancels
    #: Reports about the session, once there is one and unless switched off.
    telemetry: Telemetry | None = None
    #: Background work that ends with the session.
    chores: list[asyncio.Task[None]] = field(default_factory=list)


class Once(Generic[T]):
    """Work that many may wait for and that is done once; a failure is told to all, then forgotten."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._work = work
        self._task: asyncio.Task[T] | None = None

    async def get(self) -> T:
        if self._task is None or (self._task.done() and self._failed()):
            self._task = asyncio.create_task(self._work())
            background_loop.keep(self._task)
        # Shielded: one who stops waiting does not stop it for the others.
        return await asyncio.shield(self._task)

    @property
    def value(self) -> T | None:
        task = self._task
        return task.result() if task is not None and task.done() and not self._failed() else None

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _failed(self) -> bool:
        task = self._task
        return task is not None and (task.cancelled() or task.exception() is not None)


class Session:
    """
    The shared part of a `ServiceClient` and everything made from it.

    Nothing is sent before the first operation that needs it.
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
        #: A session that another process created and that this one only joins.
        self.joined = session_id is not None
        self._session_id = session_id
        self._user_metadata = dict(user_metadata or {})
        self._display_name = display_name
        self.make_transport = make_transport
        self._server: LocalServer | None = None
        self._home = os.getpid()
        self._model_numbers = itertools.count()
        self._sampler_numbers = itertools.count()
        self._loss_numbers = itertools.count()
        #: Custom losses of this session: digest -> name.
        self.losses: dict[str, str] = {}
        self._begin()

    def __repr__(self) -> str:
        return f"<Session {self._session_id or 'not started'} at {self.settings.base_url}>"

    def _begin(self) -> None:
        """Nothing connected yet, in this process."""
        self._pid = os.getpid()
        self._telemetry: Telemetry | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closing_too: weakref.WeakSet[Closeable] = weakref.WeakSet()
        self._connected = Once(self._connect)
        self._opened = Once(self._open)

    @property
    def session_id(self) -> str | None:
        """None until the first operation that needs a session."""
        return self._session_id

    @property
    def telemetry(self) -> Telemetry | None:
        """What reports about this session; None before there is one, or switched off."""
        return self._telemetry

    @property
    def tracing(self) -> Tracing | None:
        """What makes spans of operations, where the settings ask for it."""
        return instrumentation.tracing() if self.settings.otel else None

    # -- running work ----------------------------------------------------------------------------

    def run(self, work: Coroutine[Any, Any, T], *, yields_to_waiter: bool = False) -> Promise[T]:
        """Start `work` on the background loop. It is cancelled when the session closes."""
        promise: Promise[T] = Promise(yields_to_waiter=yields_to_waiter)
        self.start(promise, lambda: asyncio.ensure_future(work), dropped=work.close)
        return promise

    def start(
        self,
        promise: Promise[T],
        make: Callable[[], asyncio.Task[T]],
        *,
        dropped: Callable[[], None] | None = None,
    ) -> None:
        """Make a task on the background loop and let the promise have its outcome."""
        try:
            loop = self.loop()
        except RuntimeError:
            if dropped is not None:
                dropped()
            raise

        def begin() -> None:
            try:
                task = make()
            except BaseException as error:  # noqa: BLE001 (raised where the result is asked for)
                # Nobody sees what a callback of the loop raises: the caller would wait forever.
                promise.fail(error)
            else:
                self.follow(task, promise)

        loop.call_soon_threadsafe(begin)

    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop that this session's work runs on, if it may still do any."""
        if self.closed:
            raise closed()
        if self._pid != os.getpid():
            _inherited.append((self._connected, self._opened, self._tasks))
            if self._session_id is None:
                self._home = os.getpid()  # the parent had no session yet: this one is ours
            self._begin()
        return background_loop.background()

    def follow(self, task: asyncio.Task[T], promise: Promise[T]) -> None:
        """Give the promise the outcome of a task of this session; cancelled, it cancels the task."""
        self.track(task)
        task.add_done_callback(functools.partial(settle, promise))
        task.add_done_callback(self._note_failure)
        loop = task.get_loop()
        promise.add_done_callback(
            lambda done: loop.call_soon_threadsafe(task.cancel) if done.cancelled() else None
        )

    def at_close(self, waiting: Closeable) -> None:
        """Close this too when the session closes. Kept weakly."""
        self._closing_too.add(waiting)

    def _note_failure(self, task: asyncio.Task[Any]) -> None:
        # After the promise has its outcome: whoever waits is not kept waiting for this.
        if self._telemetry and not task.cancelled() and (error := task.exception()):
            self._telemetry.note_error(error)

    def track(self, task: asyncio.Task[Any]) -> None:
        """Keep a task, and cancel it when the session closes."""
        self._tasks.add(task)
        background_loop.keep(task)
        task.add_done_callback(self._tasks.discard)

    # -- connecting ------------------------------------------------------------------------------

    async def connect(self) -> Connection:
        """The server's answer to "how shall I talk to you?", asked once."""
        if self.closed:
            raise closed()
        return await self._connected.get()

    async def open(self) -> tuple[Connection, str]:
        """A connection and the id of the session, which is created first if need be."""
        connection = await self.connect()
        return connection, await self._opened.get()

    async def _connect(self) -> Connection:
        # Here, because reading the metadata of distributions takes a while to load.
        from tinkex.client.version import __version__

        url = self.settings.base_url
        if url == LOCAL:
            from tinkex.client import local_server

            if self._server is None:
                self._server = await asyncio.to_thread(local_server.attach)
            url = self._server.url
        transport = self.make_transport(url, self.settings)
        _transports.add(transport)
        lane = _lanes_here().get((url, self.settings.lane[1]))
        calls = Calls(
            self.settings, transport, lane, headers=client_headers(__version__), base_url=url
        )
        try:
            config = await calls.call(
                "POST",
                "client/config",
                ClientConfigRequest(sdk_version=PROTOCOL_VERSION),
                answer=ClientConfigResponse,
                about="asking for the client configuration",
            )
            credential = await sign_in(self.settings, calls, config)
            calls = calls.asking_as(credential)
            dynamic = await self._fetch_dynamic(calls, ClientDynamicConfigResponse())
        except BaseException:
            await transport.close()
            raise
        lane.billing.patience_s = config.billing_exception_max_pause_duration_sec
        lane.samples.size = config.sample_max_concurrent_requests
        if not config.sample_use_retrieve_futures:  # then each sample holds a connection
            lane.samples.size = min(lane.samples.size, most_polls())
        lane.sample_bytes.size = config.sample_dispatch_bytes_semaphore_size
        lane.result_bytes.size = config.inflight_response_bytes_semaphore_size
        lane.training_bytes.size = config.fwdbwd_dispatch_bytes_semaphore_size
        connection = Connection(
            pid=os.getpid(),
            transport=transport,
            calls=calls,
            results=Results(calls),
            lane=lane,
            credential=credential,
            config=config,
            dynamic=dynamic,
            cancels=Cancels(calls, background_loop.keep),
        )
        connection.cancels.dynamic = dynamic
        if isinstance(credential, Exchanged):
            chore = asyncio.create_task(credential.keep_fresh())
            background_loop.keep(chore)
            connection.chores.append(chore)
        # A session that nobody refers to any more takes its connection with it.
        weakref.finalize(
            self, _abandon, background_loop.background(), connection, self._server
        ).atexit = False
        return connection

    async def _fetch_dynamic(
        self, calls: Calls, known: ClientDynamicConfigResponse, *, give_up_s: float | None = None
    ) -> ClientDynamicConfigResponse:
        try:
            return await calls.call(
                "POST",
                "client/dynamic_config",
                ClientConfigRequest(sdk_version=PROTOCOL_VERSION),
                answer=ClientDynamicConfigResponse,
                deadline_s=10.0,
                give_up_s=give_up_s,
            )
        except APIStatusError as error:
            if error.status_code == 404:  # servers before 0.25 have none
                return known
            raise

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
        chores = [
            _beat(connection, self._session_id),
            _refresh(connection, weakref.ref(self)),
        ]
        if self.settings.telemetry:
            self._telemetry = Telemetry(self._session_id, connection.calls)
            connection.telemetry = self._telemetry
            connection.calls.when_busy = self._telemetry.note_busy
            chores.append(self._telemetry.send_regularly())
        for chore in chores:
            # Of nobody's operation, though somebody's operation was the first.
            task = asyncio.create_task(chore, context=contextvars.Context())
            background_loop.keep(task)
            connection.chores.append(task)
        return self._session_id

    # -- requests --------------------------------------------------------------------------------

    async def submit(
        self,
        connection: Connection,
        path: str,
        body: Any,
        wanted: Wanted[R],
        *,
        kind: Kind = Kind.TRAIN,
        observer: QueueObserver | None = None,
    ) -> R:
        """Send a request that answers with a promise, and wait for what was promised."""
        name = instrumentation.named(wanted.request_type)
        with instrumentation.during(name, connection.calls.tracing, self._session_id or ""):
            started = monotonic()
            promised = await connection.calls.call(
                "POST", path, body, answer=UntypedAPIFuture, kind=kind, about=wanted.request_type
            )
            return await connection.results.fetch(
                promised.request_id, wanted, observer=observer, round_trip_s=monotonic() - started
            )

    def cancel_later(self, connection: Connection, request: str | Request) -> None:
        """Tell the server that nobody wants this sample any more, if it cares to know."""
        if not self.closed:
            connection.cancels.later(request)

    def next_model_number(self) -> int:
        self._check_own("models")
        return next(self._model_numbers)

    def next_sampler_number(self) -> int:
        self._check_own("samplers")
        return next(self._sampler_numbers)

    def next_loss_number(self) -> int:
        self._check_own("custom losses")
        return next(self._loss_numbers)

    def _check_own(self, what: str) -> None:
        # Numbers are the session's; another process would give the same ones again, and the
        # server would answer with what the first process made.
        if self.joined or self._home != os.getpid():
            raise RuntimeError(
                f"This process only joined session {self._session_id}; it cannot create {what} "
                "in it. Create a ServiceClient of its own here."
            )

    # -- the end ---------------------------------------------------------------------------------

    def close(self, status: CloseStatus, detail: str | None = None) -> Promise[None]:
        """End the session. The first call wins; nothing can be sent afterwards."""
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
        if self._pid != os.getpid():  # a forked child that never sent anything
            return
        for waiting in list(self._closing_too):
            waiting.close()
        for task in list(self._tasks):
            task.cancel()
        connection = self._connected.value
        self._connected.stop()
        self._opened.stop()
        if connection is not None:
            for chore in connection.chores:
                chore.cancel()
            if self._telemetry is not None:
                await self._telemetry.end()
            if self._session_id is not None and not self.joined and self._home == os.getpid():
                try:
                    async with asyncio.timeout(FINISH_GIVE_UP_S):
                        await connection.calls.call(
                            "POST",
                            f"sessions/{quote(self._session_id, safe=':')}/finish",
                            {"reason": {"type": status}, "detail": detail},
                            answer=type(None),
                            kind=Kind.SESSION,
                        )
                except (TinkerError, TimeoutError) as error:
                    log.warning("the server was not told that the session ended: %s", error)
            await connection.transport.close()
        if self._server is not None:
            self._server.release()


def closed() -> RuntimeError:
    return RuntimeError("ServiceClient is closed. Create a new one to go on.")


async def _beat(connection: Connection, session_id: str) -> None:
    """Tell the server that we are alive, until it says that the session is over."""
    last = monotonic()
    while True:
        await asyncio.sleep(HEARTBEAT_EVERY_S)
        try:
            await connection.calls.call(
                "POST",
                "session_heartbeat",
                SessionHeartbeatRequest(session_id=session_id),
                answer=SessionHeartbeatResponse,
                deadline_s=10.0,
                give_up_s=0.0,
            )
            last = monotonic()
        except APIStatusError as error:
            if error.status_code == 410:
                log.info("session %s has ended on the server", session_id)
                return
            _late_beat(last, error)
        except TinkerError as error:
            _late_beat(last, error)


def _late_beat(last: float, error: TinkerError) -> None:
    silent_s = monotonic() - last
    if silent_s > HEARTBEAT_QUIET_S:
        log.warning("no heartbeat reached the server for %.0f s: %s", silent_s, error)


async def _refresh(connection: Connection, session: weakref.ref[Session]) -> None:
    """Keep the server's wishes current; an old wish is better than none."""
    while True:
        await asyncio.sleep(max(connection.dynamic.refresh_interval_sec, LEAST_REFRESH_S))
        here = session()
        if here is None:
            return
        try:
            connection.dynamic = await here._fetch_dynamic(
                connection.calls, connection.dynamic, give_up_s=0.0
            )
            connection.cancels.dynamic = connection.dynamic
        except TinkerError as error:
            log.debug("dynamic configuration not refreshed: %s", error)
        del here


# -- per process -------------------------------------------------------------------------------------

_lanes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Lanes] = weakref.WeakKeyDictionary()
_transports: weakref.WeakSet[Transport] = weakref.WeakSet()
#: What a forked child got from its parent and must neither use nor tear down.
_inherited: list[Any] = []


def _forget() -> None:
    """In a forked child: closing a connection of the parent's loop would disturb the parent."""
    _inherited.extend(_transports)
    _transports.clear()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forget)


def _lanes_here() -> Lanes:
    return _lanes.setdefault(asyncio.get_running_loop(), Lanes())


def _abandon(
    loop: asyncio.AbstractEventLoop, connection: Connection, server: LocalServer | None
) -> None:
    if server is not None:
        server.release()
    if connection.pid != os.getpid() or loop.is_closed():
        return

    async def stop() -> None:
        for chore in connection.chores:
            chore.cancel()
        if connection.telemetry is not None:
            await connection.telemetry.end()
        await connection.transport.close()

    def begin() -> None:
        background_loop.keep(loop.create_task(stop()))

    loop.call_soon_threadsafe(begin)


@atexit.register
def _hang_up() -> None:
    """Close what is still open, so that nothing complains while the interpreter is torn down."""
    transports = list(_transports)
    if not transports:
        return

    async def stop() -> None:
        await telemetry.end_all()
        await asyncio.gather(*(each.close() for each in transports), return_exceptions=True)

    try:
        asyncio.run_coroutine_threadsafe(stop(), background_loop.background()).result(2.0)
    except Exception:
        log.debug("connections were not closed in time", exc_info=True)
