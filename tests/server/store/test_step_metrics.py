"""Step metrics: one row for each optimizer step, written when its requests finish, once."""

import json
import logging
import math
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from server.store.test_store import a_model, step
from tinkex.server.queued_request import Cause, Kind, Outcome
from tinkex.server.store import Store, open_store, step_rows
from tinkex.server.store.group_commit import MAX_GROUP
from tinkex.server.store.schema import models, requests, step_metrics
from tinkex.server.store.step_metrics import RUNNING_S, StepPoint, run_status
from tinkex.server.store.step_rows import Step, is_kept
from tinkex.wire.protobuf import encode_forward_backward_output
from tinkex.wire.training import ForwardBackwardOutput

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'tinkex.db'}"
    return str(request.getfixturevalue("postgres").database())


def opened(url: str, folder: Path) -> Store:
    return open_store(db_url=url, storage_url=str(folder), folder=folder)


class Run:
    """A run whose steps finish one after another, as an engine would report them."""

    def __init__(self, store: Store, model_id: str, seq_ids: Iterator[int]) -> None:
        self.store, self.model_id, self.seq_ids = store, model_id, seq_ids

    async def finish(self, kind: Kind, outcome: Outcome) -> Any:
        request = await self.store.requests.accept(step(self.model_id, next(self.seq_ids), kind))
        await self.store.requests.finish_one(request, outcome)
        return request

    async def train(
        self, kind: Kind = Kind.FORWARD_BACKWARD, *, examples: int = 1, **metrics: float
    ) -> Any:
        named = {f"{name}:sum": value for name, value in metrics.items()}
        return await self.finish(kind, passed(named, examples))

    async def optim_step(self, **metrics: float) -> Any:
        named = {f"{name}:mean": value for name, value in metrics.items()}
        result = json.dumps({"metrics": named}).encode()
        return await self.finish(Kind.OPTIM_STEP, Outcome(result=result, compute_s=0.5))

    async def fail(self, kind: Kind, cause: Cause = Cause.WORK) -> None:
        await self.finish(kind, Outcome(error="no", category="user", cause=cause))

    async def points(self, limit: int = 1000) -> list[StepPoint]:
        return await self.store.step_metrics.points(self.model_id, limit=limit)

    async def rows(self) -> int:
        count = sa.select(sa.func.count()).select_from(step_metrics)
        return await self.store._database.read(lambda connection: connection.scalar(count)) or 0


def passed(metrics: dict[str, float], examples: int = 1) -> Outcome:
    output = ForwardBackwardOutput("ArrayRecord", [{} for _ in range(examples)], metrics)
    return Outcome(result=encode_forward_backward_output(output), compute_s=2.0)


@pytest.fixture
async def run(url: str, tmp_path: Path) -> AsyncIterator[Run]:
    store = opened(url, tmp_path)
    yield Run(store, await a_model(store), iter(range(1, 10_000)))
    store.close()


async def test_the_passes_of_a_step_are_one_row_that_the_optim_step_completes(run: Run) -> None:
    await run.train(loss=6.0, tokens=9, loss_tokens=3, entropy=1.5, examples=2)
    await run.train(loss=4.0, tokens=8, loss_tokens=2, entropy=1.0)
    assert await run.points() == []  # not finished
    await run.optim_step(grad_norm=1.25, update_norm=0.5, learning_rate=1e-3)
    (point,) = await run.points()
    assert (point.step, point.steps) == (1, 1)
    assert point.metrics == {
        "loss": 2.0,
        "loss_sum": 10.0,
        "entropy": 0.5,
        "tokens": 17,
        "loss_tokens": 5,
        "examples": 3,
        "passes": 2,
        "learning_rate": 1e-3,
        "grad_norm": 1.25,
        "update_norm": 0.5,
        "seconds": 4.5,
    }
    assert point.loss_min == point.loss_max == 2.0


async def test_a_request_that_finishes_again_adds_nothing(run: Run) -> None:
    first = await run.train(loss=1.0, loss_tokens=1)
    stepped = await run.optim_step(grad_norm=1.0)
    await run.store.requests.finish_one(first, passed({"loss:sum": 50.0}))
    await run.store.requests.finish_one(stepped, Outcome(result=b"{}"))
    await run.store.requests.finish_all([(first, passed({})), (stepped, Outcome(result=b"{}"))])
    (point,) = await run.points()
    assert (point.metrics["loss"], point.metrics["passes"]) == (1.0, 1)
    assert await run.rows() == 1


