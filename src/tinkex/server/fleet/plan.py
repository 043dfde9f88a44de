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
    #: Settings of `tinkex worker`, by name.
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
    names = [group.name for group in found_groups]
    for name in names:
        if names.count(name) > 1:
            raise FleetError(
                f"{path} has several tables for {name}.", hint="Write one, with `replicas`."
            )
    return found_groups


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
