"""
Every list, search, trace and report is limited in entries, bytes and event loop time.

The first test walks the route table: a new route is either declared with `bounded`, or listed here
because its answer has a fixed size. The second test requests everything for an owner with much data.
"""

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import sqlalchemy as sa
from starlette.routing import Route

from server.echo import BASE, EchoExecutor
from server.hosting import Answer, Api, hosted
from server.tenants import new_key, with_key
from tinkex.server.api import account, console_data, deps, response_limits, sessions
from tinkex.server.api.account import _storage_events
from tinkex.server.api.deps import OwnerSlots
from tinkex.server.api.response_limits import (
    MAX_REPORT_BYTES,
    MAX_REPORT_ENTRIES,
    bound_of,
    encoded,
)
from tinkex.server.app import ROUTERS
from tinkex.server.store import Store, checkpoint_catalog, schema
from tinkex.server.store import sessions as stored_sessions
from tinkex.server.store.usage import StoredCheckpoint
from tinkex.wire.billing import StorageBillingEvent
from tinkex.wire.checkpoints import CheckpointsListResponse
from tinkex.wire.codec import encode_json
from tinkex.wire.errors import UserFailure
from tinkex.wire.sessions import GetSessionResponse, ListSessionsResponse

pytestmark = pytest.mark.anyio

#: Routes whose answers do not grow with the data of an owner, and why.
FIXED = {
    "acknowledges": {
        *("cancel_future", "telemetry", "session_heartbeat", "sessions/{session_id}/finish"),
        *("sessions/{session_id}/project", "training_runs/{run}/checkpoints/{kind}/{name}"),
        "training_runs/{run}/checkpoints/{kind}/{name}/publish",
        "training_runs/{run}/checkpoints/{kind}/{name}/ttl",
    },
    "accepts": {
        *("save_weights", "save_weights_for_sampler", "save_weights_external", "load_weights"),
        *("create_custom_loss", "create_model", "unload_model", "optim_step", "asample"),
        *("forward", "forward_backward", "copy_weights", "create_session", "stream_sample"),
        *("create_sampling_session", "join_sampling_session"),
    },
    # Limited by the request: how many sequences, and how long they are.
    "one sample": {
        *("chat/completions", "completions"),
    },
    "one row": {
        *("get_info", "weights_info", "training_runs/{run}", "samplers/{sampling_session_id}"),
        *("auth/token", "auth/apikey/me", "auth/apikey", "auth-config", "models/{model}"),
        "sessions/{session_id}/trace_export",
    },
    # Bounded by the files of one checkpoint, and sent as they are read.
    "files": {
        "training_runs/{run}/checkpoints/{kind}/{name}/archive",
        "training_runs/{run}/checkpoints/{kind}/{name}/external_weights_urls",
        "downloads/{version_id}/{file}",
    },
    # Bounded by the settings of the server.
    "the server": {
        "healthz",
        "get_server_capabilities",
        "client/config",
        "client/dynamic_config",
        *("local/status", "local/models"),
    },
    # One row, the server's settings, or events of at most 60 runs.
    "the console": {
        *("console/session", "console/sign_in", "console/sign_out", "console/server"),
        *("console/keys", "console/keys/{key_id}", "console/live"),
    },
    # Limited by the completion log; and one result, which has limits of its own.
    "results": {"retrieve_future", "retrieve_futures"},
}
#: Maximum bytes of such an answer: the metadata of one object, several times.
FIXED_BYTES = 256 * 1024

OWNER = "local"
SESSION = "s" * 40
RUN = f"{SESSION}:train:0"


def routes() -> list[tuple[str, str, Any]]:
    return [
        (method, route.path_format, route.endpoint)
        for router in ROUTERS
        for route in router.routes
        if isinstance(route, Route)
        for method in sorted(route.methods or ())
    ]


def test_every_route_is_bounded_or_has_an_answer_of_fixed_size() -> None:
    fixed = set.union(*FIXED.values())
    unknown = {
        f"{method} {path}"
        for method, path, endpoint in routes()
        if bound_of(endpoint) is None
        and path.rpartition("v1/")[2].removeprefix("/api/unauthed/") not in fixed
    }
    assert unknown == set(), "a route that lists something is declared with @bounded"
    declared = [bound_of(endpoint) for *_, endpoint in routes() if bound_of(endpoint)]
    assert len(declared) >= 10
    assert all(
        0 < one.entries <= 200_000 and one.bytes <= MAX_REPORT_BYTES for one in declared if one
    )


