"""`LimitedProtocol` needs nothing of the protocol behind it but asyncio's interface."""

import ast
import asyncio
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest

from tinkex.server.api import connection_limits
from tinkex.server.api.connection_limits import (
    MAX_HEAD_BYTES,
    MAX_PIPELINED,
    LimitedProtocol,
    ReportingApp,
    connection_of,
)
from waiting import until_async

pytestmark = pytest.mark.anyio

GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 100000\r\n\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"


class Inner(asyncio.Protocol):
    """Has the methods of an asyncio protocol only, and remembers their calls."""

    def __init__(self, *, app_state: dict[str, Any]) -> None:
        self.__calls: list[tuple[str, Any]] = []
        app_state["calls"] = self.__calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.__calls.append(("made", transport))

    def data_received(self, data: bytes) -> None:
        self.__calls.append(("data", data))

    def pause_writing(self) -> None:
        self.__calls.append(("pause", None))

    def resume_writing(self) -> None:
        self.__calls.append(("resume", None))

    def connection_lost(self, exc: Exception | None) -> None:
        self.__calls.append(("lost", exc))


class FakeTransport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.unread = 0
        self.closed = self.aborted = False

    def write(self, data: Any) -> None:
        self.written += data

    def get_write_buffer_size(self) -> int:
        return self.unread

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.aborted = True


class Connection:
    """A connection with limits, and what the server behind it sees."""

    def __init__(self, *, head_s: float = 0.0, stall_s: float = 0.0) -> None:
        self.transport = FakeTransport()
        self.state: dict[str, Any] = {}

        def make(*, app_state: dict[str, Any]) -> Inner:
            inner = Inner(app_state=app_state)
            self.state = app_state.copy()
            return inner

        self.protocol = LimitedProtocol(make, head_s=head_s, stall_s=stall_s, app_state={})
        self.protocol.connection_made(self.transport)

    @property
    def calls(self) -> list[tuple[str, Any]]:
        calls: list[tuple[str, Any]] = self.state["calls"]
        return calls

    @property
    def received(self) -> bytes:
        return b"".join(value for name, value in self.calls if name == "data")

    async def answer(self, headers: list[tuple[bytes, bytes]] | None = None) -> Any:
        """Run a request through an application, as uvicorn would."""
        seen: dict[str, Any] = {}

        async def app(scope: Any, receive: Any, send: Any) -> None:
            seen.update(scope)

        async def nothing(message: Any = None) -> Any:
            return {}

        scope = {"type": "http", "state": self.state.copy(), "headers": headers or []}
        await ReportingApp(app)(scope, nothing, nothing)
        return seen


def test_neither_uvicorn_nor_private_attributes_of_others_are_used() -> None:
    tree = ast.parse(Path(connection_limits.__file__).read_text())
    modules = {
        name.name if isinstance(node, ast.Import) else str(node.module)
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in node.names
    }
    assert not any(name.startswith("uvicorn") for name in modules)
    private = {
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr.startswith("_")
    }
    assert {name for name in private if not name.startswith("self._")} == set()
    assert not any(name.startswith("self._inner._") for name in private)


async def test_the_inner_protocol_gets_what_the_transport_reports() -> None:
    connection = Connection()
    connection.protocol.data_received(GET[:10])
    connection.protocol.data_received(GET[10:])
    connection.protocol.pause_writing()
    connection.protocol.resume_writing()
    assert connection.protocol.eof_received() is None
    connection.protocol.connection_lost(OSError())
    assert connection.calls == [
        ("made", connection.transport),
        ("data", GET[:10]),
        ("data", GET[10:]),
        ("pause", None),
        ("resume", None),
        # uvicorn stops its timers only if there was no error.
        ("lost", None),
    ]


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET /" + b"a" * MAX_HEAD_BYTES + b" HTTP/1.1\r\nHost: a\r\n\r\n", b"431"),
        (GET[:-2] + b"a: " + b"a" * MAX_HEAD_BYTES + b"\r\n\r\n", b"431"),
        (b"GET / HTTP/1.1\r\n\r\n", b"400"),
        (CHUNKED.replace(b"chunked", b"gzip, chunked"), b"400"),
    ],
)
async def test_a_refused_head_never_reaches_the_inner_protocol(data: bytes, status: bytes) -> None:
    connection = Connection()
    connection.protocol.data_received(data)
    connection.protocol.data_received(GET)
    assert connection.transport.written.startswith(b"HTTP/1.1 " + status)
    assert connection.transport.closed
    assert connection.received == b""


