"""
No route without a key, and no route that tells one owner of another's things.

Made from the application's own table of routes: a route that is new fails here until it is said
which ids it takes.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.routing import Route

from server.echo import EchoExecutor
from server.hosting import PROTOBUF, Api, hosted, pass_body
from server.tenants import new_key, with_key
from tinkex.server.api.auth import OPEN_PATHS, SIGNED_PREFIXES
from tinkex.server.app import create_app
from tinkex.server.settings import Settings
from tinkex.server.store import open_store

pytestmark = pytest.mark.anyio

V1 = "/api/v1"

#: Routes that name nobody's things: they answer about the caller, or about the server.
WITHOUT_IDS = {
    ("DELETE", f"{V1}/auth/apikey/me"),
    ("GET", f"{V1}/audit"),
    ("GET", f"{V1}/auth/apikey/me"),
    ("GET", f"{V1}/billing/usage/checkpoints/current"),
    ("GET", f"{V1}/billing/usage/events"),
    ("GET", f"{V1}/checkpoints"),
    ("GET", f"{V1}/get_server_capabilities"),
    ("GET", f"{V1}/sessions"),
    ("GET", f"{V1}/training_runs"),
    ("GET", "/metrics"),
    ("POST", f"{V1}/auth/apikey"),
    ("POST", f"{V1}/auth/token"),
    ("POST", f"{V1}/client/config"),
    ("POST", f"{V1}/client/dynamic_config"),
    ("POST", f"{V1}/create_session"),
    ("POST", f"{V1}/sessions/search"),
    ("POST", f"{V1}/telemetry"),
}

#: A body for each route that takes ids in one, made of somebody's things.
BODIES: Mapping[str, Mapping[str, Any]] = {
    "asample": {
        "sampling_session_id": "{sampler}",
        "seq_id": 9,
        "prompt": {"chunks": [{"tokens": [1]}]},
        "sampling_params": {"max_tokens": 1},
    },
    "copy_weights": {"source_path": "{path}", "destination_project_id": "p"},
    "create_custom_loss": {
        "session_id": "{session}",
        "custom_loss_seq_id": 0,
        "name": "total",
        "inputs": [{"name": "logprobs", "rank": 1}],
        "graph": {"format": 1, "nodes": []},
    },
    "create_model": {
        "session_id": "{session}",
        "model_seq_id": 5,
        "base_model": "test/echo",
        "lora_config": {"rank": 8},
    },
    "create_sampling_session": {
        "session_id": "{session}",
        "sampling_session_seq_id": 5,
        "base_model": "test/echo",
    },
    "forward": {"model_id": "{model}", "seq_id": 9, "forward_input": {"data": [], "loss_fn": "x"}},
    "get_info": {"model_id": "{model}"},
    "join_sampling_session": {"sampling_session_id": "{sampler}"},
    "load_weights": {"model_id": "{model}", "seq_id": 9, "path": "{path}", "optimizer": False},
    "optim_step": {"model_id": "{model}", "seq_id": 9, "adam_params": {}},
    "retrieve_future": {"request_id": "{request}"},
    "retrieve_futures": {
        "target": {
            "type": "sampling_session",
            "sampling_session_id": "{sampler}",
            "cloned_sampler_id": 0,
        },
        "prev_cursor": 0,
    },
    "save_weights": {"model_id": "{model}", "seq_id": 9, "path": "b"},
    "save_weights_external": {"model_id": "{model}", "seq_id": 9, "path": "b"},
    "save_weights_for_sampler": {"model_id": "{model}", "seq_id": 9, "path": "b"},
    "session_heartbeat": {"session_id": "{session}"},
    "sessions/{session_id}/finish": {"reason": {"type": "success"}},
    "sessions/{session_id}/project": {"project_id": "p"},
    "stream_sample": {
        "sampling_session_id": "{sampler}",
        "seq_id": 9,
        "prompt": {"chunks": [{"tokens": [1]}]},
        "sampling_params": {"max_tokens": 1},
    },
    "training_runs/{run}/checkpoints/{kind}/{name}/ttl": {"ttl_seconds": 3600},
    "unload_model": {"model_id": "{model}"},
    "weights_info": {"tinker_path": "{path}"},
}

#: The words for ids in the paths of routes.
IN_PATHS = {
    "session_id": "{session}",
    "model_id": "{model}",
    "run": "{model}",
    "kind": "weights",
    "name": "a",
    "checkpoint_id:path": "weights/a",
    "sampling_session_id": "{sampler}",
}

#: Harmless whatever it names, and the same for all: nothing can be learnt from it.
SILENT = {("POST", f"{V1}/cancel_future")}


def routes(app: FastAPI) -> Iterator[tuple[str, str]]:
    included = [getattr(route, "original_router", None) for route in app.routes]
    below = [route for router in included if router is not None for route in router.routes]
    for route in [*app.routes, *below]:
        if not isinstance(route, Route | APIRoute):
            continue
        for method in sorted(route.methods or ()):
            if method != "HEAD":
                yield method, route.path


def is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith(SIGNED_PREFIXES)


@pytest.fixture
def table(tmp_path: Path) -> list[tuple[str, str]]:
    settings = Settings(data=str(tmp_path / "other"))
    store = open_store(
        db_url=settings.db_url, storage_url=settings.storage_url, folder=settings.folder
    )
    try:
        found = list(routes(create_app(settings, EchoExecutor(), store)))
        assert ("POST", f"{V1}/create_session") in found
        return found
    finally:
        store.close()


async def asked(
    api: Api, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
) -> tuple[int, str]:
    data = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
    sent = {"Content-Type": "application/json", **(headers or {})}
    async with api.http.request(
        method, path, data=None if method == "GET" else data, headers=sent, allow_redirects=False
    ) as got:
        return got.status, (await got.read()).decode(errors="replace")


def filled(value: Any, things: Mapping[str, str]) -> Any:
    """The same with somebody's ids put in."""
    if isinstance(value, str):
        return value.format(**things) if value.startswith("{") else value
    if isinstance(value, Mapping):
        return {key: filled(inner, things) for key, inner in value.items()}
    if isinstance(value, list):
        return [filled(inner, things) for inner in value]
    return value


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


