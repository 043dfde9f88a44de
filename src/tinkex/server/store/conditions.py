"""SQL conditions that several tables' queries share."""

import sqlalchemy as sa

from tinkex.server.store.schema import Status, checkpoint_names, models, requests, sessions


def name_is(model_id: str, kind: str, name: str | None) -> sa.ColumnElement[bool]:
    """SQL: the row of this name."""
    return sa.and_(
        checkpoint_names.c.model_id == model_id,
        checkpoint_names.c.kind == kind,
        checkpoint_names.c.name == name,
    )


def not_expired(now_s: float) -> sa.ColumnElement[bool]:
    """SQL: the name has not expired."""
    expires_s = checkpoint_names.c.expires_s
    return sa.or_(expires_s.is_(None), expires_s > now_s)


def has_published_checkpoint(now_s: float) -> sa.ColumnElement[bool]:
    """SQL: the model has a published checkpoint."""
    return sa.exists().where(
        checkpoint_names.c.model_id == models.c.model_id,
        checkpoint_names.c.public,
        not_expired(now_s),
    )


def was_created() -> sa.ColumnElement[bool]:
    """SQL: the model's creation did not fail. A failed one has a row for repeats, but is no run."""
    return sa.not_(
        sa.exists().where(
            requests.c.model_id == models.c.model_id,
            requests.c.seq_id == 0,
            requests.c.status == Status.FAILED,
        )
    )


def session_ended(abandoned_before_s: float) -> sa.ColumnElement[bool]:
    """SQL: the session was finished or abandoned."""
    return sa.or_(sessions.c.finished_s.is_not(None), sessions.c.seen_s < abandoned_before_s)
