"""
Every route that stores something respects the disk reserve; accepted requests are still answered.

A new route must be in one of the two tables below: it is refused while the reserve is in use, or it
has a reason why not.
"""

import sqlite3
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from server.api.test_custom_losses import loss
from server.api.test_owner_isolation import routes
from server.echo import BASE, EchoExecutor
from server.hosting import PROTOBUF, Answer, Api, hosted, pass_body
from tinkex.server.app import create_app
from tinkex.server.settings import Settings
from tinkex.server.store import open_store
from tinkex.server.store.database import Database
from tinkex.server.store.schema import telemetry
from tinkex.server.store.storage_health import FREE_SPACE, NewDataRefused

pytestmark = pytest.mark.anyio

MORE_THAN_ANY_DISK = 2.0**40

CHECKPOINT = "/api/v1/training_runs/{run}/checkpoints/{kind}/{name}"

#: Routes that store something, each with a path and a body for something new.
GATED: dict[str, tuple[str, Any]] = {
    "POST /api/v1/asample": ("asample", {"sampling_session_id": "SAMPLER", "seq_id": 9}),
    "POST /api/v1/stream_sample": (
        "stream_sample",
        {"sampling_session_id": "SAMPLER", "seq_id": 10},
    ),
    "POST /v1/chat/completions": (
        "/v1/chat/completions",
        {"model": BASE, "messages": [{"role": "user", "content": "a"}]},
    ),
    "POST /oai/api/v1/chat/completions": (
        "/oai/api/v1/chat/completions",
        {"model": BASE, "messages": [{"role": "user", "content": "a"}], "stream": True},
    ),
    "POST /v1/completions": ("/v1/completions", {"model": BASE, "prompt": "a"}),
    "POST /oai/api/v1/completions": (
        "/oai/api/v1/completions",
        {"model": BASE, "prompt": "a", "stream": True},
    ),
    "POST /api/v1/forward": ("forward", "PASS"),
    "POST /api/v1/forward_backward": ("forward_backward", "PASS"),
    "POST /api/v1/optim_step": ("optim_step", {"adam_params": {}}),
    "POST /api/v1/save_weights": ("save_weights", {"path": "more"}),
    "POST /api/v1/save_weights_for_sampler": ("save_weights_for_sampler", {"path": "more"}),
    "POST /api/v1/save_weights_external": ("save_weights_external", {"path": "more"}),
    "POST /api/v1/load_weights": (
        "load_weights",
        {"path": "SAVED", "session_id": "SESSION", "model_seq_id": 7},
    ),
    "POST /api/v1/unload_model": ("unload_model", {"model_id": "MODEL"}),
    "POST /api/v1/create_session": ("create_session", "NEW SESSION"),
    "POST /api/v1/create_model": ("create_model", {"model_seq_id": 8}),
    "POST /api/v1/create_sampling_session": (
        "create_sampling_session",
        {"session_id": "SESSION", "sampling_session_seq_id": 9, "base_model": BASE},
    ),
    "POST /api/v1/create_custom_loss": ("create_custom_loss", {"custom_loss_seq_id": 9}),
    "POST /api/v1/copy_weights": (
        "copy_weights",
        {"source_path": "SAVED", "session_id": "SESSION", "model_seq_id": 9},
    ),
    "PUT /api/v1/sessions/{session_id}/project": (
        "sessions/SESSION/project",
        {"project_id": "other"},
    ),
    f"POST {CHECKPOINT}/publish": ("training_runs/MODEL/checkpoints/weights/kept/publish", {}),
    f"PUT {CHECKPOINT}/ttl": (
        "training_runs/MODEL/checkpoints/weights/kept/ttl",
        {"ttl_seconds": 3600},
    ),
}

#: Routes that are answered while the reserve is in use, and why.
EXEMPT = {
    "POST /api/v1/retrieve_future": "reads a result",
    "POST /api/v1/retrieve_futures": "reads which results there are",
    "POST /api/v1/cancel_future": "ends work; adds nothing",
    "POST /api/v1/session_heartbeat": "changes one number in place; silence would end the session",
    "POST /api/v1/sessions/{session_id}/finish": "frees what the session kept; once per session",
    "POST /api/v1/join_sampling_session": "changes one number in place",
    "POST /api/v1/telemetry": "clients retry any other status than 200 forever; nothing is kept of it",
    "POST /api/v1/client/config": "reads",
    "POST /api/v1/client/dynamic_config": "reads",
    "POST /api/v1/get_info": "reads",
    "POST /api/v1/weights_info": "reads",
    "POST /api/v1/sessions/search": "reads",
    "POST /api/v1/auth/token": "signs a token; stores nothing",
    "POST /api/v1/auth/apikey": "always refused",
    "POST /api/v1/console/sign_in": "needs an Origin; test_console.py shows that its row is refused",
    "POST /api/v1/console/sign_out": "deletes a row",
    "POST /api/v1/console/keys": "needs a key of an administrator; then its row is refused as any other",
    "DELETE /api/v1/console/keys/{key_id}": "a key that leaked is revoked at once",
    "POST /api/v1/local/models": "loads a model; writes one line for its owner, the server's user",
    "DELETE /api/v1/auth/apikey/me": "a key that leaked is revoked at once",
    f"DELETE {CHECKPOINT}": "frees disk space",
    f"DELETE {CHECKPOINT}/publish": "unpublishes; once until it is published again",
}

