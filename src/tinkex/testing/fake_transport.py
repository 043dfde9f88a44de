"""Where clients meet the fake: a transport in their process, or a real socket."""

from __future__ import annotations

import asyncio
import re
import threading
from typing import TYPE_CHECKING, Self

from tinkex.client.http.transport import (
    DeadlineExceeded,
    Request,
    Response,
    StreamedResponse,
    Unreachable,
)

if TYPE_CHECKING:
    from aiohttp import web

    from tinkex.testing.fake_service import FakeService

MAX_BODY_BYTES = 512 * 1024 * 1024


class FakeTransport:
    """The network, as a client in this process sees it."""

    def __init__(self, service: FakeService) -> None:
        self._service = service
        self._closed = False

    async def send(self, request: Request) -> Response:
        if self._closed:
            raise Unreachable("closed")
        # Every real request takes at least one turn of the loop.
        await asyncio.sleep(0)
        _, _, endpoint = request.url.partition("/api/v1/")
        try:
            async with asyncio.timeout(request.deadline_s):
                status, headers, body = await self._service.answer(
                    request.method, endpoint, request.headers, request.body or b""
                )
        except TimeoutError as error:
            raise DeadlineExceeded(f"no answer within {request.deadline_s:g} s") from error
        return Response(
            status_code=status,
            headers={name.lower(): value for name, value in headers.items()},
            content=body,
            request=request.without_payload(),
        )

    async def stream(self, request: Request) -> StreamedResponse:
        """Whole events one after the other, as a service sends them that draws token by token."""
        answer = await self.send(request)
        pieces = iter(re.split(rb"(?<=\n\n)", answer.content))

        async def read() -> bytes:
            await asyncio.sleep(0)
            return next(filter(None, pieces), b"")

        return StreamedResponse(
            status_code=answer.status_code,
            headers=answer.headers,
            request=answer.request,
            read=read,
            close=lambda: None,
        )

    async def close(self) -> None:
        self._closed = True


class Loopback:
    """A fake service behind a real socket, on a thread of its own; see `FakeService.serve`."""

    def __init__(self, fake: FakeService) -> None:
        self.fake = fake
        #: Where it listens; set once it runs.
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
        from aiohttp import web

        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application(client_max_size=MAX_BODY_BYTES)
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
        from aiohttp import web

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
