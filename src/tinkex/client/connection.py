"""
The connection that the clients of one session share: transport, credential, limits, configuration.

`open_connection` fetches the server's configuration and prepares the credential. Open connections
are closed when their session is garbage-collected, and at the end of the program.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tinkex.client import background_loop
from tinkex.client.auth.credentials import Credential
from tinkex.client.auth.token_exchange import ExchangedToken, sign_in
from tinkex.client.background_loop import after_fork
from tinkex.client.errors import APIStatusError, TinkerError
from tinkex.client.http.backpressure import ServiceLimits, ServiceLimitsTable
from tinkex.client.http.cancellation import CancelQueue
from tinkex.client.http.polling import ResultPoller
from tinkex.client.http.transport import HttpTransport, Transport, max_open_polls
from tinkex.client.http.typed_requests import Calls, client_headers
from tinkex.client.observe import telemetry
from tinkex.client.observe.telemetry import Telemetry
from tinkex.client.settings import PROTOCOL_VERSION, Settings
from tinkex.wire.client_config import (
    ClientConfigRequest,
    ClientConfigResponse,
    ClientDynamicConfigResponse,
)

if TYPE_CHECKING:
    from tinkex.client.local_server import LocalServer

log = logging.getLogger("tinkex.session")

#: The server's configuration is refreshed at most this often.
MIN_REFRESH_S = 10.0

MakeTransport = Callable[[str, Settings], Transport]


def http_transport(base_url: str, settings: Settings) -> Transport:
    return HttpTransport(base_url, ca_bundle=settings.ca_bundle, proxy=settings.proxy)


@dataclass(eq=False)
class Connection:
    """An open connection to a server, in one process."""

    pid: int
    transport: Transport
    calls: Calls
    results: ResultPoller
    limits: ServiceLimits
    #: The source of the `X-API-Key` header.
    credential: Credential
    config: ClientConfigResponse
    dynamic: ClientDynamicConfigResponse
    cancels: CancelQueue
    #: The telemetry reporter, once the session exists and unless telemetry is off.
    telemetry: Telemetry | None = None
    #: Tasks that end with the session.
    background_tasks: list[asyncio.Task[None]] = field(default_factory=list)


async def open_connection(
    settings: Settings, url: str, make_transport: MakeTransport
) -> Connection:
    """Get the server's configuration, prepare the credential, and apply the server's limits."""
    # Imported here: reading the metadata of installed packages is slow.
    from tinkex.client.version import __version__

    transport = make_transport(url, settings)
    _transports.add(transport)
    limits = _limits_of_loop().get((url, settings.limits_key[1]))
    calls = Calls(settings, transport, limits, headers=client_headers(__version__), base_url=url)
    try:
        config = await calls.call(
            "POST",
            "client/config",
            ClientConfigRequest(sdk_version=PROTOCOL_VERSION),
            answer=ClientConfigResponse,
            about="fetching the client configuration",
        )
        credential = await sign_in(settings, calls, config)
        calls = calls.with_credential(credential)
        dynamic = await _fetch_dynamic(calls, ClientDynamicConfigResponse())
    except BaseException:
        await transport.close()
        raise
    limits.billing.max_pause_s = config.billing_exception_max_pause_duration_sec
    limits.samples.size = config.sample_max_concurrent_requests
    if not config.sample_use_retrieve_futures:  # then each sample holds one connection
        limits.samples.size = min(limits.samples.size, max_open_polls())
    limits.sample_bytes.size = config.sample_dispatch_bytes_semaphore_size
    limits.result_bytes.size = config.inflight_response_bytes_semaphore_size
    limits.training_bytes.size = config.fwdbwd_dispatch_bytes_semaphore_size
    connection = Connection(
        pid=os.getpid(),
        transport=transport,
        calls=calls,
        results=ResultPoller(calls),
        limits=limits,
        credential=credential,
        config=config,
        dynamic=dynamic,
        cancels=CancelQueue(calls, background_loop.keep),
    )
    connection.cancels.dynamic = dynamic
    if isinstance(credential, ExchangedToken):
        task = asyncio.create_task(credential.keep_fresh())
        background_loop.keep(task)
        connection.background_tasks.append(task)
    return connection


async def _fetch_dynamic(
    calls: Calls, known: ClientDynamicConfigResponse, *, give_up_s: float | None = None
) -> ClientDynamicConfigResponse:
    """The current dynamic configuration; `known` if the server has none."""
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
        if error.status_code == 404:  # servers before 0.25
            return known
        raise


async def refresh_config(connection: Connection, session: weakref.ref[Any]) -> None:
    """Refresh the dynamic configuration regularly; if that fails, the old one stays in use."""
    while True:
        await asyncio.sleep(max(connection.dynamic.refresh_interval_sec, MIN_REFRESH_S))
        if session() is None:
            return
        try:
            connection.dynamic = await _fetch_dynamic(
                connection.calls, connection.dynamic, give_up_s=0.0
            )
            connection.cancels.dynamic = connection.dynamic
        except TinkerError as error:
            log.debug("dynamic configuration not refreshed: %s", error)


# -- per process ---------------------------------------------------------------------------------

_limits: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, ServiceLimitsTable] = (
    weakref.WeakKeyDictionary()
)
_transports: weakref.WeakSet[Transport] = weakref.WeakSet()
#: Objects that a forked child inherits and must neither use nor close.
inherited: list[Any] = []


@after_fork
def _reset_after_fork() -> None:
    """In a forked child: do not close the parent's connections."""
    inherited.extend(_transports)
    _transports.clear()


def _limits_of_loop() -> ServiceLimitsTable:
    return _limits.setdefault(asyncio.get_running_loop(), ServiceLimitsTable())


def close_unreferenced(
    loop: asyncio.AbstractEventLoop, connection: Connection, server: LocalServer | None
) -> None:
    """Close the connection of a session that was garbage-collected."""
    if server is not None:
        server.release()
    if connection.pid != os.getpid() or loop.is_closed():
        return

    async def stop() -> None:
        for task in connection.background_tasks:
            task.cancel()
        if connection.telemetry is not None:
            await connection.telemetry.end()
        await connection.transport.close()

    def begin() -> None:
        background_loop.keep(loop.create_task(stop()))

    loop.call_soon_threadsafe(begin)


@atexit.register
def _close_at_exit() -> None:
    """Close open connections before the interpreter shuts down, to avoid warnings."""
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
