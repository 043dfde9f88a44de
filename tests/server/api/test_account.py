"""Usage, storage, audit and telemetry: reports match exactly what was sent and done."""

import asyncio
import json
import sqlite3
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from qa.fuzz.hostile_images import png, write_processor
from server.echo import BASE, EchoExecutor
from server.hosting import Api, hosted
from tinkex.server.prices import Prices
from tinkex.server.store import open_store
from tinkex.wire.codec import encode_json
from tinkex.wire.inputs import Datum, EncodedTextChunk, ImageChunk, ModelInput
from tinkex.wire.proto import tinkex_wire_pb2 as pb
from tinkex.wire.proto.frames_pb2 import Done, Order
from tinkex.wire.tensors import TensorData

pytestmark = pytest.mark.anyio


class CachingExecutor(EchoExecutor):
    """Returns samples of a known length with part of the prompt cached."""

    async def run(self, base_model: str, work: Order, *, incarnation: int | None = None) -> Done:
        outcome = await super().run(base_model, work, incarnation=incarnation)
        if not work.HasField("sample"):
            return outcome
        response = pb.SampleResponse.FromString(outcome.result)
        response.prompt_cache_hit_tokens = 2
        for sequence in response.sequences:
            sequence.tokens = b"\0\0\0\0" * 5
        return Done(result=response.SerializeToString())


def around_now() -> dict[str, str]:
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    return {
        "starting_on": (hour - timedelta(hours=1)).isoformat(),
        "ending_before": (hour + timedelta(hours=2)).isoformat().replace("+00:00", "Z"),
    }


async def events(api: Api, **query: str) -> Any:
    answer = await api.get(f"/api/v1/billing/usage/events?{urlencode(query or around_now())}")
    assert answer.status == 200, answer
    return answer.json


def totals(reported: Any) -> Counter[str]:
    """Tokens by kind."""
    found: Counter[str] = Counter()
    for event in reported["data"]:
        info = event["event_info"]
        cached = {True: "_cached", False: ""}[info.get("cached", False)]
        found[info["type"] + cached] += info.get("token_count", info.get("count", 0))
    return found


async def a_sampler(api: Api, session_id: str) -> str:
    body = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": BASE}
    return str((await api.post("create_sampling_session", body)).json["sampling_session_id"])


async def sampled(api: Api, sampler: str, seq_id: int, *, tokens: int, sequences: int) -> str:
    return await api.step(
        "asample",
        prompt={"chunks": [{"tokens": [1] * tokens}]},
        sampling_params={"max_tokens": 5},
        sampling_session_id=sampler,
        seq_id=seq_id,
        num_samples=sequences,
    )


async def test_token_totals_match_the_requests(tmp_path: Path) -> None:
    async with hosted(CachingExecutor(), tmp_path) as api:
        session_id = await api.session()
        model_id = await api.model(session_id)
        passes = [await api.forward_backward(model_id, 1 + n, tokens=10 + n) for n in range(20)]
        await asyncio.gather(*(api.passed(one) for one in passes))
        # A repeat: neither run nor counted again.
        assert await api.forward_backward(model_id, 1, tokens=10) == passes[0]
        # Refused by the engine: nothing was trained.
        await api.result(await api.forward_backward(model_id, 21, tokens=50, loss="unknown"))
        sampler = await a_sampler(api, session_id)
        samples = await asyncio.gather(
            *(sampled(api, sampler, n, tokens=8, sequences=1 + n % 3) for n in range(30))
        )
        await asyncio.gather(*(api.result(one) for one in samples))
        await api.result(await api.step("save_weights", model_id=model_id, seq_id=22, path="a"))
        reported = await events(api)
        assert totals(reported) == {
            "training": sum(10 + n for n in range(20)),
            "sampling_prefill": 30 * 6,
            "sampling_prefill_cached": 30 * 2,
            "sampling_sample": 5 * sum(1 + n % 3 for n in range(30)),
            "checkpoint": 1,
            "storage": 0,
        }
        assert {event["session_id"] for event in reported["data"]} == {session_id}
        assert {event["base_model"] for event in reported["data"]} == {BASE}
        assert {event["user_id"] for event in reported["data"]} == {"local"}
        assert reported["sessions"] == {session_id: {"user_metadata": {}}}
        # No price is set.
        assert not any("estimated_cost_usd" in event for event in reported["data"])
    # Usage is stored in the same commit as the results.
    async with hosted(CachingExecutor(), tmp_path) as api:
        assert totals(await events(api)) == totals(reported)


