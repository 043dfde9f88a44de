"""
Reads the table `step_metrics`: a run as a bounded number of points, and its newest step.

`step_rows` writes it.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from tinkex.server.store.database import Database
from tinkex.server.store.schema import models, step_metrics
from tinkex.server.store.sql_dialects import in_list
from tinkex.server.store.step_rows import MAX_MORE

#: Metrics without a column in one answer. Runs may use new names in every step.
MAX_NAMES = MAX_MORE
#: The metrics without a column are read from this many steps for each point, and from no more than
#: this in all: each may have kilobytes.
SAMPLED_PER_POINT = 8
MAX_SAMPLED = 20_000

#: A run whose last step is younger than this is running, if its session is open.
RUNNING_S = 90.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPoint:
    """One step, or the means over several steps that follow each other."""

    #: The number of the last of them.
    step: int
    #: How many there are.
    steps: int
    #: When the last of them finished.
    finished_s: float
    metrics: Mapping[str, float]
    loss_min: float | None
    loss_max: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class NewestStep:
    """How far a run is."""

    number: int
    finished_s: float
    loss: float | None


# The loss of a step is the mean over its tokens with a loss, so that steps of different sizes
# compare. The number of those tokens is unknown for some losses: then it is the mean over all.
_TOKENS = sa.func.coalesce(
    sa.func.nullif(step_metrics.c.loss_tokens, 0), sa.func.nullif(step_metrics.c.tokens, 0), 1
)
_LOSS = step_metrics.c.loss_sum / _TOKENS
_FINISHED = step_metrics.c.finished_s.is_not(None)

#: What a point has for every run that has it, beside the metrics with names of their own.
_COLUMNS: Mapping[str, sa.ColumnElement[Any]] = {
    "loss": _LOSS,
    "loss_sum": step_metrics.c.loss_sum,
    "entropy": step_metrics.c.entropy_sum / _TOKENS,
    "learning_rate": step_metrics.c.learning_rate,
    "grad_norm": step_metrics.c.grad_norm,
    "update_norm": step_metrics.c.update_norm,
    "tokens": step_metrics.c.tokens,
    "loss_tokens": step_metrics.c.loss_tokens,
    "examples": step_metrics.c.examples,
    "passes": step_metrics.c.passes,
    "seconds": step_metrics.c.compute_s,
}


class StepHistory:
    """The metrics of steps, for their owner."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def points(self, model_id: str, *, limit: int) -> list[StepPoint]:
        """
        The finished steps of a run in order, as at most `limit` (2 or more) points.

        If there are more steps than that, a point is the mean over steps that follow each other,
        except for the last one. Metrics without a column are the mean over some of those steps
        if there are many. Memory and time for them depend on `limit`, not on the steps.
        """
        return await self._database.read_report(
            lambda connection: read_points(connection, model_id, limit)
        )

    async def news(
        self, after: Mapping[str, int | None], *, limit: int
    ) -> dict[str, tuple[NewestStep, list[StepPoint]]]:
        """
        How far each of these runs is, and its steps after the given number, the oldest first.

        Runs without a step are left out. None as the number asks for no steps. The runs that have
        such steps share `limit` equally, with at least one step each.
        """

        def operation(
            connection: sa.Connection,
        ) -> dict[str, tuple[NewestStep, list[StepPoint]]]:
            found = newest_steps(connection, list(after))
            # Most runs of a page have nothing new, and cost no query of their own.
            behind = {
                model_id: number
                for model_id, number in after.items()
                if number is not None and model_id in found and found[model_id].number > number
            }
            share = max(1, limit // max(1, len(behind)))
            points = {
                model_id: _points_after(connection, model_id, number, share)
                for model_id, number in behind.items()
            }
            return {
                model_id: (newest, points.get(model_id, [])) for model_id, newest in found.items()
            }

        return await self._database.read(operation)


def _points_after(
    connection: sa.Connection, model_id: str, number: int, limit: int
) -> list[StepPoint]:
    rows = connection.execute(
        sa.select(
            step_metrics.c.number.label("step"),
            sa.literal(1).label("steps"),
            step_metrics.c.finished_s,
            _LOSS.label("loss_min"),
            _LOSS.label("loss_max"),
            step_metrics.c.more,
            *(value.label(f"mean_{name}") for name, value in _COLUMNS.items()),
        )
        .where(step_metrics.c.model_id == model_id, _FINISHED, step_metrics.c.number > number)
        .order_by(step_metrics.c.number)
        .limit(limit)
    )
    return [_point(row, row.more or {}) for row in rows]


def read_points(connection: sa.Connection, model_id: str, limit: int) -> list[StepPoint]:
    of_run = sa.and_(step_metrics.c.model_id == model_id, _FINISHED)
    number = step_metrics.c.number
    found = connection.execute(
        sa.select(sa.func.count(), sa.func.min(number), sa.func.max(number)).where(of_run)
    ).one()
    count, first, last = found
    if not count:
        return []
    # The last step is alone in its bucket: only it has (last - first) // (last - first) = 1.
    bucket = number - first if count <= limit else (number - first) * (limit - 1) // (last - first)
    means = sa.select(
        bucket.label("bucket"),
        sa.func.max(number).label("step"),
        sa.func.count().label("steps"),
        sa.func.max(step_metrics.c.finished_s).label("finished_s"),
        sa.func.min(_LOSS).label("loss_min"),
        sa.func.max(_LOSS).label("loss_max"),
        *(sa.func.avg(value).label(f"mean_{name}") for name, value in _COLUMNS.items()),
    )
    rows = connection.execute(means.where(of_run).group_by("bucket").order_by("bucket")).all()
    every = _stride(last - first + 1, min(SAMPLED_PER_POINT * limit, MAX_SAMPLED))
    others = sa.select(bucket, step_metrics.c.more).where(
        of_run,
        step_metrics.c.more.is_not(None),
        sa.or_(number % every == 0, number == last),
    )
    # From the newest step on: its names are in the answer.
    streamed = connection.execution_options(yield_per=1000).execute(others.order_by(number.desc()))
    more = dict(_means_of(streamed))
    return [_point(row, more.get(row.bucket, {})) for row in rows]


def _stride(steps: int, most: int) -> int:
    """Every how many steps to read to get at most `most`; a power of 2, as rows are thinned."""
    return 1 << max(0, math.ceil(steps / most) - 1).bit_length()


def _means_of(rows: Iterable[Any]) -> Iterator[tuple[int, Mapping[str, float]]]:
    """The mean of each metric in each bucket; the rows of a bucket follow each other."""
    #: Of the answer. One string for each, however many rows have it.
    names: dict[str, str] = {}
    current: int | None = None
    sums: dict[str, tuple[float, int]] = {}
    for bucket, metrics in rows:
        if bucket != current:
            if current is not None:
                yield current, _means(sums)
            current, sums = bucket, {}
        for name, value in metrics.items():
            if name not in names and len(names) >= MAX_NAMES:
                continue
            known = names.setdefault(name, name)
            total, count = sums.get(known, (0.0, 0))
            sums[known] = (total + value, count + 1)
    if current is not None:
        yield current, _means(sums)


def _means(sums: Mapping[str, tuple[float, int]]) -> dict[str, float]:
    return {name: total / count for name, (total, count) in sums.items()}


def _point(row: sa.Row[*tuple[Any, ...]], more: Mapping[str, float]) -> StepPoint:
    named = row._mapping
    known = {name: named[f"mean_{name}"] for name in _COLUMNS}
    # PostgreSQL returns the mean of whole numbers as a decimal.
    metrics = {name: float(value) for name, value in known.items() if value is not None}
    return StepPoint(
        step=row.step,
        steps=row.steps,
        finished_s=row.finished_s,
        # A sum of finite numbers may overflow.
        metrics={
            name: value for name, value in {**metrics, **more}.items() if math.isfinite(value)
        },
        loss_min=row.loss_min,
        loss_max=row.loss_max,
    )


def newest_steps(connection: sa.Connection, ids: Sequence[str]) -> dict[str, NewestStep]:
    """The last finished step of each of these runs that has one."""
    other = step_metrics.alias("other")
    last = (
        sa.select(other.c.number)
        .where(other.c.model_id == models.c.model_id, other.c.finished_s.is_not(None))
        .order_by(other.c.number.desc())
        .limit(1)
        .scalar_subquery()
    )
    statement = (
        sa.select(
            step_metrics.c.model_id,
            step_metrics.c.number,
            step_metrics.c.finished_s,
            _LOSS.label("loss"),
        )
        .select_from(models)
        .join(
            step_metrics,
            sa.and_(step_metrics.c.model_id == models.c.model_id, step_metrics.c.number == last),
        )
        .where(in_list(models.c.model_id, ids))
    )
    return {
        row.model_id: NewestStep(number=row.number, finished_s=row.finished_s, loss=row.loss)
        for row in connection.execute(statement)
    }


def run_status(
    *,
    lost: bool,
    has_work: bool,
    session_ended: bool,
    session_timed_out: bool,
    last_step_s: float | None,
    now_s: float,
) -> str:
    """
    What a run does: `failed`, `running`, `finished` or `idle`.

    `running` has work, or finished a step a moment ago for a client that is still there. `finished`
    means that its client closed the session. Otherwise it is `idle` and may go on.
    """
    if lost:
        return "failed"
    if has_work:
        return "running"
    if session_ended:
        return "finished"
    recent = last_step_s is not None and now_s - last_step_s < RUNNING_S
    return "running" if recent and not session_timed_out else "idle"