async def test_forward_does_not_train_and_a_step_may_have_no_pass(run: Run) -> None:
    await run.train(Kind.FORWARD, loss=3.0, tokens=1)
    await run.optim_step(learning_rate=0.1)
    (point,) = await run.points()
    assert "loss" not in point.metrics
    assert (point.metrics["passes"], point.metrics["learning_rate"]) == (0, 0.1)
    assert point.loss_min is None


async def test_passes_whose_gradients_were_dropped_are_in_no_step(run: Run) -> None:
    await run.train(loss=100.0, loss_tokens=1)
    await run.fail(Kind.OPTIM_STEP)
    await run.train(loss=200.0, loss_tokens=1)
    await run.finish(Kind.LOAD_WEIGHTS, Outcome(result=b"{}"))
    await run.train(loss=300.0, loss_tokens=1)
    await run.fail(Kind.FORWARD, Cause.GAP)
    assert await run.rows() == 0
    await run.train(loss=1.0, loss_tokens=1)
    # These change nothing in the engine.
    await run.fail(Kind.FORWARD_BACKWARD)
    await run.fail(Kind.LOAD_WEIGHTS)
    await run.fail(Kind.OPTIM_STEP, Cause.LATE)
    await run.optim_step()
    (point,) = await run.points()
    assert (point.step, point.metrics["loss_sum"], point.metrics["passes"]) == (1, 1.0, 1)


async def test_a_step_continues_after_a_restart(url: str, run: Run, tmp_path: Path) -> None:
    await run.train(loss=1.0, loss_tokens=1, custom=2.0)
    await run.optim_step()
    await run.train(loss=2.0, loss_tokens=1, custom=3.0)
    run.store.close()
    run.store = opened(url, tmp_path)
    try:
        await run.train(loss=4.0, loss_tokens=1, custom=4.0)
        await run.optim_step()
        first, second = await run.points()
    finally:
        run.store.close()
    assert (first.step, second.step) == (1, 2)
    assert (second.metrics["loss_sum"], second.metrics["passes"]) == (6.0, 2)
    assert (first.metrics["custom:sum"], second.metrics["custom:sum"]) == (2.0, 7.0)


async def test_a_transaction_that_is_rolled_back_is_not_counted(run: Run) -> None:
    """A write of the same group fails: the others run again, each in its own transaction."""
    store, database = run.store.requests, run.store._database
    one = await store.accept(step(run.model_id, next(run.seq_ids), Kind.FORWARD_BACKWARD))

    def fails(connection: sa.Connection) -> None:
        connection.execute(models.insert(), {"model_id": run.model_id})

    # The writer is busy with the first write, so the other two are one group.
    busy = database.write(lambda connection: None)
    finished = store.finish_one(one, passed({"loss:sum": 5.0}))
    failing = database.write(fails)
    await busy
    with pytest.raises(sa.exc.IntegrityError):
        await failing
    await finished
    await run.optim_step()
    (point,) = await run.points()
    assert (point.metrics["loss_sum"], point.metrics["passes"]) == (5.0, 1)


async def test_results_of_many_runs_share_a_transaction(run: Run) -> None:
    store = run.store
    others = [Run(store, await a_model(store), iter(range(1, 9))) for _ in range(3)]
    accepted = [
        await store.requests.accept(step(one.model_id, 1, Kind.FORWARD_BACKWARD)) for one in others
    ]
    assert len(accepted) < MAX_GROUP
    futures = [
        store.requests.finish_one(request, passed({"loss:sum": float(number)}))
        for number, request in enumerate(accepted)
    ]
    for future in futures:
        await future
    for number, one in enumerate(others):
        one.seq_ids = iter(range(2, 9))
        await one.optim_step()
        assert [point.metrics["loss"] for point in await one.points()] == [number]


async def test_numbers_that_are_not_finite_are_left_out(run: Run) -> None:
    await run.train(loss=math.nan, tokens=math.inf, custom=math.inf, loss_tokens=1)
    await run.optim_step(grad_norm=math.inf, learning_rate=0.5)
    (point,) = await run.points()
    assert point.metrics == {
        "learning_rate": 0.5,
        "examples": 1,
        "loss_tokens": 1,
        "passes": 1,
        "seconds": 2.5,
        "tokens": 0,
    }


async def test_a_result_that_cannot_be_read_is_stored_without_metrics(run: Run) -> None:
    await run.finish(Kind.FORWARD_BACKWARD, Outcome(result=b"\xff\xff"))
    for broken in (b"", b"[]", b'{"metrics": null}', b'{"metrics": {"a": "b"}}'):
        await run.finish(Kind.OPTIM_STEP, Outcome(result=broken))
    assert [point.metrics["passes"] for point in await run.points()] == [1, 0, 0, 0]


