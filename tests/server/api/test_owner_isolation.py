"""
Every route with five callers: the owner, another owner, a revoked key, no key; also for published data.

The routes come from the application's route table. `EXPECTED` has the expected answers; a route that
is missing there, or an unknown path parameter, fails the suite.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from server.echo import EchoExecutor, task_of
from server.hosting import PROTOBUF, Api, hosted, pass_body
from server.tenants import new_key, revoke, with_key
from tinkex.server.api.auth import CONSOLE_PAGES, LOCAL_PATHS, is_open
from tinkex.server.api.errors import OPENAI_PREFIXES
from tinkex.server.app import create_app
from tinkex.server.settings import Settings
from tinkex.server.store import open_store

pytestmark = pytest.mark.anyio

V1 = "/api/v1"
CONSOLE = f"{V1}/console"
CHECKPOINT = f"{V1}/training_runs/{{run}}/checkpoints/{{kind}}/{{name}}"

#: The access rule of a route. `open`: reveals nothing about owners. `signed`: the URL is signed.
#: `machine`: this machine only. `caller`: answers about the caller. `silent`: harmless, and the same
#: answer for all. `owned`: objects of their owner only. `shared`: objects that may be published.
Sort = Literal["open", "signed", "machine", "caller", "silent", "owned", "shared"]


@dataclass(frozen=True)
class Expected:
    sort: Sort
    #: The answer to the owner; the body, if any, refers to the owner's objects.
    status: int = 200
    body: Any = None
    #: The query string, if one is needed.
    query: str = ""


SAMPLE = {
    "sampling_session_id": "{sampler}",
    "prompt": {"chunks": [{"tokens": [1]}]},
    "sampling_params": {"max_tokens": 1},
}
GRAPH = {
    "session_id": "{session}",
    "custom_loss_seq_id": 0,
    "name": "total",
    "inputs": [{"name": "logprobs", "rank": 1}],
    "graph": {"format": 1, "nodes": []},
}
POLL = {
    "target": {
        "type": "sampling_session",
        "sampling_session_id": "{sampler}",
        "cloned_sampler_id": 0,
    },
    "prev_cursor": 0,
    "timeout": 0,
}

CHAT = {"model": "{path}", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
OPENAI = {
    ("GET", "models"): Expected("caller"),
    ("GET", "models/{model:path}"): Expected("shared"),
    ("POST", "chat/completions"): Expected("shared", body=CHAT),
    ("POST", "completions"): Expected("shared", body={"model": "{path}", "prompt": "a"}),
}

#: In the order of the owner's calls: steps have numbers, and routes that delete come last.
EXPECTED: Mapping[tuple[str, str], Expected] = {
    ("GET", f"{V1}/healthz"): Expected("open"),
    ("GET", "/api/unauthed/auth-config"): Expected("open", 404),
    ("GET", "/"): Expected("open"),
    ("GET", "/readyz"): Expected("open"),
    ("GET", "/docs"): Expected("open"),
    ("GET", "/openapi.json"): Expected("open"),
    # The console: files without data, and a sign-in that needs the Origin of this server.
    ("GET", "/console/{file:path}"): Expected("open"),
    **{("GET", f"/{page}"): Expected("open") for page in CONSOLE_PAGES},
    **{("GET", f"/{page}/{{rest:path}}"): Expected("open") for page in CONSOLE_PAGES},
    ("POST", f"{CONSOLE}/sign_in"): Expected("open", 403, body={"key": "x"}),
    ("POST", f"{CONSOLE}/sign_out"): Expected("caller"),
    ("GET", f"{CONSOLE}/session"): Expected("caller"),
    ("GET", f"{CONSOLE}/samplers"): Expected("caller"),
    ("GET", f"{CONSOLE}/server"): Expected("caller"),
    ("GET", f"{CONSOLE}/usage"): Expected("caller"),
    ("GET", f"{CONSOLE}/keys"): Expected("caller"),
    # These keys are not an administrator's.
    ("POST", f"{CONSOLE}/keys"): Expected("caller", 403, body={"owner": "x"}),
    ("DELETE", f"{CONSOLE}/keys/{{key_id}}"): Expected("caller", 403),
    ("GET", f"{V1}/signed/traces/{{session_id}}"): Expected(
        "signed", 403, query="expires=9999999999&signature=0"
    ),
    ("GET", f"{V1}/downloads/{{version_id}}/{{file}}"): Expected(
        "signed", 403, query="expires=9999999999&signature=0"
    ),
    ("GET", f"{V1}/local/status"): Expected("signed", 403),
    ("POST", f"{V1}/local/models"): Expected("signed", 403, query="model=m"),
    ("GET", "/metrics"): Expected("machine"),
    ("GET", f"{V1}/audit"): Expected("caller"),
    ("GET", f"{V1}/auth/apikey/me"): Expected("caller"),
    ("POST", f"{V1}/auth/apikey"): Expected("caller", 403),
    ("POST", f"{V1}/auth/token"): Expected("caller"),
    ("GET", f"{V1}/billing/usage/checkpoints/current"): Expected("caller"),
    ("GET", f"{V1}/billing/usage/keys"): Expected("caller"),
    ("GET", f"{V1}/billing/usage/events"): Expected(
        "caller", query="starting_on=2026-01-01T00:00:00Z&ending_before=2026-01-02T00:00:00Z"
    ),
    ("GET", f"{V1}/checkpoints"): Expected("caller"),
    ("GET", f"{V1}/get_server_capabilities"): Expected("caller"),
    ("GET", f"{V1}/sessions"): Expected("caller"),
    ("GET", f"{V1}/training_runs"): Expected("caller"),
    ("POST", f"{V1}/client/config"): Expected("caller", body={"sdk_version": "0.36.0"}),
    ("POST", f"{V1}/client/dynamic_config"): Expected("caller", body={"sdk_version": "0.36.0"}),
    ("POST", f"{V1}/create_session"): Expected(
        "caller", body={"tags": [], "user_metadata": {}, "sdk_version": "0.36.0"}
    ),
    ("POST", f"{V1}/sessions/search"): Expected("caller", body={"owner": {"type": "accessible"}}),
    ("POST", f"{V1}/telemetry"): Expected("caller", body={"events": []}),
    ("POST", f"{V1}/cancel_future"): Expected("silent", body={"request_id": "{request}"}),
    # Reading.
    ("GET", f"{CONSOLE}/runs/{{run}}/requests"): Expected("owned"),
    ("GET", f"{CONSOLE}/live"): Expected("owned", query="run={model}"),
    ("GET", f"{V1}/samplers/{{sampling_session_id}}"): Expected("owned"),
    ("GET", f"{V1}/sessions/{{session_id}}"): Expected("shared"),
    ("GET", f"{V1}/sessions/{{session_id}}/trace_export"): Expected("owned"),
    ("GET", f"{V1}/training_runs/{{run}}"): Expected("shared"),
    ("GET", f"{V1}/training_runs/{{run}}/checkpoints"): Expected("shared"),
    ("GET", f"{V1}/training_runs/{{run}}/metrics"): Expected("owned"),
    ("GET", f"{CHECKPOINT}/archive"): Expected("shared", 302),
    ("GET", f"{CHECKPOINT}/external_weights_urls"): Expected("shared", 400),
    ("POST", f"{V1}/weights_info"): Expected("shared", body={"tinker_path": "{path}"}),
    ("POST", f"{V1}/get_info"): Expected("owned", body={"model_id": "{model}"}),
    ("POST", f"{V1}/retrieve_future"): Expected("owned", body={"request_id": "{request}"}),
    ("POST", f"{V1}/retrieve_futures"): Expected("owned", body=POLL),
    # Creating.
    ("POST", f"{V1}/session_heartbeat"): Expected("owned", body={"session_id": "{session}"}),
    ("POST", f"{V1}/asample"): Expected("owned", body={**SAMPLE, "seq_id": 9}),
    ("POST", f"{V1}/stream_sample"): Expected("owned", body={**SAMPLE, "seq_id": 10}),
    **{
        (method, f"{prefix}{path}"): expected
        for prefix in OPENAI_PREFIXES
        for (method, path), expected in OPENAI.items()
    },
    ("POST", f"{V1}/create_custom_loss"): Expected("owned", body=GRAPH),
    ("POST", f"{V1}/create_model"): Expected(
        "owned",
        body={
            "session_id": "{session}",
            "model_seq_id": 5,
            "base_model": "test/echo",
            "lora_config": {"rank": 8},
        },
    ),
    ("POST", f"{V1}/create_sampling_session"): Expected(
        "owned",
        body={
            "session_id": "{session}",
            "sampling_session_seq_id": 5,
            "base_model": "test/echo",
        },
    ),
    ("POST", f"{V1}/join_sampling_session"): Expected(
        "owned", body={"sampling_session_id": "{sampler}"}
    ),
    # Into the caller's own project; another owner's checkpoint is only read.
    ("POST", f"{V1}/copy_weights"): Expected(
        "shared", body={"source_path": "{path}", "destination_project_id": "p"}
    ),
    # Steps.
    ("POST", f"{V1}/forward_backward"): Expected("owned", body=3),
    ("POST", f"{V1}/forward"): Expected(
        "owned",
        body={"model_id": "{model}", "seq_id": 4, "forward_input": {"data": [], "loss_fn": "x"}},
    ),
    ("POST", f"{V1}/optim_step"): Expected(
        "owned", body={"model_id": "{model}", "seq_id": 5, "adam_params": {}}
    ),
    ("POST", f"{V1}/save_weights"): Expected(
        "owned", body={"model_id": "{model}", "seq_id": 6, "path": "b"}
    ),
    ("POST", f"{V1}/save_weights_external"): Expected(
        "owned", body={"model_id": "{model}", "seq_id": 7, "path": "b"}
    ),
    ("POST", f"{V1}/save_weights_for_sampler"): Expected(
        "owned", body={"model_id": "{model}", "seq_id": 8, "path": "b"}
    ),
    ("POST", f"{V1}/load_weights"): Expected(
        "owned", body={"model_id": "{model}", "seq_id": 9, "path": "{path}", "optimizer": False}
    ),
    ("POST", f"{V1}/unload_model"): Expected("owned", body={"model_id": "{model}"}),
    # Changing and deleting.
    ("PUT", f"{V1}/sessions/{{session_id}}/project"): Expected(
        "owned", 204, body={"project_id": "p"}
    ),
    ("PUT", f"{CHECKPOINT}/ttl"): Expected("owned", 204, body={"ttl_seconds": 3600}),
    ("POST", f"{CHECKPOINT}/publish"): Expected("owned", 204),
    ("DELETE", f"{CHECKPOINT}/publish"): Expected("owned", 204),
    ("DELETE", CHECKPOINT): Expected("owned", 204),
    ("POST", f"{V1}/sessions/{{session_id}}/finish"): Expected(
        "owned", body={"reason": {"type": "success"}}
    ),
    ("DELETE", f"{V1}/auth/apikey/me"): Expected("caller"),
}

#: The path parameters of routes.
IN_PATHS = {
    "session_id": "{session}",
    "model_id": "{model}",
    "run": "{model}",
    "kind": "weights",
    "name": "a",
    "sampling_session_id": "{sampler}",
    "version_id": "v",
    "file": "archive.tar",
    "model:path": "{path}",
    "file:path": "index.html",
    "rest:path": "anything/else",
    "key_id": "1",
}


def routes(app: FastAPI) -> Iterator[tuple[str, str]]:
    return listed(app.routes)


def listed(table: Iterable[BaseRoute]) -> Iterator[tuple[str, str]]:
    """Methods and paths, also of nested routers; the method is `*` for anything but a plain route."""
    for route in table:
        inner = getattr(route, "original_router", None)
        if inner is not None:
            yield from listed(inner.routes)
        elif isinstance(route, Route | APIRoute):
            for method in sorted((route.methods or {"*"}) - {"HEAD"}):
                yield method, route.path
        else:
            # Static files, a mounted application, a WebSocket: unclassified.
            yield "*", getattr(route, "path", repr(route))


def unclassified(app: FastAPI) -> set[tuple[str, str]]:
    """Unclassified routes."""
    return set(routes(app)) - EXPECTED.keys()


@pytest.fixture
def app(tmp_path: Path) -> Iterator[FastAPI]:
    settings = Settings(data=str(tmp_path / "other"))
    store = open_store(
        db_url=settings.db_url, storage_url=settings.storage_url, folder=settings.folder
    )
    try:
        yield create_app(settings, EchoExecutor(), store)
    finally:
        store.close()


def test_every_route_is_classified_and_every_classified_route_exists(app: FastAPI) -> None:
    assert not unclassified(app), "say in EXPECTED who may ask what of these routes"
    assert not EXPECTED.keys() - set(routes(app)), "these routes are gone"
    for (_, path), expected in EXPECTED.items():
        assert is_open(path) == (expected.sort in ("open", "signed")), path
        assert (path in LOCAL_PATHS) == (expected.sort == "machine"), path


def test_a_new_route_fails_until_it_is_classified(app: FastAPI) -> None:
    async def forgotten(_request: Request) -> Response:
        return Response()

    app.add_route(f"{V1}/forgotten/{{model_id}}", forgotten, methods=["GET"])
    app.add_api_route(f"{V1}/forgotten", forgotten, methods=["DELETE"])
    app.mount("/folder", Starlette())
    app.add_api_websocket_route(f"{V1}/socket", forgotten)
    outer, inner = APIRouter(prefix="/outer"), APIRouter(prefix="/inner")
    inner.add_api_route("/deep", forgotten)
    outer.include_router(inner)
    app.include_router(outer)
    assert unclassified(app) >= {
        ("GET", f"{V1}/forgotten/{{model_id}}"),
        ("DELETE", f"{V1}/forgotten"),
        ("*", "/folder"),
        ("*", f"{V1}/socket"),
    }
    assert any(path.endswith("/inner/deep") for _, path in unclassified(app))


# -- calls ---------------------------------------------------------------------------------------


def filled(value: Any, things: Mapping[str, str]) -> Any:
    """The same with the ids of an owner filled in."""
    if isinstance(value, str):
        return value.format(**things) if value.startswith("{") else value
    if isinstance(value, Mapping):
        return {key: filled(inner, things) for key, inner in value.items()}
    if isinstance(value, list):
        return [filled(inner, things) for inner in value]
    return value


def address(route: str, things: Mapping[str, str]) -> str:
    path = route
    for word, thing in IN_PATHS.items():
        path = path.replace("{" + word + "}", filled(thing, things))
    assert "{" not in path, f"{route}: say in IN_PATHS what its words mean"
    return path


async def call(
    api: Api, key: tuple[str, str], things: Mapping[str, str], query: str = ""
) -> tuple[int, str]:
    """A route of the table with the objects of an owner."""
    method, route = key
    expected = EXPECTED[key]
    body: Any = expected.body
    headers = {"Content-Type": "application/json"}
    if isinstance(body, int):  # the number of a pass, which is protobuf
        data, headers = pass_body(things["model"], body), PROTOBUF
    else:
        data = json.dumps(filled(body or {}, things)).encode()
    path = address(route, things)
    query = "&".join(filter(None, (expected.query.format(**things), query)))
    async with api.http.request(
        method,
        f"{path}?{query}" if query else path,
        data=None if method == "GET" else data,
        headers=headers,
        allow_redirects=False,
    ) as got:
        if got.content_type == "text/event-stream" and method == "GET":
            return got.status, ""  # a stream of the console does not end by itself
        return got.status, (await got.read()).decode(errors="replace")


async def things_of(api: Api) -> dict[str, str]:
    """One of everything."""
    session = await api.session()
    model = await api.model(session)
    saved = await api.step("save_weights", model_id=model, seq_id=1, path="a")
    path = (await api.result(saved))["path"]
    await api.result(await api.step("save_weights_for_sampler", model_id=model, seq_id=2, path="a"))
    sampler = await api.post(
        "create_sampling_session",
        {"session_id": session, "sampling_session_seq_id": 0, "base_model": api.base_model},
    )
    return {
        "session": session,
        "model": model,
        "request": saved,
        "path": path,
        "sampler": sampler.json["sampling_session_id"],
    }


async def test_every_route_answers_each_of_five_callers_as_expected(
    echo: EchoExecutor, tmp_path: Path
) -> None:
    keys = {name: await new_key(tmp_path, name) for name in ("alice", "bob", "carol")}
    await revoke(tmp_path, 3)
    wrong: list[str] = []
    cells = 0

    def check(who: str, key: tuple[str, str], got: tuple[int, str], *wanted: int) -> None:
        nonlocal cells
        cells += 1
        if got[0] not in wanted:
            wrong.append(f"{who}: {key} answered {got[0]} {got[1][:200]}, expected {wanted}")

    async with (
        hosted(echo, tmp_path, long_poll_s=0.05) as nobody,
        with_key(nobody, keys["alice"]) as alice,
        with_key(nobody, keys["bob"]) as bob,
        with_key(nobody, keys["carol"]) as revoked,
    ):
        things = await things_of(alice)
        before = len(echo.ran)
        for key, expected in EXPECTED.items():
            needs_key = expected.sort not in ("open", "signed", "machine")
            refusal = 401 if needs_key else expected.status
            check("no key", key, await call(nobody, key, things), refusal)
            check("revoked key", key, await call(revoked, key, things), refusal)
            if key == ("DELETE", f"{V1}/auth/apikey/me"):
                continue  # would revoke bob's key; the owner calls it last
            hidden = expected.sort in ("owned", "shared")
            for query in ("", "access_scope=accessible"):
                if not query or key[0] == "GET":
                    got = await call(bob, key, things, query)
                    check("another owner", key, got, 404 if hidden else expected.status)
                    reported = [thing for thing in things.values() if thing in got[1]]
                    if reported and expected.sort == "caller":
                        wrong.append(f"another owner: {key} tells of {reported}")
        assert len(echo.ran) == before, "another owner's request was run"

        # Published checkpoints may be read; the rest of the run stays hidden.
        publish = ("POST", f"{CHECKPOINT}/publish")
        assert (await call(alice, publish, things))[0] == 204
        for key, expected in EXPECTED.items():
            if expected.sort == "owned":
                got = await call(bob, key, things)
                check("another owner, published", key, got, 404)
            elif expected.sort == "shared":
                got = await call(bob, key, things, "access_scope=accessible")
                check("another owner, published", key, got, expected.status)
        # A published checkpoint may be sampled, too.
        samples = [path for _, path in EXPECTED if path.endswith("completions")]
        assert [task_of(one) for one in echo.ran[before:]] == ["sample"] * len(samples)

        # All objects still exist for their owner.
        for key, expected in EXPECTED.items():
            check("owner", key, await call(alice, key, things), expected.status)
    assert not wrong, "\n".join(wrong)
    assert cells > 5 * len(EXPECTED) - 30


async def test_metrics_need_a_key_unless_on_loopback(echo: EchoExecutor, tmp_path: Path) -> None:
    alices, bobs = await new_key(tmp_path, "alice"), await new_key(tmp_path, "bob")
    async with (
        hosted(echo, tmp_path, host="0.0.0.0") as api,
        with_key(api, alices) as alice,
        with_key(api, bobs) as bob,
    ):
        assert (await api.get("/metrics")).status == 401
        await alice.model()
        for one in (alice, bob):
            text = (await one.get("/metrics")).body.decode()
            assert 'tinkex_engine_operations_total{task="create"} 1.0' in text
            assert "alice" not in text
    async with hosted(EchoExecutor(), tmp_path) as api:
        assert (await api.get("/metrics")).status == 200
        assert (await api.get("/api/v1/healthz")).status == 200
        assert (await api.get("/docs")).status == 200
