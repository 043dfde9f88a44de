"""H9: the user's proxies and headers are used on every request."""

import asyncio
import base64
import shlex
import shutil
import ssl
import subprocess
import threading
from contextlib import contextmanager

import pytest
from aiohttp import web

import tinkex
from tinkex.client.files.file_download import fetch_file
from tinkex.client.http.transport import proxy_for
from tinkex.client.settings import Settings

KEY = "tml-0123456789"


@pytest.mark.parametrize(
    ("env", "url", "expected"),
    [
        ({}, "http://a.example", None),
        ({"HTTP_PROXY": "http://p:1"}, "http://a.example", "http://p:1"),
        ({"http_proxy": "p:1"}, "http://a.example", "http://p:1"),
        ({"http_proxy": "http://p:1"}, "https://a.example", None),
        ({"https_proxy": "http://p:2"}, "https://a.example", "http://p:2"),
        ({"https_proxy": "http://s:2", "HTTPS_PROXY": "http://c:2"}, "https://a", "http://s:2"),
        ({"ALL_PROXY": "http://p:3"}, "https://a.example", "http://p:3"),
        ({"http_proxy": "http://p:1", "no_proxy": "a.example"}, "http://a.example", None),
        ({"http_proxy": "http://p:1", "NO_PROXY": ".example"}, "http://a.example", None),
        ({"http_proxy": "http://p:1", "no_proxy": "*"}, "http://a.example", None),
        ({"http_proxy": "http://p:1", "no_proxy": "b.example"}, "http://a.example", "http://p:1"),
        ({"HTTP_PROXY": "http://evil", "REQUEST_METHOD": "GET"}, "http://a.example", None),
    ],
)
def test_the_environment_names_the_proxy(env, url, expected):
    assert proxy_for(url, env) == expected


def test_a_kind_of_proxy_that_cannot_be_used_is_refused():
    with pytest.raises(tinkex.TinkerError, match="HTTP proxy"):
        proxy_for("http://a.example", {"all_proxy": "socks5://user:hidden@p:1"})


def test_a_server_on_this_machine_is_reached_directly(tmp_path):
    env = {"HTTP_PROXY": "http://proxy.example:3128"}
    for url in ("local", "http://127.0.0.1:8000", "http://localhost:8000"):
        assert Settings.resolve(base_url=url, env=env, home=tmp_path).proxy is None


