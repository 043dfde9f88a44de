"""The metrics and the status of runs, over HTTP, while they train, crash and end."""

import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from server.echo import EchoExecutor
from server.hosting import Api, hosted
from server.tenants import new_key, with_key
from tinkex.server.executor import WorkFailed
from tinkex.server.store import step_history, step_rows
from tinkex.server.store.schema import step_metrics as table
from tinkex.wire.proto.frames_pb2 import Order
from waiting import until_async

pytestmark = pytest.mark.anyio

RUNS = "/api/v1/training_runs"


async def train(api: Api, model: str, seq_id: int, *, tokens: int = 3) -> None:
    """One optimizer step, with the numbers `seq_id` and `seq_id + 1`."""
    passed = await api.forward_backward(model, seq_id, tokens)
    await api.result(await api.optim_step(model, seq_id + 1, learning_rate=0.25))
    await api.passed(passed)


async def metrics(api: Api, model: str, query: str = "") -> list[dict[str, Any]]:
    answer = await api.get(f"{RUNS}/{model}/metrics{query}")
    assert answer.status == 200, answer
    assert answer.json["training_run_id"] == model
    points: list[dict[str, Any]] = answer.json["points"]
    return points


async def test_every_step_is_stored_and_a_replay_adds_nothing(api: Api, echo: EchoExecutor) -> None:
    model = await api.model()
    assert await metrics(api, model) == []
    await train(api, model, 1)
    await api.passed(await api.forward_backward(model, 3))
    echo.die()  # the model is rebuilt from its log: three steps run again
    await api.passed(await api.forward_backward(model, 4))
    await api.result(await api.optim_step(model, 5))
    first, second = await metrics(api, model)
    assert (first["step"], second["step"]) == (1, 2)
    assert (first["metrics"]["passes"], second["metrics"]["passes"]) == (1, 2)
    # What a loss and an optimizer add is kept by its name.
    assert first["metrics"]["value:sum"] == 3
    assert second["metrics"]["gradient:sum"] == 3 + 6
    assert second["time"] > first["time"]
    assert len(echo.tasks("run_pass", "optim_step")) == 5 + 3


async def test_steps_continue_after_a_restart_of_the_server(tmp_path: Path) -> None:
    async with hosted(EchoExecutor(), tmp_path) as api:
        model = await api.model()
        await train(api, model, 1)
        await api.passed(await api.forward_backward(model, 3, tokens=1))
    async with hosted(EchoExecutor(), tmp_path) as api:
        await train(api, model, 4)
        assert [point["metrics"]["passes"] for point in await metrics(api, model)] == [1, 2]


async def test_only_the_owner_reads_the_metrics_of_a_run(
    echo: EchoExecutor, tmp_path: Path
) -> None:
    alices, bobs = await new_key(tmp_path, "alice"), await new_key(tmp_path, "bob")
    async with (
        hosted(echo, tmp_path) as nobody,
        with_key(nobody, alices) as alice,
        with_key(nobody, bobs) as bob,
    ):
        model = await alice.model()
        await train(alice, model, 1)
        await alice.result(await alice.step("save_weights", model_id=model, seq_id=3, path="a"))
        path = f"training_runs/{model}/checkpoints/weights/a/publish"
        assert await alice.call("POST", path) == 204
        assert len(await metrics(alice, model)) == 1
        for query in ("", "?access_scope=accessible"):
            assert (await bob.get(f"{RUNS}/{model}/metrics{query}")).status == 404
        mine = (await alice.get(f"{RUNS}/{model}")).json
        assert (mine["steps"], mine["status"]) == (1, "running")
        assert "last_loss" in mine
        (shown,) = (await bob.get(f"{RUNS}?access_scope=accessible")).json["training_runs"]
        assert shown["training_run_id"] == model
        assert not {"steps", "status", "last_loss"} & set(shown)


async def test_points_must_be_a_sensible_number(api: Api) -> None:
    model = await api.model()
    for wrong in ("1", "-1", "10001", "many"):
        assert (await api.get(f"{RUNS}/{model}/metrics?points={wrong}")).status == 422


