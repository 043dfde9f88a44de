"""
Which workers a fleet should have, and what to change for that. Knows neither Ray nor processes.

A fleet file is TOML, with a table for each base model:

    [[workers]]
    model = "Qwen/Qwen3-8B"
    replicas = 4

It has no secrets: each node knows the database and the storage from its own environment or settings
file, so that they never pass through Ray.
"""

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tinkex.server.settings import Settings, SettingsError, checked_value

_SECRET = "it may have a password, which would pass through Ray"
#: Settings that a group may not have, and why.
_REFUSED = {
    "db": _SECRET,
    "storage": _SECRET,
    "models": "the table has `model` for that",
    "name": "the fleet names its workers",
    "data": "each worker gets a folder of its own in the data folder of its node",
    **dict.fromkeys(
        (
            *("host", "port", "public_url", "link_s", "jwt", "jwt_s", "prices", "price_gb_month"),
            *("max_body_bytes", "max_decoded_bytes", "max_message_bytes", "max_arriving_bytes"),
            *("arriving_wait_s", "long_poll_s", "stream_grace_s", "metadata_only_bytes"),
            *("max_requests", "max_queued_tokens", "max_samples", "max_checkpoint_bytes"),
            *("max_checkpoints", "max_runs", "max_open", "max_connections", "head_s", "stall_s"),
        ),
        "only web processes use it",
    ),
}


class FleetError(ValueError):
    """The fleet file or its cluster cannot be used; `hint` says what to do."""

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


class WorkerGroup(BaseModel):
    """The workers of one base model: how many, and what each of them needs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    #: NAME, FOLDER or NAME=FOLDER, as for `tinkex worker`.
    model: str = Field(min_length=1)
    replicas: int = Field(default=1, ge=0)
    #: GPUs of each worker. A worker computes on one; a fraction lets several share one.
    gpus: float = Field(default=1.0, ge=0, le=1)
    cpus: float = Field(default=1.0, ge=0)
    #: Custom resources that a node must have, such as a kind of GPU.
    resources: dict[str, float] = {}
    #: Settings of `tinkex worker`, by name, except `_REFUSED`.
    settings: dict[str, str | int | float | bool] = {}

    @property
    def name(self) -> str:
        return self.model.partition("=")[0]

    @property
    def needs(self) -> str:
        """What a node must have free for one worker, in words."""
        parts = [("GPU", self.gpus), ("CPU", self.cpus), *self.resources.items()]
        return ", ".join(f"{amount:g} {what}" for what, amount in parts if amount)

    def runs_like(self, other: "WorkerGroup") -> bool:
        """Whether a worker of one group can stay if it now belongs to the other."""
        return self.model_copy(update={"replicas": 0}) == other.model_copy(update={"replicas": 0})


def read_fleet_file(path: Path) -> list[WorkerGroup]:
    """The groups of a fleet file."""
    try:
        values = tomllib.loads(path.read_text())
    except OSError as error:
        raise FleetError(
            f"the fleet file {path} cannot be read: {error.strerror}.", hint="Check its path."
        ) from None
    except ValueError as error:
        raise FleetError(
            f"{path} is not TOML: {error}.", hint='Begin with: [[workers]], model = "NAME"'
        ) from None
    groups = values.pop("workers", None)
    if values or not isinstance(groups, list):
        found = ", ".join(values) or "no table"
        raise FleetError(
            f"{path} has {found} where only tables [[workers]] are allowed.",
            hint="docs/guides/scale-out.md has an example.",
        )
    try:
        found_groups = [WorkerGroup.model_validate(group) for group in groups]
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise FleetError(
            f"{path}: {field} = {first['input']!r} is not allowed: {first['msg']}.",
            hint="docs/guides/scale-out.md lists the fields of [[workers]].",
        ) from None
    for group in found_groups:
        _check_settings(path, group)
    names = [group.name for group in found_groups]
    for name in names:
        if names.count(name) > 1:
            raise FleetError(
                f"{path} has several tables for {name}.", hint="Write one, with `replicas`."
            )
    return found_groups


def _check_settings(path: Path, group: WorkerGroup) -> None:
    """Refuse what every worker would refuse, and what must not pass through Ray."""
    source = f"{path}, settings of {group.name}"
    for name in group.settings:
        if name in _REFUSED:
            raise FleetError(
                f"{source}: {name} is not allowed: {_REFUSED[name]}.",
                hint=f"Set TINKEX_{name.upper()} in the environment of each node."
                if _REFUSED[name] == _SECRET
                else "Remove it.",
            )
    try:
        values = {
            name: checked_value(source, name, value) for name, value in group.settings.items()
        }
        Settings(**values).check(dict.fromkeys(values, source))
    except SettingsError as error:
        raise FleetError(str(error), hint=error.hint) from None


def worker_name(group: WorkerGroup, number: int) -> str:
    return f"{group.name}#{number}"


def model_of(worker: str) -> str:
    return worker.rpartition("#")[0]


def number_of(worker: str) -> int:
    return int(worker.rpartition("#")[2])


def is_worker_name(name: str) -> bool:
    return re.fullmatch(r".+#\d+", name) is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Changes:
    """What makes the running workers the wanted ones."""

    #: Names of workers to drain and end.
    stop: list[str]
    #: New workers, with their groups.
    start: dict[str, WorkerGroup]
    #: Workers to drain and start again, because they have other options than their group.
    replace: dict[str, WorkerGroup]


def changes(wanted: Iterable[WorkerGroup], running: Mapping[str, WorkerGroup | None]) -> Changes:
    """
    Compare. `running` has the group that each worker was started with, or None if that is unknown.

    The workers with the highest numbers leave first, and new ones get the lowest free numbers.
    """
    groups = {group.name: group for group in wanted}
    stop = [name for name in running if model_of(name) not in groups]
    start: dict[str, WorkerGroup] = {}
    replace: dict[str, WorkerGroup] = {}
    for group in groups.values():
        names = sorted((name for name in running if model_of(name) == group.name), key=number_of)
        stop += names[group.replicas :]
        kept = names[: group.replicas]
        for name in kept:
            had = running[name]
            if had is not None and not had.runs_like(group):
                replace[name] = group
        taken = {number_of(name) for name in names}
        free = (number for number in range(len(taken) + group.replicas) if number not in taken)
        for _ in range(group.replicas - len(kept)):
            start[worker_name(group, next(free))] = group
    return Changes(stop=stop, start=start, replace=replace)