class Proxy:
    """A forward proxy that also opens tunnels; all of them lead to one address."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.heads: list[bytes] = []

    async def handle(self, reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        self.heads.append(head)
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", self.port)
        if head.startswith(b"CONNECT "):
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        else:
            inner_writer.write(head)

        async def pump(source, sink):
            while data := await source.read(65536):
                sink.write(data)
                await sink.drain()
            sink.close()

        try:
            await asyncio.gather(
                pump(reader, inner_writer), pump(inner_reader, writer), return_exceptions=True
            )
        finally:  # also where the test ends before a tunnel does
            for end in (writer, inner_writer):
                end.close()


@contextmanager
def proxied(tls=None):
    """A service behind a proxy: (address of the proxy, what the proxy and the service saw)."""
    ready, found = threading.Event(), {}
    seen = []

    async def serve():
        async def answer(request):
            seen.append((request.host, dict(request.headers)))
            return web.json_response({"supported_models": [], "session_id": "s"})

        app = web.Application()
        app.router.add_route("*", "/{tail:.*}", answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
        proxy = Proxy(runner.addresses[0][1])
        server = await asyncio.start_server(proxy.handle, "127.0.0.1", 0)
        found["port"] = server.sockets[0].getsockname()[1]
        found["proxy"], found["loop"], found["stop"] = (
            proxy,
            asyncio.get_running_loop(),
            asyncio.Event(),
        )
        ready.set()
        await found["stop"].wait()
        server.close()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert ready.wait(5)
        yield f"127.0.0.1:{found['port']}", found["proxy"].heads, seen
    finally:
        found["loop"].call_soon_threadsafe(found["stop"].set)
        thread.join(5)


@pytest.fixture(autouse=True)
def _no_other_proxies(monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def test_h9_a_proxy_with_a_password_forwards_requests(monkeypatch):
    with proxied() as (address, heads, seen):
        monkeypatch.setenv("HTTP_PROXY", f"http://user:hunter2@{address}")
        with tinkex.ServiceClient(base_url="http://service.invalid", api_key=KEY) as service:
            service.get_server_capabilities()
            assert "hunter2" not in repr(service.holder.settings)
    assert heads[0].startswith(b"POST http://service.invalid/api/v1/client/config ")
    password = base64.b64encode(b"user:hunter2")
    assert b"Proxy-Authorization: Basic " + password in heads[0]
    assert {host for host, _ in seen} == {"service.invalid"}


def test_h9_an_exempt_host_is_reached_directly(monkeypatch):
    with proxied() as (address, heads, _):
        monkeypatch.setenv("HTTP_PROXY", f"http://{address}")
        monkeypatch.setenv("NO_PROXY", "service.invalid")
        settings = Settings.resolve(
            base_url="http://service.invalid", api_key=KEY, first_contact_s=0.1
        )
        service = tinkex.ServiceClient(settings=settings)
        with pytest.raises(tinkex.APIConnectionError):
            service.get_server_capabilities()
        service.close("errored").result(5)
    assert heads == []


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_h9_tls_goes_through_a_tunnel_and_trusts_the_given_bundle(tmp_path, monkeypatch):
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        shlex.split(
            "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=service.invalid "
            f"-addext subjectAltName=DNS:service.invalid -keyout {key} -out {cert}"
        ),
        check=True,
        capture_output=True,
    )
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(cert, key)
    with proxied(tls) as (address, heads, seen):
        monkeypatch.setenv("HTTPS_PROXY", f"http://{address}")
        monkeypatch.setenv("TINKER_CA_BUNDLE", str(cert))
        with tinkex.ServiceClient(base_url="https://service.invalid", api_key=KEY) as service:
            service.get_server_capabilities()
            assert seen[-1][1]["X-API-Key"] == KEY
            calls = len(heads)
            link, settings = "https://service.invalid/file", service.holder.settings
            assert fetch_file(link, tmp_path / "file", settings=settings)
    assert heads[calls].startswith(b"CONNECT service.invalid:443 ")
    assert "X-API-Key" not in seen[-1][1]  # nor to a signed link
    assert heads[0].startswith(b"CONNECT service.invalid:443 ")
    assert KEY.encode() not in b"".join(heads)  # only the service itself gets it


def test_a_missing_proxy_is_an_error_without_its_password(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://user:hunter2@127.0.0.1:9")
    monkeypatch.setenv("TINKEX_FIRST_CONTACT_S", "0.1")
    monkeypatch.setenv("TINKEX_TRACEBACKS", "full")
    service = tinkex.ServiceClient(base_url="http://service.invalid", api_key=KEY)
    says = r"the proxy at 127\.0\.0\.1:9: connection refused"
    with pytest.raises(tinkex.APIConnectionError, match=says) as caught:
        service.get_server_capabilities()
    chain = [caught.value, caught.value.__cause__, caught.value.__cause__.__cause__]
    assert "hunter2" not in "".join(map(repr, chain))
    service.close("errored").result(5)


# -- headers -----------------------------------------------------------------------------------------


def test_h9_cloudflare_and_custom_headers_are_sent_with_every_request(fake, loopback, monkeypatch):
    monkeypatch.setenv("CLOUDFLARE_ACCESS_CLIENT_ID", "cf-id")
    monkeypatch.setenv("CLOUDFLARE_ACCESS_CLIENT_SECRET", "cf-secret")
    headers = {"X-Team": "blue", "user-agent": "mine/1"}
    with tinkex.ServiceClient(base_url=loopback.url, default_headers_overrides=headers) as service:
        service.create_lora_training_client("fake/model")
    assert len(fake.requests) > 4
    for seen in fake.requests:
        assert seen.headers["cf-access-client-id"] == "cf-id"
        assert seen.headers["cf-access-client-secret"] == "cf-secret"
        assert seen.headers["x-team"] == "blue"
        assert seen.headers["user-agent"] == "mine/1"  # the client's own is replaced, not repeated


def test_h9_a_key_among_the_custom_headers_is_the_one_that_is_sent(fake, loopback):
    headers = {"x-api-key": "of-my-gateway"}
    with tinkex.ServiceClient(
        base_url=loopback.url, api_key=KEY, default_headers_overrides=headers
    ) as service:
        service.get_server_capabilities()
    assert {seen.headers["x-api-key"] for seen in fake.requests} == {"of-my-gateway"}
