"""Lists, details, search, projects and traces of sessions."""

import json
from typing import Any

import pytest

from server.echo import BASE
from server.hosting import Api

pytestmark = pytest.mark.anyio


async def a_session(api: Api, **more: Any) -> str:
    body = {"tags": ["t"], "user_metadata": {}, "sdk_version": "0.36.0", **more}
    answer = await api.post("create_session", body)
    return str(answer.json["session_id"])


async def search(api: Api, **body: Any) -> list[str]:
    answer = await api.post("sessions/search", body)
    assert answer.status == 200, answer
    return [session["session_id"] for session in answer.json["sessions"]]


async def test_sessions_are_listed_newest_first_by_pages(api: Api) -> None:
    made = [await a_session(api) for _ in range(5)]
    listed = (await api.get("/api/v1/sessions")).json
    assert listed == {"sessions": made[::-1]}
    page = (await api.get("/api/v1/sessions?limit=2&offset=1&access_scope=accessible")).json
    assert page == {"sessions": [made[3], made[2]]}
    assert (await api.get("/api/v1/sessions?limit=-1")).status == 422


async def test_a_session_lists_its_models_and_samplers(api: Api) -> None:
    session_id = await a_session(api, user_metadata={"k": "v", "n": 3}, display_name="mine")
    model_id = await api.model(session_id)
    body = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": BASE}
    await api.post("create_sampling_session", body)
    assert (await api.get(f"/api/v1/sessions/{session_id}")).json == {
        "training_run_ids": [model_id],
        "sampler_ids": [f"{session_id}:sample:0"],
        "user_metadata": {"k": "v", "n": "3"},
        "display_name": "mine",
    }
    assert (await api.get("/api/v1/sessions/unknown")).status == 404


async def test_search_applies_every_filter(api: Api) -> None:
    first = await a_session(api, user_metadata={"team": "a"}, display_name="Sweep one")
    second = await a_session(api, user_metadata={"team": "b"}, project_id="p2")
    third = await a_session(api, user_metadata={"team": "b", "run": "7"}, display_name="Sweep two")
    done = {"reason": {"type": "success"}, "detail": "all good"}
    assert (await api.post(f"sessions/{second}/finish", done)).status == 200
    assert await search(api) == [third, second, first]
    assert await search(api, session_id=second) == [second]
    assert await search(api, user_metadata={"team": "b"}) == [third, second]
    assert await search(api, user_metadata={"team": "b", "run": "7"}) == [third]
    assert await search(api, display_name="sweep") == [third, first]
    assert await search(api, project_ids=["p2"]) == [second]
    assert await search(api, project_ids=["default"]) == [third, first]
    assert await search(api, owner={"type": "accessible"}) == [third, second, first]
    assert await search(api, owner={"type": "user", "owner_urns": ["somebody"]}) == []
    assert await search(api, owner={"type": "user", "owner_urns": ["local"]}, limit=1) == [third]
    assert await search(api, statuses=[{"type": "active"}]) == [third, first]
    finished = {"type": "client_finished"}
    assert await search(api, statuses=[finished]) == [second]
    assert await search(api, statuses=[{**finished, "reasons": ["errored"]}]) == []
    assert await search(api, statuses=[{"type": "failed"}, {"type": "cancelled"}]) == []
    answer = await api.post("sessions/search", {"session_id": second})
    assert answer.json["sessions"][0]["status"] == {
        "type": "client_finished",
        "reason": {"type": "success"},
        "detail": "all good",
    }


async def test_search_pages_are_complete(api: Api) -> None:
    made = [await a_session(api) for _ in range(7)]
    found: list[str] = []
    cursor = None
    while True:
        body = {"limit": 3} if cursor is None else {"limit": 3, "cursor": cursor}
        answer = (await api.post("sessions/search", body)).json
        found += [session["session_id"] for session in answer["sessions"]]
        cursor = answer.get("next_cursor")
        if cursor is None:
            break
        assert cursor["last_session_id"] == found[-1]
    assert found == made[::-1]


async def test_search_refuses_unknown_filters(api: Api) -> None:
    for wrong in (
        {"limit": 0},
        {"limit": 201},
        {"display_name": ""},
        {"owner": {"type": "user", "owner_urns": []}},
        {"statuses": [{"type": "asleep"}]},
        {"cursor": {"last_created_at": "yesterday", "last_session_id": "x"}},
    ):
        answer = await api.post("sessions/search", wrong)
        assert answer.status == 422, (wrong, answer)


async def test_search_counts_checkpoints_and_their_bytes(api: Api) -> None:
    session_id = await a_session(api)
    model_id = await api.model(session_id)
    await api.result(await api.step("save_weights", model_id=model_id, seq_id=1, path="a"))
    await api.result(await api.step("save_weights", model_id=model_id, seq_id=2, path="b"))
    found = (await api.post("sessions/search", {"session_id": session_id})).json["sessions"][0]
    assert (found["checkpoints_count"], found["checkpoint_storage_bytes"]) == (2, 2)
    assert (found["owner"], found["project_id"]) == ("local", "default")


async def test_a_session_moves_to_a_project(api: Api) -> None:
    session_id = await a_session(api)
    url = f"/api/v1/sessions/{session_id}/project"
    async with api.http.put(url, json={"project_id": "p9"}) as answer:
        assert answer.status == 204
    assert await search(api, project_ids=["p9"]) == [session_id]
    for wrong in ({"project_id": ""}, {"project_id": "x" * 300}, {}):
        async with api.http.put(url, json=wrong) as answer:
            assert answer.status == 422
    async with api.http.put("/api/v1/sessions/no/project", json={"project_id": "p"}) as answer:
        assert answer.status == 404


async def test_a_trace_has_every_request_with_its_times(api: Api) -> None:
    session_id = await a_session(api)
    model_id = await api.model(session_id)
    request_id = await api.forward_backward(model_id, 1)
    await api.passed(request_id)
    exported = (await api.get(f"/api/v1/sessions/{session_id}/trace_export")).json
    assert exported["status"] == "ready"
    # The link works without a key.
    async with api.http.get(exported["url"]) as answer:
        events = json.loads(await answer.read())["traceEvents"]
    assert events[0]["args"] == {"name": model_id}
    mine = [event for event in events if event.get("id") == request_id]
    assert [event["ph"] for event in mine] == ["b", "e"]
    assert mine[0]["name"] == "forward_backward"
    assert mine[0]["ts"] <= mine[1]["ts"]
    for wrong in (
        exported["url"].replace(session_id, "another"),
        exported["url"][:-1] + ("0" if exported["url"][-1] != "0" else "1"),
        exported["url"].replace("expires=", "expires=9"),
    ):
        async with api.http.get(wrong) as answer:
            assert answer.status == 403