async def test_prices_come_from_the_settings(tmp_path: Path) -> None:
    prices = (f"{BASE}=2/1/0.5/4", "*=9")
    async with hosted(EchoExecutor(), tmp_path, prices=prices, price_gb_month=0.1) as api:
        session_id = await api.session()
        model_id = await api.model(session_id)
        await api.passed(await api.forward_backward(model_id, 1, tokens=500))
        await api.result(await api.step("save_weights", model_id=model_id, seq_id=2, path="a"))
        reported = await events(api)
        (trained,) = [e for e in reported["data"] if e["event_info"]["type"] == "training"]
        assert trained["effective_rate_usd_per_million_tokens"] == 2
        assert trained["estimated_cost_usd"] == pytest.approx(500 * 2 / 1e6)
        (kept,) = [e for e in reported["data"] if e["event_info"]["type"] == "storage"]
        assert kept["effective_rate_usd_per_gigabyte_month"] == 0.1
        assert kept["estimated_cost_usd"] == pytest.approx(
            kept["event_info"]["gigabyte_hours"] / 730 * 0.1
        )
        now = (await api.get("/api/v1/billing/usage/checkpoints/current")).json
        assert now["effective_rate_usd_per_gigabyte_month"] == 0.1
        assert now["data"][0]["estimated_monthly_cost_usd"] == pytest.approx(1e-9 * 0.1)


def test_prices_are_read_or_refused() -> None:
    prices = Prices.parse(("org/a=b=1", "org/c=1/2/3/4", "*=7"))
    assert prices.rate("org/a=b", "training") == 1
    assert prices.rate("org/c", "cached") == 3
    assert prices.rate("other", "sampled") == 7
    assert Prices.parse(()).rate("other", "sampled") is None
    for wrong in ("org/a", "org/a=", "=3", "a=1/2", "a=-1", "a=x", "a=nan"):
        with pytest.raises(ValueError, match="is not a price"):
            Prices.parse((wrong,))


@pytest.mark.parametrize(
    ("starting_on", "ending_before", "says"),
    [
        ("2026-11-15T10:00:00", "2026-11-15T12:00:00Z", "time zone"),
        ("soon", "2026-11-15T12:00:00Z", "RFC 3339"),
        ("2026-11-15T10:30:00Z", "2026-11-15T12:00:00Z", "whole UTC hour"),
        ("2026-11-15T10:00:00+05:30", "2026-11-15T12:00:00Z", "whole UTC hour"),
        ("2026-11-15T10:00:00Z", "2026-11-15T10:00:00Z", "14 days"),
        ("2026-11-01T10:00:00Z", "2026-11-15T11:00:00Z", "14 days"),
        ("0001-01-01T00:00:00+14:00", "2026-11-15T11:00:00Z", "out of range"),
    ],
)
async def test_invalid_times_are_refused(
    api: Api, starting_on: str, ending_before: str, says: str
) -> None:
    query = urlencode({"starting_on": starting_on, "ending_before": ending_before})
    answer = await api.get(f"/api/v1/billing/usage/events?{query}")
    assert answer.status == 422
    assert says in answer.json["detail"][0]["msg"]