async def test_every_route_needs_a_key_and_none_tells_of_anothers_things(
    echo: EchoExecutor, tmp_path: Path, table: list[tuple[str, str]]
) -> None:
    alices = await new_key(tmp_path, "alice")
    bobs = await new_key(tmp_path, "bob")
    async with (
        hosted(echo, tmp_path) as nobody,
        with_key(nobody, alices) as alice,
        with_key(nobody, bobs) as bob,
    ):
        things = await things_of(alice)
        before = len(echo.ran)
        for method, route in table:
            where = f"{method} {route}"
            if is_open(route):
                continue
            path = route
            for word, thing in IN_PATHS.items():
                path = path.replace("{" + word + "}", filled(thing, things))
            assert "{" not in path, f"{where}: say in IN_PATHS what its words mean"
            if route != "/metrics":
                status, text = await asked(nobody, method, path)
                assert status == 401, f"{where} without a key answered {status} {text}"
            if (method, route) in WITHOUT_IDS | SILENT:
                continue
            key = route.removeprefix(f"{V1}/")
            assert path != route or key in BODIES or key == "forward_backward", (
                f"{where} is new: say in BODIES or WITHOUT_IDS which ids it takes"
            )
            body, headers = filled(BODIES.get(key, {}), things), {}
            if key == "forward_backward":
                body, headers = pass_body(things["model"], 9), PROTOBUF
            status, text = await asked(bob, method, path, body, headers)
            assert status == 404, f"{where} with another owner's ids answered {status} {text}"
            if method == "GET":  # nothing is published, so a wider look finds no more
                status, text = await asked(bob, method, f"{path}?access_scope=accessible")
                assert status == 404, f"{where} when accessible answered {status} {text}"
        assert len(echo.ran) == before
        for thing in ("session", "model", "path"):
            for method, route in sorted(WITHOUT_IDS):
                if method == "GET" and (method, route) in table and route != "/metrics":
                    for scope in ("owned", "accessible"):
                        _, text = await asked(bob, method, f"{route}?access_scope={scope}")
                        assert things[thing] not in text, f"{route} tells of another's {thing}"
        # All of it is still there for its owner.
        status, _ = await asked(
            alice, "POST", f"{V1}/session_heartbeat", {"session_id": things["session"]}
        )
        assert status == 200
        status, _ = await asked(
            alice, "POST", f"{V1}/weights_info", {"tinker_path": things["path"]}
        )
        assert status == 200


async def test_metrics_need_a_key_once_other_machines_can_ask(
    echo: EchoExecutor, tmp_path: Path
) -> None:
    alices, bobs = await new_key(tmp_path, "alice"), await new_key(tmp_path, "bob")
    async with (
        hosted(echo, tmp_path, host="0.0.0.0") as api,
        with_key(api, alices) as alice,
        with_key(api, bobs) as bob,
    ):
        assert (await api.get("/metrics")).status == 401
        await alice.model()
        hers = 'tinkex_owner_compute_seconds_total{owner="alice"}'
        assert hers in (await alice.get("/metrics")).body.decode()
        assert "alice" not in (await bob.get("/metrics")).body.decode()
    async with hosted(EchoExecutor(), tmp_path) as api:
        assert (await api.get("/metrics")).status == 200
        assert (await api.get("/api/v1/healthz")).status == 200
        assert (await api.get("/docs")).status == 200
