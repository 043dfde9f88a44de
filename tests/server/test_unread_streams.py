"""Streams that nobody reads, or a byte at a time: they hold up nobody, fill no memory, and end."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from server.hosting import Api, hosted
from server.streaming_executor import StreamingExecutor, sample_body
from server.tenants import new_key, with_key
from waiting import until_async

pytestmark = pytest.mark.anyio

READERS = 12
#: What the server may have ready for one reader: uvicorn's own limit, and a piece beyond it.
MOST_READY = 3 * 2**16


@pytest.fixture
def kept() -> Iterator[list[socket.socket]]:
    """Sockets that are closed at the end, however that comes."""
    made: list[socket.socket] = []
    yield made
    for one in made:
        one.close()


async def open_unread(
    api: Api, kept: list[socket.socket], body: dict[str, Any], key: str = ""
) -> socket.socket:
    """A stream of which only the head of the answer was read."""
    url = api.http._base_url
    assert url is not None
    made = socket.socket()
    kept.append(made)
    # Small packets and a small window: the system holds some 50 KB of what is not read, not 4 MB.
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    made.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(made, (url.host, url.port))
    data = json.dumps(body).encode()
    head = (
        "POST /api/v1/stream_sample HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        f"X-API-Key: {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    await loop.sock_sendall(made, head.encode() + data)
    async with asyncio.timeout(20):
        begin = await loop.sock_recv(made, 17)
    assert begin == b"HTTP/1.1 200 OK\r\n", begin
    return made


@asynccontextmanager
async def dripping(sockets: list[socket.socket]) -> AsyncIterator[None]:
    """Reads a byte of each now and then, until the block ends."""
    loop = asyncio.get_running_loop()

    async def read(one: socket.socket) -> None:
        try:
            for _ in range(10**6):
                await loop.sock_recv(one, 1)
                await asyncio.sleep(0.05)
        except OSError:
            pass

    tasks = [asyncio.create_task(read(one)) for one in sockets]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def ready_bytes(api: Api) -> list[int]:
    """What waits in this process for each connection that is jammed."""
    assert api.server is not None
    sizes = [one.transport.get_write_buffer_size() for one in api.server.server_state.connections]
    return [size for size in sizes if size]


async def test_streams_that_are_not_read_hold_up_nobody_and_have_little_ready(
    anyio_backend: str, tmp_path: Path, kept: list[socket.socket]
) -> None:
    """Neither while their samples are drawn, nor when there is nothing left but to send it all."""
    executor = StreamingExecutor()
    most = 60_000
    async with hosted(executor, tmp_path, stall_s=60.0) as api:
        unread = [await open_unread(api, kept, sample_body(most)) for _ in range(READERS)]
        async with dripping(unread[::2]):
            await until_async(lambda: len(ready_bytes(api)) == READERS)
            # Others are not held up: their streams, and their samples.
            async with api.http.post("/api/v1/stream_sample", json=sample_body(2000)) as stream:
                assert b"event: done" in await stream.read()
            quick = await api.post("asample", sample_body(200))
            assert (await api.result(quick.json["request_id"]))["sequences"]
            assert max(ready_bytes(api)) <= MOST_READY
            # The samples come to their ends, though nobody listens.
            await until_async(lambda: sum(executor.sampled.values()) >= READERS * most, 60)
            assert api.app is not None
            await until_async(lambda: not len(api.app.state.context.futures))
            assert len(ready_bytes(api)) == READERS
            assert max(ready_bytes(api)) <= MOST_READY
        # One that reads on for a while comes to events of the size of the whole sample.
        loop, greedy = asyncio.get_running_loop(), unread[-1]
        read = 0
        while read < 4 * MOST_READY:
            read += len(piece := await loop.sock_recv(greedy, 2**14))
            assert piece
            assert max(ready_bytes(api)) <= MOST_READY
        for one in unread:
            one.close()
        await until_async(lambda: not ready_bytes(api))


async def test_streams_that_are_not_read_end_and_free_their_places(
    anyio_backend: str, tmp_path: Path, kept: list[socket.socket]
) -> None:
    executor = StreamingExecutor()
    key = await new_key(tmp_path, "alice")
    limits = {"stall_s": 0.4, "stream_grace_s": 0.05, "max_samples": READERS}
    async with hosted(executor, tmp_path, **limits) as api, with_key(api, key) as alice:
        assert api.server is not None
        assert api.app is not None
        state = api.server.server_state
        for _ in range(2):  # the same room, twice
            unread = [await open_unread(api, kept, sample_body(10**6), key) for _ in range(READERS)]
            refused = await alice.post("stream_sample", sample_body(200))
            assert refused.status == 429
            async with dripping(unread[::2]):
                # Cut off, and their samples given up long before they are drawn.
                await until_async(lambda: len(state.connections) <= 1 and not ready_bytes(api))
                await until_async(lambda: not len(api.app.state.context.futures))
        assert executor.cancelled == 2 * READERS
        assert not api.app.state.context.dispatcher._samples._running
        async with alice.http.post("/api/v1/stream_sample", json=sample_body(200)) as stream:
            assert b"event: done" in await stream.read()