async def test_images_count_as_the_model_places_them(tmp_path: Path) -> None:
    """The sender's number is not used: 64 x 48 pixels are 12 tokens of this model."""
    folder = write_processor(tmp_path / "model")
    image = ImageChunk(data=png(64, 48), format="png", expected_tokens=2)
    prompt = ModelInput(chunks=[EncodedTextChunk(tokens=[1, 2, 3]), image])
    targets = {"target_tokens": TensorData(data=[0], dtype="int64")}
    async with hosted(EchoExecutor(folder=folder), tmp_path / "data") as api:
        model = await api.model()
        data = [Datum(model_input=prompt, loss_fn_inputs=targets).model_dump()]
        passed = {"data": data, "loss_fn": "cross_entropy"}
        forward = {"model_id": model, "seq_id": 1, "forward_input": passed}
        params = {"max_tokens": 1}
        sample = {"base_model": api.base_model, "prompt": prompt, "sampling_params": params}
        for path, body in (("forward", forward), ("asample", sample)):
            answer = await api.post(path, json.loads(encode_json(body)))
            assert answer.status == 200, answer
            await api.poll(answer.json["request_id"])
        found = totals(await events(api))
    assert (found["training"], found["sampling_prefill"]) == (15, 15), found


async def test_current_storage_is_reported_by_project(api: Api) -> None:
    session_id = await api.session()
    model_id = await api.model(session_id)
    for number, name in enumerate("abc", start=1):
        await api.result(
            await api.step("save_weights", model_id=model_id, seq_id=number, path=name)
        )
    url = f"/api/v1/sessions/{session_id}/project"
    async with api.http.put(url, json={"project_id": "p"}) as answer:
        assert answer.status == 204
    path = "/api/v1/billing/usage/checkpoints/current"
    (item,) = (await api.get(f"{path}?project_id=p")).json["data"]
    assert (item["project_id"], item["checkpoint_count"], item["size_bytes"]) == ("p", 3, 3)
    assert item["size_gigabytes"] == pytest.approx(3e-9)
    assert (await api.get(f"{path}?project_id=other")).json == {"data": []}


async def test_current_storage_counts_listed_checkpoints_only(tmp_path: Path) -> None:
    async with hosted(EchoExecutor(), tmp_path, janitor_s=0) as api:
        session_id = await api.session()
        model_id = await api.model(session_id)
        # Two versions of one name, both still stored, and one unnamed checkpoint.
        for number in (1, 2):
            await api.result(
                await api.step(
                    "save_weights", model_id=model_id, seq_id=number, path="a", overwrite=True
                )
            )
        await api.result(
            await api.step(
                "save_weights_for_sampler",
                model_id=model_id,
                seq_id=3,
                sampling_session_seq_id=0,
            )
        )
        listed = (await api.get("/api/v1/checkpoints")).json["checkpoints"]
        (item,) = (await api.get("/api/v1/billing/usage/checkpoints/current")).json["data"]
        assert item["checkpoint_count"] == len(listed) == 1
        assert item["size_bytes"] == sum(one["size_bytes"] for one in listed)
        found = (await api.post("sessions/search", {})).json["sessions"][0]
        assert (found["checkpoints_count"], found["checkpoint_storage_bytes"]) == (1, 1)
        # Each named save is counted; the unnamed one for a sampler is not.
        assert totals(await events(api))["checkpoint"] == 2


async def audited(api: Api, query: str = "") -> list[tuple[str, dict[str, Any]]]:
    answer = await api.get(f"/api/v1/audit{query}")
    assert answer.status == 200, answer
    return [(entry["event"], entry["event_details"]) for entry in answer.json["entries"]]


async def test_changes_are_in_the_audit_log(api: Api) -> None:
    session_id = await api.session()
    async with api.http.put(f"/api/v1/sessions/{session_id}/project", json={"project_id": "p"}):
        pass
    done = {"reason": {"type": "success"}}
    for _ in range(2):
        await api.post(f"sessions/{session_id}/finish", done)
    moved = ("project.session_moved", {"session_id": session_id, "project_id": "p"})
    assert await audited(api) == [
        ("session.created", {"session_id": session_id, "sdk_version": "0.36.0"}),
        moved,
        ("session.finished", {"session_id": session_id, "reason": "success"}),
    ]
    assert await audited(api, "?event_type=projects") == [moved]
    assert await audited(api, "?event_type=teams") == []
    today = datetime.now(UTC).date()
    assert len(await audited(api, f"?event_type=all&day={today}")) == 3
    assert await audited(api, f"?day={today - timedelta(days=2)}") == []
    for wrong in ("?event_type=weather", "?day=tomorrow"):
        assert (await api.get(f"/api/v1/audit{wrong}")).status == 422


