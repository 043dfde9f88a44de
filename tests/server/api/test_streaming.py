"""Streamed samples (H11): every token once, the complete answer at the end, nothing lost."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from server.echo import BASE, EchoExecutor
from server.hosting import Api, hosted
from tinkex.client.http.sse import EventDecoder, ServerSentEvent
from tinkex.server.api import openai_routes, sample_stream
from tinkex.server.api.connection_limits import connection_of
from tinkex.server.executor import EngineLost, WorkFailed
from tinkex.wire.codec import decode_json
from tinkex.wire.errors import UserFailure
from tinkex.wire.proto.frames_pb2 import Done, Order, Tokens
from tinkex.wire.protobuf import encode_sample_response
from tinkex.wire.sampling import SampledSequence, SampleRequest, SampleResponse
from waiting import until_async

pytestmark = pytest.mark.anyio

BODY = {
    "prompt": {"chunks": [{"tokens": [1, 2, 3]}]},
    "sampling_params": {"max_tokens": 6},
    "num_samples": 2,
    "base_model": BASE,
}


class Drip(EchoExecutor):
    """Samples one token per sequence each time the test allows it."""

    def __init__(self) -> None:
        super().__init__()
        self.drops = asyncio.Semaphore(0)
        self.begun = asyncio.Semaphore(0)
        self.given_up = asyncio.Event()

    def fall(self, drops: int) -> None:
        for _ in range(drops):
            self.drops.release()

    async def run(self, base_model: str, work: Order, *, incarnation: int | None = None) -> Done:
        if not work.HasField("sample"):
            return await super().run(base_model, work, incarnation=incarnation)
        try:
            request = decode_json(SampleRequest, work.sample.payload.inline)
        except UserFailure as failure:
            raise WorkFailed("user", str(failure)) from failure
        count, died = request.sampling_params.max_tokens or 1, self._died
        self.begun.release()
        try:
            for drawn in range(count):
                await self.drops.acquire()
                if died.is_set():
                    raise EngineLost("died")
                if (on_tokens := self.on_tokens.get(id(work))) is not None:
                    for sequence in range(request.num_samples):
                        reported = Tokens(sequence=sequence, start=drawn)
                        reported.tokens.append(100 * sequence + drawn)
                        reported.logprobs.append(-0.5)
                        on_tokens(reported)
        except asyncio.CancelledError:
            self.given_up.set()
            raise
        if request.prompt.to_ints() == [13]:
            raise WorkFailed("user", "13 brings bad luck")
        sequences = [
            SampledSequence(
                "length",
                "",
                tokens_np=np.arange(100 * index, 100 * index + count, dtype=np.int32),
                logprobs_np=np.full(count, -0.5, np.float32),
            )
            for index in range(request.num_samples)
        ]
        self.ran.append(work)
        return Done(
            result=encode_sample_response(SampleResponse(sequences=sequences)), compute_s=0.0
        )


@pytest.fixture
async def drip(anyio_backend: str) -> Drip:
    return Drip()


@pytest.fixture
async def api(drip: Drip, tmp_path: Path) -> AsyncIterator[Api]:
    async with hosted(drip, tmp_path, stream_grace_s=0.05) as api:
        yield api


class Events:
    """A stream that the test reads at its own pace."""

    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self._answer = answer
        self._decoder = EventDecoder()
        self._ready: list[ServerSentEvent] = []
        self.raw = b""

    async def next(self) -> ServerSentEvent:
        while not self._ready:
            chunk = await self._answer.content.readany()
            if not chunk:
                raise EOFError
            self.raw += chunk
            self._ready += self._decoder.feed(chunk)
        return self._ready.pop(0)

    async def rest(self) -> list[ServerSentEvent]:
        events = []
        try:
            while True:
                events.append(await self.next())
        except EOFError:
            return events

    async def tokens(self, count: int) -> dict[int, list[int]]:
        """The tokens of each sequence, once this many have arrived in total."""
        found: dict[int, list[int]] = {}
        while sum(map(len, found.values())) < count:
            event = await self.next()
            assert event.event == "token"
            data = event.json()
            assert len(data["logprobs"]) == len(data["tokens"])
            found.setdefault(data["sequence"], []).extend(data["tokens"])
        return found


@asynccontextmanager
async def streamed(api: Api, **fields: Any) -> AsyncIterator[Events]:
    async with api.http.post("/api/v1/stream_sample", json={**BODY, **fields}) as answer:
        assert answer.status == 200, await answer.text()
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        yield Events(answer)


async def named_sampler(api: Api) -> dict[str, Any]:
    """Fields that identify a sample: a request with the same ones is a repeat."""
    session = await api.session()
    opened = {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE}
    sampler = (await api.post("create_sampling_session", opened)).json["sampling_session_id"]
    return {"sampling_session_id": sampler, "seq_id": 1, "base_model": None}


async def test_tokens_are_streamed_and_then_the_complete_answer(api: Api, drip: Drip) -> None:
    async with streamed(api) as events:
        accepted = (await events.next()).json()
        ids = accepted["sample_sequence_ids"]
        assert len(ids) == 2
        drip.fall(1)
        assert await events.tokens(2) == {0: [0], 1: [100]}
        drip.fall(2)
        assert await events.tokens(4) == {0: [1, 2], 1: [101, 102]}
        drip.fall(3)
        assert await events.tokens(6) == {0: [3, 4, 5], 1: [103, 104, 105]}
        (done,) = await events.rest()
    assert done.event == "done"
    answer = done.json()
    assert answer.pop("sample_sequence_ids") == ids
    # A poll for the same request gets the same answer.
    assert answer == await api.result(accepted["request_id"])
    assert [sequence["tokens"] for sequence in answer["sequences"]] == [
        [0, 1, 2, 3, 4, 5],
        [100, 101, 102, 103, 104, 105],
    ]


async def test_no_token_is_sent_twice_after_an_engine_restart(api: Api, drip: Drip) -> None:
    async with streamed(api, num_samples=1) as events:
        await events.next()
        drip.fall(3)
        assert await events.tokens(3) == {0: [0, 1, 2]}
        drip.die()
        drip.fall(1 + 4)  # one during the crash, and four again
        assert await events.tokens(1) == {0: [3]}
        drip.fall(2)
        assert await events.tokens(2) == {0: [4, 5]}
        assert [event.event for event in await events.rest()] == ["done"]


async def test_the_sample_of_a_disconnected_client_is_cancelled(api: Api, drip: Drip) -> None:
    async with streamed(api) as events:
        request_id = (await events.next()).json()["request_id"]
        drip.fall(1)
        await events.tokens(2)
    await asyncio.wait_for(drip.given_up.wait(), 10)
    assert await api.result(request_id) == {
        "error": "cancelled: the client gave up on it.",
        "category": "user",
    }


@pytest.mark.parametrize(
    ("module", "path", "body"),
    [
        (sample_stream, "/api/v1/stream_sample", BODY),
        (
            openai_routes,
            "/v1/completions",
            {"model": BASE, "prompt": [1, 2, 3], "max_tokens": 6, "stream": True},
        ),
    ],
)
async def test_the_sample_of_a_client_that_leaves_before_the_first_event_is_cancelled(
    api: Api, drip: Drip, monkeypatch: pytest.MonkeyPatch, module: Any, path: str, body: Any
) -> None:
    stored = asyncio.Event()
    accept = module.accept

    async def slowly(request: Any, *args: Any, **options: Any) -> Any:
        first = await accept(request, *args, **options)
        stored.set()
        connection = connection_of(request.scope)
        await until_async(lambda: connection is not None and connection.disconnected)
        return first

    monkeypatch.setattr(module, "accept", slowly)
    left = asyncio.create_task(api.http.post(path, json=body))
    await asyncio.wait_for(stored.wait(), 10)
    left.cancel()
    await asyncio.wait_for(drip.given_up.wait(), 10)


async def test_a_client_that_reconnects_by_request_id_loses_nothing(
    drip: Drip, tmp_path: Path
) -> None:
    async with hosted(drip, tmp_path, stream_grace_s=0.2, long_poll_s=5.0) as api:
        async with streamed(api) as events:
            request_id = (await events.next()).json()["request_id"]
        polled = asyncio.create_task(api.result(request_id))
        await asyncio.sleep(0.5)  # the grace time has passed
        assert not drip.given_up.is_set()
        drip.fall(6)
        assert [s["tokens"][-1] for s in (await polled)["sequences"]] == [5, 105]


async def test_a_repeated_request_streams_the_same_sample_from_the_beginning(
    api: Api, drip: Drip
) -> None:
    named = await named_sampler(api)
    async with streamed(api, **named) as first, streamed(api, **named) as second:
        assert await first.next() == await second.next()
        drip.fall(3)
        assert await first.tokens(6) == await second.tokens(6)
        drip.fall(3)
        async with streamed(api, **named) as late:
            events = [*await first.rest()]
            assert (await second.rest())[-1] == events[-1]
            assert (await late.rest())[-1] == events[-1]
    assert drip.tasks() == ["sample"]


async def test_a_sample_of_asample_is_streamed_at_its_end(api: Api, drip: Drip) -> None:
    named = await named_sampler(api)
    promised = (await api.post("asample", {**BODY, **named})).json
    async with streamed(api, **named) as events:
        assert (await events.next()).json()["request_id"] == promised["request_id"]
        drip.fall(6)
        names = [event.event for event in await events.rest()]
    assert names == ["token", "token", "done"]


async def test_disconnecting_does_not_cancel_a_sample_of_asample(api: Api, drip: Drip) -> None:
    named = await named_sampler(api)
    promised = (await api.post("asample", {**BODY, **named})).json
    async with streamed(api, **named) as events:
        await events.next()
    await asyncio.sleep(0.2)  # longer than the grace time
    drip.fall(6)
    assert "sequences" in await api.result(promised["request_id"])


async def test_a_failure_is_streamed_with_its_reason_and_category(api: Api, drip: Drip) -> None:
    drip.fall(6)
    async with streamed(api, prompt={"chunks": [{"tokens": [13]}]}) as events:
        last = (await events.rest())[-1]
    assert last.event == "error"
    assert last.json() == {"error": "13 brings bad luck", "category": "user"}


async def test_unknown_settings_fail_in_the_stream_and_bad_bodies_by_status(
    api: Api,
) -> None:
    for body, status in (({"prompt": 5}, 422), ({**BODY, "base_model": "no/such"}, 400)):
        assert (await api.post("stream_sample", body)).status == status
    too_many = await api.post("stream_sample", {**BODY, "num_samples": 5000})
    assert too_many.status == 422
    unknown = {**await named_sampler(api), "sampling_params": {"max_tokens": 1, "warmth": 2}}
    async with streamed(api, **unknown) as events:
        accepted, failed = await events.rest()
    assert (accepted.event, failed.event) == ("accepted", "error")
    assert "warmth" in failed.json()["error"]
    assert failed.json()["category"] == "user"


async def test_a_stream_counts_against_its_owners_limit(drip: Drip, tmp_path: Path) -> None:
    async with hosted(drip, tmp_path, max_samples=3) as api, streamed(api):
        refused = await api.post("stream_sample", BODY)
        assert refused.status == 429
        drip.fall(6)


async def test_a_silent_stream_sends_keep_alives(drip: Drip, tmp_path: Path) -> None:
    async with hosted(drip, tmp_path, long_poll_s=0.05) as api, streamed(api) as events:
        await events.next()
        reading = asyncio.create_task(events.rest())
        await until_async(lambda: events.raw.count(b": keep-alive\n\n") >= 2)
        drip.fall(6)
        await reading


async def test_a_stopping_server_ends_its_streams_and_the_samples_continue_later(
    tmp_path: Path,
) -> None:
    drip = Drip()
    async with hosted(drip, tmp_path, long_poll_s=30.0) as api, streamed(api) as events:
        request_id = (await events.next()).json()["request_id"]
        drip.fall(2)
        await events.tokens(4)
        assert api.app is not None
        api.app.state.context.futures.release()  # as the server does when it stops
        assert await events.rest() == []
        assert b"the server is stopping" in events.raw
    assert not any(work.HasField("sample") for work in drip.ran)
    again = Drip()
    again.fall(6)
    async with hosted(again, tmp_path) as api:
        answer = await api.result(request_id)
    assert [len(sequence["tokens"]) for sequence in answer["sequences"]] == [6, 6]


async def test_a_client_that_does_not_read_neither_delays_the_sample_nor_fills_memory(
    api: Api, drip: Drip
) -> None:
    long = {"sampling_params": {"max_tokens": 20_000}, "num_samples": 1}
    async with streamed(api, **long) as events:
        request_id = (await events.next()).json()["request_id"]
        drip.fall(20_000)
        answer = await api.result(request_id)  # finished, although no token was read
        reported = [event for event in await events.rest() if event.event == "token"]
    tokens = [token for event in reported for token in json.loads(event.data)["tokens"]]
    assert tokens == answer["sequences"][0]["tokens"] == list(range(20_000))
    # Unread tokens arrive as one event.
    assert len(reported) < 2_000