#: Tables that exempt routes may add to: audit rows of deletions and revocations, one per object.
AUDITED = {"audit"}


def writing_routes(app: FastAPI) -> set[str]:
    """Method and path of all routes that are not plain reads."""
    return {f"{method} {path}" for method, path in routes(app) if method != "GET"}


@dataclass
class Full:
    """A server whose reserve is in use, with objects from before."""

    api: Api
    session: str
    model: str
    sampler: str
    folder: Path

    def body(self, body: Any) -> Any:
        if body == "PASS":
            return pass_body(self.model, 9)
        if body == "NEW SESSION":
            return {"tags": [], "user_metadata": {"x": "y"}, "sdk_version": "0.36.0"}
        names = {"SESSION": self.session, "MODEL": self.model, "SAMPLER": self.sampler}
        names["SAVED"] = f"tinker://{self.model}/weights/kept"
        body = {key: names.get(str(value), value) for key, value in body.items()}
        if "sampling_session_id" in body:
            prompt = {"chunks": [{"type": "encoded_text", "tokens": [1]}]}
            body.update(prompt=prompt, sampling_params={"max_tokens": 1}, num_samples=1)
        if "adam_params" in body or body.get("path") == "more":
            body.update(model_id=self.model, seq_id=9)
        if body.get("model_seq_id") == 8:
            body.update(session_id=self.session, base_model=BASE, lora_config={"rank": 8})
        if "custom_loss_seq_id" in body:
            body = loss(self.session, 9)
        return body

    async def ask(self, route: str) -> Answer:
        method, _, _ = route.partition(" ")
        path, body = GATED[route]
        path = path.replace("SESSION", self.session).replace("MODEL", self.model)
        if method == "PUT":
            async with self.api.http.put(f"/api/v1/{path}", json=body) as got:
                return Answer(got.status, await got.read(), "")
        body = self.body(body)
        return await self.api.post(path, body, headers=PROTOBUF if type(body) is bytes else None)

    def rows(self) -> dict[str, int]:
        """The number of rows of each table."""
        with sqlite3.connect(self.folder / "tinkex.db") as database:
            names = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            return {
                name: database.execute(f'SELECT count(*) FROM "{name}"').fetchone()[0]
                for (name,) in names.fetchall()
            }

    def files(self) -> set[Path]:
        rooms = ("payloads", "results", "checkpoints", "snapshots")
        return {path for room in rooms for path in (self.folder / room).rglob("*")}


@pytest.fixture
async def full(echo: EchoExecutor, tmp_path: Path) -> AsyncIterator[Full]:
    async with hosted(echo, tmp_path) as api:
        session = await api.session()
        model = await api.model(session)
        await api.result(await api.step("save_weights", model_id=model, seq_id=1, path="kept"))
        made = await api.post(
            "create_sampling_session",
            {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE},
        )
        sampler = made.json["sampling_session_id"]
    async with hosted(
        echo, tmp_path, reserve_mb=MORE_THAN_ANY_DISK, long_poll_s=1.0, janitor_s=0.0
    ) as api:
        yield Full(api, session, model, sampler, tmp_path)


def unlisted(app: FastAPI) -> set[str]:
    return writing_routes(app) - GATED.keys() - EXEMPT.keys()


async def test_every_write_route_is_in_one_of_the_tables(full: Full) -> None:
    assert full.api.app is not None
    assert unlisted(full.api.app) == set(), "does it ask the gate, and if not, why?"
    assert writing_routes(full.api.app) == GATED.keys() | EXEMPT.keys(), "listed, and not there"
    assert not GATED.keys() & EXEMPT.keys()


async def test_a_new_route_is_noticed(echo: EchoExecutor, tmp_path: Path) -> None:
    settings = Settings(data=str(tmp_path))
    store = open_store(
        db_url=settings.db_url, storage_url=settings.storage_url, folder=settings.folder
    )
    app = create_app(settings, echo, store)
    app.post("/api/v1/something_new")(lambda: None)
    store.close()
    assert unlisted(app) == {"POST /api/v1/something_new"}


