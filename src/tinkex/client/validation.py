"""Validates arguments before anything is sent; errors say what is allowed. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, date, datetime
from typing import Literal, get_args
from urllib.parse import quote

from tinkex.wire.checkpoints import ParsedCheckpointTinkerPath
from tinkex.wire.inputs import Datum, ModelInput
from tinkex.wire.tensors import TensorData

AccessScope = Literal["owned", "accessible"]
AuditEvents = Literal["all", "checkpoints", "projects", "teams", "organizations"]


def segment(name: str, value: object) -> str:
    """An id as one path segment, quoted."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{name} is {value!r}; it must be a non-empty string.")
    if value in (".", ".."):  # not changed by quoting, and they mean another path
        raise ValueError(f"{name} is {value!r}, which is not a valid id.")
    return quote(value, safe=":")


def segments(name: str, value: object) -> str:
    """`weights/0001`: each segment quoted by itself."""
    parts = value.split("/") if isinstance(value, str) else [value]
    return "/".join(segment(name, part) for part in parts)


def check_tinker_path(path: str) -> None:
    """Check that a path is one that a save returned."""
    if not path.startswith("tinker://"):
        raise ValueError(
            f"{path!r} is not a path of saved weights: it must start with 'tinker://', as returned "
            "by save_state() and save_weights_for_sampler()."
        )


def checkpoint_at(tinker_path: object) -> tuple[str, str]:
    """The run id and checkpoint id of a `tinker://` path."""
    parsed = ParsedCheckpointTinkerPath.from_tinker_path(str(tinker_path))
    return parsed.training_run_id, parsed.checkpoint_id


def checkpoint_url(training_run_id: str, checkpoint_id: str) -> str:
    """The API path of a checkpoint."""
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


def page(limit: object, offset: object) -> dict[str, int]:
    return {"limit": count("limit", limit), "offset": count("offset", offset)}


def points(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 2 <= value <= 10_000:
        raise ValueError(f"points is {value!r}; it must be a whole number from 2 to 10,000.")
    return value


def ttl(value: object) -> int | None:
    """Checks the type only; the service checks the range."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ValueError(
            f"ttl_seconds is {value!r}; it must be a whole number of seconds above zero, "
            "or None for a checkpoint that does not expire."
        )
    return value


def day(value: object) -> str | None:
    """A date, or its text. A time is refused, since it may be another day in UTC."""
    try:
        return None if value is None else date.fromisoformat(str(value)).isoformat()
    except ValueError:
        raise ValueError(
            f"day is {value!r}; it must be a datetime.date, such as date(2026, 1, 31)."
        ) from None


def moment(name: str, value: object) -> datetime:
    """A time with a zone; UTC if it has none."""
    try:
        found = value if isinstance(value, datetime) else datetime.fromisoformat(str(value))
    except ValueError:
        raise ValueError(
            f"{name} is {value!r}; it must be a time, such as '2026-01-31T15:00Z'."
        ) from None
    return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)


def batch(data: object) -> list[Datum]:
    """Snapshots of the examples of a pass: the caller may change its own objects later."""
    return [snapshot(datum) for datum in examples(data)]


def examples(data: object) -> list[Datum]:
    """The examples of a pass, validated: the caller's own objects."""
    if not isinstance(data, Iterable) or isinstance(data, str | bytes | Mapping):
        raise TypeError(f"data is a {type(data).__name__}; a pass takes a list of Datum.")
    found = list(data)
    if not found:
        raise ValueError("data is empty: a pass needs at least one Datum.")
    for index, datum in enumerate(found):
        if not isinstance(datum, Datum):
            raise TypeError(
                f"data[{index}] is a {type(datum).__name__}; a pass takes a list of Datum."
            )
        for chunk in datum.model_input.chunks:
            if chunk.type == "image_asset_pointer":
                raise ValueError(
                    f"data[{index}] contains an ImageAssetPointerChunk, which a training pass does "
                    "not support. Send the image itself as an ImageChunk."
                )
    return found


def snapshot(datum: Datum) -> Datum:
    """The same datum with its own dict; the tensors in it are immutable."""
    inputs = datum.loss_fn_inputs
    for value in inputs.values():
        if type(value) is not TensorData:
            return replace(datum)  # converts values that were added after construction to tensors
    # Without the constructor, for speed: everything was validated before.
    own, put = object.__new__(type(datum)), object.__setattr__
    put(own, "model_input", datum.model_input)
    put(own, "loss_fn_inputs", inputs.copy())
    put(own, "model_input_spans", datum.model_input_spans)
    put(own, "loss_fn_input_spans", datum.loss_fn_input_spans)
    return own


def loss_name(loss_fn: object) -> None:
    """Checks the type only; the name is validated with the request."""
    if not isinstance(loss_fn, str):
        raise TypeError(
            f"loss_fn is a {type(loss_fn).__name__}; it must be the name of a loss, such as "
            "'cross_entropy'. For a custom loss use forward_backward_custom()."
        )


def loss_config(config: object) -> dict[str, float | str] | None:
    """The settings of a loss as sent: numbers and strings."""
    if not config:
        return None
    if not isinstance(config, Mapping):
        raise TypeError(f"loss_fn_config is a {type(config).__name__}; it must be a dict.")
    found: dict[str, float | str] = {}
    for name, value in config.items():
        try:
            found[name] = value if isinstance(value, str) else float(value)
        except (TypeError, ValueError):
            raise TypeError(
                f"loss_fn_config[{name!r}] is a {type(value).__name__}; "
                "it must be a number or a string."
            ) from None
    return found


def prompt(value: object) -> ModelInput:
    """A prompt as ModelInput. A string is not accepted: it needs a tokenizer first."""
    if isinstance(value, ModelInput):
        return value
    if isinstance(value, Mapping):  # from `model_dump`
        return ModelInput.model_validate(value)
    raise TypeError(
        f"prompt is a {type(value).__name__}; it must be a ModelInput: "
        "ModelInput.from_ints(tokens), or ModelInput.from_text(text, tokenizer)."
    )
