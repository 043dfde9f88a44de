"""Finishing requests inside a transaction: once each, with all that is counted and told by it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import sqlalchemy as sa

from tinkex.server.store import tally
from tinkex.server.store.among import among, listed
from tinkex.server.store.status import Status
from tinkex.server.store.tables import completions, requests

# Each copy of a sampling client numbers its samples from its own number times this.
SAMPLES_OF_A_CLONE = 10**9


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """The event that a sample has finished, in the log of the client that asked for it."""

    sampling_session_id: str
    clone_id: int
    position: int
    request_id: str
    #: None when it failed.
    result_bytes: int | None


@dataclass(frozen=True, slots=True)
class Ending:
    """What is written of a request that is over."""

    #: The columns, with the request's id as `finished`.
    values: dict[str, Any]
    #: None when it failed.
    result: bytes | None


# What is counted, and told to clients, of a request that is over.
_FINISHED = (
    requests.c.owner,
    requests.c.session_id,
    requests.c.base_model,
    requests.c.kind,
    requests.c.tokens,
    requests.c.sampling_session_id,
    requests.c.seq_id,
)
# Built once: putting a statement together costs more than SQLite takes to run it.
_FINISH_EACH = requests.update().where(
    requests.c.request_id == sa.bindparam("finished"), requests.c.status == Status.WAITING
)
_FINISH = _FINISH_EACH.returning(*_FINISHED)
# The same for many at once: who of them waits, and then the step of each.
# Whoever waits is told apart here: SQLite would look for them among all who wait.
_CHOSEN = sa.select(requests.c.request_id, requests.c.status, *_FINISHED).where(
    among(requests.c.request_id, sa.bindparam("finished", type_=sa.Text))
)
_COMPLETE = completions.insert().returning(completions.c.position, sort_by_parameter_order=True)


def set_done(
    connection: sa.Connection,
    request_id: str,
    result: bytes,
    *,
    version_id: str,
) -> None:
    """Store a result, and which version it is about, inside a transaction."""
    ending = success(request_id, result, None)
    finish(connection, replace(ending, values={**ending.values, "version_id": version_id}))


def success(request_id: str, result: bytes, place: str | None) -> Ending:
    """With the place of a large result, which is on disk already."""
    values = {
        "finished": request_id,
        "status": Status.DONE,
        "result": result if place is None else None,
        "result_place": place,
        "result_bytes": len(result),
        "error": None,
        "category": None,
        "cause": None,
        "finished_s": time.time(),
    }
    return Ending(values, result)


def failure(request_id: str, error: str, *, category: str, cause: str) -> Ending:
    """Whose fault it was, and why it failed."""
    values = {
        "finished": request_id,
        "status": Status.FAILED,
        "result": None,
        "result_place": None,
        "result_bytes": None,
        "error": error,
        "category": category,
        "cause": cause,
        "finished_s": time.time(),
    }
    return Ending(values, None)


def finish(connection: sa.Connection, ending: Ending) -> Completion | None:
    """The one step from waiting to finished, with everything that is counted by it."""
    row = connection.execute(_FINISH, ending.values).first()
    return _finished(connection, [ending], [row])[0]


def finish_many(
    connection: sa.Connection, endings: Sequence[Ending]
) -> Sequence[Completion | None]:
    """The same for many, with few statements. The first of two endings of a request counts."""
    if len(endings) == 1:
        return [finish(connection, endings[0])]
    ids = [ending.values["finished"] for ending in endings]
    chosen = connection.execute(_CHOSEN, {"finished": listed(ids)})
    waiting = {row.request_id: row for row in chosen if row.status == Status.WAITING}
    rows = [waiting.pop(request_id, None) for request_id in ids]
    steps = [ending.values for ending, row in zip(endings, rows, strict=True) if row is not None]
    if steps:
        connection.execute(_FINISH_EACH, steps)
    return _finished(connection, endings, rows)


def _finished(
    connection: sa.Connection,
    endings: Sequence[Ending],
    rows: Sequence[sa.Row[*tuple[Any, ...]] | None],
) -> list[Completion | None]:
    """Count what was just finished, and tell the clients; None was finished before."""
    events: list[dict[str, Any] | None] = []
    for ending, row in zip(endings, rows, strict=True):
        if row is not None and ending.result is not None:
            tally.count(
                connection,
                owner=row.owner,
                session_id=row.session_id,
                base_model=row.base_model,
                kind=row.kind,
                tokens=row.tokens,
                result=ending.result,
            )
        events.append(None if row is None else _event(ending, row))
    new = [event for event in events if event is not None]
    positions = iter(connection.scalars(_COMPLETE, new) if new else ())
    return [None if event is None else _completion(next(positions), event) for event in events]


def _completion(position: int, event: dict[str, Any]) -> Completion:
    told = {name: value for name, value in event.items() if name != "at_s"}
    return Completion(position=position, **told)


def _event(ending: Ending, row: sa.Row[*tuple[Any, ...]]) -> dict[str, Any] | None:
    """What the log of a sampling client says of its sample; None for anything else."""
    if row.sampling_session_id is None or row.seq_id is None:
        return None
    return {
        "sampling_session_id": row.sampling_session_id,
        "clone_id": row.seq_id // SAMPLES_OF_A_CLONE,
        "request_id": ending.values["finished"],
        "result_bytes": None if ending.result is None else len(ending.result),
        "at_s": ending.values["finished_s"],
    }
