"""The folder of a run of `tinkex train`: what it has done, so that it can go on after a kill."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinkex import file_locks
from tinkex.cli.errors import CommandFailed
from tinkex.durable_files import write_file
from tinkex.recipes.common import Resume, Step

FILE, LOCK = "run.json", "run.lock"


@dataclass(kw_only=True)
class TrainState:
    """A run, as it is at its last checkpoint on disk, and beyond that in memory."""

    folder: Path
    #: Of the plan. A run goes on only with the same settings and the same data.
    settings: Mapping[str, Any]
    #: The metrics of each step, and of step 0 before training.
    history: list[dict[str, float]] = field(default_factory=list)
    checkpoint: str | None = None
    #: Steps that the checkpoint has.
    step: int = 0
    sampler: str | None = None
    before: list[str] | None = None
    after: list[str] | None = None

    @property
    def finished(self) -> bool:
        return self.step == self.settings["steps"] and self.sampler is not None

    @property
    def resume(self) -> Resume | None:
        if self.checkpoint is None:
            return None
        return Resume(checkpoint=self.checkpoint, step=self.step)

    def add(self, step: Step) -> None:
        self.history.append({"step": step.number, "tokens": step.tokens, **step.metrics})
        if step.checkpoint is not None:
            self.checkpoint, self.step = step.checkpoint, step.number
            self.sampler = step.sampler

    def curve(self, metric: str) -> tuple[list[int], list[float]]:
        """The steps at which a metric was measured, and its values."""
        found = [(int(row["step"]), row[metric]) for row in self.history if metric in row]
        return [step for step, _ in found], [value for _, value in found]

    def save(self) -> None:
        """Write the file. It is replaced in one step, so a kill leaves the one before."""
        fields = {name: getattr(self, name) for name in _FIELDS}
        write_file(self.folder / FILE, json.dumps(fields, indent=1).encode())

    @classmethod
    def load(cls, folder: Path) -> TrainState | None:
        """The run in a folder; None if there is none."""
        file = folder / FILE
        if not file.exists():
            return None
        try:
            fields = json.loads(file.read_text(encoding="utf-8"))
            return cls(folder=folder, **{name: fields[name] for name in _FIELDS})
        except (ValueError, KeyError, TypeError) as error:
            raise CommandFailed(
                f"{file} cannot be read: {error}.", hint="--restart begins anew."
            ) from error

    def check(self, settings: Mapping[str, Any]) -> None:
        """Refuse to go on with other settings or data than the run began with."""
        now = json.loads(json.dumps(settings))
        for name in {**self.settings, **now}:
            was, given = self.settings.get(name), now.get(name)
            if was != given:
                what = f"{name} {was!r}, not {given!r}"
                if name.startswith("content of "):
                    what = f"another {name}"
                raise CommandFailed(
                    f"{self.folder} has a run with {what}.",
                    hint="Use the same settings and data, another --output, or --restart.",
                )


_FIELDS = ("settings", "history", "checkpoint", "step", "sampler", "before", "after")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep a second `tinkex train` out of the folder. The lock ends with the process."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("wb") as file:
        if not file_locks.try_lock(file):
            raise CommandFailed(
                f"another `tinkex train` is using {folder}.", hint="Use another --output."
            )
        yield