def fill(connection: sa.Connection) -> None:
    """An owner with more of everything than one answer may contain."""
    now_s = time.time()
    said = {"note": "x" * 900}
    kept = {"owner": OWNER, "created_s": now_s - 15 * 86_400}
    session = {"tags": [], "user_metadata": said, "seen_s": now_s, **kept}
    count = 12_000
    ids = [SESSION, *(f"s{number:06}" for number in range(count))]
    connection.execute(schema.sessions.insert(), [{"session_id": one, **session} for one in ids])
    model = {"base_model": BASE, "lora_config": {"rank": 8}, "optimizer_config": {}, **kept}
    owned = [(RUN, SESSION), *((f"{one}:train:0", one) for one in ids[1:])]
    connection.execute(
        schema.models.insert(),
        [
            {"model_id": run, "session_id": one, "model_seq_id": 0, "user_metadata": said, **model}
            for run, one in owned
        ],
    )
    # One run has more checkpoints than a list may contain; all others have one each.
    named = [(RUN, f"c{number}") for number in range(MAX_REPORT_ENTRIES + 5)]
    named += [(run, "only") for run, _ in owned[1:]]
    versions = [
        {
            "version_id": f"v{number}",
            "model_id": run,
            "kind": "weights",
            "name": name,
            "place": f"checkpoints/{number}",
            "size_bytes": 1,
            **kept,
        }
        for number, (run, name) in enumerate(named)
    ]
    connection.execute(schema.checkpoint_versions.insert(), versions)
    connection.execute(
        schema.checkpoint_names.insert(),
        [
            {
                **{key: one[key] for key in ("model_id", "kind", "name", "version_id")},
                "saved_s": now_s,
                "public": False,
                "user_metadata": {},
            }
            for one in versions
        ],
    )
    connection.execute(
        schema.samplers.insert(),
        [
            {
                "sampling_session_id": f"{SESSION}:sample:{number}",
                "session_id": SESSION,
                "sampling_session_seq_id": number,
                "base_model": BASE,
                **kept,
            }
            for number in range(MAX_REPORT_ENTRIES + 5)
        ],
    )
    connection.execute(
        schema.requests.insert(),
        [
            {
                "request_id": f"r{number:030}",
                "session_id": SESSION,
                "kind": "sample",
                "status": "done",
                "base_model": BASE,
                "sequences": 1,
                "finished_s": now_s,
                **kept,
            }
            for number in range(stored_sessions.MAX_SPANS + 5)
        ],
    )
    connection.execute(
        schema.audit.insert(),
        [
            {
                "owner": OWNER,
                "at_s": now_s,
                "topic": "checkpoints",
                "event": "checkpoint.saved",
                "details": {"tinker_path": f"tinker://{RUN}/weights/c{number}"},
            }
            for number in range(12_000)
        ],
    )


def span(days: int) -> str:
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    first = hour - timedelta(days=days)
    return urlencode({"starting_on": first.isoformat(), "ending_before": hour.isoformat()})


@pytest.fixture(scope="module")
async def full(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Api]:
    async with hosted(EchoExecutor(), tmp_path_factory.mktemp("full"), janitor_s=0) as api:
        await store_of(api)._database.write(fill)
        yield api


def store_of(api: Api) -> Store:
    assert api.app
    store: Store = api.app.state.context.store
    return store


async def call(api: Api, method: str, path: str) -> Answer:
    """The largest request of a route."""
    values = {"session_id": SESSION, "run": RUN, "kind": "weights", "name": "c1"}
    values |= {"sampling_session_id": f"{SESSION}:sample:1", "version_id": "v1", "file": "x"}
    values |= {"model": BASE}
    url = path.format(**values)
    if method == "POST":
        return await api.post(url.removeprefix("/api/v1/"), {"limit": 200})
    if "signed" in path:
        link = await api.get(f"/api/v1/sessions/{SESSION}/trace_export")
        return await api.get(link.json["url"])
    query = span(14) if path.endswith("usage/events") else "limit=10000"
    if "/console/" in path:
        query = f"limit={console_data.MAX_ROWS}"
    return await api.get(f"{url}?{query}")


