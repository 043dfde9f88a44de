"""The console's pages, sign-in, cookie and routes, without a browser."""

import asyncio
import gzip
import itertools
import json
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from starlette.routing import Route
from yarl import URL

from server.echo import EchoExecutor
from server.hosting import Api, hosted
from server.tenants import everything_kept, new_key, revoke, with_key
from tinkex.server.api import console_stream
from tinkex.server.store.keys import MAX_BROWSERS
from waiting import until_async

pytestmark = pytest.mark.anyio

V1 = "/api/v1"
CONSOLE = f"{V1}/console"


def origin_of(api: Api) -> str:
    return str(api.http._base_url).rstrip("/")


@asynccontextmanager
async def browser(api: Api) -> AsyncIterator[aiohttp.ClientSession]:
    """A client that keeps cookies, as a browser does, and sends the Origin of the server's pages."""
    jar = aiohttp.CookieJar(unsafe=True)  # also of an address without a name
    headers = {"Origin": origin_of(api), "Accept": "text/html"}
    async with aiohttp.ClientSession(origin_of(api), cookie_jar=jar, headers=headers) as http:
        yield http


async def sign_in(http: aiohttp.ClientSession, key: str) -> aiohttp.ClientResponse:
    async with http.post(f"{CONSOLE}/sign_in", json={"key": key}) as got:
        await got.read()
        return got


async def status(http: aiohttp.ClientSession, path: str = f"{CONSOLE}/session") -> int:
    async with http.get(path) as got:
        await got.read()
        return got.status


async def test_browsers_get_the_console_and_programs_what_they_got(api: Api) -> None:
    assert b"TINKER_BASE_URL" in (await api.get("/")).body
    async with browser(api) as http:
        pages = (
            "/",
            "/training_runs/x:train:0",
            "/sessions",
            "/checkpoints/r/weights%2Fa",
            "/keys",
        )
        for page in pages:
            async with http.get(page) as got:
                assert got.status == 200
                assert b"console/app.js" in await got.read()
                policy = got.headers["Content-Security-Policy"]
                assert policy.startswith("default-src 'self';")
                assert "frame-ancestors 'none'" in policy
                assert "unsafe" not in policy


async def test_files_are_compressed_validated_and_inside_their_folder(api: Api) -> None:
    async with aiohttp.ClientSession(origin_of(api), auto_decompress=False) as http:
        async with http.get("/console/app.js", headers={"Accept-Encoding": "gzip"}) as got:
            assert got.headers["Content-Type"].startswith("text/javascript")
            assert b"import" in gzip.decompress(await got.read())
            tag = got.headers["ETag"]
        async with http.get("/console/app.js", headers={"If-None-Match": tag}) as got:
            assert got.status == 304
    outside = ("/etc/passwd", "%2Fetc%2Fpasswd", "..%2Fapp.py", "../app.py", "%00", "C:%5Cx")
    for name in (*outside, "nothing.js", "", "vendor", ".", "vendor/../../app.py"):
        address = URL(f"{origin_of(api)}/console/{name}", encoded=True)
        async with api.http.get(address) as got:
            assert got.status == 404, name


async def test_a_key_signs_in_and_its_cookie_is_strict_and_stored_as_a_hash(
    echo: EchoExecutor, tmp_path: Path
) -> None:
    key = await new_key(tmp_path, "alice")
    async with hosted(echo, tmp_path) as api, browser(api) as http:
        assert await status(http) == 401
        assert (await sign_in(http, "tml-wrong")).status == 401
        got = await sign_in(http, key)
        assert got.status == 200
        (cookie,) = got.cookies.values()
        assert cookie["httponly"]
        assert cookie["samesite"] == "strict"
        assert cookie["path"] == "/"
        assert not cookie["secure"]
        assert await status(http) == 200
        # The same cookie reads the other routes, and says whose they are.
        async with http.get(f"{CONSOLE}/session") as session:
            assert (await session.json())["owner"] == "alice"
        assert await status(http, "/api/v1/training_runs") == 200
        kept = everything_kept(tmp_path)
        assert cookie.value.encode() not in kept
        assert key.encode() not in kept
        # A cookie is not a key.
        async with http.post("/api/v1/auth/token") as token:
            assert token.status == 400
        async with http.post(f"{CONSOLE}/sign_out") as out:
            assert out.status == 200
        http.cookie_jar.update_cookies({cookie.key: cookie.value})
        assert await status(http) == 401, "the cookie is dead, not only deleted from the browser"


