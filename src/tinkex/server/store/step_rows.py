"""
Writes the table `step_metrics`, in the transaction that finishes the requests of a step.

A row is one optimizer step of a run, from number 1. Each `forward_backward` adds to the row of the
step in progress, and the `optim_step` completes it. A request finishes once, so a step is counted
once, however often an engine ran it. `forward` does not train and adds nothing.
`step_history` reads the table, and `retention` deletes the rows of runs that ended long ago.
"""

import itertools
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
#: Metrics of a step beside the ones with columns, characters of their names, and bytes of all.
MAX_MORE = 64
MAX_NAME_CHARS = 200
MAX_MORE_BYTES = 4096
#: All steps up to this one keep those metrics. Later ones are thinned, see `keeps_more`.
FULL_MORE_STEPS = 10_000
#: Larger numbers are stored as missing and smaller ones as 0: PostgreSQL refuses to compute means
#: whose squares are out of range.
LARGEST, SMALLEST = 1e100, 1e-100
#: No count of tokens is larger; sums of them fit a column.
MAX_COUNT = 2**53
#: Runs whose step in progress is kept in memory, so that finishing a step need not read it.
MAX_OPEN_STEPS = 1_000

#: Kinds of steps that change the gradients of their run.
RECORDED = frozenset({Kind.FORWARD_BACKWARD, Kind.OPTIM_STEP, Kind.LOAD_WEIGHTS})

_STATE = "step_metrics"


