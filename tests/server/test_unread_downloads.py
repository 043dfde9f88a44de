"""Unread downloads: little is buffered, and their files are closed in the end."""

import asyncio
import gc
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from server.echo import EchoExecutor
from server.hosting import Api, hosted
from tinkex.server.api.downloads import PIECE_BYTES
from tinkex.wire.proto.frames_pb2 import Order
from waiting import until_async

pytestmark = pytest.mark.anyio

READERS = 6
LARGE = 8 * PIECE_BYTES


class Large(EchoExecutor):
    """Its checkpoints have a file larger than any socket buffer."""

    def _do(self, work: Order) -> bytes:
        done = super()._do(work)
        if work.HasField("save"):
            (Path(work.save.folder) / "large").write_bytes(bytes(LARGE))
        return done


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Without garbage collection: on a server it is rare."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def kept() -> Iterator[list[socket.socket]]:
    made: list[socket.socket] = []
    yield made
    for one in made:
        one.close()


async def a_link(api: Api, model: str) -> str:
    """The URL of an archive."""
    saved = await api.result(await api.step("save_weights", model_id=model, seq_id=1, path="large"))
    run, _, name = str(saved["path"]).removeprefix("tinker://").partition("/")
    path = f"/api/v1/training_runs/{run}/checkpoints/{name}/archive"
    async with api.http.get(path, allow_redirects=False) as sent_on:
        assert sent_on.status == 302
        place = urlsplit(sent_on.headers["Location"])
    return f"{place.path}?{place.query}"


def files_open(folder: Path) -> int:
    """Open checkpoint files of this process."""
    found = 0
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{descriptor}").startswith(
                str(folder / "checkpoints")
            )
        except FileNotFoundError:
            continue
    return found


async def test_an_unread_download_holds_one_piece_and_ends(
    anyio_backend: str, tmp_path: Path, kept: list[socket.socket], no_collection: None
) -> None:
    async with hosted(Large(), tmp_path, stall_s=1.0) as api:
        assert api.server is not None
        state = api.server.server_state
        link = await a_link(api, await api.model())
        url = api.http._base_url
        assert url is not None
        loop = asyncio.get_running_loop()
        for _ in range(READERS):
            one = socket.socket()
            kept.append(one)
            # Small packets and a small window: the kernel buffers little.
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            one.setblocking(False)
            await loop.sock_connect(one, (url.host, url.port))
            head = f"GET {link} HTTP/1.1\r\nHost: {url.host}:{url.port}\r\n\r\n"
            await loop.sock_sendall(one, head.encode())
            assert await loop.sock_recv(one, 15) == b"HTTP/1.1 200 OK"

        def waiting() -> list[int]:
            return [one.transport.get_write_buffer_size() for one in state.connections]

        await until_async(lambda: sum(size > 0 for size in waiting()) == READERS)
        assert files_open(tmp_path) >= READERS
        assert max(waiting()) <= PIECE_BYTES + 2**17
        # Aborted after the stall timeout.
        await until_async(lambda: len(state.connections) <= 1 and not state.tasks)
        await until_async(lambda: not files_open(tmp_path), 5)
        # The same link works for a client that reads.
        async with api.http.get(link) as whole:
            assert whole.status == 200
            assert len(await whole.read()) > LARGE
        await until_async(lambda: not files_open(tmp_path), 5)
