"""Raw and streaming responses (H11) for endpoints that no client wraps."""

import asyncio
import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
from aiohttp import web

import tinkex
from tinkex import types
from tinkex.client.http.sse import Consumed
from tinkex.client.http.transport import DeadlineExceeded, HttpTransport, Kind, Request, Unreachable
from tinkex.compat import raw_responses
from tinkex.compat.raw_responses import Raw
from tinkex.testing import Answer, Lost

EVENTS = "data: Zürich\n\n: hm\n\nevent: x\ndata: 1\ndata: 2\n\n".encode()


class Site:
    """A server whose responses come in pieces, as slowly as the test wants."""

    def __init__(self, *pieces: bytes | None) -> None:
        #: None breaks the connection.
        self._pieces = pieces
        self.gate = threading.Event()
        self._loop = asyncio.new_event_loop()
        self.url = ""

    def __enter__(self):
        ready = threading.Event()

        async def answer(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            for piece in self._pieces:
                if piece is None:
                    request.transport.abort()
                    break
                await response.write(piece)
                await asyncio.to_thread(self.gate.wait, 5)
            return response

        async def empty(request: web.Request) -> web.Response:
            return web.json_response({})

        async def start() -> None:
            app = web.Application()
            app.router.add_post("/api/v1/client/{config}", empty)
            app.router.add_route("*", "/{path:.*}", answer)
            self._runner = web.AppRunner(app)
            await self._runner.setup()
            site = web.TCPSite(self._runner, "127.0.0.1", 0)
            await site.start()
            self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
            ready.set()

        def run() -> None:
            asyncio.set_event_loop(self._loop)
            self._loop.create_task(start())
            self._loop.run_forever()

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        assert ready.wait(5)
        return self

    def client(self):
        return tinkex.ServiceClient(base_url=self.url, api_key="tml-x")

    def __exit__(self, *_):
        self.gate.set()
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()


def test_an_answer_shows_its_head_and_can_be_read_in_every_form(fake, service):
    answer = Raw(service).request("GET", "healthz")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert (answer.method, answer.url) == ("GET", "http://fake.invalid/api/v1/healthz")
    assert timedelta(0) <= answer.elapsed < timedelta(seconds=5)
    assert answer.retries_taken == 0
    assert answer.is_closed
    assert answer.json() == {"status": "ok"}
    assert answer.text() == '{"status":"ok"}'
    assert answer.parse() == {"status": "ok"}
    assert answer.parse(to=types.HealthResponse).status == "ok"
    assert b"".join(answer.iter_bytes()) == answer.read()  # read completely, it can be read again
    assert "tml-fake" not in repr(answer) + repr(answer.http_request)


def test_a_body_is_sent_and_attempts_are_counted(fake, service):
    fake.script("weights_info", Lost(), Answer(status=503, body={}))
    fake.script("weights_info", Answer(status=200, body={"n": 1}, headers={"x-note": "hi"}))
    answer = Raw(service).request("POST", "weights_info", {"a": 1}, headers={"X-Mine": "yes"})
    assert (answer.json(), answer.retries_taken, answer.headers["x-note"]) == ({"n": 1}, 2, "hi")
    seen = fake.requests[-1]
    assert (seen.json(), seen.headers["x-mine"]) == ({"a": 1}, "yes")
    assert seen.headers["x-api-key"] == "tml-fake"


def test_an_error_status_raises_and_max_retries_0_sends_once(fake, service):
    with pytest.raises(tinkex.NotFoundError, match="no/such"):
        Raw(service).request("GET", "no/such")
    fake.script("healthz", Answer(status=503, body={"detail": "later"}))
    with pytest.raises(tinkex.InternalServerError, match="later"):
        Raw(service).request("GET", "healthz", max_retries=0)


def test_answers_are_decoded_in_the_caller_and_not_on_the_background_loop(service, monkeypatch):
    threads = []

    def noting(function):
        def variant(*args):
            threads.append(threading.current_thread())
            return function(*args)

        return variant

    loads = SimpleNamespace(loads=noting(raw_responses.json.loads))
    monkeypatch.setattr(raw_responses, "json", loads)
    monkeypatch.setattr(raw_responses, "decode", noting(raw_responses.decode))

    async def ask():
        answer = await Raw(service).request_async("GET", "healthz")
        await answer.json()
        await answer.parse(to=types.HealthResponse)

    answer = Raw(service).request("GET", "healthz")
    answer.json()
    answer.parse(to=types.HealthResponse)
    asyncio.run(ask())
    assert threads == [threading.current_thread()] * 4


def test_a_response_of_another_type_is_an_error(service):
    with pytest.raises(tinkex.APIResponseValidationError, match="CreateSessionResponse"):
        Raw(service).request("GET", "healthz").parse(to=types.CreateSessionResponse)


def test_coroutines_have_the_same(fake, service):
    async def ask():
        raw = Raw(service)
        answer = await raw.request_async("GET", "healthz")
        assert await answer.json() == {"status": "ok"}
        assert await answer.text() == '{"status":"ok"}'
        assert (await answer.parse(to=types.HealthResponse)).status == "ok"
        fake.script("healthz", Answer(status=200, body=EVENTS))
        async with await raw.stream_async("GET", "healthz") as streamed:
            events = [event async for event in streamed.iter_events()]
        assert streamed.is_closed
        fake.script("healthz", Answer(status=200, body="ä\r\nb\nc".encode()))
        lines = await raw.stream_async("GET", "healthz")
        return events, [line async for line in lines.iter_lines()]

    events, lines = asyncio.run(ask())
    assert [(event.event, event.data) for event in events] == [(None, "Zürich"), ("x", "1\n2")]
    assert lines == ["ä", "b", "c"]


def test_a_response_is_read_as_it_arrives_and_once():
    cut = EVENTS.index("ü".encode()) + 1  # in the middle of a character
    with Site(EVENTS[:cut], EVENTS[cut:]) as site, site.client() as service:
        with Raw(service).stream("GET", "anything") as answer:
            pieces = answer.iter_bytes()
            assert next(pieces) == EVENTS[:cut]  # the rest is not sent before the gate opens
            site.gate.set()
            assert b"".join(pieces) == EVENTS[cut:]
            with pytest.raises(Consumed, match="only once"):
                answer.read()
        with Raw(service).stream("GET", "anything") as answer:
            assert "".join(answer.iter_text()) == EVENTS.decode()
        with Raw(service).stream("GET", "anything") as answer:
            assert [event.data for event in answer.iter_events()] == ["Zürich", "1\n2"]


def test_a_response_that_breaks_off_is_a_connection_error():
    with (
        Site(b"data: 1\n\n", None) as site,
        site.client() as service,
        Raw(service).stream("GET", "anything") as answer,
    ):
        events = answer.iter_events()
        assert next(events).data == "1"
        site.gate.set()  # not before: what arrives with the end may be lost with it
        with pytest.raises(tinkex.APIConnectionError):
            next(events)


def test_the_transport_streams_within_a_deadline_for_each_piece():
    async def ask(url: str, pieces: int) -> list[bytes]:
        transport = HttpTransport(url)
        request = Request(method="GET", url=f"{url}/x", deadline_s=0.2, kind=Kind.RETRIEVE)
        try:
            streamed = await transport.stream(request)
            try:
                return [await streamed.read() for _ in range(pieces)]
            finally:
                streamed.close()
        finally:
            await transport.close()

    with Site(b"one", b"two") as site:
        with pytest.raises(DeadlineExceeded):
            asyncio.run(ask(site.url, 2))
        site.gate.set()
        assert b"".join(asyncio.run(ask(site.url, 3))) == b"onetwo"
    with Site(b"one", None) as site:
        site.gate.set()
        with pytest.raises(Unreachable):
            asyncio.run(ask(site.url, 3))