def is_kept(number: int) -> bool:
    """
    Whether the row of an older step is kept, so that a run has at most 200,000 rows.

    Every step up to 100,000 is; then every second one up to 200,000, every fourth up to 300,000,
    and so on. The newest step always has a row.
    """
    halvings = max(0, min((number - 1) // FULL_STEPS, 60))
    return number % (1 << halvings) == 0


def keeps_more(number: int) -> bool:
    """
    Whether an older step keeps its metrics without a column, which may be much longer than the row.

    Every step up to 10,000 does; then every second one up to 20,000, every fourth up to 40,000, and
    so on: the gaps grow with the run, and a curve keeps its shape. 200,000 steps keep 32,000.
    """
    halvings = (max(0, number - 1) // FULL_MORE_STEPS).bit_length()
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
    #: What `more` takes at most in JSON.
    more_bytes: int = 0
    #: The examples behind each mean in `more`; not every pass has every metric.
    mean_examples: dict[str, int] = field(default_factory=dict)

    def add_pass(self, metrics: Mapping[str, float], examples: int, compute_s: float) -> None:
        self.passes += 1
        self.compute_s += compute_s
        # Sorted, so that all steps keep the same ones if there are too many.
        for name, value in sorted(metrics.items()):
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
        for name, value in sorted(metrics.items()):
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
        kind = name.rpartition(":")[2]
        before = self.more.get(name)
        if before is None:
            needed = self.more_bytes + _json_bytes(name)
            has_room = len(self.more) < MAX_MORE and needed <= MAX_MORE_BYTES
            if has_room and len(name) <= MAX_NAME_CHARS:
                self.more[name], self.more_bytes = value, needed
                if kind == "mean":
                    self.mean_examples[name] = examples
            return
        match kind:
            case "sum":
                self.more[name] = before + value
            case "min":
                self.more[name] = min(before, value)
            case "max":
                self.more[name] = max(before, value)
            case "mean" if total := (behind := self.mean_examples.get(name, 0)) + examples:
                self.more[name] = (before * behind + value * examples) / total
                self.mean_examples[name] = total
            case _:
                self.more[name] = value

    def row(self, model_id: str) -> dict[str, Any]:
        """What is stored. Databases and JSON have no common NaN and infinity: they become NULL."""
        finite = {name: value for name, value in self.more.items() if math.isfinite(value)}
        more: dict[str, Any] = finite
        if self.finished_s is None:
            # The next pass needs more than the numbers, also after a restart.
            parts = (
                ("values", finite),
                ("mean_examples", self.mean_examples),
                ("not_finite", self._not_finite()),
            )
            more = {name: part for name, part in parts if part}
        return {
            "model_id": model_id,
            "number": self.number,
            "finished_s": self.finished_s,
            "passes": self.passes,
            "examples": self.examples,
            "tokens": min(self.tokens, MAX_COUNT),
            "loss_tokens": min(self.loss_tokens, MAX_COUNT),
            "loss_sum": _stored(self.loss_sum),
            "entropy_sum": _stored(self.entropy_sum),
            "learning_rate": _stored(self.learning_rate),
            "grad_norm": _stored(self.grad_norm),
            "update_norm": _stored(self.update_norm),
            "compute_s": self.compute_s,
            "more": more or None,
        }

    def _not_finite(self) -> dict[str, str]:
        """The sums and metrics that `row` cannot store as numbers, as text that `float` reads."""
        sums = {"loss:sum": self.loss_sum, "entropy:sum": self.entropy_sum}
        odd = {name: value for name, value in sums.items() if value != _stored(value)}
        odd |= {name: value for name, value in self.more.items() if not math.isfinite(value)}
        return {name: str(value) for name, value in odd.items()}

    @classmethod
    def unfinished(cls, row: Mapping[str, Any]) -> "Step":
        """The step in progress as `row` stored it."""
        values = {name: value for name, value in row.items() if name not in ("model_id", "more")}
        saved = row["more"] or {}
        odd = {name: float(text) for name, text in saved.get("not_finite", {}).items()}
        for name, column in (("loss:sum", "loss_sum"), ("entropy:sum", "entropy_sum")):
            if name in odd:
                values[column] = odd.pop(name)
        more = {**saved.get("values", {}), **odd}
        return cls(
            **values,
            more=more,
            more_bytes=sum(map(_json_bytes, more)),
            mean_examples=dict(saved.get("mean_examples", {})),
        )


@dataclass(slots=True)
class _State:
    """What the connection of the writer remembers; forgotten with a transaction that failed."""

    #: The step in progress of each run.
    open: dict[str, Step] = field(default_factory=dict)
    #: Rows to write before the commit, by run and number; None deletes the row.
    changed: dict[tuple[str, int], Step | None] = field(default_factory=dict)
    #: Older rows that lose the metrics without a column.
    thinned: list[tuple[str, int]] = field(default_factory=list)


def record_step(connection: sa.Connection, request: QueuedRequest, outcome: Outcome) -> None:
    """Note what a step that failed, or one of `RECORDED`, means for its run."""
    model_id, kind = request.model_id, request.kind
    if model_id is None:
        return
    clears = kind is Kind.LOAD_WEIGHTS
    if outcome.error is not None:
        # As for a rebuild: see `step_queue.replay_of`.
        clears = outcome.cause is Cause.GAP or (
            kind is Kind.OPTIM_STEP and outcome.cause is not Cause.LATE
        )
        if not clears:
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
        elif not keeps_more(step.number - 1):
            state.thinned.append((model_id, step.number - 1))
        _keep_open(state, model_id, Step(step.number + 1))


def write_steps(connection: sa.Connection) -> None:
    """Write the rows of this transaction, right before it commits."""
    state: _State | None = connection.info.get(_STATE)
    if state is None:
        return
    changed, state.changed = state.changed, {}
    thinned, state.thinned = state.thinned, []
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
    if thinned:
        keys = [{"of_model": model_id, "of_number": number} for model_id, number in thinned]
        connection.execute(_THIN, keys)
    # Not earlier: a step that is not written could not be read again.
    too_many = len(state.open) - MAX_OPEN_STEPS
    for model_id in list(itertools.islice(state.open, max(0, too_many))):
        del state.open[model_id]


def forget_run(connection: sa.Connection, model_id: str) -> None:
    """Read the step in progress of a run again: another process may have written it."""
    state: _State | None = connection.info.get(_STATE)
    if state is not None:
        state.open.pop(model_id, None)


def forget_steps(connection: sa.Connection) -> None:
    """The transaction was rolled back: what it noted did not happen."""
    connection.info.pop(_STATE, None)


def _keep_open(state: _State, model_id: str, step: Step) -> None:
    state.open.pop(model_id, None)
    state.open[model_id] = step


def _read_open(connection: sa.Connection, model_id: str) -> Step:
    """The step in progress: the newest row if it is not finished, or else the next number."""
    row = connection.execute(_NEWEST, {"of_model": model_id}).first()
    if row is None:
        return Step(1)
    if row.finished_s is not None:
        return Step(row.number + 1)
    return Step.unfinished(dict(row._mapping))


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
    return int(value) if 0 <= value <= MAX_COUNT else 0


def _stored(value: float | None) -> float | None:
    if value is None or not abs(value) <= LARGEST:
        return None
    return value if abs(value) >= SMALLEST else 0.0


def _json_bytes(name: str) -> int:
    """What a metric takes in JSON at most: its name, a number of 24 characters, and `: , `."""
    return len(json.dumps(name)) + 28


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
_THIN = (
    step_metrics.update()
    .where(
        step_metrics.c.model_id == sa.bindparam("of_model"),
        step_metrics.c.number == sa.bindparam("of_number"),
    )
    .values(more=None)
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
