"""A poll ends with its client, not when its time is up."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from server.api.test_limits import sample, sampler
from server.echo import EchoExecutor
from server.hosting import Api, hosted
from tinkex.server import web
from waiting import until_async

pytestmark = pytest.mark.anyio

#: Far longer than a test may take.
HELD_S = 50.0
CLIENTS = 20


def held(api: Api) -> int:
    """Requests that the server is about."""
    assert api.server is not None
    return len(api.server.server_state.tasks)


async def polls(api: Api, path: str, body: Any) -> list["asyncio.Task[Any]"]:
    asked = [asyncio.create_task(api.post(path, body)) for _ in range(CLIENTS)]
    await until_async(lambda: held(api) == CLIENTS)
    return asked


@pytest.mark.parametrize("parser", ["httptools", "h11"])
async def test_polls_of_clients_that_vanish_are_not_held(
    parser: str, echo: EchoExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if parser == "h11":
        monkeypatch.setattr(web, "protocol", lambda: "h11")
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
            asked = await polls(api, path, body)
            assert futures.awaited(request_id) is (path == "retrieve_future")
            stays = asked.pop()
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
            await until_async(lambda: held(api) == 1)
            assert futures.awaited(request_id) is (path == "retrieve_future")
            assert not stays.done()
            stays.cancel()
            await asyncio.gather(stays, return_exceptions=True)
            await until_async(lambda: held(api) == 0)
            assert not futures.awaited(request_id)
        # Whoever is there is answered as ever.
        waiting = asyncio.create_task(api.result(request_id))
        await until_async(lambda: held(api) == 1)
        echo.open.set()
        assert (await waiting)["sequences"]
