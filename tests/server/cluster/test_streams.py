"""
Streams of samples while workers and web processes end: the whole text once, or an error to retry.

What a stream has sent is never sent again: another worker draws the same tokens with the same seed.
"""

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from server.cluster.conftest import Parts
from server.cluster_parts import a_web, a_worker
from server.hosting import Api
from server.streaming_executor import TOKENS_PER_UPDATE, StreamingExecutor, sample_body
from tinkex.server.executor import OnTokens
from tinkex.wire.proto.frames_pb2 import Done, Order, Tokens
from waiting import until_async

pytestmark = pytest.mark.anyio

MANY = 10 * TOKENS_PER_UPDATE


class HeldExecutor(StreamingExecutor):
    """Samples stop in the middle until `go` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.go = asyncio.Event()
        self.in_middle = asyncio.Event()

    async def send(
        self,
        base_model: str,
        order: Order,
        *,
        incarnation: int | None = None,
        on_tokens: OnTokens | None = None,
    ) -> asyncio.Future[Done]:
        later: list[Tokens] = []

        def some(tokens: Tokens) -> None:
            if tokens.start < MANY // 2 or self.go.is_set():
                while later:
                    on_tokens(later.pop(0))  # type: ignore[misc]
                on_tokens(tokens)  # type: ignore[misc]
            else:
                later.append(tokens)

        async def run() -> Done:
            done = await self.run(base_model, order, incarnation=incarnation)
            self.in_middle.set()
            await self.go.wait()
            for tokens in later:
                on_tokens(tokens)  # type: ignore[misc]
            return done

        if on_tokens is not None:
            self.on_tokens[id(order)] = some
        return asyncio.create_task(
            run()
            if order.HasField("sample")
            else self.run(base_model, order, incarnation=incarnation)
        )


class Stream:
    """What a client has read of a stream."""

    def __init__(self, api: Api) -> None:
        self.tokens: list[int] = []
        #: The names of the other events.
        self.events: list[str] = []
        self.request_id = ""
        self.text = ""
        self.task = asyncio.create_task(self._read(api))

    async def _read(self, api: Api) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            async with api.http.post("/api/v1/stream_sample", json=sample_body(MANY)) as answer:
                name = ""
                async for line in answer.content:
                    self.text += line.decode()
                    if line.startswith(b"event: "):
                        name = line[7:].decode().strip()
                    elif line.startswith(b"data: "):
                        self._add(name, json.loads(line[6:]))

    def _add(self, name: str, data: Any) -> None:
        if name == "token":
            self.tokens += data["tokens"]
            return
        self.events.append(name)
        if name == "accepted":
            self.request_id = data["request_id"]

    def is_whole(self) -> bool:
        return self.tokens == list(range(MANY)) and self.events == ["accepted", "done"]


@pytest.fixture
async def streaming(db: str, tmp_path: Path) -> AsyncIterator[Parts]:
    async with contextlib.AsyncExitStack() as stack:
        found = Parts(db, tmp_path, [])
        for name in ("one", "two"):
            executor = found.executors[name] = HeldExecutor()
            worker = a_worker(db, tmp_path, name, executor)
            found.workers[name] = await stack.enter_async_context(worker)
        # A sample that a worker finds by itself has no stream.
        for worker in found.workers.values():
            notifier = worker._notifier
            await until_async(lambda: notifier.listening_since_s < math.inf)  # noqa: B023
        for _ in range(2):
            found.webs.append(await stack.enter_async_context(a_web(db, tmp_path)))
        yield found


async def in_middle(parts: Parts, api: Api) -> tuple[Stream, str, str]:
    """A stream that has half of its tokens, the worker that samples, and the other one."""
    stream = Stream(api)
    held: dict[str, Any] = parts.executors
    await until_async(lambda: len(stream.tokens) == MANY // 2)
    await until_async(lambda: any(one.in_middle.is_set() for one in held.values()))
    (here,) = [name for name, one in held.items() if one.in_middle.is_set()]
    (there,) = set(held) - {here}
    return stream, here, there


@pytest.mark.parametrize("continues", [False, True], ids=["killed", "stopped"])
async def test_a_stream_of_a_lost_worker_has_the_whole_text_once(
    streaming: Parts, continues: bool
) -> None:
    executors: dict[str, Any] = streaming.executors
    async with asyncio.timeout(30):
        stream, here, there = await in_middle(streaming, streaming.webs[0])
        await streaming.workers[here]._beat_task.close()
        await streaming.workers[here]._look_task.close()
        await executors[there].in_middle.wait()
        if continues:
            # Both send tokens and results now.
            executors[here].go.set()
        executors[there].go.set()
        await stream.task
    assert stream.is_whole(), stream.events


async def test_a_stream_of_a_drained_worker_has_the_whole_text_once(streaming: Parts) -> None:
    executors: dict[str, Any] = streaming.executors
    async with asyncio.timeout(30):
        stream, here, there = await in_middle(streaming, streaming.webs[0])
        # Its time to drain is over before the sample is.
        await streaming.workers[here].drain(0.5)
        await streaming.workers[here].close()
        await executors[there].in_middle.wait()
        executors[there].go.set()
        await stream.task
    assert stream.is_whole(), stream.events


async def test_a_stream_of_a_web_process_that_ends_says_so_and_its_result_is_elsewhere(
    streaming: Parts,
) -> None:
    executors: dict[str, Any] = streaming.executors
    async with asyncio.timeout(30):
        leaving, other = streaming.webs
        stream, here, _ = await in_middle(streaming, leaving)
        assert leaving.app is not None
        # As after SIGTERM.
        leaving.app.state.context.futures.release()
        await stream.task
        # Half of the text, no end, and how to get the rest.
        assert stream.tokens == list(range(MANY // 2))
        assert stream.events == ["accepted"]
        assert "can be fetched by its request id" in stream.text
        executors[here].go.set()
        result = await other.result(stream.request_id)
    assert result["sequences"][0]["tokens"] == list(range(MANY))
