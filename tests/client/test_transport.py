"""The real transport over real sockets."""

import asyncio
import dataclasses
import itertools
import pickle
import shlex
import shutil
import ssl
import subprocess
import sys
import textwrap
import threading
import time
import warnings

import pytest
from aiohttp import web
from multidict import CIMultiDict

import tinkex
from http_stub import Reply, reply_json, stub_server
from tinkex import SamplingParams, types
from tinkex.client.http.transport import (
    CONNECTIONS,
    DeadlineExceeded,
    Headers,
    HttpTransport,
    Kind,
    Request,
    Unreachable,
    redirected,
)
from tinkex.testing import Answer, FakeService, Lost
from waiting import until

PROMPT = types.ModelInput.from_ints([1, 2, 3])


@pytest.fixture
def service(loopback):
    with tinkex.ServiceClient(base_url=loopback.url) as client:
        yield client


def test_a_complete_loop_of_training_and_sampling(fake, service, datum):
    training = service.create_lora_training_client("fake/model", rank=4)
    losses = []
    for _ in range(5):
        step = training.forward_backward([datum], "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=1e-2))
        losses.append(step.result(10).metrics["loss:sum"])
    assert losses == sorted(losses, reverse=True)
    sampling = training.save_weights_and_get_sampling_client()
    answers = [sampling.sample(PROMPT, 1, SamplingParams(max_tokens=2)) for _ in range(200)]
    assert {tuple(a.result(10).sequences[0].tokens) for a in answers} == {(1, 2)}


def test_broken_connections_are_retried(fake, service, datum):
    training = service.create_lora_training_client("fake/model", rank=4)
    fake.script("forward_backward", Lost(), Lost(after=True))
    fake.script("retrieve_future", Lost())
    training.forward_backward([datum], "cross_entropy").result(15)
    assert [number for _, number, _ in fake.ran] == [1]


def test_a_refused_connection_is_an_error_that_names_the_address(monkeypatch):
    monkeypatch.setenv("TINKEX_FIRST_CONTACT_S", "0.2")
    service = tinkex.ServiceClient(base_url="http://127.0.0.1:9")
    with pytest.raises(tinkex.APIConnectionError, match=r"http://127\.0\.0\.1:9/api/v1/client"):
        service.get_server_capabilities()
    service.close("errored").result(5)


def test_a_response_that_takes_too_long_is_given_up(fake, loopback):
    hold = fake.hold("healthz")

    async def main():
        transport = HttpTransport(loopback.url)
        request = Request(method="GET", url=f"{loopback.url}/api/v1/healthz", deadline_s=0.05)
        try:
            with pytest.raises(DeadlineExceeded, match=r"0\.05 s"):
                await transport.send(request)
        finally:
            await transport.close()

    asyncio.run(main())
    hold.release()


def test_a_truncated_response_is_detected():
    async def handle(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nshort")
        writer.close()

    async def main():
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        transport = HttpTransport(url)
        try:
            with pytest.raises(Unreachable):
                await transport.send(Request(method="GET", url=url + "/"))
        finally:
            await transport.close()
            server.close()
            await server.wait_closed()

    asyncio.run(main())


def test_data_on_an_idle_connection_is_not_read_as_the_next_response():
    """A server that sends every response twice, the second time on the idle connection."""

    async def main() -> list[bytes]:
        repeated = asyncio.Semaphore(0)
        numbers = itertools.count(1)

        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            answer = b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n%d" % next(numbers)
            writer.write(answer)
            await asyncio.sleep(0.05)  # the first one must have been read by then
            writer.write(answer)
            await writer.drain()
            repeated.release()
            await reader.read()
            writer.close()

        server = await asyncio.start_server(talk, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        transport = HttpTransport(url)
        bodies = []
        for _ in range(3):
            got = await transport.send(Request(method="GET", url=url, deadline_s=5))
            bodies.append(got.content)
            await asyncio.wait_for(repeated.acquire(), 5)
            await asyncio.sleep(0.01)  # for the loop to read it
        await transport.close()
        server.close()
        return bodies

    assert asyncio.run(main()) == [b"1", b"2", b"3"]


def test_redirects_to_other_origins_are_not_followed_and_no_header_is_added():
    seen = []

    async def handle(request):
        seen.append(dict(request.headers))
        return web.Response(status=302, headers={"location": "http://elsewhere.invalid/"})

    async def main():
        app = web.Application()
        app.router.add_route("*", "/{tail:.*}", handle)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/x"
        transport = HttpTransport(url)
        answer = await transport.send(
            Request(method="POST", url=url, body=b"{}", headers={"X-API-Key": "tml-1"})
        )
        await transport.close()
        await runner.cleanup()
        return answer

    answer = asyncio.run(main())
    assert answer.status_code == 302
    assert answer.headers["location"] == "http://elsewhere.invalid/"
    assert "Content-Type" not in seen[0]
    assert "User-Agent" not in seen[0]
    assert answer.request.headers == {}
    assert answer.request.body is None


@pytest.mark.parametrize("status", [200, 307])
def test_a_large_body_arrives_whole_and_with_its_length(status):
    body = bytes(range(256)) * 10_000  # 2.5 MB

    def answer(request):
        if request.path == "/first" and status == 307:
            return Reply(status=307, headers={"Location": "/second"})
        return Reply()

    async def send(url):
        transport = HttpTransport(url)
        answer = await transport.send(Request(method="POST", url=f"{url}/first", body=body))
        await transport.close()
        return answer.status_code

    with stub_server(answer) as stub:
        assert asyncio.run(send(stub.url)) == 200
    for request in stub.requests:
        assert request.body == body
        assert "transfer-encoding" not in request.headers
    assert len(stub.requests) == (2 if status == 307 else 1)


def caught(call):
    with pytest.raises(tinkex.APIStatusError) as shown:
        call()
    return shown.value


CAPABILITIES = reply_json({"supported_models": []})


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_within_the_origin_is_followed_with_the_key(status):
    def answer(request):
        if request.path.startswith("/new"):
            return CAPABILITIES
        return Reply(status=status, headers={"Location": f"/new{request.path}"})

    with (
        stub_server(answer) as there,
        tinkex.ServiceClient(base_url=there.url, api_key="tml-1") as service,
    ):
        assert service.get_server_capabilities().supported_models == []
        requests = [each for each in there.requests if each.path.endswith("capabilities")]
        assert [each.path[:4] for each in requests] == ["/api", "/new"]
        assert {each.headers["x-api-key"] for each in requests} == {"tml-1"}


@pytest.mark.parametrize(
    "elsewhere", ["{other}/x", "//{host}/x", "{other}\\@x", "https://{base}/x", "http://{name}/x"]
)
def test_the_key_never_goes_to_another_origin(elsewhere):
    """The official client sends its key there; here the error names the other address."""

    def answer(request):
        return CAPABILITIES

    with stub_server(answer) as other:
        host = other.url.removeprefix("http://")

        def lead(request):
            base = request.headers["host"]
            location = elsewhere.format(
                other=other.url, host=host, base=base, name=base.replace("127.0.0.1", "localhost")
            )
            return Reply(status=307, headers={"Location": location})

        with stub_server(lead) as there:
            service = tinkex.ServiceClient(base_url=there.url, api_key="tml-1")
            error = caught(service.get_server_capabilities)
            assert error.status_code == 307
            assert "set base_url to it" in str(error)
            service.close("errored").result(5)
        assert other.requests == []


def test_a_redirect_that_changes_the_method_drops_the_body_and_loops_end():
    post = Request(
        method="POST",
        url="http://h/a",
        body=b"{}",
        headers={"Content-Type": "application/json", "X-API-Key": "tml-1"},
    )
    moved = redirected(post, 302, "b")
    assert (moved.method, moved.url, moved.body) == ("GET", "http://h/b", None)
    assert moved.headers == {"X-API-Key": "tml-1"}
    kept = redirected(post, 308, "b")
    assert (kept.method, kept.url, kept.body, kept.headers) == (
        "POST",
        "http://h/b",
        b"{}",
        post.headers,
    )
    assert redirected(post, 302, None) is None
    assert redirected(post, 302, "http://h:99999999/") is None

    def answer(request):
        return Reply(status=302, headers={"Location": request.path})

    with stub_server(answer) as there:
        service = tinkex.ServiceClient(base_url=there.url)
        assert caught(service.get_server_capabilities).status_code == 302
        service.close("errored").result(5)


def test_cookies_of_the_service_are_sent_only_to_it():
    """A load balancer finds the server of a session by its cookie."""
    sticky = "AWSALB=ab+/c==; Path=/"

    def answer(request):
        headers = {**CAPABILITIES.headers, "Set-Cookie": sticky}
        return dataclasses.replace(CAPABILITIES, headers=headers)

    async def main():
        transport = HttpTransport(one.url)
        for kind in (Kind.SESSION, Kind.TRAIN, Kind.SAMPLE):
            await transport.send(Request(method="GET", url=f"{one.url}/a", kind=kind))
        # Another service on the same host: cookies ignore ports.
        for _ in range(2):
            await transport.send(Request(method="GET", url=f"{other.url}/a"))
        await transport.send(Request(method="GET", url=f"{one.url}/a"))
        await transport.close()

    with stub_server(answer) as one, stub_server(answer) as other:
        asyncio.run(main())
        cookies = [request.headers.get("cookie") for request in one.requests]
        assert cookies == [None, *["AWSALB=ab+/c=="] * 3]
        assert [request.headers.get("cookie") for request in other.requests] == [None, None]


def test_the_response_of_an_error_has_the_attributes_of_httpx():
    def answer(request):
        if "training_runs" in request.path:
            headers = {"Retry-After": "3", "X-Thing": "y"}
            return Reply(status=404, body=b'{"detail": "no"}', headers=headers)
        return CAPABILITIES

    with stub_server(answer) as there, tinkex.RestClient(base_url=there.url) as rest:
        error = caught(rest.get_training_run("r").result)
        response = error.response
        assert response.headers.get("Retry-After") == response.headers["retry-after"] == "3"
        assert "X-THING" in response.headers
        assert dict(response.headers)["x-thing"] == "y"
        assert response.headers.get("absent") is None
        assert response.url.startswith(f"{there.url}/api/v1/training_runs/r")
        assert (response.status_code, response.reason_phrase) == (404, "Not Found")
        assert response.is_error
        assert response.is_client_error
        assert not response.is_success
        assert not response.is_server_error
        assert not response.is_redirect
        assert 0 < response.elapsed.total_seconds() < 30
        assert response.json() == {"detail": "no"}
        with pytest.raises(tinkex.NotFoundError):
            response.raise_for_status()
        again = pickle.loads(pickle.dumps(error)).response
        assert again.headers.get("Retry-After") == "3"
        fine = dataclasses.replace(response, status_code=200)
        assert fine.raise_for_status() is fine
        assert dataclasses.replace(response, status_code=799).reason_phrase == ""


def test_headers_of_the_same_name_are_one_list():
    assert Headers(CIMultiDict([("A", "1"), ("a", "2")])) == {"a": "1, 2"}


#: More than the limit of any kind.
MANY = 2 * max(CONNECTIONS.values())


@pytest.mark.parametrize("flood", Kind, ids=lambda kind: kind.value)
def test_each_kind_of_request_has_its_own_connections(flood):
    """
    One kind of request holds every connection it may have, and waits for more.

    It has exactly its own number of connections then, and a request of every other kind passes.
    """

    async def main():
        released, full, held = asyncio.Event(), asyncio.Event(), []

        async def handle(request):
            if request.path == "/slow":
                held.append(request)
                if len(held) == limit:
                    full.set()
                await released.wait()
            return web.Response()

        app = web.Application()
        app.router.add_get("/{name}", handle)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=2 * MANY).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        transport = HttpTransport(url)

        def send(path, kind):
            return transport.send(Request(method="GET", url=url + path, kind=kind))

        limit = CONNECTIONS[flood] or MANY
        slow = [asyncio.create_task(send("/slow", flood)) for _ in range(limit + 5)]
        try:
            async with asyncio.timeout(30):
                await full.wait()
                for kind in set(Kind) - {flood}:
                    await send("/quick", kind)
            found = len(held)
            released.set()
            await asyncio.gather(*slow)
        finally:
            await transport.close()
            await runner.cleanup()
        return found

    assert asyncio.run(main()) == (CONNECTIONS[flood] or MANY + 5)


def test_slow_listings_do_not_delay_a_step(fake, loopback, datum):
    with tinkex.ServiceClient(base_url=loopback.url) as service:
        training = service.create_lora_training_client("fake/model", rank=4)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            rest = service.create_rest_client()
        hold = fake.hold("training_runs")
        slow = [rest.list_training_runs() for _ in range(CONNECTIONS[Kind.TRAIN] + 6)]
        assert hold.arrived.wait(5)
        for _ in range(3):
            training.optim_step(types.AdamParams(learning_rate=1e-2)).result(10)
        assert not any(each.done() for each in slow)
        hold.release()
        [each.result(10) for each in slow]


#: The kind of each endpoint. Covers everything that a program does; add new endpoints here.
KINDS = {
    "client/config": Kind.SESSION,
    "client/dynamic_config": Kind.SESSION,
    "create_session": Kind.SESSION,
    "session_heartbeat": Kind.SESSION,
    "sessions": Kind.SESSION,
    "create_sampling_session": Kind.SESSION,
    "create_model": Kind.TRAIN,
    "forward_backward": Kind.TRAIN,
    "optim_step": Kind.TRAIN,
    "save_weights": Kind.TRAIN,
    "load_weights": Kind.TRAIN,
    "asample": Kind.SAMPLE,
    "retrieve_future": Kind.RETRIEVE,
    "retrieve_futures": Kind.RETRIEVE,
    "stream_sample": Kind.RETRIEVE,
    "cancel_future": Kind.RETRIEVE,
    "telemetry": Kind.TELEMETRY,
    "get_server_capabilities": Kind.REST,
    "get_info": Kind.REST,
    "weights_info": Kind.REST,
    "training_runs": Kind.REST,
    "checkpoints": Kind.REST,
    "copy_weights": Kind.REST,
    "audit": Kind.REST,
}


def test_every_request_of_a_program_has_its_kind(datum, monkeypatch):
    monkeypatch.setattr("tinkex.client.session.HEARTBEAT_EVERY_S", 0.01)
    monkeypatch.setattr("tinkex.client.http.shared_poll.MAX_SELF_POLLING", 0)
    fake = FakeService(
        config={"sample_use_retrieve_futures": True},
        dynamic_config={"sample_cancel_enabled": True},
        sample_s=0.1,
    )
    fake.script("copy_weights", Answer(body={"tinker_path": "tinker://a/weights/b"}))
    fake.script("audit", Answer(body={"entries": []}))
    kinds = {}

    def transport(base_url, settings):
        inner = fake.transport(base_url, settings)

        class Noting:
            close = inner.close

            async def send(self, request):
                note(request)
                return await inner.send(request)

            async def stream(self, request):
                note(request)
                return await inner.stream(request)

        return Noting()

    def note(request):
        path = request.url.partition("/api/v1/")[2].partition("?")[0]
        name = path if path in KINDS else path.partition("/")[0]
        kinds.setdefault(name, set()).add(request.kind)

    settings = tinkex.Settings(base_url="http://127.0.0.1:9", project_id="p")
    with tinkex.ServiceClient(settings=settings, _make_transport=transport) as service:
        service.get_server_capabilities()
        training = service.create_lora_training_client("fake/model", rank=4)
        training.forward_backward([datum], "cross_entropy").result(5)
        training.optim_step(types.AdamParams(learning_rate=1e-2)).result(5)
        saved = training.save_state("a").result(5).path
        service.create_training_client_from_state(saved)
        training.get_info()
        sampling = service.create_sampling_client(base_model="fake/model")
        params = SamplingParams(max_tokens=2)
        sampling.sample(PROMPT, 1, params).result(5)
        list(sampling.sample_stream(PROMPT, 1, params))
        fake._sample_s = 60
        request = len(fake.requests)
        dropped = sampling.sample(PROMPT, 1, params)
        until(lambda: any(seen.endpoint == "asample" for seen in fake.requests[request:]))
        dropped.cancel()
        until(lambda: fake.cancelled)
        rest = tinkex.RestClient(service.holder)
        rest.list_training_runs().result(5)
        rest.list_user_checkpoints().result(5)
        service.copy_weights(saved).result(5)
        tinkex.AdminClient(service.holder).get_audit_log().result(5)
        until(lambda: "session_heartbeat" in kinds)
    assert kinds == {name: {kind} for name, kind in KINDS.items()}


# -- certificates ------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_a_custom_ca_bundle_is_trusted(tmp_path, monkeypatch):
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        shlex.split(
            "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost "
            f"-addext subjectAltName=DNS:localhost,IP:127.0.0.1 -keyout {key} -out {cert}"
        ),
        check=True,
        capture_output=True,
    )
    ready, stop, found = threading.Event(), asyncio.Event(), {}

    async def serve():
        async def handle(request):
            return web.json_response({"supported_models": [], "session_id": "s"})

        app = web.Application()
        app.router.add_route("*", "/{tail:.*}", handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(cert, key)
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
        found["port"], found["loop"] = runner.addresses[0][1], asyncio.get_running_loop()
        ready.set()
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert ready.wait(5)
        url = f"https://localhost:{found['port']}"
        monkeypatch.setenv("TINKEX_FIRST_CONTACT_S", "0.2")
        monkeypatch.setenv("TINKEX_CA_BUNDLE", str(cert))
        with tinkex.ServiceClient(base_url=url) as service:
            assert service.get_server_capabilities().supported_models == []
        monkeypatch.delenv("TINKEX_CA_BUNDLE")
        stranger = tinkex.ServiceClient(base_url=url)
        with pytest.raises(tinkex.APIConnectionError, match="CERTIFICATE_VERIFY_FAILED"):
            stranger.get_server_capabilities()
        stranger.close("errored").result(5)
        monkeypatch.setenv("TINKEX_CA_BUNDLE", str(tmp_path / "none.pem"))
        broken = tinkex.ServiceClient(base_url=url)
        with pytest.raises(tinkex.TinkerError, match="CA bundle"):
            broken.get_server_capabilities()
        broken.close("errored").result(5)
    finally:
        found["loop"].call_soon_threadsafe(stop.set)
        thread.join(5)


# -- processes ---------------------------------------------------------------------------------------


def run_program(text, *arguments):
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(text), *arguments],
        capture_output=True,
        text=True,
        timeout=40,
        check=False,
    )


