"""
The metrics of optimizer steps, written in the transaction that finishes their requests.

A row is one optimizer step of a run, from number 1. Each `forward_backward` adds to the row of the
step in progress, and the `optim_step` completes it. A request finishes once, so a step is counted
once, however often an engine ran it. `forward` does not train and adds nothing.
"""

import json
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from tinkex.server.queued_request import Cause, Kind, Outcome, QueuedRequest
from tinkex.server.store.schema import step_metrics
from tinkex.wire.errors import WireError
from tinkex.wire.protobuf import read_pass_metrics

log = logging.getLogger("tinkex.server.store")

#: All steps up to this one have a row. Later ones are thinned, see `is_kept`.
FULL_STEPS = 100_000
#: Metrics of a step beside the ones with columns, and characters of their names.
MAX_MORE = 64
MAX_NAME_CHARS = 200
#: Runs whose step in progress is kept in memory, so that finishing a step need not read it.
MAX_OPEN_STEPS = 1_000

_STATE = "step_metrics"


def is_kept(number: int) -> bool:
    """
    Whether the row of an older step is kept, so that a run has at most 200,000 rows.

    Every step up to 100,000 is; then every second one up to 200,000, every fourth up to 300,000,
    and so on. The newest step always has a row.
    """
    halvings = max(0, min((number - 1) // FULL_STEPS, 60))
    return number % (1 << halvings) == 0


# -- writing -------------------------------------------------------------------------------------


@dataclass(slots=True)
class Step:
    """One row: sums over the passes so far, and once it is finished what `optim_step` returned."""

    number: int
    passes: int = 0
    examples: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    loss_sum: float | None = None
    entropy_sum: float | None = None
    compute_s: float = 0.0
    learning_rate: float | None = None
    grad_norm: float | None = None
    update_norm: float | None = None
    finished_s: float | None = None
    more: dict[str, float] = field(default_factory=dict)

    def add_pass(self, metrics: Mapping[str, float], examples: int, compute_s: float) -> None:
        self.passes += 1
        self.compute_s += compute_s
        for name, value in metrics.items():
            match name:
                case "loss:sum":
                    self.loss_sum = (self.loss_sum or 0.0) + value
                case "entropy:sum":
                    self.entropy_sum = (self.entropy_sum or 0.0) + value
                case "tokens:sum":
                    self.tokens += _count(value)
                case "loss_tokens:sum":
                    self.loss_tokens += _count(value)
                case _:
                    self._add_more(name, value, examples)
        self.examples += examples

    def complete(self, metrics: Mapping[str, float], compute_s: float, now_s: float) -> None:
        self.compute_s += compute_s
        self.finished_s = now_s
        for name, value in metrics.items():
            match name:
                case "grad_norm:mean":
                    self.grad_norm = value
                case "update_norm:mean":
                    self.update_norm = value
                case "learning_rate:mean":
                    self.learning_rate = value
                case _:
                    self._add_more(name, value, 0)

    def _add_more(self, name: str, value: float, examples: int) -> None:
        """Merge as clients merge the chunks of a batch: by the word after the colon."""
        before = self.more.get(name)
        if before is None:
            if len(self.more) < MAX_MORE and len(name) <= MAX_NAME_CHARS:
                self.more[name] = value
            return
        match name.rpartition(":")[2]:
            case "sum":
                self.more[name] = before + value
            case "min":
                self.more[name] = min(before, value)
            case "max":
                self.more[name] = max(before, value)
            case "mean" if total := self.examples + examples:
                self.more[name] = (before * self.examples + value * examples) / total
            case _:
                self.more[name] = value

    def row(self, model_id: str) -> dict[str, Any]:
        """What is stored. Databases and JSON have no common NaN and infinity: they become NULL."""
        return {
            "model_id": model_id,
            "number": self.number,
            "finished_s": self.finished_s,
            "passes": self.passes,
            "examples": self.examples,
            "tokens": self.tokens,
            "loss_tokens": self.loss_tokens,
            "loss_sum": _finite(self.loss_sum),
            "entropy_sum": _finite(self.entropy_sum),
            "learning_rate": _finite(self.learning_rate),
            "grad_norm": _finite(self.grad_norm),
            "update_norm": _finite(self.update_norm),
            "compute_s": self.compute_s,
            "more": {name: value for name, value in self.more.items() if math.isfinite(value)}
            or None,
        }


@dataclass(slots=True)
class _State:
    """What the connection of the writer remembers; forgotten with a transaction that failed."""

    #: The step in progress of each run.
    open: dict[str, Step] = field(default_factory=dict)
    #: Rows to write before the commit, by run and number; None deletes the row.
    changed: dict[tuple[str, int], Step | None] = field(default_factory=dict)


def record_step(connection: sa.Connection, request: QueuedRequest, outcome: Outcome) -> None:
    """Note what a request that this transaction finishes means for its run."""
    model_id, kind = request.model_id, request.kind
    if model_id is None:
        return
    if outcome.error is not None:
        # As for a rebuild: see `step_queue.replay_of`.
        clears = outcome.cause is Cause.GAP or (
            kind is Kind.OPTIM_STEP and outcome.cause is not Cause.LATE
        )
        if not clears:
            return
    elif kind in (Kind.FORWARD_BACKWARD, Kind.OPTIM_STEP, Kind.LOAD_WEIGHTS):
        clears = kind is Kind.LOAD_WEIGHTS
    else:
        return
    state: _State = connection.info.setdefault(_STATE, _State())
    step = state.open.get(model_id) or _read_open(connection, model_id)
    if clears:
        # The gradients of these passes were dropped, so they are not part of any step.
        if step.passes:
            state.changed[model_id, step.number] = None
        _keep_open(state, model_id, Step(step.number))
    elif kind is Kind.FORWARD_BACKWARD:
        step.add_pass(*_pass_metrics(outcome.result), outcome.compute_s)
        state.changed[model_id, step.number] = step
        _keep_open(state, model_id, step)
    else:
        step.complete(_step_metrics(outcome.result), outcome.compute_s, time.time())
        state.changed[model_id, step.number] = step
        if step.number == FULL_STEPS + 1:
            log.info(
                "run %s has %d steps; from here on not every step keeps its metrics",
                model_id,
                FULL_STEPS,
            )
        if not is_kept(step.number - 1):
            state.changed[model_id, step.number - 1] = None
        _keep_open(state, model_id, Step(step.number + 1))


def write_steps(connection: sa.Connection) -> None:
    """Write the rows of this transaction, right before it commits."""
    state: _State | None = connection.info.get(_STATE)
    if state is None or not state.changed:
        return
    changed, state.changed = state.changed, {}
    rows = [step.row(model_id) for (model_id, _), step in changed.items() if step is not None]
    gone = [
        {"of_model": model_id, "of_number": number}
        for (model_id, number), step in changed.items()
        if step is None
    ]
    if gone:
        connection.execute(_DELETE, gone)
    if rows and connection.dialect.name == "sqlite":
        # The plain driver: SQLAlchemy takes longer for these values than SQLite for the row.
        connection.exec_driver_sql(_SQLITE_UPSERT, [_sqlite_values(row) for row in rows])
    elif rows:
        connection.execute(_UPSERT, rows)


def forget_steps(connection: sa.Connection) -> None:
    """The transaction was rolled back: what it noted did not happen."""
    connection.info.pop(_STATE, None)


def _keep_open(state: _State, model_id: str, step: Step) -> None:
    state.open.pop(model_id, None)
    state.open[model_id] = step
    if len(state.open) > MAX_OPEN_STEPS:
        del state.open[next(iter(state.open))]


def _read_open(connection: sa.Connection, model_id: str) -> Step:
    """The step in progress: the newest row if it is not finished, or else the next number."""
    row = connection.execute(_NEWEST, {"of_model": model_id}).first()
    if row is None:
        return Step(1)
    if row.finished_s is not None:
        return Step(row.number + 1)
    values = dict(row._mapping)
    del values["model_id"]
    return Step(**{**values, "more": dict(row.more or {})})


def _pass_metrics(result: bytes) -> tuple[Mapping[str, float], int]:
    try:
        return read_pass_metrics(result)
    except WireError:
        # Results are stored as the engine sent them; one that cannot be read must not be lost.
        return {}, 0


def _step_metrics(result: bytes) -> Mapping[str, float]:
    try:
        metrics = json.loads(result)["metrics"]
        return {str(name): float(value) for name, value in metrics.items()}
    except (ValueError, TypeError, KeyError, AttributeError):
        return {}


def _count(value: float) -> int:
    return int(value) if math.isfinite(value) else 0


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


# Built once: building a statement takes longer than SQLite takes to run it.
_NEWEST = (
    sa.select(step_metrics)
    .where(step_metrics.c.model_id == sa.bindparam("of_model"))
    .order_by(step_metrics.c.number.desc())
    .limit(1)
)
_DELETE = step_metrics.delete().where(
    step_metrics.c.model_id == sa.bindparam("of_model"),
    step_metrics.c.number == sa.bindparam("of_number"),
)
_KEY = ("model_id", "number")


def _upsert(insert: Any) -> Any:
    values = {c.name: insert.excluded[c.name] for c in step_metrics.c if c.name not in _KEY}
    return insert.on_conflict_do_update(index_elements=list(_KEY), set_=values)


_UPSERT = _upsert(postgresql.insert(step_metrics))
_SQLITE_UPSERT = str(_upsert(sqlite.insert(step_metrics)).compile(dialect=sqlite.dialect()))


def _sqlite_values(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """In the order of the columns, as the statement expects them."""
    more = row["more"]
    values = {**row, "more": None if more is None else json.dumps(more)}
    return tuple(values[column.name] for column in step_metrics.c)