async def test_a_run_that_does_not_exist_has_no_metrics(
    api: Api, echo: EchoExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {
        "session_id": await api.session(),
        "model_seq_id": 0,
        "base_model": api.base_model,
        "lora_config": {"rank": 8},
    }

    def fails(work: Order) -> bytes:
        raise WorkFailed("user", "no")

    monkeypatch.setattr(echo, "_do", fails)
    created = (await api.post("create_model", body)).json
    assert (await api.result(created["request_id"]))["error"] == "no"
    for run in ("nope", created["model_id"]):
        answer = await api.get(f"{RUNS}/{run}/metrics")
        assert (answer.status, answer.json) == (404, (await api.get(f"{RUNS}/{run}")).json)
        assert "tinkex run list" in answer.json["detail"]


async def test_the_status_of_a_run_is_true(
    api: Api, echo: EchoExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await api.session()
    model = await api.model(session)

    async def run() -> dict[str, Any]:
        (listed,) = (await api.get(RUNS)).json["training_runs"]
        assert (await api.get(f"{RUNS}/{model}")).json == listed
        found: dict[str, Any] = listed
        return found

    assert ((await run())["status"], (await run())["steps"]) == ("idle", 0)
    echo.open.clear()
    passed = await api.forward_backward(model, 1)
    assert (await run())["status"] == "running"
    echo.open.set()
    await api.passed(passed)
    await api.result(await api.optim_step(model, 2))
    assert (await run())["status"] == "running"  # a moment ago
    assert ((await run())["steps"], (await run())["last_loss"]) == (1, 0.0)
    monkeypatch.setattr(step_history, "RUNNING_S", 0.0)
    assert (await run())["status"] == "idle"
    done = {"reason": {"type": "success"}, "detail": None}
    assert (await api.post(f"sessions/{session}/finish", done)).status == 200
    assert (await run())["status"] == "finished"


async def test_100_000_steps_are_1_000_points_in_one_bounded_answer(api: Api) -> None:
    model = await api.model()
    assert api.app
    database = api.app.state.context.store._database
    await database.write(lambda connection: insert_steps(connection, model, 100_000))
    tracemalloc.start()
    try:
        began_s = time.monotonic()
        answer = await api.get(f"{RUNS}/{model}/metrics?points=1000")
        took_s = time.monotonic() - began_s
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    points = answer.json["points"]
    assert len(points) == 1000
    assert sum(point["steps"] for point in points) == 100_000
    assert (points[-1]["step"], points[-1]["steps"]) == (100_000, 1)
    assert points[-1]["metrics"]["loss"] == 1.0
    assert points[0]["loss_max"] == 100_000.0
    # Means of metrics without a column are over every 16th step.
    reward = points[0]["metrics"]["custom/reward:mean"]
    assert reward == pytest.approx(points[0]["step"] / 2, abs=8)
    assert len(answer.body) < 2**20
    assert peak < 30 * 2**20, peak
    assert took_s < 20, took_s


def insert_steps(connection: sa.Connection, model_id: str, count: int) -> None:
    """Steps whose loss falls from `count` to 1, with a metric of a custom loss."""
    for start in range(1, count + 1, 10_000):
        rows = [
            {
                "model_id": model_id,
                "number": number,
                "finished_s": 1.8e9 + number,
                "passes": 1,
                "examples": 8,
                "tokens": 1000,
                "loss_tokens": 500,
                "loss_sum": 500.0 * (count + 1 - number),
                "entropy_sum": 100.0,
                "learning_rate": 1e-4,
                "grad_norm": 1.0,
                "update_norm": 0.1,
                "compute_s": 0.5,
                "more": {"custom/reward:mean": float(number)},
            }
            for number in range(start, start + 10_000)
        ]
        connection.execute(table.insert(), rows)


async def test_a_result_is_stored_with_its_metrics_in_one_transaction(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the metrics cannot be written, the result is not stored either, and is retried."""
    model = await api.model()
    write, failures = step_rows.write_steps, [2]

    def fails_twice(connection: sa.Connection) -> None:
        if failures[0]:
            failures[0] -= 1
            raise RuntimeError("not now")
        write(connection)

    passed = await api.forward_backward(model, 1)
    await api.passed(passed)
    monkeypatch.setattr(step_rows, "write_steps", fails_twice)
    passed = await api.forward_backward(model, 2)
    await until_async(lambda: failures[0] == 0)
    await api.passed(passed)
    await api.result(await api.optim_step(model, 3))
    (point,) = await metrics(api, model)
    assert point["metrics"]["passes"] == 2
