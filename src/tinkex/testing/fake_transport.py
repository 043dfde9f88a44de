"""How clients reach the fake: through a transport in the same process, or a real socket."""

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
    """A transport that calls the fake in this process."""

    def __init__(self, service: FakeService) -> None:
        self._service = service
        self._closed = False

    async def send(self, request: Request) -> Response:
        if self._closed:
            raise Unreachable("closed")
        # Yield once, as every real request does.
        await asyncio.sleep(0)
        _, _, endpoint = request.url.partition("/api/v1/")
        try:
            async with asyncio.timeout(request.deadline_s):
                status, headers, body = await self._service.answer(
                    request.method, endpoint, request.headers, request.body or b""
                )
        except TimeoutError as error:
            raise DeadlineExceeded(f"no response within {request.deadline_s:g} s") from error
        return Response(
            status_code=status,
            headers={name.lower(): value for name, value in headers.items()},
            content=body,
            request=request.without_payload(),
        )

    async def stream(self, request: Request) -> StreamedResponse:
        """Send events one by one, as a real service does."""
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
    """Serves a fake on a local socket, in its own thread; see `FakeService.serve`."""

    def __init__(self, fake: FakeService) -> None:
        self.fake = fake
        #: URL of the server; set when it is ready.
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
