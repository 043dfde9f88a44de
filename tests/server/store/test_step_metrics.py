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
from tinkex.server.store import Store, open_store, step_history, step_rows
from tinkex.server.store.group_commit import MAX_GROUP
from tinkex.server.store.schema import models, requests, step_metrics
from tinkex.server.store.step_history import RUNNING_S, StepPoint, run_status
from tinkex.server.store.step_rows import Step, is_kept, keeps_more
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
        return await self.store.step_history.points(self.model_id, limit=limit)

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


def test_a_mean_counts_only_the_examples_that_have_it() -> None:
    step = Step(1)
    step.add_pass({"a:mean": 1.0}, 1, 0.0)
    step.add_pass({}, 100, 0.0)
    step.add_pass({"a:mean": 4.0}, 2, 0.0)
    step.add_pass({"late:mean": 5.0}, 3, 0.0)
    assert step.more == {"a:mean": 3.0, "late:mean": 5.0}


async def test_a_step_is_the_same_after_a_restart_between_its_passes(
    url: str, run: Run, tmp_path: Path
) -> None:
    """Also what a row cannot hold as a number: a sum with NaN does not become finite again."""
    passes: list[tuple[dict[str, float], int]] = [
        ({"loss:sum": math.nan, "entropy:sum": 1e200, "a:mean": 1.0, "b:sum": -math.inf}, 1),
        ({"loss:sum": 1.0, "entropy:sum": -1e200, "c:max": math.inf}, 100),
        ({"loss:sum": 1.0, "entropy:sum": 2.0, "a:mean": 4.0, "b:sum": 1.0, "c:max": 1.0}, 2),
    ]
    for restarts in (False, True):
        for metrics, examples in passes:
            counted = {**metrics, "loss_tokens:sum": 1.0}
            await run.finish(Kind.FORWARD_BACKWARD, passed(counted, examples))
            if restarts:
                run.store.close()
                run.store = opened(url, tmp_path)
        await run.optim_step()
    points = await run.points()
    run.store.close()
    assert len(points) == 2
    for point in points:
        assert (point.metrics["a:mean"], point.metrics["entropy"]) == (3.0, 2.0 / 3)
        assert not {"loss", "loss_sum", "b:sum", "c:max"} & set(point.metrics)


async def test_numbers_of_any_size_are_read_as_means(run: Run) -> None:
    for value in (1e-4, 1e200, 1e99, 1e-320, 1e-310):
        await run.train(loss=value, tokens=1e30, loss_tokens=7, custom=value)
        await run.optim_step(learning_rate=value)
    mean, last = await run.points(limit=2)
    assert mean.metrics["learning_rate"] == pytest.approx(1e99 / 3)
    assert last.metrics["learning_rate"] == 0.0


async def test_more_runs_than_are_remembered_finish_in_one_transaction(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_rows, "MAX_OPEN_STEPS", 1)
    runs = [run, Run(run.store, await a_model(run.store), iter(range(1, 9)))]
    finished = []
    for turn in range(2):
        for one in runs:
            for kind, outcome in (
                (Kind.FORWARD_BACKWARD, passed({"loss:sum": 1.0 + turn})),
                (Kind.OPTIM_STEP, Outcome(result=b"{}")),
            ):
                new = step(one.model_id, next(one.seq_ids), kind)
                finished.append((await run.store.requests.accept(new), outcome))
    await run.store.requests.finish_all(finished)
    for one in runs:
        losses = [(point.step, point.metrics["loss_sum"]) for point in await one.points()]
        assert losses == [(1, 1.0), (2, 2.0)]


def test_the_number_and_length_of_names_is_bounded() -> None:
    step = Step(1)
    step.add_pass({f"m{number}:sum": 1.0 for number in range(1000)} | {"n" * 300: 1.0}, 1, 0.0)
    assert len(step.more) == step_rows.MAX_MORE
    step = Step(1)
    step.add_pass({"n" * 300: 1.0}, 1, 0.0)
    assert step.more == {}
    # The longest number has 24 characters; a character of a name may have 12 in JSON.
    for name in ("{:02}" + "n" * 190, "{:02}" + "\N{GRINNING FACE}" * 150):
        step = Step(1)
        step.add_pass({name.format(number): -2.2250738585072014e-308 for number in range(64)}, 1, 0)
        step.complete({}, 0.0, 1.0)
        stored = len(json.dumps(step.row("run")["more"]))
        assert step_rows.MAX_MORE_BYTES / 4 < stored <= step_rows.MAX_MORE_BYTES