def largest_list(reported: Any) -> int:
    if isinstance(reported, dict):
        return max((*map(largest_list, reported.values()), 0))
    return len(reported) if isinstance(reported, list) else 0


@pytest.mark.timeout(300)
async def test_an_owner_with_much_data_gets_bounded_answers_built_off_the_event_loop(
    full: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_the_loop: list[int] = []
    loop_thread = threading.get_ident()

    def watched(message: Any) -> bytes:
        body = encode_json(message)
        if threading.get_ident() == loop_thread:
            on_the_loop.append(len(body))
        return body

    for module in (deps, response_limits):
        monkeypatch.setattr(module, "encode_json", watched)
    refused, whole = set(), set()
    for method, path, endpoint in routes():
        bound = bound_of(endpoint)
        if bound is None and (method != "GET" or path.endswith("/live")):
            continue  # a stream of the console does not end by itself
        answer = await call(full, method, path)
        if bound is None:
            assert len(answer.body) <= FIXED_BYTES, f"{path} is to be declared with @bounded"
            continue
        assert len(answer.body) <= bound.bytes, path
        if answer.status == 400:
            refused.add(path.removeprefix("/api/v1/"))
            assert "the maximum of one response" in answer.json["detail"]
            continue
        assert answer.status == 200, (path, answer.body[:500])
        whole.add(path.removeprefix("/api/v1/"))
        assert largest_list(answer.json) <= bound.entries, path
    # Pages and traces are cut; routes without pages say how to request less.
    assert refused == {
        "billing/usage/events",
        "sessions/{session_id}",
        "training_runs/{run}/checkpoints",
    }
    assert whole >= {"sessions", "sessions/search", "signed/traces/{session_id}", "checkpoints"}
    assert max(on_the_loop) <= FIXED_BYTES


async def test_usage_over_the_limit_is_refused_and_a_shorter_time_is_answered(full: Api) -> None:
    for days in (14, 1):
        answer = await full.get(f"/api/v1/billing/usage/events?{span(days)}")
        assert answer.status == 400
        assert "Request a shorter time." in answer.json["detail"]
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    query = {
        "starting_on": (hour - timedelta(hours=1)).isoformat(),
        "ending_before": hour.isoformat(),
    }
    answer = await full.get(f"/api/v1/billing/usage/events?{urlencode(query)}")
    assert answer.status == 200, answer.body[:300]
    assert len(answer.json["data"]) == 12_001
    total = sum(event["event_info"]["gigabyte_hours"] for event in answer.json["data"])
    assert total == pytest.approx((MAX_REPORT_ENTRIES + 5 + 12_000) / 1e9)
    (item,) = (await full.get("/api/v1/billing/usage/checkpoints/current")).json["data"]
    assert (item["checkpoint_count"], item["size_bytes"]) == (MAX_REPORT_ENTRIES + 12_005,) * 2


async def test_the_number_of_checkpoints_in_a_report_is_limited(
    full: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(account, "MAX_CHECKPOINTS", 1_000)
    answer = await full.get(f"/api/v1/billing/usage/events?{span(1)}")
    assert answer.status == 400
    assert "more than 1000 checkpoints" in answer.json["detail"]


async def test_a_search_examines_a_limited_number_of_sessions_and_returns_a_cursor(
    full: Api,
) -> None:
    wanted = {"user_metadata": {"note": "no such note"}}
    pages_seen, cursor = 0, None
    while True:
        answer = await full.post("sessions/search", {**wanted, "cursor": cursor})
        assert answer.status == 200, answer.body[:300]
        assert answer.json["sessions"] == []
        pages_seen += 1
        if (cursor := answer.json.get("next_cursor")) is None:
            break
    assert pages_seen == -(-12_001 // stored_sessions.MAX_SEARCHED)


async def test_a_search_finds_all_matches_whatever_the_size_of_its_steps(
    full: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_sessions, "MAX_SEARCHED_CHARACTERS", 100_000)
    found: list[str] = []
    cursor = None
    for _ in range(40):
        answer = await full.post("sessions/search", {"limit": 200, "cursor": cursor})
        assert len(answer.json["sessions"]) < 200
        found += [one["session_id"] for one in answer.json["sessions"]]
        cursor = answer.json["next_cursor"]
    assert len(found) == len(set(found)) > 1_000
    listed = (await full.get("/api/v1/sessions?limit=10000")).json["sessions"]
    assert found == listed[: len(found)]


async def test_an_owner_gets_one_report_at_a_time_and_others_do_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [await new_key(tmp_path, owner) for owner in ("alice", "bob")]
    running, most, gate = 0, 0, threading.Event()
    real = sessions._summary

    def slow(*args: Any) -> Any:
        nonlocal running, most
        running += 1
        most = max(most, running)
        gate.wait(20)
        running -= 1
        return real(*args)

    async with (
        hosted(EchoExecutor(), tmp_path) as api,
        with_key(api, keys[0]) as alice,
        with_key(api, keys[1]) as bob,
    ):
        await alice.session()
        await bob.session()
        monkeypatch.setattr(sessions, "_summary", slow)
        searches = [asyncio.create_task(alice.post("sessions/search", {})) for _ in range(6)]
        while not running:  # noqa: ASYNC110  it is set in another thread
            await asyncio.sleep(0.01)
        # Neither another owner's list nor other requests wait for these.
        listed = await asyncio.wait_for(bob.get("/api/v1/sessions"), 10)
        assert listed.status == 200
        assert (await asyncio.wait_for(alice.get("/api/v1/auth/apikey/me"), 10)).status == 200
        gate.set()
        assert {(await one).status for one in searches} == {200}
    assert most == 1


async def test_slots_are_freed() -> None:
    slots = OwnerSlots(1)

    async def take(owner: str) -> None:
        async with slots.slot(owner):
            await asyncio.sleep(0)

    await asyncio.gather(*(take(f"owner-{number % 50}") for number in range(200)))
    assert len(slots) == 0


def test_an_answer_encoded_in_parts_is_identical(monkeypatch: pytest.MonkeyPatch) -> None:
    session = GetSessionResponse(
        training_run_ids=["a", 'b"'], sampler_ids=[], user_metadata={"k": "ü"}, display_name=None
    )
    for message in (
        session,
        ListSessionsResponse(sessions=[]),
        CheckpointsListResponse(checkpoints=[]),
        {"traceEvents": [{"a": None}], "displayTimeUnit": "ms", "none": None},
    ):
        assert encoded(message, "") == encode_json(message)
    monkeypatch.setattr(response_limits, "MAX_REPORT_BYTES", 20)
    with pytest.raises(UserFailure, match=r"more than the allowed 20 bytes.*Request less"):
        encoded(session, "Request less.")


def test_the_size_of_metadata_counts_keys_and_values() -> None:
    assert checkpoint_catalog.metadata_characters({"ab": "cde", "f": 12}) == 8
    assert checkpoint_catalog.metadata_characters(None) == 0


@pytest.mark.parametrize("seed", range(5))
def test_storage_by_hour_matches_the_lifetimes_of_checkpoints(seed: int) -> None:
    dice = random.Random(seed)
    first, end = 100, 130
    now_s = dice.choice([125.5, 140.0, 130.0]) * 3600
    stored = []
    for _ in range(60):
        since_s = dice.choice([dice.uniform(90, 130), float(dice.randint(90, 129))]) * 3600
        lasts = dice.choice([0.0, 0.25, 1.0, 3.0, 50.0, dice.uniform(0, 20)])
        stored.append(
            StoredCheckpoint(
                session_id=dice.choice("ab"),
                project_id=None,
                base_model="m",
                size_bytes=dice.randint(0, 10**9),
                since_s=since_s,
                until_s=dice.choice([None, since_s + lasts * 3600]),
            )
        )
    expected: dict[tuple[int, str], float] = {}
    for one in stored:
        until_s = min(now_s, one.until_s or now_s, end * 3600)
        for hour in range(first, end):
            lasted_s = min(until_s, (hour + 1) * 3600) - max(one.since_s, hour * 3600)
            if lasted_s > 0:
                place = (hour, one.session_id)
                expected[place] = expected.get(place, 0.0) + one.size_bytes * lasted_s / 3600
    found = {
        (int(event.bucket_start.timestamp()) // 3600, str(event.session_id)): (
            event.event_info.gigabyte_hours
        )
        for event in _storage_events(stored, first, end, now_s, None, "o")
        if isinstance(event.event_info, StorageBillingEvent)
    }
    assert found == {place: pytest.approx(size / 1e9) for place, size in expected.items()}
