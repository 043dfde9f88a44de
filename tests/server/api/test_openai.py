"""OpenAI's routes as ordinary samples: keys, limits, cancellation, and a server that stops."""

import asyncio
import contextlib
import dataclasses
import json
import sqlite3
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from server.api.test_account import events as usage_events
from server.api.test_account import totals
from server.api.test_streaming import Drip
from server.echo import BASE, EchoExecutor
from server.hosting import Api, hosted
from server.tenants import new_key, with_key
from tinkex.server.api import openai_prompts
from tinkex.server.queued_request import QueuedRequest
from waiting import until_async

pytestmark = pytest.mark.anyio

CHAT = {"model": BASE, "messages": [{"role": "user", "content": "a"}], "max_tokens": 4}


@pytest.fixture
async def drip(anyio_backend: str) -> Drip:
    return Drip()


@pytest.fixture
async def api(drip: Drip, tmp_path: Path) -> AsyncIterator[Api]:
    async with hosted(drip, tmp_path) as api:
        yield api


async def lines(stream: aiohttp.ClientResponse) -> AsyncIterator[Any]:
    """The data of each event; the text of the last one."""
    async for line in stream.content:
        if line.startswith(b"data: "):
            text = line.removeprefix(b"data: ").strip()
            yield text.decode() if text == b"[DONE]" else json.loads(text)


async def test_a_stream_is_chunks_and_then_done(api: Api, drip: Drip) -> None:
    drip.fall(4)
    body = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
    async with api.http.post("/v1/chat/completions", json=body) as stream:
        assert stream.status == 200
        assert stream.headers["Content-Type"].startswith("text/event-stream")
        events = [event async for event in lines(stream)]
    assert events[-1] == "[DONE]"
    chunks = events[:-1]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 4
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_is_a_stored_sample_and_is_counted(
    api: Api, drip: Drip, tmp_path: Path, stream: bool
) -> None:
    body = {**CHAT, "n": 2, "stream": stream, "stream_options": {"include_usage": True}}
    asked = asyncio.ensure_future(api.http.post("/v1/chat/completions", json=body))
    await drip.begun.acquire()
    with contextlib.closing(sqlite3.connect(tmp_path / "tinkex.db")) as database:
        rows = database.execute("select kind, status, owner, sequences from requests").fetchall()
    assert rows == [("sample", "waiting", "local", 2)]
    drip.fall(4)
    async with await asked as answer:
        last = [event async for event in lines(answer)][-2] if stream else await answer.json()
    assert last["usage"]["completion_tokens"] == 8
    counted = totals(await usage_events(api))
    assert counted["sampling_sample"] == 8
    assert counted["sampling_prefill"] == last["usage"]["prompt_tokens"]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_cancels_its_sample(api: Api, drip: Drip, stream: bool) -> None:
    async def ask() -> None:
        body = {**CHAT, "stream": stream}
        async with api.http.post("/v1/chat/completions", json=body) as answer:
            await answer.read()

    leaving = asyncio.create_task(ask())
    await drip.begun.acquire()
    leaving.cancel()
    await until_async(drip.given_up.is_set)
    app = api.app
    assert app is not None
    await until_async(lambda: len(app.state.context.futures) == 0)


async def test_an_answer_may_take_long(drip: Drip, tmp_path: Path) -> None:
    async with hosted(drip, tmp_path, head_s=0.1, stall_s=0.1) as api:
        asked = asyncio.ensure_future(api.http.post("/v1/chat/completions", json=CHAT))
        await drip.begun.acquire()
        await asyncio.sleep(0.5)  # much longer than a connection may make no progress
        drip.fall(4)
        async with await asked as answer:
            assert answer.status == 200


@pytest.mark.parametrize("stream", [True, False])
async def test_a_server_that_stops_says_so(api: Api, drip: Drip, stream: bool) -> None:
    assert api.app is not None
    body = {**CHAT, "stream": stream}
    asked = api.http.post("/v1/chat/completions", json=body)
    if stream:
        async with asked as answer:
            events = lines(answer)
            assert (await anext(events))["choices"]
            await drip.begun.acquire()
            api.app.state.context.futures.release()
            assert "stopping" in (await anext(events))["error"]["message"]
            assert [event async for event in events] == []
    else:
        waiting = asyncio.ensure_future(asked)
        await drip.begun.acquire()
        api.app.state.context.futures.release()
        async with await waiting as answer:
            assert answer.status == 503
            assert answer.headers["Retry-After"] == "1"
            assert "stopping" in (await answer.json())["error"]["message"]
    # Nobody can come back for the result, so it does not run again after the start.
    await until_async(drip.given_up.is_set)


async def test_a_failed_sample_is_an_error_of_its_sender(api: Api, drip: Drip) -> None:
    drip.fall(8)
    body = {"model": BASE, "prompt": [13], "max_tokens": 4}
    async with api.http.post("/v1/completions", json=body) as answer:
        assert answer.status == 400
        assert "bad luck" in (await answer.json())["error"]["message"]
    async with api.http.post("/v1/completions", json={**body, "stream": True}) as stream:
        events = [event async for event in lines(stream)]
    assert "bad luck" in events[-1]["error"]["message"]