def test_rows_are_thinned_so_that_any_run_has_at_most_twice_the_full_steps() -> None:
    assert all(is_kept(number) for number in range(1, 100_001))
    assert sum(is_kept(number) for number in range(100_001, 200_001)) == 50_000
    assert sum(is_kept(number) for number in range(200_001, 300_001)) == 25_000
    assert not is_kept(10**12 + 1)


def test_metrics_without_a_column_are_thinned_so_that_gaps_grow_with_the_run() -> None:
    assert all(keeps_more(number) for number in range(1, 10_001))
    assert sum(keeps_more(number) for number in range(10_001, 20_001)) == 5_000
    assert sum(keeps_more(number) for number in range(20_001, 40_001)) == 5_000
    assert sum(keeps_more(number) for number in range(1, 200_001)) < 33_000


async def test_a_long_run_keeps_fewer_of_the_metrics_without_a_column(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_rows, "FULL_MORE_STEPS", 4)
    for number in range(1, 22):
        await run.train(loss=float(number), loss_tokens=1, custom=float(number))
        await run.optim_step()
    points = await run.points()
    assert [point.metrics["loss"] for point in points] == [*range(1, 22)]
    kept = [point.step for point in points if "custom:sum" in point.metrics]
    assert kept == [1, 2, 3, 4, 6, 8, 12, 16, 21]


async def test_an_answer_has_a_bounded_number_of_names_and_reads_a_bounded_number_of_rows(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_history, "SAMPLED_PER_POINT", 2)
    monkeypatch.setattr(step_history, "MAX_NAMES", 3)
    for number in range(1, 34):
        await run.train(loss_tokens=1, stable=float(number), **{f"x{number}": 1.0})
        await run.optim_step()
    points = await run.points(limit=4)
    assert sum(point.steps for point in points) == 33
    # Of at most 8 steps: every eighth, and the last. The names of the newest ones are shown.
    names = {name for point in points for name in point.metrics if name.startswith("x")}
    assert names == {"x33:sum", "x32:sum"}
    assert [point.metrics["stable:sum"] for point in points] == [8.0, 16.0, 28.0, 33.0]


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
        "session_timed_out": False,
        "last_step_s": None,
        "now_s": 1000.0,
    }
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "idle"),
        ({"last_step_s": 995.0}, "running"),
        ({"last_step_s": 1000.0 - RUNNING_S}, "idle"),
        ({"last_step_s": 995.0, "session_timed_out": True}, "idle"),
        ({"last_step_s": 995.0, "session_ended": True}, "finished"),
        ({"has_work": True, "session_ended": True}, "running"),
        ({"has_work": True, "session_timed_out": True}, "running"),
        ({"lost": True, "has_work": True}, "failed"),
    ]
    for changed, status in cases:
        assert run_status(**{**quiet, **changed}) == status, changed


async def test_reading_a_run_does_not_scan_the_waiting_requests_of_others(tmp_path: Path) -> None:
    store = opened(f"sqlite:///{tmp_path / 'tinkex.db'}", tmp_path)
    try:
        model = await a_model(store)
        asked: list[tuple[str, Any]] = []

        def asks(_: object, _cursor: object, statement: str, parameters: Any, *_more: Any) -> None:
            asked.append((statement, parameters))

        reading = store._database._reading
        sa.event.listen(reading, "before_cursor_execute", asks)
        found = await store.checkpoint_catalog.run(model, reader="local")
        assert found is not None
        assert found.status == "running"  # its creation waits
        sa.event.remove(reading, "before_cursor_execute", asks)
        plans: list[str] = []
        with reading.connect() as connection:
            for statement, parameters in asked:
                explained = connection.exec_driver_sql(
                    f"EXPLAIN QUERY PLAN {statement}", parameters
                )
                plans += [row[-1] for row in explained]
        assert any("requests" in plan for plan in plans)
        assert not [plan for plan in plans if "ix_requests_status" in plan]
        assert not [plan for plan in plans if plan.startswith("SCAN requests")]
    finally:
        store.close()
