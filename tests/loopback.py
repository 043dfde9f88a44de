"""The fake service of `tinkex.testing` on a real socket, for clients in other processes."""

import asyncio
import threading
from typing import Self

from aiohttp import web

from tinkex.client.transport import Unreachable
from tinkex.testing import FakeService


class Loopback:
    """The fake service behind a real socket, on a thread of its own."""

    def __init__(self, fake: FakeService) -> None:
        self.fake = fake
        self.url = ""
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application(client_max_size=2**28)
        app.router.add_route("*", "/{tail:.*}", self._answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        self._ready.set()
        await self._stop.wait()
        await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        _, _, endpoint = request.path.partition("/api/v1/")
        try:
            status, headers, body = await self.fake.answer(
                request.method, endpoint, request.headers, await request.read()
            )
        except Unreachable:
            assert request.transport is not None
            request.transport.abort()
            raise web.HTTPInternalServerError from None
        return web.Response(status=status, headers=headers, body=body)