def test_a_forked_child_continues_with_its_parents_clients(fake, loopback):
    done = run_program(
        """
        import os, sys
        import tinkex
        from tinkex import types
        service = tinkex.ServiceClient(base_url=sys.argv[1])
        training = service.create_lora_training_client("fake/model")
        sampling = service.create_sampling_client(base_model="fake/model")
        ask = lambda: sampling.sample(
            types.ModelInput.from_ints([1, 2]), 1, types.SamplingParams(max_tokens=1)
        ).result(10).sequences[0].tokens
        assert ask() == [1]
        child = os.fork()
        if child == 0:
            code = 1
            try:
                assert ask() == [1]
                assert service.get_server_capabilities().supported_models
                try:
                    training.optim_step(types.AdamParams())
                except RuntimeError as error:
                    assert "belongs to process" in str(error), error
                    code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        assert ask() == [1]
        training.optim_step(types.AdamParams()).result(10)
        service.close("success").result(10)
        """,
        loopback.url,
    )
    assert (done.returncode, done.stderr) == (0, "")
    numbers = [seen.json()["seq_id"] for seen in fake.requests if seen.endpoint == "asample"]
    assert numbers[0] == 0
    assert numbers[1] >= 1_000_000_000  # the child is a clone
    assert numbers[2] == 1


