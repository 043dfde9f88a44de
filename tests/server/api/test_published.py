"""`accessible` also lists what others have published, and nothing else of theirs; `owned` does not."""

import json
import sqlite3
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from server.echo import EchoExecutor
from server.hosting import Api, hosted
from server.tenants import new_key, with_key

pytestmark = pytest.mark.anyio

V1 = "/api/v1"
SECRET = "not-for-bob"


@dataclass
class Shared:
    """Alice has published one checkpoint of the first of her two models."""

    alice: Api
    bob: Api
    session: str
    model: str
    other: str


@pytest.fixture
async def shared(echo: EchoExecutor, tmp_path: Path) -> AsyncIterator[Shared]:
    alices, bobs = await new_key(tmp_path, "alice"), await new_key(tmp_path, "bob")
    async with (
        hosted(echo, tmp_path) as nobody,
        with_key(nobody, alices) as alice,
        with_key(nobody, bobs) as bob,
    ):
        body = {
            "tags": [SECRET],
            "user_metadata": {"k": SECRET},
            "sdk_version": "0.36.0",
            "display_name": SECRET,
            "project_id": SECRET,
        }
        session = (await alice.post("create_session", body)).json["session_id"]
        model, other = [await alice.model(session, number=number) for number in range(2)]
        for number, name in enumerate(("shown", SECRET), 1):
            await alice.result(
                await alice.step("save_weights", model_id=model, seq_id=number, path=name)
            )
        await alice.result(await alice.step("save_weights", model_id=other, seq_id=1, path=SECRET))
        assert await alice.call("POST", f"training_runs/{model}/checkpoints/weights/shown/publish")
        yield Shared(alice, bob, session, model, other)


async def get_json(api: Api, path: str) -> Any:
    answer = await api.get(f"{V1}/{path}")
    assert answer.status == 200, answer
    assert api.http.headers["X-API-Key"]
    return answer.json


async def test_others_find_the_run_and_the_checkpoint_that_were_published(shared: Shared) -> None:
    bob, model = shared.bob, shared.model
    runs = await get_json(bob, "training_runs?access_scope=accessible")
    assert [run["training_run_id"] for run in runs["training_runs"]] == [model]
    assert runs["cursor"]["total_count"] == 1
    (run,) = runs["training_runs"]
    assert run["model_owner"] == "alice"
    assert run["last_checkpoint"]["checkpoint_id"] == "weights/shown"
    one = await get_json(bob, f"training_runs/{model}?access_scope=accessible")
    assert one == run
    for path in ("checkpoints", f"training_runs/{model}/checkpoints"):
        listed = await get_json(bob, f"{path}?access_scope=accessible")
        assert [each["checkpoint_id"] for each in listed["checkpoints"]] == ["weights/shown"]
    for reported in (runs, one):
        assert SECRET not in str(reported)


async def test_others_find_its_session_without_the_owners_metadata(shared: Shared) -> None:
    bob, session = shared.bob, shared.session
    assert await get_json(bob, "sessions?access_scope=accessible") == {"sessions": [session]}
    assert await get_json(bob, f"sessions/{session}?access_scope=accessible") == {
        "training_run_ids": [shared.model],
        "sampler_ids": [],
        "user_metadata": {},
    }
    for owner in ({"type": "accessible"}, {"type": "user", "owner_urns": ["alice"]}):
        found = (await bob.post("sessions/search", {"owner": owner})).json
        (summary,) = found["sessions"]
        assert (summary["session_id"], summary["owner"]) == (session, "alice")
        assert summary["checkpoints_count"] == 1
        assert SECRET not in str(found)
    # Nor can it be found out by searching for it.
    for guess in ({"user_metadata": {"k": SECRET}}, {"project_ids": [SECRET]}):
        body = {"owner": {"type": "accessible"}, **guess}
        assert (await bob.post("sessions/search", body)).json["sessions"] == []
    nobody = {"owner": {"type": "user", "owner_urns": ["carol"]}}
    assert (await bob.post("sessions/search", nobody)).json["sessions"] == []


async def test_by_default_each_owner_finds_only_their_own(shared: Shared) -> None:
    bob = shared.bob
    assert (await get_json(bob, "training_runs"))["training_runs"] == []
    assert (await get_json(bob, "checkpoints"))["checkpoints"] == []
    assert await get_json(bob, "sessions") == {"sessions": []}
    assert (await bob.post("sessions/search", {})).json["sessions"] == []
    for path in (f"training_runs/{shared.model}", f"sessions/{shared.session}"):
        assert (await bob.get(f"{V1}/{path}")).status == 404
    unpublished = f"{V1}/training_runs/{shared.other}?access_scope=accessible"
    assert (await bob.get(unpublished)).status == 404