async def test_checkpoints_and_keys_are_in_the_audit_log(api: Api, tmp_path: Path) -> None:
    model_id = await api.model()
    await api.result(await api.step("save_weights", model_id=model_id, seq_id=1, path="a"))
    url = f"/api/v1/training_runs/{model_id}/checkpoints/weights/a"
    async with api.http.post(f"{url}/publish") as answer:
        assert answer.status == 204
    for _ in range(2):
        async with api.http.delete(url) as answer:
            assert answer.status in (204, 404)
    entries = await audited(api, "?event_type=checkpoints")
    assert [event for event, _ in entries] == [
        "checkpoint.saved",
        "checkpoint.published",
        "checkpoint.deleted",
    ]
    assert {reported["tinker_path"] for _, reported in entries} == {
        f"tinker://{model_id}/weights/a"
    }

    store = open_store(
        db_url=f"sqlite:///{tmp_path / 'other.db'}", storage_url=str(tmp_path), folder=tmp_path
    )
    key, secret = await store.keys.create(owner="somebody", name="laptop")
    for _ in range(2):
        await store.keys.revoke(key.key_id)
    found = await store.audit.entries(
        owner="somebody", topic="organizations", since_s=0, until_s=2e10
    )
    store.close()
    assert [entry.event for entry in found] == ["key.created", "key.revoked"]
    assert not any(secret in str(entry.details) for entry in found)


SECRET = "tml-" + "a" * 32


def a_batch(session_id: str) -> dict[str, Any]:
    common = {"event_id": "e", "severity": "INFO", "timestamp": "2026-11-15T10:00:00Z"}
    return {
        "events": [
            {
                **common,
                "event": "GENERIC_EVENT",
                "event_session_index": 0,
                "event_name": "retry",
                "event_data": {"headers": {"X-API-Key": SECRET}},
            },
            {
                **common,
                "event": "UNHANDLED_EXCEPTION",
                "event_session_index": 1,
                "error_type": "ValueError",
                "error_message": f"refused {SECRET} " + "x" * 10_000,
                "traceback": f"key = '{SECRET}'",
            },
        ],
        "platform": "Linux",
        "sdk_version": "0.36.0",
        "session_id": session_id,
        "process_uuid": "u",
    }


async def test_telemetry_is_kept_without_secrets(tmp_path: Path) -> None:
    async with hosted(EchoExecutor(), tmp_path) as api:
        session_id = await api.session()
        answer = await api.post("telemetry", a_batch(session_id))
        assert answer.json == {"status": "accepted"}
        for odd in (b"no json", b"[]", b'{"events": 3}', b'{"events": [3]}', b""):
            assert (await api.post("telemetry", odd)).json == {"status": "accepted"}
    kept = _rows(tmp_path)
    assert [event["event"] for event in kept] == ["GENERIC_EVENT", "UNHANDLED_EXCEPTION"]
    assert "event_data" not in kept[0]
    assert "traceback" not in kept[1]
    assert kept[1]["error_message"].startswith("refused *** x")
    assert len(kept[1]["error_message"]) <= 500
    assert SECRET.encode() not in _bytes(tmp_path)


async def test_telemetry_can_be_dropped(tmp_path: Path) -> None:
    async with hosted(EchoExecutor(), tmp_path, telemetry_kept_s=0.0) as api:
        session_id = await api.session()
        assert (await api.post("telemetry", a_batch(session_id))).status == 200
    assert _rows(tmp_path) == []


def _rows(folder: Path) -> list[dict[str, Any]]:
    connection = sqlite3.connect(folder / "tinkex.db")
    try:
        rows = connection.execute("SELECT event FROM telemetry ORDER BY event_number").fetchall()
    finally:
        connection.close()
    return [json.loads(row[0]) for row in rows]


def _bytes(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in folder.glob("tinkex.db*"))