async def test_the_cookie_is_secure_behind_tls(echo: EchoExecutor, tmp_path: Path) -> None:
    key = await new_key(tmp_path, "alice")
    public = "https://tinkex.example.com/below"
    async with hosted(echo, tmp_path, public_url=public) as api, browser(api) as http:
        headers = {"Origin": "https://tinkex.example.com"}
        async with http.post(f"{CONSOLE}/sign_in", json={"key": key}, headers=headers) as got:
            (cookie,) = got.cookies.values()
            assert cookie["secure"]
        async with http.get("/keys") as page:
            assert b'<base href="/below/"' in await page.read()


async def test_a_change_with_a_cookie_needs_the_own_origin(
    echo: EchoExecutor, tmp_path: Path
) -> None:
    key = await new_key(tmp_path, "alice", is_admin=True)
    async with hosted(echo, tmp_path) as api, browser(api) as http:
        assert (await sign_in(http, key)).status == 200
        own = origin_of(api)
        others = ("https://evil.example", "null", "", "http://127.0.0.1:1", own + ".evil.example")
        assert api.app is not None
        changing = [
            (method, re.sub(r"{[^}]*}", "x", route.path))
            for route in api.app.routes
            if isinstance(route, Route) and not route.path.startswith(f"{V1}/local/")
            for method in sorted((route.methods or set()) - {"GET", "HEAD"})
        ]
        assert len(changing) > 40
        async with aiohttp.ClientSession(own, cookie_jar=http.cookie_jar) as other:
            for origin, (method, path) in itertools.product(others, changing):
                sent = {"Origin": origin} if origin else {}
                # A sign-in needs no cookie, but a body, and has the same rule.
                body = {"key": key} if path == f"{CONSOLE}/sign_in" else {}
                async with other.request(method, path, json=body, headers=sent) as got:
                    assert got.status == 403, (method, path, origin)
                    assert b"needs the Origin of this server" in await got.read(), (method, path)
        async with http.post(f"{CONSOLE}/keys", json={"owner": "bob"}) as got:
            assert got.status == 200