async def test_the_owner_sees_everything_in_both_scopes(shared: Shared) -> None:
    for scope in ("owned", "accessible"):
        runs = await get_json(shared.alice, f"training_runs?access_scope={scope}")
        assert len(runs["training_runs"]) == 2
        assert runs["training_runs"][1]["last_checkpoint"]["checkpoint_id"] == f"weights/{SECRET}"
        session = await get_json(shared.alice, f"sessions/{shared.session}?access_scope={scope}")
        assert session["display_name"] == SECRET


async def test_an_unpublished_checkpoint_disappears_from_the_lists_of_others(
    shared: Shared,
) -> None:
    path = f"training_runs/{shared.model}/checkpoints/weights/shown/publish"
    assert await shared.alice.call("DELETE", path) == 204
    assert await get_json(shared.bob, "sessions?access_scope=accessible") == {"sessions": []}
    runs = await get_json(shared.bob, "training_runs?access_scope=accessible")
    assert runs["training_runs"] == []


@pytest.mark.parametrize("lent", [False, True])
async def test_a_copy_of_anothers_checkpoint_has_none_of_their_metadata(
    echo: EchoExecutor, tmp_path: Path, lent: bool
) -> None:
    alices, bobs = await new_key(tmp_path, "alice"), await new_key(tmp_path, "bob")
    async with (
        hosted(echo, tmp_path) as nobody,
        with_key(nobody, alices) as alice,
        with_key(nobody, bobs) as bob,
    ):
        body = {
            "session_id": await alice.session(),
            "model_seq_id": 0,
            "base_model": alice.base_model,
            "lora_config": {"rank": 8},
            "user_metadata": {"run": SECRET},
        }
        made = (await alice.post("create_model", body)).json
        await alice.result(made["request_id"])
        model = made["model_id"]
        save = {"model_id": model, "seq_id": 1, "path": "a", "user_metadata": {"note": SECRET}}
        path = (await alice.result(await alice.step("save_weights", **save)))["path"]
        wish = {"source_path": path, "destination_project_id": "p"}
        if lent:
            wish["weights_access_token"] = alices
        else:
            assert await alice.call("POST", f"training_runs/{model}/checkpoints/weights/a/publish")
        copy = (await bob.post("copy_weights", wish)).json["tinker_path"]
        own = await get_json(bob, f"training_runs/{copy.split('/')[2]}")
        assert own.get("user_metadata") is None
        # The metadata of a checkpoint is published with it.
        noted = own["last_checkpoint"].get("user_metadata")
        assert noted == (None if lent else {"note": SECRET})
        # The owner's own copy has all metadata.
        mine = (await alice.post("copy_weights", {**wish, "weights_access_token": None})).json
        run = await get_json(alice, f"training_runs/{mine['tinker_path'].split('/')[2]}")
        assert run["user_metadata"] == {"run": SECRET}
        assert run["last_checkpoint"]["user_metadata"] == {"note": SECRET}


async def test_others_do_not_see_the_status_of_the_session(shared: Shared, tmp_path: Path) -> None:
    """Only the owner may know whether it is active, silent, failed or finished."""
    search = {"owner": {"type": "accessible"}}

    async def seen_by_bob() -> Any:
        found = (await shared.bob.post("sessions/search", search)).json["sessions"]
        run = await get_json(shared.bob, f"training_runs/{shared.model}?access_scope=accessible")
        return found, run

    before = await seen_by_bob()
    failure = {
        "type": "failed",
        "reason": {"type": "training_run_failed", "training_run_id": shared.model},
        "detail": SECRET,
    }
    with sqlite3.connect(tmp_path / "tinkex.db") as connection:
        connection.execute("UPDATE sessions SET failure = ?", (json.dumps(failure),))
    connection.close()
    assert (await get_json(shared.alice, f"training_runs/{shared.model}"))["corrupted"] is True
    assert await seen_by_bob() == before
    done = {"reason": {"type": "errored"}, "detail": SECRET}
    assert (await shared.alice.post(f"sessions/{shared.session}/finish", done)).status == 200
    (mine,) = (await shared.alice.post("sessions/search", {})).json["sessions"]
    assert mine["status"]["type"] == "client_finished"
    assert await seen_by_bob() == before
    # Nor can it be found out by searching for it.
    for status in ("client_finished", "failed", "cancelled"):
        body = {**search, "statuses": [{"type": status}]}
        assert (await shared.bob.post("sessions/search", body)).json["sessions"] == []