async def test_a_refusal_is_not_sent_as_the_response_to_an_earlier_request() -> None:
    connection = Connection()
    connection.protocol.data_received(GET)
    connection.protocol.data_received(b"GET / HTTP/1.1\r\n\r\n")
    assert connection.transport.closed
    assert not connection.transport.written


async def test_a_head_without_end_is_refused() -> None:
    connection = Connection()
    connection.protocol.data_received(GET[:-2] + b"a: ")
    for _ in range(2 * MAX_HEAD_BYTES // 1000):
        connection.protocol.data_received(b"a" * 1000)
    assert connection.transport.written.startswith(b"HTTP/1.1 431")
    assert len(connection.received) < MAX_HEAD_BYTES + 2000


async def test_bodies_of_any_length_are_passed_on() -> None:
    connection = Connection()
    connection.protocol.data_received(CHUNKED)
    for _ in range(10):
        connection.protocol.data_received(b"5000\r\n" + b"a" * 0x5000 + b"\r\n")
    connection.protocol.data_received(b"0\r\n\r\n")
    assert not connection.transport.closed
    assert len(connection.received) > 2 * MAX_HEAD_BYTES


async def test_pipelined_requests_are_limited_until_they_are_answered() -> None:
    connection = Connection()
    for _ in range(2 * MAX_PIPELINED):
        connection.protocol.data_received(GET)
        await connection.answer()
    assert not connection.transport.closed
    for _ in range(MAX_PIPELINED + 1):
        connection.protocol.data_received(GET)
    assert not connection.transport.closed
    connection.protocol.data_received(GET)
    assert connection.transport.closed


async def test_the_application_sees_no_trailers() -> None:
    connection = Connection()
    connection.protocol.data_received(CHUNKED + b"0\r\na: b\r\n\r\n")
    headers = [(b"host", b"a"), (b"transfer-encoding", b"chunked")]
    assert (await connection.answer([*headers, (b"a", b"b")]))["headers"] == headers


@pytest.mark.parametrize(
    ("data", "unread", "is_aborted"),
    [
        (b"", 0, True),
        (GET[:10], 0, True),
        (POST, 0, True),
        (POST + b"a" * 1000, 0, True),
        (GET, 0, False),  # the server works
        (GET, 1000, False),
    ],
)
async def test_a_connection_without_progress_is_aborted(
    data: bytes, unread: int, is_aborted: bool
) -> None:
    connection = Connection(head_s=0.05, stall_s=0.05)
    connection.transport.unread = unread
    connection.protocol.data_received(data)
    if is_aborted:
        await until_async(lambda: connection.transport.aborted)
    else:
        await asyncio.sleep(0.2)
        assert not connection.transport.aborted
    connection.protocol.connection_lost(None)


@pytest.mark.parametrize("paused", [True, False])
async def test_an_unread_answer_is_aborted_and_an_idle_connection_is_not(paused: bool) -> None:
    connection = Connection(head_s=0.05, stall_s=0.05)
    connection.protocol.data_received(GET)
    if not paused:
        await connection.answer()
        await asyncio.sleep(0.2)
        assert not connection.transport.aborted
    else:
        connection.protocol.pause_writing()
    connection.transport.unread = 1000
    await until_async(lambda: connection.transport.aborted)
    connection.protocol.connection_lost(None)


async def test_a_started_head_after_an_answer_has_a_time_limit() -> None:
    connection = Connection(head_s=0.05, stall_s=0.05)
    # The next head begins before the application returns.
    connection.protocol.data_received(GET + GET[:10])
    await connection.answer()
    await until_async(lambda: connection.transport.aborted)
    connection.protocol.connection_lost(None)


async def test_a_disconnect_is_reported_until_the_application_has_finished() -> None:
    connection, calls = Connection(), []
    found = connection_of({"type": "http", "state": connection.state})
    assert found is connection.protocol
    connection.protocol.data_received(GET)
    connection.protocol.on_disconnect = lambda: calls.append("gone")
    connection.protocol.connection_lost(OSError())
    assert calls == ["gone"]
    connection = Connection()
    connection.protocol.data_received(GET)
    connection.protocol.on_disconnect = lambda: calls.append("gone")
    await connection.answer()
    connection.protocol.connection_lost(None)
    assert calls == ["gone"]


async def test_a_lost_connection_is_freed_without_a_garbage_collection() -> None:
    connection = Connection(head_s=30, stall_s=30)
    connection.protocol.data_received(GET)
    await connection.answer()
    connection.protocol.connection_lost(None)
    freed = weakref.ref(connection.protocol)
    gc.disable()
    try:
        del connection
        assert freed() is None
    finally:
        gc.enable()