async def test_a_key_is_a_bearer_token_and_errors_have_the_shape_of_openai(
    drip: Drip, tmp_path: Path
) -> None:
    key = await new_key(tmp_path, "alice")
    drip.fall(100)
    async with hosted(drip, tmp_path) as api:
        for path in ("/v1/models", "/oai/api/v1/models", "/api/v1/sessions"):
            bearer = {"Authorization": f"Bearer {key}"}
            async with api.http.get(path, headers=bearer) as answer:
                assert answer.status == 200, path
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": key}):
            async with api.http.post("/v1/completions", headers=headers, json=CHAT) as answer:
                assert answer.status == 401
                error = (await answer.json())["error"]
                assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
        async with api.http.post("/v1/nothing", headers=bearer) as answer:
            assert answer.status == 404
            assert "error" in await answer.json()


async def test_a_model_names_its_owner_to_its_owner_only(
    echo: EchoExecutor, tmp_path: Path
) -> None:
    keys = {owner: await new_key(tmp_path, owner) for owner in ("alice", "bob")}
    async with (
        hosted(echo, tmp_path) as nobody,
        with_key(nobody, keys["alice"]) as alice,
        with_key(nobody, keys["bob"]) as bob,
    ):
        model = await alice.model()
        await alice.result(
            await alice.step("save_weights_for_sampler", model_id=model, seq_id=1, path="shown")
        )
        path = f"tinker://{model}/sampler_weights/shown"
        assert (await bob.get(f"/v1/models/{path}")).status == 404
        await alice.call("POST", f"training_runs/{model}/checkpoints/sampler_weights/shown/publish")
        for reader, owner in ((alice, "alice"), (bob, "another-owner")):
            listed = (await reader.get("/v1/models")).json["data"]
            found = {one["id"]: one["owned_by"] for one in listed}
            assert found == {BASE: "tinkex", path: owner}
            for one in listed:  # the same as a model by itself
                assert (await reader.get(f"/v1/models/{one['id']}")).json == one
            body = {"model": path, "prompt": [1], "max_tokens": 1}
            assert (await reader.post("/v1/completions", body)).json["model"] == path


async def test_a_request_over_the_limit_of_its_owner_is_a_429(drip: Drip, tmp_path: Path) -> None:
    async with hosted(drip, tmp_path, max_samples=1) as api:
        first = asyncio.ensure_future(api.http.post("/v1/chat/completions", json=CHAT))
        await drip.begun.acquire()
        async with api.http.post("/v1/chat/completions", json=CHAT) as refused:
            assert refused.status == 429
            assert refused.headers["Retry-After"] == "1"
            assert (await refused.json())["error"]["code"] == "rate_limit_exceeded"
        drip.fall(4)
        (await first).close()


@pytest.mark.parametrize("context", [10, None])
async def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenized_or_stored(
    drip: Drip, tmp_path: Path, context: int | None
) -> None:
    served = dataclasses.replace(drip.served[0], max_context_length=context)
    drip.served = (served,)
    async with hosted(drip, tmp_path, max_message_bytes=2560) as api:
        assert api.app is not None
        many = [("x" * 2561, "characters; at most 2560 are allowed")]
        if context is not None:
            many.append(("one two three four five six seven eight", "the model's context is 10"))
        for text, words in many:
            chat = {**CHAT, "messages": [{"role": "user", "content": text}]}
            for path, body, field in (
                ("/v1/completions", {**CHAT, "prompt": ["a", text]}, "prompt"),
                ("/v1/chat/completions", chat, "messages"),
            ):
                async with api.http.post(path, json=body) as refused:
                    error = (await refused.json())["error"]
                    assert (refused.status, error["param"]) == (400, field)
                assert words in error["message"]
        assert len(api.app.state.context.futures) == 0
        assert drip.begun.locked()


async def test_a_schema_is_compiled_off_the_event_loop(
    api: Api, drip: Drip, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []
    grammar_of = openai_prompts.grammar_of

    def observed(*args: Any) -> str | None:
        threads.append(threading.current_thread())
        return grammar_of(*args)

    monkeypatch.setattr(openai_prompts, "grammar_of", observed)
    drip.fall(8)
    for fields in ({}, {"response_format": {"type": "json_object"}}):
        async with api.http.post("/v1/chat/completions", json={**CHAT, **fields}):
            pass
    assert [one is threading.current_thread() for one in threads] == [True, False]


async def test_a_sample_goes_where_the_beginning_of_its_prompt_is_cached(
    api: Api, drip: Drip, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert api.app is not None
    replicas = api.app.state.context.scheduler.replicas(BASE)
    begun: list[QueuedRequest] = []
    begin_sample = replicas.begin_sample
    monkeypatch.setattr(
        replicas, "begin_sample", lambda request: (begun.append(request), begin_sample(request))[1]
    )
    drip.fall(8)
    body = {"model": BASE, "prompt": [7, 8, 9], "max_tokens": 1}
    async with api.http.post("/v1/completions", json=body):
        pass
    sample = {"base_model": BASE, "prompt": {"chunks": [{"tokens": [7, 8, 9]}]}}
    answer = await api.post("asample", {**sample, "sampling_params": {"max_tokens": 1}})
    assert answer.status == 200
    await until_async(lambda: len(begun) == 2)
    assert begun[0].prompt_start == begun[1].prompt_start != b""


async def test_a_request_whose_second_prompt_is_refused_cancels_the_first(
    drip: Drip, tmp_path: Path
) -> None:
    async with hosted(drip, tmp_path, max_samples=1) as api:
        app = api.app
        assert app is not None
        body = {"model": BASE, "prompt": [[7], [8]], "max_tokens": 1}
        async with api.http.post("/v1/completions", json=body) as refused:
            assert refused.status == 429
        await until_async(lambda: len(app.state.context.futures) == 0)
        assert not drip.ran
