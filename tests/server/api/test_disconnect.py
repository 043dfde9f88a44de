"""A poll ends when its client disconnects, not when it times out."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from uvicorn.protocols.http.h11_impl import H11Protocol

from server.api.test_owner_limits import sample, sampler
from server.echo import EchoExecutor
from server.hosting import Api, hosted
from tinkex.server import web_process
from waiting import until_async

pytestmark = pytest.mark.anyio

#: Far longer than a test may take.
HELD_S = 50.0
CLIENTS = 20


def held(api: Api) -> int:
    """Requests that the server is handling."""
    assert api.server is not None
    return len(api.server.server_state.tasks)


async def polls(api: Api, path: str, body: Any) -> list["asyncio.Task[Any]"]:
    requested = [asyncio.create_task(api.post(path, body)) for _ in range(CLIENTS)]
    await until_async(lambda: held(api) == CLIENTS)
    return requested


@pytest.mark.parametrize("parser", ["httptools", "h11"])
async def test_polls_end_when_their_client_disconnects(
    parser: str, echo: EchoExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if parser == "h11":
        monkeypatch.setattr(web_process, "HttpToolsProtocol", H11Protocol)
    async with hosted(echo, tmp_path, long_poll_s=HELD_S) as api:
        mine = await sampler(api)
        echo.open.clear()
        made = await api.post("asample", sample(mine, 0))
        request_id = made.json["request_id"]
        assert api.app is not None
        futures = api.app.state.context.futures
        target = {"sampling_session_id": mine, "cloned_sampler_id": 0}
        both = (
            ("retrieve_future", {"request_id": request_id}),
            ("retrieve_futures", {"target": target}),
        )
        for path, body in both:
            requested = await polls(api, path, body)
            assert futures.is_polled(request_id) is (path == "retrieve_future")
            stays = requested.pop()
            for task in requested:
                task.cancel()
            await asyncio.gather(*requested, return_exceptions=True)
            await until_async(lambda: held(api) == 1)
            assert futures.is_polled(request_id) is (path == "retrieve_future")
            assert not stays.done()
            stays.cancel()
            await asyncio.gather(stays, return_exceptions=True)
            await until_async(lambda: held(api) == 0)
            assert not futures.is_polled(request_id)
        # Connected clients are still answered.
        waiting = asyncio.create_task(api.result(request_id))
        await until_async(lambda: held(api) == 1)
        echo.open.set()
        assert (await waiting)["sequences"]