@pytest.mark.parametrize("route", GATED)
async def test_new_requests_are_refused_while_the_reserve_is_in_use(full: Full, route: str) -> None:
    rows, files = full.rows(), full.files()
    answer = await full.ask(route)
    assert answer.status == 503, answer
    assert "reserve_mb" in answer.body.decode()
    assert full.rows() == rows
    assert full.files() == files


async def test_exempt_routes_answer_and_store_little(full: Full) -> None:
    api, rows = full.api, full.rows()
    kept = f"training_runs/{full.model}/checkpoints/weights/kept"
    said = {"sdk_version": "0.36.0"}
    for path, body in {
        "client/config": said,
        "client/dynamic_config": said,
        "get_info": {"model_id": full.model},
        "weights_info": {"tinker_path": f"tinker://{full.model}/weights/kept"},
        "sessions/search": {},
        "auth/token": {},
        "cancel_future": {"request_id": "r"},
        "session_heartbeat": {"session_id": full.session},
        "join_sampling_session": {"sampling_session_id": full.sampler},
        "telemetry": {"session_id": full.session, "events": [{"event": "GENERIC_EVENT"}]},
        "retrieve_futures": {
            "target": {
                "type": "sampling_session",
                "sampling_session_id": full.sampler,
                "cloned_sampler_id": 0,
            },
            "prev_cursor": 0,
            "timeout": 0,
        },
    }.items():
        answer = await api.post(path, body)
        assert answer.status == 200, (path, answer)
    assert full.rows() == rows
    for _ in range(3):
        assert await api.call("DELETE", f"{kept}/publish") == 204
    assert full.rows() == rows
    assert await api.call("DELETE", kept) == 204
    finish = {"reason": {"type": "success"}}
    assert (await api.post(f"sessions/{full.session}/finish", finish)).status == 200
    grown = {name for name, count in full.rows().items() if count > rows[name]}
    assert grown == AUDITED


async def test_a_repeat_of_an_accepted_request_is_answered(
    echo: EchoExecutor, tmp_path: Path
) -> None:
    key = {"X-Idempotency-Key": "once"}
    new_session = {"tags": [], "user_metadata": {}, "sdk_version": "0.36.0"}
    async with hosted(echo, tmp_path) as api:
        made = await api.post("create_session", new_session, headers=key)
        session = made.json["session_id"]
        model = {
            "session_id": session,
            "model_seq_id": 0,
            "base_model": BASE,
            "lora_config": {"rank": 8, "seed": 1},
        }
        first = {"create_model": await api.post("create_model", model)}
        model_id = first["create_model"].json["model_id"]
        await api.result(first["create_model"].json["request_id"])
        save = await api.step("save_weights", model_id=model_id, seq_id=1, path="kept")
        saved = (await api.result(save))["path"]
        bodies = {
            "create_model": model,
            "create_sampling_session": {
                "session_id": session,
                "sampling_session_seq_id": 0,
                "base_model": BASE,
            },
            "load_weights": {"path": saved, "session_id": session, "model_seq_id": 1},
            "create_custom_loss": loss(session),
            "copy_weights": {"source_path": saved, "session_id": session, "model_seq_id": 2},
            "optim_step": {"model_id": model_id, "seq_id": 2, "adam_params": {}},
        }
        for path, body in bodies.items():
            if path not in first:
                first[path] = await api.post(path, body)
            assert first[path].status == 200, (path, first[path])
    async with hosted(echo, tmp_path, reserve_mb=MORE_THAN_ANY_DISK) as api:
        again = await api.post("create_session", new_session, headers=key)
        assert again.json == made.json
        for path, body in bodies.items():
            again = await api.post(path, body)
            assert (again.status, again.json) == (200, first[path].json), path


async def test_a_write_without_a_check_of_its_own_is_refused_alone(tmp_path: Path) -> None:
    """The check is where rows are added: other writes of the same transaction are not affected."""
    database = Database(f"sqlite:///{tmp_path / 'tinkex.db'}")
    row = {"owner": "o", "session_id": "s", "at_s": 0.0, "event": {}}
    insert = telemetry.insert().values(**row)
    try:
        database.health.record(OSError(28, "no room"), FREE_SPACE)
        changed = database.write(lambda connection: connection.execute(telemetry.delete()).rowcount)
        with pytest.raises(NewDataRefused):
            await database.write(lambda connection: connection.execute(insert))
        assert await changed == 0
        await database.write(lambda connection: connection.execute(insert), reserve=True)
        await database.write(lambda connection: connection.execute(insert), required=True)
        database.health.clear(FREE_SPACE)
        await database.write(lambda connection: connection.execute(insert))
    finally:
        database.close()
