"""Arguments checked before anything is sent, in words that say what is allowed. Pure."""

from __future__ import annotations

from datetime import UTC, date, datetime
from typing import Literal, get_args
from urllib.parse import quote

from tinkex.wire.checkpoints import ParsedCheckpointTinkerPath

AccessScope = Literal["owned", "accessible"]
AuditEvents = Literal["all", "checkpoints", "projects", "teams", "organizations"]


def segment(name: str, value: object) -> str:
    """An id as one part of a path: quoted, so that it can be nothing but an id."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{name} is {value!r}: it must be a text that is not empty.")
    if value in (".", ".."):  # quoting leaves them, and they mean another path
        raise ValueError(f"{name} is {value!r}, which no id can be.")
    return quote(value, safe=":")


def segments(name: str, value: object) -> str:
    """`weights/0001`: each part by itself."""
    parts = value.split("/") if isinstance(value, str) else [value]
    return "/".join(segment(name, part) for part in parts)


def check_tinker_path(path: str) -> None:
    """Weights are named by what a save returned."""
    if not path.startswith("tinker://"):
        raise ValueError(
            f"{path!r} is not a path of saved weights: it must start with 'tinker://', as "
            "save_state() and save_weights_for_sampler() return it."
        )


def checkpoint_at(tinker_path: object) -> tuple[str, str]:
    """Run and checkpoint of a `tinker://` path."""
    parsed = ParsedCheckpointTinkerPath.from_tinker_path(str(tinker_path))
    return parsed.training_run_id, parsed.checkpoint_id


def checkpoint_url(training_run_id: str, checkpoint_id: str) -> str:
    """Where a checkpoint is asked for."""
    run = segment("training_run_id", training_run_id)
    return f"training_runs/{run}/checkpoints/{segments('checkpoint_id', checkpoint_id)}"


def scope(value: str) -> str:
    return one_of("access_scope", value, get_args(AccessScope))


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}.")
    return value


def count(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} is {value!r}; it must be a whole number, 0 or more.")
    return value


def ttl(value: object) -> int | None:
    """The range is the service's to check; that it is a number of seconds is checked here."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ValueError(
            f"ttl_seconds is {value!r}; it must be a whole number of seconds above zero, "
            "or None for a checkpoint that does not expire."
        )
    return value


def day(value: object) -> str | None:
    """A date, or the text of one; a time is refused, since it may mean another day in UTC."""
    try:
        return None if value is None else date.fromisoformat(str(value)).isoformat()
    except ValueError:
        raise ValueError(
            f"day is {value!r}; it must be a datetime.date, such as date(2026, 1, 31)."
        ) from None


def moment(name: str, value: object) -> datetime:
    """A time with a zone; one without is meant as UTC."""
    try:
        found = value if isinstance(value, datetime) else datetime.fromisoformat(str(value))
    except ValueError:
        raise ValueError(
            f"{name} is {value!r}; it must be a time, such as '2026-01-31T15:00Z'."
        ) from None
    return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
