"""Streams that are not read, or one byte at a time: they delay no one, buffer little, and end."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from server.echo import BASE
from server.hosting import Api, hosted
from server.streaming_executor import StreamingExecutor, sample_body
from server.tenants import new_key, with_key
from waiting import until_async

pytestmark = pytest.mark.anyio

READERS = 12
#: Bytes that the server may buffer for one client: uvicorn's limit and one piece.
MOST_READY = 3 * 2**16


@pytest.fixture
def kept() -> Iterator[list[socket.socket]]:
    """Sockets that are closed at the end of the test."""
    made: list[socket.socket] = []
    yield made
    for one in made:
        one.close()


async def open_unread(
    api: Api, kept: list[socket.socket], body: dict[str, Any], key: str = ""
) -> socket.socket:
    """A stream of which only the headers were read."""
    url = api.http._base_url
    assert url is not None
    made = socket.socket()
    kept.append(made)
    # Small packets and a small window: the kernel buffers about 50 KB, not 4 MB.
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
    """Bytes in the write buffer of each stalled connection."""
    assert api.server is not None
    sizes = [one.transport.get_write_buffer_size() for one in api.server.server_state.connections]
    return [size for size in sizes if size]


async def test_unread_streams_delay_no_one_and_buffer_little(
    anyio_backend: str, tmp_path: Path, kept: list[socket.socket]
) -> None:
    """Both while their samples run and after they have finished."""
    executor = StreamingExecutor()
    most = 60_000
    async with hosted(executor, tmp_path, stall_s=60.0) as api:
        unread = [await open_unread(api, kept, sample_body(most)) for _ in range(READERS)]
        async with dripping(unread[::2]):
            await until_async(lambda: len(ready_bytes(api)) == READERS)
            # Other streams and samples are not delayed.
            async with api.http.post("/api/v1/stream_sample", json=sample_body(2000)) as stream:
                assert b"event: done" in await stream.read()
            quick = await api.post("asample", sample_body(200))
            assert (await api.result(quick.json["request_id"]))["sequences"]
            assert max(ready_bytes(api)) <= MOST_READY
            # The samples finish, although they are not read.
            await until_async(lambda: sum(executor.sampled.values()) >= READERS * most, 60)
            assert api.app is not None
            await until_async(lambda: not len(api.app.state.context.futures))
            assert len(ready_bytes(api)) == READERS
            assert max(ready_bytes(api)) <= MOST_READY
        # A client that reads on gets events of the size of the whole sample.
        loop, greedy = asyncio.get_running_loop(), unread[-1]
        read = 0
        while read < 4 * MOST_READY:
            read += len(piece := await loop.sock_recv(greedy, 2**14))
            assert piece
            assert max(ready_bytes(api)) <= MOST_READY
        for one in unread:
            one.close()
        await until_async(lambda: not ready_bytes(api))


async def test_unread_streams_end_and_free_their_slots(
    anyio_backend: str, tmp_path: Path, kept: list[socket.socket]
) -> None:
    executor = StreamingExecutor()
    key = await new_key(tmp_path, "alice")
    limits = {"stall_s": 0.4, "stream_grace_s": 0.05, "max_samples": READERS}
    async with hosted(executor, tmp_path, **limits) as api, with_key(api, key) as alice:
        assert api.server is not None
        assert api.app is not None
        state = api.server.server_state
        for _ in range(2):  # the same buffer, twice
            unread = [await open_unread(api, kept, sample_body(10**6), key) for _ in range(READERS)]
            refused = await alice.post("stream_sample", sample_body(200))
            assert refused.status == 429
            async with dripping(unread[::2]):
                # Aborted, and their samples cancelled long before their end.
                await until_async(lambda: len(state.connections) <= 1 and not ready_bytes(api))
                await until_async(lambda: not len(api.app.state.context.futures))
        assert executor.cancelled == 2 * READERS
        assert not api.app.state.context.scheduler.replicas(BASE).engines[0].samples._running
        async with alice.http.post("/api/v1/stream_sample", json=sample_body(200)) as stream:
            assert b"event: done" in await stream.read()