async def test_a_cookie_dies_with_its_key_and_so_does_its_stream(
    echo: EchoExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = await new_key(tmp_path, "alice")
    ahead_s = 0.0
    async with hosted(echo, tmp_path) as api, browser(api) as http:
        assert api.app is not None
        authenticator = api.app.state.authenticator
        monkeypatch.setattr(authenticator, "_clock", lambda: time.monotonic() + ahead_s)
        assert (await sign_in(http, key)).status == 200
        async with http.get(f"{CONSOLE}/live?server=true") as stream:
            await stream.content.readuntil(b"event: server")
            assert await status(http) == 200
            await revoke(tmp_path, 1)
            ahead_s = 2.0
            assert await status(http) == 401
            async with asyncio.timeout(20):
                await stream.read()  # to its end


async def test_a_server_without_keys_needs_no_sign_in_and_refuses_other_hosts(api: Api) -> None:
    answer = await api.get(f"{CONSOLE}/session")
    assert answer.json["needs_keys"] is False
    for headers in ({"Host": "evil.example"}, {"Origin": "https://evil.example"}):
        async with api.http.get(f"{CONSOLE}/session", headers=headers) as got:
            assert got.status == 403
    # Nobody may create a key that locks the others out.
    answer = await api.post(f"{CONSOLE}/keys", {"owner": "me"})
    assert answer.status == 403
    assert "`tinkex key create`" in answer.json["detail"]


async def test_only_administrators_see_and_manage_the_keys_of_others(
    echo: EchoExecutor, tmp_path: Path
) -> None:
    alices = await new_key(tmp_path, "alice", is_admin=True, name="laptop")
    bobs = await new_key(tmp_path, "bob")
    async with (
        hosted(echo, tmp_path) as api,
        with_key(api, alices) as alice,
        with_key(api, bobs) as bob,
    ):
        seen = (await alice.get(f"{CONSOLE}/keys")).json["keys"]
        assert {one["owner"] for one in seen} == {"alice", "bob"}
        assert all("hash" not in one and "key" not in one for one in seen)
        assert [one["owner"] for one in (await bob.get(f"{CONSOLE}/keys")).json["keys"]] == ["bob"]
        assert (await bob.post(f"{CONSOLE}/keys", {"owner": "bob"})).status == 403
        made = (await alice.post(f"{CONSOLE}/keys", {"owner": "carol", "expires_days": 30})).json
        async with with_key(api, made["key"]) as carol:
            assert (await carol.get(f"{CONSOLE}/session")).json["owner"] == "carol"
            assert await alice.call("DELETE", f"console/keys/{made['key_id']}") == 204
            assert (await carol.get(f"{CONSOLE}/session")).status == 401
        assert await bob.call("DELETE", "console/keys/1") == 403
        assert await alice.call("DELETE", "console/keys/99") == 404
        for wrong in ({"owner": " "}, {"owner": "a\nb"}, {"owner": "a", "expires_days": 0}):
            assert (await alice.post(f"{CONSOLE}/keys", wrong)).status == 422


async def test_a_token_of_an_administrator_does_not_manage_keys(
    echo: EchoExecutor, tmp_path: Path
) -> None:
    key = await new_key(tmp_path, "alice", is_admin=True)
    async with hosted(echo, tmp_path) as api, with_key(api, key) as alice, browser(api) as http:
        token = (await alice.post("auth/token", {})).json["jwt"]
        async with with_key(api, token) as short_lived:
            refused = await short_lived.post(f"{CONSOLE}/keys", {"owner": "alice", "admin": True})
            assert refused.status == 403
            assert "Send the API key itself" in refused.json["detail"]
            assert await short_lived.call("DELETE", "console/keys/1") == 403
        assert (await sign_in(http, token)).status == 401
        assert len((await alice.get(f"{CONSOLE}/keys")).json["keys"]) == 1
        # The cookie of a browser is given for the key itself.
        assert (await sign_in(http, key)).status == 200
        async with http.delete(f"{CONSOLE}/keys/1") as got:
            assert got.status == 204
        assert (await alice.get(f"{CONSOLE}/session")).status == 401


async def test_browsers_of_one_key_are_limited(echo: EchoExecutor, tmp_path: Path) -> None:
    key = await new_key(tmp_path, "alice")
    async with hosted(echo, tmp_path) as api, browser(api) as first:
        await sign_in(first, key)
        for _ in range(MAX_BROWSERS):
            async with browser(api) as another:
                await sign_in(another, key)
        assert api.app is not None
        api.app.state.authenticator.forget()
        assert await status(first) == 401


async def test_a_sign_in_respects_the_disk_reserve(echo: EchoExecutor, tmp_path: Path) -> None:
    key = await new_key(tmp_path, "alice")
    async with (
        hosted(echo, tmp_path, reserve_mb=2.0**40) as api,
        browser(api) as http,
    ):
        assert (await sign_in(http, key)).status == 503


async def trained(api: Api, steps: int) -> str:
    model = await api.model()
    for number in range(steps):
        await api.passed(await api.forward_backward(model, 2 * number + 1))
        await api.result(await api.optim_step(model, 2 * number + 2))
    return model


async def events(stream: aiohttp.ClientResponse, count: int) -> list[tuple[str, Any]]:
    """The next events of a stream."""
    found: list[tuple[str, Any]] = []
    async with asyncio.timeout(10):
        while len(found) < count:
            name = (await stream.content.readline()).decode().strip()
            if name.startswith("event: "):
                data = (await stream.content.readline()).decode().removeprefix("data: ")
                found.append((name.removeprefix("event: "), json.loads(data)))
    return found


async def test_a_stream_has_the_steps_after_the_given_one_and_new_ones(api: Api) -> None:
    model = await trained(api, 3)
    query = f"run={model}&after=1&runs=true"
    async with api.http.get(f"{CONSOLE}/live?{query}") as stream:
        (_, total), (name, run) = await events(stream, 2)
        assert total == {"total": 1}
        assert name == "run"
        assert [point["step"] for point in run["points"]] == [2, 3]
        assert run["steps"] == 3
        await api.result(await api.optim_step(model, 7))
        ((_, more),) = await events(stream, 1)
        assert [point["step"] for point in more["points"]] == [4]
        assert api.app is not None
        assert api.app.state.console_streams.owners == {"local": 1}
    streams = api.app.state.console_streams
    await until_async(lambda: not streams.owners)
    assert (await api.get(f"{CONSOLE}/live?run={model}&after=1&after=2")).status == 400


async def test_only_runs_with_new_steps_share_the_points_of_a_tick(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console_stream, "MAX_POINTS", 2)
    one, other = await trained(api, 3), await trained(api, 1)
    query = f"run={one}&after=0&run={other}&after=1"
    async with api.http.get(f"{CONSOLE}/live?{query}") as stream:
        found = [(run["training_run_id"], run["points"]) for _, run in await events(stream, 3)]
    steps = [[point["step"] for point in points] for run, points in found if run == one]
    assert steps == [[1, 2], [3]]


async def test_the_number_of_streams_is_limited(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console_stream, "MAX_STREAMS_PER_OWNER", 1)
    async with api.http.get(f"{CONSOLE}/live") as first:
        assert first.status == 200
        refused = await api.get(f"{CONSOLE}/live")
        assert refused.status == 429
        assert "Close some" in refused.json["detail"]


async def test_requests_samplers_usage_and_the_server_are_listed(
    api: Api, echo: EchoExecutor
) -> None:
    model = await trained(api, 1)
    session = model.partition(":")[0]
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": api.base_model}
    await api.post("create_sampling_session", body)
    echo.open.clear()
    waiting = await api.forward_backward(model, 3)
    found = (await api.get(f"{CONSOLE}/runs/{model}/requests?limit=2")).json
    assert found["total_count"] == 4
    first, second = found["requests"]
    assert (first["request_id"], first["status"]) == (waiting, "waiting")
    assert first["queue_state"] == "active"
    assert (second["kind"], second["queue_state"]) == ("optim_step", None)
    state = (await api.get(f"{CONSOLE}/server")).json
    assert state["owners"] == [{"owner": "local", "requests": 1, "tokens": 3, "samples": 0}]
    assert state["engines"][0]["base_model"] == api.base_model
    echo.open.set()
    await api.passed(waiting)
    (sampler,) = (await api.get(f"{CONSOLE}/samplers")).json["samplers"]
    assert sampler["session_id"] == session
    used = (await api.get(f"{CONSOLE}/usage?days=1")).json
    assert {(one["what"], one["owner"]) for one in used["usage"]} == {("training", "local")}


async def test_a_search_finds_runs_by_id_model_and_metadata(api: Api) -> None:
    session = await api.session()
    for number, name in enumerate(("Grüße 50%", "other")):
        body = {
            "session_id": session,
            "model_seq_id": number,
            "base_model": api.base_model,
            "lora_config": {"rank": 8},
            "user_metadata": {"name": name},
        }
        created = await api.post("create_model", body)
        await api.result(created.json["request_id"])

    async def found(text: str) -> int:
        runs = await api.get(f"/api/v1/training_runs?search={text}")
        count: int = runs.json["cursor"]["total_count"]
        return count

    assert await found("Gr%C3%BC%C3%9Fe") == 1
    assert await found("50%25") == 1
    assert await found("%25") == 1, "not a wildcard"
    assert await found("train:1") == 1
    assert await found(api.base_model.upper()) == 2
    assert await found("nothing") == 0