async def test_the_rows_of_a_run_are_deleted_with_it(run: Run) -> None:
    await run.optim_step()

    def delete(connection: sa.Connection) -> None:
        connection.execute(requests.delete())
        connection.execute(models.delete().where(models.c.model_id == run.model_id))

    await run.store._database.write(delete)
    assert await run.rows() == 0


async def test_the_steps_in_progress_of_a_limited_number_of_runs_are_remembered(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_rows, "MAX_OPEN_STEPS", 2)
    runs = [run, *[Run(run.store, await a_model(run.store), iter(range(1, 9))) for _ in range(3)]]
    for loss in (1.0, 2.0):
        for one in runs:
            await one.train(loss=loss, loss_tokens=1)
    states: list[Any] = []
    await run.store._database.write(
        lambda connection: states.append(connection.info["step_metrics"])
    )
    assert len(states[0].open) == 2
    for one in runs:
        await one.optim_step()
        assert [point.metrics["loss_sum"] for point in await one.points()] == [3.0]


def test_other_metrics_are_merged_as_clients_merge_chunks() -> None:
    step = Step(1)
    step.add_pass({"a:sum": 1, "b:mean": 1, "c:min": 1, "d:max": 1, "e:unique": 1}, 1, 0.0)
    step.add_pass({"a:sum": 2, "b:mean": 4, "c:min": 2, "d:max": 2, "e:unique": 2}, 2, 0.0)
    assert step.more == {"a:sum": 3, "b:mean": 3, "c:min": 1, "d:max": 2, "e:unique": 2}


def test_the_number_and_length_of_names_is_bounded() -> None:
    step = Step(1)
    step.add_pass({f"m{number}:sum": 1.0 for number in range(1000)} | {"n" * 300: 1.0}, 1, 0.0)
    assert len(step.more) == step_rows.MAX_MORE
    step = Step(1)
    step.add_pass({"n" * 300: 1.0}, 1, 0.0)
    assert step.more == {}


def test_rows_are_thinned_so_that_any_run_has_at_most_twice_the_full_steps() -> None:
    assert all(is_kept(number) for number in range(1, 100_001))
    assert sum(is_kept(number) for number in range(100_001, 200_001)) == 50_000
    assert sum(is_kept(number) for number in range(200_001, 300_001)) == 25_000
    assert not is_kept(10**12 + 1)


async def test_a_very_long_run_keeps_its_newest_step(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(step_rows, "FULL_STEPS", 8)
    caplog.set_level(logging.INFO, "tinkex.server.store")
    for number in range(1, 52):
        await run.train(loss=float(number), loss_tokens=1)
        await run.optim_step()
    points = await run.points()
    steps = [point.step for point in points]
    assert steps[:14] == [*range(1, 9), 10, 12, 14, 16, 20, 24]
    assert steps[-1] == 51
    assert points[-1].metrics["loss"] == 51
    assert len(steps) <= 16
    assert (
        len([line for line in caplog.messages if "not every step keeps its metrics" in line]) == 1
    )


async def test_many_steps_are_read_as_means_and_the_last_step_exactly(run: Run) -> None:
    for number in range(1, 12):
        await run.train(loss=float(number), loss_tokens=1, custom=10.0 * number)
        await run.optim_step()
    points = await run.points(limit=3)
    assert [(point.step, point.steps) for point in points] == [(5, 5), (10, 5), (11, 1)]
    assert [point.metrics["loss"] for point in points] == [3.0, 8.0, 11.0]
    assert [point.metrics["custom:sum"] for point in points] == [30.0, 80.0, 110.0]
    assert [(point.loss_min, point.loss_max) for point in points] == [(1, 5), (6, 10), (11, 11)]
    assert [point.steps for point in await run.points(limit=11)] == [1] * 11
    for limit in range(2, 12):
        found = await run.points(limit=limit)
        assert len(found) <= limit
        assert sum(point.steps for point in found) == 11
        assert (found[-1].step, found[-1].steps) == (11, 1)


def test_the_status_of_a_run() -> None:
    quiet: dict[str, Any] = {
        "lost": False,
        "has_work": False,
        "session_ended": False,
        "session_silent": False,
        "last_step_s": None,
        "now_s": 1000.0,
    }
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "idle"),
        ({"last_step_s": 995.0}, "running"),
        ({"last_step_s": 1000.0 - RUNNING_S}, "idle"),
        ({"last_step_s": 995.0, "session_silent": True}, "idle"),
        ({"last_step_s": 995.0, "session_ended": True}, "finished"),
        ({"has_work": True, "session_ended": True}, "running"),
        ({"has_work": True, "session_silent": True}, "running"),
        ({"lost": True, "has_work": True}, "failed"),
    ]
    for changed, status in cases:
        assert run_status(**{**quiet, **changed}) == status, changed