def test_a_forked_child_of_an_unused_client_has_its_own_session(fake, loopback):
    done = run_program(
        """
        import os, sys
        import tinkex
        from tinkex import types
        from tinkex.client.futures import Promise
        service = tinkex.ServiceClient(base_url=sys.argv[1])
        pending = Promise()
        child = os.fork()
        training = service.create_lora_training_client("fake/model")
        training.optim_step(types.AdamParams()).result(10)
        if child == 0:
            try:
                pending.result()
            except RuntimeError as error:
                os._exit(0 if "never arrives in a forked" in str(error) else 1)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        service.close("success").result(10)
        """,
        loopback.url,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len({model for model, _, _ in fake.ran}) == 2


@pytest.mark.parametrize("ending", ["pass", "sys.exit(3)", "raise SystemExit(3)"])
def test_a_program_that_ends_without_closing_exits_cleanly(fake, loopback, ending):
    fake.hold("retrieve_future")
    started = time.monotonic()
    done = run_program(
        f"""
        import sys
        import tinkex
        from tinkex import types
        service = tinkex.ServiceClient(base_url=sys.argv[1])
        sampling = service.create_sampling_client(base_model="fake/model")
        prompt = types.ModelInput.from_ints([1])
        futures = [sampling.sample(prompt, 1, types.SamplingParams()) for _ in range(20)]
        try:
            futures[0].result(0.2)
        except TimeoutError:
            pass
        {ending}
        """,
        loopback.url,
    )
    assert (done.returncode, done.stderr) == (0 if ending == "pass" else 3, "")
    assert time.monotonic() - started < 20
